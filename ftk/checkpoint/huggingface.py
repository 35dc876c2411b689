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
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import safetensors.torch
import torch
from torch import Tensor

from ftk.checkpoint.bounded import bounded_by
from ftk.checkpoint.hf_classifier import OF_TEXTS, OF_WORDS, classifier_config, classifier_in, parts_of, renames_of
from ftk.checkpoint.hf_form import SIZE, UNITS, HuggingFaceConfig
from ftk.checkpoint.hf_tokenizer import own_tokenizer, special_id, template_file, tokenizer_files
from ftk.checkpoint.hf_weights import SAFE, is_plain, stored_weights
from ftk.checkpoint.index import safetensors_pieces
from ftk.checkpoint.layout import SOURCE, read_part
from ftk.checkpoint.manifest import write_file
from ftk.checkpoint.weights import check_tensors, digest
from ftk.config.build import build_options
from ftk.config.needs import has_effect
from ftk.config.options import options_of
from ftk.errors import UserError, download_hint, naming_place
from ftk.files import naming, read_bytes, read_json
from ftk.models.config import ends_of
from ftk.models.conversion import HF_INDEX, HF_PICKLED, HF_WEIGHTS, Contents, Converter, holds_hf_weights
from ftk.models.renames import LAYER_NUMBER, LazyTensors, renamed, without_copies
from ftk.parsing import parse_json
from ftk.registry import HF_MODELS, MODELS
from ftk.tokenizers import load_tokenizer

logger = logging.getLogger(__name__)

CONFIG, GENERATION = "config.json", "generation_config.json"

_NAMES = "ftk_names.json"  # of `source/`: weights' file -> {"metadata": of the file, "names": of its tensors}
_UNREAD = f"ftk_unread{SAFE}"  # of `source/`: weights that no part of ours reads, to be written back
_OF_MODELCENTER = "pytorch_model.pt"  # next to a config.json of another form
_NEAR = 1e-2  # how much numbers of at most 1 may differ that were kept in bfloat16
_SEED = 1  # of an output layer that the files lack
_KEPT = (".jinja", ".json", ".model", ".txt")
_MAX_KEPT_BYTES = 1 << 27
_ENDS = "eos_token_id"
_OF_ANSWERS = {  # key of generation_config.json -> our option, where the family has it
    _ENDS: "end_tokens",
    "decoder_start_token_id": "decoder_start_token",
    "forced_bos_token_id": "forced_first_token",
}
_QUANTISED = ("quantization_config", "compression_config", "quantization", "quantization_bit")  # the third is MLX's
_UNCHECKED = {  # options that a folder need not bring back: of training, or shown by `_CHECKED`
    *("attention", "init_std", "layer_drop", "stochastic_depth", "max_positions"),
    *("attention_window", "ffn_hidden_size", "sliding_window", "windowed_layers"),
}
_CHECKED = ("inner_size", "layer_windows")


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
        name = next((family for family in HF_MODELS if _converter(family).matches(config)), None)
        if name is None:
            raise UserError(f"{source / CONFIG}: {_other_family(config)}; supported are {', '.join(HF_MODELS)}")
        if key := next((key for key in _QUANTISED if config.get(key)), None):
            raise UserError(
                f"{source / CONFIG}: {key} is {config[key]!r:.60}: the weights are quantised, which ftk does not read; "
                "open the model that they were made of (if they are not, remove the key from the file)"
            )
        converter = _converter(name)
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
        converter, stored = _converter(contents.model), stored_weights(source)
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
        full_names = _full_names(stored.tensors.described, converter, tied)
        # Pickles, and what is left out or added: then the files differ, and their index is not copied.
        is_same = not fresh.described and not any(_is_one_of(name, converter.buffers) for name in full_names.values())
        comes_back = bool(stored.files) and is_same
        if dropped := [name for name, full in full_names.items() if full in unread]:
            what = "not part of the model" if comes_back else "left out"
            logger.info("%s: no output layer here reads %s; %s", source, " and ".join(dropped), what)
        # An index next to one file of all weights is of older files.
        indexed = (HF_WEIGHTS,) if not comes_back or HF_WEIGHTS in stored.files else ()
        left_out = (_NAMES, HF_PICKLED, *indexed)
        kept = {
            path.name: read_bytes(path, _MAX_KEPT_BYTES)
            for path in sorted(source.iterdir())
            if path.is_file() and path.suffix in _KEPT and not path.name.startswith(left_out)
        }
        if comes_back:
            kept[_NAMES] = json.dumps(stored.files).encode()
            if dropped:
                kept[_UNREAD] = safetensors.torch.save({name: stored.tensors.read(name) for name in dropped})
        return dataclasses.replace(contents, tensors=tensors, source_files=kept)

    def write(self, folder: Path, contents: Contents) -> Path:
        converter = _converter(contents.model)
        tied = converter.tied(contents.config)
        own = converter.config_to(contents.config)
        of_head = classifier_config(contents, converter, own)
        renames = renames_of(converter, contents.head, contents.config)
        rename = functools.partial(renamed, contents.tensors, renames, contents.config, back=True)
        _refuse_lost(contents, converter.fitted(converter.config_from(own), rename))
        theirs = rename()
        own |= of_head
        constants = converter.constants(contents.config)
        kept, place = dict(contents.source_files), (contents.place or Path()) / SOURCE
        tokenizer = None if contents.tokenizer is None else load_tokenizer(contents.tokenizer)
        kept |= template_file(tokenizer, contents.task, contents.config)
        unread = _unread(kept.pop(_UNREAD, None), place / _UNREAD)
        for name in kept:
            if not is_plain(name) or not name.endswith(_KEPT):
                raise UserError(f"{place / name}: is none of the files that are copied ({', '.join(_KEPT)}); remove it")
        if _NAMES in kept:
            names, apart = {*theirs.described, *constants.described}, {*unread.described}
            files = _recorded(kept.pop(_NAMES), place / _NAMES, names, converter, tied, {*constants.described}, apart)
            theirs = _with_constants(theirs, constants).joined(unread)
        else:
            dtypes = {tensor.dtype for tensor in theirs.described.values() if tensor.is_floating_point()}
            dtype = {"dtype": str(dtypes.pop()).removeprefix("torch.")} if len(dtypes) == 1 else {}
            tasks = [] if converter.vocabularies else [contents.task, converter.task(contents.config)]
            kept = tokenizer_files(tokenizer, [str(task.get("_name")) for task in tasks]) | kept
            # The defaults of their configuration belong to another vocabulary.
            roles = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "pad", **converter.token_roles}
            ends: dict[str, Any] = dict.fromkeys(roles)
            if tokenizer:
                ends |= {key: special_id(tokenizer.special, role) for key, role in roles.items()}
            if more := ends_of(contents.config, ends[_ENDS]):
                ends[_ENDS] = more if len(more) > 1 else more[0]
            kept.setdefault(CONFIG, _json(ends | own | dtype))
            theirs = _with_constants(theirs, constants)
            copied = [name for name in converter.copied(contents.config) if tied[name] in theirs.described]
            written = {name: theirs.described[tied[name]] for name in copied}
            files, index = self._shards({**theirs.described, **written})
            kept, apart = kept | index, set()
        full = _first_names([name for content in files.values() for name in content["names"]], converter, tied, apart)
        for file, content in files.items():
            tensors = theirs.under({name: full[name] for name in content["names"]})
            with naming(folder / file):
                write_file(folder / file, safetensors_pieces(tensors, content["metadata"]))
        for name, content in kept.items():
            write_file(folder / name, [content])
        return Path()

    def _shards(self, described: Mapping[str, Tensor]) -> tuple[dict[str, Any], dict[str, bytes]]:
        """Files for tensors in the form of `ftk_names.json`, filled in order; and the index of several files."""
        match = SIZE.fullmatch(self.config.max_shard_size)
        assert match is not None, "validated"
        most, shards, filled = int(match[1]) * UNITS[match[2]], [[]], 0  # type: ignore[var-annotated]
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
        files = {
            file: {"metadata": {"format": "pt"}, "names": shard} for file, shard in zip(names, shards, strict=True)
        }
        if len(shards) == 1:
            return files, {}
        metadata = {
            "total_parameters": sum(tensor.numel() for tensor in described.values()),
            "total_size": sum(sizes.values()),
        }
        weight_map = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
        return files, {HF_WEIGHTS + HF_INDEX: _json({"metadata": metadata, "weight_map": weight_map})}


@functools.lru_cache(maxsize=8)
def _options(source: Path, state: str, name: str) -> Any:
    """Our options of a folder, whose files have this `digest`.

    Kept, as an old pickle can only be read whole, and a folder is described several times.
    """
    converter = _converter(name)
    config = _config(source)
    options = _checked(converter.config_from(config))
    options = _checked(options, **_of_answers(source / GENERATION, config, options))

    def stored() -> LazyTensors:
        tensors = stored_weights(source).tensors
        full_names = _full_names(tensors.described, converter, converter.tied(options))
        return tensors.under({full: name for name, full in full_names.items()})

    return converter.fitted(options, stored)


def _checked(options: Any, **more: Any) -> Any:
    """The options with others, checked as ours are."""
    return build_options("model", type(options), dataclasses.asdict(options) | more)


def _of_answers(path: Path, config: Mapping[str, Any], options: Any) -> dict[str, Any]:
    """How answers begin and end: our options of generation_config.json, which goes before config.json."""
    content = _mapping(path) if path.is_file() else {}
    theirs = {_ENDS: config.get(_ENDS), **{key: value for key, value in content.items() if value is not None}}
    ends = theirs[_ENDS] if isinstance(theirs[_ENDS], list) else [theirs[_ENDS]]
    # `transformers` takes ids that are no tokens, as its defaults may be for small vocabularies.
    tokens = [token for token in ends if token not in (None, -1)]
    theirs[_ENDS] = [token for token in tokens if not isinstance(token, int) or token < options.vocab_size]
    return {name: theirs[key] for key, name in _OF_ANSWERS.items() if key in theirs and hasattr(options, name)}


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
        value, theirs = (getattr(options, name, None) for options in (config, found))
        if value is not None and value != theirs:
            raise UserError(
                f"Hugging Face's form of {contents.model} has no place for `{name}` {value}; its models have {theirs}"
            )


def _converter(model: str) -> Converter:
    converter: Converter = HF_MODELS.get(model).target()
    return converter


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
    full_names = _full_names(stored.described, converter, tied)
    whole = stored.under({full: name for name, full in full_names.items() if not _is_one_of(full, left_out)})
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


def _unread(content: bytes | None, place: Path) -> LazyTensors:
    """The weights in `ftk_unread.safetensors`; none if the checkpoint has no such file (`content` is None)."""
    if content is None:
        return LazyTensors.of({})
    with naming_place(place, safetensors.SafetensorError):
        return LazyTensors.of(safetensors.torch.load(content))


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


def _full_names(names: Collection[str], converter: Converter, tied: Mapping[str, str]) -> dict[str, str]:
    """Name in the files -> full name as it is spelt today; a model without head omits the prefix."""
    full = {}
    for name in names:
        start, _, last = name.rpartition(".")
        full[name] = f"{start}.{converter.older[last]}" if last in converter.older else name
    if any(name.startswith(converter.prefix) for name in names):
        return full
    known = {name for rename in converter.renames for name in rename.theirs}
    return {
        name: today if today in tied or today in known else converter.prefix + today for name, today in full.items()
    }


def _first_names(
    names: Collection[str], converter: Converter, tied: Mapping[str, str], apart: Collection[str]
) -> dict[str, str]:
    """Name in the files -> full name; for a tied copy, that of the tensor it repeats; those `apart` stay."""
    full_names = _full_names(names, converter, tied)
    return {name: name if name in apart else tied.get(full, full) for name, full in full_names.items()}


def _is_one_of(full_name: str, patterns: Collection[str]) -> bool:
    return LAYER_NUMBER.sub("*", full_name, count=1) in patterns


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
