"""The names under which a model's tensors and an optimizer's state are stored, with or without wrappers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ftk.model_parallel.shards import canonical_name, fused_parameters, with_fused

# Entries of a parameter group that are not stored: they follow from the model and the run's options.
_DERIVED = ("names", "lr_scale")


def model_tensors(model: nn.Module | Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the tensors of a model's state, each once, and the other names of those that are tied.

    Args:
        model: a module, or a state dict of one.

    Returns:
        tensors: by canonical name; of tied tensors the first name.
        aliases: other name -> the name it is stored under.
    """
    state = model.state_dict(keep_vars=True) if isinstance(model, nn.Module) else model
    fused = fused_parameters(model) if isinstance(model, nn.Module) else {}
    tensors: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    first_names: dict[int, str] = {}
    for name, value in state.items():
        name = canonical_name(name, model)
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{name} of the model's state is a {type(value).__name__}; only tensors can be stored")
        first = first_names.setdefault(id(value), name)
        if first == name:
            tensors[name] = with_fused(value.detach(), fused.get(id(value)))
        else:
            aliases[name] = first
    return tensors, aliases


def optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, torch.Tensor], dict[str, Any], list[dict[str, Any]]]:
    """Return an optimizer's state by the names of the model's parameters.

    Returns:
        tensors: "PARAMETER/ENTRY" -> tensor.
        scalars: "PARAMETER/ENTRY" -> other values.
        groups: the parameter groups, with "params" as names and without the entries that the run's options set.
    """
    names, fused = parameter_names(model), fused_parameters(model)
    tensors: dict[str, torch.Tensor] = {}
    scalars: dict[str, Any] = {}

    def collect(path: str, value: Any, parameter: Any) -> None:
        if isinstance(value, dict):
            for entry, inner in value.items():
                collect(f"{path}/{entry}", inner, parameter)
        elif isinstance(value, torch.Tensor):
            layers = fused.get(id(parameter))
            tensors[path] = with_fused(value.detach(), layers and layers.of_state(value, parameter))
        else:
            scalars[path] = value

    for parameter, state in optimizer.state.items():
        collect(_name_of(parameter, names), state, parameter)
    groups = [
        {key: value for key, value in group.items() if key not in _DERIVED}
        | {"params": [_name_of(parameter, names) for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    return tensors, scalars, groups


def merged_groups(lists: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """The parameter groups of all ranks as one list; groups with the same hyperparameters are merged.

    Args:
        lists: of each rank, encoded as JSON by `ftk.checkpoint.encoding`.
    """
    members: dict[str, dict[str, None]] = {}  # hyperparameters as text -> names, each once, in order
    for groups in lists:
        for group in groups:
            options = {key: value for key, value in group.items() if key != "params"}
            members.setdefault(json.dumps(options, sort_keys=True), {}).update(dict.fromkeys(group["params"]))
    return [json.loads(options) | {"params": list(names)} for options, names in members.items()]


def parameter_names(model: nn.Module) -> dict[int, str]:
    """Return the canonical name of each parameter, by its `id`; of tied ones the first name."""
    return {id(parameter): canonical_name(name, model) for name, parameter in model.named_parameters()}


def _name_of(parameter: Any, names: dict[int, str]) -> str:
    if id(parameter) not in names:
        raise ValueError("the optimizer holds a parameter that is not the model's")
    return names[id(parameter)]
