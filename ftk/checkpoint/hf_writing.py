"""Writing a folder of Hugging Face's form: the files it was made of, or new ones.

A checkpoint that was converted from such a folder keeps a list of the tensors of each file, and gets the same files,
byte for byte.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from ftk.checkpoint.hf_classifier import classifier_config, renames_of
from ftk.checkpoint.hf_names import CONFIG, ENDS, KEPT, NAMES, UNREAD, converter_of, full_names
from ftk.checkpoint.hf_tokenizer import special_id, template_file, tokenizer_files
from ftk.checkpoint.hf_weights import SAFE, is_plain
from ftk.checkpoint.index import safetensors_pieces
from ftk.checkpoint.layout import SOURCE
from ftk.checkpoint.manifest import write_file
from ftk.config.needs import has_effect
from ftk.config.options import options_of
from ftk.errors import UserError, naming_place
from ftk.files import naming
from ftk.models.config import ends_of
from ftk.models.conversion import HF_INDEX, HF_WEIGHTS, Contents, Converter
from ftk.models.renames import LazyTensors, renamed
from ftk.parsing import parse_json
from ftk.tokenizers import Tokenizer, load_tokenizer

_UNCHECKED = {  # options that a folder need not bring back: of training, or shown by `_CHECKED`
    *("attention", "init_std", "layer_drop", "stochastic_depth", "max_positions"),
    *("attention_window", "ffn_hidden_size", "sliding_window", "windowed_layers"),
}
_CHECKED = ("inner_size", "layer_windows")


def write_folder(folder: Path, contents: Contents, shard_bytes: int) -> None:
    """Writes config.json, weights and what else belongs to them.

    Args:
        folder: exists.
        contents: of the checkpoint.
        shard_bytes: the most bytes of a new file of weights; a tensor is not cut.

    Raises:
        UserError: the form has no place for an option, or what is kept in `source/` cannot be that of such a folder.
    """
    converter, config = converter_of(contents.model), contents.config
    own = converter.config_to(config)
    of_head = classifier_config(contents, converter, own)
    rename = functools.partial(
        renamed, contents.tensors, renames_of(converter, contents.head, config), config, back=True
    )
    _refuse_lost(contents, converter.fitted(converter.config_from(own), rename))
    tensors, constants = rename(), converter.constants(config)
    kept, place = dict(contents.source_files), (contents.place or Path()) / SOURCE
    tokenizer = None if contents.tokenizer is None else load_tokenizer(contents.tokenizer)
    kept |= template_file(tokenizer, contents.task, contents.config)
    unread = _unread(kept.pop(UNREAD, None), place / UNREAD)
    for name in kept:
        if not is_plain(name) or not name.endswith(KEPT):
            raise UserError(f"{place / name}: is none of the files that are copied ({', '.join(KEPT)}); remove it")
    tied, apart = converter.tied(config), {*unread.described}
    theirs = _with_constants(tensors, constants)
    if NAMES in kept:
        names = {*tensors.described, *constants.described}
        files = _recorded(kept.pop(NAMES), place / NAMES, names, converter, tied, {*constants.described}, apart)
        theirs = theirs.joined(unread)
    else:
        copied = [name for name in converter.copied(config) if tied[name] in theirs.described]
        copies = {name: theirs.described[tied[name]] for name in copied}
        files, index = _shards({**theirs.described, **copies}, shard_bytes)
        kept = _new_files(contents, converter, tokenizer, own | of_head, tensors) | kept | index
        apart = set()
    full = _first_names([name for content in files.values() for name in content["names"]], converter, tied, apart)
    for file, content in files.items():
        part = theirs.under({name: full[name] for name in content["names"]})
        with naming(folder / file):
            write_file(folder / file, safetensors_pieces(part, content["metadata"]))
    for name, kept_bytes in kept.items():
        write_file(folder / name, [kept_bytes])


def _new_files(
    contents: Contents, converter: Converter, tokenizer: Tokenizer | None, own: dict[str, Any], tensors: LazyTensors
) -> dict[str, bytes]:
    """config.json and the tokenizer's files of a model that was not made of such a folder; `own`: of config.json."""
    dtypes = {tensor.dtype for tensor in tensors.described.values() if tensor.is_floating_point()}
    dtype = {"dtype": str(dtypes.pop()).removeprefix("torch.")} if len(dtypes) == 1 else {}
    tasks = [] if converter.vocabularies else [contents.task, converter.task(contents.config)]
    files = tokenizer_files(tokenizer, [str(task.get("_name")) for task in tasks])
    # The defaults of their configuration belong to another vocabulary.
    roles = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "pad", **converter.token_roles}
    ends: dict[str, Any] = dict.fromkeys(roles)
    if tokenizer:
        ends |= {key: special_id(tokenizer.special, role) for key, role in roles.items()}
    if more := ends_of(contents.config, ends[ENDS]):
        ends[ENDS] = more if len(more) > 1 else more[0]
    return {CONFIG: _json(ends | own | dtype), **files}


def _shards(described: Mapping[str, Tensor], most: int) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Tensors split into files of at most `most` bytes, as `ftk_names.json` lists them; and the index of the files."""
    shards: list[list[str]] = [[]]
    filled = 0
    sizes = {name: tensor.numel() * tensor.dtype.itemsize for name, tensor in described.items()}
    for name, size in sizes.items():
        if shards[-1] and filled + size > most:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    stem, ending = HF_WEIGHTS.split(".")
    names = [f"{stem}-{i + 1:05d}-of-{len(shards):05d}.{ending}" for i in range(len(shards))]
    names = names if len(shards) > 1 else [HF_WEIGHTS]
    files = {file: {"metadata": {"format": "pt"}, "names": shard} for file, shard in zip(names, shards, strict=True)}
    if len(shards) == 1:
        return files, {}
    metadata = {
        "total_parameters": sum(tensor.numel() for tensor in described.values()),
        "total_size": sum(sizes.values()),
    }
    weight_map = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
    return files, {HF_WEIGHTS + HF_INDEX: _json({"metadata": metadata, "weight_map": weight_map})}


def _unread(content: bytes | None, place: Path) -> LazyTensors:
    """The weights in `ftk_unread.safetensors`; none if the checkpoint has no such file (`content` is None)."""
    if content is None:
        return LazyTensors.of({})
    with naming_place(place, safetensors.SafetensorError):
        return LazyTensors.of(safetensors.torch.load(content))


def _refuse_lost(contents: Contents, found: Any) -> None:
    """Raises UserError if the folder to be written would lose an option; `found` is what it reads back as."""
    config = contents.config
    options = [
        option for option in options_of("model", type(config)) if not option.derived and has_effect(config, option)
    ]
    names = [option.name for option in options if option.name not in _UNCHECKED and not option.name.endswith("dropout")]
    if contents.head is not None:  # it replaces the output layer that the option is about
        names = [name for name in names if name != "next_sentence"]
    for name in (*names, *_CHECKED):
        value, theirs = (getattr(side, name, None) for side in (config, found))
        if value is not None and value != theirs:
            raise UserError(
                f"Hugging Face's form of {contents.model} has no place for `{name}` {value}; its models have {theirs}"
            )


def _with_constants(theirs: LazyTensors, constants: LazyTensors) -> LazyTensors:
    """The tensors and those that follow from the options, in their type."""
    if not constants.described:
        return theirs
    dtype = next(tensor.dtype for tensor in theirs.described.values() if tensor.is_floating_point())
    described = {name: tensor.to(dtype) for name, tensor in constants.described.items()}
    return theirs.joined(LazyTensors(described, lambda name: constants.read(name).to(dtype)))


def _json(content: Mapping[str, Any]) -> bytes:
    """JSON as `transformers` writes it."""
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()


def _first_names(
    names: Collection[str], converter: Converter, tied: Mapping[str, str], apart: Collection[str]
) -> dict[str, str]:
    """Name in the files -> full name; for a tied copy, that of the tensor it repeats; those `apart` stay."""
    full_of = full_names(names, converter, tied)
    return {name: name if name in apart else tied.get(full, full) for name, full in full_of.items()}


def _recorded(
    content: bytes,
    place: Path,
    described: Collection[str],
    converter: Converter,
    tied: Mapping[str, str],
    optional: Collection[str],
    apart: Collection[str],
) -> dict[str, Any]:
    """`ftk_names.json` of a checkpoint, which may come from anywhere: what it names is written.

    Args:
        content: of the file.
        place: the file, for messages.
        described: full names of the model's tensors.
        converter, tied: of the family.
        optional: of these names those that may be missing.
        apart: names in the files of weights that are none of the model's.

    Raises:
        UserError: it is invalid, names a file that cannot hold weights, or does not list each tensor of the model
            once.
    """
    with naming_place(place, ValueError):
        files = parse_json(content)
    if not isinstance(files, dict):
        raise UserError(f"{place}: is not a mapping")
    names: list[str] = []
    for file, entry in files.items():
        if not is_plain(file) or not file.endswith(SAFE):
            raise UserError(f"{place}: names {file!r:.80}, which is no file of weights")
        match entry:
            case {"metadata": dict(metadata), "names": list(own)}:
                strings = all(isinstance(text, str) for text in [*metadata.values(), *own])
            case _:
                strings = False
        if not strings:
            raise UserError(f"{place}: {file:.80} needs metadata and names, all of strings")
        names += entry["names"]
    full, known = _first_names(names, converter, tied, apart), {*described, *apart}
    unknown = [name for name in names if full[name] not in known]
    missing = sorted(known - set(full.values()) - set(optional))
    twice = [name for name, count in Counter(names).items() if count > 1]
    for wrong, what in ((unknown, "is not in the model"), (missing, "is missing"), (twice, "is named twice")):
        if wrong:
            raise UserError(f"{place}: the weight {wrong[0]!r:.200} {what}")
    return files
