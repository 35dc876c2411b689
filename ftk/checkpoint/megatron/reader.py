"""Megatron-LM's checkpoints of GPT models, legacy and Megatron-Core, in its format `torch`: read, not written."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ftk.checkpoint.megatron import MegatronConfig
from ftk.checkpoint.megatron.files import DISTRIBUTED, FILES, IN_FOLDERS, LATEST, Parts, find
from ftk.checkpoint.megatron.options import check_sizes, model_options, padding
from ftk.checkpoint.megatron.parameters import INNER, LAYER, POSITIONS, parameters
from ftk.config.build import build_options
from ftk.errors import UserError, naming_place
from ftk.models.conversion import Contents
from ftk.registry import HF_MODELS, MODELS


class Megatron:
    """Folders of Megatron-LM, weights in the dtype they are stored in; the optimizer's state is left out."""

    def __init__(self, config: MegatronConfig) -> None:
        self.config = config

    @staticmethod
    def recognises(folder: Path) -> bool:
        return any(any(folder.glob(pattern)) for pattern in (FILES, DISTRIBUTED[0], *IN_FOLDERS))

    @staticmethod
    def identity_files(source: Path) -> list[Path]:
        tracker = source / LATEST
        return [*([tracker] if tracker.is_file() else []), *itertools.chain(*find(source).files)]

    def describe(self, source: Path) -> Contents:
        return self._described(find(source))

    def read(self, source: Path) -> Contents:
        parts = find(source)
        contents = self._described(parts)
        with naming_place(parts.folder):
            tensors = parameters(parts.tensors(), parts.first.version, contents.config, contents.model != "gpt2")
        return dataclasses.replace(contents, tensors=tensors)

    def _described(self, parts: Parts) -> Contents:
        with naming_place(parts.folder):
            theirs = self._options(parts)
            model, options = model_options(theirs, parts.vocab_size)
            check_sizes(theirs, num_ranks=len(parts.files[0]), num_stages=len(parts.files))
            config_type = MODELS.get(model).config
            assert config_type is not None, "families have options"
            config = build_options("model", config_type, options)
            task = HF_MODELS.get(model).target().task(config)
            task["make_vocab_size_divisible_by"] = padding(theirs, config.vocab_size, len(parts.files[0]))
        return Contents(model, config, task=task, num_updates=parts.first.iteration, place=parts.folder)

    def _options(self, parts: Parts) -> Mapping[str, Any]:
        """Megatron's options; where an old file holds none, those that its tensors tell."""
        theirs, heads = parts.first.options, self.config.num_attention_heads
        if theirs is not None:
            if heads is not None:
                raise UserError("the files hold the options; leave out `num_attention_heads`")
            return theirs
        if heads is None:
            raise UserError("the files hold no options, as old ones do; convert it with `num_attention_heads`")
        tensors = parts.tensors()
        layers = {int(match[1]) for match in map(LAYER.fullmatch, tensors) if match}
        needed = (POSITIONS, f"decoder.layers.0.{INNER}.weight")
        if missing := [name for name in needed if name not in tensors]:
            raise UserError(f"the parameter {missing[0]!r} is missing; without options only a GPT-2 is read")
        positions, inner = (tensors[name] for name in needed)
        if {positions[0].dim(), *(part.dim() for part in inner)} != {2}:
            raise UserError(f"{needed[0]!r} and {needed[1]!r} are no matrices")
        return {
            "num_layers": len(layers),
            "hidden_size": positions[0].size(-1),
            "num_attention_heads": heads,
            "max_position_embeddings": len(positions[0]),
            "ffn_hidden_size": sum(map(len, inner)),
        }
