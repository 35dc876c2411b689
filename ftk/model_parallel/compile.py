"""torch.compile, block by block or over the whole model."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import nn

from ftk.model_parallel.blocks import blocks_of

CACHE = "TORCHINDUCTOR_CACHE_DIR"


def compile_model(model: nn.Module, mode: str) -> None:
    """Compile a model in place; names of parameters stay as they are.

    Block by block, one graph serves all blocks, so that it takes seconds and not minutes. What is compiled is kept
    in ~/.cache/ftk unless TORCHINDUCTOR_CACHE_DIR names another folder, not in /tmp as by torch's default: a run that
    is continued after a restart of the machine finds it.

    Args:
        model: its blocks may have been given activation checkpointing before.
        mode: "none"; "block"; "model": `hidden_states` if the model has it, else `forward`.

    Raises:
        UserError: mode is "block", and the model has no list of blocks.
    """
    if mode == "none":
        return
    os.environ.setdefault(CACHE, str(Path("~/.cache/ftk/inductor").expanduser()))
    if mode == "block":
        for _, block in blocks_of(model):
            block.compile()
    elif hasattr(model, "hidden_states"):
        model.hidden_states = torch.compile(model.hidden_states)  # type: ignore
    else:
        model.compile()
