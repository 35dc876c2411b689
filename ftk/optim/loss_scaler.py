"""Dynamic loss scaling for fp16 (Micikevicius et al. 2018, 3.2), decided on the device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ftk.model_parallel.shards import multiply_gradients
from ftk.optim.config import LossScaleConfig

_CEILING = 2.0**64  # beyond it the scale itself would overflow float32, and could not come back


class LossScaler:
    """A factor on the loss that halves when gradients overflow and doubles after a while without.

    It is a power-of-two multiple of where it began, so that scaling and unscaling round nothing. All of it are
    tensors: an update never waits for the device.

    Args:
        device: of the gradients.
    """

    def __init__(self, config: LossScaleConfig, device: torch.device) -> None:
        self.config = config
        self.scale = torch.tensor(config.fp16_init_scale, dtype=torch.float32, device=device)  # 0-d
        # Updates since the last overflow or doubling; updates and overflows since the last change of the scale;
        # overflows at the floor, of this process.
        self._counts = torch.zeros(4, dtype=torch.int64, device=device)

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss to go backward from."""
        return loss * self.scale

    def unscale(self, parameters: Iterable[nn.Parameter]) -> None:
        """Divide the gradients by the scale, in place."""
        multiply_gradients(parameters, self.scale.reciprocal())

    def update(self, overflow: Tensor) -> None:
        """Adapt the scale after an update.

        Args:
            overflow: 0-d bool, whether a gradient was infinite or not a number.
        """
        config = self.config
        calm, updates, overflows, at_floor = self._counts.unbind()
        calm, updates, overflows = (calm + 1) * ~overflow, updates + 1, overflows + overflow
        fall = overflow & (overflows >= config.fp16_scale_tolerance * updates)
        at_floor = at_floor + (fall & (self.scale <= config.fp16_min_scale))
        rise = calm >= config.fp16_scale_window
        scale = torch.where(fall, (self.scale / 2).clamp_min(config.fp16_min_scale), self.scale)
        self.scale = torch.where(rise, (scale * 2).clamp_max(_CEILING), scale)
        changed = fall | rise
        self._counts = torch.stack([calm * ~rise, updates * ~changed, overflows * ~changed, at_floor])

    def overflows_at_floor(self) -> int:
        """How often gradients overflowed though the scale was at its floor, in this process. Waits for the device."""
        return int(self._counts[3])

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale.item(), "counts": self._counts.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.scale = torch.full_like(self.scale, state["scale"])
        self._counts = torch.tensor(state["counts"], dtype=torch.int64, device=self.scale.device)
        self._counts[3] = 0  # else a run that ended for overflows at the floor would end again, whatever was changed
