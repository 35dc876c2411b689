"""What is done to a model before it is trained, and to PyTorch before anything is computed."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from ftk.errors import UserError
from ftk.freed_memory import keep_freed_memory, return_freed_memory
from ftk.model_parallel.activation_checkpointing import checkpoint_blocks
from ftk.model_parallel.blocks import blocks_of
from ftk.model_parallel.compile import can_compile, compile_model
from ftk.model_parallel.config import EngineConfig


def prepare_process(config: EngineConfig) -> None:
    """Choose between speed and exactness of kernels, and between speed and memory, for the whole process."""
    torch.set_float32_matmul_precision("high" if config.tf32 else "highest")
    torch.use_deterministic_algorithms(config.deterministic)
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.allow_tf32 = config.tf32
    if config.deterministic:
        # cuBLAS gives the same bits only with a workspace of its own for each stream.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if config.activation_checkpointing == "full":  # it is used where memory is short
        return_freed_memory()
    else:
        keep_freed_memory()


def prepare_model(model: nn.Module, config: EngineConfig, device: torch.device) -> None:
    """Apply activation checkpointing, then compilation, in place; `device`: where the model will run.

    Raises:
        UserError: the model cannot have one of them, or not `residual_precision`.
    """
    if config.residual_precision == "same":
        lower_residual(model)
    checkpoint_blocks(model, config.activation_checkpointing, config.checkpoint_every)
    if config.compile != "auto" or can_compile(model):
        mode = config.compile_on(device)
        if mode != "none" and config.activation_checkpointing != "none" and torch.__version__ < "2.13":
            # A compiled block that draws random numbers of the compiler's own again ends with "Node ... was invalid,
            # but is output" when lengths vary; eager numbers, with which the gradients are right, it can draw again.
            from torch._inductor import config as inductor

            inductor.fallback_random = True
        compile_model(model, mode)


def lower_residual(model: nn.Module) -> None:
    """Let the residual path have the type of matrix products; autocast leaves it in fp32, as the embeddings are.

    Raises:
        UserError: see `check_residual`.
    """
    check_residual(model)
    stems = [part for name, part in model.named_modules() if name.rpartition(".")[2] == "embedding_dropout"]
    # In front of each block, as an adapter may add in fp32 within one, and a plugin's embedding need not have dropout;
    # behind an embedding, so that the first block is compiled as the others.
    for part in (*stems, *(block for _, block in blocks_of(model))):
        part.register_forward_pre_hook(_lower)


def check_residual(model: nn.Module) -> None:
    """Refuse a model whose residual path cannot be lowered.

    Raises:
        UserError: the layers put results of norms on it, which autocast has in fp32.
    """
    if not adds_alone(model):
        raise UserError(
            "`residual_precision` same is for models whose layers have their norms in front and add nothing else to "
            "the residual path (`ADDS_ALONE` of their class); leave it out"
        )


def adds_alone(model: nn.Module) -> bool:
    """Whether the residual path of all blocks holds sums alone, of the embeddings and the outputs of parts."""
    blocks = blocks_of(model)
    return bool(blocks) and all(getattr(block, "ADDS_ALONE", False) for _, block in blocks)


def _lower(part: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    hidden, *others = inputs
    device = hidden.device.type
    if device != "meta" and torch.is_autocast_enabled(device):
        hidden = hidden.to(torch.get_autocast_dtype(device))
    return hidden, *others
