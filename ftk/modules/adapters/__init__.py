"""Adapters, small trained parts beside frozen layers, and their options, registered here without importing torch."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ftk.name_patterns import matches
from ftk.registry import register_adapter

if TYPE_CHECKING:
    from ftk.modules.adapters.lora import LoRA


@dataclass(kw_only=True)
class AdapterConfig:
    """Options of every adapter."""

    adapter_targets: list[str] = field(
        default_factory=list,
        metadata={
            "help": "linear layers that get an adapter: shell pattern of a layer's or a module's name, e.g. "
            "'layers.*.attention.qkv'; all in the model's blocks if none is given; behind '=' values for these layers "
            "alone (lora: 'PATTERN=RANK' or 'PATTERN=RANK/ALPHA'); of several that match a layer the last counts",
            "several": True,
            "metavar": "PATTERN",
        },
    )
    train_also: list[str] = field(
        default_factory=list,
        metadata={
            "help": "parameters that are trained besides the adapter, all others keep their values: shell pattern of "
            "a parameter's or a module's name, e.g. final_norm",
            "several": True,
            "metavar": "PATTERN",
            "resume": "optimizer",
        },
    )

    def targets(self) -> Iterator[tuple[str, str]]:
        """(pattern, what stands behind its "=", or "") of each of `adapter_targets`."""
        for target in self.adapter_targets:
            pattern, _, value = target.partition("=")
            yield pattern.strip(), value.strip()

    def value_for(self, layer: str) -> str | None:
        """What stands behind the pattern of a layer, the last one that matches its name; None: it gets no adapter."""
        if not self.adapter_targets:
            return ""
        return next((value for pattern, value in reversed([*self.targets()]) if matches(layer, pattern)), None)


@dataclass(kw_only=True)
class LoRAConfig(AdapterConfig):
    """Options of LoRA (Hu et al. 2021); scaling by the square root is Kalajdzievski 2023, DoRA Liu et al. 2024."""

    lora_rank: int = field(
        default=8, metadata={"min": 1, "help": "rank of what is added to a weight, where a layer's pattern gives none"}
    )
    lora_alpha: float = field(
        default=16.0,
        metadata={"help": "what is added is multiplied by this, and divided by the rank or its square root"},
    )
    lora_scaling: str = field(
        default="alpha_over_rank",
        metadata={
            "help": "factor on what is added; with the square root, higher ranks learn as fast as low ones",
            "choices": ("alpha_over_rank", "alpha_over_sqrt_rank"),
        },
    )
    lora_dropout: float = field(default=0.0, metadata={"help": "dropout on what the adapter reads, in [0, 1)"})
    weight_decomposed: bool = field(
        default=False, metadata={"help": "DoRA: the length of each row of a weight is trained apart from its direction"}
    )

    def validate(self) -> Iterator[str]:
        if not 0.0 <= self.lora_dropout < 1.0:
            yield f"lora_dropout is {self.lora_dropout}; it must be in [0, 1)"
        if self.lora_alpha <= 0.0:
            yield f"lora_alpha is {self.lora_alpha}; it must be above 0"
        for pattern, value in self.targets():
            if not pattern or self.rank_and_alpha(value) is None:
                yield (
                    f"adapter_targets: {pattern}={value} must be PATTERN, PATTERN=RANK or PATTERN=RANK/ALPHA, e.g. "
                    "'layers.*.attention.qkv=16/32'"
                )

    def rank_and_alpha(self, value: str) -> tuple[int, float] | None:
        """Rank and alpha of a layer with `value` behind its pattern; None where that says neither."""
        rank, _, alpha = value.partition("/")
        try:
            found = int(rank) if value else self.lora_rank, float(alpha) if alpha else self.lora_alpha
        except ValueError:
            return None
        return found if found[0] >= 1 and 0.0 < found[1] < float("inf") else None


@register_adapter("none")
def none() -> None:
    """No adapter: the weights themselves are trained."""


@register_adapter("lora", config=LoRAConfig)
def lora(config: LoRAConfig) -> LoRA:
    """`ftk.modules.adapters.lora.LoRA(config)`."""
    made: LoRA = importlib.import_module("ftk.modules.adapters.lora").LoRA(config)
    return made
