"""Cutting a model into the stages of a pipeline; parameters keep the names that they have in the whole model."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ftk.errors import UserError, counted
from ftk.model_parallel.blocks import refuse_other_lengths
from ftk.model_parallel.pipeline.layout import PipelineLayout


@dataclass(frozen=True, eq=False)
class Part:
    """What one process of a pipeline holds of a model.

    Attributes:
        layout: of the whole pipeline.
        rank: of this process along it.
        model: everything that this process holds; names are those of the whole model.
        stages: the same, stage by stage, with the same parameters; of one stage it is the model itself.
        tied: names of the parameters that both the first and the last stage hold, such as a token embedding that is
            the output layer too.
        names: of all parameters of the whole model, in its order.
        hidden_size: numbers a token that one stage hands to the next.
    """

    layout: PipelineLayout
    rank: int
    model: nn.Module
    stages: tuple[nn.Module, ...]
    tied: frozenset[str]
    names: tuple[str, ...]
    hidden_size: int

    @property
    def copies(self) -> frozenset[str]:
        """Names of the parameters here that are the first stage's: neither counted in norms nor saved here."""
        return self.tied if self.rank == self.layout.last_rank else frozenset()


def cut_model(model: nn.Module, layout: PipelineLayout, rank: int) -> Part:
    """The part of a model that one process of a pipeline holds.

    Nothing is copied: the part shares its parameters with the model, which should be on the meta device, so that no
    process ever holds what is not its own.

    Args:
        model: a `Backbone` (`ftk.models.base`), which is the sum of its `embed`, `layers`, `finish` and `head`.
        layout: of the whole pipeline.
        rank: of this process along it.

    Raises:
        UserError: the model is none, has another number of layers, or has parameters besides.
    """
    _check_layers(model, layout)
    parameters = dict(model.named_parameters())
    first, last, hidden_size = _ends(model, parameters)
    stage_of_layer = [stage for stage, count in enumerate(layout.layers_per_stage) for _ in range(count)]
    within = _stages_of_layers(model, parameters, stage_of_layer)
    if beside := [name for name in parameters if name not in first | last | within.keys()]:
        raise UserError(
            f"`pipeline_parallel_size`: {type(model).__name__} has {counted(len(beside), 'parameter')} outside of "
            f"embed, layers, finish and head (such as {beside[0]!r}), for which a pipeline has no stage; use "
            f"`tensor_parallel_size` or `data_parallel_shard_size`"
        )

    for ends, stage in ((first, 0), (last, layout.num_stages - 1)):
        if shared := [name for name in ends if within.get(name, stage) != stage]:
            raise UserError(
                f"{type(model).__name__} uses {sorted(shared)[0]!r} in a layer and at the other end; a pipeline can "
                f"share parameters only between embed and the output"
            )

    def kept(stage: int) -> set[int]:
        names = {name for name, place in within.items() if place == stage}
        names |= (first if stage == 0 else set()) | (last if stage == layout.num_stages - 1 else set())
        return {id(parameters[name]) for name in names}

    own = [kept(stage) for stage in layout.stages_of(rank)]
    held = _restricted(model, set().union(*own))
    stages = (held,) if len(own) == 1 else tuple(_restricted(held, kept) for kept in own)
    return Part(layout, rank, held, stages, frozenset(first & last), tuple(parameters), hidden_size)


def _check_layers(model: nn.Module, layout: PipelineLayout) -> None:
    refuse_other_lengths(model, "pipeline_parallel_size")
    layers = getattr(model, "layers", None)
    if not hasattr(model, "INPUTS") or not isinstance(layers, nn.ModuleList):
        raise UserError(f"{type(model).__name__} is no ftk.models.base.Backbone; a pipeline cannot cut it into stages")
    if len(layers) != layout.num_layers:
        raise UserError(
            f"{type(model).__name__} has {len(layers)} layers, the pipeline is laid out for {layout.num_layers}"
        )


def _stages_of_layers(model: Any, parameters: dict[str, nn.Parameter], stage_of_layer: list[int]) -> dict[str, int]:
    """Name of each parameter of the layers -> the stage it is on."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    stages: dict[str, int] = {}
    for layer, stage in zip(model.layers, stage_of_layer, strict=True):
        inside = [names[id(parameter)] for parameter in layer.parameters()]
        if not inside:
            raise UserError(f"{type(model).__name__} has a layer without parameters; a pipeline cannot place it")
        for name in inside:
            if stages.setdefault(name, stage) != stage:
                raise UserError(f"layers of {type(model).__name__} on different stages share the parameter {name!r}")
    return stages


def _ends(model: Any, parameters: dict[str, nn.Parameter]) -> tuple[set[str], set[str], int]:
    """Names of the parameters that the first stage's `embed` uses, those of the last stage's output, and H.

    Found by what has a gradient there: that takes one token, and is right for any model.
    """
    device = next(iter(parameters.values())).device

    def used(output: Tensor) -> set[str]:
        gradients = torch.autograd.grad(output.sum(), list(parameters.values()), allow_unused=True)
        return {name for name, gradient in zip(parameters, gradients, strict=True) if gradient is not None}

    with _all_trainable(model), torch.enable_grad():
        embedded = model.embed(torch.zeros(1, 1, dtype=torch.int64, device=device))  # [1, 1, H]
        hidden = torch.zeros_like(embedded, requires_grad=True)
        first, last = used(embedded), used(model.head(model.finish(hidden)))
    # An output layer may have outputs besides its scores.
    parts = model.head if isinstance(model.head, tuple) else (model.head,)
    of_head = {id(each) for part in parts if isinstance(part, nn.Module) for each in part.parameters()}
    last |= {name for name, parameter in parameters.items() if id(parameter) in of_head}
    return first, last, embedded.size(-1)


@contextmanager
def _all_trainable(model: nn.Module) -> Iterator[None]:
    """Frozen parameters have gradients too inside, and dropout draws nothing."""
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    was_training = model.training
    model.eval()
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)
        model.train(was_training)


def _restricted(module: nn.Module, kept: Collection[int]) -> nn.Module:
    """A module with no other parameters than those with the ids `kept`: itself, or a copy of its frame around parts
    that are shared. Parts that lose all their parameters are left out; those that never had any stay."""
    if all(id(parameter) in kept for parameter in module.parameters()):
        return module
    frame = copy.copy(module)
    own_parameters = {name: own for name, own in module._parameters.items() if own is None or id(own) in kept}
    # One dict where nothing is left out: what takes a parameter's place in a stage does so in the process's part too.
    frame._parameters = module._parameters if len(own_parameters) == len(module._parameters) else own_parameters
    frame._modules = {}
    for name, part in module._modules.items():
        inside = [] if part is None else [id(parameter) in kept for parameter in part.parameters()]
        if part is not None and (not inside or any(inside)):
            frame._modules[name] = _restricted(part, kept)
    return frame
