"""Fills masks: texts with `[MASK]` or `<mask>` in, the same texts with the likeliest token for each mask out."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from ftk.errors import UserError, counted
from ftk.generation.engine.engine import Engine
from ftk.generation.engine.reading import to_device
from ftk.generation.engine.request import Event, Request, check_ids
from ftk.generation.engine.scoring import Scored
from ftk.generation.processors.steering import PromptOptions
from ftk.generation.results import EncodedText, TextAnswer, TextResult
from ftk.generation.search import Answer, not_finite
from ftk.generation.streaming import OnePassStream
from ftk.generation.text import TextGenerator, check_text
from ftk.generation.token_text import text_behind
from ftk.modules.evaluation_mode import evaluation_mode
from ftk.tasks.pieces import special_ids

if TYPE_CHECKING:
    from ftk.generation.one_pass import OnePassConfig
    from ftk.tokenizers.base import Tokenizer

SPELLINGS = ("[MASK]", "<mask>")
"""How a prompt may write a mask, whatever the tokenizer's own text for it."""


@dataclass(frozen=True)
class MaskedText(EncodedText):
    """A text with masks as the model reads it; the request's prompt is its ids, first and last token included.

    Attributes:
        pieces: the text before, between and behind the masks: one more than there are masks.
    """

    pieces: Sequence[str] = ()


class MaskFiller(TextGenerator[MaskedText]):
    """A masked language model with its tokenizer: each mask of a text becomes one token.

        filler.fill("Paris is the [MASK] of France.", top=5).answers[0].alternatives

    All masks of a text are filled from one forward pass: none knows what the others become.

    Args:
        tokenizer: the one that the model was trained with.
        model: an encoder, or several as an ensemble.

    Raises:
        UserError: tokenizer and model do not fit each other; the tokenizer has no mask token.
    """

    example: ClassVar[str] = "the [MASK] fox"
    invitation = "Write a text with [MASK] or <mask> where a token is missing"
    needs_framing: ClassVar[bool] = False

    def __init__(
        self, tokenizer: Tokenizer, model: nn.Module, framing: None, config: OnePassConfig, steering: None
    ) -> None:
        super().__init__(tokenizer, model, None, config, None)
        self.first, self.last, self.mask, self.pad = special_ids(tokenizer, "masked_lm")
        self._spelling = tokenizer.token_text(self.mask)
        self._masks = re.compile("|".join(map(re.escape, {*SPELLINGS, self._spelling})))

    def fill(self, prompts: Any, top: int = 5) -> Any:
        """As `generate`, with the `top` likeliest tokens for each mask.

            for token, logprob in filler.fill("the [MASK] fox").answers[0].alternatives[0]: ...

        Args:
            prompts: a text with masks, or a list of such texts.
            top: tokens in `alternatives` of each answer, at most.

        Returns:
            `TextResult`; of a list, a list of them.
        """
        return self.generate(prompts, alternatives=top)

    def encode(
        self, prompt: str, options: PromptOptions | None = None, seed: int | None = None, *, check: bool = True
    ) -> MaskedText:
        check_text(prompt)
        if options:
            raise UserError(f"a mask is filled without options of its prompt; leave out {', '.join(options)}")
        pieces = self._masks.split(prompt)
        if len(pieces) == 1:
            raise UserError(f"the text has no mask; write {self._spelling} where a token is missing")
        text = self._masks.sub(lambda _: self._spelling, prompt)
        ids = [self.first, *self.tokenizer.encode(text, command_tokens=True), self.last]
        model_config = getattr(self.model, "config", None)
        longest = getattr(model_config, "max_positions", len(ids))
        if len(ids) > longest:
            raise UserError(
                f"the text has {len(ids)} tokens, those at its beginning and end counted, but the model has {longest} "
                "positions; shorten it"
            )
        check_ids(self.model, ids)
        return MaskedText(prompt, Request(ids, self.config), pieces=pieces)

    def encode_candidates(self, prompt: str, candidates: Sequence[Sequence[str]], end: bool) -> MaskedText:
        encoded = self.encode(prompt)
        num_masks = len(encoded.pieces) - 1
        for words in candidates:
            if len(words) != num_masks:
                raise UserError(f"the text has {counted(num_masks, 'mask')}, but {len(words)} are answered")
        given = [list(map(self._token, encoded.pieces, words)) for words in candidates]
        return replace(encoded, candidates=given)

    def scored(self, prompt: MaskedText, candidate: Sequence[int], found: Scored) -> list[TextAnswer]:
        return [
            self.described(Answer([token], [value], value))
            for token, value in zip(candidate, found.logprobs, strict=True)
        ]

    def score_encoded(
        self, prompts: Sequence[MaskedText], progress: Callable[[int], object] | None = None
    ) -> list[list[list[TextAnswer]]]:
        scored: list[list[list[TextAnswer]]] = [[] for _ in prompts]
        for numbers in self._batches([prompt.request for prompt in prompts]):
            rows = self._logprobs([prompts[number].request.prompt for number in numbers])
            for number, logprobs in zip(numbers, rows, strict=True):
                prompt, best = prompts[number], logprobs.amax(-1).tolist()
                for candidate in prompt.candidates:
                    own = logprobs[range(len(candidate)), candidate].tolist()
                    scored[number].append(self.scored(prompt, candidate, Scored(own, best)))
            if progress is not None:
                progress(len(numbers))
        return scored

    def engine(self, requests: Sequence[Request]) -> Engine:
        raise UserError("a masked language model writes no answers token by token; it fills masks ('generate')")

    def events(self, requests: Sequence[Request], *, stream: bool = False) -> Generator[Event, None, None]:
        """The answers of each request, one for each mask, and then that it is done."""
        for numbers in self._batches(requests):
            rows = self._logprobs([requests[number].prompt for number in numbers])
            for number, logprobs in zip(numbers, rows, strict=True):
                for mask, answer in enumerate(_answers(logprobs, requests[number].options.alternatives)):
                    yield Event(number, "answer", mask, answer=answer)
                yield Event(number, "done")

    def result(self, prompt: MaskedText, answers: Sequence[Answer]) -> TextResult:
        text, spans = prompt.pieces[0], []
        ids = list(prompt.request.prompt)
        places = [place for place, token in enumerate(ids) if token == self.mask]
        for place, answer, piece in zip(places, answers, prompt.pieces[1:], strict=True):
            words = text_behind(self.tokenizer.decode, ids[1:place], answer.tokens, separator=" ")
            # The space in front of a mask is the one in front of its word.
            words = words.lstrip() if not text or text[-1].isspace() else words
            start = len(text) + len(words) - len(words.lstrip())
            spans.append((start, len(text) + len(words)))
            text += words + piece
            ids[place] = answer.tokens[0]
        return TextResult(prompt.prompt, text, list(map(self.described, answers)), tuple(spans))

    def described(self, answer: Answer) -> TextAnswer:
        """The token of one mask in words."""
        text = self.tokenizer.decode(answer.tokens).strip()
        return TextAnswer(text, answer.tokens, answer.token_logprobs, answer.score, alternatives=answer.alternatives)

    def text_stream(self, number: int, prompt: MaskedText) -> OnePassStream:
        return OnePassStream(number, len(prompt.pieces) - 1, self.described, functools.partial(self.result, prompt))

    def _token(self, before: str, word: str) -> int:
        """The one token of a word behind a text."""
        check_text(word, "an answer")
        read, joined = self.tokenizer.encode(before.rstrip()), self.tokenizer.encode(before + word)
        ids = joined[len(read) :] if joined[: len(read)] == read else self.tokenizer.encode(word)
        if len(ids) != 1:
            raise UserError(f"{word!r} is {counted(len(ids), 'token')}; a mask stands for one")
        return ids[0]

    def _batches(self, requests: Sequence[Request]) -> Iterator[list[int]]:
        """Numbers of requests of like length together, the longest first."""
        order = sorted(range(len(requests)), key=lambda number: len(requests[number].prompt), reverse=True)
        for start in range(0, len(order), self.config.batch_size):
            yield order[start : start + self.config.batch_size]

    @torch.inference_mode()
    def _logprobs(self, texts: Sequence[Sequence[int]]) -> Sequence[Tensor]:
        """Of each text the logarithms of all tokens' probabilities at its masks, float32 [masks, V] on the host."""
        model: Any = self.model
        device = next(model.parameters()).device
        lengths = np.array([len(text) for text in texts])
        tokens = np.full((len(texts), lengths.max()), self.pad, np.int64)  # [B, T]
        for row, text in enumerate(texts):
            tokens[row, : len(text)] = text
        rows, places = np.nonzero(tokens == self.mask)
        with evaluation_mode(model):
            hidden = model.hidden_states(to_device(tokens, device), lengths=to_device(lengths, device))  # [B, T, H]
            logits = model.head(hidden[to_device(rows, device), to_device(places, device)])  # [N, V]
        # Rows that pad the vocabulary have a share of the probability, but are no tokens.
        logprobs = logits.float().log_softmax(-1)[:, : self.tokenizer.vocab_size].cpu()
        if not logprobs.isfinite().all():
            raise not_finite()
        return logprobs.split(np.bincount(rows, minlength=len(texts)).tolist())


def _answers(logprobs: Tensor, top: int) -> Iterator[Answer]:
    """The likeliest token at each mask, and the `top` likeliest; logprobs [masks, V]."""
    best = logprobs.topk(min(max(top, 1), logprobs.size(1)))
    for values, tokens in zip(best.values.tolist(), best.indices.tolist(), strict=True):
        alternatives = (tuple(zip(tokens, values, strict=True)),) if top else ()
        yield Answer(tokens[:1], values[:1], values[0], alternatives=alternatives)
