"""Activation checkpointing (Chen et al. 2016): recomputing in the backward pass instead of saving."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ftk.model_parallel.blocks import needed_blocks

_SAVED_OPERATORS = (
    "mm",
    "addmm",
    "bmm",
    "linear",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_attention_math",
    "_flash_attention_forward",
)
"""Operators whose results selective checkpointing saves: expensive to compute, with small results; attention where it
has no dropout."""

_SAVED_COLLECTIVES = ("all_reduce", "reduce_scatter_tensor")
"""Of tensor parallel layers: sums are not sent twice. Sequences are gathered twice, as in Korthikanti et al. 2022: only
the local part is saved."""


def checkpoint_blocks(model: nn.Module, mode: str, every: int = 1) -> None:
    """Make the blocks of a model forget what their forward pass computes, in place.

    Names of parameters, values and gradients stay as they are; random numbers are drawn the same again, and shared
    sequences (`ftk.model_parallel.tensor_parallel`) have the length again that they had.

    Args:
        model: with a list of blocks (`ftk.model_parallel.blocks`), its tensor parallel plan already put on.
        mode: "none"; "full": a block keeps its input alone; "selective": and the results of matrix products and of
            attention without dropout, so that only cheap operators are computed again.
        every: checkpoint every N-th block, the first included.

    Raises:
        UserError: the model has no list of blocks.
    """
    if mode == "none":
        return
    make_contexts: _MakeContexts = _no_contexts
    if mode == "selective":
        make_contexts = functools.partial(create_selective_checkpoint_contexts, _keep_expensive_results)
    for _, block in needed_blocks(model, "activation_checkpointing")[::every]:
        regions = _tensor_regions(block)
        shared = [region for region in regions if region.sequence_parallel]
        block.forward = _checkpointed(block.forward, make_contexts, shared)  # type: ignore
        if mode == "full" and regions:
            wrap = functools.partial(_checkpointed, make_contexts=make_contexts, regions=shared)
            block.checkpointed = wrap  # type: ignore[assignment]  # for `compile_block`


def compile_block(block: Any) -> None:
    """Compile a block in place, whether or not it is checkpointed.

    In full and with tensor parallel what is compiled is checkpointed, and not the other way round: of a checkpoint
    inside, torch 2.13 takes the DeviceMesh of distributed parameters for a tensor that is saved.
    """
    if (checkpointed := getattr(block, "checkpointed", None)) is None:
        block.compile()
        return
    uncompiled = block.forward
    plain = uncompiled.__wrapped__

    @functools.wraps(plain)
    def forward(*arguments: Any, **keywords: Any) -> Any:
        return (plain if torch.compiler.is_compiling() else uncompiled)(*arguments, **keywords)

    block.forward = forward
    block.compile()
    block._compiled_call_impl = checkpointed(block._compiled_call_impl)


_MakeContexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]
"""Makes the contexts of a forward pass and of its recomputation."""


def _no_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    return nullcontext(), nullcontext()


def _checkpointed(forward: Callable[..., Any], make_contexts: _MakeContexts, regions: list[Any]) -> Callable[..., Any]:
    options: dict[str, Any] = {"use_reentrant": False}

    @functools.wraps(forward)
    def wrapped(*arguments: Any, **keywords: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*arguments, **keywords)
        contexts = make_contexts
        # A compiled block computes again with the sizes that it was compiled for; nothing is looked up.
        if regions and not torch.compiler.is_compiling():
            contexts = functools.partial(_contexts_with_lengths, make_contexts, regions)
        if contexts is not _no_contexts:
            return checkpoint(forward, *arguments, context_fn=contexts, **options, **keywords)
        return checkpoint(forward, *arguments, **options, **keywords)

    return wrapped


def _tensor_regions(block: nn.Module) -> list[Any]:
    """The tensor parallel regions of a block, each once."""
    found: list[Any] = [getattr(part, "tensor_region", None) for part in block.modules()]
    return [region for region in dict.fromkeys(found) if region is not None]


def _contexts_with_lengths(
    make_contexts: _MakeContexts, regions: list[Any]
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    forward, recompute = make_contexts()
    return forward, _WithLengths(recompute, regions)


class _WithLengths(AbstractContextManager[None]):
    """Recomputes with the lengths that sequences have now: another forward pass may change them later.

    It is entered for each backward pass through the block.
    """

    def __init__(self, inner: AbstractContextManager[Any], regions: list[Any]) -> None:
        self._inner = inner
        self._lengths = [(region, region.length) for region in regions]

    def __enter__(self) -> None:
        with ExitStack() as stack:
            for region, length in self._lengths:
                stack.callback(setattr, region, "length", region.length)
                region.length = length
            stack.enter_context(self._inner)
            self._stack = stack.pop_all()

    def __exit__(self, *failure: Any) -> None:
        self._stack.__exit__(*failure)


def _keep_expensive_results(context: Any, operator: Any, *arguments: Any, **keywords: Any) -> CheckpointPolicy:
    # Flex attention is itself an operator to a compiler, and elsewhere a region that was compiled.
    if "flex_attention" in str(operator) or "inductor_compiled_code" in str(operator):
        return CheckpointPolicy.MUST_SAVE
    name = operator.name().rpartition("::")[2].partition(".")[0]
    kept = {"aten": _SAVED_OPERATORS, "ftk": {"prefix_attention"}, "_c10d_functional": _SAVED_COLLECTIVES}
    if name not in kept.get(operator.namespace, ()):
        return CheckpointPolicy.PREFER_RECOMPUTE
    # A saved operator draws no random numbers in the recomputation, so that later dropout would draw others.
    given = dict(zip((argument.name for argument in operator._schema.arguments), arguments, strict=False)) | keywords
    is_random = given.get("dropout_p", 0.0) > 0.0
    return CheckpointPolicy.PREFER_RECOMPUTE if is_random else CheckpointPolicy.MUST_SAVE
