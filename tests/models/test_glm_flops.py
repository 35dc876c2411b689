"""The formula of FLOP/s and MFU against the counter of PyTorch, and by hand."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ftk.criterions.cross_entropy import CrossEntropy, CrossEntropyConfig
from ftk.models.flops import training_flops
from ftk.models.glm import GLMConfig
from ftk.models.glm.model import GLM
from tests.dense import batch_of


def shape(**changes):
    return GLMConfig(
        **{"num_layers": 3, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 200, "max_positions": 32}
        | changes
    )


@pytest.mark.parametrize("config", [shape(), shape(ffn_hidden_size=48, num_layers=1)], ids=["plain", "narrow"])
def test_the_count_is_pytorchs_own(config):
    """What the counter sees go through the matrix kernels in a real step, to the last multiplication."""
    model = GLM(config, seed=1).train()
    loss_mask = torch.zeros(2, 16, dtype=torch.bool)  # [B, T]
    loss_mask[:, 10:15] = True
    batch = batch_of(
        {
            "tokens": torch.arange(32).view(2, 16),
            "targets": torch.arange(32).view(2, 16),
            "position_ids": torch.arange(16).expand(2, 2, 16),
            "context_length": torch.tensor([10, 8]),
            "loss_mask": loss_mask,
        }
    )
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as forward:
        output = CrossEntropy(CrossEntropyConfig())(model, batch)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as backward:
        output.loss.backward()
    counts = {"num_tokens": 32, "num_targets": 10, "num_pairs": 2 * 16 * 16}
    assert training_flops(config, **counts) == forward.get_total_flops() + backward.get_total_flops()
    assert model.training_flops(**counts) == training_flops(config, **counts)


def test_the_count_of_glm_base_by_hand():
    config = GLMConfig(num_layers=12, hidden_size=768, vocab_size=30592)
    # 512 tokens, 100 of them with loss: 12 layers of 12 H^2 a token and 2 H a pair, H V a target; 6 each.
    multiplications = 12 * (512 * 12 * 768**2 + 512**2 * 2 * 768) + 100 * 768 * 30592
    assert training_flops(config, 512, 100, 512**2) == 6 * multiplications
