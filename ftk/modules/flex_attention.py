"""Attention by torch's flex attention, compiled, which skips blocks of the mask that are empty."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_mask, flex_attention

from ftk.errors import UserError
from ftk.modules.attention import Front
from ftk.modules.masked_attention import fused_attention
from ftk.modules.masks import Visibility
from ftk.registry import register_attention

logger = logging.getLogger(__name__)

HAS_TRITON = importlib.util.find_spec("triton") is not None
"""Whether torch can compile for a GPU; looked up here, since torch.compile cannot trace it."""

FLEX_MIN_HEAD_SIZE = 16
"""The smallest D that flex attention takes."""

FLEX_MAX_SHAPES = 64
"""Programs of flex attention that a process compiles, of torch's 8: each type, mode and kind of length has its own."""


class FlexAttention(NamedTuple):
    """An `Attend` for a whole sequence at once; it runs on CUDA only, and has no dropout.

    Args:
        mask: blocks of the [B, 1, T, S] mask (`Visibility.blocks`).
        front: as in `MaskedAttention`.
    """

    mask: BlockMask
    front: Front | None = None

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *, bias: Tensor | None = None, scale: float | None = None
    ) -> Tensor:
        refuse_flex_without_cuda(query)
        if bias is not None:
            raise UserError("`attention` flex takes no bias of positions; use `attention` sdpa")
        how: dict[str, Any] = {"scale": scale, "enable_gqa": query.size(1) != key.size(1), "block_mask": self.mask}
        if self.front is not None:
            how["return_aux"] = AuxRequest(lse=True)
        attended = compiled_flex_attention(query, key, value, **how)
        if attended is None:
            batch, _, queries, keys = self.mask.shape
            mask = create_mask(self.mask.mask_mod, batch, 1, queries, keys, query.device)
            return fused_attention(query, key, value, mask, scale=scale, front=self.front)
        if self.front is None:
            return attended
        return with_front(attended[0], attended[1].lse, query, self.front, scale)


@register_attention("flex")
def flex(
    visibility: Visibility,
    num_tokens: int,
    device: torch.device,
    dropout: float,
    dtype: torch.dtype,
    num_keys: int | None = None,
) -> FlexAttention:
    assert dropout == 0.0, "flex attention has no dropout"
    return FlexAttention(visibility.blocks(num_tokens, device, num_keys=num_keys))


def refuse_flex_without_cuda(query: Tensor) -> None:
    if not query.is_cuda:
        raise UserError(
            f"`attention` flex trains on CUDA only, this is {query.device.type}; use `attention` auto, or "
            "torch.no_grad() where nothing is trained"
        )


def with_front(attended: Tensor, lse: Tensor, query: Tensor, front: Front, scale: float | None = None) -> Tensor:
    """What queries attend to with a `Front`, of what they attend to without it.

    Args:
        attended: [B, A, T, D].
        lse: logarithms of the sums of the exponentials of the scores there, [B, A, T].
        query: [B, A, T, D].
        front: what they see besides.
        scale: as in `Attend`.
    """
    key, value = (tensor[:, :, None].to(query.dtype) for tensor in front)  # [1, K, 1, n, D]
    query = (query * (query.size(-1) ** -0.5 if scale is None else scale)).unflatten(1, (key.size(1), -1))
    scores = (query @ key.mT).float()  # [B, K, A/K, T, n]
    own = (scores.softmax(-1).to(value.dtype) @ value).flatten(1, 2)  # [B, A, T, D]
    share = (scores.logsumexp(-1).flatten(1, 2) - lse).sigmoid().to(own.dtype)[..., None]  # [B, A, T, 1]
    return attended + share * (own - attended)


class FlexPrograms:
    """The programs that flex attention was compiled to in this process.

    Attributes:
        are_too_many: torch has refused to compile another.
    """

    are_too_many = False


def compiled_flex_attention(*tensors: Tensor, **how: Any) -> Any:
    """`flex_attention`, compiled, as uncompiled it would make all scores; None: it is compiled for too many shapes.

    Then a warning was logged, and `attention_form` takes another form from the next batch on.
    """
    if torch.compiler.is_compiling():
        return flex_attention(*tensors, **how)  # type: ignore[call-overload]
    from torch._dynamo.exc import FailOnRecompileLimitHit

    try:
        return _flex_program()(*tensors, **how)
    except FailOnRecompileLimitHit:
        if not FlexPrograms.are_too_many:
            logger.warning(
                "attention flex was compiled for %d shapes, and torch compiles no more: from here on sdpa, which is "
                "slower; batches of fewer different lengths avoid it (`pad_to_multiple`)",
                FLEX_MAX_SHAPES,
            )
        FlexPrograms.are_too_many = True
        return None


@cache
def _flex_program() -> Callable[..., Any]:
    """For all models and layers of the process; of each kind of shapes one is made at the first call."""
    import torch._dynamo

    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, FLEX_MAX_SHAPES)
    # So that selective activation checkpointing sees it (https://github.com/pytorch/pytorch/issues/175229); before 2.13
    # a regression makes that an error (https://github.com/pytorch/torchtitan/issues/2463), and it is computed again.
    options = {"wrap_inductor_compiled_regions": True} if torch.__version__ >= "2.13" else None
    return torch.compile(flex_attention, fullgraph=True, options=options)  # type: ignore[arg-type]
