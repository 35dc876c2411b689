"""Optimizers, parameter groups, gradient clipping and learning rate schedules."""

from ftk.optim.base import OptimizerConfig, set_lr, step_unless
from ftk.optim.clip import clip_gradients, gradient_norm, is_non_finite
from ftk.optim.parameter_groups import parameter_groups

__all__ = [
    "OptimizerConfig",
    "clip_gradients",
    "gradient_norm",
    "is_non_finite",
    "parameter_groups",
    "set_lr",
    "step_unless",
]
