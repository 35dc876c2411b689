"""The names of CPM-1 and CPM-2 in ModelCenter's form, and the factors that its code has in place of smaller weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from ftk.models.conversion import FamilyConverter, fields_from
from ftk.models.cpm import CPM1Config, CPM2Config
from ftk.models.renames import SAME, Layout, Rename, SeparateHeads, SeparateKeysAndValues, weights

_TABLE = "relative_attention_bias"


class Factors(NamedTuple):
    """What ModelCenter multiplies the products of matrices by, and ftk has in the matrices.

    Attributes:
        by_inputs: whether each is divided by the root of the number of its inputs (`length_scale`).
        head_power: the power of the size of a head that the products of queries are multiplied by besides.
    """

    by_inputs: bool = False
    head_power: float = 0.0

    def folded(self, layout: Layout = SAME, *, queries: bool = False) -> Layout:
        """The layout of matrices with these factors in them; `queries`: the first is that of queries."""
        power = self.head_power if queries else 0.0
        return Folded(layout, self.by_inputs, power) if self.by_inputs or power else layout


NO_FACTORS = Factors()


class Folded(NamedTuple):
    """Matrices that take in factors, in float32: in half precision they would not come back as they were."""

    layout: Layout
    by_inputs: bool
    head_power: float

    def join(self, theirs: Sequence[Tensor], config: Any) -> Sequence[Tensor]:
        factors = self._factors(theirs, config)
        return self.layout.join(
            [matrix.float() * factor for matrix, factor in zip(theirs, factors, strict=True)], config
        )

    def split(self, ours: Sequence[Tensor], config: Any) -> Sequence[Tensor]:
        theirs = self.layout.split(ours, config)
        factors = self._factors(theirs, config)
        return [matrix.float() / factor for matrix, factor in zip(theirs, factors, strict=True)]

    def _factors(self, theirs: Sequence[Tensor], config: Any) -> Iterator[float]:
        for place, matrix in enumerate(theirs):  # [out, in] each
            factor = matrix.size(-1) ** -0.5 if self.by_inputs else 1.0
            yield factor * config.head_size**self.head_power if place == 0 else factor


def stack_renames(ours: str, theirs: str, factors: Factors = NO_FACTORS) -> tuple[Rename, ...]:
    """A stack of layers and the norm behind it, as ModelCenter and CPM-Ant name them.

    Args:
        ours: what stands before `layers`.
        theirs: name of the stack.
        factors: in the matrices.
    """
    layer, block = f"{ours}layers.*", f"{theirs}.layers.*"
    matrices = {
        "attention.output": "self_att.self_attention.attention_out",
        "feed_forward.gate": "ffn.ffn.w_in.w_0",
        "feed_forward.inner": "ffn.ffn.w_in.w_1",
        "feed_forward.output": "ffn.ffn.w_out",
    }
    return (
        weights([f"{layer}.attention_norm"], [f"{block}.self_att.layernorm_before_attention"]),
        weights(
            [f"{layer}.attention.qkv"],
            [f"{block}.self_att.self_attention.project_{part}" for part in "qkv"],
            factors.folded(SeparateHeads(), queries=True),
        ),
        weights([f"{layer}.feed_forward_norm"], [f"{block}.ffn.layernorm_before_ffn"]),
        *(weights([f"{layer}.{one}"], [f"{block}.{other}"], factors.folded()) for one, other in matrices.items()),
        weights([f"{ours}final_norm"], [f"{theirs}.output_layernorm"]),
    )


def _cross_attention(factors: Factors) -> tuple[Rename, ...]:
    ours, theirs = "stacks.decoder.layers.*.cross_attention", "decoder.layers.*.cross_att"
    attention = f"{theirs}.self_attention"
    parts = [f"{attention}.project_{part}" for part in "kv"]
    return (
        weights([f"{ours}_norm"], [f"{theirs}.layernorm_before_attention"]),
        weights([f"{ours}.query"], [f"{attention}.project_q"], factors.folded(queries=True)),
        weights([f"{ours}.key_value"], parts, factors.folded(SeparateKeysAndValues())),
        weights([f"{ours}.output"], [f"{attention}.attention_out"], factors.folded()),
    )


class ModelCenterConverter(FamilyConverter, ABC):
    """One family in ModelCenter's form, whose config.json has no key for the family.

    Attributes:
        model: its name.
        layers: key of config.json that this family has, and the others have not.
        scores_scaled: whether ftk divides attention scores by the root of the size of a head.
    """

    model: ClassVar[str]
    layers: ClassVar[str]
    scores_scaled: ClassVar[bool]
    fixed: ClassVar[Mapping[str, Any]] = {
        "pos_bias_type": "relative",
        "norm_bias": False,
        "att_bias": False,
        "ffn_bias": False,
        "ffn_activate_fn": "gated_gelu",
        "proj_bias": False,
        "int8": False,
        "cls_head": None,
        "post_layer_norm": False,
    }
    ignored: ClassVar[Sequence[str]] = (
        *("emb_init_mean", "emb_init_std", "pos_init_mean", "pos_init_std", "norm_init_var", "att_init_mean"),
        *("att_init_std", "ffn_init_mean", "ffn_init_std", "proj_init_mean", "proj_init_std"),
        *("att_mask_value", "length_scale", "attn_scale", "half"),
    )

    def matches(self, config: dict[str, Any]) -> bool:
        return self.layers in config

    def config_from(self, config: dict[str, Any]) -> Any:
        values = fields_from(config, self.used, self.fixed, self.ignored)
        return self.config_class(**values, attention_dropout=values["dropout"])

    def config_to(self, config: Any) -> dict[str, Any]:
        """As the published ones are: the weights are those with both factors."""
        used = {theirs: getattr(config, name) for theirs, (name, _) in self.used.items()}
        return {**used, "dim_ff": config.inner_size, "length_scale": True, "attn_scale": True, "half": True}

    def factors(self, config: Mapping[str, Any]) -> Factors:
        """Of a config.json."""
        is_scaled = bool(config.get("attn_scale", False))
        power = (int(self.scores_scaled) - int(is_scaled)) / 2
        return Factors(bool(config.get("length_scale", False)), power)

    @abstractmethod
    def renames_of(self, config: Mapping[str, Any]) -> tuple[Rename, ...]:
        """All parameters of a model with this config.json."""


_USED: dict[str, tuple[str, Any]] = {
    "dim_model": ("hidden_size", 768),
    "num_heads": ("num_attention_heads", 12),
    "dim_head": ("head_dim", 64),
    "dim_ff": ("ffn_hidden_size", 1920),
    "dropout_p": ("dropout", 0),
    "position_bias_num_buckets": ("num_position_buckets", 32),
    "position_bias_max_distance": ("max_position_distance", 128),
    "norm_eps": ("layer_norm_eps", 1e-6),
}


class CPM1Converter(ModelCenterConverter):
    model = "cpm1"
    layers = "num_layers"
    scores_scaled = True
    config_class = CPM1Config
    used: ClassVar[Mapping[str, tuple[str, Any]]] = {
        "vocab_size": ("vocab_size", 30968),
        "num_layers": ("num_layers", 12),
        **_USED,
        "tied": ("tie_embeddings", False),
    }

    def config_from(self, config: dict[str, Any]) -> CPM1Config:
        options: CPM1Config = super().config_from(config)
        options.sees_prompt = True
        return options

    def renames_of(self, config: Mapping[str, Any]) -> tuple[Rename, ...]:
        factors = self.factors(config)
        return (
            weights(["token_embedding"], ["input_embedding"], factors.folded()),
            Rename(("position_bias.weight",), (f"position_bias.{_TABLE}",)),
            *stack_renames("", "encoder", factors),
            weights(["head"], ["output_projection"], factors.folded()),
        )


class CPM2Converter(ModelCenterConverter):
    model = "cpm2"
    layers = "num_encoder_layers"
    scores_scaled = False
    config_class = CPM2Config
    task_name = "span_corruption"
    fixed: ClassVar[Mapping[str, Any]] = {**ModelCenterConverter.fixed, "tied": False}
    used: ClassVar[Mapping[str, tuple[str, Any]]] = {
        "vocab_size": ("vocab_size", 26240),
        "num_encoder_layers": ("num_layers", 12),
        "num_decoder_layers": ("num_decoder_layers", 12),
        **_USED,
    }

    def config_from(self, config: dict[str, Any]) -> CPM2Config:
        options: CPM2Config = super().config_from(config)
        options.embedding_dropout = options.activation_dropout = 0.0
        options.decoder_start_token = 1  # `<s>` of its vocabulary, in front of each target in the pretraining
        return options

    def config_to(self, config: CPM2Config) -> dict[str, Any]:
        return {**super().config_to(config), "num_decoder_layers": config.decoder_layers}

    def renames_of(self, config: Mapping[str, Any]) -> tuple[Rename, ...]:
        factors = self.factors(config)
        return (
            weights(["token_embedding"], ["input_embedding"]),  # which `length_scale` leaves as it is
            *(
                Rename((f"stacks.{side}.position_bias.weight",), (f"position_bias_{side[:3]}.{_TABLE}",))
                for side in ("encoder", "decoder")
            ),
            *stack_renames("stacks.encoder.", "encoder", factors),
            *stack_renames("stacks.decoder.", "decoder", factors),
            *_cross_attention(factors),
            weights(["head"], ["output_projection"], factors.folded()),
        )


CONVERTERS: tuple[ModelCenterConverter, ...] = (CPM1Converter(), CPM2Converter())
