"""Multi-head attention; which keys a query sees, and where they are kept, is up to `attend`."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_mask, flex_attention

from ftk.errors import UserError
from ftk.modules.dropout import dropout_matmul
from ftk.modules.initialization import Normal, declare
from ftk.modules.masks import Visibility
from ftk.modules.norms import RMSNorm
from ftk.registry import ATTENTIONS, register_attention

logger = logging.getLogger(__name__)

HAS_TRITON = importlib.util.find_spec("triton") is not None
"""Whether torch can compile for a GPU; looked up here, since torch.compile cannot trace it."""

FLEX_MIN_HEAD_SIZE = 16
"""The smallest D that flex attention takes."""

FLEX_MAX_SHAPES = 64
"""Programs of flex attention that a process compiles, of torch's 8: each type, mode and kind of length has its own."""

VARLEN_MAX_HEAD_SIZE = 128
"""The largest D of the flash kernels whose backward pass has dropout on every GPU that runs them."""

EAGER_MAX_TOKENS = 1024
"""The longest sequence for which "auto" keeps attention weights, A T^2 numbers a layer and sample."""


BANDED_MIN_WINDOWS = 4
"""The shortest sequence, in windows, for which "auto" on a CPU makes the scores of a band alone."""


class Attend(Protocol):
    """How queries meet keys and values: a whole sequence at once, or a cache. Implementations are named tuples, so that
    torch.compile, activation checkpointing, pipelining and FSDP2 see the tensors inside."""

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *, bias: Tensor | None = None, scale: float | None = None
    ) -> Tensor:
        """Mixes the values.

        Args:
            query: [B, A, T, D].
            key, value: [B, K, T, D]; query head a reads key head a // (A / K).
            bias: added to the scores, of a shape that broadcasts with [B, A, T, S], of S keys; None: none.
            scale: factor on the products of queries and keys; None: D ** -0.5.

        Returns:
            attended [B, A, T, D]
        """


class AttendByWindow(NamedTuple):
    """What is given to layers whose windows differ: an `Attend` for each window, of which `Attention` takes its own.

    Attributes:
        windows: of the layers, each once; None: no limit.
        attends: one for each.
    """

    windows: tuple[int | None, ...]
    attends: tuple[Attend, ...]

    def of(self, window: int | None) -> Attend:
        """That of a layer with this window."""
        return self.attends[self.windows.index(window)]

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *, bias: Tensor | None = None, scale: float | None = None
    ) -> Tensor:
        raise TypeError("layers of this model differ in their windows: take `of(window)`, as `Attention.own` does")


def by_window(windows: Sequence[int | None], make: Callable[[int | None], Attend]) -> Attend:
    """What layers with these windows, each named once, are given: of one window its `Attend` itself."""
    attends = tuple(map(make, windows))
    return attends[0] if len(attends) == 1 else AttendByWindow(tuple(windows), attends)


def wrapped(attend: Attend, wrap: Callable[[Attend], Attend]) -> Attend:
    """With something around the `Attend`, or around each."""
    if isinstance(attend, AttendByWindow):
        return attend._replace(attends=tuple(map(wrap, attend.attends)))
    return wrap(attend)


class Front(NamedTuple):
    """Keys and values of a layer that all queries see besides those of their sequence; they have no positions.

    Attributes:
        key, value: [1, K, n, D].
    """

    key: Tensor
    value: Tensor

    @property
    def length(self) -> int:
        """n"""
        return self.key.size(2)

    def joined(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """In front of keys and values [B, K, S, D]: [B, K, n + S, D] each."""
        own, others = (
            torch.cat((front.to(each.dtype).expand(each.size(0), -1, -1, -1), each), dim=2)
            for front, each in zip(self, (key, value), strict=True)
        )
        return own, others

    def seen(self, mask: Tensor | None) -> Tensor | None:
        """A mask or bias of S keys for n + S, of which all see the first: [..., S] -> [..., n + S]"""
        return None if mask is None else F.pad(mask, (self.length, 0), value=mask.dtype == torch.bool)


def behind(attend: Attend, front: Front) -> Attend:
    """An `Attend` whose queries see a `Front`, too: inside of what is around it, such as a rotation.

    Raises:
        UserError: it takes none.
    """
    own: Any = attend
    if hasattr(own, "attend"):
        return own._replace(attend=behind(own.attend, front))  # type: ignore[no-any-return]
    if not hasattr(own, "front"):
        raise UserError(f"{type(own).__name__} takes no prefix of keys and values; choose another `attention`")
    return own._replace(front=front)  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Scaled dot-product attention with a joint query-key-value projection (Vaswani et al. 2017, 3.2).

    The rows of the projection are laid out per key head, [K, A/K + 2, D]: its query heads, then the key, then the
    value (Ainslie et al. 2023 for K < A). So a shard of rows is a set of whole heads for every tensor-parallel degree
    that divides K.

    Args:
        hidden_size: H.
        num_heads: A; must divide H where `head_size` is not given.
        num_kv_heads: K; must divide A. None: A.
        head_size: D; None: H / A.
        bias, output_bias: of the joint and of the output projection.
        head_norm_eps: normalise each query and key head by `RMSNorm` with this epsilon; None: do not.
        init_std, output_std: of the initial weights; the latter of the projection into the residual path.

    Attributes:
        window: of the layer, by which it chooses from an `AttendByWindow`.
    """

    window: int | None = None

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_size: int | None = None,
        bias: bool = True,
        output_bias: bool = True,
        head_norm_eps: float | None = None,
        init_std: float = 0.02,
        output_std: float = 0.02,
    ) -> None:
        super().__init__()
        if head_size is None and hidden_size % num_heads:
            raise UserError(f"num_attention_heads {num_heads} does not divide hidden_size {hidden_size}; change one")
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.head_size = hidden_size // num_heads if head_size is None else head_size
        self.group_size = num_heads // num_kv_heads
        width, rows = num_heads * self.head_size, num_kv_heads * (self.group_size + 2) * self.head_size
        self.qkv = declare(nn.Linear(hidden_size, rows, bias=bias), weight=Normal(init_std))
        self.output = declare(nn.Linear(width, hidden_size, bias=output_bias), weight=Normal(output_std))
        if head_norm_eps is not None:
            self.query_norm = RMSNorm(self.head_size, eps=head_norm_eps)
            self.key_norm = RMSNorm(self.head_size, eps=head_norm_eps)

    @property
    def key_shape(self) -> tuple[int, int]:
        """Heads of keys and values on this rank, and their size: K, D."""
        return _num_rows(self.qkv) // ((self.group_size + 2) * self.head_size), self.head_size

    def forward(self, hidden: Tensor, attend: Attend) -> Tensor:
        """hidden [B, T, H] -> [B, T, H]; `attend` mixes the values, see `Attend`."""
        query, key, value = self.heads(self.qkv(hidden))
        if hasattr(self, "query_norm"):
            query, key = self.query_norm(query), self.key_norm(key)
        attended = self.own(attend)(query, key, value)  # [B, A, T, D]
        return self.output(attended.transpose(1, 2).flatten(2))

    def heads(self, joint: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A joint projection [B, T, K (A/K + 2) D] -> queries [B, A, T, D]; keys and values, each [B, K, T, D]"""
        group = self.group_size
        qkv = joint.unflatten(-1, (-1, group + 2, self.head_size))  # [B, T, K, A/K + 2, D]
        # Before the transposition: behind it torch 2.11 cannot export the flattening for any number of tokens.
        query = qkv[..., 0, :] if group == 1 else qkv[..., :group, :].flatten(2, 3)
        return query.transpose(1, 2), qkv[..., group, :].transpose(1, 2), qkv[..., group + 1, :].transpose(1, 2)

    def own(self, attend: Attend) -> Attend:
        """Of what all layers are given the part for this one."""
        return attend.of(self.window) if isinstance(attend, AttendByWindow) else attend


KeysAndValues = Callable[[Tensor], tuple[Tensor, Tensor]]
"""A layer's projection of what the encoder made, [B, S, H], to keys and values, [B, K, S, D] each."""


class Memory(Protocol):
    """What a decoder reads of its encoder. Implementations are named tuples, as those of `Attend`."""

    def read(self, project: KeysAndValues) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, [B, K, S, D] each: projected now, or kept from an earlier call."""


class Encoded(NamedTuple):
    """The `Memory` of whole sequences: every layer projects the encoder's states, [B, S, H]."""

    states: Tensor

    def read(self, project: KeysAndValues) -> tuple[Tensor, Tensor]:
        return project(self.states)


class CrossAttend(NamedTuple):
    """What a layer of a decoder behind an encoder is given as its `attend`.

    Attributes:
        own: how its tokens meet each other.
        cross: how they meet the encoder's.
        memory: where these are read.
    """

    own: Attend
    cross: Attend
    memory: Memory


class CrossAttention(nn.Module):
    """Attention of a decoder's tokens to what its encoder made (Vaswani et al. 2017, 3.2.3).

    The rows of `key_value` are laid out per head, [A, 2, D], as those of `Attention`.

    Args:
        hidden_size, num_heads, head_size, bias, output_bias, init_std, output_std: as of `Attention`.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        head_size: int | None = None,
        bias: bool = True,
        output_bias: bool = True,
        init_std: float = 0.02,
        output_std: float = 0.02,
    ) -> None:
        super().__init__()
        self.head_size = hidden_size // num_heads if head_size is None else head_size
        width, normal = num_heads * self.head_size, Normal(init_std)
        self.query = declare(nn.Linear(hidden_size, width, bias=bias), weight=normal)
        self.key_value = declare(nn.Linear(hidden_size, 2 * width, bias=bias), weight=normal)
        self.output = declare(nn.Linear(width, hidden_size, bias=output_bias), weight=Normal(output_std))

    @property
    def memory_shape(self) -> tuple[int, int]:
        """Heads of keys and values on this rank, and their size: A, D."""
        return _num_rows(self.key_value) // (2 * self.head_size), self.head_size

    def forward(self, hidden: Tensor, attend: Attend, memory: Memory) -> Tensor:
        """hidden [B, T, H] -> [B, T, H]"""
        query = self.query(hidden).unflatten(-1, (-1, self.head_size)).transpose(1, 2)  # [B, A, T, D]
        key, value = memory.read(self.keys_and_values)
        return self.output(attend(query, key, value).transpose(1, 2).flatten(2))

    def keys_and_values(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """states [B, S, H] -> [B, A, S, D] each"""
        both = self.key_value(states).unflatten(-1, (-1, 2, self.head_size)).transpose(1, 2)  # [B, A, S, 2, D]
        return both[..., 0, :], both[..., 1, :]


def _num_rows(projection: nn.Module) -> int:
    """Outputs of a linear layer on this rank."""
    weight = getattr(projection, "quantized_weight", None)  # of int8 and int4
    return int((projection.weight if weight is None else weight).size(0))  # type: ignore[operator, union-attr]


class MaskedAttention(NamedTuple):
    """An `Attend` for a whole sequence at once, used in training and scoring: torch's fused kernels.

    Args:
        mask: [B, 1, T, S] bool, True where a query may see a key (`Visibility.boolean`); None: the kernels need none.
        dropout: probability with which an attention weight is dropped; the caller passes 0 outside training.
        is_causal: without a mask: a query sees nothing later than itself; else it sees all.
        front: what all queries see besides.
    """

    mask: Tensor | None
    dropout: float = 0.0
    is_causal: bool = False
    front: Front | None = None

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *, bias: Tensor | None = None, scale: float | None = None
    ) -> Tensor:
        how = self.mask, self.is_causal, self.dropout
        return fused_attention(query, key, value, *how, bias=bias, scale=scale, front=self.front)


def fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool = False,
    dropout: float = 0.0,
    *,
    bias: Tensor | None = None,
    scale: float | None = None,
    front: Front | None = None,
) -> Tensor:
    """`F.scaled_dot_product_attention` with a bias on the scores in addition to the mask.

    Args:
        query: [B, A, T, D].
        key, value: [B, K, S, D].
        mask: bool, True where a query sees a key, or float, added to the scores; None: all is seen.
        is_causal: without a mask: a query sees nothing later than itself.
        dropout: probability with which an attention weight is dropped.
        bias, scale: as in `Attend`.
        front: what all queries see besides; mask and bias are those of the other keys.
    """
    grouped = query.size(1) != key.size(1)
    folds = grouped and _has_no_grouped_kernel(query)
    if is_causal and (bias is not None or front is not None or (folds and query.dtype not in HALF)):
        mask, is_causal = torch.ones(query.size(-2), key.size(-2), dtype=torch.bool, device=query.device).tril(), False
    if front is not None:
        mask, bias = front.seen(mask), front.seen(bias)
        key, value = front.joined(key, value)
    if bias is not None:
        if mask is not None:
            bias = bias.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else bias + mask
        mask = bias.to(query.dtype)
    if not folds or (mask is None and query.dtype in HALF):
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=is_causal, dropout_p=dropout, scale=scale, enable_gqa=grouped
        )
    # The queries of a group as more queries of one head.
    group, count = query.size(1) // key.size(1), query.size(2)
    query = query.unflatten(1, (-1, group)).flatten(2, 3)  # [B, K, A/K T, D]
    if mask is not None:
        mask = mask[(None,) * (4 - mask.dim())]
        if mask.size(1) == 1:
            mask = mask.expand(-1, group, count, -1).flatten(1, 2)[:, None]  # [B, 1, A/K T, S]
        else:
            mask = mask.expand(-1, -1, count, -1).unflatten(1, (-1, group)).flatten(2, 3)
    attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout, scale=scale)
    return attended.unflatten(2, (group, count)).flatten(1, 2)


def _has_no_grouped_kernel(query: Tensor) -> bool:
    """Whether there is but a slow one for query heads that share keys, under a mask or in float32: flash takes neither
    of these, and the efficient kernel no shared keys."""
    return query.is_cuda


def step_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    bias: Tensor | None = None,
    scale: float | None = None,
    front: Front | None = None,
) -> Tensor:
    """The same for a few queries a row, as steps of generation have them, without a backward pass.

    Args:
        query: [R, A, W, D].
        key, value: [R, K, S, D].
        mask: added to the scores, of a shape that broadcasts with [R, 1, W, S]; None: all is seen.
        bias, scale, front: as of `fused_attention`.

    Returns:
        attended [R, A, W, D]
    """
    # One query a row is no work for the fused kernels of a CPU: 48 microseconds against 33 in float32 and 240
    # against 125 in bfloat16 (12 heads of 64, 256 slots, one thread).
    if query.device.type != "cpu" or (query.dtype != torch.float32 and query.size(2) > 1):
        return fused_attention(query, key, value, mask, bias=bias, scale=scale, front=front)
    shape, per_key = query.shape, (query.size(0), key.size(1), -1, query.size(-1))
    query = (query * (query.size(-1) ** -0.5 if scale is None else scale)).reshape(per_key)  # [R, K, A/K W, D]
    scores = (query @ key.mT).view(*shape[:-1], key.size(2))  # [R, A, W, S]
    if mask is not None:
        scores += mask
    if bias is not None:
        scores += bias
    if front is None:
        weights = scores.softmax(-1, dtype=torch.float32).to(value.dtype)
        return (weights.view(*query.shape[:-1], key.size(2)) @ value).view(shape)
    # Scores are put together, not keys, which would be copied in each step.
    first = (query @ front.key.to(query.dtype).mT).view(*shape[:-1], front.length)
    weights = torch.cat((first, scores), dim=-1).softmax(-1, dtype=torch.float32).to(value.dtype)
    ahead, own = weights.view(*query.shape[:-1], -1).split((front.length, key.size(2)), dim=-1)
    return (ahead @ front.value.to(value.dtype) + own @ value).view(shape)


class EagerAttention(NamedTuple):
    """The same in single operators, as the textbook writes it; scores and weights are in the inputs' type.

    Args:
        mask: [B, 1, T, S], 0 where a query may see a key and -inf elsewhere (`Visibility.additive`); each query sees at
            least one. None: all is seen.
        dropout, front: as in `MaskedAttention`.
    """

    mask: Tensor | None
    dropout: float = 0.0
    front: Front | None = None

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *, bias: Tensor | None = None, scale: float | None = None
    ) -> Tensor:
        mask = self.mask
        if self.front is not None:
            mask, bias = self.front.seen(mask), self.front.seen(bias)
            key, value = self.front.joined(key, value)
        if (group := query.size(1) // key.size(1)) > 1:
            key, value = (each.repeat_interleave(group, dim=1) for each in (key, value))  # [B, A, S, D]
        scores = (query * (query.size(-1) ** -0.5 if scale is None else scale)) @ key.transpose(-1, -2)  # [B, A, T, S]
        if mask is not None:
            # Added, not filled in: the gradient passes an addition as it is, and softmax's is 0 where the weight is.
            scores = scores.add_(mask.to(scores.dtype))
        if bias is not None:
            scores = scores + bias.to(scores.dtype)
        return dropout_matmul(scores.softmax(dim=-1).to(value.dtype), value, self.dropout)


class FlexAttention(NamedTuple):
    """The same by compiled flex attention, which skips blocks of the mask that are empty; it has no dropout.

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
    key, value = (each[:, :, None].to(query.dtype) for each in front)  # [1, K, 1, n, D]
    query = (query * (query.size(-1) ** -0.5 if scale is None else scale)).unflatten(1, (key.size(1), -1))
    scores = (query @ key.mT).float()  # [B, K, A/K, T, n]
    own = (scores.softmax(-1).to(value.dtype) @ value).flatten(1, 2)  # [B, A, T, D]
    share = (scores.logsumexp(-1).flatten(1, 2) - lse).sigmoid().to(own.dtype)[..., None]  # [B, A, T, 1]
    return attended + share * (own - attended)


def sequence_attention(
    form: str,
    visibility: Visibility,
    num_tokens: int,
    device: torch.device,
    dropout: float = 0.0,
    dtype: torch.dtype = torch.float32,
    num_keys: int | None = None,
) -> Attend:
    """The `Attend` of a batch in a registered form; its mask is built here, once for all layers.

    Args:
        form: its name; see `attention_form` for "auto".
        visibility: which tokens see which.
        num_tokens: T.
        device: of the batch.
        dropout: of attention weights, 0 outside training and for "flex".
        dtype: of the scores.
        num_keys: S, where the keys are those of another sequence; None: T.
    """
    # An exported program takes any number of tokens: there the window always counts.
    if visibility.window is not None and not torch.compiler.is_exporting() and num_tokens <= visibility.window:
        visibility = visibility._replace(window=None)
    if visibility.length is not None and _all_at_least(visibility.length, num_tokens if num_keys is None else num_keys):
        visibility = visibility._replace(length=None)
    build = ATTENTIONS.get(form).target
    # A form of a plugin's may know of no other keys.
    attend: Attend = (
        build(visibility, num_tokens, device, dropout, dtype)
        if num_keys is None
        else build(visibility, num_tokens, device, dropout, dtype, num_keys)
    )
    return attend


def _all_at_least(length: Tensor, num_tokens: int) -> bool:
    """Whether no key is masked by its length, as far as that is known without waiting for a device; a compiled program
    is for any lengths."""
    if length.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    return bool((length >= num_tokens).all())


@register_attention("sdpa")
def sdpa(
    visibility: Visibility,
    num_tokens: int,
    device: torch.device,
    dropout: float,
    dtype: torch.dtype,
    num_keys: int | None = None,
) -> MaskedAttention:
    if visibility.is_causal_alone or visibility.sees_all:
        return MaskedAttention(None, dropout, visibility.causal)
    return MaskedAttention(visibility.boolean(*_places(num_tokens, num_keys, device)), dropout)


@register_attention("eager")
def eager(
    visibility: Visibility,
    num_tokens: int,
    device: torch.device,
    dropout: float,
    dtype: torch.dtype,
    num_keys: int | None = None,
) -> EagerAttention:
    if visibility.sees_all:
        return EagerAttention(None, dropout)
    return EagerAttention(visibility.additive(*_places(num_tokens, num_keys, device), dtype), dropout)


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


def _places(num_tokens: int, num_keys: int | None, device: torch.device) -> tuple[Tensor, Tensor]:
    """Those of the queries, [T], and of the keys, [S]."""
    queries = torch.arange(num_tokens, device=device)
    return queries, queries if num_keys is None else torch.arange(num_keys, device=device)


def attention_form(
    form: str,
    device: torch.device,
    dtype: torch.dtype,
    num_tokens: int,
    head_size: int,
    dropout: float,
    window: int | None = None,
    *,
    has_bias: bool = False,
    in_runs: bool = True,
    has_prefix: bool = False,
) -> str:
    """What "auto" stands for; "sdpa" for a "flex" on the meta device, that only scores and not on CUDA, or whose
    programs were too many, and for a "varlen" without its kernels; other forms as they are.

    A model trained by flex is so scored on a laptop too: torch 2.13's compiled flex kernel for CPUs has no backward
    and gives NaN in about one process of three.

    "auto" on CUDA: varlen, whose kernels need no mask and have dropout; flex, unless there is dropout, behind a prefix,
    where varlen takes two calls, within a window, and where varlen has no kernel; in float32 and with a bias of
    positions SDPA, which has kernels for both, while those of flex for float32 are slow. By docs/performance.md SDPA by
    cuDNN is faster than varlen for short texts with dropout, but it makes a plan for each shape of a batch, which takes
    more than half a second. CPU, forward and backward of 8 heads of 64 on one
    thread (milliseconds of SDPA against eager): float32 at 256 tokens 24 against 24, at 1024 92 against 142; bfloat16
    at 256 25 against 9, at 1024 75 against 38; with dropout, for which SDPA has no fused kernel, 40 against 29 and 39
    against 14. So eager in bfloat16 and with dropout, as long as the [T, T] weights it keeps for the backward are
    small. Within a window that is a small part of the text the band alone: of 4096 tokens with 257 to both sides a
    fifth of the scores.

    Args:
        form: "auto" or the name of a registered form.
        device: of the batch.
        dtype: of the scores.
        num_tokens: T.
        head_size: D.
        dropout: of attention weights as configured for training, so that validation takes the same form.
        window: as of `Visibility`.
        has_bias: whether the model adds a bias to the scores (`Backbone.ADDS_BIAS`).
        in_runs: `Visibility.in_runs`, without the window.
        has_prefix: whether there is a `Visibility.prefix`.
    """
    if form == "flex" and (
        FlexPrograms.are_too_many or device.type == "meta" or (device.type != "cuda" and not torch.is_grad_enabled())
    ):
        return "sdpa"
    exports = torch.compiler.is_exporting()  # a program that takes any number of tokens
    in_runs = in_runs and (window is None or (not exports and num_tokens <= window))
    fits = dtype in HALF and head_size % 8 == 0 and head_size <= VARLEN_MAX_HEAD_SIZE
    takes_varlen = in_runs and fits and has_flash(device)
    if form == "varlen" and not takes_varlen:
        return "sdpa"
    if form != "auto":
        return form
    if device.type == "cuda":
        if has_bias or dtype not in HALF:
            return "sdpa"
        takes_flex = HAS_TRITON and dropout == 0.0 and head_size >= FLEX_MIN_HEAD_SIZE
        if takes_flex and not FlexPrograms.are_too_many and (has_prefix or not takes_varlen):
            return "flex"
        return "varlen" if takes_varlen else "sdpa"
    if window is not None and not exports and num_tokens >= BANDED_MIN_WINDOWS * window:
        return "banded"
    eager_is_faster = device.type == "cpu" and (dtype == torch.bfloat16 or dropout > 0.0)
    return "eager" if eager_is_faster and num_tokens <= EAGER_MAX_TOKENS else "sdpa"


HALF = (torch.bfloat16, torch.float16)


def has_flash(device: torch.device) -> bool:
    """Whether torch's flash kernels run there: an NVIDIA GPU of Ampere or newer."""
    is_built = torch.version.cuda is not None and torch.backends.cuda.is_flash_attention_available()
    return device.type == "cuda" and is_built and torch.cuda.get_device_properties(device).major >= 8


class FlexPrograms:
    """The programs that flex attention was compiled to in this process.

    Attributes:
        are_too_many: torch has refused to compile another.
    """

    are_too_many = False


@cache
def _flex_program() -> Callable[..., Any]:
    """For all models and layers of the process; of each kind of shapes one is made at the first call."""
    import torch._dynamo

    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, FLEX_MAX_SHAPES)
    # So that selective activation checkpointing sees it (https://github.com/pytorch/pytorch/issues/175229); before 2.13
    # a regression makes that an error (https://github.com/pytorch/torchtitan/issues/2463), and it is computed again.
    options = {"wrap_inductor_compiled_regions": True} if torch.__version__ >= "2.13" else None
    return torch.compile(flex_attention, fullgraph=True, options=options)  # type: ignore[arg-type]


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
