"""A parameter's own name, whatever wraps the model at run time."""

from __future__ import annotations

from typing import Any

from torch import nn

# Names that torch.compile and activation checkpointing put into a parameter's path.
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")


def canonical_name(name: str, model: Any) -> str:
    """Take out of a parameter's name what run-time wrappers put in."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        name = name.removeprefix("module.")
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
