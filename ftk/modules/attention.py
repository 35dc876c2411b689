"""Multi-head attention; which keys a query sees, and where they are kept, is up to `attend`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ftk.errors import UserError
from ftk.modules.initialization import Normal, declare
from ftk.modules.norms import RMSNorm


class Attend(Protocol):
    """How queries meet keys and values: a whole sequence at once, or a cache. Implementations are named tuples, so that
    torch.compile, activation checkpointing, pipelining and FSDP2 see the tensors inside."""

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *, bias: Tensor | None = None, scale: float | None = None
    ) -> Tensor:
        """Mixes the values. One that has `attend_joint(heads, scale)`, too, takes them as `Attention` projects them.

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
        raise TypeError("layers of this model differ in their windows; call `of(window)`, as `Attention` does")


def by_window(windows: Sequence[int | None], make: Callable[[int | None], Attend]) -> Attend:
    """What layers with these windows, each named once, are given: of one window its `Attend` itself."""
    attends = tuple(map(make, windows))
    return attends[0] if len(attends) == 1 else AttendByWindow(tuple(windows), attends)


def wrapped(attend: Attend, wrap: Callable[[Attend], Attend]) -> Attend:
    """With something around the `Attend`, or around each."""
    if isinstance(attend, AttendByWindow):
        return attend._replace(attends=tuple(map(wrap, attend.attends)))
    return wrap(attend)


def identity(attend: Attend) -> Attend:
    """Wraps nothing around an `Attend`."""
    return attend


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


def attend_with_front(attend: Attend, front: Front) -> Attend:
    """An `Attend` whose queries see a `Front`, too: inside of what is around it, such as a rotation.

    Raises:
        UserError: it takes none.
    """
    own: Any = attend
    if hasattr(own, "attend"):
        return own._replace(attend=attend_with_front(own.attend, front))  # type: ignore[no-any-return]
    if not hasattr(own, "front"):
        raise UserError(f"{type(own).__name__} takes no prefix of keys and values; choose another `attention`")
    return own._replace(front=front)  # type: ignore[no-any-return]


def separate_heads(joint: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Heads [B, T, K, A/K + 2, D] -> queries [B, A, T, D]; keys and values, each [B, K, T, D]"""
    # Before the transposition: behind it torch 2.11 cannot export the flattening for any number of tokens.
    query = joint[..., 0, :] if joint.size(3) == 3 else joint[..., :-2, :].flatten(2, 3)
    return query.transpose(1, 2), joint[..., -2, :].transpose(1, 2), joint[..., -1, :].transpose(1, 2)


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
        scale: as of `Attend`.
    """

    window: int | None = None
    scale: float | None = None

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
        # Whether nothing is done to queries, keys and values between the joint projection and `attend`.
        self._heads_stay = head_norm_eps is None and type(self).heads is Attention.heads
        if head_norm_eps is not None:
            self.query_norm = RMSNorm(self.head_size, eps=head_norm_eps)
            self.key_norm = RMSNorm(self.head_size, eps=head_norm_eps)

    @property
    def key_shape(self) -> tuple[int, int]:
        """Heads of keys and values on this rank, and their size: K, D."""
        return _num_local_outputs(self.qkv) // ((self.group_size + 2) * self.head_size), self.head_size

    def forward(self, hidden: Tensor, attend: Attend) -> Tensor:
        """hidden [B, T, H] -> [B, T, H]; `attend` mixes the values, see `Attend`."""
        joint, attend = self.qkv(hidden), self.layer_attend(attend)
        if self._heads_stay and hasattr(attend, "attend_joint"):
            attended = attend.attend_joint(self.by_head(joint), self.scale)  # [B, A, T, D]
            return self.output(attended.transpose(1, 2).flatten(2))
        query, key, value = self.heads(joint)
        if hasattr(self, "query_norm"):
            query, key = self.query_norm(query), self.key_norm(key)
        if self.scale is None:  # a plugin's need not know of scales
            attended = attend(query, key, value)
        else:
            attended = attend(query, key, value, scale=self.scale)
        return self.output(attended.transpose(1, 2).flatten(2))

    def heads(self, joint: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A joint projection [B, T, K (A/K + 2) D] -> queries [B, A, T, D]; keys and values, each [B, K, T, D]"""
        return separate_heads(self.by_head(joint))

    def by_head(self, joint: Tensor) -> Tensor:
        """[B, T, K (A/K + 2) D] -> [B, T, K, A/K + 2, D]"""
        return joint.unflatten(-1, (-1, self.group_size + 2, self.head_size))

    def layer_attend(self, attend: Attend) -> Attend:
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
        self_attend: from its tokens to each other.
        cross_attend: from its tokens to the encoder's.
        memory: the keys and values of the encoder's.
    """

    self_attend: Attend
    cross_attend: Attend
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
        return _num_local_outputs(self.key_value) // (2 * self.head_size), self.head_size

    def forward(self, hidden: Tensor, attend: Attend, memory: Memory) -> Tensor:
        """hidden [B, T, H] -> [B, T, H]"""
        query = self.query(hidden).unflatten(-1, (-1, self.head_size)).transpose(1, 2)  # [B, A, T, D]
        key, value = memory.read(self.keys_and_values)
        return self.output(attend(query, key, value).transpose(1, 2).flatten(2))

    def keys_and_values(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """states [B, S, H] -> [B, A, S, D] each"""
        both = self.key_value(states).unflatten(-1, (-1, 2, self.head_size)).transpose(1, 2)  # [B, A, S, 2, D]
        return both[..., 0, :], both[..., 1, :]


def _num_local_outputs(projection: nn.Module) -> int:
    weight = getattr(projection, "quantized_weight", None)  # of int8 and int4
    return int((projection.weight if weight is None else weight).size(0))  # type: ignore[operator, union-attr]
