"""Prefix tuning: keys and values in front in every form of attention by the slow way; models in training and cached."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ftk.config.options import mistakes
from ftk.errors import UserError
from ftk.generation.engine.decoder import CachedDecoder
from ftk.generation.engine.request import Frame
from ftk.generation.engine.scoring import final_hidden_states
from ftk.model_parallel.tensor_parallel.plan import match_plan
from ftk.models import build_model
from ftk.modules.adapters import PrefixConfig
from ftk.modules.adapters.adapt import adapt, is_part, make_plain, precompute
from ftk.modules.adapters.prefix import PrefixTuning
from ftk.modules.attention import Front, attend_with_front
from ftk.modules.attention_forms import sequence_attention
from ftk.modules.flex_attention import with_front
from ftk.modules.masked_attention import MaskedAttention, step_attention
from ftk.modules.masks import Visibility

CPU, NUM = torch.device("cpu"), 3


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def slow(query: Tensor, key: Tensor, value: Tensor, front: Front, seen: Tensor, bias: Tensor | None = None) -> Tensor:
    """The formula, with one key head for each query head; seen: bool [B, 1, T, S]."""
    group = query.size(1) // key.size(1)
    key, value = (
        torch.cat((own.expand(2, -1, -1, -1), each), 2) for own, each in zip(front, (key, value), strict=True)
    )
    key, value = (each.repeat_interleave(group, dim=1) for each in (key, value))
    scores = query @ key.mT * query.size(-1) ** -0.5
    if bias is not None:
        scores[..., NUM:] += bias
    scores[..., NUM:].masked_fill_(~seen, float("-inf"))
    return scores.softmax(-1) @ value


INPUTS = drawn(2, 4, 9, 8, seed=1), drawn(2, 2, 9, 8, seed=2), drawn(2, 2, 9, 8, seed=3)
FRONT = Front(drawn(1, 2, NUM, 8, seed=4), drawn(1, 2, NUM, 8, seed=5))
CONTEXT = torch.tensor([4, 0])


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(
    ("form", "visibility"),
    [
        ("sdpa", Visibility()),
        ("sdpa", Visibility(causal=False)),
        ("sdpa", Visibility(prefix=CONTEXT)),
        ("eager", Visibility(prefix=CONTEXT)),
        ("eager", Visibility(causal=False)),
        ("banded", Visibility(window=2)),
    ],
    ids=str,
)
def test_all_queries_see_the_keys_in_front_in_every_form(form, visibility, with_bias) -> None:
    bias = drawn(1, 4, 9, 9, seed=6) if with_bias and form != "banded" else None
    attend = attend_with_front(sequence_attention(form, visibility, 9, CPU), FRONT)
    seen = visibility.boolean(torch.arange(9), torch.arange(9))
    torch.testing.assert_close(attend(*INPUTS, bias=bias), slow(*INPUTS, FRONT, seen, bias))


def test_a_step_and_what_a_kernel_gives_with_its_sums_see_them_too() -> None:
    query, key, value = INPUTS
    seen = Visibility().boolean(torch.arange(9), torch.arange(9))
    last = slow(query, key, value, FRONT, seen)[:, :, -1:]
    torch.testing.assert_close(step_attention(query[:, :, -1:], key, value, None, front=FRONT), last)
    scores = (query @ key.repeat_interleave(2, dim=1).mT * 8**-0.5).masked_fill(~seen, float("-inf"))
    plain = MaskedAttention(None, is_causal=True)(query, key, value)
    found = with_front(plain, scores.logsumexp(-1), query, FRONT)
    torch.testing.assert_close(found, slow(query, key, value, FRONT, seen))


def test_an_attend_that_takes_none_says_so() -> None:
    with pytest.raises(UserError, match="Odd takes no prefix of keys and values; choose another `attention`"):
        attend_with_front(type("Odd", (), {})(), FRONT)  # type: ignore[arg-type]


# -- models -------------------------------------------------------------------------------------------------------


def small_model(arch: str = "gpt2_tiny", **options: Any) -> Any:
    torch.manual_seed(1)
    return build_model(arch, vocab_size=96, num_layers=2, max_positions=40, **options).eval()


def prefixed(model: Any, **options: Any) -> Any:
    adapt(model, PrefixTuning(PrefixConfig(num_virtual_tokens=NUM, **options)), seed=3)
    return model


TOKENS = torch.randint(96, (1, 9), generator=torch.Generator().manual_seed(7))
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2_tiny": {},
    "llama_tiny": {},  # rotation, two key heads
    "cpm1_tiny": {},  # biases of distances
    "mistral_tiny": {"sliding_window": 3},
    "glm_tiny": {},
}


@torch.no_grad()
@pytest.mark.parametrize("arch", FAMILIES)
def test_training_scoring_and_steps_with_a_cache_see_the_same_prefix(arch) -> None:
    model = small_model(arch, **FAMILIES[arch])
    plain = model(TOKENS)
    prefixed(model, prefix_hidden_size=5 if arch == "gpt2_tiny" else None)
    two = "2" in model.INPUTS["position_ids"]
    places = np.stack((np.arange(9), np.zeros(9, np.int64))) if two else np.arange(9)
    context = 4 if "context_length" in model.INPUTS else 0
    inputs = {"position_ids": torch.from_numpy(places)[None]}
    whole = model(TOKENS, **inputs, **({"context_length": torch.tensor([context])} if context else {}))
    assert (whole - plain).abs().max() > 1e-2
    hidden = final_hidden_states(model, TOKENS, inputs, Visibility(prefix=torch.tensor([context])))
    torch.testing.assert_close(model.head(hidden), whole)

    stride = {"position_ids": np.array((1, 0)) if two else np.array(1)}
    decoder = CachedDecoder(model, 2, 1, 16, 8)
    frames = [Frame(TOKENS[0, :n].tolist(), {"position_ids": places[..., :n]}, stride, context) for n in (4, 6)]
    found = [decoder.read([0, 1], frames)]
    for step in range(3):
        found.append(decoder.step(torch.tensor([[TOKENS[0, 4 + step]], [TOKENS[0, 6 + step]]]))[:, 0])
    for row, start in enumerate((4, 6)):
        logits = torch.stack([each[row] for each in found])
        torch.testing.assert_close(logits, whole[0, start - 1 : start + 3], rtol=1e-4, atol=1e-4)


def test_only_the_prefix_is_new_and_every_layer_has_one_that_is_drawn_by_its_name() -> None:
    plain, model, again = small_model(), prefixed(small_model()), prefixed(small_model())
    state, before = model.state_dict(), plain.state_dict()
    names = {name for name in state if is_part(name, PrefixTuning.PARTS)}
    assert names == {f"layers.{layer}.attention.prefix.embedding.weight" for layer in (0, 1)}
    assert all(torch.equal(state[name], before[name]) for name in before)
    assert state.keys() == before.keys() | names
    first, second = (state[name] for name in sorted(names))
    assert first.shape == (NUM, 2 * 64)
    assert not torch.equal(first, second)
    assert torch.equal(again.state_dict()[min(names)], first)
    model(TOKENS).square().sum().backward()
    assert all(model.get_parameter(name).grad.abs().max() > 0 for name in names)


@torch.no_grad()
def test_a_network_is_settled_to_what_it_gives() -> None:
    model = prefixed(small_model(), prefix_hidden_size=5)
    layer, expected = model.layers[1].attention.prefix, model(TOKENS)
    rows = layer.back(torch.tanh(layer.into(layer.embedding.weight)))
    heads = rows.view(NUM, 4, 2, 16).permute(2, 1, 0, 3)  # [2, K, n, D]
    torch.testing.assert_close(torch.cat(layer()), heads)
    precompute(model)
    assert not any("into" in name or "back" in name for name in model.state_dict())
    torch.testing.assert_close(model(TOKENS), expected)


def test_targets_choose_layers_and_ranks_share_heads() -> None:
    model = small_model()
    adapt(model, PrefixTuning(PrefixConfig(adapter_targets=["layers.1"], prefix_hidden_size=4)))
    assert not hasattr(model.layers[0].attention, "prefix")
    styles = match_plan(model, model.tensor_parallel_plan, 2)
    assert {name for name in styles if "prefix" in name} == {
        f"layers.1.attention.prefix.{part}" for part in ("embedding", "into", "back")
    }
    make_plain(model)  # of linear layers: it is no part of their weights
    assert hasattr(model.layers[1].attention, "prefix")


@torch.no_grad()
def test_with_positions_a_text_begins_behind_the_prefix() -> None:
    model, shifted = prefixed(small_model()), prefixed(small_model(), prefix_positions=True)
    expected = model(TOKENS, position_ids=torch.arange(NUM, 9 + NUM)[None])
    torch.testing.assert_close(shifted(TOKENS), expected)
    assert shifted.config.max_positions == 40 - NUM
    long = torch.zeros(1, 38, dtype=torch.int64)
    with pytest.raises(UserError, match="sequence of 38 tokens"):
        shifted(long)
    with pytest.raises(UserError, match="sequence of 38 tokens, but the prefix leaves 37 positions; shorten it"):
        shifted(long, position_ids=torch.arange(38)[None])
    with pytest.raises(UserError, match="`prefix_positions`: RotaryDecoder has no table of more than 3 learned"):
        prefixed(small_model("llama_tiny"), prefix_positions=True)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: prefixed(small_model(), adapter_targets=["layers.9"]), "'layers.9' matches no such layer"),
        (lambda: prefixed(prefixed(small_model())), "has an adapter already"),
        (lambda: prefixed(nn.Sequential(nn.Linear(2, 2))), "has no such layers in an nn.ModuleList"),
        (lambda: prefixed(small_model("longformer_tiny")), "GlobalAttention takes no prefix; use `adapter` lora"),
    ],
)
def test_what_does_not_fit_is_refused(build, message) -> None:
    with pytest.raises(UserError, match=message):
        build()


def test_impossible_options_are_refused() -> None:
    (first,) = mistakes(PrefixConfig(adapter_targets=["layers.0=3"]))
    assert "a prefix has no values of single layers" in first
    (second,) = mistakes(PrefixConfig(adapter_targets=["layers.0"], prefix_positions=True))
    assert second.startswith("prefix_positions is for a prefix of all layers")


@torch.no_grad()
def test_an_encoder_has_a_prefix_too() -> None:
    model = small_model("bert_tiny")
    expected = model(TOKENS)
    changed = prefixed(copy.deepcopy(model))(TOKENS)
    assert ((changed - expected).abs().amax(-1) > 1e-3).all()
