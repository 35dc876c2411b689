"""Cutting a model into the stages of a pipeline; parameters keep the names that they have in the whole model."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ftk.errors import UserError, counted
from ftk.model_parallel.blocks import refuse_added_tokens
from ftk.model_parallel.pipeline.layout import PipelineLayout


@dataclass(frozen=True, eq=False)
class Part:
    """What one process of a pipeline holds of a model.

    Attributes:
        rank: of this process along the pipeline.
        model: everything that this process holds; names are those of the whole model.
        stages: the same, stage by stage, with the same parameters; of one stage it is the model itself.
        holders: names of the parameters that several ranks hold, such as a token embedding that is the output layer
            too -> these ranks, in order.
        names: of all parameters of the whole model, in its order.
        hidden_size: numbers a token that one stage hands to the next.
    """

    layout: PipelineLayout
    rank: int
    model: nn.Module
    stages: tuple[nn.Module, ...]
    holders: dict[str, tuple[int, ...]]
    names: tuple[str, ...]
    hidden_size: int

    @property
    def copies(self) -> frozenset[str]:
        """Names of the parameters here that are an earlier rank's: neither counted in norms nor saved here."""
        return frozenset(name for name, ranks in self.holders.items() if self.rank in ranks[1:])


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The layers that a pipeline deals out to its stages (`Backbone.all_layers`); none of a model of another kind."""
    return getattr(model, "all_layers", [])  # type: ignore[return-value]


def cut_model(model: nn.Module, layout: PipelineLayout, rank: int) -> Part:
    """The part of a model that one process of a pipeline holds.

    Nothing is copied: the part shares its parameters with the model, which should be on the meta device, so that no
    process ever holds what is not its own.

    Args:
        model: a `Backbone` (`ftk.models.base`), which is the sum of its `enter`, `run_stage`, `finish` and `head`.
        rank: of this process along the pipeline.

    Raises:
        UserError: the model is none, has another number of layers, or parameters besides; or two stages of one rank
            share a parameter.
    """
    _check_layers(model, layout)
    parameters = dict(model.named_parameters())
    needed, hidden_size = _needed(model, parameters, layout)
    own = [{id(parameters[name]) for name in needed[stage]} for stage in layout.stages_of(rank)]
    rank_model = _restricted(model, set().union(*own))
    stages = (rank_model,) if len(own) == 1 else tuple(_restricted(rank_model, kept) for kept in own)
    ranks = {name: _ranks_that_need(name, needed, layout) for name in parameters}
    holders = {name: tuple(sorted(found)) for name, found in ranks.items() if len(found) > 1}
    return Part(layout, rank, rank_model, stages, holders, tuple(parameters), hidden_size)


def _check_layers(model: nn.Module, layout: PipelineLayout) -> None:
    refuse_added_tokens(model, "pipeline_parallel_size")
    layers = layers_of(model)
    if not layers or not hasattr(model, "INPUTS"):
        raise UserError(f"{type(model).__name__} is no ftk.models.base.Backbone; a pipeline cannot cut it into stages")
    if len(layers) != layout.num_layers:
        raise UserError(
            f"{type(model).__name__} has {len(layers)} layers, the pipeline is laid out for {layout.num_layers}"
        )


def _needed(model: Any, parameters: Mapping[str, nn.Parameter], layout: PipelineLayout) -> tuple[list[set[str]], int]:
    """Names of the parameters that each stage needs, and H."""
    first, last, hidden_size = _used_at_ends(model, parameters)
    stage_of_layer = [stage for stage, count in enumerate(layout.layers_per_stage) for _ in range(count)]
    within = _stages_of_layers(model, parameters, stage_of_layer)
    for ends, stage in ((first, 0), (last, layout.num_stages - 1)):
        if shared := [name for name in ends if within.get(name, stage) != stage]:
            raise UserError(
                f"{type(model).__name__} uses {sorted(shared)[0]!r} in a layer and at the other end; a pipeline can "
                f"share parameters only between embed and the output"
            )
    needed = [{name for name, place in within.items() if place == stage} for stage in range(layout.num_stages)]
    needed[0] |= first
    needed[-1] |= last
    if between := parameters.keys() - set().union(*needed):
        for names, used in zip(needed, _used_between(model, parameters, needed, between), strict=True):
            names |= used
    if unused := [name for name in parameters if not _ranks_that_need(name, needed, layout)]:
        raise UserError(
            f"`pipeline_parallel_size`: {type(model).__name__} has {counted(len(unused), 'parameter')} outside of "
            f"embed, layers, finish and head (such as {unused[0]!r}), for which a pipeline has no stage; use "
            f"`tensor_parallel_size` or `data_parallel_shard_size`"
        )
    for name in sorted(between):
        ranks = _ranks_that_need(name, needed, layout)
        if len(ranks) > len(set(ranks)):
            raise UserError(
                f"`pipeline_stages_per_rank` {layout.num_stages // layout.num_ranks}: two stages of one rank share the "
                f"parameter {name!r} of {type(model).__name__}; use one stage per rank, or other `pipeline_layers`"
            )
    return needed, hidden_size


def _ranks_that_need(name: str, needed: list[set[str]], layout: PipelineLayout) -> list[int]:
    return [layout.rank_of(stage) for stage, names in enumerate(needed) if name in names]


def _stages_of_layers(model: Any, parameters: Mapping[str, nn.Parameter], stage_of_layer: list[int]) -> dict[str, int]:
    """Name of each parameter of the layers -> the stage it is on."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    stages: dict[str, int] = {}
    for layer, stage in zip(layers_of(model), stage_of_layer, strict=True):
        inside = [names[id(parameter)] for parameter in layer.parameters()]
        if not inside:
            raise UserError(f"{type(model).__name__} has a layer without parameters; a pipeline cannot place it")
        for name in inside:
            if stages.setdefault(name, stage) != stage:
                raise UserError(f"layers of {type(model).__name__} on different stages share the parameter {name!r}")
    return stages


def _used_at_ends(model: Any, parameters: Mapping[str, nn.Parameter]) -> tuple[set[str], set[str], int]:
    """Names of the parameters that the first stage's `enter` uses, those of the last stage's output, and H.

    Found by what has a gradient there: that takes one token, and is right for any model.
    """
    with _all_trainable(model), torch.enable_grad():
        states = model.enter(*_one_token_inputs(model))  # [1, 1, H] each
        hidden = torch.zeros_like(states[-1], requires_grad=True)
        first, last = _used(states, parameters), _used((model.head(model.finish(hidden)),), parameters)
    # An output layer may have outputs besides its scores.
    parts = model.head if isinstance(model.head, tuple) else (model.head,)
    of_head = {id(parameter) for part in parts if isinstance(part, nn.Module) for parameter in part.parameters()}
    last |= {name for name, parameter in parameters.items() if id(parameter) in of_head}
    return first, last, hidden.size(-1)


def _used_between(
    model: Any, parameters: Mapping[str, nn.Parameter], needed: list[set[str]], between: Collection[str]
) -> list[set[str]]:
    """Of the parameters `between`, which are in no layer and at no end, those that each stage uses: a table that its
    layers share, a norm between two stacks. Found as in `_used_at_ends`."""
    candidates = {name: parameters[name] for name in between}
    found = []
    with _all_trainable(model), torch.enable_grad():
        given = _one_token_inputs(model)
        states = tuple(torch.zeros_like(state) for state in model.enter(*given))
        for names in needed:
            stage: Any = _restricted(model, {id(parameters[name]) for name in names.union(between)})
            found.append(_used(stage.run_stage(states, *given), candidates))
    return found


def _one_token_inputs(model: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The smallest inputs: tokens [1, 1], and of a model of two stacks as many for the decoder."""
    tokens = torch.zeros(1, 1, dtype=torch.int64, device=next(model.parameters()).device)
    return tokens, {name: tokens for name in ("decoder_tokens",) if name in model.INPUTS}


def _used(outputs: tuple[Tensor, ...], parameters: Mapping[str, nn.Parameter]) -> set[str]:
    """Names of the parameters of which the outputs are made."""
    total = torch.stack([output.sum() for output in outputs]).sum()
    gradients = torch.autograd.grad(total, list(parameters.values()), allow_unused=True)
    return {name for name, gradient in zip(parameters, gradients, strict=True) if gradient is not None}


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
    that are shared. Parts that lose all their parameters are left out; those that never had any stay, and those that
    are not called but only hold others."""
    if all(id(parameter) in kept for parameter in module.parameters()):
        return module
    frame = copy.copy(module)
    own_parameters = {name: own for name, own in module._parameters.items() if own is None or id(own) in kept}
    # One dict where nothing is left out: what takes a parameter's place in a stage does so in the process's part too.
    frame._parameters = module._parameters if len(own_parameters) == len(module._parameters) else own_parameters
    frame._modules = {}
    for name, part in module._modules.items():
        inside = [] if part is None else [id(parameter) in kept for parameter in part.parameters()]
        if part is not None and (not inside or any(inside) or type(part).forward is nn.Module.forward):
            frame._modules[name] = _restricted(part, kept)
    return frame
