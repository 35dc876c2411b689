"""The options that transformers of several families share, with their meaning, units and limits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from ftk.config.options import option
from ftk.registry import ATTENTIONS, Recipe, register_architecture, register_model

ACTIVATION_NAMES = ("gelu_tanh", "gelu", "relu", "silu")
"""Of `ftk.modules.feed_forward.ACTIVATIONS`, which needs torch."""


@dataclass(kw_only=True)
class TransformerConfig:
    """The shape of a transformer and its dropout. `vocab_size` counts the padded vocabulary.

    Attributes:
        tie_embeddings: whether the token embedding is the output layer too; a family may make an option of it.
        activation: of the feed-forward network (`ftk.modules.feed_forward.ACTIVATIONS`); the same holds.
    """

    tie_embeddings: ClassVar[bool] = True
    activation: ClassVar[str] = "gelu_tanh"

    vocab_size: int = option(
        30592,
        "rows of the token embedding, padding included; taken from the tokenizer in training",
        min=1,
        max=10**8,
        unit="tokens",
        derived=True,
    )
    num_layers: int = option(12, "transformer layers", min=1, max=10**4)
    hidden_size: int = option(768, "width of the residual path", min=1, max=10**6)
    num_attention_heads: int = option(12, "attention heads; must divide hidden_size", min=1, max=10**5)
    max_positions: int = option(512, "longest sequence that the model reads", min=1, max=10**8, unit="tokens")
    ffn_hidden_size: int | None = option(
        None, "inner width of the feed-forward network; 4 * hidden_size if not given", min=1, max=10**7
    )
    embedding_dropout: float = option(0.1, "dropout of the summed embeddings", "[0, 1)")
    attention_dropout: float = option(0.1, "dropout of attention weights", "[0, 1)")
    dropout: float = option(0.1, "dropout of each attention and feed-forward output", "[0, 1)")
    layer_drop: float = option(0.0, "probability with which training skips a layer (LayerDrop)", "[0, 1)")
    stochastic_depth: float = option(
        0.0,
        "probability with which training drops an attention or feed-forward output of the last layer for a "
        "sample; that of earlier layers is proportional to their number",
        "[0, 1)",
    )
    attention: str = option(
        "auto",
        "how attention is computed; no property of the weights: sdpa (torch's fused kernels), flex (skips "
        "empty blocks of the mask; CUDA, no attention dropout), varlen (flash kernels without a mask; CUDA, half "
        "precision), eager (single operators), banded (for windows), auto (varlen or flex where they can)",
        resume="free",
        choices=lambda: ("auto", *ATTENTIONS.names()),
    )
    layer_norm_eps: float = option(1e-5, "added to the variance in layer norms", "(0, inf)")
    end_tokens: list[int] = option(
        [],
        "ids of additional end-of-sequence tokens; the tokenizer's own always counts",
        resume="free",
        max=10**8,
        derived=True,
    )
    init_std: float = option(
        0.02, "standard deviation of initial weights; output layers divide it by sqrt(2 * num_layers)", "(0, inf)"
    )

    @property
    def embedding_rows(self) -> int:
        """Of the token embedding."""
        return self.vocab_size

    @property
    def embedding_size(self) -> int:
        """Width of the token embedding and of what the output layer reads."""
        return self.hidden_size

    @property
    def first_position_row(self) -> int:
        """Row of position 0 in a table of positions; those before it belong to padding."""
        return 0

    @property
    def inner_size(self) -> int:
        """Inner width of the feed-forward network."""
        return 4 * self.hidden_size if self.ffn_hidden_size is None else self.ffn_hidden_size

    @property
    def kv_heads(self) -> int:
        """K: key heads."""
        return self.num_attention_heads

    @property
    def head_dim(self) -> int | None:
        """Size of a head in families that choose it; None: it follows from the width."""
        return None

    @property
    def gated(self) -> bool:
        """Whether the feed-forward networks have gates."""
        return False

    @property
    def heads_share_width(self) -> bool:
        """Whether the heads together are as wide as the residual path."""
        return self.head_dim is None

    @property
    def head_size(self) -> int:
        """D: size of a head."""
        return self.hidden_size // self.num_attention_heads if self.head_dim is None else self.head_dim

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """How many tokens a token sees in each layer, up to itself and itself included, and in encoders as many on its
        other side; None: no limit."""
        return (None,) * self.num_layers

    @property
    def layer_multiplications(self) -> int:
        """Of one token in the matrices of one layer: around its attention, but not another one, and of the network."""
        attention = 2 * self.hidden_size * (self.num_attention_heads + self.kv_heads) * self.head_size
        return attention + (3 if self.gated else 2) * self.hidden_size * self.inner_size

    def depth_drop(self, layer: int, num_layers: int | None = None) -> float:
        """`stochastic_depth` of a layer, from 0 on: it grows linearly (Huang et al. 2016, 3).

        `num_layers`: of the list that it is in, where that is not `num_layers` of the model.
        """
        return self.stochastic_depth * (layer + 1) / (num_layers or self.num_layers)

    def validate(self) -> Iterator[str]:
        """One message for each value that is not allowed."""
        if self.heads_share_width and self.hidden_size % self.num_attention_heads:
            yield (f"num_attention_heads is {self.num_attention_heads}; it must divide hidden_size {self.hidden_size}")
        if self.attention == "flex" and self.attention_dropout > 0.0:
            yield (
                f"attention is flex, which has no dropout, and attention_dropout is {self.attention_dropout}; "
                f"give `attention_dropout` 0 or `attention` auto"
            )
        for token in self.end_tokens:
            if not 0 <= token < self.vocab_size:
                yield f"end_tokens has {token}; it must be a token of the vocabulary of {self.vocab_size}"


def activation_option(default: str) -> Any:
    """The field `activation` of a family whose models differ in it."""
    return option(
        default,
        "of the feed-forward network; gelu is the exact one, gelu_tanh its older approximation",
        choices=ACTIVATION_NAMES,
    )


def tie_option(default: bool) -> Any:
    """The field `tie_embeddings` of a family whose models differ in it."""
    return option(default, "use the token embedding as output layer too")


def ends_of(config: Any, *own: int | None) -> list[int]:
    """The tokens that end an answer: `own`, those of the tokenizer, and `end_tokens` of a model's options."""
    return [token for token in dict.fromkeys([*own, *getattr(config, "end_tokens", ())]) if token is not None]


def position_bucket_errors(num_buckets: int, max_distance: int) -> Iterator[str]:
    """One message for options of a table of position biases that are not allowed (`ftk.modules.position_bias`)."""
    if num_buckets % 2:
        yield f"num_position_buckets is {num_buckets}; it must be even"
    elif max_distance <= num_buckets // 2:
        yield f"max_position_distance is {max_distance}; it must be at least {num_buckets // 2 + 1}"


_RATES = ((64, 3e-3), (768, 6e-4), (1024, 3e-4), (1536, 2.5e-4), (2048, 2e-4), (2560, 1.6e-4), (4096, 1.2e-4))


def causal_recipe(hidden_size: int) -> Recipe:
    """What the training of a causal language model of some width starts from.

    The rate is GPT-3's for the next width that was published (Brown et al. 2020, table 2.1); not published is that of
    width 64, for first tries, whose samples are short, too.
    """
    lr = next((lr for width, lr in _RATES if hidden_size <= width), 1e-4)
    return {
        "optimizer": {"_name": "adamw", "lr": lr, "betas": [0.9, 0.95], "weight_decay": 0.1},
        "lr_scheduler": {"_name": "cosine", "warmup_ratio": 0.02, "min_lr_ratio": 0.1},
        **({"task": {"_name": "causal_lm", "seq_length": 256}} if hidden_size <= 64 else {}),
    }


def register_family(
    name: str,
    config_type: type[TransformerConfig],
    model_class: str,
    *,
    task: str = "causal_lm",
    recipe: Callable[[int], Recipe] = causal_recipe,
    **common: Any,
) -> Callable[..., None]:
    """Registers a model; for a family's `__init__`, without importing torch.

    Args:
        name: of the model.
        config_type: its options.
        model_class: "module:class", imported when a model is built as `class(config, seed)`.
        task: that it usually learns.
        recipe: hidden_size -> what its training starts from.
        common: options of all its sizes.

    Returns:
        (architecture, num_layers, hidden_size, num_heads, inner_size=None, own_recipe=None, **options) -> None:
        registers a size; `own_recipe` instead of what `recipe` gives.
    """

    def register_size(
        architecture: str,
        num_layers: int,
        hidden_size: int,
        num_heads: int,
        inner_size: int | None = None,
        own_recipe: Recipe | None = None,
        **options: Any,
    ) -> None:
        def preset() -> TransformerConfig:
            shape = {"num_layers": num_layers, "hidden_size": hidden_size, "num_attention_heads": num_heads}
            return config_type(**{**shape, "ffn_hidden_size": inner_size, **common, **options})

        preset.__module__ = config_type.__module__  # it is the family that registers
        register_architecture(architecture, model=name, recipe=own_recipe or recipe(hidden_size))(preset)

    register_model(name, config=config_type, task=task)(model_class)
    return register_size
