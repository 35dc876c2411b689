"""The section of a checkpoint's config.yaml that says which head its model has in the place of its output layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ftk.checkpoint.layout import HEAD
from ftk.checkpoint.load import read_config
from ftk.config.build import as_mapping, build_options
from ftk.errors import UserError
from ftk.modules.classifier import WithClassifier
from ftk.modules.heads import HeadShape


def head_section(model: Any) -> dict[str, Any]:
    """The section of a model; empty where it has its own output layer."""
    return {HEAD: dataclasses.asdict(model.classifier.shape)} if isinstance(model, WithClassifier) else {}


def head_in(config: Mapping[str, Any]) -> HeadShape | None:
    """The head of a checkpoint with this configuration; None if its model has its own output layer.

    Raises:
        UserError: its options are not known here.
    """
    section = as_mapping(HEAD, config.get(HEAD))
    if not section:
        return None
    return build_options(HEAD, HeadShape, section)


def refuse_head(folder: Path, what: str) -> None:
    """Raise a UserError if a checkpoint's model has another head: `what` needs the family's output layer."""
    if head_in(read_config(folder)) is not None:
        raise UserError(f"{folder}: has a classifier in the place of the output layer that {what} needs")
