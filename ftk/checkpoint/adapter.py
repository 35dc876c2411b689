"""Adapters on disk: the folder `adapter/` of a checkpoint and the small folder alone, both in peft's form.

    adapter_config.json        what peft reads: rank, alpha, layers
    adapter_model.safetensors  base_model.model.LAYER.lora_A.weight ..., and what was trained besides
    ftk_adapter.json           what only ftk knows: the sha256 of the weights that it was trained beside

The form is that of peft 0.21, https://github.com/huggingface/peft; folders that peft wrote lack the last file.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from torch import Tensor

from ftk.checkpoint import layout
from ftk.checkpoint.checking import check_files
from ftk.checkpoint.finite import refuse_non_finite
from ftk.checkpoint.index import open_safetensors, read_index, read_whole, tensor_bytes
from ftk.checkpoint.layout import ADAPTER, ADAPTER_CONFIG, BrokenCheckpoint
from ftk.checkpoint.load import read_config
from ftk.checkpoint.manifest import json_bytes
from ftk.checkpoint.weights import Weights, copy_rows
from ftk.config.build import as_mapping, build_options
from ftk.config.root import Chosen
from ftk.errors import UserError, shown
from ftk.files import put_in_place, read_json, reason, sync_tree, temporary_folder
from ftk.modules.adapters import LoRAConfig
from ftk.modules.adapters.adapt import Adapter, part_names
from ftk.modules.adapters.lora import LoRA
from ftk.name_patterns import examples, matches
from ftk.registry import ADAPTERS
from ftk.version import __version__

WEIGHTS = "adapter_model.safetensors"
FACTS = "ftk_adapter.json"
_PREFIX = "base_model.model."
_FORMAT = "ftk-adapter"

_HARMLESS = {
    *("auto_mapping", "base_model_name_or_path", "eva_config", "exclude_modules", "inference_mode", "layers_pattern"),
    *("layers_to_transform", "loftq_config", "lora_dropout", "megatron_core", "modules_to_save", "peft_version"),
    *("qalora_group_size", "revision", "runtime_config", "target_modules", "task_type"),
}
"""Keys of adapter_config.json that do not change what trained weights give; others are read, or must be empty."""

_INITIAL = (True, False, "gaussian", "eva", "orthogonal")
"""`init_lora_weights` that leave the base weights as they are; PiSSA, OLoRA and others change them."""


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


def adapter_section(config: Mapping[str, Any]) -> dict[str, Any]:
    """The adapter's name and options in a checkpoint's configuration; empty without one."""
    section = as_mapping(ADAPTER, config.get(ADAPTER))
    return {} if section.get("_name") == "none" else section


def refuse_adapted(folder: Path, what: str) -> None:
    """Raise a UserError if a checkpoint's model has an adapter: `what` needs plain weights."""
    if adapter_section(read_config(folder)):
        raise UserError(f"{folder}: has an adapter, and {what} needs plain weights; ftk-checkpoint merge {folder} DST")


# -- writing ------------------------------------------------------------------------------------------------------


class AdapterFiles:
    """The files of `adapter/`, made of the tensors of a checkpoint when these are written.

    Args:
        adapter: of the model. Only LoRA has files of its own.
    """

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self._base_sha256: str | None = None  # computed once: the base is frozen

    def __call__(self, folder: Path) -> dict[str, bytes]:
        """Name -> content.

        Args:
            folder: a checkpoint, of which the tensors are there.
        """
        if not isinstance(self.adapter, LoRA):
            return {}
        config = self.adapter.config
        index = read_index(folder / layout.MODEL)
        parts = part_names(index.tensors, self.adapter)
        also = {index.names[name] for name in index.names if any(matches(name, one) for one in config.train_also)}
        saved = {_owner(name) for name in also.difference(parts)}  # peft saves whole modules
        beside = [name for name in index.tensors if name not in parts and _owner(name) in saved]

        def read(name: str) -> Tensor:
            return read_whole(folder / layout.MODEL, index.tensors[name])

        if self._base_sha256 is None:
            base = index.tensors.keys() - {*parts, *beside}
            self._base_sha256 = base_sha256(base, read)
        ranks = {_owner(_owner(name)): index.tensors[name].shape[0] for name in parts if name.endswith("lora_A.weight")}
        tensors = {f"{_PREFIX}{name}": read(name) for name in (*parts, *beside)}
        facts = {"format": _FORMAT, "version": 1, "base_sha256": self._base_sha256, "ftk_version": __version__}
        return {
            ADAPTER_CONFIG: json_bytes(_peft_config(config, ranks, sorted(saved))),
            WEIGHTS: safetensors.torch.save(tensors, {"format": "pt"}),
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


def write_adapter(source: str | Path, output: str | Path, *, overwrite: bool = False) -> Path:
    """Write the adapter of a checkpoint alone.

    Args:
        source: a checkpoint, or a run's folder.
        output: folder to write.
        overwrite: replace an adapter of this name.

    Raises:
        UserError: the checkpoint has none; or `output` exists, and is no adapter or not to be replaced.
        BrokenCheckpoint: a file of it is damaged.
    """
    folder, output = layout.resolve_checkpoint(source), Path(output)
    files = check_files(folder, prefix=f"{ADAPTER}/")
    if f"{ADAPTER}/{ADAPTER_CONFIG}" not in files:
        raise UserError(f"{folder}: has no adapter (no {ADAPTER}/{ADAPTER_CONFIG})")
    if output.exists() or output.is_symlink():
        if not overwrite:
            raise UserError(f"{output}: exists; replace it with `overwrite` or choose another name")
        if output.is_symlink() or not layout.is_adapter(output):
            raise UserError(f"{output}: exists and is no adapter; it is not replaced")
    output.parent.mkdir(parents=True, exist_ok=True)
    with temporary_folder(output) as temporary:
        for name in (ADAPTER_CONFIG, WEIGHTS, FACTS):
            (temporary / name).write_bytes((folder / ADAPTER / name).read_bytes())
        sync_tree(temporary)
        put_in_place(temporary, output)
    return output


def _peft_config(config: LoRAConfig, ranks: Mapping[str, int], saved: list[str]) -> dict[str, Any]:
    """adapter_config.json for layers of these ranks, and modules that were trained besides."""
    found = {name: config.rank_and_alpha(config.value_for(name) or "") for name in ranks}
    alphas = {name: both[1] for name, both in found.items() if both is not None}
    return {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": None,
        "inference_mode": True,
        "r": config.lora_rank,
        "lora_alpha": _plain(config.lora_alpha),
        "lora_dropout": config.lora_dropout,
        "use_rslora": config.lora_scaling == "alpha_over_sqrt_rank",
        "use_dora": config.weight_decomposed,
        "target_modules": sorted(ranks),
        "rank_pattern": {name: rank for name, rank in ranks.items() if rank != config.lora_rank},
        "alpha_pattern": {name: _plain(alpha) for name, alpha in alphas.items() if alpha != config.lora_alpha},
        "modules_to_save": saved or None,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
    }


def _plain(number: float) -> float:
    return int(number) if number == int(number) else number


def _owner(name: str) -> str:
    """The module that has a parameter: "a.b.weight" -> "a.b"."""
    return name.rpartition(".")[0]


# -- reading ------------------------------------------------------------------------------------------------------


class OpenedAdapter(NamedTuple):
    """An adapter alone.

    Attributes:
        folder: where it lies.
        adapter: to be put on its model.
        tensors: its parts, and what was trained besides, by their names in the model.
        base_sha256: of the weights that it was trained beside; None if its folder does not say that.
        targets: names of the layers, or their ends, that all must have parts; empty where its folder lists none.
    """

    folder: Path
    adapter: Adapter
    tensors: dict[str, Tensor]
    base_sha256: str | None
    targets: tuple[str, ...]

    def beside(self, weights: Weights, base: Path) -> Weights:
        """The weights of a model with this adapter.

        Args:
            weights: of the model that it was trained beside, without it.
            base: their folder.

        Raises:
            UserError: they are not those that it was trained beside, or a layer lacks its parts.
        """
        own = self.tensors
        adapted = [layer for layer, _ in self.adapter.config.targets()]
        known = {_owner(name) for name in weights.names}
        for layer in adapted:
            if layer not in known:
                raise UserError(f"{self.folder}: has parts of {layer}, which {base} lacks; {examples(layer, known)}")
        for name, stored in weights.tensors.items():
            layer = _owner(name)
            if len(stored.shape) == 2 and layer not in adapted and any(_is_end(one, layer) for one in self.targets):
                raise UserError(f"{self.folder}: target_modules name {layer} of {base}, for which it has no lora_A")
        if self.base_sha256 is not None:
            found = base_sha256(weights.tensors.keys() - own.keys(), lambda name: _read_one(weights, name))
            if found != self.base_sha256:
                raise UserError(
                    f"{self.folder}: was trained beside other weights than those of {base} (their sha256 is "
                    f"{found[:12]}..., it was {self.base_sha256[:12]}...); give their folder as `base`"
                )

        def fill(targets: Mapping[str, Tensor]) -> None:
            weights.fill({name: target for name, target in targets.items() if name not in own})
            for name in targets.keys() & own.keys():
                copy_rows(targets[name], own[name])

        return Weights({**weights.tensors, **own}, {**weights.names, **{name: name for name in own}}, fill)


def read_adapter(path: str | Path) -> OpenedAdapter:
    """Read the folder of an adapter alone, ftk's or peft's.

    Whether its layers are there, and of the same shapes, is seen when it is put on its model.

    Raises:
        UserError: it is no such folder; is damaged; or holds what ftk does not have.
    """
    folder = Path(path)
    if not layout.is_adapter(folder):
        raise UserError(f"{folder}: is no adapter (no {ADAPTER_CONFIG}); `base` is for the folder of an adapter alone")
    config = _read_json(folder / ADAPTER_CONFIG)
    if not (folder / WEIGHTS).is_file() and (folder / "adapter_model.bin").exists():
        raise UserError(
            f"{folder / 'adapter_model.bin'}: is pickled, and opening it could run any program; save it in peft again, "
            f"which writes {WEIGHTS}"
        )
    with open_safetensors(folder / WEIGHTS) as file:
        stored = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  # it is no mapping
    foreign = [key for key in stored if not key.startswith(_PREFIX)]
    if foreign:
        raise UserError(f"{folder / WEIGHTS}: {foreign[0]!r:.200} does not begin with {_PREFIX}")
    tensors = {key.removeprefix(_PREFIX): tensor for key, tensor in stored.items()}
    refuse_non_finite(tensors, folder)
    facts = _read_json(folder / FACTS) if (folder / FACTS).exists() else {}
    sha256 = facts.get("base_sha256")
    if facts and (facts.get("format"), facts.get("version"), type(sha256)) != (_FORMAT, 1, str):
        raise BrokenCheckpoint(f"{folder / FACTS}: is not what ftk writes")
    adapter = LoRA(_lora_config(config, tensors, folder / ADAPTER_CONFIG))
    _check_parts(tensors, adapter, folder / WEIGHTS)
    listed = config.get("target_modules")
    some_only = config.get("exclude_modules") or config.get("layers_to_transform")
    targets = tuple(map(str, listed)) if isinstance(listed, list) and not some_only else ()
    return OpenedAdapter(folder, adapter, tensors, sha256, targets)


def _check_parts(tensors: Mapping[str, Tensor], adapter: LoRA, path: Path) -> None:
    """Refuse parts that are missing, that no layer has, or of shapes that do not belong together."""
    wanted = {}  # name -> all of its sizes but the first
    for layer, value in adapter.config.targets():
        wanted[f"{layer}.lora_A.weight"] = tuple(tensors[f"{layer}.lora_A.weight"].shape[1:])
        wanted[f"{layer}.lora_B.weight"] = (int(value.partition("/")[0]),)
        if adapter.config.weight_decomposed:
            wanted[f"{layer}.lora_magnitude_vector"] = ()
    for name in (*wanted, *part_names(tensors, adapter)):
        if name not in tensors or name not in wanted:
            raise UserError(f"{path}: {name} is {'missing' if name in wanted else 'no part of its layer'}")
        if tensors[name].shape[1:] != wanted[name] or not tensors[name].dim():
            raise UserError(f"{path}: {name} is {list(tensors[name].shape)}, which does not fit its rank")


def _lora_config(config: Mapping[str, Any], tensors: Mapping[str, Tensor], path: Path) -> LoRAConfig:
    """ftk's options for an adapter_config.json, with a target for each layer of the tensors."""
    if config.get("peft_type") != "LORA":
        raise UserError(f"{path}: peft_type is {shown(config.get('peft_type'))}; ftk opens LORA")
    read = {"peft_type", "r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "bias"}
    for name, value in config.items():
        empty = value in (None, False, "", "none") or value == {} or value == []
        if name == "init_lora_weights":
            empty = value in _INITIAL
        elif name == "bias":
            empty = value == "none"
        if name not in _HARMLESS | (read - {"bias"}) and not empty:
            raise UserError(f"{path}: {name!r:.80} is {shown(value)}, which ftk does not have")
    ranks, alphas = (config.get(name) or {} for name in ("rank_pattern", "alpha_pattern"))
    values = (config.get("r", 8), config.get("lora_alpha", 8), *_values(ranks, path), *_values(alphas, path))
    if any(type(value) not in (int, float) or not 0 < value < 1 << 31 for value in values):
        raise UserError(f"{path}: r, lora_alpha and the values of their patterns must be numbers above 0")
    targets = []
    for name, tensor in tensors.items():
        if not name.endswith(".lora_A.weight"):
            continue
        layer = _owner(_owner(name))
        rank, alpha = (
            _for_layer(ranks, layer, config.get("r", 8)),
            _for_layer(alphas, layer, config.get("lora_alpha", 8)),
        )
        if tensor.dim() != 2 or tensor.size(0) != rank:
            raise UserError(f"{path.parent / WEIGHTS}: {name} is {list(tensor.shape)}; {path.name} says rank {rank}")
        if re.search(r"[^\w.]", layer):
            raise UserError(f"{path.parent / WEIGHTS}: {layer!r:.200} is no name of a layer")
        targets.append(f"{layer}={tensor.size(0)}/{alpha}")
    if not targets:
        raise UserError(f"{path.parent / WEIGHTS}: has no lora_A of any layer")
    return LoRAConfig(
        adapter_targets=targets,
        lora_rank=int(config.get("r", 8)),
        lora_alpha=config.get("lora_alpha", 8),
        lora_scaling="alpha_over_sqrt_rank" if config.get("use_rslora") else "alpha_over_rank",
        weight_decomposed=bool(config.get("use_dora")),
    )


def _values(pattern: Any, path: Path) -> list[Any]:
    """The values of a rank_pattern or alpha_pattern, whose keys are names of layers or their ends."""
    if not isinstance(pattern, dict):
        raise UserError(f"{path}: {shown(pattern)} is no mapping from names of layers to numbers")
    for name in pattern:
        if re.search(r"[^\w.]", name):
            raise UserError(f"{path}: the pattern {name!r:.200} is a regular expression; ftk takes names of layers")
    return list(pattern.values())


def _for_layer(pattern: Mapping[str, Any], layer: str, usual: Any) -> Any:
    """The value of the first name in a pattern that is a layer's, or an end of it, as peft has it."""
    return next((value for name, value in pattern.items() if _is_end(name, layer)), usual)


def _is_end(name: str, layer: str) -> bool:
    return f".{layer}".endswith(f".{name}")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = read_json(path)
    except (OSError, ValueError) as error:
        raise BrokenCheckpoint(f"{path}: {reason(error)}") from error
    if not isinstance(content, dict):
        raise BrokenCheckpoint(f"{path}: is not an object")
    return content


def _read_one(weights: Weights, name: str) -> Tensor:
    stored = weights.tensors[name]
    target = torch.empty(tuple(stored.shape), dtype=stored.dtype)
    weights.fill({name: target})
    return target
