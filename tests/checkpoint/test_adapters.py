"""Adapters in peft's form: folders of others by the formula, what ftk does not have, and peft itself where it is."""

from __future__ import annotations

import json
import math
from dataclasses import asdict

import pytest
import torch
from safetensors.torch import load_file, save_file

import ftk
from ftk.checkpoint import save_checkpoint
from ftk.checkpoint.adapter import FACTS, WEIGHTS, adapter_files_of, read_adapter
from ftk.checkpoint.layout import ADAPTER_CONFIG
from ftk.errors import UserError
from ftk.models import build_model
from ftk.modules.adapters import LoRAConfig
from ftk.modules.adapters.adapt import adapt
from ftk.modules.adapters.lora import LoRA

QKV, INNER, OUTPUT = "attention.qkv", "feed_forward.inner", "feed_forward.output"
SMALLEST = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["qkv"]}


def small_model():
    torch.manual_seed(1)
    return build_model("gpt2_tiny", vocab_size=96, num_layers=2, hidden_size=32, max_positions=32).eval()


def logits(model):
    with torch.no_grad():
        return model(torch.arange(40).reshape(2, 20))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    model = small_model()
    config = {"model": {"_name": "gpt2", **asdict(model.config)}}
    return save_checkpoint(tmp_path_factory.mktemp("base") / "base", model=model, trainer_state={}, config=config)


def parts(layers=(QKV,), rank=4, seed=2):
    """Tensors as peft names them, for the layers of both blocks."""
    generator, model, made = torch.Generator().manual_seed(seed), small_model(), {}
    for name in (f"layers.{block}.{layer}" for block in (0, 1) for layer in layers):
        outputs, inputs = model.get_parameter(f"{name}.weight").shape
        made[f"base_model.model.{name}.lora_A.weight"] = torch.randn(rank, inputs, generator=generator)
        made[f"base_model.model.{name}.lora_B.weight"] = 0.1 * torch.randn(outputs, rank, generator=generator)
    return made


def folder_of(place, config, tensors, name=WEIGHTS):
    place.mkdir(exist_ok=True)
    (place / ADAPTER_CONFIG).write_text(json.dumps(config))
    save_file(tensors, place / name)
    return place


def by_hand(tensors, scales):
    """The plain model with W + s B A; `scales`: name of a layer, or its end -> s."""
    model = small_model()
    for key in tensors:
        if key.endswith("lora_A.weight"):
            name = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            scale = next(scale for end, scale in scales.items() if name.endswith(end))
            weight = model.get_parameter(f"{name}.weight")
            weight.data += scale * tensors[key.replace("lora_A", "lora_B")] @ tensors[key]
    return logits(model)


@pytest.mark.parametrize(
    ("config", "scales"),
    [
        (SMALLEST, {"": 2.0}),
        (SMALLEST | {"use_rslora": True}, {"": 4.0}),
        (SMALLEST | {"alpha_pattern": {"1.attention.qkv": 2}}, {"1.attention.qkv": 0.5, "": 2.0}),
        (SMALLEST | {"r": 16, "rank_pattern": {"qkv": 4}}, {"": 2.0}),
        (SMALLEST | {"target_modules": ".*qkv", "init_lora_weights": "gaussian", "lora_dropout": 0.5}, {"": 2.0}),
    ],
    ids=["smallest", "square root", "alphas", "ranks", "harmless"],
)
def test_a_folder_of_peft_opens_by_the_formula(base, tmp_path, config, scales):
    tensors = parts()
    found = logits(ftk.load_model(folder_of(tmp_path / "peft", config, tensors), "cpu", base=base))
    torch.testing.assert_close(found, by_hand(tensors, scales), rtol=1e-5, atol=1e-5)
    assert (found - logits(small_model())).abs().max() > 1e-2


def test_magnitudes_of_peft_are_read(base, tmp_path):
    tensors, model = parts(), small_model()
    for block in (0, 1):
        name = f"layers.{block}.{QKV}"
        key = f"base_model.model.{name}"
        weight = model.get_parameter(f"{name}.weight").data
        changed = weight + 2.0 * tensors[f"{key}.lora_B.weight"] @ tensors[f"{key}.lora_A.weight"]
        tensors[f"{key}.lora_magnitude_vector"] = magnitude = 1.0 + torch.rand(len(weight))
        weight.copy_(magnitude[:, None] * changed / changed.norm(dim=1, keepdim=True))
    opened = ftk.load_model(folder_of(tmp_path / "peft", SMALLEST | {"use_dora": True}, tensors), "cpu", base=base)
    torch.testing.assert_close(logits(opened), logits(model), rtol=1e-5, atol=1e-5)


def test_modules_that_peft_saved_replace_those_of_the_base(base, tmp_path):
    tensors = parts() | {"base_model.model.final_norm.weight": torch.full((32,), 0.5)}
    config = SMALLEST | {"modules_to_save": ["final_norm"]}
    opened = ftk.load_model(folder_of(tmp_path / "peft", config, tensors), "cpu", base=base)
    assert (opened.final_norm.weight == 0.5).all()


FIRST = f"base_model.model.layers.0.{QKV}"


def without(key):
    return {name: tensor for name, tensor in parts().items() if name != key}


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        (SMALLEST | {"peft_type": "IA3"}, parts(), "peft_type is 'IA3'; ftk opens LORA"),
        (SMALLEST | {"bias": "all"}, parts(), "'bias' is 'all', which ftk does not have"),
        (SMALLEST | {"init_lora_weights": "pissa"}, parts(), "'init_lora_weights' is 'pissa'"),
        (SMALLEST | {"layer_replication": [[0, 1]]}, parts(), "'layer_replication' is"),
        (SMALLEST | {"of_tomorrow": 3}, parts(), "'of_tomorrow' is 3"),
        (SMALLEST | {"r": 8}, parts(), r"qkv.lora_A.weight is \[4, 32\]; adapter_config.json says rank 8"),
        (SMALLEST | {"r": "4"}, parts(), "must be numbers above 0"),
        (SMALLEST | {"lora_alpha": -1}, parts(), "must be numbers above 0"),
        (SMALLEST | {"alpha_pattern": {"(a+)+": 3}}, parts(), "is a regular expression; ftk takes names of layers"),
        (SMALLEST | {"rank_pattern": 3}, parts(), "3 is no mapping"),
        (SMALLEST, {}, "has no lora_A of any layer"),
        (SMALLEST, without(f"{FIRST}.lora_B.weight"), "layers.0.attention.qkv.lora_B.weight is missing"),
        (SMALLEST, without(f"{FIRST}.lora_A.weight"), "layers.0.attention.qkv.lora_B.weight is no part of its layer"),
        (SMALLEST | {"use_dora": True}, parts(), "layers.0.attention.qkv.lora_magnitude_vector is missing"),
        (SMALLEST, parts() | {f"{FIRST}.lora_magnitude_vector": torch.ones(96)}, "is no part of its layer"),
        (
            SMALLEST,
            {name: tensor for name, tensor in parts().items() if "layers.0" in name},
            "target_modules name layers.1.attention.qkv of .*, for which it has no lora_A",
        ),
        (SMALLEST, parts() | {f"{FIRST}.lora_B.weight": torch.ones(96, 3)}, r"lora_B.weight is \[96, 3\], which"),
        (SMALLEST, parts() | {f"{FIRST}.lora_B.weight": torch.ones(95, 4)}, r"\[95, 4\] in the checkpoint, \[96, 4\]"),
        (SMALLEST, parts() | {"layers.0.x": torch.ones(1)}, "'layers.0.x' does not begin with base_model.model."),
        (SMALLEST, parts() | {"base_model.model.head.weight": torch.ones(1)}, "unexpected in the checkpoint: head.w"),
        (SMALLEST, parts() | {
            f"base_model.model.layers.7.attention.qkv.lora_{part}.weight": torch.ones(shape)
            for part, shape in (("A", (4, 32)), ("B", (96, 4)))
        }, "has parts of layers.7.attention.qkv, which .* lacks; there are for example layers.1.attention.qkv"),
        (SMALLEST, parts() | {f"{FIRST}.lora_B.weight": torch.full((96, 4), math.nan)}, "NaN"),
    ],
)  # fmt: skip
def test_what_does_not_fit_or_ftk_does_not_have_is_refused(base, tmp_path, config, tensors, message):
    with pytest.raises(UserError, match=message):
        ftk.load_model(folder_of(tmp_path / "peft", config, tensors), "cpu", base=base)


def test_a_pickled_adapter_is_refused_with_the_reason(base, tmp_path):
    folder = folder_of(tmp_path / "peft", SMALLEST, parts(), "adapter_model.bin")
    with pytest.raises(UserError, match="is pickled, and opening it could run any program; save it in peft again"):
        ftk.load_model(folder, "cpu", base=base)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (ADAPTER_CONFIG, b"{", "adapter_config.json: "),
        (ADAPTER_CONFIG, b"[]", "adapter_config.json: is not an object"),
        (WEIGHTS, b"", WEIGHTS),
        (FACTS, b"{}x", FACTS),
        (FACTS, b'{"format": "ftk-adapter", "version": 2, "base_sha256": ""}', "is not what ftk writes"),
    ],
)
def test_damaged_files_are_named(tmp_path, file, content, message):
    folder = folder_of(tmp_path / "peft", SMALLEST, parts())
    (folder / file).write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_adapter(folder)


def test_a_section_without_the_name_of_the_adapter_is_refused(tmp_path):
    config = {"model": {"_name": "gpt2", **asdict(small_model().config)}, "adapter": {"lora_rank": 4}}
    folder = save_checkpoint(tmp_path / "nameless", model=small_model(), trainer_state={}, config=config)
    with pytest.raises(UserError, match="config.yaml: adapter has no _name, e.g. _name: lora"):
        ftk.load_model(folder, "cpu")


def test_a_hostile_configuration_takes_no_memory(base, tmp_path):
    config = {"model": {"_name": "gpt2", **asdict(small_model().config)}, "adapter": {"_name": "lora"}}
    config["adapter"]["lora_rank"] = 10**12
    folder = save_checkpoint(tmp_path / "hostile", model=small_model(), trainer_state={}, config=config)
    with pytest.raises(UserError, match="far larger than its tensors|cannot be built"):
        ftk.load_model(folder, "cpu")


# -- with peft itself ---------------------------------------------------------------------------------------------


OPTIONS = {
    "plain": {"lora_rank": 4, "lora_alpha": 12.0},
    "square root": {"lora_scaling": "alpha_over_sqrt_rank"},
    "decomposed": {"weight_decomposed": True},
    "of layers": {"adapter_targets": ["layers.*.attention.qkv=2/8", "layers.1.feed_forward"]},
}


def adapted_checkpoint(place, **options):
    """A checkpoint of the base with an adapter that has learned something, and its model."""
    model = small_model()
    adapt(model, LoRA(LoRAConfig(**options)), seed=1)
    for name, parameter in model.named_parameters():
        if "lora" in name:
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
    config = {"model": {"_name": "gpt2", **asdict(model.config)}, "adapter": {"_name": "lora", **options}}
    files = adapter_files_of(config)
    return save_checkpoint(place, model=model, trainer_state={}, config=config, adapter_files=files), model


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_an_adapter_of_ftk_gives_the_same_logits_in_peft(tmp_path, options):
    peft = pytest.importorskip("peft")
    folder, model = adapted_checkpoint(tmp_path / "run", **options)
    opened = peft.PeftModel.from_pretrained(small_model(), folder / "adapter").eval()
    torch.testing.assert_close(logits(opened), logits(model), rtol=1e-6, atol=1e-6)
    assert torch.equal(logits(ftk.load_model(folder, "cpu")), logits(model))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{}, {"use_rslora": True}, {"use_dora": True}, {"rank_pattern": {"qkv": 2}, "alpha_pattern": {"qkv": 5}}],
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
