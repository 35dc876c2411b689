"""Activation checkpointing (Chen et al. 2016): computing again in the backward pass instead of keeping."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ftk.model_parallel.blocks import blocks_of

_KEPT = (
    "mm",
    "addmm",
    "bmm",
    "linear",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_attention_math",
)
"""Operators whose results selective checkpointing keeps: dear to compute, and their results are small beside that."""

_KEPT_MESSAGES = ("all_reduce", "reduce_scatter_tensor")
"""Of tensor parallel layers: sums are not sent twice. A gathered sequence is, as in Korthikanti et al. 2022: the part
that it was made of is kept instead."""


def checkpoint_blocks(model: nn.Module, mode: str, every: int = 1) -> None:
    """Make the blocks of a model forget what their forward pass computes, in place.

    Names of parameters, values and gradients stay as they are; random numbers are drawn the same again.

    Args:
        model: with a list of blocks (`blocks_of`).
        mode: "none"; "full": a block keeps its input alone; "selective": and the results of matrix products and
            attention, so that only cheap operators are computed again.
        every: of so many blocks one, the first included.

    Raises:
        UserError: the model has no list of blocks.
    """
    if mode == "none":
        return
    options: dict[str, Any] = {"use_reentrant": False}
    if mode == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _keep_dear_results)
    for _, block in blocks_of(model)[::every]:
        block.forward = _checkpointed(block.forward, options)  # type: ignore[method-assign]


def _checkpointed(forward: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def wrapped(*arguments: Any, **keywords: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*arguments, **keywords)
        return checkpoint(forward, *arguments, **options, **keywords)

    return wrapped


def _keep_dear_results(context: Any, operator: Any, *arguments: Any, **keywords: Any) -> CheckpointPolicy:
    name = operator.name().rpartition("::")[2].partition(".")[0]
    kept = {"aten": _KEPT, "_c10d_functional": _KEPT_MESSAGES}.get(operator.namespace, ())
    if name in kept or "flex_attention" in str(operator):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
