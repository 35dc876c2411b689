"""GLM-130B and ChatGLM-6B against a forward pass written out from their code, with every weight drawn at random.

Their code was read, not run: THUDM/SwissArmyTransformer's glm130B_model.py, and modeling_chatglm.py of the hub.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import ftk
from ftk.checkpoint.convert import convert_from, convert_to
from ftk.checkpoint.huggingface import HuggingFace, HuggingFaceConfig
from ftk.errors import UserError
from ftk.models import build_model
from ftk.models.glm130b.convert import GLM130B_RENAMES, ChatGLMConverter
from ftk.models.renames import LazyTensors, renamed
from ftk.registry import HF_MODELS
from ftk_cli.checkpoint import main as checkpoint
from tests.records import assert_same_tensors

HEADS = 2
SHAPE = {"num_layers": 3, "hidden_size": 16, "num_attention_heads": HEADS, "vocab_size": 77, "max_positions": 64}


def turned(heads: Tensor, positions: Tensor) -> Tensor:
    """heads [B, A, T, D] as D/2 complex numbers, element i with i + D/2, turned by angles of positions [B, T]."""
    half = heads.size(-1) // 2
    frequencies = torch.tensor([10000 ** (-2 * i / (2 * half)) for i in range(half)]).half().double()
    turns = torch.polar(torch.ones(()).double(), positions[:, None, :, None] * frequencies)
    numbers = torch.complex(heads[..., :half].double(), heads[..., half:].double()) * turns
    return torch.cat((numbers.real, numbers.imag), dim=-1).to(heads.dtype)


def plain_forward(
    weights: dict[str, Tensor],
    tokens: Tensor,
    position_ids: Tensor,
    context_length: Tensor,
    *,
    layers: int,
    gated: bool,
) -> Tensor:
    """The published computation step by step.

    Args:
        weights: by the names of their code.
        position_ids: [B, 2, T]; [B, T] where a head is turned as one.
        layers: of the residual path's factor.
        gated: GLM-130B's feed-forward network.
    """

    def norm(hidden: Tensor, name: str) -> Tensor:
        centred = hidden - hidden.mean(-1, keepdim=True)
        scaled = centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
        return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def linear(hidden: Tensor, name: str) -> Tensor:
        return hidden @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def rotated(heads: Tensor) -> Tensor:
        if position_ids.dim() == 2:
            return turned(heads, position_ids)
        first, second = heads.chunk(2, dim=-1)
        return torch.cat((turned(first, position_ids[:, 0]), turned(second, position_ids[:, 1])), dim=-1)

    place = torch.arange(tokens.size(1))
    seen = (place <= place[:, None]) | (place < context_length[:, None, None])  # [B, T, T]
    hidden, alpha = weights["transformer.word_embeddings.weight"][tokens], math.sqrt(2 * layers)
    num_layers = len({name.split(".")[2] for name in weights if name.startswith("transformer.layers.")})
    for layer in (f"transformer.layers.{i}" for i in range(num_layers)):
        normed = norm(hidden, f"{layer}.input_layernorm")
        # Head by head its query, key and value.
        mixed = linear(normed, f"{layer}.attention.query_key_value").unflatten(-1, (HEADS, -1)).transpose(1, 2)
        query, key, value = mixed.chunk(3, dim=-1)  # [B, A, T, D] each
        scores = rotated(query) @ rotated(key).transpose(2, 3) / query.size(-1) ** 0.5
        mixed = scores.masked_fill(~seen[:, None], -10000.0).softmax(-1) @ value
        normed = alpha * normed + linear(torch.cat(mixed.unbind(1), dim=-1), f"{layer}.attention.dense")
        normed = norm(normed, f"{layer}.post_attention_layernorm")
        inner = linear(normed, f"{layer}.mlp.dense_h_to_4h")
        if gated:
            first, second = inner.chunk(2, dim=-1)
            inner = first * (0.5 * second * (1 + torch.erf(second / math.sqrt(2))))
        else:
            inner = 0.5 * inner * (1 + torch.tanh(0.7978845608028654 * inner * (1 + 0.044715 * inner * inner)))
        hidden = alpha * normed + linear(inner, f"{layer}.mlp.dense_4h_to_h")
    hidden = norm(hidden, "transformer.final_layernorm")
    return hidden @ weights.get("lm_head.weight", weights["transformer.word_embeddings.weight"]).T


def draw(model: torch.nn.Module) -> None:
    """Far from the initial values, so that every part matters."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)


def inputs() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "tokens": torch.randint(77, (3, 12), generator=generator),
        "position_ids": torch.randint(2000, (3, 2, 12), generator=generator),
        "context_length": torch.tensor([0, 5, 12]),
    }


def assert_near(found: Tensor, expected: Tensor) -> None:
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("inner", [24, 64])
def test_a_glm130b_computes_what_its_code_computes(inner: int) -> None:
    model = build_model("glm130b_tiny", **SHAPE, ffn_hidden_size=inner).eval()
    draw(model)
    theirs = renamed(LazyTensors.of(model.state_dict()), GLM130B_RENAMES, model.config, back=True).all()
    assert theirs["transformer.layers.0.mlp.dense_h_to_4h.weight"].size(0) == 2 * inner
    given = inputs()
    expected = plain_forward(
        theirs, given["tokens"], given["position_ids"][:, 0], given["context_length"], layers=3, gated=True
    )
    assert_near(model(**given), expected)


def parts_of(weights: dict[str, Tensor], count: int) -> list[dict[str, Tensor]]:
    """The files of model-parallel ranks, as GLM-130B's tools/convert_tp.py cuts them."""
    parts: list[dict[str, Tensor]] = [{} for _ in range(count)]
    for name, value in weights.items():
        for rank, part in enumerate(parts):
            if "dense_h_to_4h" in name:
                part[name] = torch.cat([half.chunk(count)[rank] for half in value.chunk(2)])
            elif name.endswith(("attention.dense.weight", "dense_4h_to_h.weight")):
                part[name] = value.chunk(count, dim=1)[rank].clone()
            elif "word_embeddings" in name or "query_key_value" in name:
                part[name] = value.chunk(count)[rank].clone()
            else:
                part[name] = value
    return parts


@pytest.mark.parametrize("count", [1, 2])
def test_the_parts_of_a_glm130b_come_in_and_go_out(count: int, tmp_path: Path) -> None:
    model = build_model("glm130b_tiny", vocab_size=78, max_positions=64).eval()
    draw(model)
    weights = renamed(LazyTensors.of(model.state_dict()), GLM130B_RENAMES, model.config, back=True).all()
    source, ours, back = (tmp_path / name for name in ("source", "ours", "back"))
    (source / "49300").mkdir(parents=True)
    (source / "latest").write_text("49300")
    parts = parts_of(weights, count)
    frequencies = {"transformer.layers.0.attention.rotary_emb.inv_freq": torch.ones(8).half()}
    for rank, part in enumerate(parts):
        torch.save({"module": part | frequencies}, source / "49300" / f"mp_rank_{rank:02d}_model_states.pt")
    assert checkpoint(["convert", "--from", "glm", str(source), str(ours), "--arch", "glm130b_tiny"]) == 0
    found, given = ftk.load_model(ours), inputs()
    assert found.config.gmask_runs_on
    with torch.no_grad():
        assert torch.equal(found(**given), model(**given))
    assert checkpoint(["convert", "--to", "glm", str(ours), str(back), "--model-parallel-size", str(count)]) == 0
    for rank, part in enumerate(parts):
        written = torch.load(back / "49300" / f"mp_rank_{rank:02d}_model_states.pt", weights_only=True)["module"]
        assert_same_tensors(written, part)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--arch glm_tiny", "its parameters have the names of GLM-130B; --arch glm_tiny is of another model"),
        ("--arch gpt2_tiny", "an original checkpoint is of 'glm' or 'glm130b'"),
    ],
)
def test_parts_of_another_architecture_are_refused(
    flags: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = build_model("glm130b_tiny", vocab_size=78)
    weights = renamed(LazyTensors.of(model.state_dict()), GLM130B_RENAMES, model.config, back=True).all()
    torch.save({"module": weights}, tmp_path / "mp_rank_00_model_states.pt")
    assert checkpoint(["convert", "--from", "glm", str(tmp_path), str(tmp_path / "ours"), *flags.split()]) == 2
    assert message in capsys.readouterr().err


@pytest.fixture(params=["one tensor", "both equal", "two tensors", "two tensors, told"])
def published(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A folder as of ChatGLM-6B, with its buffers."""
    is_tied = not request.param.startswith("two tensors")
    model = build_model("chatglm_tiny", **SHAPE, tie_embeddings=is_tied)
    draw(model)
    weights = renamed(LazyTensors.of(model.state_dict()), ChatGLMConverter.renames, model.config, back=True).all()
    if request.param == "both equal":
        weights["lm_head.weight"] = weights["transformer.word_embeddings.weight"].clone()
    folder = tmp_path / "published"
    folder.mkdir()
    save_file({name: value.contiguous() for name, value in weights.items()}, folder / "model.safetensors", FORMAT)
    config = CONFIG | ({"tie_word_embeddings": False} if request.param.endswith("told") else {})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


FORMAT = {"format": "pt"}
CONFIG = {
    **{"architectures": ["ChatGLMModel"], "auto_map": {"AutoModel": "modeling_chatglm"}, "model_type": "chatglm"},
    **{"bos_token_id": 74, "eos_token_id": 75, "mask_token_id": 70, "gmask_token_id": 71, "pad_token_id": 3},
    **{"hidden_size": 16, "inner_hidden_size": 64, "layernorm_epsilon": 1e-5, "max_sequence_length": 64},
    **{"num_attention_heads": HEADS, "num_layers": 3, "position_encoding_2d": True, "use_cache": True},
    **{"vocab_size": 77, "torch_dtype": "float32"},
}


def test_a_chatglm_computes_what_its_code_computes_and_comes_back(published: Path, tmp_path: Path) -> None:
    form, given = HuggingFace(HuggingFaceConfig()), inputs()
    expected = plain_forward(load_file(published / "model.safetensors"), **given, layers=28, gated=False)
    ours = convert_from(form, published, tmp_path / "ours")
    with torch.no_grad():
        assert_near(ftk.load_model(ours)(**given), expected)
        assert_near(ftk.load_model(published)(**given), expected)
    back = convert_to(form, "hf", ours, tmp_path / "back")
    assert {path.name: path.read_bytes() for path in back.iterdir()} == {
        path.name: path.read_bytes() for path in published.iterdir()
    }
    config = ftk.load_model(ours).config
    weights = load_file(published / "model.safetensors")
    embedding = weights["transformer.word_embeddings.weight"]
    assert config.tie_embeddings == torch.equal(weights.get("lm_head.weight", embedding), embedding)
    converter = HF_MODELS.get("chatglm").target()
    assert config.end_tokens == [75]
    assert converter.config_from(converter.config_to(config)) == replace(config, end_tokens=[])


def test_frequencies_in_the_files_of_a_chatglm_are_left_out(published: Path, tmp_path: Path) -> None:
    """Those of the first release are; the code that comes with them does not read them either."""
    weights, given = load_file(published / "model.safetensors"), inputs()
    expected = ftk.load_model(published)(**given)
    for i in range(3):
        weights[f"transformer.layers.{i}.attention.rotary_emb.inv_freq"] = torch.full((2,), 0.5)
    torch.save(weights, published / "pytorch_model.bin")
    (published / "model.safetensors").unlink()
    assert torch.equal(ftk.load_model(published)(**given), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quantization_bit": 4}, "quantization_bit is 4; ftk's model has 0 or None"),
        ({"pre_seq_len": 128}, "pre_seq_len is 128; ftk's model has None"),
        ({"position_encoding_2d": False}, "position_encoding_2d is False; ftk's model has True"),
        ({"eva_config": {"layers": 2}}, "eva_config is not known here"),
    ],
)
def test_a_chatglm_of_another_form_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        HF_MODELS.get("chatglm").target().config_from(CONFIG | change)
