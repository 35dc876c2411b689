"""The presets have the published sizes."""

from __future__ import annotations

import pytest
import torch

from ftk.builtins import BUILTIN_MODULES
from ftk.errors import UserError
from ftk.models import build_model, model_config

# layers, hidden size, heads, positions, padded vocabulary, parameters in millions
GLM = {
    "glm_tiny": (4, 64, 4, 512, 30592, 2),
    "glm_base": (12, 768, 12, 512, 30592, 109),
    "glm_large": (24, 1024, 16, 512, 30592, 335),
    "glm_large_chinese": (24, 1024, 16, 1024, 50048, 356),
    "glm_roberta_large": (24, 1024, 16, 512, 50304, 355),
    "glm_410m": (30, 1024, 16, 512, 30592, 410),
    "glm_515m": (30, 1152, 18, 512, 30592, 515),
    "glm_2b": (36, 2048, 32, 1024, 50304, 1920),
    "glm_10b": (48, 4096, 64, 1024, 50304, 9880),
    "glm_10b_chinese": (48, 4096, 64, 1024, 50048, 9879),
}

PARAMETERS = {
    "bart_base": 139_420_416,
    "bart_large": 406_291_456,
    "bert_base": 109_514_298,
    "bert_base_cased": 108_340_804,
    "bert_base_chinese": 102_290_312,
    "bert_base_multilingual": 177_974_523,
    "bert_large": 335_174_458,
    "bert_large_cased": 333_610_308,
    "chatglm_6b": 6_173_286_400,
    "chatglm2_6b": 6_243_584_000,
    "cpm1_large": 2_491_171_328,
    "cpm2_large": 11_087_097_856,
    "cpmant_10b": 9_517_453_312,
    "cpm_large": 2_597_073_920,
    "cpm_medium": 334_080_000,
    "cpm_small": 108_882_432,
    "glm_130b": 128_697_794_560,
    "glm4_9b": 9_399_951_360,
    "glm4_0414_9b": 9_400_279_040,
    "glm4_0414_32b": 32_566_081_536,
    "gpt2": 124_439_808,
    "gpt2_large": 774_030_080,
    "gpt2_medium": 354_823_168,
    "gpt2_xl": 1_557_611_200,
    "gptj_6b": 6_050_882_784,
    "llama_7b": 6_738_415_616,
    "llama_13b": 13_015_864_320,
    "llama_33b": 32_528_943_616,
    "llama_65b": 65_285_660_672,
    "llama2_7b": 6_738_415_616,
    "llama2_13b": 13_015_864_320,
    "llama2_70b": 68_976_648_192,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_1_8b": 8_030_261_248,
    "llama3_1_70b": 70_553_706_496,
    "llama3_1_405b": 405_853_388_800,
    "llama3_2_1b": 1_235_814_400,
    "llama3_2_3b": 3_212_749_824,
    "longformer_base_4096": 148_711_257,
    "longformer_large_4096": 434_653_273,
    "mistral_7b_v0_1": 7_241_732_096,
    "mistral_7b": 7_241_732_096,
    "mistral_7b_v0_3": 7_248_023_552,
    "opt_125m": 125_239_296,
    "opt_350m": 331_196_416,
    "opt_1_3b": 1_315_758_080,
    "opt_2_7b": 2_651_596_800,
    "opt_6_7b": 6_658_473_984,
    "opt_13b": 12_853_473_280,
    "opt_30b": 29_974_540_288,
    "opt_66b": 65_719_701_504,
    "opt_175b": 174_604_468_224,
    "roberta_base": 124_697_433,
    "roberta_large": 355_412_057,
    "xlm_roberta_base": 278_295_186,
    "xlm_roberta_large": 560_142_482,
    "camembert_base": 110_655_493,
    "camembert_large": 336_695_557,
    "qwen2_0_5b": 494_032_768,
    "qwen2_1_5b": 1_543_714_304,
    "qwen2_5_3b": 3_085_938_688,
    "qwen2_7b": 7_615_616_512,
    "qwen2_5_14b": 14_770_033_664,
    "qwen2_5_32b": 32_763_876_352,
    "qwen2_72b": 72_706_203_648,
    "qwen3_0_6b": 596_049_920,
    "qwen3_1_7b": 1_720_574_976,
    "qwen3_4b": 4_022_468_096,
    "qwen3_8b": 8_190_735_360,
    "qwen3_14b": 14_768_307_200,
    "qwen3_32b": 32_762_123_264,
    "mt5_base": 582_401_280,
    "mt5_large": 1_229_581_312,
    "mt5_small": 300_176_768,
    "mt5_xl": 3_742_619_648,
    "mt5_xxl": 12_921_057_280,
    "t5_11b": 11_307_321_344,
    "t5_1_1_base": 247_577_856,
    "t5_1_1_large": 783_150_080,
    "t5_1_1_small": 76_961_152,
    "t5_1_1_xl": 2_849_757_184,
    "t5_1_1_xxl": 11_135_332_352,
    "t5_3b": 2_851_598_336,
    "t5_base": 222_903_552,
    "t5_large": 737_668_096,
    "t5_small": 60_506_624,
    "transformer_iwslt_de_en": 65_097_728,
    "transformer_wmt_en_de": 60_915_712,
    "transformer_wmt_en_de_big": 209_911_808,
}
"""Of the published weights, tied ones counted once; counted by `transformers` from their config.json."""


@pytest.mark.parametrize("name", GLM)
def test_a_glm_has_the_published_size(name: str) -> None:
    layers, hidden_size, heads, positions, vocab_size, millions = GLM[name]
    with torch.device("meta"):
        model = build_model(name)
    config = model.config
    assert (config.num_layers, config.hidden_size, config.num_attention_heads) == (layers, hidden_size, heads)
    assert (config.max_positions, config.vocab_size, config.block_positions) == (positions, vocab_size, True)
    assert config.inner_size == 4 * hidden_size
    assert (config.embedding_dropout, config.attention_dropout, config.dropout) == (0.1, 0.1, 0.1)
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, rel=0.02, abs=0.5)


def test_parameters_are_counted_as_published() -> None:
    for name, count in PARAMETERS.items():
        with torch.device("meta"):
            model = build_model(name)
        assert sum(parameter.numel() for parameter in model.parameters()) == count, name


def test_every_built_in_architecture_stands_in_a_table() -> None:
    published = {name for name in BUILTIN_MODULES["architecture"] if not name.endswith("_tiny")}
    assert published - GLM.keys() == PARAMETERS.keys()


def test_a_preset_is_made_anew_each_time() -> None:
    _, config = model_config("glm_base")
    config.num_layers = 1
    assert model_config("glm_base")[1].num_layers == 12


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("t5_tiny", {"num_decoder_layers": 0}, "t5_tiny: num_decoder_layers is 0; it must be at least 1"),
        ("cpm1_tiny", {"head_dim": 0}, "cpm1_tiny: head_dim is 0; it must be at least 1"),
        ("gptj_tiny", {"dropout": 1.0}, "gptj_tiny: dropout is 1.0; it must be at least 0 and below 1"),
        ("glm_tiny", {"num_attention_heads": 0}, "glm_tiny: num_attention_heads is 0; it must be at least 1"),
        ("opt_tiny", {"word_embedding_size": 0}, "opt_tiny: word_embedding_size is 0; it must be at least 1"),
        (
            "longformer_tiny",
            {"attention_window": [0]},
            "longformer_tiny: attention_window holds 0; it must be at least 2",
        ),
        ("llama_tiny", {"rope_scaling": "log"}, "llama_tiny: rope_scaling is 'log'; it must be one of none, linear, "),
    ],
)
def test_a_value_that_its_option_does_not_allow_is_refused_in_python_too(name, options, message):
    with pytest.raises(UserError, match=f"^{message}"):
        build_model(name, **options)
