"""Texts that a causal language model continues, as a whole or in pieces."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, overload

from torch import nn

from ftk.errors import UserError, shown
from ftk.generation.config import GenerationConfig
from ftk.generation.engine.continuation import PromptReader
from ftk.generation.engine.request import NOT_SCORED, Event, Framing, Request
from ftk.generation.engine.scoring import Scored, score
from ftk.generation.processors.steering import PromptOptions, Steering, seed_of
from ftk.generation.results import EncodedText, Span, TextAnswer, TextPiece, TextResult
from ftk.generation.search import Answer, strategy
from ftk.generation.search.base import Fusion
from ftk.generation.streaming import AnswerText, whole_characters
from ftk.generation.text import TextGenerator, as_lists, check_lists, check_text, each_prompt, is_single
from ftk.generation.token_text import text_behind

if TYPE_CHECKING:
    from ftk.tokenizers.base import Tokenizer


MESSAGES, TEMPLATE_VALUES = "messages", "chat_template_kwargs"
"""The option of a prompt that holds what was said before it, which may be nothing."""


class TextContinuer(TextGenerator[EncodedText]):
    """A causal language model with its tokenizer: each text is continued by one answer.

        generator.generate("Once upon a time").text

    Where the tokenizer has a chat template, a text may be the last message of a conversation: the option `messages` of
    the prompt holds those before it, each with `role` (user, assistant or system) and `content`, or is empty; and
    `chat_template_kwargs` holds values of the template's variables, such as `enable_thinking`.

    The framing's prompts are token ids, which may be given in place of a text; see `TextGenerator` for the arguments.
    """

    reads_ids: ClassVar[bool] = True

    steering: Steering

    @classmethod
    def assembled(
        cls,
        tokenizer: Tokenizer,
        model: nn.Module,
        framing: Framing,
        config: GenerationConfig,
        steering: Steering,
        language_model: nn.Module | None = None,
    ) -> TextContinuer:
        reader = None
        if language_model is not None:
            reader = PromptReader(language_model, framing, Fusion(config.lm_weight, config.lm_ends))
        return cls(tokenizer, model, framing, config, steering, reader)

    @classmethod
    def check_config(cls, config: GenerationConfig, model_config: Any) -> None:
        limit = getattr(model_config, "position_limit", getattr(model_config, "max_positions", None))
        ahead = strategy(config).target.lookahead
        if limit is not None and config.max_len + ahead > limit:
            also = f" ({ahead} is for the search)" if ahead else ""
            raise UserError(
                f"max_len is {config.max_len}, but the model has {limit} positions{also}; lower it (`max_len`)"
            )

    @overload
    def score(self, prompts: str, continuations: Sequence[str]) -> list[Scored]: ...  # type: ignore[overload-overlap]

    @overload
    def score(self, prompts: Sequence[str], continuations: Sequence[Sequence[str]]) -> list[list[Scored]]: ...

    def score(self, prompts: Any, continuations: Any) -> list[Any]:
        """Log-probabilities of given continuations of a prompt, or of each of several; see `Engine.score`.

        The end token is not scored.

        Args:
            prompts: a text, or a list of texts.
            continuations: of the prompt any number of texts, each with the space in front that belongs to it; of a list
                of prompts a list of such lists.

        Raises:
            UserError: as for `generate`; numbers of prompts and lists of continuations that differ.
        """
        texts, own = as_lists(prompts, continuations)
        check_lists("score(prompt, [continuation])", texts, own)
        encoded = each_prompt(
            lambda prompt, given: self.encode_candidates(prompt, [[text] for text in given], False), texts, own
        )
        requests, candidates = [prompt.request for prompt in encoded], [prompt.candidates for prompt in encoded]
        found = score(self.model, self.framing, requests, candidates)
        return found[0] if is_single(prompts) else found

    def encode(
        self,
        prompt: str | Sequence[int],
        options: PromptOptions | None = None,
        seed: int | None = None,
        *,
        check: bool = True,
    ) -> EncodedText:
        ids = prompt if self.reads_ids and isinstance(prompt, list) else None
        text: Any = prompt if ids is None else self.tokenizer.decode(ids)
        check_text(text)
        options = dict(options or {})
        earlier, values = options.pop(MESSAGES, None), options.pop(TEMPLATE_VALUES, None) or {}
        if not isinstance(values, Mapping):
            raise UserError(f"`{TEMPLATE_VALUES}` is {shown(values)}; it must be an object: names and values")
        if values and earlier is None:
            raise UserError(f"`{TEMPLATE_VALUES}` are for conversations; give `{MESSAGES}`")
        own = self.steering.of(options, 1) if options else None
        seeds = (seed_of(options), seed, self.config.seed)
        read = ids
        if read is None:
            read = self._prompt_ids(text) if earlier is None else self._last_message(text, earlier, values)
        request = Request(
            read,
            self.config,
            self.steering.processors if own is None else own,
            next(seed for seed in seeds if seed is not None),
        )
        if check:
            self.framing.check(request)
        return EncodedText(text, request, is_message=earlier is not None, ids=ids)

    def encode_candidates(
        self, prompt: str | Sequence[int], candidates: Sequence[Sequence[str | Sequence[int]]], end: bool
    ) -> EncodedText:
        """See `TextGenerator`; where the prompt is token ids, so are the candidates."""
        if any(len(texts) != 1 for texts in candidates):
            raise UserError("a prompt is continued by one answer; give one, or candidates with one each")
        encoded = self.encode(prompt, check=False)
        self.framing.check(dataclasses.replace(encoded.request, options=GenerationConfig(max_len=1)))

        def tokens(text: Any) -> Sequence[int]:
            if encoded.ids is not None:
                return list(text)
            check_text(text, "a continuation")
            return self._tokens_behind(encoded.request.prompt, encoded.prompt, text)

        ends = self.framing.ends[: int(end)]
        given = [self.framing.continuation([*tokens(text), *ends]) for (text,) in candidates]
        for candidate in given:
            self.framing.branch(encoded.request, candidate)  # refuses what does not fit
        return dataclasses.replace(encoded, candidates=given)

    def result(self, prompt: EncodedText, answers: Sequence[Answer]) -> TextResult:
        (best,) = answers
        found, *others = (
            TextAnswer(
                prompt.request.processors.cut(self._text_behind(prompt, answer.tokens)),
                answer.tokens,
                answer.token_logprobs,
                answer.score,
                alternatives=answer.alternatives,
                lm_logprobs=answer.lm_logprobs,
            )
            for answer in (best, *best.others)
        )
        shown = self.shown(prompt)
        text = shown + found.text
        answer = dataclasses.replace(found, others=tuple(others))
        return TextResult(prompt.prompt, text, [answer], ((len(shown), len(text)),))

    def scored(self, prompt: EncodedText, candidate: Any, found: Scored) -> list[TextAnswer]:
        branch = self.framing.branch(prompt.request, candidate)
        words = [token for token in branch.targets if token not in (*self.framing.ends, NOT_SCORED)]
        score = sum(found.logprobs) / max(len(found.logprobs), 1) ** self.config.length_penalty
        return [TextAnswer(self._text_behind(prompt, words), words, found.logprobs, score)]

    def ids_before_answers(self, prompt: EncodedText) -> Sequence[int]:
        ids: Sequence[int] = prompt.request.prompt
        return ids

    def text_stream(self, number: int, prompt: EncodedText) -> ContinuationStream:
        return ContinuationStream(self, number, prompt)

    def shown(self, prompt: EncodedText) -> str:
        """What stands in front of the answer in a result's text: the prompt, unless it is a message."""
        return "" if prompt.is_message else prompt.prompt

    def answer_text(self, prompt: EncodedText) -> AnswerText:
        """The text of an answer to a prompt while its tokens come."""
        processors, before = prompt.request.processors, self.ids_before_answers(prompt)
        return AnswerText(
            self.tokenizer.decode, lambda text: processors.settled(whole_characters(text)), before, self._stripped
        )

    def _text_behind(self, prompt: EncodedText, tokens: Sequence[int]) -> str:
        return self._stripped(text_behind(self.tokenizer.decode, self.ids_before_answers(prompt), tokens))

    def _stripped(self, text: str) -> str:
        """An answer's text as it is: white space at its ends counts."""
        return text

    def _last_message(self, text: str, earlier: Sequence[Mapping[str, Any]], values: Mapping[str, Any]) -> Any:
        if self.conversation is None:
            raise UserError(
                "the model did not learn from conversations, and its tokenizer has no chat template; give a text "
                "without 'messages'"
            )
        return self.conversation(text, earlier, values)

    def _prompt_ids(self, text: str) -> list[int]:
        return [*self.tokenizer.prompt_prefix, *self.tokenizer.encode(text)]

    def _tokens_behind(self, ids: Sequence[int], prompt: str, text: str) -> list[int]:
        """A text as tokens behind a prompt; where its first ones would join the prompt's last, those of it alone."""
        joined = self._prompt_ids(prompt + text)
        return joined[len(ids) :] if joined[: len(ids)] == list(ids) else self.tokenizer.encode(text)


class ContinuationStream:
    """One continuation while its tokens come.

    Args:
        prompt: as the model reads it.
    """

    def __init__(self, generator: TextContinuer, number: int, prompt: EncodedText) -> None:
        self.generator, self.number, self.prompt = generator, number, prompt
        self._line = generator.answer_text(prompt)
        self._not_shown = generator.shown(prompt)

    def add(self, event: Event) -> TextPiece | None:
        """The text that an event makes known; None where no whole character is new."""
        result = None
        if event.answer is None:
            new = self._line.add(event.tokens, event.logprobs, event.alternatives)
            if not new.text:
                return None
        else:
            result = self.generator.result(self.prompt, [event.answer])
            new = self._line.rest(result.answers[0].text, event.answer)
        start, filled = len(self._not_shown), self._not_shown + new.text
        self._not_shown = ""
        spans = (Span(start, len(filled), 0),) if new.text else ()
        answer = None if result is None else result.answers[0]
        return TextPiece(self.number, 0, *new[:3], filled, spans, answer, result, new.alternatives)
