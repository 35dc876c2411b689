"""Random numbers: the same on all tensor parallel ranks where values are whole, different where they are shared.

All ranks of a batch seed torch with the same number in each step; that is the common stream. A dropout of what is
shared, such as the attention weights of some heads, must differ between ranks: it draws from a stream that is seeded by
one number of the common stream and the rank. No state is kept from one use to the next, so that whatever restores the
common stream (a resumed run, activation checkpointing before it computes again) restores all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class RandomStreams:
    """The default generator of a device, as the processes of one group use it.

    Args:
        rank: of this process among the tensor parallel ones.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._common: list[Tensor] = []  # the state of the common stream, while the own one is in use

    @contextmanager
    def own(self, device: torch.device) -> Iterator[None]:
        """Draw different numbers on every process. The common stream advances by one number, however many are drawn."""
        if self._common:
            yield
            return
        generator = _generator(device)
        seed = _next_number(generator)
        self._common.append(generator.get_state())
        generator.manual_seed(_mixed(seed, self.rank))
        try:
            yield
        finally:
            generator.set_state(self._common.pop())

    @contextmanager
    def common(self, device: torch.device) -> Iterator[None]:
        """Draw the same numbers on every process, inside `own` too."""
        if not self._common:
            yield
            return
        generator = _generator(device)
        own_state = generator.get_state()
        generator.set_state(self._common.pop())
        try:
            yield
        finally:
            self._common.append(generator.get_state())
            generator.set_state(own_state)


def _generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator


def _next_number(generator: torch.Generator) -> int:
    """A number that the generator gives once. Of a GPU's only the counter is read, without waiting for the device."""
    if generator.device.type == "cpu":
        return int(torch.randint(2**62, (), generator=generator).item())
    offset = generator.get_offset()
    generator.set_offset(offset + 4)  # Philox makes four numbers at a time
    return _mixed(generator.initial_seed(), offset)


def _mixed(seed: int, number: int) -> int:
    digest = hashlib.sha256(f"tensor parallel {seed} {number}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1  # a generator takes 63 bits
