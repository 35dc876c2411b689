"""Prompts of a causal language model: the answer continues the prompt."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import nn

from ftk.errors import UserError
from ftk.generation.engine.request import WORD, Branch, Frame, Framing, Request
from ftk.generation.search import Answer, strategy
from ftk.generation.search.base import Fusion

_ONE = np.array(1)


class OneAnswer:
    """What framings share whose prompts are token ids with one answer, which stands behind what is read.

    Raises:
        UserError: there is no end token.
    """

    reads_behind = False

    reads_nothing_behind: str
    """The error for a text behind the answer."""

    source: Callable[[Sequence[int]], list[int]]
    """The token ids of a text -> those that the model reads for it."""

    def __init__(self, ends: Sequence[int], max_positions: int | None) -> None:
        if not ends:
            raise UserError("the tokenizer has no token that ends a text; a model needs one to end an answer")
        self.ends = tuple(ends)
        self.max_positions = max_positions

    def positions(self, request: Request) -> int | None:
        """Tokens that a prompt and its answer may have together; None: any.

        The last token of an answer is read by searches that look ahead alone.
        """
        lookahead = strategy(request.options).target.lookahead
        return None if self.max_positions is None else self.max_positions + 1 - lookahead

    def work(self, request: Request) -> tuple[int]:
        """The prompt's tokens."""
        return (len(request.prompt),)

    def next(self, request: Request, answers: Sequence[Answer]) -> Frame | None:
        """Nothing: there is one answer."""
        return None

    def ask(
        self, before: Sequence[int], behind: Sequence[int] = (), expected: str = WORD, closed: bool | None = None
    ) -> list[int]:
        """The text before the answer.

        Raises:
            UserError: there is a text behind it.
        """
        if behind:
            raise UserError(self.reads_nothing_behind)
        return self.source(before)

    def continuation(self, answer: Sequence[int]) -> Sequence[int]:
        """The answer."""
        return answer


class Continuation(OneAnswer):
    """Prompts are token ids, positions count from 0, and there is one answer, behind the prompt.

    Args:
        ends: tokens that end an answer.
        max_positions: most tokens of a prompt and its answer; None: no limit.
        first_ids: a model's own, read in front of each prompt.
        begins: tokens that every text begins with, for `ask`.
        sees_prompt: whether all tokens see the whole prompt and what stands in front of it; else those before them.
    """

    reads_nothing_behind = "a causal model reads nothing after an answer; put the place of the answer at the end"

    def __init__(
        self,
        ends: Sequence[int],
        max_positions: int | None = None,
        first_ids: Sequence[int] = (),
        begins: Sequence[int] = (),
        *,
        sees_prompt: bool = False,
    ) -> None:
        super().__init__(ends, max_positions)
        self.first_ids = list(first_ids)
        self.begins = list(begins)
        self.sees_prompt = sees_prompt

    def read_by(self, model_config: Any) -> Continuation:
        """The same prompts as another model reads them, by its options."""
        own = copy.copy(self)
        own.max_positions = getattr(model_config, "max_positions", None)
        own.first_ids = [*getattr(model_config, "prompt_ids", ())]
        own.sees_prompt = getattr(model_config, "sees_prompt", False)
        return own

    def check(self, request: Request) -> None:
        """Raises UserError if the prompt is empty, or there are no positions for it and an answer of `max_len`."""
        length, max_len, room = len(request.prompt), request.options.max_len, self.room(request)
        _refuse_empty(request.prompt)
        if room is not None and max_len > room:
            answer = f"with an answer of up to {max_len} tokens " if room > 0 else ""
            lower = f", or lower max_len to {room} or less" if room > 0 else ""
            raise UserError(
                f"the prompt is {length} tokens long; {answer}it does not fit the model's {self.max_positions} "
                f"positions; shorten it{lower}"
            )

    def room(self, request: Request) -> int | None:
        """Positions behind the prompt."""
        positions = self.positions(request)
        return None if positions is None else positions - len(request.prompt)

    def slots(self, request: Request) -> int:
        """The prompt's tokens, and those in front."""
        return len(self.first_ids) + len(request.prompt)

    def first(self, request: Request) -> Frame:
        """The prompt."""
        prompt = request.prompt
        tokens, own = [*self.first_ids, *prompt], len(self.first_ids)
        places, prefix = {"position_ids": np.arange(len(tokens))}, len(tokens) if self.sees_prompt else 0
        return Frame(tokens, places, {"position_ids": _ONE}, prefix, context=prompt, own=own)

    def branch(self, request: Request, continuation: Sequence[int]) -> Branch:
        """Token ids behind the prompt, with the end token if it is scored, too.

        Raises:
            UserError: the prompt is empty, or there are no positions for it and the continuation.
        """
        _refuse_empty(request.prompt)
        ids = list(continuation)
        start = len(request.prompt)
        longest = start + max(len(ids), 1) - 1
        if self.max_positions is not None and longest > self.max_positions:
            raise UserError(
                f"prompt and answer take {longest} positions, but the model has {self.max_positions}; shorten them"
            )
        positions = len(self.first_ids) + np.arange(start, start + max(len(ids) - 1, 0))
        return Branch(ids[:-1], {"position_ids": positions}, ids, offset=-1)

    def source(self, text: Sequence[int]) -> list[int]:
        return [*self.begins, *text]


def _refuse_empty(prompt: Sequence[int]) -> None:
    if len(prompt) == 0:
        raise UserError("the prompt is empty; write the beginning of a text")


class PromptReader:
    """A language model that reads what the model reads (`ftk.generation.engine.fusion.LanguageModel`).

    A text that is longer than its positions is cut at its left.

    Args:
        model: decoded with keys and values of its own.
        framing: of the model's prompts.
        fusion: how its log-probabilities count.
    """

    def __init__(self, model: nn.Module, framing: Framing, fusion: Fusion) -> None:
        self.model, self.framing, self.fusion = model, framing, fusion
        if hasattr(framing, "read_by"):
            self.framing = framing.read_by(getattr(model, "config", None))

    def slots(self, request: Request) -> int:
        """Those of the prompt."""
        return self.framing.slots(self._cut(request))

    def next(self, request: Request, answers: Sequence[Answer]) -> Frame:
        """The prompt, to which there is one answer."""
        return self.framing.first(self._cut(request))

    def _cut(self, request: Request) -> Request:
        """The request with as much of its prompt as fits the model's positions with the longest answer."""
        room = self.framing.room(request) if isinstance(self.framing, Continuation) else None
        excess, prompt = 0 if room is None else request.options.max_len - room, request.prompt
        if excess <= 0:
            return request
        begins = getattr(self.framing, "begins", [])
        start = len(begins) if [*prompt[: len(begins)]] == begins and len(begins) + excess < len(prompt) else 0
        return dataclasses.replace(request, prompt=[*prompt[:start], *prompt[start + excess :]])
