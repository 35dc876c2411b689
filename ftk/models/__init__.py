"""Models by name. Importing this module imports no torch; building a model does."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from ftk.config.options import mistakes
from ftk.errors import UserError
from ftk.registry import ARCHITECTURES, MODELS

if TYPE_CHECKING:
    from torch import nn

__all__ = ["build_model", "model_config"]


def build_model(name: str, **overrides: Any) -> nn.Module:
    """A new model with initial weights drawn from torch's current seed.

        build_model("gpt2_medium", vocab_size=50304)
        build_model("gpt2", num_layers=2, hidden_size=64, num_attention_heads=4)

    Args:
        name: an architecture or a model, as registered.
        overrides: fields of the model's config that differ from the architecture's.

    Raises:
        UserError: unknown name, unknown field, or a value that is not allowed.
    """
    model_name, config = model_config(name, **overrides)
    return MODELS.get(model_name).target(config)


def model_config(name: str, **overrides: Any) -> tuple[str, Any]:
    """The registered model behind an architecture or model name, and its config with the overrides applied.

    Args and raises: as `build_model`. Imports no torch for built-in models.
    """
    if name in ARCHITECTURES:
        entry = ARCHITECTURES.get(name)
        assert entry.model is not None, f"architecture {name} was registered without a model"
        model_name, config = entry.model, entry.target()
    elif name in MODELS:
        config_type = MODELS.get(name).config
        model_name, config = name, config_type() if config_type else None
    else:
        known = ", ".join([*ARCHITECTURES.names(), *MODELS.names()])
        raise UserError(f"unknown architecture or model {name!r}; there are: {known}")
    if overrides:
        config = _replace(name, config, overrides)
    if errors := mistakes(config):
        raise UserError(f"{name}: " + "; ".join(errors))
    return model_name, config


def _replace(name: str, config: Any, overrides: dict[str, Any]) -> Any:
    known = [field.name for field in dataclasses.fields(config)] if dataclasses.is_dataclass(config) else []
    unknown = [key for key in overrides if key not in known]
    if unknown:
        raise UserError(f"{name} has no field {unknown[0]!r}; there are: {', '.join(known) or 'none'}")
    return dataclasses.replace(config, **overrides)
