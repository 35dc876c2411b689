"""Trained models from disk in one line: model, tokenizer, generator."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftk.config import Chosen, slot
from ftk.config.build import build
from ftk.registry import ARCHITECTURES, MODELS

if TYPE_CHECKING:
    from torch import nn

    from ftk.generation import BlankFiller
    from ftk.tokenizers.base import Tokenizer


@dataclass(kw_only=True)
class _ModelSection:
    """The part of config.yaml that is needed to build the model."""

    model: Chosen = slot(MODELS, flag="--arch", architectures=ARCHITECTURES)


def load_model(path: str | Path, device: str = "cpu") -> nn.Module:
    """The model of a checkpoint, in evaluation mode.

    Args:
        path: a checkpoint folder, or a run's folder (its best checkpoint, else its last).
        device: where to put it, as for `torch.device`.

    Raises:
        UserError: no checkpoint there, or its model's code (`--user-dir`) is gone.
        BrokenCheckpoint: a file of it is damaged.
    """
    from ftk.checkpoint import load_model_state, read_config, resolve_checkpoint
    from ftk.plugins import import_entry_points, import_user_dir

    folder = resolve_checkpoint(path)
    tree = read_config(folder)
    import_entry_points()
    user_dir = (tree.get("common") or {}).get("user_dir")
    if user_dir is not None:
        import_user_dir(user_dir)
    model: nn.Module = build(_ModelSection, {"model": tree.get("model")}).model.build()
    load_model_state(folder, model)
    return model.to(device).eval()


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a checkpoint, of a run, or of a folder written by ftk-preprocess.

    Raises:
        UserError: there is none.
    """
    from ftk import tokenizers
    from ftk.checkpoint import is_checkpoint, resolve_checkpoint

    folder = Path(path)
    if not (folder / "tokenizer").is_dir() and not is_checkpoint(folder) and (folder / "checkpoint_last").exists():
        folder = resolve_checkpoint(folder)
    return tokenizers.load_tokenizer(folder)


def load_generator(path: str | Path, device: str = "cpu", **options: Any) -> BlankFiller:
    """A generator that fills the blanks of texts with a checkpoint's model.

        generator = ftk.load_generator("run", beam=4)
        generator.fill(["Ng is an adjunct professor at [MASK] ."])[0].answers[0].text

    Args:
        path: as for `load_model`; the tokenizer stands beside the model.
        device: where the model runs.
        options: fields of `ftk.generation.GenerationConfig`, e.g. beam, max_len, sampling, top_p, seed.

    Raises:
        UserError: as `load_model`; the checkpoint has no tokenizer; an unknown option.
    """
    from ftk.checkpoint import resolve_checkpoint
    from ftk.generation import BlankFiller, SequenceGenerator

    folder = resolve_checkpoint(path)  # once, so that a run that goes on saving cannot come between
    tokenizer = load_tokenizer(folder)
    return BlankFiller(tokenizer, SequenceGenerator(load_model(folder, device), tokenizer.special, **options))
