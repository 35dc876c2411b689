"""A decoder of a model with adapters side by side: each row is read with the adapter of its request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ftk.generation.engine.decoder import CachedDecoder, RequestSoFar
from ftk.generation.engine.request import Frame
from ftk.modules.adapters.side_by_side import Choice


class AdaptedDecoder(CachedDecoder):
    """A `CachedDecoder` that sets the model's `Choice` before each forward pass.

    Frames are read once per adapter, a step reads the rows of all adapters at once.

    Args:
        arguments: as for `CachedDecoder`.
    """

    def __init__(self, choice: Choice, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.choice = choice
        self.numbers = np.zeros(self.num_rows, dtype=np.int64)  # of the adapter of each row

    def read(
        self,
        rows: Sequence[int],
        frames: Sequence[Frame],
        asked: Sequence[RequestSoFar] = (),
        spare: Sequence[int] = (),
    ) -> Tensor:
        if not asked:  # a part of a reading whose adapter is chosen
            return super().read(rows, frames, (), spare)
        numbers = [self.choice.number(request.adapter) for request, _ in asked]
        found: list[Tensor] = [torch.empty(0)] * len(rows)
        with self._undone(rows):
            for number in sorted({*numbers}):
                places = [place for place, other in enumerate(numbers) if other == number]
                self.choice.take([number], self.device)
                self.reader = number
                own_frames = [frames[place] for place in places]
                logits = super().read([rows[place] for place in places], own_frames, (), spare)
                for place, own in zip(places, logits, strict=True):
                    found[place] = own
        self.numbers[list(rows)] = numbers
        return torch.stack(found)

    def step(self, tokens: Tensor) -> Tensor:
        self.choice.take(self.numbers[: tokens.size(0)].tolist(), self.device)
        return super().step(tokens)

    def move(self, source: int, target: int) -> None:
        super().move(source, target)
        self.numbers[target] = self.numbers[source]
