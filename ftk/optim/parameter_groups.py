"""Rules per parameter: frozen or trained, decayed or not, and its share of the learning rate."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ftk.errors import UserError
from ftk.model_parallel.shards import canonical_name
from ftk.name_patterns import examples, matches
from ftk.optim.config import ParametersConfig, split_rule

Names = dict[nn.Parameter, list[str]]  # all names of each parameter, the first one first


def apply_freeze(model: nn.Module, config: ParametersConfig) -> None:
    """Switch `requires_grad` off for parameters that `freeze` matches; before the optimizer is built.

    Args:
        model: any module, also on the meta device.

    Raises:
        UserError: a pattern matches nothing, or nothing is left to train.
    """
    names = _names(model)
    for pattern in config.freeze:
        for parameter in _matching(names, pattern, "`freeze`"):
            parameter.requires_grad_(False)
    if config.freeze and not any(parameter.requires_grad for parameter in names):
        raise UserError(f"`freeze` {' '.join(config.freeze)}: nothing is left to train; freeze less")


def train_only(model: nn.Module, names: Collection[str], also: Sequence[str]) -> None:
    """Freeze all parameters but some; before `apply_freeze` and the optimizer.

    Args:
        model: any module, also on the meta device.
        names: of those that are trained.
        also: patterns of further ones, from `train_also`.

    Raises:
        UserError: a pattern matches nothing.
    """
    known = _names(model)
    trained = {parameter for pattern in also for parameter in _matching(known, pattern, "`train_also`")}
    for parameter, own_names in known.items():
        parameter.requires_grad_(parameter in trained or not set(own_names).isdisjoint(names))


def parameter_groups(
    model: nn.Module, weight_decay: float, config: ParametersConfig | None = None
) -> list[dict[str, Any]]:
    """The groups of a model's trainable parameters; arguments and errors as of `parameter_rules`."""
    return parameter_rules(model, weight_decay, config).groups_of(model)


@dataclass(frozen=True)
class ParameterRules:
    """The rules for each trained parameter of a model, by its name.

    Made from the whole model and applied to any part of it: a rank may hold some of the parameters, or others in
    their place under the same names.

    Attributes:
        groups: `{"weight_decay", "lr_scale", "names"}`, decayed ones first, then by falling lr_scale; names in the
            model's own order.
        multipliers: factor -> names of the parameters whose gradients it multiplies.
        num_elements: of all trained parameters together.
    """

    groups: list[dict[str, Any]]
    multipliers: dict[float, list[str]]
    num_elements: int

    def groups_of(self, model: nn.Module) -> list[dict[str, Any]]:
        """Groups of the parameters that `model` has, as "params", parallel to "names"; none of them is empty."""
        parameters = _by_name(model)
        kept = [{**group, "names": [name for name in group["names"] if name in parameters]} for group in self.groups]
        return [{**group, "params": [parameters[name] for name in group["names"]]} for group in kept if group["names"]]

    def multipliers_of(self, model: nn.Module) -> list[tuple[float, list[nn.Parameter]]]:
        """The parameters that `model` has, by factor."""
        parameters = _by_name(model)
        by_factor = self.multipliers.items()
        made = [(factor, [parameters[name] for name in names if name in parameters]) for factor, names in by_factor]
        return [(factor, used) for factor, used in made if used]


def parameter_rules(model: nn.Module, weight_decay: float, config: ParametersConfig | None = None) -> ParameterRules:
    """Split a model's trainable parameters into groups of one weight decay and one share of the learning rate.

    Biases and the weights of norms, that is every parameter of at most one dimension, are not decayed; embeddings
    are, unless `decay_embeddings` is off. A parameter that is used twice (the tied embedding) appears once.

    With `layer_lr_decay` d and L blocks, what is above the blocks learns at the scheduled rate, block i (from 0)
    at d ** (L - i) of it and the embeddings at d ** (L + 1) (Clark et al. 2020, https://arxiv.org/abs/2003.10555).
    `lr_scales` multiply that.

    Args:
        model: whole, perhaps on the meta device; frozen parameters (`requires_grad` false) are left out.
        weight_decay: the decay of the decayed ones.
        config: what differs between parameters; None for the defaults.

    Raises:
        UserError: a pattern matches nothing, or there are no blocks for `layer_lr_decay`.
    """
    config = config or ParametersConfig()
    names, embeddings = _names(model), _embeddings(model)
    trained = {parameter: first for parameter, (first, *_) in names.items() if parameter.requires_grad}
    scales = _layer_scales(model, names, embeddings, config.layer_lr_decay)
    for parameter, factor in _factors(names, config.lr_scales, "`lr_scales`").items():
        scales[parameter] *= factor
    groups: dict[tuple[bool, float], dict[str, Any]] = {}
    for parameter, name in trained.items():
        decayed = parameter.ndim > 1 and (config.decay_embeddings or parameter not in embeddings)
        scale = scales[parameter]
        new: dict[str, Any] = {"weight_decay": weight_decay if decayed else 0.0, "lr_scale": scale, "names": []}
        groups.setdefault((not decayed, -scale), new)["names"].append(name)
    multipliers: dict[float, list[str]] = {}
    for parameter, factor in _factors(names, config.gradient_multipliers, "`gradient_multipliers`").items():
        if parameter in trained:
            multipliers.setdefault(factor, []).append(trained[parameter])
    num_elements = sum(parameter.numel() for parameter in trained)
    return ParameterRules([groups[key] for key in sorted(groups)], multipliers, num_elements)


def _by_name(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for parameter, names in _names(model).items() for name in names}


def _names(model: nn.Module) -> Names:
    names: Names = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(canonical_name(name, model))
    return names


def _embeddings(model: nn.Module) -> set[nn.Parameter]:
    """The parameters of all modules that are embeddings by class or name."""
    found: set[nn.Parameter] = set()
    for name, module in model.named_modules(remove_duplicate=False):
        own_name = name.rpartition(".")[2]
        if name and ("embedding" in type(module).__name__.lower() or "embed" in own_name.lower()):
            found.update(module.parameters())
    return found


def _layer_scales(
    model: nn.Module, names: Names, embeddings: set[nn.Parameter], decay: float
) -> dict[nn.Parameter, float]:
    scales = dict.fromkeys(names, 1.0)
    if decay == 1.0:
        return scales
    # A Sequential's numbers are those of a small stack (a head, a feed-forward layer), not of blocks.
    stacks = {canonical_name(name, model) for name, m in model.named_modules() if isinstance(m, nn.Sequential)}
    blocks: dict[nn.Parameter, tuple[str, int]] = {}
    depths: dict[str, int] = {}
    for parameter, (name, *_) in names.items():
        block = _block(name, stacks)
        if parameter not in embeddings and block is not None:
            blocks[parameter] = block
            depths[block[0]] = max(depths.get(block[0], 0), block[1] + 1)
    if not blocks:
        raise UserError(
            f"`layer_lr_decay` {decay}: the model has no numbered blocks, such as layers.0; use `lr_scales` instead"
        )
    for parameter, (path, index) in blocks.items():
        scales[parameter] = decay ** (depths[path] - index)
    for parameter in embeddings:
        path, index = _block(names[parameter][0], stacks) or ("", 0)
        # One within a block, such as the rows of a prefix, learns as the block does.
        scales[parameter] = decay ** (depths[path] - index if path in depths else max(depths.values()) + 1)
    return scales


def _block(name: str, stacks: set[str]) -> tuple[str, int] | None:
    """(path of the list of blocks, index in it) of a parameter: "layers.3.norm.weight" -> ("layers", 3)."""
    parts = name.split(".")
    for place, part in enumerate(parts):
        path = ".".join(parts[:place])
        if part.isdigit() and path not in stacks:
            return path, int(part)
    return None


def _factors(names: Names, rules: Sequence[str], flag: str) -> dict[nn.Parameter, float]:
    """The factor of each parameter that a rule matches; the last rule counts."""
    factors: dict[nn.Parameter, float] = {}
    for rule in rules:
        pattern, factor = split_rule(rule)
        factors.update(dict.fromkeys(_matching(names, pattern, flag), factor))
    return factors


def _matching(names: Names, pattern: str, flag: str) -> list[nn.Parameter]:
    """The parameters one of whose names, or a module that holds them, matches a shell pattern."""
    found = [parameter for parameter, own in names.items() if any(matches(name, pattern) for name in own)]
    if not found:
        known = (name for own in names.values() for name in own)
        raise UserError(f"{flag} {pattern!r} matches no parameter; {examples(pattern, known)}")
    return found
