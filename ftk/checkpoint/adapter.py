"""Adapters on disk: the folder `adapter/` of a checkpoint and the small folder alone, both in peft's form.

    adapter_config.json        what peft reads: kind, rank, alpha, layers
    adapter_model.safetensors  base_model.model.LAYER.lora_A.weight ..., and what was trained besides
    ftk_adapter.json           what only ftk knows: the sha256 of the weights that it was trained beside, and its task

The form is that of peft 0.21, https://github.com/huggingface/peft; folders that peft wrote lack the last file.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
from torch import Tensor

from ftk.checkpoint import layout
from ftk.checkpoint.adapted_model import AdaptedModel
from ftk.checkpoint.checking import check_files
from ftk.checkpoint.contents import config_of
from ftk.checkpoint.finite import refuse_non_finite
from ftk.checkpoint.head import head_in
from ftk.checkpoint.index import read_index, tensor_bytes
from ftk.checkpoint.layout import ADAPTER, ADAPTER_CONFIG, BrokenCheckpoint
from ftk.checkpoint.load import read_config
from ftk.checkpoint.manifest import json_bytes
from ftk.checkpoint.peft_forms import PROMPT, WEIGHTS, form_named, form_of, is_within, outermost, owner
from ftk.checkpoint.peft_names import by_layer, huggingface_names, own_names
from ftk.checkpoint.reading import open_safetensors, read_whole
from ftk.checkpoint.weights import Weights, copy_rows, weights_of
from ftk.config.build import as_mapping, build_options
from ftk.config.root import Chosen
from ftk.errors import UserError, counted
from ftk.files import put_in_place, read_json, reason, sync_tree, temporary_folder
from ftk.modules.adapters.adapt import Adapter, part_names
from ftk.modules.classifier import is_of_head
from ftk.name_patterns import examples, matches
from ftk.registry import ADAPTERS, MODELS
from ftk.version import __version__

FACTS = "ftk_adapter.json"
ADAPTER_ALONE = "give the folder of an adapter alone, which ftk-checkpoint adapter RUN DST writes"  # for messages
_PREFIX, _ADAPTED = "base_model.model.", ".base_layer."
_FORMAT = "ftk-adapter"
_LEARNED = ("task", "criterion", "dataset")  # sections of a configuration that say what a run learned
_OF_THE_MACHINE = ("data", "data_weights", "tokenizer_folder")  # options of `dataset` that mean nothing elsewhere
_WRAPPER = re.compile(r"\.(modules_to_save|original_module)(\.default)?(?=\.)")
"""In names of biases of saved modules, which peft writes a second time where `bias` is "all"."""
_PREFIXED = re.compile(r"layers\.\d+\.attention(?=\.)")


def adapter_in(config: Mapping[str, Any]) -> Adapter | None:
    """The adapter of a checkpoint with this configuration; None if it has none.

    Raises:
        UserError: it is not known here, or its options are not.
    """
    options = adapter_section(config)
    if not options:
        return None
    entry = ADAPTERS.get(str(options.pop("_name")))
    made = None if entry.config is None else build_options(ADAPTER, entry.config, options)
    adapter: Adapter = Chosen(entry, made).build()
    return adapter


def model_in(config: Mapping[str, Any]) -> tuple[str, Any]:
    """The registered name of the model in a checkpoint's configuration, and its options, if it has some."""
    section = as_mapping("model", config.get("model"))
    options = {key: value for key, value in section.items() if key not in ("_name", "arch")}
    name = str(section.get("_name"))
    kind = MODELS.get(name).config
    return name, None if kind is None else build_options("model", kind, options)


def adapter_section(config: Mapping[str, Any]) -> dict[str, Any]:
    """The adapter's name and options in a checkpoint's configuration; empty without one."""
    section = as_mapping(ADAPTER, config.get(ADAPTER))
    return {} if section.get("_name") == "none" else section


def config_beside(base: str | Path, adapter: str | Path | None) -> dict[str, Any]:
    """The configuration of a checkpoint, with the task of a separate adapter if one is given.

    Args:
        base: the checkpoint, or another program's folder.
        adapter: folder of the adapter. One that does not say its task, as peft's, has that of `base`; so has None.

    Raises:
        BrokenCheckpoint: a file is damaged.
    """
    config = read_config(base)
    learned = None if adapter is None else _facts(Path(adapter)).get("config")
    if learned is None:
        return config
    learned = as_mapping(FACTS, learned)
    return {key: value for key, value in config.items() if key not in _LEARNED} | {
        key: learned[key] for key in _LEARNED if key in learned
    }


def refuse_adapted(folder: Path, what: str) -> None:
    """Raise a UserError if a checkpoint's model has an adapter: `what` needs plain weights."""
    adapter = adapter_in(read_config(folder))
    if hasattr(adapter, "places"):  # not of linear layers
        raise UserError(f"{folder}: has an adapter that cannot be merged into weights, and {what} needs plain ones")
    if adapter is not None:
        raise UserError(f"{folder}: has an adapter, and {what} needs plain weights; ftk-checkpoint merge {folder} DST")


# -- writing ------------------------------------------------------------------------------------------------------


class AdapterFiles:
    """The files of `adapter/`, made of the tensors of a checkpoint when these are written.

    Args:
        adapter: of the model. Those that have no form (`ftk.checkpoint.peft_forms`) have no files.
    """

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self._base_sha256: str | None = None  # computed once: the base is frozen

    def __call__(self, folder: Path) -> dict[str, bytes]:
        """Name -> content.

        Args:
            folder: a checkpoint, of which the tensors are there.
        """
        form = form_of(self.adapter)
        if form is None:
            return {}
        index = read_index(folder / layout.MODEL)
        names = part_names(index.tensors, self.adapter)
        train_also = self.adapter.config.train_also
        also = {index.names[name] for name in index.names if any(matches(name, pattern) for pattern in train_also)}
        also |= {index.names[name] for name in filter(is_of_head, index.names)}
        also -= {*names}

        def read(name: str) -> Tensor:
            return read_whole(folder / layout.MODEL, index.tensors[name])

        run_config = config_of(folder)
        _, model_config = model_in(run_config)
        written = form.written(self.adapter.config, {name: read(name) for name in names}, model_config)
        if written is None:
            return {}
        said, tensors = written
        adapted, _ = by_layer(tensors)
        saved = outermost({owner(name) for name in also}.difference(adapted))  # peft saves whole modules
        beside = [name for name in index.tensors if name not in names and (name in also or is_within(name, saved))]
        if "bias" in said and any(name.endswith(".bias") and owner(name) in adapted for name in also):
            said["bias"] = "lora_only"
        if self._base_sha256 is None:
            self._base_sha256 = base_sha256(index.tensors.keys() - {*names, *beside}, read)
        config = {"base_model_name_or_path": None, "inference_mode": True, "task_type": None, **said}
        learned = {key: as_mapping(key, run_config[key]) for key in _LEARNED if run_config.get(key)}
        for key in set(_OF_THE_MACHINE) & learned.get("dataset", {}).keys():
            del learned["dataset"][key]
        facts = {
            "format": _FORMAT,
            "version": 1,
            "base_sha256": self._base_sha256,
            "config": learned,
            "ftk_version": __version__,
        }
        return {
            ADAPTER_CONFIG: json_bytes(config | {"modules_to_save": saved or None}),
            WEIGHTS: _weights(tensors | {name: read(name) for name in beside}),
            FACTS: json_bytes(facts),
        }


def adapter_files_of(config: Mapping[str, Any]) -> AdapterFiles | None:
    """Those of a checkpoint with this configuration; None if its model has no adapter."""
    adapter = adapter_in(config)
    return None if adapter is None else AdapterFiles(adapter)


def base_sha256(names: Iterable[str], read: Callable[[str], Tensor]) -> str:
    """The sha256 of weights, whatever files and floating point types hold them.

    Args:
        names: of the tensors.
        read: gives one, on the CPU.
    """
    digest = hashlib.sha256()
    for name in sorted(names):
        tensor = read(name)
        if tensor.is_floating_point():
            tensor = tensor.float()
        digest.update(f"{name} {list(tensor.shape)}\n".encode())
        digest.update(tensor_bytes(tensor))
    return digest.hexdigest()


def write_adapter(source: str | Path, output: str | Path, *, names: str = "ftk", overwrite: bool = False) -> Path:
    """Write the adapter of a checkpoint alone.

    Args:
        source: a checkpoint, or a run's folder.
        output: folder to write.
        names: of the layers, "ftk" or "huggingface": those of the same model in Hugging Face's form, and its layouts.
        overwrite: replace an adapter of this name.

    Raises:
        UserError: the checkpoint has none, or none with such names; or `output` exists, and is no adapter or not to be
            replaced.
        BrokenCheckpoint: a file of it is damaged.
    """
    folder, output = layout.resolve_checkpoint(source), Path(output)
    files = check_files(folder, prefix=f"{ADAPTER}/")
    if f"{ADAPTER}/{ADAPTER_CONFIG}" not in files:
        name = adapter_section(read_config(folder)).get("_name")
        if name is None:
            raise UserError(f"{folder}: has no adapter; it was trained without `adapter`")
        raise UserError(f"{folder}: has an adapter that is not written alone, {name}; give this checkpoint whole")
    made = {name: (folder / ADAPTER / name).read_bytes() for name in (ADAPTER_CONFIG, WEIGHTS, FACTS)}
    if names == "huggingface":
        config, tensors = _read_json(folder / ADAPTER / ADAPTER_CONFIG), _read_tensors(folder / ADAPTER)
        run = read_config(folder)
        model = AdaptedModel(*model_in(run), head_in(run), weights_of(folder))
        config |= _base_for_peft(run)
        named = huggingface_names(config, tensors, model, folder / ADAPTER / ADAPTER_CONFIG)
        made |= {ADAPTER_CONFIG: json_bytes(named[0]), WEIGHTS: _weights(named[1])}
    if output.exists() or output.is_symlink():
        if not overwrite:
            raise UserError(f"{output}: exists; replace it with `overwrite` or choose another name")
        if output.is_symlink() or not layout.is_adapter(output):
            raise UserError(f"{output}: exists and is no adapter; it is not replaced")
    output.parent.mkdir(parents=True, exist_ok=True)
    with temporary_folder(output) as temporary:
        for name, content in made.items():
            (temporary / name).write_bytes(content)
        sync_tree(temporary)
        put_in_place(temporary, output)
    return output


def _base_for_peft(run: Mapping[str, Any]) -> dict[str, Any]:
    """What peft's AutoPeftModelForCausalLM needs to open the base itself: a folder of Hugging Face's, if it was one."""
    start = as_mapping("checkpoint", run.get("checkpoint")).get("finetune_from")
    if start is None or layout.form_of(Path(start)) != "hf":
        return {}
    try:
        known = _read_json(Path(start, "config.json")).get("architectures")
    except BrokenCheckpoint:  # of a base that is not needed here
        return {}
    is_causal = isinstance(known, list) and any(str(name).endswith(("ForCausalLM", "LMHeadModel")) for name in known)
    task_type = "CAUSAL_LM" if is_causal and head_in(run) is None else None
    return {"base_model_name_or_path": str(Path(start).resolve()), "task_type": task_type}


def _weights(tensors: Mapping[str, Tensor]) -> bytes:
    """The content of `WEIGHTS`; what an adapted layer itself has learned, as its bias, is in its `base_layer` there."""
    (adapted, rest), named = by_layer(tensors), {}
    for name, tensor in tensors.items():
        layer, _, part = name.rpartition(".")
        place = f"{layer}{_ADAPTED}{part}" if name in rest and layer in adapted else name
        named[name if name == PROMPT else f"{_PREFIX}{place}"] = tensor.contiguous()
    return safetensors.torch.save(named, {"format": "pt"})


# -- reading ------------------------------------------------------------------------------------------------------


class OpenedAdapter(NamedTuple):
    """An adapter alone.

    Attributes:
        folder: where it lies.
        adapter: to be put on its model.
        tensors: its parts, and what was trained besides, by their names in the model.
        base_sha256: of the weights that it was trained beside; None if its folder does not say that.
    """

    folder: Path
    adapter: Adapter
    tensors: dict[str, Tensor]
    base_sha256: str | None

    def beside(self, weights: Weights, base: Path) -> Weights:
        """The weights of a model with this adapter.

        Args:
            weights: of the model that it was trained beside, without it.
            base: their folder.

        Raises:
            UserError: they are not those that it was trained beside, or lack what it has parts of.
        """
        own = self.tensors
        if any(map(is_of_head, own)) and not any(map(is_of_head, weights.names)):
            raise UserError(
                f"{self.folder}: was trained with a classifier, which {base} lacks; give the checkpoint of its run, "
                f"or what ftk-checkpoint merge makes of that"
            )
        adapted = [layer for layer, _ in self.adapter.config.targets()]
        known = {owner(name) for name in weights.names}
        for layer in adapted:
            if not any(f"{name}.".startswith(f"{layer}.") for name in known):
                raise UserError(f"{self.folder}: has parts of {layer}, which {base} lacks; {examples(layer, known)}")
            self._check_shape(layer, weights, base)
        if getattr(self.adapter.config, "prefix_positions", False):  # for all layers, of which it names none
            of_base, of_prefix = (
                {match[0] for name in names if (match := _PREFIXED.match(name))} for names in (weights.names, own)
            )
            if of_base != of_prefix:
                layers = counted(len(of_prefix), "layer")
                raise UserError(f"{self.folder}: has a prefix for {layers}, and {base} has {len(of_base)}")
        if self.base_sha256 is not None:
            found = base_sha256(weights.tensors.keys() - own.keys(), weights.read)
            if found != self.base_sha256:
                raise UserError(
                    f"{self.folder}: was trained beside other weights than those of {base} (their sha256 is "
                    f"{found[:12]}..., it was {self.base_sha256[:12]}...); give the model that it was trained beside"
                )

        def fill(targets: Mapping[str, Tensor]) -> None:
            weights.fill({name: target for name, target in targets.items() if name not in own})
            for name in targets.keys() & own.keys():
                copy_rows(targets[name], own[name])

        return Weights({**weights.tensors, **own}, {**weights.names, **{name: name for name in own}}, fill)

    def _check_shape(self, layer: str, weights: Weights, base: Path) -> None:
        """Refuses the matrices of LoRA for a layer of another size; rounded weights have another form."""
        matrix = weights.tensors.get(weights.names.get(f"{layer}.weight", ""))
        into, back = (self.tensors.get(f"{layer}.lora_{part}.weight") for part in "AB")
        if matrix is None or into is None or back is None or not matrix.dtype.is_floating_point:
            return
        if (found := [len(back), into.shape[1]]) != [*matrix.shape]:
            raise UserError(
                f"{self.folder}: was trained beside another model: its matrices for {layer} are for a weight "
                f"{found}, which is {[*matrix.shape]} in {base}; give the model that it was trained beside"
            )


def read_adapter(path: str | Path, base: AdaptedModel) -> OpenedAdapter:
    """Read the folder of an adapter alone, ftk's or peft's, with the names of ftk's layers or of Hugging Face's.

    Whether its layers are there, and of the same shapes, is seen when it is put on its model.

    Args:
        path: the folder.
        base: the model that it was trained beside.

    Raises:
        UserError: it is no such folder; is damaged; lacks what its configuration names; has what ftk does not have.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; give the folder of an adapter")
    if not layout.has_adapter_files(folder):
        raise UserError(f"{folder}: is no adapter (no {ADAPTER_CONFIG}); leave `base` out, or {ADAPTER_ALONE}")
    if not (folder / WEIGHTS).is_file() and (folder / "adapter_model.bin").exists():
        raise UserError(
            f"{folder / 'adapter_model.bin'}: is pickled, and opening it could run any program; save it in peft again, "
            f"which writes {WEIGHTS}"
        )
    missing = [name for name in (ADAPTER_CONFIG, WEIGHTS) if not (folder / name).is_file()]
    if missing:
        raise BrokenCheckpoint(f"{folder}: has no {missing[0]}; copy the whole folder of the adapter again")
    config = _read_json(folder / ADAPTER_CONFIG)
    form = form_named(config.get("peft_type"), folder / ADAPTER_CONFIG)
    config, tensors = own_names(config, _read_tensors(folder), base, folder / ADAPTER_CONFIG)
    adapter, found = form.read(config, tensors, folder / ADAPTER_CONFIG)
    return OpenedAdapter(folder, adapter, found, _facts(folder).get("base_sha256"))


def _facts(folder: Path) -> dict[str, Any]:
    """What only ftk knows of an adapter; empty if another program wrote it."""
    facts = _read_json(folder / FACTS) if (folder / FACTS).exists() else {}
    if facts and (facts.get("format"), facts.get("version"), type(facts.get("base_sha256"))) != (_FORMAT, 1, str):
        raise BrokenCheckpoint(f"{folder / FACTS}: is not what ftk writes")
    return facts


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of an adapter, by their names without what peft puts before them.

    Raises:
        UserError: one is not finite, or has another name.
    """
    with open_safetensors(folder / WEIGHTS) as file:
        stored = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  # it is no mapping
    foreign = [key for key in stored if not key.startswith(_PREFIX) and key != PROMPT]
    if foreign:
        raise UserError(f"{folder / WEIGHTS}: {foreign[0]!r:.200} does not begin with {_PREFIX}")
    tensors = {
        key.removeprefix(_PREFIX).replace(_ADAPTED, "."): tensor
        for key, tensor in stored.items()
        if (plain := _WRAPPER.sub("", key)) == key or plain not in stored
    }
    refuse_non_finite(tensors, folder)
    return tensors


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = read_json(path)
    except (OSError, ValueError) as error:
        raise BrokenCheckpoint(f"{path}: {reason(error)}") from error
    if not isinstance(content, dict):
        raise BrokenCheckpoint(f"{path}: is not an object")
    return content
