"""Adapters on a model: put on the layers that patterns name; some are merged into weights and taken out again.

    adapt(model, LoRA(LoRAConfig(adapter_targets=["layers.*.attention.*=16/32"])))

A layer stays where it is, under its name, with its `weight` and `bias`: its class becomes a subclass that adds parts.
"""

from __future__ import annotations

import contextlib
import functools
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ftk.errors import UserError
from ftk.modules.adapters import AdapterConfig
from ftk.modules.embeddings import TiedEmbedding
from ftk.modules.initialization import Module, draw, is_undrawn, undrawn
from ftk.modules.quantized_linear import Int4Linear, Int8Linear, Int8TiedEmbedding
from ftk.name_patterns import matches

_LINEAR = (nn.Linear, Int8Linear, Int4Linear)


class Adapter(Protocol):
    """What `register_adapter` registers: how one layer is adapted.

    It is for the linear layers in a model's lists of blocks, unless it has a method `places(model)`, which gives other
    layers by their names.

    Attributes:
        PARTS: names of the parameters and modules that it adds to a layer.
    """

    PARTS: ClassVar[tuple[str, ...]]

    @property
    def config(self) -> AdapterConfig:
        """Which layers, and what is trained besides."""

    def put_on(self, layer: Any, value: str) -> None:
        """Add the parts to one layer, in place, with declared initial values, and mix a class into its own (`mix_in`).

        Args:
            layer: an `nn.Linear`, `Int8Linear` or `Int4Linear`, or one of `places`, also on the meta device.
            value: what stands behind the "=" of the layer's pattern; "" for nothing.
        """


class Adapted(nn.Module):
    """Base of the classes that are mixed into that of a layer."""

    plain_class: type[nn.Module]  # of the layer before

    def init_from_weights(self) -> None:
        """Set what depends on the weights, when these are there and the adapter has its initial values."""

    def precompute(self) -> None:
        """Compute once what does not depend on inputs, when the weights are there and nothing is trained any more."""

    def parts_in_plan(self, style: str, options: Mapping[str, Any]) -> dict[str, Any]:
        """How tensor parallel ranks share the parts: names in the layer -> entries of a plan.

        Args:
            style: of the layer in the plan (`ftk.model_parallel.tensor_parallel.plan`).
            options: of that style.
        """
        raise UserError(
            f"{type(self).__name__} with this adapter cannot be shared by tensor parallel ranks; use "
            f"`data_parallel_shard_size` instead of `tensor_parallel_size`"
        )


class AdaptedLinear(Adapted, ABC):
    """Base of the classes that are mixed into that of a linear layer; `weight` is the frozen one.

    Attributes:
        of_inputs, of_outputs: names of its own parameters with a number for each input, or each output; tensor parallel
            ranks share them as they share the weight.
    """

    weight: Any
    bias: Any
    of_inputs: ClassVar[tuple[str, ...]] = ()
    of_outputs: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def merged_weight(self) -> Tensor:
        """[O, I], float32 or wider: the weight with which the plain layer gives what this one does."""

    def merged_bias(self) -> Tensor | None:
        """[O], the bias that goes with it."""
        bias: Tensor | None = self.bias
        return bias

    def merge_weight(self) -> Any:
        """The weight becomes `merged_weight`, in place.

        Returns:
            what `unmerge_weight` needs.
        """
        self.weight.copy_(self.merged_weight())

    @abstractmethod
    def unmerge_weight(self, before: Any) -> None:
        """The inverse of `merge_weight`, up to rounding.

        Args:
            before: what that returned.
        """


class Parts(NamedTuple):
    """What `merge` took from a layer; `before`: what its `merge_weight` returned."""

    kind: type[nn.Module]
    modules: dict[str, nn.Module | None]
    parameters: dict[str, nn.Parameter | None]
    before: Any


@torch.no_grad()
def adapt(model: nn.Module, adapter: Adapter, seed: int | None = None) -> None:
    """Put an adapter on the layers that its targets name, in place; which parameters are trained is not changed.

    A model of which the weights are there gives what it gave before, bit for bit.

    Args:
        model: of any kind; its linear layers in an `nn.ModuleList` can be adapted, or those that the adapter is for. On
            the meta device no values are drawn.
        adapter: such as `ftk.modules.adapters.lora.LoRA(config)`.
        seed: of the initial values, which depend on it and on names alone; that of torch's generator if None.

    Raises:
        UserError: the model has no such layers, or an adapter already; a target matches none of them.
    """
    if is_adapted(model):
        raise UserError(f"{type(model).__name__} has an adapter already; merge that first")
    own_places = getattr(adapter, "places", None)
    kind = "linear" if own_places is None else "such"
    layers = (own_places or linear_layers)(model)
    if not layers:
        raise UserError(
            f"{type(model).__name__} has no {kind} layers in an nn.ModuleList; an adapter has no place in it"
        )
    for pattern, _ in adapter.config.targets():
        if not any(matches(name, pattern) for name in layers):
            raise UserError(
                f"`adapter_targets` {pattern!r} matches no {kind} layer in the model's blocks; {_kinds(layers)}"
            )
    values = {name: adapter.config.value_for(name) for name in layers}
    if not any(value is not None for value in values.values()):
        raise UserError(
            f"{type(model).__name__} has none of the layers that this adapter is usually for; name some by "
            f"`adapter_targets`; {_kinds(layers)}"
        )
    with undrawn():
        for name, value in values.items():
            if value is not None:
                adapter.put_on(layers[name], value)
    if is_undrawn():
        return
    draw(model, lambda name: is_part(name, adapter.PARTS), seed)
    init_from_weights(model)


@torch.no_grad()
def init_from_weights(model: nn.Module) -> None:
    """Set what of new adapters depends on the weights beside them; after these are loaded, before any update."""
    for layer in _adapted(model).values():
        if not any(parameter.is_meta for parameter in layer.parameters()):
            layer.init_from_weights()


@torch.no_grad()
def precompute(model: nn.Module) -> None:
    """Compute once what parts of adapters give whatever is read, in place: nothing of it is trained any more."""
    for layer in _adapted(model).values():
        layer.precompute()


def _kinds(layers: Iterable[str]) -> str:
    kinds = dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in layers)
    return f"there are for example {', '.join([*kinds][:8])}"


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers that can be adapted, by name: linear ones, rounded or not, in the model's lists of blocks."""
    return in_blocks(model, _LINEAR)


def in_blocks(model: nn.Module, kind: type[Module] | tuple[type[Module], ...]) -> dict[str, Module]:
    """The modules of a kind, by name, in the model's lists of blocks."""
    lists = tuple(f"{name}." for name, part in model.named_modules() if isinstance(part, nn.ModuleList))
    return {name: part for name, part in model.named_modules() if isinstance(part, kind) and name.startswith(lists)}


def adapted_layers(model: nn.Module) -> dict[str, AdaptedLinear]:
    """The linear layers that have an adapter, by name: `merge` takes it into their weights."""
    return {name: part for name, part in _adapted(model).items() if isinstance(part, AdaptedLinear)}


def is_adapted(model: nn.Module) -> bool:
    """Whether a model has an adapter."""
    return bool(_adapted(model))


def _adapted(model: nn.Module) -> dict[str, Adapted]:
    return {name: part for name, part in model.named_modules() if isinstance(part, Adapted)}


def is_part(name: str, parts: Collection[str]) -> bool:
    """Whether a tensor of this name belongs to an adapter that has such parts."""
    return not set(name.split(".")).isdisjoint(parts)


def part_names(names: Iterable[str], adapter: Adapter | None) -> list[str]:
    """Of names of tensors those of an adapter's."""
    return [] if adapter is None else [name for name in names if is_part(name, adapter.PARTS)]


@torch.no_grad()
def merge(model: nn.Module) -> dict[str, Parts]:
    """Take each adapter into the weight of its layer, in place: the model is a plain one again.

    Returns:
        What `unmerge` needs: the parts, by the names of their layers.

    Raises:
        UserError: a layer has rounded weights, or is shared by ranks; nothing has changed.
    """
    layers = adapted_layers(model)
    for name, layer in layers.items():
        if not isinstance(layer, nn.Linear):
            raise UserError(f"{name} has quantised weights, which a merged one would not fit; use 'make_plain'")
        if "plain_class" not in vars(type(layer)):
            raise UserError(f"{name} is shared by several ranks; merge the adapter before the model is parallelized")
    kept = {}
    for name, layer in layers.items():
        before = layer.merge_weight()
        kind, own = type(layer), {*layer._modules, *layer._parameters} - {"weight", "bias"}
        kept[name] = Parts(
            kind,
            {part: layer._modules.pop(part) for part in own & layer._modules.keys()},
            {part: layer._parameters.pop(part) for part in own & layer._parameters.keys()},
            before,
        )
        layer.__class__ = kind.plain_class  # type: ignore[assignment]
    return kept


@torch.no_grad()
def unmerge(model: nn.Module, kept: Mapping[str, Parts]) -> None:
    """Undo `merge`, in place: weights are what they were, up to rounding.

    Args:
        model: after `merge(model)`.
        kept: what that returned.
    """
    for name, (kind, modules, parameters, before) in kept.items():
        layer: Any = model.get_submodule(name)
        layer.__class__ = kind
        layer._modules.update(modules)
        layer._parameters.update(parameters)
        layer.unmerge_weight(before)


@contextlib.contextmanager
def without_adapter(model: nn.Module) -> Iterator[None]:
    """Inside, a model gives what it gives without its adapter; nothing is copied.

    Raises:
        UserError: a layer is shared by ranks.
    """
    layers = [(name, layer, type(layer)) for name, layer in _adapted(model).items()]
    for name, _, kind in layers:
        if "plain_class" not in vars(kind):
            raise UserError(f"{name} is shared by several ranks; its adapter cannot be left out")
    for _, layer, kind in layers:
        layer.__class__ = kind.plain_class  # type: ignore[assignment]
    try:
        yield
    finally:
        for _, layer, kind in layers:
            layer.__class__ = kind


@torch.no_grad()
def make_plain(model: nn.Module) -> None:
    """Replace adapted and rounded linear layers by plain ones that give the same, in place, with weights of floats."""
    for name, part in list(model.named_modules()):
        new: nn.Module
        if isinstance(part, _LINEAR) and (isinstance(part, AdaptedLinear) or not isinstance(part, nn.Linear)):
            weight = part.merged_weight() if isinstance(part, AdaptedLinear) else part.weight
            dtype = part.weight.dtype
            new = nn.Linear(part.in_features, part.out_features, part.bias is not None, device="meta")
            new.weight = nn.Parameter(weight.to(dtype))
            bias = part.merged_bias() if isinstance(part, AdaptedLinear) else part.bias
            new.register_parameter("bias", None if bias is None else nn.Parameter(bias.detach()))
        elif isinstance(part, Int8TiedEmbedding):
            new = TiedEmbedding(part.num_embeddings, part.embedding_dim, device="meta")
            new.weight = nn.Parameter(part.weight)
        else:
            continue
        model.set_submodule(name, new)


def mix_in(layer: nn.Module, behaviour: type[Adapted]) -> None:
    """Make the class of a layer a subclass of `behaviour` and of its own."""
    layer.__class__ = _mixed(behaviour, type(layer))  # type: ignore[arg-type]


# Cached, so that the blocks of a model stay instances of one class, and torch.compile makes one graph for all.
@functools.cache
def _mixed(behaviour: type[Adapted], plain: type[nn.Module]) -> type[Adapted]:
    return type(plain.__name__, (behaviour, plain), {"__module__": plain.__module__, "plain_class": plain})
