"""Shows a document and the GLM samples made of it: blanks in the text, answers, both position rows, the mask."""

from __future__ import annotations

import dataclasses
import textwrap
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ftk.data.corpora.documents import DocumentList, Documents
from ftk.errors import UserError, counted
from ftk.tasks.glm_blank.config import BlankInfillingConfig
from ftk.tasks.glm_blank.samples.dataset import GLMBlankDataset
from ftk.tasks.glm_blank.samples.infilling import OBJECTIVES, Sample
from ftk.tasks.glm_blank.samples.spans import Blanks
from ftk.terminal import display_width, pad
from ftk.tokenizers import Tokenizer

_LONGEST_TEXT = 500  # tokens
_LARGEST_PICTURE = 28  # cells on a side
_SHADES = "·░▒▓█"


@dataclass(frozen=True)
class Shown:
    """A sample with what it was made of.

    Args:
        index: number of the document, or of the sample where it is packed.
        packed: whether it is a sample as in training, else of this one document.
        text: int64 [N], what was blanked out.
        blanks: where.
        sample: the arrays made of them.
        num_documents: how many documents the text is made of.
    """

    index: int
    packed: bool
    text: NDArray[np.int64]
    blanks: Blanks
    sample: Sample
    num_documents: int


def samples_to_show(
    documents: Documents,
    tokenizer: Tokenizer,
    config: BlankInfillingConfig,
    *,
    index: int = 0,
    num_samples: int = 1,
    draw: int = 0,
    seed: int = 1,
    packed: bool = False,
) -> Iterator[Shown]:
    """Samples of each objective that the options allow.

    Args:
        index: which document, or with `packed` which sample of the epoch.
        num_samples: how many from there on, for each objective; empty documents are skipped.
        draw: which of the samples that can be drawn from a document; with `packed`, how many epochs later.
        packed: the samples of training, of documents packed together, instead of samples of one document alone.

    Raises:
        UserError: there is no such document or sample, it is empty, or the tokenizer lacks command tokens.
    """
    if packed:
        singles = enumerate(_single(config))
        whole = [GLMBlankDataset(documents, tokenizer, only, seed, quiet=again > 0) for again, only in singles]
        last = min(index + num_samples, len(whole[0]))
        if index >= last:
            raise UserError(f"`index` {index}: there are {last} packed samples, 0 to {last - 1}")
        for number in range(index, last):
            for dataset in whole:
                yield _shown(number, dataset, 1 + draw, number, packed=True)
        return
    _check_index(documents, index)
    shown = 0
    for number in range(index, len(documents)):
        if shown == num_samples:
            return
        if len(documents[number]) == 0:
            continue
        shown += 1
        document = DocumentList([documents[number]])
        for again, only in enumerate(_single(config)):
            alone = dataclasses.replace(only, sample_one_document=True)
            dataset = GLMBlankDataset(document, tokenizer, alone, seed, quiet=again > 0)
            yield _shown(number, dataset, 1 + draw, 0, packed=False)


def _check_index(documents: Documents, index: int) -> None:
    if not 0 <= index < len(documents):
        there = f"there {'is' if len(documents) == 1 else 'are'} {counted(len(documents), 'document')}"
        raise UserError(f"`index` {index}: {there}, 0 to {len(documents) - 1}")
    if len(documents[index]) == 0:
        raise UserError(f"`index` {index}: this document is empty")


def _shown(index: int, dataset: GLMBlankDataset, epoch: int, number: int, *, packed: bool) -> Shown:
    text, blanks, sample = dataset.explain(epoch, number)
    return Shown(index, packed, text, blanks, sample, int(np.count_nonzero(text == dataset.special.cls)))


def show(
    documents: Documents,
    tokenizer: Tokenizer,
    config: BlankInfillingConfig,
    *,
    width: int = 100,
    **which: Any,
) -> str:
    """Documents, and one sample of each for each objective that the options allow, as text.

    Args:
        documents, tokenizer, config: as of `samples_to_show`.
        **which: the other arguments of `samples_to_show`.

    Returns:
        the text to print.

    Raises:
        UserError: as of `samples_to_show`.
    """
    parts, heading = [], None
    for shown in samples_to_show(documents, tokenizer, config, **which):
        if shown.packed:
            about = f"sample {shown.index}, {counted(shown.num_documents, 'document')}, "
        else:
            about = ""
            if shown.index != heading:
                heading = shown.index
                parts.append(_describe_document(documents, tokenizer, shown.index, width))
        described = describe_sample(shown, tokenizer, width)
        parts.append(f"{about}{OBJECTIVES[shown.blanks.objective]} objective: {described}")
    return "\n\n".join(parts)


def _describe_document(documents: Documents, tokenizer: Tokenizer, index: int, width: int) -> str:
    document = documents[index]
    text = printable(tokenizer.decode(document[:_LONGEST_TEXT].tolist()))
    if len(document) > _LONGEST_TEXT:
        text += f" … ({len(document) - _LONGEST_TEXT:,} more tokens)"
    heading = f"document {index} of {len(documents):,}: {counted(len(document), 'token', ',')}\n"
    return heading + "\n".join(wrap_words(text, width, indent="  "))


def describe_sample(shown: Shown, tokenizer: Tokenizer, width: int = 100) -> str:
    """One sample in words and tables."""
    text, blanks, sample = shown.text, shown.blanks, shown.sample
    covered = int((blanks.spans[:, 1] - blanks.spans[:, 0]).sum())
    lines = [
        f"{counted(len(blanks.spans), 'blank')}, {covered} of {len(text)} tokens "
        f"({100 * covered / len(text):.0f} %); sample: {sample.context_length} context and "
        f"{len(sample.tokens) - sample.context_length} answer tokens"
    ]
    lines += ["", "text with its blanks, each with the number of its answer"]
    lines += wrap_words(_blanked_text(shown, tokenizer), width, indent="  ")
    lines += ["", "answers, in their order", *_answers(shown, tokenizer, width)]
    lines += ["", "what the model gets (position: place in the context; block: place in the answer)"]
    lines += [*_table(sample, tokenizer, width), "", *mask_picture(sample, blanks)]
    return "\n".join(lines)


def mask_picture(sample: Sample, blanks: Blanks, largest: int = _LARGEST_PICTURE) -> list[str]:
    """The attention mask in characters: rows are queries, columns are keys.

    Args:
        sample: T tokens.
        blanks: what it was made of.
        largest: cells on a side; a longer sample has several tokens in a cell.
    """
    length = len(sample.tokens)
    step = -(-length // largest)
    places = np.arange(length)
    sees = (places[None, :] < sample.context_length) | (places[None, :] <= places[:, None])  # [T, T]
    if sample.document_ids is not None:
        sees &= sample.document_ids[None, :] == sample.document_ids[:, None]
    cuts = np.arange(0, length, step)
    sums = np.add.reduceat(np.add.reduceat(sees.astype(np.int64), cuts, axis=0), cuts, axis=1)
    sizes = np.diff(np.append(cuts, length))
    shares = sums / np.outer(sizes, sizes)
    shades = np.where(shares == 1, len(_SHADES) - 1, np.ceil(shares * (len(_SHADES) - 2))).astype(int)
    numbers = answer_numbers(sample, blanks)
    each = "" if step == 1 else f", {step} tokens a cell"
    lines = [f"who sees whom (rows see columns; █ yes, · no{each}; c: context, 1, 2, …: answers)"]
    labels = [str(numbers[cut] or "c") for cut in cuts]
    lines.append("    " + "".join(f"{label[-1]} " for label in labels).rstrip())
    for label, row in zip(labels, shades, strict=True):
        lines.append(f"{label:>3} " + "".join(_SHADES[shade] * 2 for shade in row))
    return lines


def printable(text: str) -> str:
    """The text with line ends and other control characters made visible, so that columns stay where they are."""
    shown = []
    for character in text:
        if character == "\n":
            shown.append("⏎")
        elif unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"):
            shown.append("�")
        else:
            shown.append(character)
    return "".join(shown)


def wrap_words(text: str, width: int, indent: str = "") -> list[str]:
    """Lines of at most `width` columns, broken at spaces and between wide characters."""
    room = max(20, width - len(indent))
    lines, line, columns = [], "", 0
    for piece in _breakable(text, room):
        piece_width = display_width(piece)
        if line and columns + display_width(piece.rstrip()) > room:
            lines.append(indent + line.rstrip())
            line, columns = "", 0
        line += piece
        columns += piece_width
    return [*lines, indent + line.rstrip()] if line.strip() or not lines else lines


def _breakable(text: str, room: int) -> Iterator[str]:
    """Pieces of a text between which a line may end; none is wider than the room."""
    piece = ""
    for character in text:
        wide = unicodedata.east_asian_width(character) in "WF"
        combines = unicodedata.combining(character) != 0
        breaks = piece and not combines and (wide or piece[-1] == " " or display_width(piece) >= room)
        if breaks and not (character == " " and piece[-1] == " "):
            yield piece
            piece = ""
        piece += character
    if piece:
        yield piece


def _single(config: BlankInfillingConfig) -> Iterator[BlankInfillingConfig]:
    """The options with one objective at a time, for each that has a probability above zero."""
    probabilities = (config.bert_prob, config.gap_sentence_prob, config.gpt_prob)
    for objective, probability in enumerate(probabilities):
        single = config.single_span_prob if objective == 0 else 0.0
        if probability > 1e-9 or single > 0.0:
            bert, gap_sentence = float(objective == 0), float(objective == 1)
            yield dataclasses.replace(config, bert_prob=bert, gap_sentence_prob=gap_sentence, single_span_prob=single)


def _blanked_text(shown: Shown, tokenizer: Tokenizer) -> str:
    """The context as text, with the number of its answer after each blank."""
    blanks, context = shown.blanks, shown.sample.targets[: shown.sample.context_length]
    pieces, start = [], 0
    number_of = {int(span): number for number, span in enumerate(blanks.answer_order, start=1)}
    removed = 0
    for span, (first, last) in enumerate(blanks.spans.tolist()):
        blank = first - removed
        pieces += [
            tokenizer.decode(context[start:blank].tolist()),
            f"{tokenizer.decode([int(context[blank])])}({number_of[span]})",
        ]
        start = blank + 1
        removed += last - first - 1
    pieces.append(tokenizer.decode(context[start:].tolist()))
    return printable(" ".join(piece.strip(" ") for piece in pieces if piece))


def _answers(shown: Shown, tokenizer: Tokenizer, width: int) -> Iterator[str]:
    numbers = answer_numbers(shown.sample, shown.blanks)
    for number in range(1, len(shown.blanks.spans) + 1):
        heading = f"  ({number}) "
        targets = printable(tokenizer.decode(shown.sample.targets[numbers == number].tolist())).lstrip()
        lines = wrap_words(targets, width - len(heading))
        yield heading + lines[0]
        yield from (" " * len(heading) + line for line in lines[1:])


def _table(sample: Sample, tokenizer: Tokenizer, width: int) -> Iterator[str]:
    """Tokens in columns under each other: input, target where there is loss, both positions; wrapped."""
    rows = [
        ("input", [cell_text(tokenizer, token) for token in sample.tokens.tolist()]),
        (
            "target",
            [
                cell_text(tokenizer, token) if loss else ""
                for token, loss in zip(sample.targets.tolist(), sample.loss_mask.tolist(), strict=True)
            ],
        ),
        ("position", [str(place) for place in sample.position_ids[0].tolist()]),
        ("block", [str(place) for place in sample.position_ids[1].tolist()]),
    ]
    head = 2 + max(len(name) for name, _ in rows) + 2
    widths = [max(display_width(cells[column]) for _, cells in rows) for column in range(len(sample.tokens))]
    for first, last in _lines_of_columns(widths, width - head):
        for name, cells in rows:
            if name == "target" and not any(cells[first:last]):
                continue
            shown = [pad(cells[column], widths[column]) for column in range(first, last)]
            yield (f"  {name}".ljust(head) + " ".join(shown)).rstrip()
        if last < len(widths):
            yield ""


def _lines_of_columns(widths: Sequence[int], room: int) -> Iterator[tuple[int, int]]:
    """Cuts columns into lines that fit the room; a column that is too wide has a line of its own."""
    first, used = 0, 0
    for column, width in enumerate(widths):
        if column > first and used + width > room:
            yield first, column
            first, used = column, 0
        used += width + 1
    yield first, len(widths)


def cell_text(tokenizer: Tokenizer, token: int) -> str:
    """How a token is written in the table: its text where it has a readable one, else its spelling."""
    text = tokenizer.decode([token])
    if not text.strip() or "�" in text:
        text = tokenizer.token_text(token) if not text.isspace() else text
    return textwrap.shorten(printable(text).strip() or "␣", 24, placeholder="…")


def answer_numbers(sample: Sample, blanks: Blanks) -> NDArray[np.int64]:
    """For each token its answer's number from 1, or 0 in the context; int64 [T]."""
    lengths = (blanks.spans[:, 1] - blanks.spans[:, 0] + blanks.append_end)[blanks.answer_order]
    answers = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    return np.concatenate([np.zeros(sample.context_length, dtype=np.int64), answers])
