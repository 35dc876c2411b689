"""Autoregressive blank infilling: samples for training, and the generator that fills blanks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftk.lazy_names import lazy_names

if TYPE_CHECKING:
    from ftk.tasks.glm_blank.infill.fill import BlankFiller
    from ftk.tasks.glm_blank.infill.generator import BlankGenerator

__all__ = ["BlankFiller", "BlankGenerator"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "ftk.tasks.glm_blank.infill.fill": "BlankFiller",
        "ftk.tasks.glm_blank.infill.generator": "BlankGenerator",
    },
)
