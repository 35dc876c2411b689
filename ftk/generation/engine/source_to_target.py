"""Prompts of an encoder-decoder: the encoder reads the source, and the answer is the target."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ftk.errors import UserError
from ftk.generation.engine.continuation import OneAnswer
from ftk.generation.engine.request import Branch, Frame, Request

_ONE = np.array(1)


class SourceToTarget(OneAnswer):
    """Prompts are the token ids of sources, and there is one answer, behind the tokens that the decoder starts with.

    Args:
        ends: tokens that end an answer.
        starts: tokens in front of each answer.
        max_positions: most tokens of either side; None: no limit.
        around: tokens in front of and behind the text of a source.
        in_answers: command tokens that an answer may hold besides.

    Raises:
        UserError: there is no end token, or no start.
    """

    reads_nothing_behind = (
        "an encoder-decoder is asked without a text after the answer; put the place of the answer at the end"
    )

    def __init__(
        self,
        ends: Sequence[int],
        starts: Sequence[int],
        max_positions: int | None = None,
        around: tuple[Sequence[int], Sequence[int]] = ((), ()),
        in_answers: Sequence[int] = (),
    ) -> None:
        super().__init__(ends, max_positions)
        if not starts:
            raise UserError(
                "no token is known that the decoder starts with; the model's `decoder_start_token` names it"
            )
        self.starts = tuple(starts)
        self.around = around
        self.in_answers = tuple(in_answers)

    def source(self, text: Sequence[int]) -> list[int]:
        before, behind = self.around
        return [*before, *text, *behind]

    def check(self, request: Request) -> None:
        """Raises UserError if the source is empty, or there are no positions for it or an answer of `max_len`."""
        self._check_source(request.prompt)
        room = self.room(request)
        if room is not None and request.options.max_len > room:
            raise UserError(
                f"an answer of up to {request.options.max_len} tokens does not fit the model's {self.max_positions} "
                f"positions; lower max_len to {room} or less"
            )

    def room(self, request: Request) -> int | None:
        """Positions behind what the decoder starts with."""
        positions = self.positions(request)
        return None if positions is None else positions - len(self.starts)

    def slots(self, request: Request) -> int:
        """What the decoder starts with."""
        return len(self.starts)

    def first(self, request: Request) -> Frame:
        """The source, and what the decoder starts with."""
        positions = {"position_ids": np.arange(len(self.starts))}
        return Frame(self.starts, positions, {"position_ids": _ONE}, context=self.starts, source=request.prompt)

    def branch(self, request: Request, continuation: Sequence[int]) -> Branch:
        """Token ids of an answer, with the end token if it is scored, too.

        Raises:
            UserError: the source is empty, or there are no positions for it or the answer.
        """
        self._check_source(request.prompt)
        ids = list(continuation)
        start, read = len(self.starts), max(len(ids) - 1, 0)
        if self.max_positions is not None and start + read > self.max_positions:
            raise UserError(
                f"the answer takes {start + read} positions, but the model has {self.max_positions}; shorten it"
            )
        return Branch(ids[:-1], {"position_ids": np.arange(start, start + read)}, ids, offset=-1)

    def _check_source(self, source: Sequence[int]) -> None:
        if len(source) == 0:
            raise UserError("the source is empty; write a text")
        if self.max_positions is not None and len(source) > self.max_positions:
            raise UserError(
                f"the source is {len(source)} tokens long, but the model has {self.max_positions} positions; shorten it"
            )
