"""peft itself: it opens adapters of ftk, and ftk those that it trained, by the names of both."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

import ftk
from ftk.checkpoint.adapter import WEIGHTS
from ftk_cli.checkpoint import main as checkpoint
from tests.checkpoint.adapted import KINDS, adapted_checkpoint, logits, small_model
from tests.small_run import save_model

QKV, INNER, OUTPUT = "attention.qkv", "feed_forward.inner", "feed_forward.output"


OPTIONS = {
    "plain": {"lora_rank": 4, "lora_alpha": 12.0},
    "square root": {"lora_scaling": "alpha_over_sqrt_rank"},
    "decomposed": {"weight_decomposed": True},
    "of layers": {"adapter_targets": ["layers.*.attention.qkv=2/8", "layers.1.feed_forward"]},
    "biases": {"train_also": ["*.bias"], "adapter_targets": ["*.qkv"]},
    "factors": {"kind": "ia3", "train_also": ["*.bias"]},
    "of a head": {"arch": "bert", "train_also": ["lm_head.bias"]},  # in which other modules lie
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("base") / "base", small_model())


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_an_adapter_of_ftk_gives_the_same_logits_in_peft(tmp_path, options):
    peft = pytest.importorskip("peft")
    folder, model = adapted_checkpoint(tmp_path / "run", **options)
    opened = peft.PeftModel.from_pretrained(small_model(options.get("arch", "gpt2")), folder / "adapter").eval()
    torch.testing.assert_close(logits(opened), logits(model), rtol=1e-6, atol=1e-6)
    assert torch.equal(logits(ftk.load_model(folder, "cpu")), logits(model))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_rslora": True},
        {"use_dora": True},
        {"bias": "all"},
        {"bias": "lora_only"},
        {"rank_pattern": {"qkv": 2}, "alpha_pattern": {"qkv": 5}},
    ],
    ids=str,
)
def test_an_adapter_that_peft_trained_gives_the_same_logits_in_ftk(base, tmp_path, options):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["qkv", "inner", OUTPUT], **options)
    model = peft.get_peft_model(small_model(), config)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(2):
        model(torch.arange(40).reshape(2, 20)).square().mean().backward()
        optimizer.step()
    model.save_pretrained(tmp_path / "peft")
    assert load_file(tmp_path / "peft" / WEIGHTS)
    opened = ftk.load_model(tmp_path / "peft", "cpu", base=base)
    torch.testing.assert_close(logits(opened), logits(model.eval()), rtol=1e-6, atol=1e-6)
    assert (logits(opened) - logits(small_model())).abs().max() > 1e-4


# -- with the models of transformers ------------------------------------------------------------------------------


def hf_model(folder, arch):
    """A model of transformers with the weights of ftk's small one."""
    transformers = pytest.importorskip("transformers")
    save_model(folder / "base", small_model(arch))
    assert checkpoint(["convert", "--to", "hf", str(folder / "base"), str(folder / "hf")]) == 0
    kind = transformers.AutoModelForMaskedLM if arch == "bert" else transformers.AutoModelForCausalLM
    return kind.from_pretrained(folder / "hf", dtype=torch.float32).eval()


def hf_logits(model):
    with torch.no_grad():
        return model(torch.arange(40).reshape(2, 20)).logits


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "options"),
    [
        ("gpt2", {"train_also": ["*.bias"]}),
        ("gpt2", {"train_also": ["token_embedding"]}),  # which is the output layer, too
        ("bert", {"train_also": ["*.bias"]}),
        ("llama", {}),
        ("llama", {"weight_decomposed": True, "adapter_targets": ["layers.*.attention=2"]}),
        ("gpt2", {"kind": "ia3"}),
        ("llama", {"kind": "ia3"}),
        ("gpt2", KINDS["prefix of peft"]),
    ],
    ids=str,
)
def test_an_adapter_of_ftk_on_a_model_of_transformers(tmp_path, arch, options):
    peft = pytest.importorskip("peft")
    theirs = hf_model(tmp_path, arch)
    plain = hf_logits(theirs)
    run, model = adapted_checkpoint(tmp_path / "run", arch=arch, base=tmp_path / "hf", **options)
    assert checkpoint(["adapter", str(run), str(tmp_path / "alone"), "--names", "huggingface"]) == 0
    if arch == "bert":  # no class of peft's opens a masked language model by its adapter
        adapted = peft.PeftModel.from_pretrained(theirs, tmp_path / "alone")
    else:
        adapted = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "alone")
    found = hf_logits(adapted.eval())
    torch.testing.assert_close(found, logits(model), rtol=1e-5, atol=1e-5)
    assert (found - plain).abs().max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "kind", "options"),
    [
        ("gpt2", "LoraConfig", {"target_modules": ["c_attn", "c_fc"], "r": 4, "bias": "lora_only"}),
        (
            "opt",
            "LoraConfig",
            {"target_modules": ["fc1"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
        ),
        ("bert", "LoraConfig", {"target_modules": ["query"], "bias": "all"}),
        ("qwen2", "LoraConfig", {"target_modules": ["q_proj", "v_proj"], "bias": "lora_only"}),  # ftk's is one with k's
        ("llama", "LoraConfig", {"target_modules": ["q_proj", "v_proj", "down_proj"], "use_rslora": True}),
        ("llama", "LoraConfig", {"target_modules": r".*\.[qvo]_proj", "use_dora": True}),
        ("glm4", "LoraConfig", {"target_modules": ["gate_up_proj", "v_proj"], "use_dora": True}),
        ("glm4", "LoraConfig", {"target_modules": ["o_proj", "down_proj"], "bias": "lora_only"}),  # these have none
        ("gpt2", "IA3Config", {"target_modules": ["c_attn", "mlp.c_proj"], "feedforward_modules": ["mlp.c_proj"]}),
        (
            "llama",
            "IA3Config",
            {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
        ),
        ("gpt2", "PrefixTuningConfig", {"num_virtual_tokens": 3, "task_type": "CAUSAL_LM"}),
        (
            "gpt2",
            "PrefixTuningConfig",
            {"num_virtual_tokens": 3, "task_type": "CAUSAL_LM", "prefix_projection": True, "encoder_hidden_size": 6},
        ),
    ],
    ids=str,
)
def test_an_adapter_that_peft_trained_on_a_model_of_transformers(tmp_path, arch, kind, options):
    peft = pytest.importorskip("peft")
    theirs = hf_model(tmp_path, arch)
    plain = hf_logits(theirs)
    model = peft.get_peft_model(theirs, getattr(peft, kind)(**options))
    for number, parameter in enumerate(one for one in model.parameters() if one.requires_grad):
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
    model.save_pretrained(tmp_path / "peft")
    found = logits(ftk.load_model(tmp_path / "peft", "cpu", base=tmp_path / "base"))
    torch.testing.assert_close(found, hf_logits(model.eval()), rtol=1e-5, atol=1e-5)
    assert (found - plain).abs().max() > 1e-3
