"""Small models of `transformers`, a row for each form of a family, and what tests of their folders do with them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ftk.checkpoint.convert import convert_from, convert_to
from ftk.checkpoint.huggingface import HuggingFace, HuggingFaceConfig

transformers = pytest.importorskip("transformers", reason="needs transformers (pip install ftk[test])")


ENDS = {"bos_token_id": 0, "eos_token_id": 0}
GPT = {"n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 99, "n_positions": 64, **ENDS}


def gpt2(**options: Any) -> Any:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT, **options))


def gptj(**options: Any) -> Any:
    return transformers.GPTJForCausalLM(transformers.GPTJConfig(**GPT, rotary_dim=6, n_inner=48, **options))


SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 99}
SMALL |= {"num_key_value_heads": 2, "max_position_embeddings": 64, **ENDS}


def decoder(name: str, **options: Any) -> Callable[[], Any]:
    """A small model of `transformers`, by the beginning of its classes' names."""

    def build() -> Any:
        config = getattr(transformers, f"{name}Config")(**SMALL | options)
        return getattr(transformers, f"{name}ForCausalLM")(config)

    return build


def opt(**options: Any) -> Callable[[], Any]:
    """No padding token: `transformers` gives its row no gradient."""

    def build() -> Any:
        shape = {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 99}
        tokens = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
        config = transformers.OPTConfig(**shape, **tokens, max_position_embeddings=64, **options)
        return transformers.OPTForCausalLM(config)

    return build


def encoder(name: str, kind: str = "ForMaskedLM", **options: Any) -> Callable[[], Any]:
    """Rows of padding have gradients like others, which `transformers` leaves out."""

    def build() -> Any:
        shape = {key: value for key, value in SMALL.items() if key not in ("num_key_value_heads", "bos_token_id")}
        config = getattr(transformers, f"{name}Config")(**shape | options)
        model = getattr(transformers, f"{name}{kind}")(config)
        for module in model.modules():
            if isinstance(module, torch.nn.Embedding):
                module.padding_idx = None
        return model

    return build


def t5(name: str, own_head: bool = False, **options: Any) -> Callable[[], Any]:
    """Heads that together are not as wide as H, and distances beyond the last bucket."""

    def build() -> Any:
        shape = {"d_model": 32, "d_kv": 6, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4}
        buckets = {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 20}
        config = getattr(transformers, f"{name}Config")(**shape, **buckets, vocab_size=99, **options)
        model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
        if own_head:  # the configuration no longer says so, the files do
            model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
        return model

    return build


def from_fairseq(name: str, bias: bool = False, **options: Any) -> Callable[[], Any]:
    """No row of padding among the tokens: `transformers` gives it no gradient and no place."""

    def build() -> Any:
        heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_position_embeddings": 64}
        shape = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 3, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
        shape |= {"vocab_size": 100} if name == "Bart" else {"src_vocab_size": 100, "tgt_vocab_size": 100}
        shape |= {"decoder_layers": 2} if name == "FSMT" else {}
        shape |= {"pad_token_id": 99, "forced_eos_token_id": None, "num_beams": 1}
        config = getattr(transformers, f"{name}Config")(**{**shape, **heads, **options})
        model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
        if bias:
            torch.nn.init.normal_(model.final_logits_bias)
        for table in ("encoder", "decoder") if name == "FSMT" else ():
            getattr(model.model, table).embed_positions.requires_grad_(False)
        return model

    return build


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 16}
MSCALE = {"mscale": 0.7, "mscale_all_dim": 1.0, "truncate": False}


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}


FAMILIES: dict[str, Callable[[], Any]] = {
    "bart": from_fairseq("Bart"),
    "bart scaled, tanh gelu, another decoder": from_fairseq(
        *("Bart", False),
        **{"scale_embedding": True, "activation_function": "gelu_new"},
        **{"decoder_ffn_dim": 40, "decoder_attention_heads": 2},
    ),
    "bart untied": from_fairseq("Bart", tie_word_embeddings=False),
    "bert": encoder("Bert", pad_token_id=0),
    "bert untied": encoder("Bert", pad_token_id=0, tie_word_embeddings=False),
    "bert relu": encoder("Bert", pad_token_id=0, hidden_act="relu"),
    "glm4": decoder("Glm", head_dim=8, pad_token_id=None),
    "glm4_0414": decoder("Glm4", head_dim=12, attention_bias=False, tie_word_embeddings=True, pad_token_id=None),
    "gpt2": gpt2,
    "gpt2 exact gelu": lambda: gpt2(activation_function="gelu"),
    "gpt2 untied, scores by layer": lambda: gpt2(tie_word_embeddings=False, scale_attn_by_inverse_layer_idx=True),
    "gptj": gptj,
    "gptj tied, relu": lambda: gptj(tie_word_embeddings=True, activation_function="relu"),
    "llama": decoder("Llama"),
    "llama tied, biases, llama3": decoder(
        "Llama", tie_word_embeddings=True, attention_bias=True, mlp_bias=True, rope_parameters=LLAMA3
    ),
    "longformer": encoder(
        "Longformer", type_vocab_size=1, pad_token_id=1, layer_norm_eps=1e-5, attention_window=[4, 12]
    ),
    "mistral": decoder("Mistral", sliding_window=None),
    "mistral window": decoder("Mistral", sliding_window=7),
    "opt": opt(),
    "opt Galactica": opt(activation_function="gelu", enable_bias=False, layer_norm_elementwise_affine=False),
    "opt post-norm, projections": opt(do_layer_norm_before=False, word_embed_proj_dim=20),
    "opt untied, projections": opt(tie_word_embeddings=False, word_embed_proj_dim=20),
    "qwen2": decoder("Qwen2", rope_parameters=YARN | MSCALE),
    "qwen2 window, dynamic": decoder(
        "Qwen2", use_sliding_window=True, sliding_window=5, max_window_layers=0, rope_parameters=DYNAMIC
    ),
    "qwen2 window from the second layer on": decoder(
        "Qwen2", use_sliding_window=True, sliding_window=5, max_window_layers=1
    ),
    "qwen3": decoder("Qwen3", head_dim=12, tie_word_embeddings=True),
    "qwen3 window in the first layer": decoder(
        "Qwen3",
        head_dim=12,
        use_sliding_window=True,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "roberta tanh gelu": encoder("Roberta", type_vocab_size=1, pad_token_id=1, hidden_act="gelu_new"),
    "roberta untied": encoder("Roberta", type_vocab_size=1, pad_token_id=1, tie_word_embeddings=False),
    "roberta": encoder("Roberta", type_vocab_size=1, pad_token_id=1, layer_norm_eps=1e-5),
    "xlm_roberta": encoder("XLMRoberta", type_vocab_size=1, pad_token_id=1, layer_norm_eps=1e-5),
    "camembert": encoder("Camembert", type_vocab_size=1, pad_token_id=1, layer_norm_eps=1e-5),
    "mt5": t5("MT5", own_head=True),
    "t5": t5("T5"),
    "t5 exact gelu": t5("T5", feed_forward_proj="gelu"),
    "t5 1.1": t5("T5", own_head=True, feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    "transformer": from_fairseq("FSMT", tie_word_embeddings=True),
    "transformer two vocabularies": from_fairseq(
        "FSMT", src_vocab_size=102, decoder_ffn_dim=40, scale_embedding=False, activation_function="gelu"
    ),
}


"""Model of ftk's -> a tiny one of `transformers` with weights of its own."""


OTHERS = {
    "bart bias": from_fairseq("Bart", bias=True),
    "bert pairs": encoder("Bert", "ForPreTraining", pad_token_id=0),
    "bert labels": encoder("Bert", "ForSequenceClassification", pad_token_id=0, num_labels=3),
    "bert number": encoder("Bert", "ForSequenceClassification", pad_token_id=0, num_labels=1, id2label={0: "stars"}),
    "bert words": encoder("Bert", "ForTokenClassification", pad_token_id=0, num_labels=3),
    "longformer labels": encoder(
        *("Longformer", "ForSequenceClassification"),
        **{"type_vocab_size": 1, "pad_token_id": 1, "layer_norm_eps": 1e-5, "attention_window": [4, 12]},
    ),
    "llama all heads": decoder("Llama", num_key_value_heads=4),
    "mt5 tied": t5("MT5"),
    "roberta labels": encoder(
        "Roberta", "ForSequenceClassification", type_vocab_size=1, pad_token_id=1, layer_norm_eps=1e-5
    ),
    "roberta words": encoder(
        "Roberta", "ForTokenClassification", type_vocab_size=1, pad_token_id=1, layer_norm_eps=1e-5
    ),
    "gpt2 plain scores": lambda: gpt2(scale_attn_weights=False, reorder_and_upcast_attn=True, n_inner=40),
    "longformer untied": encoder(
        "Longformer", type_vocab_size=1, pad_token_id=1, attention_window=[4, 12], tie_word_embeddings=False
    ),
    "t5 tied, gated, not scaled": t5("T5", feed_forward_proj="gated-silu", tie_word_embeddings=False),
    "t5 own head, scaled": t5("T5", own_head=True),
}


@cache
def drawn(family: str) -> Any:
    """All parameters drawn at random: initial zeros and ones would hide names that were mixed up."""
    torch.manual_seed(1)
    model = {**FAMILIES, **OTHERS}[family]().eval()
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.3)
    if family.startswith("bart"):  # else the last bias would decide, and many answers be equally good
        torch.nn.init.normal_(model.model.decoder.layers[-1].final_layer_norm.bias, std=0.03)
    return model


def convert(source: Path, output: Path) -> Path:
    return convert_from(HuggingFace(HuggingFaceConfig()), source, output)


def convert_back(source: Path, output: Path, max_shard_size: str = "5GB") -> Path:
    return convert_to(HuggingFace(HuggingFaceConfig(max_shard_size=max_shard_size)), "hf", source, output)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def tokens() -> torch.Tensor:
    return torch.randint(99, (3, 40), generator=torch.Generator().manual_seed(2))  # [B, T]


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    """The same folder with other tensors in its file of weights."""
    file = folder / "model.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in change(load_file(file)).items()}, file, {"format": "pt"})


def older_norms(folder: Path) -> None:
    """As in the first files of BERT: names of norms, and places among the weights."""
    last = {"weight": "gamma", "bias": "beta"}

    def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        names = {name: name.rpartition(".") for name in tensors}
        older = {name: f"{start}.{last[end]}" for name, (start, _, end) in names.items() if start.endswith("LayerNorm")}
        words = next(name for name in tensors if name.endswith("embeddings.word_embeddings.weight"))
        ids = {words.replace("word_embeddings.weight", "position_ids"): torch.arange(64)[None]}
        return {older.get(name, name): value for name, value in tensors.items()} | ids

    rewrite(folder, change)
