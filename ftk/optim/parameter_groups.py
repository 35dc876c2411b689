"""Which parameters are decayed and which are not."""

from __future__ import annotations

from typing import Any

from torch import nn


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Split a model's trainable parameters into those with weight decay and those without.

    Biases and the weights of norms, that is every parameter of at most one dimension, are not decayed, as
    in the original GLM. A parameter that is used twice (the tied embedding) appears once.

    Args:
        model: any module; frozen parameters (`requires_grad` false) are left out.
        weight_decay: the decay of the first group.

    Returns:
        Up to two groups, `{"params": [...], "weight_decay": ...}`, in the model's own order.
    """
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            (plain if parameter.ndim <= 1 else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
