"""Hugging Face's folders: config.json next to weights in safetensors files or `pytorch_model.bin`.

The names and layouts of a family are data in `ftk/models/<family>/convert.py`. Other files than weights are copied to
`source/` of the ftk checkpoint, with a list of the tensors of each file, so that the same folder can be written again,
byte for byte.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import safetensors.torch
import torch
from torch import Tensor

from ftk.checkpoint.bounded import bounded_by
from ftk.checkpoint.hf_classifier import OF_TEXTS, OF_WORDS, classifier_in, parts_of, renames_of
from ftk.checkpoint.hf_form import HuggingFaceConfig
from ftk.checkpoint.hf_names import CONFIG, ENDS, GENERATION, KEPT, NAMES, UNREAD, converter_of, full_names
from ftk.checkpoint.hf_tokenizer import own_tokenizer
from ftk.checkpoint.hf_weights import SAFE, stored_weights
from ftk.checkpoint.hf_writing import write_folder
from ftk.checkpoint.layout import read_part
from ftk.checkpoint.weights import check_tensors, digest
from ftk.config.build import build_options
from ftk.errors import UserError, download_hint, naming_place
from ftk.files import read_bytes, read_json
from ftk.models.conversion import HF_PICKLED, HF_WEIGHTS, Contents, Converter, holds_hf_weights
from ftk.models.renames import LAYER_NUMBER, LazyTensors, renamed, without_copies
from ftk.registry import HF_MODELS, MODELS

logger = logging.getLogger(__name__)

_OF_MODELCENTER = "pytorch_model.pt"  # next to a config.json of another form
_NEAR = 1e-2  # how much numbers of at most 1 may differ that were kept in bfloat16
_SEED = 1  # of an output layer that the files lack
_MAX_KEPT_BYTES = 1 << 27
_OF_ANSWERS = {  # key of generation_config.json -> our option, where the family has it
    ENDS: "end_tokens",
    "decoder_start_token_id": "decoder_start_token",
    "forced_bos_token_id": "forced_first_token",
}
_QUANTISED = ("quantization_config", "compression_config", "quantization", "quantization_bit")  # the third is MLX's


class HuggingFace:
    """Folders as `transformers` writes them, of the families that registered with `register_hf_model`."""

    writes_heads: ClassVar[bool] = True

    def __init__(self, config: HuggingFaceConfig) -> None:
        self.config = config

    @staticmethod
    def recognises(folder: Path) -> bool:
        is_other = (folder / _OF_MODELCENTER).is_file() and not holds_hf_weights(folder)
        return (folder / CONFIG).is_file() and not is_other

    @staticmethod
    def identity_files(source: Path) -> list[Path]:
        return sorted(path for path in source.iterdir() if path.suffix in (".json", SAFE, Path(HF_PICKLED).suffix))

    def describe(self, source: Path) -> Contents:
        config = _config(source)
        name = next((family for family in HF_MODELS if converter_of(family).matches(config)), None)
        if name is None:
            raise UserError(f"{source / CONFIG}: {_other_family(config)}; supported are {', '.join(HF_MODELS)}")
        if key := next((key for key in _QUANTISED if config.get(key)), None):
            raise UserError(
                f"{source / CONFIG}: {key} is {config[key]!r:.60}: the weights are quantised, which ftk does not read; "
                "open the model that they were made of (if they are not, remove the key from the file)"
            )
        converter = converter_of(name)
        with naming_place(source):
            with _naming_other(_architectures(config), converter):
                options = dataclasses.replace(_options(source, digest(source), name))
            task = converter.task(options)
            found = classifier_in(config, converter, options, lambda: stored_weights(source).tensors.described)
        return Contents(
            model=name,
            config=options,
            task=task if found is None else found[1],
            place=source,
            own_tokenizer=own_tokenizer(source, converter, task["_name"]),
            head=None if found is None else found[0],
        )

    def read(self, source: Path) -> Contents:
        contents = self.describe(source)
        converter, stored = converter_of(contents.model), stored_weights(source)
        tied = converter.tied(contents.config)
        of_head = parts_of(converter, contents.head).values()
        unread = [name for name in converter.unread(contents.config) if name.rpartition(".")[0] not in of_head]
        omitted = {*converter.buffers, *unread}
        names = _architectures(_config(source))
        with naming_place(source), _naming_other(names, converter):
            whole = _whole(stored.tensors, converter, tied, omitted)
            trained = _without_constants(whole, converter.constants(contents.config))
            tensors = renamed(trained, renames_of(converter, contents.head, contents.config), contents.config)
            fresh = LazyTensors.of({})
            if contents.head is None and converter.architecture not in names:
                fresh = _fresh_output_layer(tensors, contents, converter.output_layer)
                tensors = tensors.joined(fresh)
                check_tensors(dataclasses.replace(contents, tensors=tensors), source)
        full_of = full_names(stored.tensors.described, converter, tied)
        # Pickles, and what is left out or added: then the files differ, and their index is not copied.
        is_same = not fresh.described and not any(_is_one_of(name, converter.buffers) for name in full_of.values())
        comes_back = bool(stored.files) and is_same
        if dropped := [name for name, full in full_of.items() if full in unread]:
            what = "not part of the model" if comes_back else "left out"
            logger.info("%s: no output layer here reads %s; %s", source, " and ".join(dropped), what)
        # An index next to one file of all weights is of older files.
        indexed = (HF_WEIGHTS,) if not comes_back or HF_WEIGHTS in stored.files else ()
        left_out = (NAMES, HF_PICKLED, *indexed)
        kept = {
            path.name: read_bytes(path, _MAX_KEPT_BYTES)
            for path in sorted(source.iterdir())
            if path.is_file() and path.suffix in KEPT and not path.name.startswith(left_out)
        }
        if comes_back:
            kept[NAMES] = json.dumps(stored.files).encode()
            if dropped:
                kept[UNREAD] = safetensors.torch.save({name: stored.tensors.read(name) for name in dropped})
        return dataclasses.replace(contents, tensors=tensors, source_files=kept)

    def write(self, folder: Path, contents: Contents) -> Path:
        write_folder(folder, contents, self.config.shard_bytes)
        return Path()


@functools.lru_cache(maxsize=8)
def _options(source: Path, state: str, name: str) -> Any:
    """Our options of a folder, whose files have this `digest`.

    Kept, as an old pickle can only be read whole, and a folder is described several times.
    """
    converter = converter_of(name)
    config = _config(source)
    options = _checked(converter.config_from(config))
    options = _checked(options, **_of_answers(source / GENERATION, config, options))

    def stored() -> LazyTensors:
        tensors = stored_weights(source).tensors
        full_of = full_names(tensors.described, converter, converter.tied(options))
        return tensors.under({full: name for name, full in full_of.items()})

    return converter.fitted(options, stored)


def _checked(options: Any, **more: Any) -> Any:
    """The options with others, checked as ours are."""
    return build_options("model", type(options), dataclasses.asdict(options) | more)


def _of_answers(path: Path, config: Mapping[str, Any], options: Any) -> dict[str, Any]:
    """How answers begin and end: our options of generation_config.json, which goes before config.json."""
    content = _mapping(path) if path.is_file() else {}
    theirs = {ENDS: config.get(ENDS), **{key: value for key, value in content.items() if value is not None}}
    ends = theirs[ENDS] if isinstance(theirs[ENDS], list) else [theirs[ENDS]]
    # `transformers` takes ids that are no tokens, as its defaults may be for small vocabularies.
    tokens = [token for token in ends if token not in (None, -1)]
    theirs[ENDS] = [token for token in tokens if not isinstance(token, int) or token < options.vocab_size]
    return {name: theirs[key] for key, name in _OF_ANSWERS.items() if key in theirs and hasattr(options, name)}


def _config(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "no such folder"
        hint = "" if folder.exists() else download_hint(str(folder), "model")
        raise UserError(f"{folder}: {what}; give a Hugging Face folder with {CONFIG} and weights{hint}")
    return _mapping(folder / CONFIG)


def _mapping(path: Path) -> dict[str, Any]:
    content = read_part(path, read_json)
    if not isinstance(content, dict):
        raise UserError(f"{path}: is not a mapping")
    return content


def _whole(
    stored: LazyTensors, converter: Converter, tied: Mapping[str, str], left_out: Collection[str]
) -> LazyTensors:
    """Parameters by their full names, without tied copies and names that are left out.

    Raises:
        UserError: two tied tensors differ.
    """
    full_of = full_names(stored.described, converter, tied)
    whole = stored.under({full: name for name, full in full_of.items() if not _is_one_of(full, left_out)})
    return without_copies(whole, tied, " (if it is the output layer, `tie_word_embeddings` false keeps both)")


def _fresh_output_layer(tensors: LazyTensors, contents: Contents, head: tuple[str, ...]) -> LazyTensors:
    """Initial values of an output layer, whose names begin with one of `head`, where the files are of a trunk alone."""
    if any(name.startswith(head) for name in tensors.described):
        return LazyTensors.of({})
    with bounded_by(tensors.described, contents.place), torch.device("meta"):
        model = MODELS.get(contents.model).target(contents.config)
    fresh = {name: value for name, value in model.state_dict().items() if name.startswith(head)}
    if fresh:
        logger.warning("%s: has no output layer; %s start with initial values", contents.place, ", ".join(fresh))
    return LazyTensors(fresh, lambda name: model.initial_value(name, fresh[name].shape, _SEED))


def _other_family(config: Mapping[str, Any]) -> str:
    if "model_type" in config:
        return f"model_type {config['model_type']!r:.40} is of an unknown family"
    return (
        'has no model_type, which the first releases did not write; add that of its family, e.g. "model_type": "bert"'
    )


def _architectures(config: Mapping[str, Any]) -> list[str]:
    names = config.get("architectures")
    return [str(name) for name in names] if isinstance(names, list) else []


@contextlib.contextmanager
def _naming_other(architectures: Sequence[str], converter: Converter) -> Iterator[None]:
    """Errors inside name an architecture that the family's files here do not have, and say what to do."""
    start = converter.architecture.removesuffix("LMHeadModel").partition("For")[0]
    known = {converter.architecture, *(f"{start}{end}" for end in ("Model", "ForPreTraining"))}
    known |= {f"{start}{end}" for end in (OF_TEXTS, OF_WORDS) if converter.classifier}
    other = next((name for name in architectures if name not in known), None)
    try:
        yield
    except UserError as error:
        if other is None:
            raise
        why = str(error).partition("; known are ")[0]
        hint = "AutoModel.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER) of `transformers` saves the same model "
        hint = "" if other.endswith("EncoderModel") else f"; {hint}without its output layer, which ftk opens"
        raise UserError(
            f"architecture {other:.60} is not known here ({why}); ftk opens {converter.architecture}{hint}"
        ) from error


def _without_constants(stored: LazyTensors, constants: LazyTensors) -> LazyTensors:
    """The tensors besides those that follow from the options.

    Raises:
        UserError: one of these has other values.
    """
    for name in constants.described.keys() & stored.described.keys():
        if not _is_near(constants.read(name), stored.read(name)):
            raise UserError(f"{name} does not have the values of all such models; ftk's model does not keep it")
    return stored.without(constants.described)


def _is_near(made: Tensor, found: Tensor) -> bool:
    """Whether two tables have nearly the same numbers in the rows that both have; the first is overwritten."""
    if found.shape[1:] != made.shape[1:] or not found.numel() or not found.is_floating_point():
        return False
    rows = min(len(found), len(made))
    return bool(made[:rows].sub_(found[:rows].float()).abs_().max() < _NEAR)


def _is_one_of(full_name: str, patterns: Collection[str]) -> bool:
    return LAYER_NUMBER.sub("*", full_name, count=1) in patterns
