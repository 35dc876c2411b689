"""What is done to a model before it is trained, and to PyTorch before anything is computed."""

from __future__ import annotations

import os

import torch
from torch import nn

from ftk.freed_memory import keep_freed_memory, return_freed_memory
from ftk.model_parallel.activation_checkpointing import checkpoint_blocks
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
    """Apply activation checkpointing, then compilation, in place; `device`: where the model will run."""
    checkpoint_blocks(model, config.activation_checkpointing, config.checkpoint_every)
    if config.compile != "auto" or can_compile(model):
        mode = config.compile_on(device)
        if mode != "none" and config.activation_checkpointing != "none" and torch.__version__ < "2.13":
            # A compiled block that draws random numbers of the compiler's own again ends with "Node ... was invalid,
            # but is output" when lengths vary; eager numbers, with which the gradients are right, it can draw again.
            from torch._inductor import config as inductor

            inductor.fallback_random = True
        compile_model(model, mode)
