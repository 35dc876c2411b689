"""ModelCenter's folders of CPM-1 and CPM-2: config.json, pytorch_model.pt, vocab.txt; names: `ftk.models.cpm.convert`.

The two small files are kept in `source/` of the ftk checkpoint, and written back as they were.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import torch

from ftk.config.build import build_options
from ftk.errors import UserError, naming_place
from ftk.files import naming, new_file_for_torch, read_bytes, write_whole
from ftk.models.conversion import Contents, holds_hf_weights
from ftk.models.cpm.convert import CONVERTERS, ModelCenterConverter
from ftk.models.cpm.form import ModelCenterConfig
from ftk.models.renames import LazyTensors, renamed
from ftk.models.torch_file import read_state_dict
from ftk.parsing import parse_json

logger = logging.getLogger(__name__)

CONFIG, WEIGHTS, VOCABULARY = "config.json", "pytorch_model.pt", "vocab.txt"
SOURCE = "source"  # of an ftk checkpoint: where the small files are kept
_MAX_BYTES = 1 << 24  # of the small files


class ModelCenter:
    """Folders as ModelCenter downloads and opens them (`CPM1.from_pretrained`, `CPM2.from_pretrained`)."""

    def __init__(self, config: ModelCenterConfig) -> None:
        self.config = config

    @staticmethod
    def recognises(folder: Path) -> bool:
        is_named_so = (folder / CONFIG).is_file() and (folder / WEIGHTS).is_file()
        return is_named_so and not holds_hf_weights(folder)

    @staticmethod
    def identity_files(source: Path) -> list[Path]:
        return [source / CONFIG, source / WEIGHTS]

    def describe(self, source: Path) -> Contents:
        return _described(source)[0]

    def read(self, source: Path) -> Contents:
        contents, theirs, converter = _described(source)
        stored = LazyTensors.of(read_state_dict(source / WEIGHTS))
        with naming_place(source / WEIGHTS):
            tensors = renamed(stored, converter.renames_of(theirs), contents.config)
        small = (path for path in (source / CONFIG, source / VOCABULARY) if path.is_file())
        kept = {path.name: _read_small(path) for path in small}
        return dataclasses.replace(contents, tensors=tensors, source_files=kept)

    def write(self, folder: Path, contents: Contents) -> Path:
        converter = next((known for known in CONVERTERS if known.model == contents.model), None)
        if converter is None:
            models = " and ".join(repr(known.model) for known in CONVERTERS)
            raise UserError(f"{contents.place}: its model is {contents.model!r}; {models} have ModelCenter's form")
        theirs, content = _config_for(contents, converter)
        if theirs.get("half", True) and not self.config.half:
            theirs["half"] = False
            content = _json(theirs)
        dtype = torch.float16 if theirs.get("half", True) else torch.float32
        tensors = renamed(contents.tensors, converter.renames_of(theirs), contents.config, back=True)
        state = {}
        for name in tensors.described:
            # A copy: what is a part of another tensor would be saved with the whole of it.
            state[name] = tensors.read(name).to(dtype, copy=True).contiguous()
            if not state[name].isfinite().all():
                raise UserError(
                    f"{contents.place}: {name} has numbers beyond float16; turn `half` off to write float32"
                )
        with naming(folder / WEIGHTS), new_file_for_torch(folder / WEIGHTS) as file:
            torch.save(state, file)
        write_whole(folder / CONFIG, content)
        if contents.tokenizer is not None:
            logger.warning("%s: its tokenizer is not written; ModelCenter reads none of ftk's", contents.place)
        if VOCABULARY in contents.source_files and _rows_before(contents) == contents.config.vocab_size:
            write_whole(folder / VOCABULARY, contents.source_files[VOCABULARY])
        return Path()


def _described(source: Path) -> tuple[Contents, dict[str, Any], ModelCenterConverter]:
    """The contents of a folder without its tensors, its config.json, and the converter of its family."""
    for name in (CONFIG, WEIGHTS):
        if not (source / name).is_file():
            what = f"holds no {name}" if source.is_dir() else "is a file" if source.exists() else "no such folder"
            raise UserError(f"{source}: {what}; give a folder of ModelCenter with {CONFIG} and {WEIGHTS}")
    theirs = _parsed(_read_small(source / CONFIG), source / CONFIG)
    converter = next((known for known in CONVERTERS if known.matches(theirs)), None)
    if converter is None:
        keys = " nor ".join(known.layers for known in CONVERTERS)
        raise UserError(f"{source / CONFIG}: has neither {keys}, which tell CPM-1 and CPM-2 apart")
    with naming_place(source):
        config = _options(theirs, converter)
    return Contents(model=converter.model, config=config, task=converter.task(config), place=source), theirs, converter


def _options(theirs: dict[str, Any], converter: ModelCenterConverter) -> Any:
    """Our options of a config.json, checked as ours are."""
    options = converter.config_from(theirs)
    return build_options("model", type(options), dataclasses.asdict(options))


def _config_for(contents: Contents, converter: ModelCenterConverter) -> tuple[dict[str, Any], bytes]:
    """The config.json that a model came with, if it still says what the model is, else a new one; and its text."""
    if (content := contents.source_files.get(CONFIG)) is not None:
        theirs = _parsed(content, (contents.place or Path()) / SOURCE / CONFIG)
        if converter.matches(theirs) and _options(theirs, converter) == contents.config:
            return theirs, content
    theirs = converter.config_to(contents.config)
    return theirs, _json(theirs)


def _rows_before(contents: Contents) -> Any:
    """The size of the vocabulary that the model came with, whose words stand in vocab.txt."""
    content = contents.source_files.get(CONFIG, b"{}")
    return _parsed(content, (contents.place or Path()) / SOURCE / CONFIG).get("vocab_size")


def _read_small(path: Path) -> bytes:
    with naming_place(path, ValueError):
        return read_bytes(path, _MAX_BYTES)


def _parsed(content: bytes, place: Path) -> dict[str, Any]:
    with naming_place(place, ValueError):
        config = parse_json(content)
    if not isinstance(config, dict):
        raise UserError(f"{place}: is not a mapping")
    return config


def _json(config: dict[str, Any]) -> bytes:
    return (json.dumps(config, indent=4) + "\n").encode()
