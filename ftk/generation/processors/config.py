"""The options that steer a search, with their meaning, units and limits; imports no torch."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from ftk.config.options import option
from ftk.generation.config_groups import MOST_TOKENS

_MOST_ANSWERS = 10_000  # that options may name one by one
_BIAS = re.compile(r"[0-9]{1,9}=[+-]?[0-9]+(\.[0-9]*)?(e[+-]?[0-9]{1,3})?")
_GREATEST = 1e6  # factor, or difference, by which a logit is changed; float32 holds the result


@dataclass(kw_only=True)
class ProcessorConfig:
    """What an answer must, may and must not hold. Nothing is asked of it unless an option says so."""

    min_lens: list[int] = option(
        [], "min_len of the first answer, the second, ...; min_len for those after", unit="tokens", min=0
    )
    max_lens: list[int] = option(
        [],
        "greatest length for the first answer, the second, ..., each at most max_len; max_len for those after",
        unit="tokens",
        min=1,
    )
    repetition_penalty: float = option(
        1.0, "divides the logits of tokens that the answer holds already (negative ones times it); 1: no", "[1e-6, 1e6]"
    )
    repetition_penalty_prompt: bool = option(False, "the repetition penalty counts the prompt's tokens, too")
    frequency_penalty: float = option(
        0.0, "taken off the logit of a token once for each time that the answer holds it already", "[-1e6, 1e6]"
    )
    presence_penalty: float = option(0.0, "taken off the logits of tokens that the answer holds already", "[-1e6, 1e6]")
    logit_bias: list[str] = option(
        [], "numbers that are added to the logits of tokens", several=True, metavar="ID=NUMBER"
    )
    unk_penalty: float = option(0.0, "taken off the log-probability of the unknown token; inf: never", max=math.inf)
    no_repeat_ngram_size: int = option(
        0, "no run of N tokens twice in an answer; 0: no limit", unit="tokens", min=0, max=MOST_TOKENS
    )
    forbid_words: list[str] = option([], "words and phrases that no answer may hold", several=True, metavar="TEXT")
    forbid_words_file: str | None = option(None, "more of them, a file with one per line", metavar="FILE")
    prefix: list[str] = option(
        [],
        "how every answer begins; of several texts one for each answer, '' for none",
        several=True,
        metavar="TEXT",
    )
    constraints: list[str] = option([], "words and phrases that every answer must hold", several=True, metavar="TEXT")
    constraint_answers: list[int] = option(
        [],
        "for each of the constraints the answer, from 1 on, that it is meant for; 0: every one",
        min=0,
        max=_MOST_ANSWERS,
    )
    ordered_constraints: bool = option(False, "the constraints come one after the other, in their order")
    guide: list[str] = option(
        [],
        "what all of an answer must match: json (any object), json:SCHEMA, regex:EXPRESSION, "
        'choice:["yes", "no"] or grammar:LARK-OR-GBNF; of several one for each answer, \'\' for none',
        several=True,
        metavar="TEXT",
    )
    guide_file: str | None = option(
        None,
        "the same from a file: a schema (.json), an expression (.regex, .txt), a grammar (.lark, .gbnf)",
        metavar="FILE",
    )
    stop: list[str] = option(
        [], "texts at which an answer ends; they and what follows are cut off", daily=True, several=True, metavar="TEXT"
    )
    stop_token_ids: list[int] = option([], "ids of tokens that end an answer and are stripped", several=True, min=0)

    def validate(self) -> Iterator[str]:
        for number, (low, high) in enumerate(zip(self.min_lens, self.max_lens, strict=False), start=1):
            if low > high:
                yield f"answer {number}: min_lens {low} is above max_lens {high}"
        for pair in self.logit_bias:
            if not _BIAS.fullmatch(pair) or not abs(float(pair.partition("=")[2])) <= _GREATEST:
                yield f"logit_bias holds {pair!r:.60}; write ID=NUMBER, the number from -{_GREATEST:g} to {_GREATEST:g}"
        if self.repetition_penalty_prompt and self.repetition_penalty == 1.0:
            yield "repetition_penalty_prompt needs a repetition_penalty; 1 is none"
        if not (abs(self.unk_penalty) <= _GREATEST or self.unk_penalty == math.inf):
            yield (
                f"unk_penalty is {self.unk_penalty}; it must be from -{_GREATEST:g} to {_GREATEST:g}, or inf (never)"
            )
        for name in ("min_lens", "max_lens", "prefix", "guide"):
            if len(getattr(self, name)) > _MOST_ANSWERS:
                yield f"{name} has {len(getattr(self, name))} entries; at most {_MOST_ANSWERS} answers can be named"
        for name in ("forbid_words", "constraints"):
            if any(not text.strip() for text in getattr(self, name)):
                yield f"{name} holds an empty text"
        if self.guide and self.guide_file is not None:
            yield "guide and guide_file are both given; take one of them away"
        if any(text.strip() for text in self.guide) or self.guide_file is not None:
            for name in ("prefix", "constraints"):
                if getattr(self, name):
                    yield f"{name} and a guide are both given; a guide says all of an answer, take one of them away"
        if any(not text for text in self.stop):
            yield "stop holds an empty text"
        if self.constraint_answers and len(self.constraint_answers) != len(self.constraints):
            yield (
                f"constraint_answers has {len(self.constraint_answers)} numbers for {len(self.constraints)} "
                "constraints; give one for each"
            )
        if self.ordered_constraints and not self.constraints:
            yield "ordered_constraints needs constraints"
