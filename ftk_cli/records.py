"""How answers are printed: fairseq's S-, T-, H-, D- and P- lines, or one JSON object per line."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ftk.errors import visible
from ftk_cli.colors import color_legend, colored_text

if TYPE_CHECKING:
    from ftk.generation.config import GenerationConfig
    from ftk.tokenizers import Tokenizer

_NOTE = (
    "NOTE: scores are natural logarithms; H and D carry the sum of an answer's log-probabilities divided by "
    "length ** {length_penalty:g}, P one log-probability per token, the end token's included"
)
_ESCAPES = {ord(one): repr(one)[1:-1] for one in "\\\n\r\t\v\f\x1c\x1d\x1e\x85\u2028\u2029"}
_JSON_ESCAPES = {ord(one): f"\\u{ord(one):04x}" for one in "\x85\u2028\u2029"}  # those that JSON itself leaves


@dataclass
class Records:
    """Makes the record of each sample.

    Attributes:
        as_json: one JSON object, else lines of text.
        print_step: say how many steps were taken.
        terminal: what is in a record must not steer a terminal.
        color: the text with its answers is coloured.
        several_ways: set where a record has held several ways to answer a prompt as a whole.
    """

    as_json: bool
    print_step: bool = False
    terminal: bool = False
    color: bool = False
    several_ways: bool = False

    def answered(self, index: int, result: Any, tokenizer: Tokenizer, references: Sequence[str] | None) -> list[str]:
        """The lines of one sample.

        `S-` source; then for each answer, from left to right, `T-` reference, `H-` score and tokens, `D-` score and
        text, `P-` log-probabilities, `A-` the likeliest tokens at one place (if asked for), these for each of the n
        best answers, best first; `I-` steps of the best answers; at last `F-`, the text with its answers, unless there
        are references. Where the n best were asked for of the text as a whole the lines of the answers come for each of
        these, in front of them `N-`, its score and its text.

        Args:
            index: number of the sample.
            result: prompt, text and answers (`ftk.generation.text.TextResult`).
            tokenizer: names the tokens.
            references: one per answer, if known.
        """
        ways = [one for one in (result, *result.others) if one.score is not None]
        self.several_ways = self.several_ways or bool(ways)
        if self.as_json:
            return [json_record(self._object(index, result, ways, tokenizer, references), self.terminal)]
        lines = [f"S-{index}\t{self._clean(result.prompt)}"]
        if not ways:
            lines += self._answers(index, result.answers, tokenizer, references)
        for way in ways:
            lines.append(f"N-{index}\t{way.score:.4f}" + (f"\t{self._clean(way.text)}" if references is None else ""))
            lines += self._answers(index, way.answers, tokenizer, references if way is result else None)
        if self.print_step:
            lines.append(f"I-{index}\t{num_steps(result.answers)}")
        if references is None:
            text = colored_text(result, tokenizer, self._clean) if self.color else self._clean(result.text)
            lines.append(f"F-{index}\t{text}")
        return lines

    def scored(
        self, index: int, source: str, candidates: Sequence[Sequence[Any]], best: int, tokenizer: Tokenizer
    ) -> list[str]:
        """A sample with candidates whose answers were given: its source once, then each with its sum (`L-`).

        Args:
            index, tokenizer: as for `answered`.
            source: the prompt.
            candidates: answers of each.
            best: the place of the likeliest one.
        """
        totals = [sum(answer.logprob for answer in answers) for answers in candidates]
        if self.as_json:
            described = [
                {"logprob": total, "answers": [_scored(answer) for answer in answers]}
                for answers, total in zip(candidates, totals, strict=True)
            ]
            return [json_record({"id": index, "source": source, "best": best, "candidates": described}, self.terminal)]
        lines = [f"S-{index}\t{self._clean(source)}"]
        for answers, total in zip(candidates, totals, strict=True):
            lines += [*self._answers(index, answers, tokenizer, None), f"L-{index}\t{total:.4f}"]
        return lines

    def refused(self, index: int, message: str) -> list[str]:
        """A sample without an answer: `E-` with the number of its line, counted from 1, or a JSON object."""
        if self.as_json:
            return [json_record({"id": index, "line": index + 1, "error": message}, self.terminal)]
        return [f"E-{index}\tline {index + 1}: {self._clean(message)}"]

    def notes(self, config: GenerationConfig, scoring: bool) -> list[str]:
        """What the numbers in lines of text mean, and the colours."""
        note = _NOTE.format(length_penalty=config.length_penalty)
        if scoring:
            return [f"{note}, L the sum over all answers"]
        fused = f"; in H and D those of the language model are added {config.lm_weight:g} times"
        note += fused * (config.lm_path is not None)
        note += "; N the same for all answers to a text together" * self.several_ways
        return [note, *([f"NOTE: {color_legend()}"] if self.color else [])]

    def _clean(self, text: str) -> str:
        return terminal_line(text) if self.terminal else one_line(text)

    def _name(self, tokenizer: Tokenizer, token: int) -> str:
        """A token on one line and without spaces."""
        return self._clean(tokenizer.token_text(token)).replace(" ", "▁")

    def _answers(
        self, index: int, answers: Sequence[Any], tokenizer: Tokenizer, references: Sequence[str] | None
    ) -> Iterator[str]:
        for number, answer in enumerate(answers):
            if references is not None:
                yield f"T-{index}\t{self._clean(references[number])}"
            for one in (answer, *answer.others):
                yield f"H-{index}\t{one.score:.4f}\t{' '.join(self._name(tokenizer, token) for token in one.tokens)}"
                yield f"D-{index}\t{one.score:.4f}\t{self._clean(one.text)}"
                yield f"P-{index}\t{' '.join(f'{value:.4f}' for value in one.token_logprobs)}"
                for place in one.alternatives:
                    named = (f"{self._name(tokenizer, token)} {value:.4f}" for token, value in place)
                    yield f"A-{index}\t" + "\t".join(named)

    def _object(
        self, index: int, result: Any, ways: Sequence[Any], tokenizer: Tokenizer, references: Sequence[str] | None
    ) -> dict[str, Any]:
        record: dict[str, Any] = {"id": index, "source": result.prompt}
        if references is None:
            record["text"] = result.text
        if ways:
            record["score"] = result.score
        record["answers"] = _described(result.answers, tokenizer)
        if references is not None:
            for answer, reference in zip(record["answers"], references, strict=True):
                answer["reference"] = reference
        if self.print_step:
            record["steps"] = num_steps(result.answers)
        if ways:
            record["others"] = [
                {
                    **({"text": way.text} if references is None else {}),
                    "score": way.score,
                    "answers": _described(way.answers, tokenizer),
                }
                for way in ways[1:]
            ]
        return record


def num_steps(answers: Sequence[Any]) -> int:
    """Steps in which the best answers were written: one for each of their tokens, the end tokens counted."""
    return sum(len(answer.token_logprobs) for answer in answers)


def json_record(record: dict[str, Any], terminal: bool = False) -> str:
    """A record as JSON on one line, whichever characters its reader takes for the end of one.

    Args:
        record: what the line holds.
        terminal: whether what could steer a terminal is escaped, too; the line means the same.
    """
    line = json.dumps(record, ensure_ascii=False, allow_nan=False).translate(_JSON_ESCAPES)
    if terminal and visible(line, keep="") != line:
        line = "".join(one if visible(one, keep="") == one else json.dumps(one)[1:-1] for one in line)
    return line


def one_line(text: str) -> str:
    """Text that keeps to its line and column: breaks and tabs are written as in a string literal."""
    return text.translate(_ESCAPES)


def terminal_line(text: str) -> str:
    """As `one_line`, and nothing in it steers a terminal: control and format characters are shown as `\\xNN`."""
    return visible(one_line(text), keep="")


def is_terminal() -> bool:
    """Whether stdout is a terminal."""
    return sys.stdout is not None and sys.stdout.isatty()


def _described(answers: Sequence[Any], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    return [{**answer.named, **_numbers(answer, tokenizer)} for answer in answers]


def _numbers(answer: Any, tokenizer: Tokenizer) -> dict[str, Any]:
    """An answer without what names it; with the others of the n best, where there are any."""
    record: dict[str, Any] = {
        "text": answer.text,
        "tokens": answer.tokens,
        "score": answer.score,
        "token_logprobs": answer.token_logprobs,
    }
    if answer.lm_logprobs:
        record["lm_logprobs"] = list(answer.lm_logprobs)
    if answer.alternatives:
        record["alternatives"] = [
            [
                {"token": token, "text": tokenizer.token_text(token), "logprob": value}
                for token, value in place
                if math.isfinite(value)
            ]
            for place in answer.alternatives
        ]
    if answer.others:
        record["others"] = [_numbers(other, tokenizer) for other in answer.others]
    return record


def _scored(answer: Any) -> dict[str, Any]:
    names = ("text", "tokens", "logprob", "score", "token_logprobs")
    return {**answer.named, **{name: getattr(answer, name) for name in names}}
