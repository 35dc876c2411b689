"""Classifies texts: texts in, each with its label and the label's probability out."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ftk.data.batches.collate import padded
from ftk.data.supervised.labelled import MULTIPLE_CHOICE, REGRESSION, TOKEN_LABELS, LabelledText
from ftk.errors import UserError
from ftk.generation.engine.engine import Engine
from ftk.generation.engine.reading import to_device
from ftk.generation.engine.request import Event, Request
from ftk.generation.engine.scoring import Scored
from ftk.generation.one_pass import ClassifyConfig
from ftk.generation.processors.steering import PromptOptions
from ftk.generation.results import EncodedText, TextAnswer, TextResult
from ftk.generation.search import Answer, not_finite
from ftk.generation.streaming import OnePassStream
from ftk.generation.text import TextGenerator, check_text
from ftk.modules.evaluation_mode import evaluation_mode

if TYPE_CHECKING:
    from ftk.tasks.classification.reading import EncodedRow, TextReader
    from ftk.tokenizers.base import Tokenizer


_CUT = "is longer than what the model reads, and was cut", "are longer than what the model reads, and were cut"


class Found(NamedTuple):
    """What a model says of a text.

    Attributes:
        scores: float32 [n, K]: logarithms of the probabilities of labels or choices, or a number; n is the number of
            words that are read where words are labelled, else 1.
        num_tokens: that it reads, at most of one pair of texts.
        was_cut: whether the text lost tokens.
    """

    scores: NDArray[np.float32]
    num_tokens: int
    was_cut: bool


@dataclass(frozen=True)
class TextToClassify(EncodedText):
    """A text that is classified; the request's prompt is the `EncodedRow`."""

    text: LabelledText = LabelledText(())


class TextClassifier(TextGenerator[TextToClassify]):
    """A model with its tokenizer and its head: texts are labelled.

        classifier = ftk.load_generator("run", nbest=2)
        classifier.generate("A warm film.").answers[0].probability

    A line holds the texts, and behind them the choices, with tabs between; where words are labelled, words.

    Args:
        tokenizer: the one that the model was trained with.
        model: with a classifier for its head.

    Raises:
        UserError: tokenizer and model do not fit each other; there are several models.
    """

    example: ClassVar[str] = "a text"
    invitation = "Write a text"
    needs_framing: ClassVar[bool] = False

    def __init__(
        self, tokenizer: Tokenizer, model: nn.Module, framing: TextReader, config: ClassifyConfig, steering: None
    ) -> None:
        if hasattr(model, "members"):
            raise UserError("an ensemble is of models that write texts; give one model that classifies")
        super().__init__(tokenizer, model, framing, config, None)
        self.rows, self._pad = framing.rows, tokenizer.special.pad or 0

    def encode(
        self, prompt: str, options: PromptOptions | None = None, seed: int | None = None, *, check: bool = True
    ) -> TextToClassify:
        check_text(prompt)
        if options:
            raise UserError(f"a text is classified without options of its own; leave out {', '.join(options)}")
        text = self.rows.of_prompt(prompt)
        (encoded,) = self.framing.encode([text])
        remark = _CUT if encoded.was_cut else None
        return TextToClassify(prompt, Request(encoded, self.config), remark=remark, text=text)

    def encode_candidates(self, prompt: str, candidates: Sequence[Sequence[str]], end: bool) -> TextToClassify:
        raise UserError("a classifier gives all its labels their probabilities (`nbest`); no others are scored")

    def scored(self, prompt: TextToClassify, candidate: Any, found: Scored) -> list[TextAnswer]:
        raise UserError("a classifier scores no answers that are given")

    def engine(self, requests: Sequence[Request]) -> Engine:
        raise UserError("a classifier writes no answers token by token; it labels texts ('generate')")

    def events(self, requests: Sequence[Request], *, stream: bool = False) -> Generator[Event, None, None]:
        """The answers of each request, one for each word where words are labelled, and then that it is done."""
        for start in range(0, len(requests), self.config.batch_size):
            block = requests[start : start + self.config.batch_size]
            for number, found in enumerate(self._found([question.prompt for question in block]), start=start):
                for place, scores in enumerate(found.scores):
                    yield Event(number, "answer", place, answer=self._answer(scores))
                yield Event(number, "done")

    def result(self, prompt: TextToClassify, answers: Sequence[Answer]) -> TextResult:
        found = [self.described(prompt.text, answer) for answer in answers]
        if self.rows.kind != TOKEN_LABELS:
            label = found[0].text
            text = label if self.rows.kind == REGRESSION else f"{label}  {found[0].probability:.4f}"
            return TextResult(prompt.prompt, text, found, ((0, len(label)),))
        text, spans, words = "", [], prompt.text.texts
        for word, answer in zip(words, found, strict=False):  # words that were cut have no label
            start = len(text) + len(word) + 1
            spans.append((start, start + len(answer.text)))
            text += f"{word}/{answer.text} "
        text += " ".join(words[len(found) :])
        return TextResult(prompt.prompt, text.rstrip(), found, tuple(spans))

    def described(self, asked: LabelledText, answer: Answer) -> TextAnswer:
        """A label with its name, or a number.

        Args:
            answer: its only token is the label's number; a number has none.
        """
        names = asked.choices if self.rows.kind == MULTIPLE_CHOICE else self.rows.labels
        name = names[answer.tokens[0]] if answer.tokens else f"{answer.score:.6g}"
        others = tuple(self.described(asked, other) for other in answer.others)
        return TextAnswer(name, (), answer.token_logprobs, answer.score, others)

    def text_stream(self, number: int, prompt: TextToClassify) -> OnePassStream:
        described = functools.partial(self.described, prompt.text)
        count = max(1, len(prompt.request.prompt.words))
        return OnePassStream(number, count, described, functools.partial(self.result, prompt))

    def scored_labels(
        self, texts: Sequence[LabelledText], progress: Callable[[int], object] | None = None
    ) -> list[Found]:
        """What the model says of texts; texts of like length are read together.

        Args:
            progress: called with the number of texts that are done since the last call.

        Raises:
            UserError: a text has no token, or a score is NaN or infinite.
        """
        return self._found(self.framing.encode(texts), progress)

    def _found(self, encoded: Sequence[EncodedRow], progress: Callable[[int], object] | None = None) -> list[Found]:
        order = sorted(range(len(encoded)), key=lambda number: encoded[number].num_tokens, reverse=True)
        found: dict[int, Found] = {}
        for start in range(0, len(order), self.config.batch_size):
            numbers = order[start : start + self.config.batch_size]
            read = [self.framing.read(encoded[number]) for number in numbers]
            for number, scores in zip(numbers, self._scores(read), strict=True):
                found[number] = Found(scores, encoded[number].num_tokens, encoded[number].was_cut)
            if progress is not None:
                progress(len(numbers))
        return [found[number] for number in range(len(encoded))]

    @torch.inference_mode()
    def _scores(self, read: Sequence[tuple[Sequence[Any], Sequence[tuple[int, int]]]]) -> list[NDArray[np.float32]]:
        """The scores of texts, each [n, K], from what `TextReader.read` gives for them."""
        model: Any = self.model
        device = next(model.parameters()).device
        arrays = padded([row for rows, _ in read for row in rows], self._pad)
        first = np.cumsum([0, *(len(rows) for rows, _ in read)])  # rows before those of each text
        where = np.array(
            [(before + row, place) for before, (_, own) in zip(first, read, strict=False) for row, place in own]
        )  # [N, 2]
        with evaluation_mode(model):
            hidden = model.hidden_states(**{name: to_device(array, device) for name, array in arrays.items()})
            rows, places = (to_device(column, device) for column in where.T)
            scores = model.head(hidden[rows, places]).float()  # [N, K]
        counts = [len(own) for _, own in read]
        if not scores.isfinite().all():
            raise not_finite()
        if self.rows.kind == MULTIPLE_CHOICE:
            return [own.T.log_softmax(-1).cpu().numpy() for own in scores.split(counts)]
        values = scores if self.rows.kind == REGRESSION else scores.log_softmax(-1)
        return [own.numpy() for own in values.cpu().split(counts)]

    def _answer(self, scores: NDArray[np.float32]) -> Answer:
        """The likeliest labels by their scores [K]: their numbers stand for tokens."""
        if self.rows.kind == REGRESSION:
            return Answer([], [], float(scores[0]))
        best = np.argsort(-scores, kind="stable")[: self.config.nbest].tolist()
        first, *others = (Answer([label], [float(scores[label])], float(scores[label])) for label in best)
        return Answer(first.tokens, first.token_logprobs, first.score, tuple(others))
