"""Adapters, small trained parts beside frozen layers, and their options, registered here without importing torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from ftk.name_patterns import matches
from ftk.registry import register_adapter

INPUTS = "inputs"
"""Behind the pattern of a layer: (IA)^3 scales what the layer reads, not what it gives."""

IA3_OUTPUTS, IA3_INPUTS = (".attention.qkv", ".key_value"), (".feed_forward.output",)
"""Ends of the names of the layers that (IA)^3 scales by default."""


class PromptIds(NamedTuple):
    """Ids of prompt tokens, behind those of a model's own embedding.

    Attributes:
        front: of those in front of a text.
        dealt: of those that are dealt to the places of a pattern.
    """

    front: range = range(0)
    dealt: range = range(0)


@dataclass(kw_only=True)
class AdapterConfig:
    """Options of every adapter."""

    adapter_targets: list[str] = field(
        default_factory=list,
        metadata={
            "help": "layers that get an adapter: shell pattern of a layer's or a module's name, e.g. "
            "'layers.*.attention.qkv'; all in the model's blocks that the adapter is for if none is given; after '=' "
            "values for these layers alone (lora: 'PATTERN=RANK' or 'PATTERN=RANK/ALPHA'; ia3: 'PATTERN=inputs'); of "
            "several that match a layer the last counts",
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
        metadata={
            "help": "what is added is multiplied by this, and divided by the rank or its square root",
            "within": "(0, inf)",
        },
    )
    lora_scaling: str = field(
        default="alpha_over_rank",
        metadata={
            "help": "factor on what is added; with the square root, higher ranks learn as fast as low ones",
            "choices": ("alpha_over_rank", "alpha_over_sqrt_rank"),
        },
    )
    lora_dropout: float = field(default=0.0, metadata={"help": "dropout on what the adapter reads", "within": "[0, 1)"})
    weight_decomposed: bool = field(
        default=False, metadata={"help": "DoRA: the length of each row of a weight is trained apart from its direction"}
    )

    def validate(self) -> Iterator[str]:
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


@dataclass(kw_only=True)
class IA3Config(AdapterConfig):
    """Options of (IA)^3 (Liu et al. 2022, https://arxiv.org/abs/2205.05638)."""

    def value_for(self, layer: str) -> str | None:
        """Without targets: outputs of the projections to keys and values, inputs of the second feed-forward matrix."""
        if self.adapter_targets:
            return super().value_for(layer)
        if layer.endswith(IA3_OUTPUTS):
            return ""
        return INPUTS if layer.endswith(IA3_INPUTS) else None

    def validate(self) -> Iterator[str]:
        for pattern, value in self.targets():
            if not pattern or value not in ("", INPUTS):
                yield f"adapter_targets: {pattern}={value} must be PATTERN or PATTERN={INPUTS}, e.g. '*.inner'"


@dataclass(kw_only=True)
class PrefixConfig(AdapterConfig):
    """Options of prefix tuning (Li and Liang 2021), which is P-tuning v2 (Liu et al. 2022)."""

    num_virtual_tokens: int = field(
        default=20,
        metadata={"min": 1, "max": 10**6, "help": "keys and values that each layer sees besides", "unit": "tokens"},
    )
    prefix_hidden_size: int | None = field(
        default=None,
        metadata={
            "min": 1,
            "max": 10**6,
            "help": "width of the network of two layers that makes the keys and values of a layer in training; without "
            "it they are trained themselves",
        },
    )
    prefix_positions: bool = field(
        default=False,
        metadata={
            "help": "the prefix takes up the first positions, so that texts begin after them, as peft has it; for "
            "models with a table of positions"
        },
    )

    def validate(self) -> Iterator[str]:
        for pattern, value in self.targets():
            if not pattern or value:
                yield f"adapter_targets: {pattern}={value} must be PATTERN: a prefix has no values of single layers"
        if self.prefix_positions and self.adapter_targets:
            yield "prefix_positions is for a prefix of all layers; leave adapter_targets out"


@dataclass(kw_only=True)
class PTuningConfig(AdapterConfig):
    """Options of P-tuning (Liu et al. 2021): trained tokens between those of a text."""

    num_prompt_tokens: int = field(
        default=3,
        metadata={
            "min": 0,
            "max": 10**6,
            "help": "prompt tokens that are dealt to the places of a pattern, {prompt} in its text",
            "unit": "tokens",
        },
    )
    prefix_prompt: int = field(
        default=0,
        metadata={"min": 0, "max": 10**6, "help": "further ones in front of the text", "unit": "tokens"},
    )
    prompt_encoder: str = field(
        default="lstm",
        metadata={
            "help": "what makes the prompt tokens' embeddings of trained ones: an LSTM and a network of two layers, "
            "this network alone, or nothing",
            "choices": ("lstm", "mlp", "none"),
        },
    )

    def validate(self) -> Iterator[str]:
        if self.adapter_targets:
            yield "adapter_targets: P-tuning is for the token embedding alone; leave them out"
        if self.num_prompt_tokens + self.prefix_prompt == 0:
            yield "num_prompt_tokens is 0; without prefix_prompt it must be 1 or more"

    def prompt_ids(self, first: int) -> PromptIds:
        """The ids of the prompt tokens, of which `first` is the first."""
        start = first + self.prefix_prompt
        return PromptIds(range(first, start), range(start, start + self.num_prompt_tokens))


@register_adapter("none")
def none() -> None:
    """No adapter: the weights themselves are trained."""


register_adapter("lora", config=LoRAConfig)("ftk.modules.adapters.lora:LoRA")
register_adapter("ia3", config=IA3Config)("ftk.modules.adapters.ia3:IA3")
register_adapter("prefix", config=PrefixConfig)("ftk.modules.adapters.prefix:PrefixTuning")
register_adapter("p_tuning", config=PTuningConfig)("ftk.modules.adapters.p_tuning:PTuning")
