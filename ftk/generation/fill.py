"""Fills blanks in text: prompts with [MASK], [sMASK] or [gMASK] in, the same texts with their answers out."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftk.errors import UserError
from ftk.generation.scoring import score_ids
from ftk.generation.search import Answer
from ftk.generation.sequence_generator import SequenceGenerator
from ftk.generation.truncation import truncate

if TYPE_CHECKING:
    from ftk.tokenizers import Tokenizer

_BLANKS = {"[MASK]": "mask", "[sMASK]": "smask", "[gMASK]": "gmask"}
_CONTEXT_FOR_SPACING = 8  # tokens before a blank that decide whether its answer begins with a space


@dataclass(frozen=True)
class FilledBlank:
    """One blank of a text with its answer.

    Attributes:
        blank: how the blank is written, e.g. "[MASK]".
        text: the answer, without white space around it.
        tokens: its ids without the end token.
        token_logprobs: natural logarithms of their probabilities; the end token's stands last if it came.
        score: sum of token_logprobs / their number ** length_penalty, as the processors have changed them.
        others: further answers to the same blank, best first, given the best ones to the blanks before it; `nbest`
            - 1 at most.
        alternatives: for each of token_logprobs the likeliest tokens there with their log-probabilities, best first;
            empty unless `alternatives` asks for them.
    """

    blank: str
    text: str
    tokens: list[int]
    token_logprobs: list[float]
    score: float
    others: tuple[FilledBlank, ...] = ()
    alternatives: tuple[tuple[tuple[int, float], ...], ...] = ()

    @property
    def probability(self) -> float:
        """Probability of the whole answer, given the text and the answers before it."""
        return math.exp(self.logprob)

    @property
    def logprob(self) -> float:
        """Natural logarithm of `probability`."""
        return sum(self.token_logprobs)


@dataclass(frozen=True)
class FillResult:
    """A prompt, the text with its blanks filled, the answers from left to right, and where each stands in the text."""

    prompt: str
    text: str
    answers: list[FilledBlank]
    spans: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as the model reads it.

    Attributes:
        prompt: as given.
        pieces: the text before, between and behind the blanks: one more than there are blanks.
        context: token ids, [CLS] and end of text included.
    """

    prompt: str
    pieces: list[str]
    context: list[int]


class BlankFiller:
    """A generator with its tokenizer: text in, text with its blanks filled out.

        filler = BlankFiller(tokenizer, SequenceGenerator(model, tokenizer.special, beam=4))

    Args:
        tokenizer: the one that the model was trained with.
        generator: fills blanks in ids.

    Raises:
        UserError: tokenizer and model do not fit each other.
    """

    def __init__(self, tokenizer: Tokenizer, generator: SequenceGenerator) -> None:
        self.tokenizer = tokenizer
        self.generator = generator
        num_rows = getattr(getattr(generator.model, "config", None), "vocab_size", None)
        if num_rows is not None and num_rows < tokenizer.vocab_size:
            raise UserError(
                f"the tokenizer has {tokenizer.vocab_size} tokens, but the model knows {num_rows}; "
                "use the tokenizer that the model was trained with"
            )
        special = tokenizer.special
        ids = {text: getattr(special, name) for text, name in _BLANKS.items()}
        self.blanks: dict[str, int] = {text: one for text, one in ids.items() if one is not None}
        self._missing = [text for text, one in ids.items() if one is None]
        # What is put at the end of a prompt without a blank.
        self._last_blank = self.blanks.get("[gMASK]", next(iter(self.blanks.values())))
        own_names = [tokenizer.token_text(one) for one in self.blanks.values()]
        self._blank_pattern = re.compile("|".join(map(re.escape, {*self.blanks, *own_names})))

    def fill(
        self,
        prompts: Sequence[str],
        seeds: Sequence[int] | None = None,
        progress: Callable[[int], object] | None = None,
    ) -> list[FillResult]:
        """Fills the blanks of each prompt from left to right.

            filler.fill(["Ng is an adjunct professor at [MASK] ."])[0].answers[0].text

        Args:
            prompts: texts; one without a blank is continued at its end.
            seeds, progress: as for `SequenceGenerator.fill_ids`.

        Raises:
            UserError: a prompt is empty or too long, or has a blank that the tokenizer lacks.
        """
        encoded = []
        for number, prompt in enumerate(prompts, start=1):
            try:
                encoded.append(self.encode(prompt))
            except UserError as error:
                raise UserError(f"prompt {number}: {error}" if len(prompts) > 1 else str(error)) from None
        return self.fill_encoded(encoded, seeds, progress)

    def encode(self, prompt: str, check: bool = True) -> EncodedPrompt:
        """What the model reads for a prompt: [CLS], the text, and end of text unless a [gMASK] is at the end.

        Args:
            prompt: a text.
            check: whether answers of the longest length must fit the model's positions.

        Raises:
            UserError: as for `fill`.
        """
        text = prompt.strip()
        if not text:
            raise UserError("the prompt is empty; write a text, with [MASK] where something is missing")
        for blank in self._missing:
            if blank in text:
                raise UserError(f"this tokenizer has no {blank}; it has {', '.join(self.blanks)}")
        pieces = self._blank_pattern.split(text)
        # "[MASK]" is understood everywhere, also where the tokenizer's own name for it is another.
        for blank, token in self.blanks.items():
            text = text.replace(blank, self.tokenizer.token_text(token))
        ids = self.tokenizer.encode(text, command_tokens=True)
        special = self.tokenizer.special
        if len(pieces) == 1:
            ids, pieces = [*ids, self._last_blank], [*pieces, ""]
        if sum(token in self.generator.masks for token in ids) != len(pieces) - 1:
            raise UserError("the prompt holds a command token that counts as a blank here; remove it")
        if special.cls is not None and ids[0] != special.cls:
            ids = [special.cls, *ids]
        if special.eos is not None and ids[-1] not in (special.gmask, special.eos):
            ids = [*ids, special.eos]
        side, limit = self.generator.config.truncate, self.generator.longest_context(len(pieces) - 1)
        if side != "error" and limit is not None:
            ids = truncate(ids, self.generator.masks, limit, side, (special.cls, special.eos))
        if check:
            self.generator.check(ids)
        return EncodedPrompt(prompt, pieces, ids)

    def fill_encoded(
        self,
        prompts: Sequence[EncodedPrompt],
        seeds: Sequence[int] | None = None,
        progress: Callable[[int], object] | None = None,
    ) -> list[FillResult]:
        """As `fill`, for prompts that `encode` has made."""
        answers = self.generator.fill_ids([prompt.context for prompt in prompts], seeds, progress)
        return [self._result(prompt, found) for prompt, found in zip(prompts, answers, strict=True)]

    def score(
        self, prompts: Sequence[str], answers: Sequence[Sequence[str]], end: bool = True
    ) -> list[list[FilledBlank]]:
        """Scores given answers instead of finding some.

            filler.score(["Ng is at [MASK] ."], [["Stanford University"]])[0][0].logprob

        Args:
            prompts: texts with blanks, as for `fill`.
            answers: for each prompt one text a blank, from left to right.
            end: whether the token that ends an answer is scored, too.

        Returns:
            per prompt one answer a blank, with the log-probability of each of its tokens, given the prompt and the
            answers before it.

        Raises:
            UserError: as for `fill`; numbers of prompts, blanks and answers that do not fit.
        """
        return [found[0] for found in self.score_candidates(prompts, [[own] for own in answers], end)]

    def score_candidates(
        self, prompts: Sequence[str], candidates: Sequence[Sequence[Sequence[str]]], end: bool = True
    ) -> list[list[list[FilledBlank]]]:
        """As `score`, for any number of candidates for each prompt, which share one reading of it.

        Args:
            prompts, end: as for `score`.
            candidates: for each prompt any number of candidates, each one text a blank.

        Returns:
            per prompt and candidate, in the order given, one answer a blank.
        """
        if len(candidates) != len(prompts):
            raise UserError(f"answers for {len(candidates)} prompts, but there are {len(prompts)}; give some for each")
        encoded, ids = [], []
        for number, (prompt, own) in enumerate(zip(prompts, candidates, strict=True), start=1):
            try:
                encoded.append(self.encode(prompt, check=False))
                ids.append([self.encode_answers(encoded[-1], answers) for answers in own])
            except UserError as error:
                raise UserError(f"prompt {number}: {error}" if len(prompts) > 1 else str(error)) from None
        return self.score_encoded(encoded, ids, end)

    def score_encoded(
        self,
        prompts: Sequence[EncodedPrompt],
        candidates: Sequence[Sequence[Sequence[Sequence[int]]]],
        end: bool = True,
    ) -> list[list[list[FilledBlank]]]:
        """As `score_candidates`, for what `encode` and `encode_answers` have made."""
        scored = score_ids(self.generator, [prompt.context for prompt in prompts], candidates, end=end)
        return [
            [self.describe(prompt.context, answers) for answers in found]
            for prompt, found in zip(prompts, scored, strict=True)
        ]

    def encode_answers(self, prompt: EncodedPrompt, answers: Sequence[str]) -> list[list[int]]:
        """The ids of an answer to each blank, spelled as behind the text before it: after a space, or right there.

        Raises:
            UserError: there are more answers than blanks, or fewer.
        """
        blanks = len(prompt.pieces) - 1
        if len(answers) != blanks:
            raise UserError(f"{len(answers)} answers for {blanks} blank{'s' * (blanks != 1)}; give one for each")
        return [self._encode_answer(*pair) for pair in zip(prompt.pieces[:-1], answers, strict=True)]

    def _encode_answer(self, before: str, answer: str) -> list[int]:
        text = answer.strip()
        if not text:
            return []
        if not before or before[-1].isspace() or answer[0].isspace():
            return self.tokenizer.encode(f" {text}" if before or answer[0].isspace() else text)
        left, joined = self.tokenizer.encode(before[-1]), self.tokenizer.encode(before[-1] + text)
        return joined[len(left) :] if joined[: len(left)] == left else self.tokenizer.encode(text)

    def describe(self, context: Sequence[int], answers: Sequence[Answer]) -> list[FilledBlank]:
        """Answers in words, each with the blank that it fills."""
        blanks = [token for token in context if token in self.generator.masks]
        return [self._described(blank, answer) for blank, answer in zip(blanks, answers, strict=True)]

    def _described(self, blank: int, answer: Answer) -> FilledBlank:
        return FilledBlank(
            self.tokenizer.token_text(blank),
            self.generator.processors.cut(self.tokenizer.decode(answer.tokens)).strip(),
            answer.tokens,
            answer.token_logprobs,
            answer.score,
            tuple(self._described(blank, other) for other in answer.others),
            answer.alternatives,
        )

    def source_text(self, context: Sequence[int]) -> str:
        """A context as one would write it: blanks by name, no [CLS] in front, no end of text behind."""
        ids, special = list(context), self.tokenizer.special
        if ids and ids[0] == special.cls:
            ids = ids[1:]
        if ids and ids[-1] == special.eos:
            ids = ids[:-1]
        return self.tokenizer.decode(ids)

    def _result(self, prompt: EncodedPrompt, answers: Sequence[Answer]) -> FillResult:
        remaining = iter(answers)
        read: list[int] = []  # the text so far, blanks filled
        text, pieces, spans = prompt.pieces[0], iter(prompt.pieces[1:]), []
        for token in prompt.context:
            if token in self.generator.masks:
                answer = next(remaining).tokens
                words = self.generator.processors.cut(self._spaced(read, answer))
                words = words.lstrip() if not text or text[-1].isspace() else words
                spans.append((len(text) + len(words) - len(words.lstrip()), len(text) + len(words)))
                text += words + next(pieces)
                read.extend(answer)
            elif token != self.tokenizer.special.cls:
                read.append(token)
        return FillResult(prompt.prompt, text, self.describe(prompt.context, answers), tuple(spans))

    def _spaced(self, before: list[int], answer: list[int]) -> str:
        """The answer as it reads behind what is before it, with the space that the tokenizer puts between."""
        before = before[-_CONTEXT_FOR_SPACING:]
        left, joined = self.tokenizer.decode(before), self.tokenizer.decode([*before, *answer])
        return joined[len(left) :] if joined.startswith(left) else f" {self.tokenizer.decode(answer)}"
