"""How answers are printed: as texts, as fairseq's S-, T-, H-, D- and P- lines, or as one JSON object per line."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ftk.errors import counted, visible
from ftk_cli.colors import color_legend, colored_text

if TYPE_CHECKING:
    from ftk.generation.config import GenerationConfig
    from ftk.generation.results import TextAnswer, TextResult
    from ftk.tokenizers import Tokenizer

_NOTE = (
    "NOTE: scores are natural logarithms; H and D carry the sum of an answer's log-probabilities divided by "
    "length ** {length_penalty:g}, P one log-probability per token, the end token's included"
)
_GREY = "\033[90m{}\033[0m"
_ESCAPES = {ord(char): repr(char)[1:-1] for char in "\\\n\r\t\v\f\x1c\x1d\x1e\x85\u2028\u2029"}
_JSON_ESCAPES = {ord(char): f"\\u{ord(char):04x}" for char in "\x85\u2028\u2029"}  # those that JSON itself leaves


@dataclass
class Records:
    """Makes the record of each prompt.

    Attributes:
        tokenizer: names the tokens.
        form: "text": for reading; "fairseq": its lines; "json": one object per line.
        print_step: say how many steps were taken.
        terminal: what is in a record must not steer a terminal; texts come with their scores.
        color: the text with its answers is coloured, and has scores.
        several_ways: set where a record has held several ways to answer a prompt as a whole.
    """

    tokenizer: Tokenizer
    form: str
    print_step: bool = False
    terminal: bool = False
    color: bool = False
    several_ways: bool = False

    def answered(self, index: int, result: TextResult, references: Sequence[str] | None) -> list[str]:
        """The lines of a prompt with the answers that were found.

        Args:
            index: number of the prompt.
            result: prompt, text and answers.
            references: one per answer, if known; then only the form "text" has the text.
        """
        if self.form == "text":
            return list(self._texts(index, result, references or ()))

        def described(way: TextResult) -> dict[str, Any]:
            answers = [{**answer.named, **self._answer(answer)} for answer in way.answers]
            score = {} if way.score is None else {"score": way.score}
            return {**({"text": way.text} if references is None else {}), **score, "answers": answers}

        record = {"id": index, "source": result.prompt, **described(result)}
        for answer, reference in zip(record["answers"], references or (), strict=references is not None):
            answer["reference"] = reference
        if self.print_step:
            record["steps"] = num_steps(result.answers)
        if result.score is not None:
            self.several_ways = True
            record["others"] = [described(way) for way in result.others if way.score is not None]
        return self._written(record, colored_text(result, self.tokenizer, self._clean) if self.color else None)

    def scored(self, index: int, source: str, candidates: Sequence[Sequence[TextAnswer]]) -> list[str]:
        """The lines of a prompt with answers that were given.

        Args:
            index: number of the prompt.
            source: the prompt.
            candidates: answers of each.
        """
        totals = [total_logprob(answers) for answers in candidates]
        if self.form == "text":
            given = (", ".join(repr(answer.text) for answer in answers) for answers in candidates)
            return [self._clean(source), *(f"  {total:.4f}  {text}" for total, text in zip(totals, given, strict=True))]
        names = ("text", "tokens", "logprob", "score", "token_logprobs")
        described = [
            {
                "logprob": total,
                "answers": [{**answer.named, **{name: getattr(answer, name) for name in names}} for answer in answers],
            }
            for answers, total in zip(candidates, totals, strict=True)
        ]
        best = totals.index(max(totals))
        return self._written({"id": index, "source": source, "best": best, "candidates": described})

    def refused(self, index: int, message: str) -> list[str]:
        """The lines of a prompt without an answer, with the number of its line, counted from 1."""
        if self.form == "text":  # an empty line in its place: which line it is, and why, stands on stderr
            return [""]
        return self._written({"id": index, "line": index + 1, "error": message})

    def notes(self, config: GenerationConfig, scoring: bool) -> list[str]:
        """What the numbers in fairseq's lines mean, and the colours."""
        colors = [f"NOTE: {color_legend()}"] if self.color else []
        if self.form != "fairseq":
            return colors
        note = _NOTE.format(length_penalty=config.length_penalty)
        if scoring:
            return [f"{note}, L the sum over all answers"]
        if config.lm_path is not None:
            note += f"; in H and D those of the language model are added {config.lm_weight:g} times"
        note += "; N the same for all answers to a text together" * self.several_ways
        return [note, *colors]

    def _texts(self, index: int, result: TextResult, references: Sequence[str]) -> Iterator[str]:
        """The text with its answers; indented below it, what was asked for besides: references, n best, alternatives.

        An empty text with details below it is replaced by the number of its prompt and the prompt.

        On a terminal, scores follow in grey; further ways to answer the prompt begin with "or".
        """
        for way in (result, *result.others):
            details = list(self._details(way, references if way is result else ()))
            scores = [answer.score for answer in way.answers] if way.score is None else [way.score]
            text = colored_text(way, self.tokenizer, self._clean) if self.color else self._clean(way.text)
            if details and not way.text.strip():
                text = f"{index}: {self._clean(result.prompt)}"
            yield f"{'' if way is result else 'or '}{text}{'' if details else self._scores(scores)}"
            yield from details
        if self.print_step:
            yield f"  {counted(num_steps(result.answers), 'step')}"

    def _details(self, way: TextResult, references: Sequence[str]) -> Iterator[str]:
        for number, answer in enumerate(way.answers):
            if references or answer.others or answer.alternatives:
                reference = f"  (reference: {references[number]!r})" if references else ""
                yield f"  {number + 1}. {answer.text!r}{reference}{self._scores([answer.score])}"
                yield from likeliest_tokens(answer, self.tokenizer)
                for other in answer.others:
                    yield f"     or {other.text!r}{self._scores([other.score])}"
                    yield from likeliest_tokens(other, self.tokenizer)

    def _scores(self, scores: Sequence[float]) -> str:
        text = " ".join(f"{score:.4f}" for score in scores)
        if self.color:
            return f"  {_GREY.format(text)}"
        return f"  {text}" if self.terminal else ""

    def _answer(self, answer: TextAnswer) -> dict[str, Any]:
        """An answer, with the others of the n best, where there are any."""
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
                    {"token": token, "text": self.tokenizer.readable_token(token), "logprob": value}
                    for token, value in place
                    if math.isfinite(value)
                ]
                for place in answer.alternatives
            ]
        if answer.others:
            record["others"] = [self._answer(other) for other in answer.others]
        return record

    def _written(self, record: dict[str, Any], colored: str | None = None) -> list[str]:
        return [json_record(record, self.terminal)] if self.form == "json" else list(self._lines(record, colored))

    def _lines(self, record: dict[str, Any], colored: str | None) -> Iterator[str]:
        """`E-` what is wrong; or `S-` source, for each way to answer it `N-` score and text, its answers, `L-` sum of
        their log-probabilities; `I-` steps, `F-` text with its answers."""
        index = record["id"]
        if "error" in record:
            yield f"E-{index}\tline {record['line']}: {self._clean(record['error'])}"
            return
        yield f"S-{index}\t{self._clean(record['source'])}"
        for way in record.get("candidates") or [record, *record.get("others", ())]:
            if "score" in way:
                yield f"N-{index}\t{way['score']:.4f}" + (f"\t{self._clean(way['text'])}" if "text" in way else "")
            for number, answer in enumerate(way["answers"]):
                place = str(index) if len(way["answers"]) == 1 else f"{index}.{number}"
                yield from self._answer_lines(place, answer)
            if "logprob" in way:
                yield f"L-{index}\t{way['logprob']:.4f}"
        if "steps" in record:
            yield f"I-{index}\t{record['steps']}"
        if "text" in record:
            yield f"F-{index}\t{self._clean(record['text']) if colored is None else colored}"

    def _answer_lines(self, place: str, answer: dict[str, Any]) -> Iterator[str]:
        """`T-` reference; of each of the n best answers, best first, `H-` score and tokens, `D-` score and text, `P-`
        log-probabilities, `A-` the likeliest tokens for one of them. `place`: "0", or "0.3" for the fourth answer."""
        if "reference" in answer:
            yield f"T-{place}\t{self._clean(answer['reference'])}"
        for candidate in (answer, *answer.get("others", ())):
            names = " ".join(self._name(self.tokenizer.token_text(token)) for token in candidate["tokens"])
            yield f"H-{place}\t{candidate['score']:.4f}\t{names}"
            yield f"D-{place}\t{candidate['score']:.4f}\t{self._clean(candidate['text'])}"
            yield f"P-{place}\t{' '.join(f'{value:.4f}' for value in candidate['token_logprobs'])}"
            for tokens in candidate.get("alternatives", ()):
                spelled = (self._name(self.tokenizer.token_text(one["token"])) for one in tokens)
                likeliest = (f"{name} {one['logprob']:.4f}" for name, one in zip(spelled, tokens, strict=True))
                yield f"A-{place}\t" + "\t".join(likeliest)

    def _clean(self, text: str) -> str:
        return terminal_line(text) if self.terminal else one_line(text)

    def _name(self, token: str) -> str:
        """A token on one line and without spaces."""
        return self._clean(token).replace(" ", "▁")


def likeliest_tokens(answer: TextAnswer, tokenizer: Tokenizer) -> Iterator[str]:
    """For each place of an answer the likeliest tokens with their probabilities, if they were asked for."""
    for number, place in enumerate(answer.alternatives, start=1):
        tokens = "  ".join(f"{tokenizer.readable_token(token)!r} {math.exp(value):.3f}" for token, value in place)
        yield f"       token {number}: {tokens}"


def num_steps(answers: Sequence[TextAnswer]) -> int:
    """Steps in which the best answers were written: one for each of their tokens, the end tokens counted."""
    return sum(len(answer.token_logprobs) for answer in answers)


def total_logprob(answers: Sequence[TextAnswer]) -> float:
    """Log-probability of all answers together."""
    return sum(answer.logprob for answer in answers)


def json_record(record: dict[str, Any], terminal: bool = False) -> str:
    """A record as JSON on one line, whichever characters its reader takes for the end of one.

    Args:
        record: what the line holds.
        terminal: whether what could steer a terminal is escaped, too; the line means the same.
    """
    line = json.dumps(record, ensure_ascii=False, allow_nan=False).translate(_JSON_ESCAPES)
    if terminal and visible(line, keep="") != line:
        line = "".join(char if visible(char, keep="") == char else json.dumps(char)[1:-1] for char in line)
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
