"""How generated answers are printed: fairseq's S-, T-, H-, D- and P- lines, or one JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ftk.generation.fill import FilledBlank
    from ftk.tokenizers import Tokenizer

NOTE = (
    "NOTE: scores are natural logarithms; H and D carry the sum of an answer's log-probabilities divided by "
    "length ** {length_penalty:g}, P one log-probability per token, the end token's included"
)

_ESCAPES = {ord(one): repr(one)[1:-1] for one in "\\\n\r\t\v\f\x1c\x1d\x1e\x85\u2028\u2029"}


def text_lines(
    index: int,
    source: str,
    answers: Sequence[FilledBlank],
    tokenizer: Tokenizer,
    references: Sequence[str] | None = None,
    filled: str | None = None,
) -> Iterator[str]:
    """One sample as tab-separated lines.

    `S-` source with its blanks; then for each blank, from left to right, `T-` reference, `H-` score and
    tokens, `D-` score and text, `P-` log-probabilities, these three for each of the n best answers, best first;
    at last `F-` filled text. `T-`, `F-` only if given.

    Args:
        index: number of the sample.
        source: text with blanks.
        answers: one per blank.
        tokenizer: names the tokens.
        references: one per blank, if known.
        filled: the text with its blanks filled.
    """
    yield f"S-{index}\t{_one_line(source)}"
    for number, answer in enumerate(answers):
        if references is not None:
            yield f"T-{index}\t{_one_line(references[number])}"
        for one in (answer, *answer.others):
            tokens = " ".join(_one_line(tokenizer.token_text(token)).replace(" ", "▁") for token in one.tokens)
            yield f"H-{index}\t{one.score:.4f}\t{tokens}"
            yield f"D-{index}\t{one.score:.4f}\t{_one_line(one.text)}"
            yield f"P-{index}\t{' '.join(f'{value:.4f}' for value in one.token_logprobs)}"
    if filled is not None:
        yield f"F-{index}\t{_one_line(filled)}"


def json_line(
    index: int,
    source: str,
    answers: Sequence[FilledBlank],
    references: Sequence[str] | None = None,
    filled: str | None = None,
) -> str:
    """One sample as a JSON object; arguments as in `text_lines`."""
    record: dict[str, Any] = {"id": index, "source": source}
    if filled is not None:
        record["text"] = filled
    record["answers"] = [{"blank": answer.blank, **_numbers(answer)} for answer in answers]
    if references is not None:
        for answer, reference in zip(record["answers"], references, strict=True):
            answer["reference"] = reference
    return json.dumps(record, ensure_ascii=False, allow_nan=False)


def _numbers(answer: FilledBlank) -> dict[str, Any]:
    """An answer without its blank; with the others of the n best, where there are any."""
    record = {
        "text": answer.text,
        "tokens": answer.tokens,
        "score": answer.score,
        "token_logprobs": answer.token_logprobs,
    }
    return record | ({"others": [_numbers(other) for other in answer.others]} if answer.others else {})


def _one_line(text: str) -> str:
    """Text that keeps to its line and column: breaks and tabs are written as in a string literal."""
    return text.translate(_ESCAPES)
