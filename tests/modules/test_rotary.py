"""Rotary positions: angles as in `transformers`, bit for bit, and both ways to pair dimensions."""

from __future__ import annotations

import math

import pytest
import torch

from ftk.modules.rotary import Rope, rotate

ROPES = {
    "none": (Rope(1e4, 16), {"rope_type": "default"}),
    "of a quarter": (Rope(1e6, 4), {"rope_type": "default", "partial_rotary_factor": 0.25}),
    "linear": (Rope(1e4, 16, scaling="linear", factor=2.5), {"rope_type": "linear", "factor": 2.5}),
    "llama3": (
        Rope(5e5, 16, scaling="llama3", factor=8.0, original_positions=64, low=1.0, high=4.0),
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    ),
    "yarn": (
        Rope(1e6, 16, scaling="yarn", factor=4.0, original_positions=64, low=1.0, high=32.0),
        {"rope_type": "yarn", "factor": 4.0},
    ),
    "yarn with a factor of its own": (
        Rope(1e4, 16, scaling="yarn", factor=4.0, original_positions=64, low=2.0, high=16.0, attention_factor=0.7),
        {"rope_type": "yarn", "factor": 4.0, "beta_slow": 2.0, "beta_fast": 16.0, "attention_factor": 0.7},
    ),
    "yarn of broken pairs": (
        Rope(1e4, 16, scaling="yarn", factor=4.0, original_positions=64, high=32.0, whole_pairs=False),
        {"rope_type": "yarn", "factor": 4.0, "truncate": False},
    ),
}


@pytest.mark.parametrize("name", ROPES)
def test_angles_are_those_of_transformers_bit_for_bit(name: str) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers (pip install ftk[test])")
    from transformers.models.glm.modeling_glm import GlmRotaryEmbedding

    rope, parameters = ROPES[name]
    scaled = {} if rope.scaling == "none" else {"original_max_position_embeddings": 64}
    config = transformers.GlmConfig(
        hidden_size=64,
        num_attention_heads=4,
        head_dim=16,
        max_position_embeddings=256,
        rope_parameters={"rope_theta": rope.theta, "partial_rotary_factor": 1.0, **parameters, **scaled},
    )
    theirs = GlmRotaryEmbedding(config)
    assert torch.equal(rope.frequencies(), theirs.inv_freq)
    positions = torch.tensor([[0, 1, 7, 63, 64, 255]])
    for ours, expected in zip(rope.tables(positions), theirs(torch.zeros(1), positions), strict=True):
        assert torch.equal(ours[:, 0], expected[..., : rope.size // 2])  # they repeat the angles


def test_the_two_ways_to_pair_dimensions_are_one_under_a_permutation() -> None:
    """Row p + 2j of interleaved projections is row j + p R/2 of the others."""
    heads = torch.randn(2, 3, 5, 12, generator=torch.Generator().manual_seed(1))  # [B, A, T, D]
    cos, sin = Rope(1e4, 8).tables(torch.arange(5).expand(2, -1))
    order = torch.cat((torch.arange(0, 8, 2), torch.arange(1, 8, 2), torch.arange(8, 12)))
    assert torch.equal(rotate(heads, cos, sin, interleaved=True)[..., order], rotate(heads[..., order], cos, sin))


@pytest.mark.parametrize("interleaved", [False, True])
def test_each_pair_is_turned_by_its_angle_and_the_rest_stays(interleaved: bool) -> None:
    heads = torch.randn(1, 1, 4, 6, generator=torch.Generator().manual_seed(2))
    found = rotate(heads, *Rope(100.0, 4, interleaved).tables(torch.arange(4)[None]), interleaved)
    for place in range(4):
        for pair, angle in enumerate((place, place / 10)):  # 100 ** (-2 i / 4)
            one, other = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + 2)
            x, y = heads[0, 0, place, one], heads[0, 0, place, other]
            expected = torch.stack(
                (x * math.cos(angle) - y * math.sin(angle), y * math.cos(angle) + x * math.sin(angle))
            )
            torch.testing.assert_close(found[0, 0, place, [one, other]], expected)
    assert torch.equal(found[..., 4:], heads[..., 4:])
