"""Adapters in peft's form: folders of others by the formula, what ftk does not have, other kinds and names."""

from __future__ import annotations

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file

import ftk
from ftk.checkpoint import load_model_tensors
from ftk.checkpoint.adapted_model import AdaptedModel
from ftk.checkpoint.adapter import FACTS, WEIGHTS, read_adapter
from ftk.checkpoint.layout import ADAPTER_CONFIG
from ftk.checkpoint.weights import weights_of
from ftk.errors import UserError
from ftk.registry import HF_MODELS
from ftk_cli.checkpoint import main as checkpoint
from tests.checkpoint.adapted import KINDS, adapted_checkpoint, logits, small_model
from tests.small_run import save_model

QKV, INNER, OUTPUT = "attention.qkv", "feed_forward.inner", "feed_forward.output"
SMALLEST = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["qkv"]}
PREFIX = {
    "peft_type": "PREFIX_TUNING",
    "num_virtual_tokens": 3,
    "num_layers": 2,
    "num_attention_heads": 4,
    "token_dim": 32,
    "num_transformer_submodules": 1,
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("base") / "base", small_model())


QUERIES = SMALLEST | {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "bias": "lora_only"}


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
    opened = read_adapter(tmp_path / "peft", AdaptedModel("gpt2", small_model().config, None, weights_of(base)))
    assert opened.adapter.config.lora_dropout == config.get("lora_dropout", 0.0)


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
    saved = {f"base_model.model.final_norm.{name}": torch.full((32,), 0.5) for name in ("weight", "bias")}
    config = SMALLEST | {"modules_to_save": ["final_norm", "score"]}  # which names it may have, as peft lists them
    opened = ftk.load_model(folder_of(tmp_path / "peft", config, parts() | saved), "cpu", base=base)
    assert (opened.final_norm.weight == 0.5).all()


FIRST = f"base_model.model.layers.0.{QKV}"


def without(key):
    return {name: tensor for name, tensor in parts().items() if name != key}


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        (SMALLEST | {"peft_type": "LOHA"}, parts(), "peft_type is 'LOHA'; ftk opens LORA, IA3, PREFIX_TUNING"),
        ({"peft_type": "IA3"}, parts(), "has no ia3_l of any layer"),
        ({"peft_type": "IA3"}, {f"{FIRST}.ia3_l": torch.ones(96)}, r"qkv.ia3_l' is \[96\]; a factor per input is"),
        (PREFIX | {"token_dim": 33}, {}, "which do not fit one stack of layers"),
        (PREFIX, {"prompt_embeddings": torch.ones(3, 64)}, r"\[3, 64\]; adapter_config.json says \[3, 128\]"),
        (
            PREFIX | {"num_layers": 1},
            {"prompt_embeddings": torch.ones(3, 64)},
            "has a prefix for 1 layer, and .* has 2",
        ),
        (SMALLEST | {"bias": "all"}, parts(), "bias is 'all', but adapter_model.safetensors has none"),
        (SMALLEST | {"lora_dropout": 1}, parts(), r"lora_dropout is 1; it must be a number in \[0, 1\)"),
        (SMALLEST | {"init_lora_weights": "pissa"}, parts(), "'init_lora_weights' is 'pissa'"),
        (SMALLEST | {"layer_replication": [[0, 1]]}, parts(), "'layer_replication' is"),
        (SMALLEST | {"of_tomorrow": 3}, parts(), "'of_tomorrow' is 3"),
        (SMALLEST | {"r": 8}, parts(), r"qkv.lora_A.weight is \[4, 32\]; adapter_config.json says rank 8"),
        (SMALLEST | {"r": "4"}, parts(), "must be numbers above 0"),
        (SMALLEST | {"lora_alpha": -1}, parts(), "must be numbers above 0"),
        (SMALLEST | {"alpha_pattern": {"(a+)+": 3}}, parts(), "is a regular expression; ftk takes names of layers"),
        (SMALLEST | {"rank_pattern": 3}, parts(), "3 is no mapping"),
        ({"peft_type": "LORA"}, {}, "has no lora_A of any layer"),
        (SMALLEST | {"modules_to_save": ["final_norm"]}, parts(), "modules_to_save name final_norm of .* is missing"),
        (PREFIX, {"prompt_embeddings": torch.ones(3, 128), "base_model.model.x": torch.ones(1)}, "unexpected .*: x"),
        (SMALLEST, without(f"{FIRST}.lora_B.weight"), "layers.0.attention.qkv.lora_B.weight is missing"),
        (SMALLEST, without(f"{FIRST}.lora_A.weight"), "layers.0.attention.qkv.lora_B.weight is no part of its layer"),
        (SMALLEST | {"use_dora": True}, parts(), "layers.0.attention.qkv.lora_magnitude_vector is missing"),
        (SMALLEST, parts() | {f"{FIRST}.lora_magnitude_vector": torch.ones(96)}, "is no part of its layer"),
        (
            SMALLEST,
            {name: tensor for name, tensor in parts().items() if "layers.0" in name},
            "target_modules name layers.1.attention.qkv of .*, for which it has no parts",
        ),
        (
            SMALLEST | {"target_modules": r"layers\.\d+\.attention\.(qkv|other)"},
            {name: tensor for name, tensor in parts().items() if "layers.0" in name},
            "target_modules name layers.1.attention.qkv of .*, for which it has no parts",
        ),
        (SMALLEST | {"target_modules": "*qkv"}, parts(), r"target_modules is '\*qkv', no regular expression \(nothing"),
        (SMALLEST, parts() | {f"{FIRST}.lora_B.weight": torch.ones(96, 3)}, r"lora_B.weight is \[96, 3\], which"),
        (SMALLEST, parts() | {f"{FIRST}.lora_B.weight": torch.ones(95, 4)}, r"weight \[95, 32\], which is \[96, 32\]"),
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
def test_damaged_files_are_named(base, tmp_path, file, content, message):
    folder = folder_of(tmp_path / "peft", SMALLEST, parts())
    (folder / file).write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_adapter(folder, AdaptedModel("gpt2", small_model().config, None, weights_of(base)))


def test_a_section_without_the_name_of_the_adapter_is_refused(tmp_path):
    folder = save_model(tmp_path / "nameless", small_model(), adapter={"lora_rank": 4})
    with pytest.raises(UserError, match="config.yaml: adapter has no _name, e.g. _name: lora"):
        ftk.load_model(folder, "cpu")


def test_a_hostile_configuration_takes_no_memory(base, tmp_path):
    folder = save_model(tmp_path / "hostile", small_model(), adapter={"_name": "lora", "lora_rank": 10**12})
    with pytest.raises(UserError, match="far larger than its tensors|cannot be built"):
        ftk.load_model(folder, "cpu")


# -- other kinds, and names of other models -----------------------------------------------------------------------


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_an_adapter_of_each_kind_opens_alone_as_in_its_checkpoint(base, tmp_path, options, capsys):
    folder, model = adapted_checkpoint(tmp_path / "run", **options)
    torch.testing.assert_close(logits(ftk.load_model(folder, "cpu")), logits(model))
    assert checkpoint(["adapter", str(folder), str(tmp_path / "alone")]) == 0
    assert "alone, for ftk's model (--names huggingface writes it for peft on" in capsys.readouterr().out
    torch.testing.assert_close(logits(ftk.load_model(tmp_path / "alone", "cpu", base=base)), logits(model))
    assert (logits(model) - logits(small_model())).abs().max() > 1e-3


def test_the_table_of_a_prefix_lies_as_peft_has_it(tmp_path):
    folder, model = adapted_checkpoint(tmp_path / "run", **KINDS["prefix of peft"])
    table = load_file(folder / "adapter" / WEIGHTS)["prompt_embeddings"]
    found = table.view(3, 4, 4, 8).permute(1, 2, 0, 3)  # peft's get_prompt: [2 L, K, n, D]
    expected = [each for layer in model.layers for each in layer.attention.prefix()]
    torch.testing.assert_close(found, torch.cat(expected).detach())
    assert json.loads((folder / "adapter" / ADAPTER_CONFIG).read_text())["peft_type"] == "PREFIX_TUNING"


def test_a_prefix_on_a_model_whose_options_name_no_heads_is_saved_without_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr("ftk.checkpoint.adapter.model_in", lambda config: ("mine", None))
    folder, model = adapted_checkpoint(tmp_path / "run", **KINDS["prefix"])
    assert not (folder / "adapter").exists()
    torch.testing.assert_close(logits(ftk.load_model(folder, "cpu")), logits(model))


def test_a_prefix_is_not_merged(tmp_path, capsys):
    folder, _ = adapted_checkpoint(tmp_path / "run", **KINDS["prefix"])
    assert checkpoint(["merge", str(folder), str(tmp_path / "plain")]) == 2
    assert (
        "run: its adapter is a prefix, which is no change of weights, and cannot be merged" in capsys.readouterr().err
    )
    assert checkpoint(["export", str(folder), str(tmp_path / "int8"), "--quantize", "int8"]) == 2
    assert "has an adapter that cannot be merged into weights, and --quantize needs" in capsys.readouterr().err


NAMED = {
    "gpt2": ({"lora_rank": 2, "train_also": ["layers.*.attention.*.bias"]}, "transformer.h.1.attn.c_attn"),
    "llama": ({"adapter_targets": ["layers.*.attention=2/6", "*.inner"]}, "model.layers.1.self_attn.v_proj"),
    "qwen2": ({"weight_decomposed": True}, "model.layers.1.mlp.gate_proj"),
    "bert": ({"lora_rank": 2}, "bert.encoder.layer.1.attention.self.query"),
    "glm": ({"lora_rank": 2}, "glm.transformer.layers.1.attention.query_key_value"),
    "glm4": ({"adapter_targets": ["*.gate=2/6", "*.inner=4"], "lora_rank": 3}, "model.layers.1.mlp.gate_up_proj"),
    "glm4 gate": ({"adapter_targets": ["*.gate"], "weight_decomposed": True}, "model.layers.1.mlp.gate_up_proj"),
    "t5": ({"lora_rank": 2}, "encoder.block.1.layer.1.DenseReluDense.wi"),
    "t5 gated": ({"lora_rank": 2, "shape": {"gated": True}}, "decoder.block.1.layer.2.DenseReluDense.wi_0"),
    "gpt2 factors": ({"kind": "ia3"}, "transformer.h.1.mlp.c_proj"),
    "chatglm2 factors": (
        {"kind": "ia3", "adapter_targets": ["*.gate"]},
        "transformer.encoder.layers.1.mlp.dense_h_to_4h",
    ),
}


@pytest.mark.parametrize(
    ("name", "options", "layer"), [(key.split()[0], *row) for key, row in NAMED.items()], ids=NAMED
)
def test_parts_by_the_names_of_hugging_face_change_its_weights_as_ours_change_ours(tmp_path, name, options, layer):
    run, model = adapted_checkpoint(tmp_path / "run", arch=name, **options)
    base = save_model(tmp_path / "base", small_model(name, **options.get("shape", {})))
    alone = tmp_path / "alone"
    assert checkpoint(["adapter", str(run), str(alone), "--names", "huggingface"]) == 0
    said, tensors = json.loads((alone / ADAPTER_CONFIG).read_text()), load_file(alone / WEIGHTS)
    assert layer in said["target_modules"]
    assert checkpoint(["merge", str(run), str(tmp_path / "merged")]) == 0
    for source in ("base", "merged"):
        assert checkpoint(["convert", "--to", "hf", str(tmp_path / source), str(tmp_path / f"{source}-hf")]) == 0
    before, after = (load_file(tmp_path / f"{source}-hf" / "model.safetensors") for source in ("base", "merged"))
    changed = {key.removesuffix(".weight") for key in before if not torch.equal(before[key], after[key])}
    assert {key.removesuffix(".bias") for key in changed} == {*said["target_modules"]}
    for layer in said["target_modules"]:
        weight, merged = (each[f"{layer}.weight"] for each in (before, after))
        weight, merged = (each.T if said["fan_in_fan_out"] else each for each in (weight, merged))
        own = {key.rpartition(f"{layer}.")[2]: one for key, one in tensors.items() if f".{layer}." in key}
        if "kind" in options:
            expected = weight * own["ia3_l"]
        else:
            rank, alpha = len(own["lora_A.weight"]), said["alpha_pattern"].get(layer, said["lora_alpha"])
            assert rank == said["rank_pattern"].get(layer, said["r"])
            expected = weight + alpha / rank * own["lora_B.weight"] @ own["lora_A.weight"]
        if said.get("use_dora"):
            expected *= (own["lora_magnitude_vector"] / expected.norm(dim=1))[:, None]
        torch.testing.assert_close(merged, expected, rtol=1e-5, atol=1e-6)
    for place in (base, tmp_path / "base-hf"):
        torch.testing.assert_close(logits(ftk.load_model(alone, "cpu", base=place)), logits(model))


def test_layers_that_are_apart_there_are_joined(tmp_path):
    plain = small_model("llama")
    base = save_model(tmp_path / "base", plain)
    assert checkpoint(["convert", "--to", "hf", str(base), str(tmp_path / "hf")]) == 0
    file = tmp_path / "hf" / "model.safetensors"
    weights, tensors, generator = load_file(file), {}, torch.Generator().manual_seed(4)
    scales = {"q_proj": 8 / 2, "v_proj": 3 / 4}  # peft's usual targets, of other ranks
    for layer, (name, rank) in ((layer, each) for layer in (0, 1) for each in (("q_proj", 2), ("v_proj", 4))):
        key = f"model.layers.{layer}.self_attn.{name}"
        weight = weights[f"{key}.weight"]
        a, b = (torch.randn(shape, generator=generator) for shape in ((rank, weight.size(1)), (len(weight), rank)))
        tensors |= {f"base_model.model.{key}.lora_A.weight": a, f"base_model.model.{key}.lora_B.weight": b}
        weight += scales[name] * b @ a
    said = SMALLEST | {"r": 2, "target_modules": ["q_proj", "v_proj"], "rank_pattern": {"v_proj": 4}}
    folder = folder_of(tmp_path / "peft", said | {"alpha_pattern": {"v_proj": 3}}, tensors)
    found = logits(ftk.load_model(folder, "cpu", base=base))
    save_file(weights, file, {"format": "pt"})
    torch.testing.assert_close(found, logits(ftk.load_model(tmp_path / "hf", "cpu")), rtol=1e-4, atol=1e-4)
    first = "base_model.model.model.layers.0.self_attn.q_proj"
    scores = "base_model.model.score.weight"
    for changes, also, message in (
        ({f"{first}.lora_B.weight": None}, {}, "model.layers.0.self_attn.q_proj.lora_B.weight is missing"),
        ({key: None for key in tensors if ".1.self_attn.v_proj" in key}, {}, "name model.layers.1.self_attn.v_proj of"),
        ({key: None for key in tensors if "layers.1." in key}, {}, "name model.layers.1.self_attn.[qv]_proj of"),
        ({}, {"r": 8}, r"q_proj.lora_A.weight is \[2, 32\]; adapter_config.json says rank 8"),
        (
            {f"{first}.lora_B.weight": torch.ones(1, 1)},
            {},
            r"q_proj.lora_B.weight is \[1, 1\]; .*, the model 32 outputs",
        ),
        ({}, {"modules_to_save": ["lm_head"]}, "name lm_head of the model, but lm_head.weight is missing"),
        ({scores: torch.ones(1)}, {}, "peft: parameter 'score.weight' has no place in the model"),
        (
            {first.replace("q_", "z_") + ".lora_A.weight": torch.ones(1)},
            {},
            "parts of model.layers.0.self_attn.z_proj, wh",
        ),
        (
            {f"base_model.model.layers.0.attention.qkv.lora_{part}.weight": torch.ones(1, 1) for part in "AB"},
            {},
            "names of two kinds, ftk's as layers.0.attention.qkv and Hugging Face's as model.layers.0.self_attn.q_proj",
        ),
    ):
        changed = {key: one for key, one in (tensors | changes).items() if one is not None}
        with pytest.raises(UserError, match=message):
            ftk.load_model(folder_of(folder, said | also, changed), "cpu", base=base)


@pytest.mark.parametrize(
    ("arch", "also", "saved"),
    [
        ("gpt2", "token_embedding", {"transformer.wte", "lm_head"}),
        ("bert", "lm_head.bias", {"cls.predictions"}),
        ("qwen2", "layers.0.attention.qkv.bias", set()),
    ],
)
def test_what_is_trained_besides_is_written_with_all_that_peft_saves_with_it(tmp_path, arch, also, saved):
    targets = ["layers.*.attention.qkv"]
    run, model = adapted_checkpoint(tmp_path / "run", arch=arch, train_also=[also], adapter_targets=targets)
    base = save_model(tmp_path / "base", small_model(arch))
    for names in ("ftk", "huggingface"):
        assert checkpoint(["adapter", str(run), str(tmp_path / names), "--names", names]) == 0
        torch.testing.assert_close(logits(ftk.load_model(tmp_path / names, "cpu", base=base)), logits(model))
    assert {*(json.loads((tmp_path / names / ADAPTER_CONFIG).read_text())["modules_to_save"] or ())} == saved
    if arch == "qwen2":  # as peft writes it where it trained no keys
        tensors = {key: one for key, one in load_file(tmp_path / names / WEIGHTS).items() if "k_proj" not in key}
        opened = ftk.load_model(folder_of(tmp_path / "peft", QUERIES, tensors), "cpu", base=base)
        assert opened.layers[0].attention.qkv.bias.count_nonzero() == 32 + 16  # of queries and values


@pytest.mark.parametrize("also", [{}, {"ensure_weight_tying": True}])  # which peft does not do by this name
def test_tied_tensors_that_peft_trained_apart_are_refused(base, tmp_path, also):
    key = "base_model.model.transformer.h.0.attn.c_attn.lora_{}.weight"
    tensors = {key.format("A"): torch.ones(4, 32), key.format("B"): torch.ones(96, 4)}
    tensors |= {"base_model.model.transformer.wte.weight": torch.ones(96, 32)}
    said = SMALLEST | {"target_modules": ["h.0.attn.c_attn"], "modules_to_save": ["wte"], **also}
    with pytest.raises(
        UserError,
        match="wte.weight and lm_head.weight are one tensor in the model, .* neither in peft$",
    ):
        ftk.load_model(folder_of(tmp_path / "peft", said, tensors), "cpu", base=base)


def test_names_that_there_are_not_are_refused(tmp_path, capsys):
    run, _ = adapted_checkpoint(tmp_path / "run", arch="cpm1")
    assert "cpm1" not in HF_MODELS
    assert checkpoint(["adapter", str(run), str(tmp_path / "alone"), "--names", "huggingface"]) == 2
    assert "--names huggingface: the model cpm1 has no form of Hugging Face's" in capsys.readouterr().err
    prefixed, _ = adapted_checkpoint(tmp_path / "prefixed", **KINDS["prefix"])
    assert checkpoint(["adapter", str(prefixed), str(tmp_path / "alone"), "--names", "huggingface"]) == 2
    assert "train with --prefix-positions" in capsys.readouterr().err
    assert not (tmp_path / "alone").exists()
    assert load_model_tensors(run)
