"""Adapters of peft by the names of Hugging Face's models: other layers, joined or apart, and rows in another order.

The names and layouts are those of a family's converter (`ftk.models.conversion`): as (W + B A) in their order of rows
is W and B in that order, B is moved as W is, and A is that of every layer which holds rows of ours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ftk.checkpoint.peft_forms import PROMPT, PrefixForm, for_layer, lora_numbers, owner, plain
from ftk.errors import UserError
from ftk.models.conversion import LAYER_NUMBER, Converter, LazyTensors, Rename, renamed
from ftk.registry import HF_MODELS

if TYPE_CHECKING:
    from ftk.checkpoint.weights import Weights

Tensors = dict[str, Tensor]

_A, _B, _MAGNITUDE, _FACTORS = "lora_A.weight", "lora_B.weight", "lora_magnitude_vector", "ia3_l"
_LISTS, _PATTERNS = ("target_modules", "feedforward_modules"), ("rank_pattern", "alpha_pattern")


def huggingface_names(
    config: dict[str, Any], tensors: Tensors, model: str, model_config: Any, shapes: Mapping[str, Sequence[int]]
) -> tuple[dict[str, Any], Tensors]:
    """adapter_config.json and tensors for the same model in Hugging Face's form.

    Args:
        config, tensors: with the names of ftk's model, without peft's prefix.
        model: its registered name.
        model_config: its options.
        shapes: of its parameters.

    Raises:
        UserError: the family has no such form; a layer is none of its own there, or its inputs are in another order;
            a prefix that peft does not have.
    """
    if model not in HF_MODELS:
        raise UserError(f"`names` huggingface: the model {model} has no form of Hugging Face's")
    if PROMPT in tensors:
        if config["peft_type"] != PrefixForm.KINDS[0]:
            raise UserError(
                "`names` huggingface: peft has prefixes only of all layers of one stack, behind which positions go on; "
                "train with `prefix_positions`"
            )
        return config, tensors  # it has no names
    converter: Converter = HF_MODELS.get(model).target()
    layers, rest = _by_layer(tensors)
    found: Tensors = renamed(LazyTensors.of(rest), converter.renames, model_config, back=True).all()
    theirs_of: dict[str, list[str]] = {}
    transposed = False
    for layer, parts in layers.items():
        rename, theirs = _rename_of(layer, converter.renames, back=True)
        if rename is None or len(rename.ours) > 1:
            raise UserError(f"`names` huggingface: {layer} is no layer of its own there; leave it out of the adapter")
        theirs_of[layer] = theirs
        size = len(parts[_B]) if _B in parts else shapes[f"{layer}.weight"][0]
        transposed |= _is_transposed(rename, size, model_config)
        for name, tensor in parts.items():
            is_column = _is_column(name, tensor)
            if is_column and not _keeps_columns(rename, size, tensor.size(1), model_config):
                raise UserError(f"`names` huggingface: the inputs of {layer} are in another order there; leave it out")
            own = [tensor] * len(theirs) if is_column else _split(rename, tensor, model_config)
            found |= {f"{each}.{name}": one.clone() for each, one in zip(theirs, own, strict=True)}
    changed = {
        **config,
        "fan_in_fan_out": transposed,
        "modules_to_save": sorted({*map(owner, _unlayered(found))}) or None,
    }
    for key in _LISTS:
        if key in config:
            changed[key] = sorted(each for layer in config[key] for each in theirs_of[layer])
    for key in _PATTERNS:
        if key in config:
            changed[key] = {each: value for layer, value in config[key].items() for each in theirs_of[layer]}
    return changed, found


def own_names(
    config: dict[str, Any], tensors: Tensors, model: str, model_config: Any, weights: Weights, path: Path
) -> tuple[dict[str, Any], Tensors]:
    """adapter_config.json and tensors with the names of ftk's model; as they are if they have these already.

    Layers that are apart there and one here are joined: their A stand below each other, each with the rows of its B.

    Args:
        config, tensors: without peft's prefix.
        model: registered name of the model.
        model_config: its options.
        weights: of the model.
        path: of adapter_config.json, for messages.

    Raises:
        UserError: parts do not fit each other or the model.
    """
    if model not in HF_MODELS or config.get("peft_type") not in ("LORA", "IA3"):
        return config, tensors
    converter: Converter = HF_MODELS.get(model).target()
    layers, rest = _by_layer(tensors)
    groups: dict[str, tuple[Rename, list[str]]] = {}
    for layer in layers:
        rename, ours = _rename_of(layer, converter.renames)
        if f"{layer}.weight" in weights.names or rename is None or len(ours) > 1:
            return config, tensors
        groups.setdefault(ours[0], (rename, _rename_of(ours[0], [rename], back=True)[1]))
    found: Tensors = renamed(LazyTensors.of(rest), converter.renames, model_config).all()
    changed, ranks, alphas = dict(config), {}, {}
    for layer, (rename, theirs) in groups.items():
        if f"{layer}.weight" not in weights.tensors:
            raise UserError(f"{path.parent}: has parts of {theirs[0]}, which the model lacks")
        rows = torch.zeros(weights.tensors[f"{layer}.weight"].shape[0], 1)
        sizes = [len(one) for one in _split(rename, rows, model_config)]
        try:
            parts = [layers.get(each, {}) for each in theirs]
            made, rank, alpha = _joined(config, theirs, parts, sizes, path)
            for name, each in made.items():
                is_column = _is_column(name, each[0])
                found[f"{layer}.{name}"] = each[0] if is_column else _join(rename, each, model_config)
        except (RuntimeError, ValueError) as error:
            why = str(error).splitlines()[0]
            raise UserError(f"{path.parent}: the parts of {theirs[0]} do not fit it ({why:.200})") from error
        ranks[layer], alphas[layer] = rank, alpha
    if config["peft_type"] == "LORA":
        changed |= {"rank_pattern": ranks, "alpha_pattern": alphas}
    return {**changed, "target_modules": [*groups]}, found


def _joined(
    config: Mapping[str, Any], names: Sequence[str], parts: Sequence[Tensors], sizes: Sequence[int], path: Path
) -> tuple[dict[str, list[Tensor]], int, float]:
    """The parts of layers that are one here: name -> one tensor for each, or one for all; rank and alpha.

    Args:
        config: adapter_config.json.
        names: of the layers.
        parts: of each, by their names in it; empty where it has none.
        sizes: outputs of each.
        path: of adapter_config.json, for messages.
    """
    if any(_FACTORS in one for one in parts):
        factors = [one.get(_FACTORS, torch.ones(size, 1)) for one, size in zip(parts, sizes, strict=True)]
        if _is_column(_FACTORS, factors[0]) and not all(torch.equal(factors[0], one) for one in factors):
            raise UserError(
                f"{path.parent}: inputs of {', '.join(names)} are scaled apart, which are one in ftk's model"
            )
        return {_FACTORS: factors}, 0, 0.0
    ranks, alphas = lora_numbers(config, path)
    there = [number for number, one in enumerate(parts) if one]
    for number in there:
        for name in (_A, _B):
            if name not in parts[number]:
                raise UserError(f"{path.parent}: {names[number]}.{name} is missing")
    power = 0.5 if config.get("use_rslora") else 1.0
    scales = {
        number: for_layer(alphas, names[number], config.get("lora_alpha", 8))
        / for_layer(ranks, names[number], config.get("r", 8)) ** power
        for number in there
    }
    first = there[0]
    inputs = [parts[number][_A] for number in there]
    is_one = len(there) == len(parts) and all(torch.equal(inputs[0], one) for one in inputs)
    a = inputs[0] if is_one else torch.cat(inputs)
    outputs = []
    start = 0
    for number, size in enumerate(sizes):
        b = torch.zeros(size, len(a))
        if number in there:
            own = parts[number][_B] * (scales[number] / scales[first])
            place = slice(None) if is_one else slice(start, start + own.size(1))
            b[:, place] = own
            start += own.size(1)
        outputs.append(b)
    made = {_A: [a], _B: outputs}
    magnitudes = [one[_MAGNITUDE] for one in parts if _MAGNITUDE in one]
    if magnitudes and len(magnitudes) < len(parts):
        raise UserError(f"{path.parent}: DoRA needs all of {', '.join(names)}, which are one layer in ftk's model")
    if magnitudes:
        made[_MAGNITUDE] = magnitudes
    return made, len(a), plain(scales[first] * math.pow(len(a), power))


def _by_layer(tensors: Tensors) -> tuple[dict[str, Tensors], Tensors]:
    """Parts by layer and their name in it, and what was trained besides."""
    layers: dict[str, Tensors] = {}
    rest = _unlayered(tensors)
    for name, tensor in tensors.items():
        if name not in rest:
            part = next(part for part in (_A, _B, _MAGNITUDE, _FACTORS) if name.endswith(f".{part}"))
            layers.setdefault(name.removesuffix(f".{part}"), {})[part] = tensor
    return layers, rest


def _unlayered(tensors: Tensors) -> Tensors:
    ends = tuple(f".{part}" for part in (_A, _B, _MAGNITUDE, _FACTORS))
    return {name: tensor for name, tensor in tensors.items() if not name.endswith(ends)}


def _rename_of(layer: str, renames: Sequence[Rename], *, back: bool = False) -> tuple[Rename | None, list[str]]:
    """The rename of a layer's weight, and the layers on its other side; `back`: the layer is ours."""
    match = LAYER_NUMBER.search(name := f"{layer}.weight")
    pattern = LAYER_NUMBER.sub("*", name, count=1)
    for rename in renames:
        here, there = (rename.ours, rename.theirs) if back else (rename.theirs, rename.ours)
        if pattern in here:
            return rename, [owner(each).replace("*", match[0] if match else "*") for each in there]
    return None, []


def _is_column(name: str, tensor: Tensor) -> bool:
    """Whether a part goes with a layer's inputs, [..., I], and not with its outputs."""
    return name == _A or (name == _FACTORS and len(tensor) == 1)


def _is_transposed(rename: Rename, size: int, config: Any) -> bool:
    """Whether they keep such a matrix as [in, out]; size: its outputs."""
    return len(rename.layout.split([torch.zeros(size, 1)], config)[0]) == 1


def _split(rename: Rename, rows: Tensor, config: Any) -> list[Tensor]:
    """Rows of ours, [O, ...], as rows of each of theirs."""
    flat = rows.flatten(1) if rows.dim() > 1 else rows[:, None]
    back = _is_transposed(rename, len(flat), config)
    found = [one.t() if back else one for one in rename.layout.split([flat], config)]
    return [one.contiguous() if rows.dim() > 1 else one.flatten() for one in found]


def _join(rename: Rename, rows: Sequence[Tensor], config: Any) -> Tensor:
    """The inverse of `_split`."""
    flat = [one if one.dim() > 1 else one[:, None] for one in rows]
    back = _is_transposed(rename, sum(map(len, flat)), config)
    (found,) = rename.layout.join([one.t() if back else one for one in flat], config)
    return found.contiguous() if rows[0].dim() > 1 else found.flatten()


def _keeps_columns(rename: Rename, size: int, count: int, config: Any) -> bool:
    """Whether the inputs of a matrix of this shape are in the same order there; else A would have to be moved, too."""
    columns = torch.arange(count).expand(size, -1)
    back = _is_transposed(rename, size, config)
    found = (one.t() if back else one for one in rename.layout.split([columns], config))
    return all(torch.equal(one, columns[: len(one)]) for one in found)
