"""Summed losses, their counts and meters, against the slow way that holds all logits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ftk.config.options import mistakes
from ftk.criterions.cross_entropy import CrossEntropy, CrossEntropyConfig
from ftk.models.glm import GLMConfig
from ftk.models.glm.model import GLM
from ftk.registry import CRITERIONS
from tests.dense import batch_of


def small_model() -> GLM:
    shape = GLMConfig(vocab_size=20, num_layers=1, hidden_size=16, num_attention_heads=2, max_positions=12)
    return GLM(shape, seed=0).eval()


def small_batch(loss_share: float = 0.4) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "tokens": torch.randint(20, (4, 12), generator=generator),
        "targets": torch.randint(20, (4, 12), generator=generator),
        "loss_mask": torch.rand(4, 12, generator=generator) < loss_share,
        "position_ids": torch.stack((torch.arange(12), torch.zeros(12, dtype=torch.int64))).expand(4, 2, 12),
        "context_length": torch.tensor([0, 3, 5, 11]),
        "objective": torch.tensor([0, 1, 0, 2]),
    }


def slow_losses(model: GLM, dense: dict[str, Tensor], label_smoothing: float) -> Tensor:
    """[B, T], 0 where there is no loss: from all logits and a written-out target distribution."""
    logits = model(dense["tokens"], position_ids=dense["position_ids"], context_length=dense["context_length"])
    vocab_size = logits.size(-1)
    target = torch.full_like(logits, label_smoothing / vocab_size)
    target.scatter_(2, dense["targets"][..., None], 1 - label_smoothing + label_smoothing / vocab_size)
    return -(target * logits.log_softmax(-1)).sum(-1) * dense["loss_mask"]


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 0.5])
def test_loss_count_and_gradients_equal_the_slow_way(label_smoothing: float) -> None:
    model, batch = small_model(), small_batch()
    criterion = CrossEntropy(CrossEntropyConfig(label_smoothing=label_smoothing))

    output = criterion(model, batch_of(batch))
    expected = slow_losses(model, batch, label_smoothing).sum()
    torch.testing.assert_close(output.loss, expected)
    assert output.num_targets == batch["loss_mask"].sum()
    assert (output.loss.dtype, output.loss.shape) == (torch.float32, ())
    assert (output.num_targets.dtype, output.num_targets.shape) == (torch.int64, ())

    parameters = dict(model.named_parameters())
    computed = torch.autograd.grad(output.loss, list(parameters.values()))
    slow = torch.autograd.grad(expected, list(parameters.values()))
    for name, left, right in zip(parameters, computed, slow, strict=True):
        torch.testing.assert_close(left, right, atol=1e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def test_meters_split_the_loss_by_objective() -> None:
    model, batch = small_model(), small_batch()
    output = CrossEntropy(CrossEntropyConfig())(model, batch_of(batch))
    slow = slow_losses(model, batch, 0.0)
    assert output.meters.keys() == {"loss_token", "loss_sentence", "loss_document"}
    for number, name in enumerate(("token", "sentence", "document")):
        total, count = output.meters[f"loss_{name}"]
        samples = batch["objective"] == number
        torch.testing.assert_close(total, slow[samples].sum())
        assert count == batch["loss_mask"][samples].sum()
        assert not total.requires_grad
    torch.testing.assert_close(sum(total for total, _ in output.meters.values()), output.loss)


def test_objectives_absent_from_a_batch_count_nothing() -> None:
    batch = small_batch() | {"objective": torch.zeros(4, dtype=torch.int64)}
    output = CrossEntropy(CrossEntropyConfig())(small_model(), batch_of(batch))
    assert [count.item() for _, count in output.meters.values()] == [output.num_targets.item(), 0, 0]


def test_a_batch_without_objectives_has_no_meters_for_them() -> None:
    batch = small_batch()
    del batch["objective"]
    assert CrossEntropy(CrossEntropyConfig())(small_model(), batch_of(batch)).meters == {}


def test_smoothing_adds_a_meter_of_the_likelihood_without_it() -> None:
    model, batch = small_model(), small_batch()
    output = CrossEntropy(CrossEntropyConfig(label_smoothing=0.2))(model, batch_of(batch))
    total, count = output.meters["nll_loss"]
    torch.testing.assert_close(total, slow_losses(model, batch, 0.0).sum())
    assert count == output.num_targets
    assert output.loss != total


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("form", ["plain", "chunked"])
def test_weights_multiply_losses_counts_and_meters(form: str, label_smoothing: float) -> None:
    model, dense = small_model(), small_batch()
    batch = batch_of(dense)
    batch.weights = torch.linspace(0.25, 2.0, len(batch.targets))
    config = CrossEntropyConfig(loss_form=form, loss_chunk_tokens=5, label_smoothing=label_smoothing)
    criterion = CrossEntropy(config)
    output = criterion(model, batch)
    slow = slow_losses(model, dense, label_smoothing).flatten()[batch.places] * batch.weights
    torch.testing.assert_close(output.loss, slow.sum())
    assert (
        criterion.count(batch) == pytest.approx(float(output.num_targets)) == pytest.approx(float(batch.weights.sum()))
    )
    assert criterion.count(batch_of(dense)) == len(batch.targets)
    total, count = output.meters["loss_sentence"]
    mine = batch.groups["objective"].index == 1
    torch.testing.assert_close((total, count), (slow[mine].sum().detach(), batch.weights[mine].sum()))
    if label_smoothing:
        likelihood = slow_losses(model, dense, 0.0).flatten()[batch.places] * batch.weights
        torch.testing.assert_close(output.meters["nll_loss"], (likelihood.sum().detach(), batch.weights.sum()))
    parameters = list(model.parameters())
    computed = torch.autograd.grad(output.loss, parameters)
    for left, right in zip(computed, torch.autograd.grad(slow.sum(), parameters), strict=True):
        torch.testing.assert_close(left, right, atol=1e-5, rtol=1e-4)


def test_all_logits_are_never_made(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = small_model(), small_batch()
    shapes = []

    def recorded(hidden: Tensor) -> Tensor:
        shapes.append(tuple(hidden.shape))
        return logits(hidden)

    logits = model.token_embedding.logits
    monkeypatch.setattr(model.token_embedding, "logits", recorded)
    CrossEntropy(CrossEntropyConfig())(model, batch_of(batch))
    assert shapes == [(int(batch["loss_mask"].sum()), 16)]


@pytest.mark.parametrize("form", ["plain", "chunked"])
def test_nothing_is_asked_of_the_host(form: str) -> None:
    """On the meta device there are no values: whatever reads one, as `.item()` or `nonzero` does, fails."""
    criterion = CrossEntropy(CrossEntropyConfig(label_smoothing=0.1, loss_form=form, loss_chunk_tokens=3))
    output = criterion(small_model().to("meta"), batch_of(small_batch()).to(torch.device("meta")))
    output.loss.backward()
    assert len(output.meters) == 4


def test_a_batch_without_targets_gives_zero_and_can_go_backward() -> None:
    model, batch = small_model(), batch_of(small_batch()).without_loss()
    output = CrossEntropy(CrossEntropyConfig())(model, batch)
    assert (output.loss.item(), output.num_targets.item()) == (0.0, 0)
    output.loss.backward()
    assert all(p.grad is not None and p.grad.abs().max() == 0 for p in model.parameters())


def test_loss_is_float32_under_bfloat16() -> None:
    model, batch = small_model(), batch_of(small_batch())
    criterion = CrossEntropy(CrossEntropyConfig())
    expected = criterion(model, batch).loss.item()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = criterion(model, batch)
    assert output.loss.dtype == torch.float32
    assert output.loss.item() == pytest.approx(expected, rel=1e-2)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_a_model_without_a_head_gives_its_scores_when_it_is_called(label_smoothing: float) -> None:
    model = torch.nn.Embedding(20, 20)  # tokens [B, T] -> logits [B, T, 20]
    batch = {name: small_batch()[name] for name in ("tokens", "targets", "loss_mask")}
    output = CrossEntropy(CrossEntropyConfig(label_smoothing=label_smoothing))(
        lambda tokens: model(tokens), batch_of(batch)
    )
    mask = batch["loss_mask"]
    expected = torch.nn.functional.cross_entropy(
        model(batch["tokens"])[mask], batch["targets"][mask], reduction="sum", label_smoothing=label_smoothing
    )
    torch.testing.assert_close(output.loss, expected)
    assert output.num_targets == mask.sum()


def test_criterions_are_built_by_name() -> None:
    for name in ("cross_entropy", "glm_cross_entropy"):  # the latter in configurations of before
        entry = CRITERIONS.get(name)
        assert entry.name == "cross_entropy"
        assert entry.config is not None
        assert isinstance(entry.target(entry.config()), CrossEntropy)
    assert "glm_cross_entropy" not in CRITERIONS.names()


@pytest.mark.parametrize("value", [-0.1, 1.0])
def test_impossible_smoothing_is_named(value: float) -> None:
    assert mistakes(CrossEntropyConfig(label_smoothing=value)) == [
        f"label_smoothing is {value}; it must be at least 0 and below 1"
    ]
