"""Configurations of Hugging Face's folders: of published models, of older releases, and what has no place in them."""

from __future__ import annotations

import copy
import json
import math
import shutil
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ftk
from ftk.errors import UserError
from ftk.models import build_model, model_config
from ftk.registry import HF_MODELS
from ftk.tokenizers import build_tokenizer
from tests.checkpoint.damage import edit_json
from tests.checkpoint.hf_models import LLAMA3, contents, convert, convert_back, drawn, tokens
from tests.records import assert_near
from tests.small_run import save_model

transformers = pytest.importorskip("transformers", reason="needs transformers (pip install ftk[test])")


@pytest.mark.parametrize(("family", "start", "end"), [("bart", 2, 2), ("t5", 0, 1)], ids=["bart", "t5"])
def test_the_first_token_that_generation_config_forces_is_read_and_written(family, start, end, tmp_path) -> None:
    """`transformers` 5 leaves it out of config.json, and reads it there where it finds no generation_config.json."""
    theirs = copy.deepcopy(drawn(family))
    theirs.generation_config.update(forced_bos_token_id=7, decoder_start_token_id=start)
    theirs.save_pretrained(tmp_path / "theirs")
    assert "forced_bos_token_id" not in json.loads((tmp_path / "theirs" / "config.json").read_text())
    model = ftk.load_model(convert(tmp_path / "theirs", tmp_path / "ours"))
    assert (model.config.decoder_start_token, model.config.forced_first_token) == (start, 7)
    assert model.config.end_tokens == [end]
    assert contents(convert_back(tmp_path / "ours", tmp_path / "back")) == contents(tmp_path / "theirs")
    save_model(tmp_path / "trained", model)
    written = type(theirs).from_pretrained(convert_back(tmp_path / "trained", tmp_path / "hf")).generation_config
    found = written.decoder_start_token_id, written.forced_bos_token_id, written.eos_token_id
    assert found == (start, 7, end)


LOST = {
    ("opt_tiny", "layer_norm_eps"): 1e-6,
    ("bart_tiny", "layer_norm_eps"): 1e-6,
    ("transformer_tiny", "layer_norm_eps"): 1e-6,
    ("transformer_tiny", "norm_first"): True,
    ("glm_tiny", "ffn_hidden_size"): 80,
    ("roberta_tiny", "next_sentence"): True,
    ("chatglm2_tiny", "rope_scaling"): "linear",
    ("chatglm2_tiny", "rotary_share"): 0.25,
    ("chatglm2_tiny", "tie_embeddings"): True,
    ("mt5_small", "scale_outputs"): True,
}
EFFECTLESS = {("llama_tiny", "rope_factor"): 4.0, ("t5_tiny", "gate_activation"): "silu"}


@pytest.mark.parametrize(("arch", "name"), LOST)
def test_an_option_that_their_form_has_not_is_refused_and_nothing_written(tmp_path, arch, name) -> None:
    more = {"hidden_size": 32, "ffn_hidden_size": 40} if arch == "mt5_small" else {}
    save_model(tmp_path / "ours", build_model(arch, vocab_size=99, num_layers=1, **more, **{name: LOST[arch, name]}))
    option = {"ffn_hidden_size": "inner_size"}.get(name, name)
    with pytest.raises(UserError, match=f"has no place for `{option}` {LOST[arch, name]}; its models have "):
        convert_back(tmp_path / "ours", tmp_path / "theirs")
    assert not (tmp_path / "theirs").exists()


@pytest.mark.parametrize(("arch", "name"), EFFECTLESS)
def test_an_option_that_has_no_effect_is_not_missed(tmp_path, arch, name) -> None:
    save_model(tmp_path / "ours", build_model(arch, vocab_size=99, num_layers=1, **{name: EFFECTLESS[arch, name]}))
    assert (convert_back(tmp_path / "ours", tmp_path / "theirs") / "config.json").exists()


@pytest.mark.parametrize(("arch", "task"), [("bart_tiny", "denoising"), ("bert_tiny", "masked_lm")])
def test_a_tokenizer_with_sep_alone_names_it_as_the_end(tmp_path, arch, task) -> None:
    (tmp_path / "vocab.txt").write_text("\n".join(("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b")) + "\n")
    tokenizer = build_tokenizer("bert_wordpiece", path=tmp_path / "vocab.txt")
    assert tokenizer.special.eos is None
    tokenizer.save(tmp_path / "tokenizer")
    model = build_model(arch, vocab_size=7, num_layers=1)
    trained = save_model(tmp_path / "trained", model, tmp_path / "tokenizer", task={"_name": task})
    written = json.loads((convert_back(trained, tmp_path / "hf") / "config.json").read_text())
    assert (written["bos_token_id"], written["eos_token_id"], written["pad_token_id"]) == (2, 3, 0)
    assert written.get("forced_eos_token_id") == (3 if arch == "bart_tiny" else None)


# Written as in the files of the hub, of several releases of `transformers`; ends and dtypes are left out.
PUBLISHED: dict[str, dict[str, Any]] = {
    "longformer_base_4096": {
        **{"architectures": ["LongformerForMaskedLM"], "attention_mode": "longformer", "attention_window": [512] * 12},
        **{"attention_probs_dropout_prob": 0.1, "bos_token_id": 0, "eos_token_id": 2, "gradient_checkpointing": False},
        **{"hidden_act": "gelu", "hidden_dropout_prob": 0.1, "hidden_size": 768, "ignore_attention_mask": False},
        **{"initializer_range": 0.02, "intermediate_size": 3072, "layer_norm_eps": 1e-05, "sep_token_id": 2},
        **{"max_position_embeddings": 4098, "model_type": "longformer", "num_attention_heads": 12},
        **{"num_hidden_layers": 12, "pad_token_id": 1, "type_vocab_size": 1, "vocab_size": 50265},
    },
    "bart_large": {  # as that for summaries
        **{"_num_labels": 3, "activation_dropout": 0.0, "activation_function": "gelu", "add_final_layer_norm": False},
        **{"architectures": ["BartForConditionalGeneration"], "attention_dropout": 0.0, "bos_token_id": 0},
        **{"classif_dropout": 0.0, "classifier_dropout": 0.0, "d_model": 1024, "decoder_attention_heads": 16},
        **{"decoder_ffn_dim": 4096, "decoder_layerdrop": 0.0, "decoder_layers": 12, "decoder_start_token_id": 2},
        **{"dropout": 0.1, "early_stopping": True, "encoder_attention_heads": 16, "encoder_ffn_dim": 4096},
        **{"encoder_layerdrop": 0.0, "encoder_layers": 12, "eos_token_id": 2, "extra_pos_embeddings": 2},
        **{"force_bos_token_to_be_generated": True, "forced_eos_token_id": 2, "gradient_checkpointing": False},
        **{"id2label": {"0": "LABEL_0"}, "init_std": 0.02, "is_encoder_decoder": True, "label2id": {"LABEL_0": 0}},
        **{"length_penalty": 2.0, "max_length": 142, "max_position_embeddings": 1024, "min_length": 56},
        **{"model_type": "bart", "no_repeat_ngram_size": 3, "normalize_before": False, "normalize_embedding": True},
        **{"num_beams": 4, "num_hidden_layers": 12, "output_past": True, "pad_token_id": 1, "prefix": " "},
        **{"add_bias_logits": False, "scale_embedding": False, "static_position_embeddings": False},
        **{"task_specific_params": {"summarization": {"num_beams": 4}}, "use_cache": True, "vocab_size": 50264},
        **{"replacing_rate": 0, "save_step": 58, "student_decoder_layers": None, "student_encoder_layers": None},
        **{"do_blenderbot_90_layernorm": False, "kobart_version": 2.0},
    },
    "bert_base_chinese": {
        **{"architectures": ["BertForMaskedLM"], "attention_probs_dropout_prob": 0.1, "directionality": "bidi"},
        **{"hidden_act": "gelu", "hidden_dropout_prob": 0.1, "hidden_size": 768, "initializer_range": 0.02},
        **{"intermediate_size": 3072, "layer_norm_eps": 1e-12, "max_position_embeddings": 512, "model_type": "bert"},
        **{"num_attention_heads": 12, "num_hidden_layers": 12, "pad_token_id": 0, "pooler_fc_size": 768},
        **{"pooler_num_attention_heads": 12, "pooler_num_fc_layers": 3, "pooler_size_per_head": 128},
        **{"pooler_type": "first_token_transform", "type_vocab_size": 2, "vocab_size": 21128},
        **{"cell": {}, "emb_size": 768, "pre_trained": "", "structure": [], "training": ""},  # of TinyBERT's file
    },
    "t5_small": {
        **{"architectures": ["T5ForConditionalGeneration"], "d_ff": 2048, "d_kv": 64, "d_model": 512},
        **{"decoder_start_token_id": 0, "dropout_rate": 0.1, "eos_token_id": 1, "initializer_factor": 1.0},
        **{"is_encoder_decoder": True, "layer_norm_epsilon": 1e-06, "model_type": "t5", "n_positions": 512},
        **{"num_heads": 8, "num_layers": 6, "output_past": True, "pad_token_id": 0, "vocab_size": 32128},
        **{"relative_attention_num_buckets": 32, "task_specific_params": {"summarization": {"num_beams": 4}}},
    },
    "transformer_wmt_en_de_big": {  # as those of WMT 2019, in an older file
        **{"activation_dropout": 0.0, "activation_function": "relu", "add_bias_logits": False},
        **{"add_final_layer_norm": False, "architectures": ["FSMTForConditionalGeneration"], "attention_dropout": 0.1},
        **{"bos_token_id": 0, "classif_dropout": 0.0, "d_model": 1024, "decoder_attention_heads": 16},
        **{"decoder_ffn_dim": 4096, "decoder_layerdrop": 0, "decoder_layers": 6, "dropout": 0.2},
        **{"early_stopping": False, "encoder_attention_heads": 16, "encoder_emd_tok_dim": 1024},
        **{"encoder_ffn_dim": 8192, "encoder_layerdrop": 0, "encoder_layers": 6, "eos_token_id": 2},
        **{"extra_pos_embeddings": 2, "init_std": 0.02, "is_encoder_decoder": True, "langs": ["en", "de"]},
        **{"length_penalty": 1.0, "max_position_embeddings": 1024, "model_type": "fsmt", "normalize_before": False},
        **{"normalize_embedding": False, "num_beams": 5, "num_hidden_layers": 6, "pad_token_id": 1},
        **{"scale_embedding": True, "src_vocab_size": 42024, "static_position_embeddings": True},
        **{"tgt_vocab_size": 42024, "tie_word_embeddings": False},
    },
    "gpt2_medium": {
        **{"activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1},
        **{"bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02},
        **{"layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 1024, "n_head": 16},
        **{"n_layer": 24, "n_positions": 1024, "n_special": 0, "predict_special_tokens": True, "resid_pdrop": 0.1},
        **{"summary_activation": None, "summary_first_dropout": 0.1, "summary_proj_to_labels": True},
        **{"summary_type": "cls_index", "summary_use_proj": True, "vocab_size": 50257},
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    },
    "glm_large": {
        **{"_name_or_path": "BAAI/glm-large", "architectures": ["GLMModel"], "attention_dropout_prob": 0.1},
        **{"attention_scale": 1.0, "auto_map": {"AutoConfig": "configuration_glm.GLMConfig"}},
        **{"block_position_encoding": True, "checkpoint_activations": False, "checkpoint_num_layers": 1},
        **{"embedding_dropout_prob": 0.1, "hidden_size": 1024, "initializer_range": 0.02, "max_sequence_length": 512},
        **{"model_type": "glm", "num_attention_heads": 16, "num_layers": 24, "output_dropout_prob": 0.1},
        **{"output_predict": True, "parallel_output": True, "pool_token": "cls", "relative_encoding": False},
        **{"spell_func": "lstm", "spell_length": None, "vocab_size": 30592},
    },
    "opt_350m": {
        **{"_remove_final_layer_norm": False, "activation_dropout": 0.0, "activation_function": "relu"},
        **{"attention_dropout": 0.0, "do_layer_norm_before": False, "dropout": 0.1, "enable_bias": True},
        **{"ffn_dim": 4096, "hidden_size": 1024, "init_std": 0.02, "layer_norm_elementwise_affine": True},
        **{"layerdrop": 0.0, "max_position_embeddings": 2048, "model_type": "opt", "num_attention_heads": 16},
        **{"num_hidden_layers": 24, "pad_token_id": 1, "prefix": "</s>", "use_cache": True, "vocab_size": 50272},
        "word_embed_proj_dim": 512,
    },
    "gptj_6b": {
        **{"activation_function": "gelu_new", "attn_pdrop": 0.0, "embd_pdrop": 0.0, "gradient_checkpointing": False},
        **{"initializer_range": 0.02, "layer_norm_epsilon": 1e-5, "model_type": "gptj", "n_embd": 4096, "n_head": 16},
        **{"n_inner": None, "n_layer": 28, "n_positions": 2048, "resid_pdrop": 0.0, "rotary": True, "rotary_dim": 64},
        **{"scale_attn_weights": True, "summary_activation": None, "summary_first_dropout": 0.1},
        **{"summary_proj_to_labels": True, "summary_type": "cls_index", "summary_use_proj": True},
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50, "temperature": 1.0}},
        **{"tie_word_embeddings": False, "tokenizer_class": "GPT2Tokenizer", "use_cache": True, "vocab_size": 50400},
    },
    "chatglm_6b": {
        **{"_name_or_path": "THUDM/chatglm-6b", "architectures": ["ChatGLMModel"], "bos_token_id": 130004},
        **{"auto_map": {"AutoModel": "modeling_chatglm.ChatGLMForConditionalGeneration"}, "eos_token_id": 130005},
        **{"mask_token_id": 130000, "gmask_token_id": 130001, "pad_token_id": 3, "hidden_size": 4096},
        **{"inner_hidden_size": 16384, "layernorm_epsilon": 1e-05, "max_sequence_length": 2048},
        **{"model_type": "chatglm", "num_attention_heads": 32, "num_layers": 28, "position_encoding_2d": True},
        **{"transformers_version": "4.23.1", "use_cache": True, "vocab_size": 130528},
    },
    "chatglm2_6b": {
        **{"add_bias_linear": False, "add_qkv_bias": True, "apply_query_key_layer_scaling": True},
        **{"apply_residual_connection_post_layernorm": False, "architectures": ["ChatGLMModel"]},
        **{"attention_dropout": 0.0, "attention_softmax_in_fp32": True, "auto_map": {"AutoModel": "modeling_chatglm"}},
        **{"bias_dropout_fusion": True, "ffn_hidden_size": 13696, "fp32_residual_connection": False},
        **{"hidden_dropout": 0.0, "hidden_size": 4096, "kv_channels": 128, "layernorm_epsilon": 1e-05},
        **{"model_type": "chatglm", "multi_query_attention": True, "multi_query_group_num": 2},
        **{"num_attention_heads": 32, "num_layers": 28, "original_rope": True, "padded_vocab_size": 65024},
        **{"post_layer_norm": True, "quantization_bit": 0, "rmsnorm": True, "seq_length": 32768},
        **{"tie_word_embeddings": False, "use_cache": True},
    },
    "glm4_9b": {
        **{"architectures": ["GlmForCausalLM"], "attention_bias": True, "attention_dropout": 0.0, "head_dim": 128},
        **{"hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 13696},
        **{"max_position_embeddings": 8192, "model_type": "glm", "num_attention_heads": 32, "num_hidden_layers": 40},
        **{"num_key_value_heads": 2, "pad_token_id": 151329, "rms_norm_eps": 1.5625e-07, "rope_theta": 10000.0},
        **{"tie_word_embeddings": False, "use_cache": True, "vocab_size": 151552},
    },
    "glm4_0414_9b": {
        **{"architectures": ["Glm4ForCausalLM"], "attention_bias": True, "attention_dropout": 0.0, "head_dim": 128},
        **{"hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 13696},
        **{"max_position_embeddings": 32768, "model_type": "glm4", "num_attention_heads": 32, "num_hidden_layers": 40},
        **{"num_key_value_heads": 2, "pad_token_id": 151329, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05},
        **{"rope_theta": 10000.0, "tie_word_embeddings": False, "use_cache": True, "vocab_size": 151552},
    },
}

OF_FILES: dict[str, dict[str, Any]] = {
    "bart_large": {"decoder_start_token": 2, "forced_first_token": 0, "vocab_size": 50264},
    "t5_small": {"decoder_start_token": 0},
    "transformer_wmt_en_de_big": {
        **{"decoder_start_token": 2, "dropout": 0.2, "embedding_dropout": 0.2, "ffn_hidden_size": 8192},
        **{"decoder_ffn_hidden_size": 4096, "source_vocab_size": 42024, "vocab_size": 42024},
        **{"share_embeddings": "none", "first_position": 2},
    },
}
"""What a file has and its preset has not."""


@pytest.mark.parametrize("arch", PUBLISHED)
def test_a_published_config_is_that_of_its_preset(arch) -> None:
    theirs = PUBLISHED[arch]
    (converter,) = [each for name in HF_MODELS if (each := HF_MODELS.get(name).target()).matches(theirs)]
    found, preset = converter.config_from(theirs), replace(model_config(arch)[1], **OF_FILES.get(arch, {}))
    assert type(found) is type(preset)
    widths = ("kv_heads", "head_size", "inner_size", "embedding_size", "layer_windows")
    either = (
        "ffn_hidden_size",
        "decoder_ffn_hidden_size",
        "num_decoder_attention_heads",
        "num_decoder_layers",
        "word_embedding_size",
        "activation",
        "attention_window",
    )
    given = [field.name for field in fields(found) if field.name not in either]
    for name in (*widths, *given, *({"decoder_layers", "decoder_inner_size", "decoder_heads"} & {*dir(found)})):
        assert getattr(found, name) == getattr(preset, name), name


def as_chatglm2(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a GLM-4, which is the same network, as ChatGLM2's own code names and joins them."""
    names = {
        "model.embed_tokens": "transformer.embedding.word_embeddings",
        "model.layers.": "transformer.encoder.layers.",
        "model.norm": "transformer.encoder.final_layernorm",
        "self_attn.o_proj": "self_attention.dense",
        "mlp.gate_up_proj": "mlp.dense_h_to_4h",
        "mlp.down_proj": "mlp.dense_4h_to_h",
        "lm_head": "transformer.output_layer",
    }
    found = {}
    for name, tensor in tensors.items():
        if "q_proj" in name:
            parts = [tensors[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
            name, tensor = name.replace("self_attn.q_proj", "self_attention.query_key_value"), torch.cat(parts)
        elif "k_proj" in name or "v_proj" in name:
            continue
        for theirs, own in names.items():
            name = name.replace(theirs, own)
        found[name] = tensor
    return found


def test_chatglm2_is_glm4_with_other_names(publish, tmp_path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    tensors = as_chatglm2(load_file(publish("glm4") / "model.safetensors"))
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    config = {**PUBLISHED["chatglm2_6b"], "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
    config |= {"kv_channels": 8, "ffn_hidden_size": 48, "padded_vocab_size": 99, "seq_length": 64, "rope_ratio": 1}
    (source / "config.json").write_text(json.dumps(config | {"layernorm_epsilon": 1.5625e-7}))
    ours = convert(source, tmp_path / "ours")
    with torch.no_grad():
        found, expected = ftk.load_model(ours)(tokens()), drawn("glm4")(tokens()).logits
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert contents(convert_back(ours, tmp_path / "back")) == contents(source)
    converter, options = HF_MODELS.get("chatglm2").target(), ftk.load_model(ours).config
    assert converter.config_from(converter.config_to(options)) == options
    longer = converter.config_to(replace(options, rope_theta=5e5))
    assert converter.config_from(longer).rope_theta == 5e5
    assert converter.config_from(PUBLISHED["chatglm2_6b"] | GLM4_9B_CHAT).rope_theta == 5e6


GLM4_9B_CHAT = {"padded_vocab_size": 151552, "rope_ratio": 500, "num_hidden_layers": 40}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rmsnorm": False}, "rmsnorm is False; ftk's model has True"),
        ({"multi_query_attention": False}, "multi_query_attention is False; ftk's model has True"),
        ({"multi_query_attention": None}, "multi_query_attention is None; ftk's model has True"),
        ({"interleaved_qkv": True}, "interleaved_qkv is True; ftk's model has False"),
        ({"rope_ratio": 50}, 'rope_ratio is 50, .* for the former, add "rope_theta": 500000$'),
        ({"rope_ratio": 50, "rope_theta": 10000}, "rope_ratio is 50, "),
        ({"rope_ratio": "50"}, "rope_ratio is '50'; it must be a number"),
    ],
)
def test_a_chatglm2_of_another_form_is_refused(change, message) -> None:
    converter, config = HF_MODELS.get("chatglm2").target(), PUBLISHED["chatglm2_6b"]
    with pytest.raises(UserError, match=message):
        converter.config_from(config | change)


def test_a_chatglm2_without_a_word_on_its_queries_has_them_in_another_order() -> None:
    config = {key: value for key, value in PUBLISHED["chatglm2_6b"].items() if key != "multi_query_attention"}
    with pytest.raises(UserError, match="multi_query_attention is False; ftk's model has True"):
        HF_MODELS.get("chatglm2").target().config_from(config)


OLD_SPELLINGS = {
    "a theta and a scaling": (
        "llama tied, biases, llama3",
        lambda config: (
            {key: value for key, value in config.items() if key != "rope_parameters"}
            | {"rope_theta": LLAMA3["rope_theta"]}
            | {"rope_scaling": {key: value for key, value in LLAMA3.items() if key != "rope_theta"}}
        ),
    ),
    "a type of scaling and a type of numbers": (
        "llama tied, biases, llama3",
        lambda config: (
            {key: value for key, value in config.items() if key not in ("rope_parameters", "dtype")}
            | {"rope_theta": LLAMA3["rope_theta"], "torch_dtype": "float32"}
            | {
                "rope_scaling": {
                    "type" if key == "rope_type" else key: LLAMA3[key] for key in {*LLAMA3} - {"rope_theta"}
                }
            }
        ),
    ),
    "another name of its activation": ("llama all heads", lambda config: config | {"hidden_act": "swish"}),
    "no head size, no key heads": (
        "llama all heads",
        lambda config: {key: value for key, value in config.items() if key not in ("head_dim", "num_key_value_heads")},
    ),
}


@pytest.mark.parametrize(("family", "change"), OLD_SPELLINGS.values(), ids=OLD_SPELLINGS, scope="function")
def test_an_older_config_is_of_the_same_model(publish, family, change, tmp_path) -> None:
    shutil.copytree(publish(family), tmp_path / "source")
    config = json.loads((tmp_path / "source" / "config.json").read_text())
    (tmp_path / "source" / "config.json").write_text(json.dumps(change(config)))
    with torch.no_grad():
        found = ftk.load_model(convert(tmp_path / "source", tmp_path / "ours"))(tokens())
        assert_near(found, drawn(family)(tokens()).logits)


# As releases 2 to 4 wrote them, or as other programs do; SmolLM2's files have `is_llama_config`.
COMMON_KEYS: dict[str, Any] = {
    **{"add_cross_attention": False, "is_decoder": False, "tie_encoder_decoder": False, "pruned_heads": {}},
    **{"bad_words_ids": None, "forced_bos_token_id": None, "suppress_tokens": None, "sliding_window": None},
    **{"num_labels": 2, "_num_labels": 1, "torchscript": False, "use_bfloat16": False, "num_beam_groups": 1},
    **{"unsloth_version": "2024.9", "is_llama_config": True, "output_scores": False, "mask_token_id": 3},
    **{"_flash_attn_2_enabled": True, "transformers.js_config": {"dtype": "q4"}, "badwordsids": [[3]]},
    **{"author": "Heewon Jeon", "created_date": "2021-04-28", "license": "CC-BY-NC-SA 4.0"},  # KoGPT2
    **{"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"},
    **{"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity", "version": "5.1.0"}},
}


@pytest.mark.parametrize("family", ["gpt2", "llama", "roberta", "t5"])
def test_keys_that_every_config_may_have_change_nothing(publish, family) -> None:
    config = json.loads((publish(family) / "config.json").read_text())
    converter = HF_MODELS.get(family).target()
    assert converter.config_from(COMMON_KEYS | config) == converter.config_from(config)


# What older pages say to add to a config.json, which keeps its max_position_embeddings; and yarn without a factor:
# its max_position_embeddings, its scaling, more keys, our max_positions.
STRETCHED: dict[str, tuple[int, dict[str, Any], dict[str, Any], int]] = {
    "a factor": (64, {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, {}, 128),
    "a note": (16, {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "finetuned": True}, {}, 64),
    "none": (64, {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 16}, {}, 64),
    "no rounding": (64, {"rope_type": "yarn", "factor": 4.0, "truncate": None}, {}, 256),
    "linear": (16, {"type": "linear", "factor": 4.0}, {}, 64),  # the shape of vicuna-7b-v1.5-16k, as is the next one
    "linear, FastChat's length": (16, {"type": "linear", "factor": 4.0}, {"max_sequence_length": 64}, 64),
    "linear, another length": (16, {"type": "linear", "factor": 4.0}, {"max_sequence_length": 16}, 64),  # older than it
    "linear, no multiple": (34, {"rope_type": "linear", "factor": 3.0}, {"max_sequence_length": 100}, 100),
    "linear, no multiple of 7": (5, {"rope_type": "linear", "factor": 7.0}, {"max_sequence_length": 30}, 30),
    "linear, a broken factor": (19, {"rope_type": "linear", "factor": 2.3}, {}, 43),
}


@pytest.mark.parametrize(("length", "rope", "more", "positions"), STRETCHED.values(), ids=STRETCHED)
def test_a_model_reads_texts_as_long_as_its_scaling_stretches_them(
    publish, length, rope, more, positions, tmp_path
) -> None:
    source = shutil.copytree(publish("llama"), tmp_path / "source")
    own = {"max_position_embeddings": length, "rope_scaling": rope}
    edit_json(source / "config.json", **own, **more)
    model, theirs = ftk.load_model(source), transformers.AutoModelForCausalLM.from_pretrained(source)
    assert (model.config.max_positions, model.config.rope_factor) == (positions, rope["factor"] or 4.0)
    with torch.no_grad():
        assert_near(model(tokens()), theirs(tokens()).logits)
    assert contents(convert_back(convert(source, tmp_path / "ours"), tmp_path / "back")) == contents(source)
    converter = HF_MODELS.get("llama").target()
    assert converter.config_from(converter.config_to(model.config)).max_positions == positions


@pytest.mark.parametrize(("arch", "positions", "factor"), [("llama_tiny", 100, 3.0), ("glm4_9b", 30, 7.0)])
def test_a_length_that_no_linear_factor_divides_is_kept(arch, positions, factor) -> None:
    """GLM-4 and the first GLM have the same `model_type`, and the latter `max_sequence_length`."""
    name, options = model_config(arch, max_positions=positions, rope_scaling="linear", rope_factor=factor)
    written = HF_MODELS.get(name).target().config_to(options)
    assert written["max_position_embeddings"] == math.ceil(positions / factor)
    converters = [HF_MODELS.get(one).target() for one in HF_MODELS.names()]
    [converter] = [one for one in converters if one.matches(written)]
    assert converter.config_from(written).max_positions == positions


def test_dynamic_positions_end_where_they_would_be_stretched() -> None:
    options = {"num_layers": 1, "vocab_size": 99, "max_positions": 8}
    model = build_model("llama_tiny", **options, rope_scaling="dynamic", rope_factor=2.0)
    assert model(tokens()[:, :8]).isfinite().all()
    with pytest.raises(UserError, match="sequence of 9 tokens, but with `rope_scaling` dynamic"):
        model(tokens()[:, :9])
