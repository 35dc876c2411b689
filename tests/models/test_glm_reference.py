"""Our GLM against a plain forward pass over the original's own names and layouts, for many shapes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

import ftk
from ftk.checkpoint.convert import convert_from, convert_to
from ftk.checkpoint.huggingface import HuggingFace, HuggingFaceConfig
from ftk.errors import UserError
from ftk.models.glm import GLMConfig
from ftk.models.glm.convert import config_from_original, from_original, to_original
from ftk.models.glm.model import GLM
from tests.small_run import save_model


def plain_forward(
    weights: dict[str, Tensor],
    num_heads: int,
    tokens: Tensor,
    position_ids: Tensor,
    context_length: Tensor,
    gelu: str = "tanh",
) -> Tensor:
    """The published computation step by step; position_ids [B, 2, T], or [B, T] without block positions."""

    def norm(hidden: Tensor, name: str) -> Tensor:
        centred = hidden - hidden.mean(-1, keepdim=True)
        scaled = centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
        return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def linear(hidden: Tensor, name: str) -> Tensor:
        return hidden @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    place = torch.arange(tokens.size(1))
    seen = (place <= place[:, None]) | (place < context_length[:, None, None])  # [B, T, T]
    hidden = weights["word_embeddings.weight"][tokens]
    if "transformer.block_position_embeddings.weight" in weights:
        hidden = hidden + weights["transformer.position_embeddings.weight"][position_ids[:, 0]]
        hidden = hidden + weights["transformer.block_position_embeddings.weight"][position_ids[:, 1]]
    else:
        hidden = hidden + weights["transformer.position_embeddings.weight"][position_ids]
    num_layers = len({name.split(".")[2] for name in weights if name.startswith("transformer.layers.")})
    for layer in (f"transformer.layers.{i}" for i in range(num_layers)):
        normed = norm(hidden, f"{layer}.input_layernorm")
        query, key, value = (
            torch.stack(third.chunk(num_heads, dim=-1), dim=1)  # [B, A, T, D]
            for third in linear(normed, f"{layer}.attention.query_key_value").chunk(3, dim=-1)
        )
        scores = query @ key.transpose(2, 3) / query.size(-1) ** 0.5
        mixed = scores.masked_fill(~seen[:, None], -65504.0).softmax(-1) @ value
        hidden = hidden + linear(torch.cat(mixed.unbind(1), dim=-1), f"{layer}.attention.dense")
        inner = linear(norm(hidden, f"{layer}.post_attention_layernorm"), f"{layer}.mlp.dense_h_to_4h")
        hidden = hidden + linear(F.gelu(inner, approximate=gelu), f"{layer}.mlp.dense_4h_to_h")
    return norm(hidden, "transformer.final_layernorm") @ weights["word_embeddings.weight"].T


def test_the_plain_forward_is_that_of_the_original(
    original_weights: dict[str, Tensor], golden_step: dict[str, Tensor]
) -> None:
    logits = plain_forward(
        original_weights, 4, golden_step["input_ids"], golden_step["position_ids"], golden_step["sep"]
    )
    torch.testing.assert_close(logits, golden_step["logits"], atol=1e-4, rtol=0)


SHAPES = [
    pytest.param({"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1}, id="one head"),
    pytest.param({"num_layers": 3, "hidden_size": 24, "num_attention_heads": 3}, id="three heads"),
    pytest.param({"num_layers": 2, "hidden_size": 16, "num_attention_heads": 16}, id="heads of size one"),
    pytest.param({"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "ffn_hidden_size": 40}, id="ffn"),
    pytest.param({"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 77}, id="odd vocab"),
]


@pytest.mark.parametrize("block_positions", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_any_shape_computes_what_the_plain_forward_computes(shape: dict[str, int], block_positions: bool) -> None:
    config = GLMConfig(**({"vocab_size": 64} | shape), max_positions=20, block_positions=block_positions)
    model = GLM(config, seed=0).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():  # far from the initial values, so that every part matters
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    weights = to_original(model.state_dict(), config)
    rows = 21 if block_positions else 20
    assert weights["transformer.position_embeddings.weight"].size(0) == rows

    tokens = torch.randint(64, (3, 12), generator=generator)
    position_ids = torch.randint(rows, (3, 2, 12), generator=generator)
    context_length = torch.tensor([0, 5, 12])
    computed = model(tokens, position_ids=position_ids, context_length=context_length)
    theirs = position_ids if block_positions else position_ids[:, 0]
    expected = plain_forward(weights, config.num_attention_heads, tokens, theirs, context_length)
    torch.testing.assert_close(computed, expected, atol=1e-4, rtol=1e-4)

    again = GLM(config_from_original(weights, config.num_attention_heads)).eval()
    again.load_state_dict(from_original(weights, config))
    assert torch.equal(again(tokens, position_ids=position_ids, context_length=context_length), computed)


@pytest.mark.parametrize("block_positions", [True, False])
@pytest.mark.parametrize(("activation", "gelu"), [(None, "none"), ("gelu", "none"), ("gelu_tanh", "tanh")])
def test_the_form_of_hugging_face_computes_the_exact_gelu_and_comes_back(
    tmp_path: Path, block_positions: bool, activation: str | None, gelu: str
) -> None:
    shape = GLMConfig(
        num_layers=2, hidden_size=16, num_attention_heads=2, vocab_size=77, max_positions=20,
        block_positions=block_positions,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    own = GLM(shape, seed=0).state_dict()
    weights = to_original({name: torch.randn(value.shape, generator=generator) for name, value in own.items()}, shape)
    published = tmp_path / "published"
    published.mkdir()
    named = {f"glm.{name}": value.contiguous() for name, value in weights.items()}
    save_file(named, published / "model.safetensors", {"format": "pt"})
    config: dict[str, object] = {"model_type": "glm", "vocab_size": 77, "hidden_size": 16, "num_layers": 2}
    config |= {"num_attention_heads": 2, "max_sequence_length": 20, "block_position_encoding": block_positions}
    config |= {"attention_scale": 8.0} if activation is None else {"activation": activation}
    (published / "config.json").write_text(json.dumps(config))

    form = HuggingFace(HuggingFaceConfig())
    model = ftk.load_model(convert_from(form, published, tmp_path / "ours"))
    tokens = torch.randint(77, (3, 12), generator=generator)
    position_ids = torch.randint(20, (3, 2, 12), generator=generator)
    context_length = torch.tensor([0, 5, 12])
    theirs = position_ids if block_positions else position_ids[:, 0]
    with torch.no_grad():
        found = model(tokens, position_ids=position_ids, context_length=context_length)
    expected = plain_forward(weights, 2, tokens, theirs, context_length, gelu)
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()

    convert_to(form, "hf", tmp_path / "ours", tmp_path / "back")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "back" / name).read_bytes() == (published / name).read_bytes()
    save_model(tmp_path / "trained", model)
    convert_to(form, "hf", tmp_path / "trained", tmp_path / "anew")
    again = ftk.load_model(convert_from(form, tmp_path / "anew", tmp_path / "again"))
    assert again.config == model.config
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("relative_encoding", True, "relative_encoding is True; ftk's model has False"),
        ("spell_length", 3, "spell_length is 3; ftk's model has None"),
        ("activation", "relu", "activation is 'relu'"),
    ],
)
def test_another_glm_of_hugging_face_is_refused(tmp_path: Path, key: str, value: object, message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "glm", "max_sequence_length": 8, key: value}))
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=message):
        convert_from(HuggingFace(HuggingFaceConfig()), tmp_path, tmp_path / "ours")
