"""Small models of `transformers` of odd but legal shapes, drawn at random: the same logits, and back byte for byte."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import ftk
from ftk.errors import UserError
from tests.checkpoint.hf_models import DYNAMIC, LLAMA3, MSCALE, YARN, contents, convert, convert_back

transformers = pytest.importorskip("transformers", reason="needs transformers (pip install ftk[test])")

ROPES = ({}, {"rope_type": "linear", "rope_theta": 321.0, "factor": 3.5}, DYNAMIC, LLAMA3, YARN, YARN | MSCALE)
ENCODERS, ENCODER_DECODERS = ("Bert", "Roberta", "XLMRoberta", "Camembert", "Longformer"), ("T5", "MT5", "Bart")
FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3", "Glm", "Glm4", "GPT2", "GPTJ", "OPT", *ENCODERS, *ENCODER_DECODERS)
REFUSED = re.compile(r"(hidden_act|activation_function) is|dimensions of a head")


def options(name: str, draw: random.Random) -> dict[str, Any]:
    """Of a configuration; those that a family does not have are dropped by `drawn`."""
    heads, layers, one = draw.choice((1, 2, 3, 4, 6)), draw.choice((1, 2, 3)), draw.choice
    hidden, divisors = heads * one((6, 8)), [count for count in range(1, heads + 1) if heads % count == 0]
    sizes = {"hidden_size": hidden, "n_embd": hidden, "d_model": hidden, "vocab_size": one((67, 99, 101, 131))}
    widths = dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "d_ff", "encoder_ffn_dim"), one((17, 33, 48)))
    depths = dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "encoder_layers"), layers)
    counts = ("num_attention_heads", "n_head", "num_heads", "encoder_attention_heads")
    places = dict.fromkeys(("max_position_embeddings", "n_positions"), one((64, 77)))
    acts = ("hidden_act", "activation_function")
    window, kinds = one((None, 2, 7, 99)), ("sliding_attention", "full_attention")
    windows: dict[str, Any] = {"sliding_window": window, "use_sliding_window": window is not None}
    windows["layer_types"] = [one(kinds) for _ in range(layers)] if window else None
    return {
        **sizes, **widths, **depths, **places, **(windows if name in ("Mistral", "Qwen2", "Qwen3") else {}),
        **dict.fromkeys(counts, heads), **(dict.fromkeys(acts, one(("gelu_new", "relu"))) if one((0, 0, 1)) else {}),
        "decoder_ffn_dim": one((17, 48)), "decoder_attention_heads": one(divisors),
        "decoder_layers": one((1, 3)), "num_decoder_layers": one((None, 1, 3)),
        "num_key_value_heads": one(divisors), "head_dim": one((6, 8, 12, 16)), "d_kv": one((5, 6, 8)), "rotary_dim": 4,
        "attention_bias": one((True, False)), "mlp_bias": one((True, False)), "tie_word_embeddings": one((True, False)),
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, **one(ROPES)},
        "scale_embedding": one((0, 0, 1)) > 0, "layer_norm_eps": one((1e-12, 1e-5)),
        "type_vocab_size": one((1, 3)), "pad_token_id": one((0, 1, 5)), "word_embed_proj_dim": one((hidden, 10, 20)),
        "do_layer_norm_before": one((True, False)), "rms_norm_eps": one((1e-6, 1e-3)),
        "attention_window": [one((4, 12)) for _ in range(layers)], "relative_attention_num_buckets": one((8, 32)),
        "feed_forward_proj": one(("relu", "gelu", "gated-gelu", "gated-silu")), "bos_token_id": 0, "eos_token_id": 2,
        "scale_attn_by_inverse_layer_idx": one((0, 0, 1)) > 0,
    }  # fmt: skip


def drawn(name: str, seed: int) -> Any:
    kind = "MaskedLM" if name in ENCODERS else "ConditionalGeneration" if name in ENCODER_DECODERS else "CausalLM"
    known = getattr(transformers, f"{name}Config")()
    given = {key: value for key, value in options(name, random.Random(seed)).items() if hasattr(known, key)}
    torch.manual_seed(seed)
    model = getattr(transformers, "GPT2LMHeadModel" if name == "GPT2" else f"{name}For{kind}")(type(known)(**given))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_odd_shapes_have_the_logits_of_transformers_or_are_refused(name: str, tmp_path: Path) -> None:
    opened = 0
    for seed in range(12):
        theirs, folder = drawn(name, seed), tmp_path / str(seed)
        theirs.save_pretrained(folder / "theirs", max_shard_size="20KB" if seed % 2 else "5GB")
        tokens = torch.randint(6, theirs.config.vocab_size, (3, 40))
        more = (tokens[:, :23],) if name in ENCODER_DECODERS else ()
        try:
            ours = convert(folder / "theirs", folder / "ours")
        except UserError as error:
            if "\n" in str(error) or not REFUSED.search(str(error)):
                raise
            continue
        with torch.no_grad():
            expected = theirs(tokens, **({"decoder_input_ids": more[0]} if more else {})).logits
            found = ftk.load_model(ours)(tokens, **({"decoder_tokens": more[0]} if more else {}))
        assert (found - expected).abs().max() <= 1e-5 * max(1.0, float(expected.abs().max())), (seed, theirs.config)
        assert contents(convert_back(ours, folder / "back")) == contents(folder / "theirs")
        opened += 1
    assert opened >= 3
