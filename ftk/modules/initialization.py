"""Initial values that depend only on a seed and a parameter's name, whatever the world size."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor


def normal_values(name: str, shape: Sequence[int], std: float, seed: int) -> Tensor:
    """Draws from N(0, std) of the given shape, float32 on the CPU, from a generator of this parameter's own.

    Args:
        name: the parameter's full name in its model, such as "layers.0.attention.qkv.weight".
        shape: of the whole parameter, also where a process keeps only a part of it.
        std: standard deviation.
        seed: of the whole model.
    """
    generator = torch.Generator("cpu").manual_seed(_seed_for(seed, name))
    return torch.empty(tuple(shape), device="cpu", dtype=torch.float32).normal_(0.0, std, generator=generator)


def _seed_for(seed: int, name: str) -> int:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1  # a generator takes 63 bits
