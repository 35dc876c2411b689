"""GPT-J in Hugging Face's form."""

from __future__ import annotations

from typing import Any, ClassVar

from ftk.models.conversion import FamilyConverter
from ftk.models.gpt2.convert import SUMMARIES
from ftk.models.gptj import GPTJConfig
from ftk.models.renames import Rename, SeparateHeads, weight_and_bias
from ftk.registry import register_hf_model

_LAYER = "transformer.h.*."


@register_hf_model("gptj")
class GPTJConverter(FamilyConverter):
    model_type = "gptj"
    architecture = "GPTJForCausalLM"
    config_class = GPTJConfig
    used: ClassVar[dict[str, tuple[str, Any]]] = {
        "vocab_size": ("vocab_size", 50400),
        "n_layer": ("num_layers", 28),
        "n_embd": ("hidden_size", 4096),
        "n_head": ("num_attention_heads", 16),
        "n_positions": ("max_positions", 2048),
        "n_inner": ("ffn_hidden_size", None),
        "rotary_dim": ("rotary_dim", 64),
        "embd_pdrop": ("embedding_dropout", 0.0),
        "attn_pdrop": ("attention_dropout", 0.0),
        "resid_pdrop": ("dropout", 0.0),
        "layer_norm_epsilon": ("layer_norm_eps", 1e-5),
        "initializer_range": ("init_std", 0.02),
        "activation_function": ("activation", "gelu_new"),
        "tie_word_embeddings": ("tie_embeddings", False),
    }
    fixed: ClassVar[dict[str, Any]] = {"rotary": True, "scale_attn_weights": True}
    ignored = ("n_ctx", *SUMMARIES)
    output_layer = ("head.", "logits_bias.")
    embedding = "transformer.wte.weight"
    prefix = "transformer."
    renames = (
        Rename(("token_embedding.weight",), ("transformer.wte.weight",)),
        *weight_and_bias("layers.*.norm", f"{_LAYER}ln_1"),
        Rename(
            ("layers.*.attention.qkv.weight",),
            tuple(f"{_LAYER}attn.{part}_proj.weight" for part in "qkv"),
            SeparateHeads(),
        ),
        Rename(("layers.*.attention.output.weight",), (f"{_LAYER}attn.out_proj.weight",)),
        *weight_and_bias("layers.*.feed_forward.inner", f"{_LAYER}mlp.fc_in"),
        *weight_and_bias("layers.*.feed_forward.output", f"{_LAYER}mlp.fc_out"),
        *weight_and_bias("final_norm", "transformer.ln_f"),
        Rename(("head.weight", "head.bias"), ("lm_head.weight", "lm_head.bias")),
        Rename(("logits_bias.bias",), ("lm_head.bias",)),  # of the token embedding as output layer
    )
    buffers = tuple(f"{_LAYER}attn.{name}" for name in ("bias", "masked_bias", "embed_positions"))  # of older files
