"""The random numbers of an update, fixed by (seed, num_updates, ranks): a resumed run draws the same ones."""

from __future__ import annotations

import random

import numpy as np
import torch

_MASK = (1 << 64) - 1


def seed_update(seed: int, num_updates: int, data_rank: int = 0, pipeline_rank: int = 0) -> None:
    """Seed torch (every device), NumPy and Python for the update that comes after `num_updates` updates.

    Processes with other batches or other layers draw other numbers; those that share layers draw the same.
    """
    mixed = mix(seed, num_updates)
    if data_rank or pipeline_rank:
        mixed = mix(mix(mixed, data_rank), pipeline_rank)
    torch.manual_seed(mixed)
    np.random.seed(mixed & 0xFFFFFFFF)
    random.seed(mixed)


def mix(seed: int, num_updates: int) -> int:
    """A 63-bit number from both: splitmix64's finaliser, twice, so that (1, 2) and (2, 1) share nothing."""
    return _finalise(_finalise(seed) + num_updates) >> 1


def _finalise(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
