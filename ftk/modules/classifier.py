"""A head of one's own on any model: scores of classes, or one number, in the place of its output layer."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor, nn

from ftk.errors import UserError
from ftk.modules.dropout import Dropout
from ftk.modules.heads import HeadShape
from ftk.modules.initialization import Normal, declare, draw

PART = "classifier"
"""The head's name in its model."""

_STD = 0.02  # of the initial weights, in every family: scores start near 0


class Classifier(nn.Module):
    """A layer with tanh, dropout, scores: as BERT's pooler, and as the classifier of Du et al. 2022.

    Args:
        size: H, of what it reads.
        shape: which of these parts it has, and how many scores K.
    """

    weight: None = None  # no single matrix, see `ftk.modules.heads.Head`

    def __init__(self, size: int, shape: HeadShape) -> None:
        super().__init__()
        self.shape = shape
        normal = Normal(_STD)
        self.dense = declare(nn.Linear(size, size), weight=normal) if shape.head_layer else nn.Identity()
        self.activation = nn.Tanh() if shape.head_layer else nn.Identity()
        self.dropout = Dropout(shape.head_dropout)
        self.output = declare(nn.Linear(size, shape.num_outputs), weight=normal)

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [..., H] -> scores [..., K]"""
        scores: Tensor = self.output(self.dropout(self.activation(self.dense(hidden))))
        return scores


class WithClassifier(nn.Module):
    """Mixed into the class of a model that has a `Classifier` for its output layer.

    Attributes:
        replaced: names of the parts of the output layer that the model had, and has no more.
    """

    classifier: Classifier
    replaced: tuple[str, ...]

    @property
    def head(self) -> Classifier:
        """The output layer."""
        return self.classifier

    @property
    def tensor_parallel_plan(self) -> dict[str, Any]:
        """The model's; the head is whole on every rank."""
        plan: dict[str, Any] = super().tensor_parallel_plan  # type: ignore[misc]
        kept = {pattern: entry for pattern, entry in plan.items() if pattern.partition(".")[0] not in self.replaced}
        return {**kept, PART: "replicated", f"{PART}.*": "replicated"}


def replace_head(model: Any, shape: HeadShape, seed: int | None = None) -> None:
    """Put a `Classifier` on a model in the place of its output layer, in place.

    Parts of that layer are removed, but for a token embedding that is one.

    Args:
        model: has `hidden_states` and `head` (`ftk.models.base.Backbone`); also on the meta device, where no values
            are drawn.
        seed: of the initial values, which depend on it and on names alone; that of torch's generator if None.

    Raises:
        UserError: the model has no output layer apart, or a head of this kind already.
    """
    if not hasattr(model, "hidden_states") or not hasattr(model, "head"):
        raise UserError(
            f"{type(model).__name__} has no 'hidden_states' and 'head', so that its head cannot be replaced"
        )
    if isinstance(model, WithClassifier):
        raise UserError(f"{type(model).__name__} has a classifier already")
    old, first = model.head, next(model.parameters())
    parts = old if isinstance(old, tuple) else (old,)
    children = [(name, part) for name, part in model.named_children() if any(part is child for child in parts)]
    removed = tuple(name for name, part in children if not isinstance(part, nn.Embedding))
    weight = getattr(old, "weight", None)
    size = model.config.hidden_size if weight is None else weight.size(-1)
    for name in removed:
        delattr(model, name)
    model.replaced = removed
    own, kind = Classifier(size, shape).to(first.device, first.dtype), type(model)  # type: Classifier, type[nn.Module]
    model.add_module(PART, own.train(model.training))
    model.__class__ = _mixed(kind)  # type: ignore[arg-type]
    draw(model, is_of_head, seed)


def is_of_head(name: str) -> bool:
    """Whether a tensor of this name belongs to a classifier."""
    return name.startswith(f"{PART}.")


@functools.cache
def _mixed(plain: type[nn.Module]) -> type[nn.Module]:
    starts_as = {**getattr(plain, "STARTS_AS", {}), f"{PART}.": None}  # other weights lack it
    return type(plain.__name__, (WithClassifier, plain), {"__module__": plain.__module__, "STARTS_AS": starts_as})
