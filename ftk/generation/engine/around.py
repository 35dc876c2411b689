"""What models put around the attention to caches, such as rotation, and whether they add a bias to the scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ftk.errors import UserError
from ftk.modules.attention import Attend, identity
from ftk.registry import named


def wraps_of(model: Any, inputs: Mapping[str, Any], key_positions: Tensor | None = None) -> Callable[[Attend], Attend]:
    """What a model puts around the attention of tokens with these inputs: nothing, if it does not say.

    Args:
        inputs: of the queries.
        key_positions: int64 [B, S], for a bias of keys in caches; None: the keys are those of the queries.
    """
    around = getattr(model, "around", None)
    if around is None:
        return identity
    of_keys = {} if key_positions is None else {"key_positions": key_positions}
    return around(position_ids=inputs.get("position_ids"), **of_keys)  # type: ignore[no-any-return]


def adds_bias(model: Any, like: Tensor) -> bool:
    """Whether what a model puts around attention adds a bias to the scores.

    Args:
        like: [A, D], the shape of a key.

    Raises:
        UserError: it does, and positions are not one number for each token: those of keys in caches are not kept.
    """
    axes = getattr(model, "INPUTS", {}).get("position_ids", "B T").split()
    positions = torch.zeros([int(axis) if axis.isdigit() else 1 for axis in axes], dtype=torch.int64)
    key = like[None, :, None]  # [1, A, 1, D]
    found: list[bool] = []
    wraps_of(model, {"position_ids": positions.to(like.device)})(_BiasSeen(found))(key, key, key)
    if any(found) and axes != ["B", "T"]:
        raise UserError(
            f"{named(model)}: 'around' adds a bias to the scores, and position_ids are [{', '.join(axes)}]; generation "
            f"has such a bias for [B, T] alone"
        )
    return any(found)


class _BiasSeen(NamedTuple):
    """An `attend` that writes down whether it is given a bias, and computes nothing."""

    found: list[bool]

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *, bias: Tensor | None = None, scale: float | None = None
    ) -> Tensor:
        self.found.append(bias is not None)
        return query
