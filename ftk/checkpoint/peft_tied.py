"""Tied tensors in adapters of peft, which has a copy for each module that it saves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ftk.checkpoint.adapted_model import AdaptedModel
from ftk.checkpoint.peft_forms import is_within, owner
from ftk.errors import UserError

Tensors = dict[str, Tensor]

_TIED = frozenset(("embed_tokens", "lm_head"))
"""Names of tied modules that peft can train as one; GPT-2's `wte` is none."""


def with_copies(found: Tensors, base: AdaptedModel) -> Tensors:
    """Their tensors, with those that are tied to one of them or belong to a module that is saved: peft has a copy for
    each module."""
    copies, found = base.copies(), {**found}
    while True:
        saved = {*map(owner, found)}
        more = {
            name: first
            for name, first in copies.items()
            if name not in found and (first in found or is_within(name, saved))
        }
        if not more:
            return found
        found |= {
            name: found[first].clone() if first in found else base.their_tensor(first) for name, first in more.items()
        }


def _is_tied(config: Mapping[str, Any]) -> bool:
    """Whether peft has trained tied embeddings as one."""
    saved = {str(name).rpartition(".")[2] for name in config.get("modules_to_save") or ()}
    return bool(config.get("ensure_weight_tying")) and not _TIED.isdisjoint(saved)


def without_copies(rest: Tensors, base: AdaptedModel, config: Mapping[str, Any]) -> Tensors:
    """Their tensors without those that are tied to another one.

    Args:
        config: adapter_config.json. Where peft has not trained both as one by it, what is not among the tensors has
            stayed as the base has it.

    Raises:
        UserError: two that are one tensor differ.
    """
    unread, is_tied = base.unread(), _is_tied(config)
    found = {name: tensor for name, tensor in rest.items() if name not in unread}
    for name, first in base.copies().items():
        own, other = found.pop(name, None), found.get(first)
        if is_tied or (own is None and other is None):
            if own is not None and other is None:
                found[first] = own
            continue
        own, other = (base.their_tensor(first) if tensor is None else tensor for tensor in (own, other))
        if own.shape != other.shape:  # refused as all tensors of another shape
            shape = base.their_tensor(first).shape
            found[first] = next(tensor for tensor in (other, own) if tensor.shape != shape)
        elif not torch.equal(own.float(), other.float()):
            way = ", or both as one (ensure_weight_tying)" if not _TIED.isdisjoint(first.split(".")) else ""
            raise UserError(
                f"{first} and {name} are one tensor in the model, but the adapter changes one of them; train neither "
                f"in peft{way}"
            )
    return found
