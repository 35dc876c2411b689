"""From options to processors, in the order in which they are applied; contradictions are found here."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ftk.config.options import mistakes
from ftk.errors import UserError, shown
from ftk.generation.processors.base import Processor, Processors
from ftk.generation.processors.config import ProcessorConfig
from ftk.generation.processors.constraints import LexicalConstraints
from ftk.generation.processors.forbidden import ForbiddenPhrases, ForbiddenTokens, NoRepeatNgram
from ftk.generation.processors.guided import GuidedAnswers
from ftk.generation.processors.guides import Guide, guide_of_file, guided_tokens, text_of_file
from ftk.generation.processors.length import MaxLength, MinLength, of_answer
from ftk.generation.processors.penalties import LogitDifferences, RepetitionPenalty, UnknownPenalty
from ftk.generation.processors.phrases import PhraseTrie, Spelling, spellings
from ftk.generation.processors.prefix import AllowedTokens, AllowedTokensFunction, ForcedPrefix
from ftk.generation.processors.progress import OrderedProgress, Progress, UnorderedProgress, fewest_tokens
from ftk.generation.processors.stop_strings import StopStrings, StopTokens

if TYPE_CHECKING:
    from ftk.tokenizers import Tokenizer

_MAX_FILE_BYTES = 1 << 26
_FAR = 1000  # tokens
_NAMED = 3  # constraints that a message names


def build_processors(
    config: ProcessorConfig | None,
    tokenizer: Tokenizer,
    *,
    ends: Collection[int],
    max_len: int = 24,
    min_len: int = 0,
    allowed_tokens: AllowedTokensFunction | None = None,
    in_answers: Collection[int] = (),
    **options: Any,
) -> Processors:
    """What the options ask for, and what holds always: no command token in an answer but `ends` and `in_answers`.

    Penalties come first, then what forbids, then what forces, so that what must come is not lost: repetition
    penalty, differences of logits, unknown-token penalty, command tokens, forbidden words, n-grams, shortest length,
    allowed tokens, constraints, prefix, guide, greatest length, stop strings, stop tokens.

    Args:
        ends: tokens that end an answer (`Framing.ends`).
        max_len, min_len: limits of every answer, as in `GenerationConfig`.
        allowed_tokens: see `AllowedTokens`.
        in_answers: command tokens that answers of the task hold.
        options: fields of `ProcessorConfig`, instead of or on top of `config`.

    Raises:
        UserError: values that are not allowed, or that contradict each other.
    """
    config = dataclasses.replace(config or ProcessorConfig(), **options)
    errors = [*mistakes(config), *_length_errors(config, min_len, max_len)]
    if errors:
        raise UserError("; ".join(errors))
    return Processors(list(_Plan(config, tokenizer, ends, max_len, allowed_tokens, in_answers).items()))


class _Plan:
    """The texts of the options as tokens, checked against each other."""

    def __init__(
        self,
        config: ProcessorConfig,
        tokenizer: Tokenizer,
        ends: Collection[int],
        max_len: int,
        allowed_tokens: AllowedTokensFunction | None,
        in_answers: Collection[int],
    ) -> None:
        self.config = config
        self.in_answers = frozenset(in_answers)
        self.tokenizer = tokenizer
        self.ends = frozenset(ends)
        self.max_len = max_len
        self.allowed_tokens = allowed_tokens
        self.forbidden = PhraseTrie(self._forbidden())
        self.num_answers = max(len(config.prefix), len(config.max_lens), *config.constraint_answers, 0)
        # Number -1 stands for all behind those that some option names.
        self.progress = {number: self._progress(number) for number in range(-1, self.num_answers)}
        self.prefixes = {number: self._prefix(number) for number in range(-1, self.num_answers)}

    def items(self) -> Iterator[Processor]:
        config, special = self.config, self.tokenizer.special
        if config.repetition_penalty != 1.0:
            yield RepetitionPenalty(config.repetition_penalty, config.repetition_penalty_prompt)
        if config.frequency_penalty or config.presence_penalty or config.logit_bias:
            yield LogitDifferences(config.frequency_penalty, config.presence_penalty, self._bias())
        if config.unk_penalty != 0.0:
            if special.unk is None:
                raise UserError("unk_penalty: the tokenizer has no unknown token")
            yield UnknownPenalty(special.unk, config.unk_penalty)
        commands = {token.id for token in self.tokenizer.command_tokens}.difference(
            self.ends, self.in_answers, config.stop_token_ids, {special.unk}
        )
        yield ForbiddenTokens(commands, self.tokenizer.vocab_size)
        if self.forbidden.rows:
            yield ForbiddenPhrases(self.forbidden.rows)
        if config.no_repeat_ngram_size:
            yield NoRepeatNgram(config.no_repeat_ngram_size)
        if config.min_lens:
            yield MinLength(config.min_lens)
        if self.allowed_tokens is not None:
            yield AllowedTokens(self.allowed_tokens)
        if config.constraints:
            progress = {number: own for number, own in self.progress.items() if own is not None}
            # An answer that is named without phrases of its own must not get those of all.
            nothing = {number: UnorderedProgress([]) for number, own in self.progress.items() if own is None}
            yield LexicalConstraints({**nothing, **progress}, config.max_lens)
        if any(self.prefixes.values()):
            yield ForcedPrefix(self.prefixes)
        guides = self._guides()
        if guides:
            yield GuidedAnswers(guides)
        if config.max_lens:
            yield MaxLength(config.max_lens)
        if config.stop:
            yield StopStrings(config.stop, self.tokenizer.decode)
        if config.stop_token_ids:
            self._check_ids("stop_token_ids", config.stop_token_ids)
            yield StopTokens(config.stop_token_ids)

    def _bias(self) -> dict[int, float]:
        """Token id -> what is added to its logit."""
        pairs = [pair.partition("=") for pair in self.config.logit_bias]
        found = {int(token): float(value) for token, _, value in pairs}
        self._check_ids("logit_bias", found)
        return found

    def _check_ids(self, option: str, ids: Iterable[int]) -> None:
        wrong = next((token for token in ids if token >= self.tokenizer.vocab_size), None)
        if wrong is not None:
            raise UserError(f"{option}: {wrong} is no id of the tokenizer's {self.tokenizer.vocab_size} tokens")

    def _guides(self) -> dict[int, Guide]:
        """Guides by the number of the answer; under -1 that of all."""
        texts = self.config.guide
        if self.config.guide_file is not None:
            texts = [guide_of_file(self.config.guide_file)]
        numbers = [-1] if len(texts) == 1 else range(len(texts))
        return {
            number: Guide(text, guided_tokens(self.tokenizer, self.ends))
            for number, text in zip(numbers, texts, strict=True)
            if text.strip()
        }

    def _forbidden(self) -> list[Spelling]:
        texts = [(text, "forbid_words") for text in self.config.forbid_words]
        if self.config.forbid_words_file is not None:
            texts += _lines(self.config.forbid_words_file)
        return [row for text, option in texts for row in spellings(self.tokenizer, text, option)]

    def _progress(self, number: int) -> Progress | None:
        """The phrases of an answer; None where there are none."""
        config = self.config
        numbers = config.constraint_answers or [0] * len(config.constraints)
        wanted = (0,) if number < 0 else (0, number + 1)
        texts = [text for text, of in zip(config.constraints, numbers, strict=True) if of in wanted]
        if not texts:
            return None
        if not config.ordered_constraints:
            texts = list(dict.fromkeys(texts))
        room = self._room(number)
        phrases = [self._possible(text, "constraints", room) for text in texts]
        if config.ordered_constraints:
            ordered = OrderedProgress(phrases)
            self._check_room(texts, ordered.need(ordered.start), number)
            return ordered
        # First what takes one look at each phrase: of far too many the shortest arrangement is hard to find.
        self._check_room(texts, fewest_tokens(phrases), number)
        progress = UnorderedProgress(phrases)
        self._check_room(texts, progress.need(progress.start), number)
        return progress

    def _check_room(self, texts: Sequence[str], needed: int, number: int) -> None:
        if needed > self._room(number):
            few = ", ".join(map(shown, texts[:_NAMED]))
            more = f" and {len(texts) - _NAMED:,} more" if len(texts) > _NAMED else ""
            raise self._too_long(f"constraints {few}{more} need {needed} tokens", number)

    def _too_long(self, what: str, number: int) -> UserError:
        lists = " or max_lens" if self.config.max_lens else ""
        leave = ", or leave some out" if what.startswith("constraints") else ""
        return UserError(
            f"{what}, but {_name(number)} has room for {self._room(number)}; raise `max_len`{lists}{leave}"
        )

    def _prefix(self, number: int) -> list[Spelling]:
        """The ways in which an answer may begin; none where it is free."""
        prefix = self.config.prefix
        if len(prefix) == 1:
            text = prefix[0]
        else:
            text = prefix[number] if 0 <= number < len(prefix) else ""
        if not text.strip():
            return []
        room = self._room(number)
        rows = self._possible(text, "prefix", room)
        progress = self.progress[number]
        needed = {row: len(row) + (progress.need(progress.after(row)) if progress else 0) for row in rows}
        fitting = [row for row in rows if needed[row] <= room]
        if not fitting:
            what = "it and the constraints need" if progress else "it needs"
            raise self._too_long(f"prefix {shown(text)}: {what} {min(needed.values())} tokens", number)
        return fitting

    def _possible(self, text: str, option: str, room: int) -> list[Spelling]:
        """The spellings of a text that must come, without those that other options forbid.

        All of them where none comes near to the room: nothing else matters then.
        """
        rows = spellings(self.tokenizer, text, option)
        if min(map(len, rows)) > room + _FAR:
            return rows
        for stop in self.config.stop:
            if stop in text:
                raise UserError(
                    f"{option} {shown(text)} holds {stop!r}, at which an answer stops; take one of them away"
                )
        possible = [row for row in rows if not self.forbidden.within(row)]
        if not possible:
            bad = self.forbidden.rows[min(self.forbidden.within(rows[0]))]
            words = self.tokenizer.decode(bad).strip()
            raise UserError(
                f"{option} {shown(text)} must come, but {words!r} in it is forbidden; take one of them away"
            )
        return possible

    def _room(self, number: int) -> int:
        return of_answer(self.config.max_lens, number, self.max_len) if number >= 0 else self.max_len


def _length_errors(config: ProcessorConfig, min_len: int, max_len: int) -> Iterator[str]:
    for name in ("min_lens", "max_lens"):
        for value in getattr(config, name):
            if not min_len <= value <= max_len:
                yield f"{name} holds {value}; it must be from min_len {min_len} to max_len {max_len}"


def _lines(path: str) -> list[tuple[str, str]]:
    """The texts of a file, each with its place; empty lines are left out."""
    text = text_of_file("forbid_words_file", path, _MAX_FILE_BYTES, "a text file with one word per line")
    lines = enumerate(text.splitlines(), start=1)
    return [(line.strip(), f"{path}:{number}:") for number, line in lines if line.strip()]


def _name(number: int) -> str:
    return "an answer" if number < 0 else f"answer {number + 1}"
