"""Encoder-decoders: both stacks are found, counted and longer; padding of the source changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ftk.batch import Batch
from ftk.checkpoint.export import export_program
from ftk.criterions.cross_entropy import CrossEntropy, CrossEntropyConfig
from ftk.model_parallel.blocks import blocks_of
from ftk.models import build_model
from ftk.trainer.watch.throughput import batch_flops

SMALL = {"vocab_size": 99, "num_layers": 2, "num_decoder_layers": 3}
MODELS: dict[str, dict[str, Any]] = {
    "t5_tiny": {"gated": True, "tie_embeddings": False, "head_dim": 12},
    "bart_tiny": {"ffn_hidden_size": 80},
    "cpm2_tiny": {"head_dim": 12},
    "transformer_tiny": {"norm_first": True, "decoder_ffn_hidden_size": 40, "share_embeddings": "decoder"},
}
NO_DROPOUT = dict.fromkeys(("dropout", "embedding_dropout", "attention_dropout", "activation_dropout"), 0.0)


@pytest.fixture(params=MODELS)
def model(request) -> Any:
    torch.manual_seed(1)
    return build_model(request.param, **{**SMALL, **MODELS[request.param], **NO_DROPOUT})


def batch() -> Batch:
    inputs = {"tokens": torch.arange(22).view(2, 11), "decoder_tokens": torch.arange(14).view(2, 7)}
    places = torch.tensor([1, 3, 8])
    return Batch(inputs, torch.tensor([5, 6, 7]), places)


def test_the_count_of_operations_is_pytorchs_own(model) -> None:
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as forward:
        output = CrossEntropy(CrossEntropyConfig())(model, batch())
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as backward:
        output.loss.backward()
    assert batch_flops(model, batch()) == forward.get_total_flops() + backward.get_total_flops()


def test_blocks_are_the_layers_of_both_stacks(model) -> None:
    names = [name for name, _ in blocks_of(model)]
    layers = {"encoder": 2, "decoder": 3}
    assert names == [f"stacks.{side}.layers.{place}" for side, count in layers.items() for place in range(count)]


def test_a_longer_batch_has_the_loss_of_the_shorter(model) -> None:
    longer = batch().longer(8, model.INPUTS)
    assert longer.inputs["decoder_tokens"].shape == (2, 8)
    assert longer.inputs["tokens"].shape == (2, 16)
    assert longer.inputs["lengths"].tolist() == [11, 11]
    found, expected = (CrossEntropy(CrossEntropyConfig())(model, each).loss for each in (longer, batch()))
    torch.testing.assert_close(found, expected)


@torch.no_grad()
def test_padding_of_the_source_is_not_read(model) -> None:
    source, target = torch.arange(11)[None], torch.arange(7)[None]
    padded = torch.cat((source, torch.full((1, 5), 98)), dim=1)
    expected = model(source, decoder_tokens=target)
    found = model(padded, lengths=torch.tensor([11]), decoder_tokens=target)
    torch.testing.assert_close(found, expected)
    assert (model(padded, decoder_tokens=target) - expected).abs().max() > 1e-3


@torch.no_grad()
def test_a_position_may_be_read_alone(model) -> None:
    """What `embed` and `around` give for one place is what they give for it among all, as caches need it."""
    target = torch.arange(7)[None]
    whole = model.embed(target)
    alone = model.embed(target[:, 4:5], position_ids=torch.tensor([[4]]))
    torch.testing.assert_close(alone, whole[:, 4:5])


def test_dropout_behind_the_activation_acts_in_training_alone() -> None:
    torch.manual_seed(1)
    model = build_model("t5_tiny", **SMALL, **{**NO_DROPOUT, "activation_dropout": 0.5})
    inputs = batch().inputs
    with torch.no_grad():
        assert (model(**inputs) - model(**inputs)).abs().max() > 1e-3
        model.eval()
        assert torch.equal(model(**inputs), model(**inputs))


def test_both_stacks_of_a_t5_have_dropout_behind_their_final_norm() -> None:
    model = build_model("t5_tiny", **{**SMALL, **NO_DROPOUT, "embedding_dropout": 0.5})
    torch.manual_seed(1)
    target = torch.arange(7)[None]
    states = model.encode(torch.arange(11)[None])
    hidden = model.hidden_states(torch.arange(11)[None], target)
    for dropped in (states, hidden):
        assert 0.3 < (dropped == 0).float().mean() < 0.7


@pytest.mark.parametrize("arch", ["t5_tiny", "transformer_tiny"])
def test_an_exported_program_takes_texts_longer_than_any_in_training(arch, tmp_path) -> None:
    """Positions that are no rows of a table have no greatest one."""
    model = build_model(arch, **{**SMALL, **NO_DROPOUT, "num_layers": 1, "max_positions": 16}).eval()
    export_program(model, tmp_path / "model.pt2")
    given = (torch.arange(40)[None], torch.tensor([40]), torch.arange(30)[None])
    with torch.no_grad():
        found = torch.export.load(tmp_path / "model.pt2").module()(*given)
        expected = model(given[0], lengths=given[1], decoder_tokens=given[2])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
