"""Adapters side by side: requests with different ones share each step, and are answered as with theirs alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ftk
from ftk.checkpoint.adapter import FACTS, WEIGHTS, base_sha256
from ftk.checkpoint.layout import ADAPTER_CONFIG
from ftk.errors import UserError
from ftk.models import build_model
from ftk.modules.adapters.adapt import linear_layers
from ftk.tokenizers import load_tokenizer
from ftk_cli.checkpoint import main as checkpoint_command
from tests.small_run import save_model

PROMPTS = ["the quick brown fox", "a lazy dog while", "old friends in silent"]
FAMILIES = {
    "glm": ("glm_tiny", "glm_blank", {"num_layers": 2}),
    "llama": ("llama_tiny", "causal_lm", {"num_layers": 2}),
    "t5": ("t5_tiny", "span_corruption", {"decoder_start_token": 0}),
}


@pytest.fixture(scope="session")
def tokenizer(made_place):
    return made_place / "run" / "checkpoint_1" / "tokenizer"


def save_adapter(folder: Path, model: torch.nn.Module, ends: tuple[str, ...], seed: int, **config: object) -> Path:
    """An adapter with random matrices on the layers with these ends."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, layer in linear_layers(model).items():
        if name.endswith(ends):
            shapes = {"lora_A": (4, layer.in_features), "lora_B": (layer.out_features, 4)}
            for part, shape in shapes.items():
                tensors[f"base_model.model.{name}.{part}.weight"] = torch.randn(shape, generator=generator)
    folder.mkdir()
    save_file(tensors, folder / WEIGHTS)
    targets = sorted({name.split(".", 2)[2].removesuffix(".lora_A.weight") for name in tensors if "lora_A" in name})
    own = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": targets} | config
    (folder / ADAPTER_CONFIG).write_text(json.dumps(own))
    return folder


@pytest.fixture(scope="module", params=FAMILIES)
def place(request, tmp_path_factory, tokenizer):
    """A folder with base/, one/ and two/ (adapters of it)."""
    arch, task, shape = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    size = load_tokenizer(tokenizer).padded_vocab_size()
    torch.manual_seed(3)
    model = build_model(arch, vocab_size=size, hidden_size=32, **shape)
    save_model(folder / "base", model, tokenizer, task={"_name": task})
    save_adapter(folder / "one", model, ("qkv", "query", "inner"), 1)
    save_adapter(folder / "two", model, ("output",), 2)
    return folder


def test_rows_with_different_adapters_are_answered_as_with_theirs_alone(place):
    options = {"max_len": 6, "min_len": 6, "batch_size": 4}
    mixed = ftk.load_generator(place / "base", "cpu", adapters={one: place / one for one in ("one", "two")}, **options)
    names = [None, "one", "two", "one", None, "two", "two"]
    prompts = (PROMPTS * 3)[: len(names)]
    encoded = [mixed.encode(prompt, seed=1) for prompt in prompts]
    encoded = [
        replace(one, request=replace(one.request, adapter=name)) for one, name in zip(encoded, names, strict=True)
    ]
    found = mixed.generate_encoded(encoded)
    alone = {
        None: ftk.load_generator(place / "base", "cpu", **options),
        **{one: ftk.load_generator(place / one, "cpu", base=place / "base", **options) for one in ("one", "two")},
    }
    for prompt, name, result in zip(prompts, names, found, strict=True):
        (answer,), (right,) = result.answers, alone[name].generate(prompt, seeds=1).answers
        assert answer.tokens == right.tokens
        assert answer.token_logprobs == pytest.approx(right.token_logprobs, abs=1e-4)
    assert len({tuple(result.answers[0].tokens) for result in found[:1] + found[3:4]}) == 2  # they do something

    candidates = [mixed.encode_candidates(PROMPTS[0], [["fox"]], True)] * 3
    requests = [replace(one.request, adapter=name) for one, name in zip(candidates, names, strict=False)]
    scored = mixed.score_encoded([replace(one, request=own) for one, own in zip(candidates, requests, strict=True)])
    for ((answer,),), name in zip(scored, names, strict=False):
        ((right,),) = alone[name].score_encoded(candidates[:1])[0]
        assert answer.logprob == pytest.approx(right.logprob, abs=1e-4)


@pytest.mark.parametrize("place", ["glm"], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("weights", ["plain", "int8", "int4"])
def test_adapters_have_the_type_of_their_model_whatever_its_weights_are(place, tmp_path, weights, dtype):
    base, names = place / "base", ["one", None, "two"]
    if weights != "plain":
        base = tmp_path / "base"
        assert checkpoint_command(["export", str(place / "base"), str(base), "--quantize", weights]) == 0
    options = {"max_len": 4, "min_len": 4, "dtype": dtype}
    mixed = ftk.load_generator(base, "cpu", adapters={one: place / one for one in ("one", "two")}, **options)
    encoded = mixed.encode_candidates(PROMPTS[0], [["fox"]], True)
    requests = [replace(encoded, request=replace(encoded.request, adapter=name)) for name in names]
    scores = [candidate.logprob for ((candidate,),) in mixed.score_encoded(requests)]
    for name, score in zip(names, scores, strict=True):
        theirs = {"path": base} if name is None else {"path": place / name, "base": base}
        ((alone,),) = ftk.load_generator(device="cpu", **theirs, **options).score_encoded([encoded])[0]
        assert score == pytest.approx(alone.logprob, rel=0.02 if dtype == torch.bfloat16 else 1e-4)
    assert len({round(score, 1) for score in scores}) == 3
    steps = [mixed.encode(PROMPTS[0], seed=1) for _ in names]
    steps = [replace(one, request=replace(one.request, adapter=name)) for one, name in zip(steps, names, strict=True)]
    assert [len(result.answers[0].tokens) for result in mixed.generate_encoded(steps)] == [4] * 3


def test_a_reading_that_fails_leaves_no_row_half_read(place, monkeypatch):
    generator = ftk.load_generator(place / "base", "cpu", max_len=4, adapters={"one": place / "one"})
    requests = [generator.encode(prompt).request for prompt in PROMPTS[:2]]
    requests[1] = replace(requests[1], adapter="one")
    right = [answers[0].tokens for answers in generator.engine(requests).answers(requests)]
    engine = generator.engine(requests)
    own, calls = engine.decoder.model.embed, []

    def once(*arguments, **inputs):
        calls.append(1)
        if len(calls) == 2:  # that of the second adapter
            raise RuntimeError("out of memory")
        return own(*arguments, **inputs)

    monkeypatch.setattr(engine.decoder.model, "embed", once)
    assert [answers[0].tokens for answers in engine.answers(requests)] == right


@pytest.mark.parametrize(
    ("config", "more", "message"),
    [
        ({"use_dora": True}, {"layers.0.attention.output.lora_magnitude_vector": (32,)}, "no plain LoRA"),
        ({"peft_type": "IA3"}, {}, "adapter_config.json"),
        ({"modules_to_save": ["final_norm"]}, {"final_norm.weight": (32,)}, "other parameters besides"),
        ({}, {"layers.7.attention.output.lora_A.weight": (4, 32)}, "layers.7"),
    ],
)
def test_adapters_that_cannot_share_a_model_are_refused(tmp_path, tokenizer, config, more, message):
    size = load_tokenizer(tokenizer).padded_vocab_size()
    model = build_model("llama_tiny", vocab_size=size, hidden_size=32, num_layers=1)
    save_model(tmp_path / "base", model, tokenizer, task={"_name": "causal_lm"})
    folder = save_adapter(tmp_path / "bad", model, ("attention.output",), 1, **config)
    tensors = load_file(folder / WEIGHTS) | {
        f"base_model.model.{name}": torch.ones(shape) for name, shape in more.items()
    }
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(UserError, match=message):
        ftk.load_generator(tmp_path / "base", "cpu", adapters={"bad": folder})


def test_an_adapter_of_another_task_is_named(tmp_path, tokenizer, caplog):
    size = load_tokenizer(tokenizer).padded_vocab_size()
    model = build_model("llama_tiny", vocab_size=size, hidden_size=32, num_layers=1)
    save_model(tmp_path / "base", model, tokenizer, task={"_name": "causal_lm"})
    folders = {name: save_adapter(tmp_path / name, model, ("attention.output",), 1) for name in ("plain", "chat")}
    trained_beside = base_sha256(model.state_dict().keys(), model.state_dict().__getitem__)
    facts = {"format": "ftk-adapter", "version": 1, "base_sha256": trained_beside}
    (folders["chat"] / FACTS).write_text(json.dumps(facts | {"config": {"task": {"_name": "sft"}}}))
    ftk.load_generator(tmp_path / "base", "cpu", adapters=folders)
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert said.startswith("adapter chat was trained for sft; beside others it is asked as the model is (causal_lm)")
