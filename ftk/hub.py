"""Trained models from disk in one line: model, tokenizer, generator."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftk.config import Chosen, slot
from ftk.config.build import build
from ftk.errors import UserError
from ftk.plugins import import_plugins, naming_plugin
from ftk.registry import ARCHITECTURES, MODELS

if TYPE_CHECKING:
    from torch import nn

    from ftk.generation import BlankFiller
    from ftk.generation.processors.prefix import AllowedTokensFunction
    from ftk.tokenizers.base import Tokenizer


@dataclass(kw_only=True)
class _ModelSection:
    """The part of config.yaml that is needed to build the model."""

    model: Chosen = slot(MODELS, flag="--arch", architectures=ARCHITECTURES)


def load_model(
    path: str | Path, device: str = "cpu", *, ema: bool = False, user_dir: str | Path | None = None
) -> nn.Module:
    """The model of a checkpoint, in evaluation mode.

    Args:
        path: a checkpoint folder, or a run's folder (its best checkpoint, else its last).
        device: where to put it, as for `torch.device`.
        ema: with the moving average of its weights, which training kept beside them (`--ema-decay`).
        user_dir: the plugin that registers the model, where it is none of ftk's. What a checkpoint says of its
            plugin is never imported by itself.

    Raises:
        UserError: no checkpoint there, its model is unknown, or `ema` and it has no average.
        BrokenCheckpoint: a file of it is damaged.
    """
    from ftk.checkpoint import load_model_state, read_config, resolve_checkpoint
    from ftk.checkpoint.quantize import prepare_for

    folder = resolve_checkpoint(path)
    tree = read_config(folder)
    import_plugins(user_dir)
    with naming_plugin((tree.get("common") or {}).get("user_dir")):
        chosen = build(_ModelSection, {"model": tree.get("model")}).model
    model: nn.Module = chosen.build()
    prepare_for(tree, model)
    load_model_state(folder, model, ema=ema)
    return model.to(device).eval()


def load_tokenizer(path: str | Path, *, user_dir: str | Path | None = None) -> Tokenizer:
    """The tokenizer of a checkpoint, of a run, or of a folder written by ftk-preprocess.

    Args:
        path: one of these folders.
        user_dir: the plugin that registers the tokenizer, where it is none of ftk's.

    Raises:
        UserError: there is none, or it is unknown.
    """
    from ftk import tokenizers
    from ftk.checkpoint import is_checkpoint, numbered_checkpoints, resolve_checkpoint

    import_plugins(user_dir)
    folder = Path(path)
    if not (folder / "tokenizer").is_dir() and not is_checkpoint(folder) and numbered_checkpoints(folder):
        folder = resolve_checkpoint(folder)
    return tokenizers.load_tokenizer(folder)


def load_generator(
    path: str | Path,
    device: str = "cpu",
    *,
    ema: bool = False,
    user_dir: str | Path | None = None,
    allowed_tokens: AllowedTokensFunction | None = None,
    **options: Any,
) -> BlankFiller:
    """A generator that fills the blanks of texts with a checkpoint's model.

        generator = ftk.load_generator("run", beam=4)
        generator.fill(["Ng is an adjunct professor at [MASK] ."])[0].answers[0].text

    Args:
        path: as for `load_model`; the tokenizer stands beside the model. Several, in one text with colons between,
            are an ensemble: the mean of their probabilities.
        device: where the model runs.
        ema: as for `load_model`.
        user_dir: the plugin that registers model or tokenizer, where they are none of ftk's.
        allowed_tokens: says which tokens may come next, see `ftk.generation.processors.prefix.AllowedTokens`.
        options: fields of `ftk.generation.GenerationConfig`, e.g. beam, max_len, sampling, top_p, seed, and of
            `ftk.generation.processors.ProcessorConfig`, e.g. forbid_words, prefix, constraints, stop.

    Raises:
        UserError: as `load_model`; the checkpoint has no tokenizer; an unknown option.
    """
    from ftk.checkpoint import resolve_checkpoint
    from ftk.generation import BlankFiller, SequenceGenerator
    from ftk.generation.config import GenerationConfig, generation_config
    from ftk.generation.ensemble import Ensemble
    from ftk.generation.processors import ProcessorConfig, build_processors

    steering = {one.name: options.pop(one.name) for one in fields(ProcessorConfig) if one.name in options}
    _check_names(options, [one.name for part in (GenerationConfig, ProcessorConfig) for one in fields(part)])
    config = generation_config(**options)
    # Resolved once, so that a run that goes on saving cannot come between.
    folder, *further = (resolve_checkpoint(one) for one in checkpoint_paths(path))
    tokenizer = load_tokenizer(folder, user_dir=user_dir)
    lengths = {"min_len": config.min_len, "max_len": config.max_len}
    processors = build_processors(None, tokenizer, **lengths, allowed_tokens=allowed_tokens, **steering)
    model = load_model(folder, device, ema=ema)
    if further:
        for other in further:
            if load_tokenizer(other, user_dir=user_dir).fingerprint != tokenizer.fingerprint:
                raise UserError(f"{other} has another tokenizer than {folder}; an ensemble needs one tokenizer")
        model = Ensemble([model, *(load_model(other, device, ema=ema) for other in further)])
    return BlankFiller(tokenizer, SequenceGenerator(model, tokenizer.special, config, processors=processors))


def checkpoint_paths(path: str | Path) -> list[str | Path]:
    """The checkpoints that a path names: those between its colons, unless something of that very name exists."""
    if Path(path).exists() or ":" not in str(path):
        return [path]
    parts: list[str | Path] = [part for part in str(path).split(":") if part]
    if not parts:
        raise UserError(f"{path} names no checkpoint; give folders, with colons between for an ensemble")
    return parts


def _check_names(options: Iterable[str], known: Sequence[str]) -> None:
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise UserError(f"unknown generation option {name!r}; {hint}there are: {', '.join(known)}")
