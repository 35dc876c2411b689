"""How the layers of a GLM are shared by processes: a plan of tensor parallelism, as data."""

from __future__ import annotations

from typing import Any

from ftk.models.glm.config import GLMConfig


def tensor_parallel_plan(config: GLMConfig) -> dict[str, str | dict[str, Any]]:
    """Pattern of module names -> style (`ftk.model_parallel.tensor_parallel.plan`), with sequence parallel or without.

    As Shoeybi et al. 2019 (https://arxiv.org/abs/1909.08053): a part of the vocabulary, of the heads and of the inner
    width on each process, two sums in a layer's forward pass and two in its backward pass.
    """
    heads = {"units": config.num_attention_heads, "unit_name": "attention heads"}
    return {
        "token_embedding": "vocab_embedding",
        "position_embedding.*": {"style": "sequence", "scatter_input": True},
        "embedding_dropout": "sequence",
        "layers.*.attention_norm": "sequence",
        "layers.*.attention": {"style": "sharded", "own_random": config.attention_dropout > 0.0},
        "layers.*.attention.qkv": {"style": "column", **heads},
        "layers.*.attention.output": {"style": "row", **heads},
        "layers.*.feed_forward_norm": "sequence",
        "layers.*.feed_forward.inner": "column",
        "layers.*.feed_forward.output": "row",
        "layers.*.dropout": "sequence",
        "final_norm": {"style": "sequence", "gather_output": True},
    }
