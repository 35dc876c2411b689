"""Samples of questions with one answer: one in a row, or several packed into one that see nothing of each other."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ftk.tasks.answering.asking import Asking
from ftk.tasks.answering.questions import EncodedQuestion


class AnswerDataset:
    """A sample for each question, every epoch the same ones.

    Args:
        by_sample: whether each answer counts alike, whatever its length; else each of its tokens does.

    Attributes:
        questions: as ftk-generate asks them.
    """

    def __init__(self, asking: Asking, encoded: Sequence[EncodedQuestion], by_sample: bool = False) -> None:
        self.asking, self.encoded, self.by_sample = asking, encoded, by_sample
        self.questions = AskedQuestions(asking, encoded)
        self._sizes = np.array([self._size(question) for question in encoded], dtype=np.int32)

    def __len__(self) -> int:
        return len(self.encoded)

    def sizes(self, epoch: int) -> NDArray[np.int32]:
        """Tokens of each sample; of an encoder-decoder's source or target, whichever is longer. int32 [len]"""
        return self._sizes

    def sample(self, epoch: int, index: int) -> dict[str, NDArray[Any]]:
        """One sample, see `answer_sample`; with `loss_weights` float32 [T] where each answer counts alike."""
        question = self.encoded[index]
        before, behind, answer = (ids.tolist() for ids in (question.before, question.behind, question.answer))
        sample = self.asking.sample(before, behind, answer)
        if self.by_sample:
            learned = sample["loss_mask"]
            sample["loss_weights"] = learned.astype(np.float32) / np.float32(learned.sum())
        return sample

    def _size(self, question: EncodedQuestion) -> int:
        asked, answer = len(question.before) + len(question.behind), len(question.answer)
        of_question, of_row = self.asking.added(len(question.behind) > 0, question.is_whole)
        return max(asked + of_question, answer + of_row) if self.asking.is_apart else asked + answer + of_row


class AskedQuestions(Sequence[Mapping[str, Any]]):
    """Questions as they are asked: `prompt`, `answer` (token ids with the end), and of `EncodedQuestion` `shown`,
    `reference`, `was_cut`, `number`.

    Args: as of `AnswerDataset`.
    """

    def __init__(self, asking: Asking, encoded: Sequence[EncodedQuestion]) -> None:
        self.asking, self.encoded = asking, encoded

    def __len__(self) -> int:
        return len(self.encoded)

    def __getitem__(self, index: Any) -> Any:
        question = self.encoded[index]
        return {
            "prompt": self.asking.prompt(question.before.tolist(), question.behind.tolist()),
            "answer": question.answer.tolist(),
            "shown": question.shown,
            "reference": question.reference,
            "was_cut": question.was_cut,
            "number": question.number,
        }


class PackedAnswers:
    """Several samples in each row, every epoch the same ones.

    Args:
        dataset: of a model that reads question and answer in one row.
        length: most tokens of a row; a longer sample is a row of its own.
    """

    def __init__(self, dataset: AnswerDataset, length: int) -> None:
        self.dataset, self.questions = dataset, dataset.questions
        sizes = dataset.sizes(1)
        self.rows = best_fit(sizes.tolist(), length)
        self._sizes = np.array([sizes[row].sum() for row in self.rows], dtype=np.int32)

    def __len__(self) -> int:
        return len(self.rows)

    def sizes(self, epoch: int) -> NDArray[np.int32]:
        """Tokens of each row, int32 [len]."""
        return self._sizes

    def sample(self, epoch: int, index: int) -> dict[str, NDArray[Any]]:
        """One row, see `joined`."""
        return joined([self.dataset.sample(epoch, number) for number in self.rows[index]])


def best_fit(sizes: Sequence[int], length: int) -> list[list[int]]:
    """The numbers of things in each row: from the largest on, each is put into the fullest row that has room for it.

    Args:
        sizes: of the things.
        length: of a row.
    """
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # left in each row, and its number; sorted
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        place = bisect.bisect_left(room, (sizes[number], -1))
        if place == len(room):
            left, row = length, len(rows)
            rows.append([])
        else:
            left, row = room.pop(place)
        rows[row].append(number)
        bisect.insort(room, (left - sizes[number], row))
    return [sorted(row) for row in rows]


def joined(samples: Sequence[Mapping[str, NDArray[Any]]]) -> dict[str, NDArray[Any]]:
    """Samples as one row, in which each has the hidden states that it has alone.

    `document_ids` keep them apart, and positions are those of the samples. What all tokens of a sample see
    (`context_length`) comes first, of all samples, and then the rest of each, so that one number says how long it is.

    Args:
        samples: of `answer_sample`, without a source of their own.

    Returns:
        the same arrays, and document_ids int64 [T].
    """
    ends = [int(sample.get("context_length", 0)) for sample in samples]
    numbered = [
        {**sample, "document_ids": np.full(len(sample["tokens"]), number)} for number, sample in enumerate(samples)
    ]
    row = {}
    for name, first in numbered[0].items():
        if np.ndim(first):
            pairs = [(sample[name], end) for sample, end in zip(numbered, ends, strict=True)]
            parts = [*(array[..., :end] for array, end in pairs), *(array[..., end:] for array, end in pairs)]
            row[name] = np.concatenate(parts, axis=-1)
    if "context_length" in samples[0]:
        row["context_length"] = np.array(sum(ends))
    return row
