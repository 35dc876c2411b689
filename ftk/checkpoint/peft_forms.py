"""The adapters that peft knows, too: what adapter_config.json says of them, and how their tensors lie in its files."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from ftk.errors import UserError, shown
from ftk.modules.adapters import INPUTS, IA3Config, LoRAConfig, PrefixConfig
from ftk.modules.adapters.adapt import Adapter, part_names
from ftk.modules.adapters.ia3 import IA3
from ftk.modules.adapters.lora import LoRA
from ftk.modules.adapters.prefix import PrefixTuning

WEIGHTS = "adapter_model.safetensors"
PROMPT = "prompt_embeddings"
"""The one tensor of a prefix, which has no name of a module."""

Tensors = dict[str, Tensor]

_HARMLESS = {
    *("auto_mapping", "base_model_name_or_path", "ensure_weight_tying", "eva_config", "exclude_modules"),
    *("fan_in_fan_out", "inference_mode"),
    *("layers_pattern", "layers_to_transform", "loftq_config", "megatron_core", "modules_to_save"),
    *("peft_type", "peft_version", "qalora_group_size", "revision", "runtime_config", "target_modules", "task_type"),
}
"""Keys of adapter_config.json that do not change what trained weights give; others are read, or must be empty."""

_INITIAL = (True, False, "gaussian", "eva", "orthogonal")
"""`init_lora_weights` that leave the base weights as they are; PiSSA, OLoRA and others change them."""


class Form(Protocol):
    """One kind of adapter in peft's form.

    Attributes:
        KINDS: its names as `peft_type`.
        adapter: the class of ftk's.
    """

    KINDS: ClassVar[tuple[str, ...]]
    adapter: ClassVar[type[Adapter]]

    @staticmethod
    def written(config: Any, parts: Tensors, model_config: Any) -> tuple[dict[str, Any], Tensors] | None:
        """What adapter_config.json says, and the tensors of the file, without peft's prefix; None: there is no form,
        since the model's options do not say what it needs, as those of plugins.

        Args:
            config: ftk's options.
            parts: of the adapter, by their names in the model.
            model_config: of the model.
        """

    @staticmethod
    def read(config: dict[str, Any], tensors: Tensors, path: Path) -> tuple[Adapter, Tensors]:
        """The adapter, and its tensors by their names in the model.

        Args:
            config: adapter_config.json.
            tensors: of the file, without peft's prefix.
            path: of adapter_config.json, for messages.

        Raises:
            UserError: they do not belong together, or hold what ftk does not have.
        """


class LoRAForm:
    KINDS: ClassVar[tuple[str, ...]] = ("LORA",)
    adapter: ClassVar[type[Adapter]] = LoRA

    @staticmethod
    def written(config: LoRAConfig, parts: Tensors, model_config: Any) -> tuple[dict[str, Any], Tensors]:
        ranks = {owner(owner(name)): len(tensor) for name, tensor in parts.items() if name.endswith("lora_A.weight")}
        found = {name: config.rank_and_alpha(config.value_for(name) or "") for name in ranks}
        alphas = {name: both[1] for name, both in found.items() if both is not None}
        said = {
            "peft_type": "LORA",
            "r": config.lora_rank,
            "lora_alpha": plain(config.lora_alpha),
            "lora_dropout": config.lora_dropout,
            "use_rslora": config.lora_scaling == "alpha_over_sqrt_rank",
            "use_dora": config.weight_decomposed,
            "target_modules": sorted(ranks),
            "rank_pattern": {name: rank for name, rank in ranks.items() if rank != config.lora_rank},
            "alpha_pattern": {name: plain(alpha) for name, alpha in alphas.items() if alpha != config.lora_alpha},
            "bias": "none",
            "fan_in_fan_out": False,
            "init_lora_weights": True,
        }
        return said, parts

    @staticmethod
    def read(config: dict[str, Any], tensors: Tensors, path: Path) -> tuple[Adapter, Tensors]:
        adapter = LoRA(_lora_config(config, tensors, path))
        _check_parts(tensors, adapter, path)
        return adapter, tensors


class IA3Form:
    KINDS: ClassVar[tuple[str, ...]] = ("IA3",)
    adapter: ClassVar[type[Adapter]] = IA3

    @staticmethod
    def written(config: IA3Config, parts: Tensors, model_config: Any) -> tuple[dict[str, Any], Tensors]:
        inputs = {owner(name) for name in parts if config.value_for(owner(name)) == INPUTS}
        said = {
            "peft_type": "IA3",
            "target_modules": sorted(map(owner, parts)),
            "feedforward_modules": sorted(inputs),
            "fan_in_fan_out": False,
            "init_ia3_weights": True,
        }
        return said, {
            name: vector[None] if owner(name) in inputs else vector[:, None] for name, vector in parts.items()
        }

    @staticmethod
    def read(config: dict[str, Any], tensors: Tensors, path: Path) -> tuple[Adapter, Tensors]:
        refuse_unknown(config, ("feedforward_modules", "init_ia3_weights"), path)
        targets, found = [], {}
        for name, tensor in tensors.items():
            if not name.endswith(".ia3_l"):
                found[name] = tensor
                continue
            layer = name.removesuffix(".ia3_l")
            if tensor.dim() != 2 or 1 not in tensor.shape or _is_odd(layer):
                raise UserError(
                    f"{path.parent / WEIGHTS}: {name!r:.200} is {list(tensor.shape)}; a factor per input is [1, I]"
                )
            targets.append(f"{layer}={INPUTS}" if len(tensor) == 1 else layer)
            found[name] = tensor.flatten()
        if not targets:
            raise UserError(f"{path.parent / WEIGHTS}: has no ia3_l of any layer")
        return IA3(IA3Config(adapter_targets=targets)), found


class PrefixForm:
    """peft's has a table [n, 2 L K D] for the layers of one stack, behind which positions go on; others are ftk's."""

    KINDS: ClassVar[tuple[str, ...]] = ("PREFIX_TUNING", "FTK_PREFIX")
    adapter: ClassVar[type[Adapter]] = PrefixTuning

    @staticmethod
    def written(config: PrefixConfig, parts: Tensors, model_config: Any) -> tuple[dict[str, Any], Tensors] | None:
        if not (hasattr(model_config, "kv_heads") and hasattr(model_config, "head_size")):
            return None
        layers = sorted({name.partition(".prefix.")[0] for name in parts}, key=_by_numbers)
        heads, size = model_config.kv_heads, model_config.head_size
        rows = torch.stack([_rows({n: parts[f"{layer}.prefix.{n}"] for n in _own(parts, layer)}) for layer in layers])
        table = rows.unflatten(-1, (heads, 2, size)).permute(1, 0, 3, 2, 4)  # [n, L, 2, K, D]
        is_pefts = config.prefix_positions and layers == _stack(len(layers))
        said = {
            "peft_type": PrefixForm.KINDS[0 if is_pefts else 1],
            "task_type": "CAUSAL_LM" if is_pefts else None,
            "num_virtual_tokens": config.num_virtual_tokens,
            "num_layers": len(layers),
            "num_attention_heads": heads,
            "token_dim": heads * size,
            "num_transformer_submodules": 1,
            "prefix_projection": False,
            "encoder_hidden_size": heads * size,
            **({} if is_pefts else {"target_modules": layers}),
        }
        return said, {PROMPT: table.flatten(1).contiguous()}

    @staticmethod
    def read(config: dict[str, Any], tensors: Tensors, path: Path) -> tuple[Adapter, Tensors]:
        known = ("prefix_projection", "encoder_hidden_size", "init_weights", "tokenizer_name_or_path")
        refuse_unknown(config, (*_COUNTS, *known), path)
        counts = [config.get(name) for name in _COUNTS]
        num_tokens, num_layers, heads, width, stacks = counts
        if any(type(count) is not int or count < 1 for count in counts) or width % heads or stacks != 1:  # type: ignore[operator]
            raise UserError(f"{path}: {', '.join(_COUNTS)} are {shown(counts)}, which do not fit one stack of layers")
        table = tensors.get(PROMPT, torch.empty(0))
        if table.shape != (num_tokens, 2 * num_layers * width):  # type: ignore[operator]
            said = f"{path.name} says [{num_tokens}, {2 * num_layers * width}]"  # type: ignore[operator]
            raise UserError(f"{path.parent / WEIGHTS}: {PROMPT} is {list(table.shape)}; {said}")
        is_pefts = config["peft_type"] == PrefixForm.KINDS[0]
        layers = _stack(num_layers) if is_pefts else config.get("target_modules")  # type: ignore[arg-type]
        if not isinstance(layers, list) or len(layers) != num_layers or any(map(_is_odd, layers)):
            raise UserError(f"{path}: target_modules is {shown(layers)}; it must name {num_layers} layers")
        rows = table.unflatten(1, (num_layers, 2, heads, -1)).permute(1, 0, 3, 2, 4).flatten(2)  # [L, n, K 2 D]
        found = {name: tensor for name, tensor in tensors.items() if name != PROMPT}
        found |= {f"{layer}.prefix.embedding.weight": row for layer, row in zip(layers, rows.contiguous(), strict=True)}
        made: dict[str, Any] = {"prefix_positions": True} if is_pefts else {"adapter_targets": layers}
        return PrefixTuning(PrefixConfig(num_virtual_tokens=num_tokens, **made)), found  # type: ignore[arg-type]


FORMS: tuple[type[Form], ...] = (LoRAForm, IA3Form, PrefixForm)

_COUNTS = ("num_virtual_tokens", "num_layers", "num_attention_heads", "token_dim", "num_transformer_submodules")


def form_of(adapter: Adapter) -> type[Form] | None:
    """That of an adapter; None: it has none, as those of plugins."""
    return next((form for form in FORMS if isinstance(adapter, form.adapter)), None)


def form_named(kind: Any, path: Path) -> type[Form]:
    """That of a `peft_type`.

    Raises:
        UserError: there is none.
    """
    found = next((form for form in FORMS if kind in form.KINDS), None)
    if found is None:
        known = ", ".join(form.KINDS[0] for form in FORMS)
        raise UserError(f"{path}: peft_type is {shown(kind)}; ftk opens {known}")
    return found


def refuse_unknown(config: Mapping[str, Any], read: tuple[str, ...], path: Path) -> None:
    """Raise a UserError for a key of adapter_config.json that is not read, and not empty."""
    for name, value in config.items():
        empty = value in (None, False, "", "none") or value == {} or value == []
        if name not in _HARMLESS and name not in read and not empty:
            raise UserError(f"{path}: {name!r:.80} is {shown(value)}, which ftk does not have")


def owner(name: str) -> str:
    """The module that has a parameter: "a.b.weight" -> "a.b"."""
    return name.rpartition(".")[0]


def is_within(name: str, modules: Iterable[str]) -> bool:
    """Whether a tensor or module belongs to one of these modules."""
    return any(name.startswith(f"{module}.") for module in modules)


def outermost(modules: Collection[str]) -> list[str]:
    """Modules without those that lie in another one of them, which peft saves with that; sorted."""
    return sorted(module for module in modules if not is_within(module, modules))


def plain(number: float) -> float:
    """A whole number as an int."""
    return int(number) if number == int(number) else number


def is_end(name: str, layer: str) -> bool:
    """Whether a name of peft's stands for a layer: it is the layer's, or an end of it."""
    return f".{layer}".endswith(f".{name}")


def for_layer(pattern: Mapping[str, Any], layer: str, usual: Any) -> Any:
    """The value of the first name in a pattern that is a layer's, or an end of it, as peft has it."""
    return next((value for name, value in pattern.items() if is_end(name, layer)), usual)


def lora_numbers(config: Mapping[str, Any], path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """rank_pattern and alpha_pattern of a checked adapter_config.json.

    Raises:
        UserError: a rank or alpha is no number above 0, or a pattern no name.
    """
    ranks, alphas = (config.get(name) or {} for name in ("rank_pattern", "alpha_pattern"))
    values = (config.get("r", 8), config.get("lora_alpha", 8), *_values(ranks, path), *_values(alphas, path))
    if any(type(value) not in (int, float) or not 0 < value < 1 << 31 for value in values):
        raise UserError(f"{path}: r, lora_alpha and the values of their patterns must be numbers above 0")
    return ranks, alphas


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
            raise UserError(
                f"{path.parent / WEIGHTS}: {name} is {'missing' if name in wanted else 'no part of its layer'}"
            )
        if tensors[name].shape[1:] != wanted[name] or not tensors[name].dim():
            raise UserError(
                f"{path.parent / WEIGHTS}: {name} is {list(tensors[name].shape)}, which does not fit its rank"
            )


def _lora_config(config: Mapping[str, Any], tensors: Mapping[str, Tensor], path: Path) -> LoRAConfig:
    """ftk's options for an adapter_config.json, with a target for each layer of the tensors."""
    for name, allowed in (("init_lora_weights", _INITIAL), ("bias", ("none", "all", "lora_only"))):
        if name in config and config[name] not in allowed:
            raise UserError(f"{path}: {name!r} is {shown(config[name])}, which ftk does not have")
    numbers = ("r", "lora_alpha", "rank_pattern", "alpha_pattern")
    refuse_unknown(config, (*numbers, "use_rslora", "use_dora", "init_lora_weights", "lora_dropout", "bias"), path)
    ranks, alphas = lora_numbers(config, path)
    dropout = config.get("lora_dropout", 0.0)
    if type(dropout) not in (int, float) or not 0.0 <= dropout < 1.0:
        raise UserError(f"{path}: lora_dropout is {shown(dropout)}; it must be a number in [0, 1)")
    targets = []
    for name, tensor in tensors.items():
        if not name.endswith(".lora_A.weight"):
            continue
        layer = owner(owner(name))
        rank = for_layer(ranks, layer, config.get("r", 8))
        alpha = for_layer(alphas, layer, config.get("lora_alpha", 8))
        if tensor.dim() != 2 or tensor.size(0) != rank:
            raise UserError(f"{path.parent / WEIGHTS}: {name} is {list(tensor.shape)}; {path.name} says rank {rank}")
        if _is_odd(layer):
            raise UserError(f"{path.parent / WEIGHTS}: {layer!r:.200} is no name of a layer")
        targets.append(f"{layer}={tensor.size(0)}/{alpha}")
    if not targets:
        raise UserError(f"{path.parent / WEIGHTS}: has no lora_A of any layer")
    return LoRAConfig(
        adapter_targets=targets,
        lora_rank=int(config.get("r", 8)),
        lora_alpha=config.get("lora_alpha", 8),
        lora_scaling="alpha_over_sqrt_rank" if config.get("use_rslora") else "alpha_over_rank",
        lora_dropout=float(dropout),
        weight_decomposed=bool(config.get("use_dora")),
    )


def _values(pattern: Any, path: Path) -> list[Any]:
    """The values of a rank_pattern or alpha_pattern, whose keys are names of layers or their ends."""
    if not isinstance(pattern, dict):
        raise UserError(f"{path}: {shown(pattern)} is no mapping from names of layers to numbers")
    for name in pattern:
        if _is_odd(name):
            raise UserError(f"{path}: the pattern {name!r:.200} is a regular expression; ftk takes names of layers")
    return list(pattern.values())


def _is_odd(name: Any) -> bool:
    """Whether this is no name of a module."""
    return not isinstance(name, str) or re.search(r"[^\w.]", name) is not None


def _stack(num_layers: int) -> list[str]:
    """The names of the attention layers of a model of one stack."""
    return [f"layers.{number}.attention" for number in range(num_layers)]


def _by_numbers(name: str) -> list[tuple[int, str]]:
    """Sorts names of layers by their numbers."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in name.split(".")]


def _own(parts: Tensors, layer: str) -> list[str]:
    start = f"{layer}.prefix."
    return [name.removeprefix(start) for name in parts if name.startswith(start)]


def _rows(own: Tensors) -> Tensor:
    """What a layer's `Prefix` makes of its parameters, [n, K 2 D]."""
    rows = own["embedding.weight"]
    if "into.weight" not in own:
        return rows
    return F.linear(F.linear(rows, own["into.weight"], own["into.bias"]).tanh(), own["back.weight"], own["back.bias"])
