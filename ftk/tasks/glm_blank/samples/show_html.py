"""The samples of a corpus as one HTML page, which explains GLM: blanks, both positions, the mask."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import numpy as np

from ftk.parsing import json_in_html
from ftk.tasks.glm_blank.samples.show import Shown, answer_numbers, cell_text, printable

if TYPE_CHECKING:
    from ftk.tokenizers import Tokenizer


def show_html(samples: Sequence[Shown], tokenizer: Tokenizer, source: str) -> str:
    """One self-contained page: it loads nothing, and text cannot become markup or script.

    The page draws itself from JSON, by `textContent` alone; in the JSON no `<`, `>` or `&` is left, so that no text
    ends the element that holds it.

    Args:
        source: a line that says where the samples are from.
    """
    data = {"source": printable(source), "samples": [_described(shown, tokenizer) for shown in samples]}
    page = files("ftk.tasks.glm_blank.samples").joinpath("show_page.html").read_text(encoding="utf-8")
    before, after = page.split("%DATA%")
    return before + json_in_html(data) + after


def _described(shown: Shown, tokenizer: Tokenizer) -> dict[str, Any]:
    """A sample as the page's script reads it."""
    sample, blanks = shown.sample, shown.blanks
    answers = answer_numbers(sample, blanks)  # [T]
    starts = blanks.spans[:, 0] - np.cumsum(np.append(0, np.diff(blanks.spans, axis=1)[:-1] - 1))  # [K], in the context
    masks = np.zeros(len(answers), dtype=np.int64)
    number_of = 1 + np.argsort(blanks.answer_order)  # [K], of each span's answer
    masks[starts] = number_of
    return {
        "index": shown.index,
        "packed": shown.packed,
        "objective": blanks.objective,
        "documents": shown.num_documents,
        "size": len(shown.text),
        "covered": int((blanks.spans[:, 1] - blanks.spans[:, 0]).sum()),
        "spans": blanks.spans.tolist(),
        "context": sample.context_length,
        "pieces": _pieces(shown, tokenizer, number_of.tolist()),
        "tokens": [cell_text(tokenizer, token) for token in sample.tokens.tolist()],
        "targets": [
            cell_text(tokenizer, token) if loss else None
            for token, loss in zip(sample.targets.tolist(), sample.loss_mask.tolist(), strict=True)
        ],
        "positions": sample.position_ids[0].tolist(),
        "blocks": sample.position_ids[1].tolist(),
        "answers": answers.tolist(),
        "masks": masks.tolist(),
        "document_ids": None if sample.document_ids is None else sample.document_ids.tolist(),
    }


def _pieces(shown: Shown, tokenizer: Tokenizer, number_of: Sequence[int]) -> list[dict[str, Any]]:
    """The text from one end to the other, cut at blanks and command tokens."""
    text = shown.text.tolist()
    commands = {tokenizer.special.cls, tokenizer.special.eos}
    span_at = np.full(len(text), -1)
    for span, (start, end) in enumerate(shown.blanks.spans.tolist()):
        span_at[start:end] = span
    keys = [
        (int(span), token if token in commands else None) for span, token in zip(span_at.tolist(), text, strict=True)
    ]
    pieces, first = [], 0
    for place in range(1, len(text) + 1):
        if place < len(text) and keys[place] == keys[first] and keys[first][1] is None:
            continue
        span, command = keys[first]
        pieces.append(
            {
                "text": printable(tokenizer.decode(text[first:place])),
                "answer": number_of[span] if span >= 0 else 0,
                "command": command is not None,
            }
        )
        first = place
    return pieces
