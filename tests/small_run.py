"""A small checkpoint with its tokenizer and data folders, for tests of commands that generate."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ftk.checkpoint import save_checkpoint
from ftk.models import build_model
from ftk.registry import MODELS, Registry
from ftk.tokenizers import load_tokenizer
from ftk_cli import preprocess

SENTENCE = "the quick brown fox jumps over a lazy dog while she reads long letters of old friends in silent rooms"
WORDS = SENTENCE.split()
LINES = [
    " ".join(WORDS[(start + step * stride) % len(WORDS)] for step in range(30)) + " ."
    for start in range(8)
    for stride in (1, 3, 7)
]
SHAPE = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "max_positions": 128}


def forget_plugin(module: str, registry: Registry, name: str) -> None:
    """What a plugin registered is forgotten, and its modules, so that other tests see ftk's own or import it again."""
    del registry._entries[name]
    for loaded in [one for one in sys.modules if one.partition(".")[0] == module]:
        del sys.modules[loaded]


def save_model(folder: Path, model: Any, tokenizer: Path | None = None, **sections: Any) -> Path:
    """A checkpoint of a model with its options.

    Args:
        tokenizer: the folder of its tokenizer's files.
        sections: other sections of the configuration.
    """
    config = {"model": {"_name": MODELS.of_config(model.config).name, **asdict(model.config)}, **sections}
    return save_checkpoint(folder, model=model, trainer_state={}, config=config, tokenizer_folder=tokenizer)


def save_run(folder: Path, tokenizer: Path | None, *, seed: int = 0, nan: bool = False, **shape: int) -> None:
    """A checkpoint of a GLM with weights of a seed, one of them not a number if `nan`, and a folder's tokenizer."""
    if tokenizer is not None:
        shape = {"vocab_size": load_tokenizer(tokenizer).padded_vocab_size(), **SHAPE, **shape}
    torch.manual_seed(seed)
    model = build_model("glm", **shape)
    if nan:
        model.layers[0].attention.qkv.weight.data[0, 0] = torch.nan
    save_checkpoint(
        folder,
        model=model,
        trainer_state={},
        config={"model": {"_name": "glm", **shape}, "task": {"_name": "glm_blank", "seq_length": 48}},
        tokenizer_folder=None if tokenizer is None else tokenizer / "tokenizer",
    )


def make_place(folder: Path) -> None:
    """Writes text, data-bin/ (train and valid), other-bin/ (another tokenizer) and run/ (a checkpoint)."""
    (folder / "text").write_text("\n".join(LINES) + "\n")
    for name, size in (("data-bin", 290), ("other-bin", 285)):
        source = f"--trainpref {folder}/text --validpref {folder}/text --destdir {folder / name}"
        assert preprocess.main(f"{source} --vocab-size {size} --special-tokens glm".split()) == 0
    save_run(folder / "run" / "checkpoint_1", folder / "data-bin")
