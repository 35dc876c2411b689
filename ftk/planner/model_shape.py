"""What a plan uses of a model: names, shapes and places of its parameters, and the widths of its layers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from ftk.errors import UserError

if TYPE_CHECKING:
    from torch import nn

WIDTHS = ("num_layers", "hidden_size", "num_attention_heads", "inner_size", "vocab_size", "max_positions")


class ParameterShape(NamedTuple):
    """A parameter.

    Attributes:
        name: in the whole model.
        shape: of the whole parameter.
        block: which of the repeated blocks it belongs to, None for none.
        tensor_dim: the dimension that tensor parallel ranks share; None: each has the whole.
        is_partial: under sequence parallel each tensor rank has the gradient of its own part of the sequence.
        on_first, on_last: if in no block: whether the first and the last stage of a pipeline hold it, or both (tied).
    """

    name: str
    shape: tuple[int, ...]
    block: int | None
    tensor_dim: int | None = None
    is_partial: bool = False
    on_first: bool = True
    on_last: bool = True

    @property
    def is_tied(self) -> bool:
        """Whether the ends of a pipeline each hold it."""
        return self.block is None and self.on_first and self.on_last

    def local_shape(
        self, tensor: int = 1, shard: int = 1, tensor_rank: int = 0, shard_rank: int = 0
    ) -> tuple[int, ...]:
        """What one rank holds: the rows of its tensor rank, and of these, along dimension 0, those of its shard rank.

        Both cut as `torch.chunk` does: ceil(rows / ranks) rows per rank, the last ones what is left, perhaps none.
        """
        shape = list(self.shape)
        if self.tensor_dim is not None:
            shape[self.tensor_dim] = chunk_size(shape[self.tensor_dim], tensor, tensor_rank)
        if shape:
            shape[0] = chunk_size(shape[0], shard, shard_rank)
        return tuple(shape)

    def padded_numel(self, tensor: int, shard: int, tensor_rank: int = 0) -> int:
        """Numbers of a shard rank's part in the messages of sharding, where all parts are as long as the first one."""
        return math.prod(self.local_shape(tensor, shard, tensor_rank))


def chunk_size(rows: int, ranks: int, rank: int) -> int:
    """Rows of a rank, as `torch.chunk` and DTensor's `Shard` deal them out."""
    each = -(-rows // ranks)
    return max(0, min(each, rows - rank * each))


@dataclass(frozen=True, eq=False)
class ModelShape:
    """A transformer with one list of blocks, or with those of an encoder and of a decoder that reads it.

    Attributes:
        parameters: in the order of the model.
        num_layers: of both stacks.
        hidden_size, num_attention_heads, inner_size, vocab_size, max_positions: as in its options.
        encoder_layers: of `num_layers` the first, whose states the others read; 0 of one stack.
        attention_width: A D, of all heads together.
        is_gated: whether two matrices make the inner width.
        has_dropout, has_inner_dropout: whether a rate of the layers' outputs, and one within the feed-forward networks,
            is above 0.
        is_post_norm: whether the norms stand behind the sums.
        attention: how it is computed on a GPU: flex, sdpa or eager.
        has_score_bias: whether the layers add a bias of positions to their scores.
        has_tensor_plan, has_stages, has_sequence_parallel: whether it can be trained by tensor parallel, by pipelines,
            and by sequence parallel.
        training_flops: (tokens, targets, pairs of query and key) -> operations of a forward and a backward pass; of an
            encoder-decoder with a `ftk.models.flops.DecoderWork` behind.
    """

    parameters: tuple[ParameterShape, ...]
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    inner_size: int
    vocab_size: int
    max_positions: int
    encoder_layers: int
    attention_width: int
    is_gated: bool
    has_dropout: bool
    has_inner_dropout: bool
    is_post_norm: bool
    attention: str
    has_score_bias: bool
    has_tensor_plan: bool
    has_stages: bool
    has_sequence_parallel: bool
    training_flops: Callable[..., int]

    @cached_property
    def num_parameters(self) -> int:
        return sum(math.prod(parameter.shape) for parameter in self.parameters)

    def of_stage(self, first_layer: int, last_layer: int) -> list[ParameterShape]:
        """The parameters of a pipeline stage with layers first_layer to last_layer - 1."""
        is_first, is_last = first_layer == 0, last_layer == self.num_layers
        return [
            parameter
            for parameter in self.parameters
            if (
                first_layer <= parameter.block < last_layer
                if parameter.block is not None
                else (is_first and parameter.on_first) or (is_last and parameter.on_last)
            )
        ]


def model_shape(model: nn.Module, config: Any) -> ModelShape:
    """The shape of a model, which may lie on the meta device.

    Where its parameters are cut and which stage of a pipeline holds them is asked of what does it in training: the
    model's `tensor_parallel_plan` and `ftk.model_parallel.pipeline`. A model that has no such plan, or that cannot be
    cut into stages, is planned without.

    Args:
        model: a `ftk.models.base.Backbone` with `training_flops`.
        config: the model's; what `WIDTHS` names is read, and the rates of dropout.

    Raises:
        UserError: the model has no list of `num_layers` blocks, or its options no such widths.
    """
    from ftk.model_parallel.blocks import blocks_of, has_two_stacks

    has_two = has_two_stacks(model)
    widths = (*WIDTHS, "decoder_layers") if has_two else WIDTHS
    missing = [name for name in widths if not hasattr(config, name)]
    if missing or not hasattr(model, "training_flops"):
        wanted = missing[0] if missing else "training_flops"
        raise UserError(
            f"{type(model).__name__} cannot be planned: it has no {wanted}; a plan needs a "
            f"ftk.models.base.Backbone with training_flops, whose config has {', '.join(widths)}"
        )
    num_layers = config.num_layers + (config.decoder_layers if has_two else 0)
    found = blocks_of(model)
    blocks = {f"{name}.": place for place, (name, _) in enumerate(found)}
    if len(blocks) != num_layers:
        raise UserError(
            f"{type(model).__name__} cannot be planned: its options have num_layers {num_layers}, but the list "
            f"of its blocks has {len(blocks)}"
        )
    cut, partial = _tensor_parallel(model)
    ends = _ends(model, num_layers, has_two)
    parameters = []
    for name, parameter in model.named_parameters():
        block = next((place for prefix, place in blocks.items() if name.startswith(prefix)), None)
        on_first, on_last = (ends is None or name in ends[0], ends is None or name in ends[1])
        shape = tuple(parameter.shape)
        parameters.append(ParameterShape(name, shape, block, cut.get(name), name in partial, on_first, on_last))
    head_size = getattr(config, "head_size", None) or config.hidden_size // config.num_attention_heads
    attention, has_bias = getattr(config, "attention", "sdpa"), getattr(model, "ADDS_BIAS", False)
    if attention == "auto":
        # With dropout `attention_form` (ftk/modules/attention_forms.py) takes varlen, whose second call keeps 2 H v a
        # token more.
        attention = "sdpa" if has_bias or getattr(config, "attention_dropout", 0.0) > 0.0 else "flex"
    return ModelShape(
        tuple(parameters),
        **{name: getattr(config, name) for name in WIDTHS} | {"num_layers": num_layers},
        encoder_layers=config.num_layers if has_two else 0,
        attention_width=config.num_attention_heads * head_size,
        is_gated=any(".gate." in parameter.name for parameter in parameters),
        has_dropout=getattr(config, "dropout", 0.0) > 0.0,
        has_inner_dropout=getattr(config, "activation_dropout", 0.0) > 0.0,
        is_post_norm=getattr(found[0][1], "NORMS_BEHIND", False),
        attention=attention,
        has_score_bias=has_bias,
        has_tensor_plan=bool(cut),
        has_stages=ends is not None,
        has_sequence_parallel=not getattr(model, "ADDS_TOKENS", False),
        training_flops=model.training_flops,  # type: ignore[arg-type]
    )


def _tensor_parallel(model: nn.Module) -> tuple[dict[str, int], set[str]]:
    """Names of parameters -> the dimension that is cut, by the model's plan; names of those with partial gradients."""
    plan: Any = getattr(model, "tensor_parallel_plan", None)
    if plan is None:
        return {}, set()
    from ftk.model_parallel.tensor_parallel.plan import match_plan
    from ftk.model_parallel.tensor_parallel.styles import Sequence

    cut: dict[str, int] = {}
    partial: set[str] = set()
    for name, style in match_plan(model, plan() if callable(plan) else plan, size=1).items():
        module = model.get_submodule(name)
        cut |= {f"{name}.{own}": dim for own, dim in style.dims(module).items()}
        if isinstance(style, Sequence):
            partial |= {f"{name}.{own}" for own, _ in module.named_parameters(recurse=False)}
    return cut, partial


def _ends(model: nn.Module, num_layers: int, two_stacks: bool) -> tuple[set[str], set[str]] | None:
    """Names of the parameters on the first and on the last stage of a pipeline; None if it cannot be cut, or if a
    stage in between holds what is in no block: a plan counts what ends hold."""
    if num_layers == 1:
        return None
    from ftk.model_parallel.blocks import blocks_of
    from ftk.model_parallel.pipeline.layout import PipelineLayout, even_layers
    from ftk.model_parallel.pipeline.stages import cut_model

    # Between two stacks there may be a norm, on the stage where the first one ends, wherever that is.
    stages = num_layers if two_stacks else min(num_layers, 3)
    layout = PipelineLayout(even_layers(num_layers, stages), stages)
    try:
        first, last = (cut_model(model, layout, rank) for rank in (0, layout.last_rank))
    except UserError:  # such a model is trained without a pipeline
        return None
    at_ends = {name for part in (first, last) for name, _ in part.model.named_parameters()}
    of_blocks = tuple(f"{name}." for name, _ in blocks_of(model))
    beside = {name for name in first.names if not name.startswith(of_blocks)}
    within = {name for name, ranks in first.holders.items() if {*ranks} - {0, layout.last_rank}}
    if beside - at_ends or within:
        return None
    return {name for name, _ in first.model.named_parameters()}, {name for name, _ in last.model.named_parameters()}
