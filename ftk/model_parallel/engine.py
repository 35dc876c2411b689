"""What is done to a model before it is trained, and to PyTorch before anything is computed."""

from __future__ import annotations

import ctypes
import os
import sys

import torch
from torch import nn

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


# Parameters of mallopt(3), from glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
_NEVER_TRIM = 2**31 - 1
_DEFAULT_MMAP_MAX = 65536


def keep_freed_memory() -> bool:
    """Let freed memory stay with the process.

    A step makes and drops hundreds of megabytes. By default blocks above 128 KiB to 32 MiB come fresh from the
    system and go back at once, and each page of them costs a fault when it is first touched: a step of 4 layers of
    512 in bf16 takes a fifth less time without (docs/performance.md).

    Returns:
        Whether that was possible: it is with glibc.
    """
    return _set_malloc({_MMAP_MAX: 0, _TRIM_THRESHOLD: _NEVER_TRIM})


def return_freed_memory() -> bool:
    """Give freed blocks of 1 MiB and more back at once: the peak is what is in use, at the price of page faults.

    Returns:
        Whether that was possible: it is with glibc.
    """
    return _set_malloc({_MMAP_MAX: _DEFAULT_MMAP_MAX, _MMAP_THRESHOLD: 2**20, _TRIM_THRESHOLD: 2**18})


def _set_malloc(parameters: dict[int, int]) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    if mallopt is None:
        return False
    done = [mallopt(parameter, value) for parameter, value in parameters.items()]
    return all(done)
