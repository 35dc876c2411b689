"""Checkpoints: save, load, verify; the folder's parts are listed in `layout`, its tensors in `storage`."""

from __future__ import annotations

from ftk.checkpoint.checking import newest_whole_checkpoint, verify
from ftk.checkpoint.layout import (
    BEST,
    LAST,
    BrokenCheckpoint,
    checkpoint_name,
    clean_leftovers,
    is_checkpoint,
    numbered_checkpoints,
    point_to,
    remove_checkpoint,
    resolve_checkpoint,
    resolve_model,
)
from ftk.checkpoint.load import (
    extra_tensor_names,
    load_extra_tensors,
    load_model_state,
    load_model_tensors,
    read_config,
    read_trainer_state,
)
from ftk.checkpoint.load_optimizer import load_optimizer_state
from ftk.checkpoint.save import save_checkpoint
from ftk.checkpoint.transfer import transfer_weights
from ftk.checkpoint.weights import tokenizer_of

__all__ = [
    "BEST",
    "LAST",
    "BrokenCheckpoint",
    "checkpoint_name",
    "clean_leftovers",
    "extra_tensor_names",
    "is_checkpoint",
    "load_extra_tensors",
    "load_model_state",
    "load_model_tensors",
    "load_optimizer_state",
    "newest_whole_checkpoint",
    "numbered_checkpoints",
    "point_to",
    "read_config",
    "read_trainer_state",
    "remove_checkpoint",
    "resolve_checkpoint",
    "resolve_model",
    "save_checkpoint",
    "tokenizer_of",
    "transfer_weights",
    "verify",
]
