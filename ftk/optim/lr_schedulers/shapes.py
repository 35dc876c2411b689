"""Shapes of a fall: the share of the way that is left, from 1 at progress 0 to 0 at progress 1."""

from __future__ import annotations

import math
from collections.abc import Callable


def linear(progress: float) -> float:
    return 1.0 - progress


def cosine(progress: float) -> float:
    """Half a cosine wave (Loshchilov and Hutter 2017)."""
    return (1.0 + math.cos(math.pi * progress)) / 2.0


def one_minus_sqrt(progress: float) -> float:
    """Steep at first, then flat (Hägele et al. 2024, https://arxiv.org/abs/2405.18392)."""
    return 1.0 - math.sqrt(progress)


SHAPES: dict[str, Callable[[float], float]] = {"linear": linear, "cosine": cosine, "1-sqrt": one_minus_sqrt}
