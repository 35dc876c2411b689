"""Adapters of peft by the names of Hugging Face's models: other layers, joined or apart, and rows in another order.

The names and layouts are those of a family's converter (`ftk.models.renames`): as (W + B A) in their order of rows
is W and B in that order, B is moved as W is. Layers that are one in the other model are joined: their A stand below
each other, each with the rows of its B. One that is several there gives its A to each.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ftk.checkpoint.adapted_model import AdaptedModel, Link, link_of
from ftk.checkpoint.peft_forms import (
    PROMPT,
    WEIGHTS,
    PrefixForm,
    for_layer,
    is_end,
    lora_numbers,
    outermost,
    owner,
    plain,
)
from ftk.checkpoint.peft_tied import with_copies, without_copies
from ftk.errors import UserError, naming_place, shown
from ftk.models.renames import LAYER_NUMBER, LazyTensors, Rename, renamed

Tensors = dict[str, Tensor]

_A, _B, _MAGNITUDE, _FACTORS = "lora_A.weight", "lora_B.weight", "lora_magnitude_vector", "ia3_l"


def huggingface_names(
    config: dict[str, Any], tensors: Tensors, base: AdaptedModel, path: Path
) -> tuple[dict[str, Any], Tensors]:
    """adapter_config.json and tensors for the same model in Hugging Face's form.

    Args:
        config, tensors: with the names of ftk's model, without peft's prefix.
        base: the model.
        path: of adapter_config.json, for messages.

    Raises:
        UserError: the family has no such form; a layer is none of its own there, or its inputs are in another order;
            a prefix that peft does not have.
    """
    renames = base.theirs()
    if not renames:
        raise UserError(f"`names` huggingface: the model {base.name} has no form of Hugging Face's")
    if PROMPT in tensors:
        if config["peft_type"] != PrefixForm.KINDS[0]:
            raise UserError(
                "`names` huggingface: peft has prefixes only of all layers of one stack, after which positions go on; "
                "train with `prefix_positions`"
            )
        return config, tensors  # it has no names
    return _moved(config, tensors, base, renames, path, back=True)


def own_names(
    config: dict[str, Any], tensors: Tensors, base: AdaptedModel, path: Path
) -> tuple[dict[str, Any], Tensors]:
    """adapter_config.json and tensors with the names of ftk's model; as they are if they have these already.

    Args:
        config, tensors: without peft's prefix.
        base: the model.
        path: of adapter_config.json, for messages.

    Raises:
        UserError: parts do not fit each other or the model, or a layer or module that config names lacks its tensors.
    """
    shapes, (layers, rest), renames = base.shapes(), by_layer(tensors), base.theirs()
    patterns = {pattern for rename in renames for pattern in rename.theirs}
    if all(f"{layer}.weight" in shapes for layer in layers) or all(_pattern(layer) not in patterns for layer in layers):
        _refuse_missing(config, layers, rest, shapes, path)
        return config, tensors
    named_theirs = [layer for layer in layers if _pattern(layer) in patterns]
    if named_ours := [layer for layer in layers if layer not in named_theirs and f"{layer}.weight" in shapes]:
        raise UserError(
            f"{path.parent}: its layers have names of two kinds, ftk's as {named_ours[0]} and Hugging Face's as "
            f"{named_theirs[0]}; save it again with one of them"
        )
    links = {name: link_of(name, renames, shapes, back=True) for name in shapes}
    theirs = {target: shapes[name] for name, link in links.items() if link is not None for target in link.targets}
    _refuse_missing(config, layers, rest, theirs, path)
    return _moved(config, tensors, base, renames, path, back=False)


def _refuse_missing(
    config: Mapping[str, Any],
    layers: Mapping[str, Any],
    rest: Mapping[str, Any],
    shapes: Mapping[str, Sequence[int]],
    path: Path,
) -> None:
    """Refuse a layer among the `target_modules` without parts, and a parameter of `modules_to_save` without a tensor.

    Args:
        config: adapter_config.json.
        layers: that have parts.
        rest: names of the other tensors.
        shapes: of all parameters of the model, by the names that the folder has for them.
        path: of adapter_config.json.
    """
    listed, saved, bias = config.get("target_modules"), config.get("modules_to_save") or (), config.get("bias", "none")
    trained = [name for name in shapes if _is_bias(name) and (bias != "lora_only" or owner(name) in layers)]
    if bias != "none" and trained and not any(map(_is_bias, rest)):
        raise UserError(f"{path}: bias is {shown(bias)}, but {WEIGHTS} has none")
    if config.get("exclude_modules") or config.get("layers_to_transform"):
        listed = []
    is_named = _names(listed, path)
    for name, shape in shapes.items():
        layer = owner(name)
        if len(shape) == 2 and layer not in layers and is_named(layer):
            raise UserError(f"{path.parent}: target_modules name {layer} of the model, for which it has no parts")
        if name not in rest and any(f".{module}." in f".{name}" for module in saved):
            raise UserError(f"{path.parent}: modules_to_save name {layer} of the model, but {name} is missing")


def _names(listed: Any, path: Path) -> Callable[[str], bool]:
    """Whether `target_modules` names a layer: a list of ends of names, or a regular expression for whole names."""
    if isinstance(listed, list):
        return lambda layer: any(is_end(str(end), layer) for end in listed)
    if not isinstance(listed, str) or re.search(r"\)[*+{]", listed):  # a repeated group may take forever
        return lambda layer: False
    try:
        pattern = re.compile(listed)
    except (re.error, RecursionError, OverflowError) as error:
        raise UserError(f"{path}: target_modules is {shown(listed)}, no regular expression ({error})") from None
    return lambda layer: pattern.fullmatch(layer) is not None


def _moved(
    config: dict[str, Any], tensors: Tensors, base: AdaptedModel, renames: Sequence[Rename], path: Path, *, back: bool
) -> tuple[dict[str, Any], Tensors]:
    """adapter_config.json and tensors for the other model; `back`: they are ours, and theirs are made."""
    layers, rest = by_layer(tensors)
    shapes, place = base.shapes(), "`names` huggingface" if back else str(path.parent)
    with naming_place(place):
        besides = rest if back else without_copies(rest, base, config)
        whole = _completed(besides, base, renames, back=back)
        found: Tensors = renamed(LazyTensors.of(whole), renames, base.config, back=back).all()
        if back:
            found = with_copies(found, base)
    saved = {*map(owner, found)}
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    done: set[str] = set()
    columns, transposed = set(), False
    for layer in layers:
        if layer in done:
            continue
        link = link_of(f"{layer}.weight", renames, shapes, back=back)
        if link is None and back:
            raise UserError(f"{place}: {layer} is no layer of its own there; leave it out of the adapter")
        if link is None:
            raise UserError(f"{place}: has parts of {layer}, which the model lacks")
        sources, targets = ([owner(name) for name in side] for side in link[:2])
        sizes = [shapes[name][0] for name in (link.sources if back else link.targets)]
        if not back:
            sizes = [len(rows) for rows in link.reversed().moved([torch.zeros(size, 1) for size in sizes], base.config)]
        try:
            parts = [layers.get(source, {}) for source in sources]
            made, rank, alpha = _joined(config, link, parts, sizes, base, path)
            for name, joined in made.items():
                is_column = _is_column(name, joined[0])
                if is_column and not link.keeps_columns(sizes, joined[0].size(1), base.config):
                    raise UserError(f"{place}: the inputs of {layer} are in another order in the other model")
                moved = joined * len(targets) if is_column else link.moved(joined, base.config)
                found |= {f"{target}.{name}": tensor.clone() for target, tensor in zip(targets, moved, strict=True)}
                columns |= {*targets} if is_column else set()
        except (RuntimeError, ValueError) as error:
            why = str(error).splitlines()[0]
            raise UserError(f"{place}: the parts of {layer} do not fit it ({why:.200})") from error
        transposed |= back and link.is_transposed(sum(sizes), base.config)
        ranks |= dict.fromkeys(targets, rank)
        alphas |= dict.fromkeys(targets, alpha)
        done |= {*sources}
    changed = {**config, "fan_in_fan_out": transposed, "target_modules": [*ranks]}
    changed["modules_to_save"] = outermost(saved.difference(ranks)) or None
    if config["peft_type"] == "LORA":
        changed["rank_pattern"] = {name: rank for name, rank in ranks.items() if rank != config.get("r", 8)}
        changed["alpha_pattern"] = {
            name: alpha for name, alpha in alphas.items() if alpha != config.get("lora_alpha", 8)
        }
    else:
        changed["feedforward_modules"] = [name for name in ranks if name in columns]
    return changed, found


def _completed(rest: Tensors, base: AdaptedModel, renames: Sequence[Rename], *, back: bool) -> Tensors:
    """The tensors besides parts, with those of the base that are one in the other model with some of them: the bias of
    keys where those of queries and values were trained."""
    shapes, found = base.shapes(), {**rest}
    for name in rest:
        link = link_of(name, renames, shapes, back=back)
        for other in () if link is None else link.sources:
            if other not in found:
                found[other] = (base.tensor if back else base.their_tensor)(other)
    return found


def _joined(
    config: Mapping[str, Any],
    link: Link,
    parts: Sequence[Tensors],
    sizes: Sequence[int],
    base: AdaptedModel,
    path: Path,
) -> tuple[dict[str, list[Tensor]], int, float]:
    """The parts of layers that are one in the other model: name -> a tensor for each, or one for all; rank and alpha.

    Args:
        config: adapter_config.json.
        link: of the layers' weights.
        parts: of each layer, by their names in it; empty where it has none.
        sizes: outputs of each.
        base: the model.
        path: of adapter_config.json, for messages.
    """
    layers = [*map(owner, link.sources)]
    if any(_FACTORS in part for part in parts):
        factors = [part.get(_FACTORS, torch.ones(size, 1)) for part, size in zip(parts, sizes, strict=True)]
        is_same = all(torch.equal(factors[0], factor) for factor in factors)
        if any(_is_column(_FACTORS, factor) for factor in factors) and not is_same:
            raise UserError(
                f"{path.parent}: inputs of {', '.join(layers)} are scaled apart, which are one layer in the other model"
            )
        return {_FACTORS: factors[:1] if _is_column(_FACTORS, factors[0]) else factors}, 0, 0.0
    ranks, alphas = lora_numbers(config, path)
    there = [number for number, part in enumerate(parts) if part]
    own_ranks = [for_layer(ranks, layer, config.get("r", 8)) for layer in layers]
    own_alphas = [for_layer(alphas, layer, config.get("lora_alpha", 8)) for layer in layers]
    is_decomposed = any(_MAGNITUDE in part for part in parts)
    for number in there:
        rank, size = own_ranks[number], sizes[number]
        wanted: dict[str, tuple[int, list[int]]] = {_A: (2, [rank]), _B: (2, [size, rank])}
        for name, (dim, shape) in (wanted | ({_MAGNITUDE: (1, [size])} if is_decomposed else {})).items():
            place, tensor = f"{path.parent / WEIGHTS}: {layers[number]}.{name}", parts[number].get(name)
            if tensor is None:
                raise UserError(f"{place} is missing")
            if tensor.dim() != dim or [*tensor.shape[: len(shape)]] != shape:
                raise UserError(f"{place} is {[*tensor.shape]}; {path.name} says rank {rank}, the model {size} outputs")
    power = 0.5 if config.get("use_rslora") else 1.0
    scales = [alpha / rank**power for alpha, rank in zip(own_alphas, own_ranks, strict=True)]
    first = there[0]
    inputs = [parts[number][_A] for number in there]
    is_one = all(torch.equal(inputs[0], tensor) for tensor in inputs)
    a = inputs[0] if is_one else torch.cat(inputs)
    outputs, start = [], 0
    for number, size in enumerate(sizes):
        b = a.new_zeros(size, len(a))
        if number in there:
            own = parts[number][_B] * (scales[number] / scales[first])
            b[:, slice(None) if is_one else slice(start, start + own.size(1))] = own
            start += own.size(1)
        outputs.append(b)
    made = {_A: [a], _B: outputs}
    if is_decomposed:  # a row without B keeps its length
        norms = [] if len(there) == len(parts) else _row_norms(link, base, path)
        made[_MAGNITUDE] = [part[_MAGNITUDE] if part else norms[number] for number, part in enumerate(parts)]
    return made, len(a), plain(own_alphas[first] * (len(a) / own_ranks[first]) ** power)


def _row_norms(link: Link, base: AdaptedModel, path: Path) -> list[Tensor]:
    """The length of each row of the weights of the link's sources."""
    ours, norms = link.sources if link.back else link.targets, []
    for name in ours:
        if name not in base.weights.tensors:
            raise UserError(f"{path.parent}: DoRA needs all of {', '.join(link.sources)} beside quantised weights")
        norms.append(torch.linalg.vector_norm(base.weights.read(name).float(), dim=1))
    return norms if link.back else link.reversed().moved(norms, base.config)


def by_layer(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensors], Tensors]:
    """Parts by layer and their name in it, and what was trained besides."""
    layers: dict[str, Tensors] = {}
    rest: Tensors = {}
    for name, tensor in tensors.items():
        part = next((part for part in (_A, _B, _MAGNITUDE, _FACTORS) if name.endswith(f".{part}")), None)
        if part is None:
            rest[name] = tensor
        else:
            layers.setdefault(name.removesuffix(f".{part}"), {})[part] = tensor
    return layers, rest


def _pattern(layer: str) -> str:
    """The name of a layer's weight, as renames have it."""
    return LAYER_NUMBER.sub("*", f"{layer}.weight", count=1)


def _is_bias(name: str) -> bool:
    return name.endswith(".bias")


def _is_column(name: str, tensor: Tensor) -> bool:
    """Whether a part goes with a layer's inputs, [..., I], and not with its outputs."""
    return name == _A or (name == _FACTORS and len(tensor) == 1)
