"""Checkpoints: save, load, verify; the folder's parts are listed in `layout`, its tensors in `storage`.

What needs torch is imported when it is first used, so that commands can show their options without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftk.lazy_names import lazy_names

if TYPE_CHECKING:
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
    "BEST", "LAST", "BrokenCheckpoint", "checkpoint_name", "clean_leftovers", "extra_tensor_names",
    "is_checkpoint", "load_extra_tensors", "load_model_state", "load_model_tensors", "load_optimizer_state",
    "newest_whole_checkpoint", "numbered_checkpoints", "point_to", "read_config", "read_trainer_state",
    "remove_checkpoint", "resolve_checkpoint", "resolve_model", "save_checkpoint", "tokenizer_of",
    "transfer_weights", "verify",
]  # fmt: skip

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "ftk.checkpoint.checking": "newest_whole_checkpoint verify",
        "ftk.checkpoint.layout": "BEST LAST BrokenCheckpoint checkpoint_name clean_leftovers is_checkpoint "
        "numbered_checkpoints point_to remove_checkpoint resolve_checkpoint resolve_model",
        "ftk.checkpoint.load": "extra_tensor_names load_extra_tensors load_model_state load_model_tensors "
        "read_config read_trainer_state",
        "ftk.checkpoint.load_optimizer": "load_optimizer_state",
        "ftk.checkpoint.save": "save_checkpoint",
        "ftk.checkpoint.transfer": "transfer_weights",
        "ftk.checkpoint.weights": "tokenizer_of",
    },
)
