"""torch.compile, block by block or over the whole model."""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ftk.errors import UserError
from ftk.files import expand_home
from ftk.model_parallel.activation_checkpointing import compile_block
from ftk.model_parallel.blocks import blocks_of, needed_blocks

CACHE = "TORCHINDUCTOR_CACHE_DIR"

MAX_PROGRAMS = 64
"""For all blocks of one class, of torch's 8, over which it compiles no more: each mask, mode and kind of length has its
own."""


def compile_model(model: nn.Module, mode: str) -> None:
    """Compile a model in place; names of parameters stay as they are.

    Block by block, one graph serves all blocks, so that it takes seconds and not minutes. What is compiled is kept
    in ~/.cache/ftk unless TORCHINDUCTOR_CACHE_DIR names another folder, not in /tmp as by torch's default: a run that
    is continued after a restart of the machine finds it.

    Args:
        model: its blocks may have been given activation checkpointing before.
        mode: "none"; "block"; "model": `hidden_states` if the model has it, else `forward`.

    Raises:
        UserError: mode is "block", and the model has no list of blocks; this torch would compile it to something else.
    """
    if mode == "none":
        return
    _check_torch(model)
    import torch._dynamo

    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MAX_PROGRAMS)
    if not os.environ.get(CACHE):
        os.environ[CACHE] = _cache_folder()
    if mode == "block":
        for _, block in needed_blocks(model, "compile"):
            compile_block(block)
    elif hasattr(model, "hidden_states"):
        model.hidden_states = torch.compile(model.hidden_states)  # type: ignore
    else:
        model.compile()


def can_compile(model: nn.Module) -> bool:
    """Whether the model's blocks can be compiled for a GPU here."""
    return importlib.util.find_spec("triton") is not None and bool(blocks_of(model)) and _compiles_rightly(model)


def is_compiled(model: nn.Module) -> bool:
    """Whether the model, or a block of it, is set to run compiled."""
    return bool(_compiled_calls(model))


def run_uncompiled(model: nn.Module) -> None:
    """Undo `compile_model`."""
    for attributes, name, _ in _compiled_calls(model):
        del attributes[name]


@contextlib.contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """Inside, the model runs uncompiled: for calls of many shapes, each of which would be compiled by itself."""
    calls = _compiled_calls(model)
    run_uncompiled(model)
    try:
        yield
    finally:
        for attributes, name, call in calls:
            attributes[name] = call


def _compiled_calls(model: nn.Module) -> list[tuple[dict[str, Any], str, Any]]:
    """(attributes of a module, name, value) of all that `compile_model` has set."""
    names = "_compiled_call_impl", "hidden_states"
    parts = [vars(part) for part in model.modules()]
    return [(own, name, own[name]) for own in parts for name in names if own.get(name) is not None]


def _cache_folder() -> str:
    """~/.cache/ftk/inductor; a folder that is gone when the process ends where there is no home to write to."""
    try:
        folder = os.path.join(expand_home("~"), ".cache/ftk/inductor")
        os.makedirs(folder, exist_ok=True)
        if os.access(folder, os.W_OK | os.X_OK):
            return folder
    except (OSError, ValueError):
        pass
    folder = tempfile.mkdtemp(prefix="ftk-inductor-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _compiles_rightly(model: nn.Module) -> bool:
    # Measured on CPUs, backend aot_eager: with 2.11 all losses are right and gradients are not; with 2.13 both are.
    regions = (getattr(part, "tensor_region", None) for part in model.modules())
    return torch.__version__ >= "2.13" or not any(region is not None and region.sequence_parallel for region in regions)


def _check_torch(model: nn.Module) -> None:
    if not _compiles_rightly(model):
        raise UserError(
            f"`compile` with `sequence_parallel` needs torch 2.13 or newer: {torch.__version__} may compute wrong "
            "gradients; leave out one of the two"
        )
