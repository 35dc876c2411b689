"""Summed losses, their counts and meters, against the slow way that holds all logits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ftk.criterions.cross_entropy import CrossEntropy, CrossEntropyConfig
from ftk.criterions.glm_cross_entropy import GLMCrossEntropy, GLMCrossEntropyConfig
from ftk.criterions.token_loss import loss_positions
from ftk.models.glm.config import GLMConfig
from ftk.models.glm.model import GLM
from ftk.registry import CRITERIONS


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


def slow_losses(model: GLM, batch: dict[str, Tensor], label_smoothing: float) -> Tensor:
    """[B, T], 0 where there is no loss: from all logits and a written-out target distribution."""
    logits = model(batch["tokens"], position_ids=batch["position_ids"], context_length=batch["context_length"])
    vocab_size = logits.size(-1)
    target = torch.full_like(logits, label_smoothing / vocab_size)
    target.scatter_(2, batch["targets"][..., None], 1 - label_smoothing + label_smoothing / vocab_size)
    return -(target * logits.log_softmax(-1)).sum(-1) * batch["loss_mask"]


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 0.5])
def test_loss_count_and_gradients_equal_the_slow_way(label_smoothing: float) -> None:
    model, batch = small_model(), small_batch()
    criterion = GLMCrossEntropy(GLMCrossEntropyConfig(label_smoothing=label_smoothing))

    output = criterion(model, batch)
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
    output = GLMCrossEntropy(GLMCrossEntropyConfig())(model, batch)
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
    output = GLMCrossEntropy(GLMCrossEntropyConfig())(small_model(), batch)
    assert [count.item() for _, count in output.meters.values()] == [output.num_targets.item(), 0, 0]


def test_a_batch_without_objectives_has_no_meters_for_them() -> None:
    batch = small_batch()
    del batch["objective"]
    assert GLMCrossEntropy(GLMCrossEntropyConfig())(small_model(), batch).meters == {}


def test_smoothing_adds_a_meter_of_the_likelihood_without_it() -> None:
    model, batch = small_model(), small_batch()
    output = GLMCrossEntropy(GLMCrossEntropyConfig(label_smoothing=0.2))(model, batch)
    total, count = output.meters["nll_loss"]
    torch.testing.assert_close(total, slow_losses(model, batch, 0.0).sum())
    assert count == output.num_targets
    assert output.loss != total


def test_positions_from_the_collater_stand_in_for_the_mask() -> None:
    model, batch = small_model(), small_batch()
    criterion = GLMCrossEntropy(GLMCrossEntropyConfig())
    expected = criterion(model, batch)
    positions = torch.tensor([i for i, loss in enumerate(batch["loss_mask"].flatten().tolist()) if loss])
    assert torch.equal(loss_positions(batch), positions)
    given = {name: value for name, value in batch.items() if name != "loss_mask"} | {"loss_positions": positions}
    computed = criterion(model, given)
    assert torch.equal(computed.loss, expected.loss)
    assert torch.equal(computed.num_targets, expected.num_targets)


def test_all_logits_are_never_made(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = small_model(), small_batch()
    shapes = []

    def recorded(hidden: Tensor) -> Tensor:
        shapes.append(tuple(hidden.shape))
        return model.token_embedding.logits(hidden)

    monkeypatch.setattr(model, "logits", recorded)
    GLMCrossEntropy(GLMCrossEntropyConfig())(model, batch)
    assert shapes == [(int(batch["loss_mask"].sum()), 16)]


def test_nothing_is_asked_of_the_host_once_the_collater_gave_the_positions() -> None:
    """On the meta device there are no values: whatever reads one, as `.item()` or `nonzero` does, fails."""
    batch = small_batch()
    batch["loss_positions"] = loss_positions(batch)
    model, batch = small_model().to("meta"), {name: value.to("meta") for name, value in batch.items()}
    criterion = GLMCrossEntropy(GLMCrossEntropyConfig(label_smoothing=0.1))
    output = criterion(model, batch)
    output.loss.backward()
    assert len(output.meters) == 4
    with pytest.raises(NotImplementedError):
        criterion(model, {name: value for name, value in batch.items() if name != "loss_positions"})


def test_a_batch_without_targets_gives_zero_and_can_go_backward() -> None:
    model, batch = small_model(), small_batch(loss_share=0.0)
    output = GLMCrossEntropy(GLMCrossEntropyConfig())(model, batch)
    assert (output.loss.item(), output.num_targets.item()) == (0.0, 0)
    output.loss.backward()
    assert all(p.grad is not None and p.grad.abs().max() == 0 for p in model.parameters())


def test_loss_is_float32_under_bfloat16() -> None:
    model, batch = small_model(), small_batch()
    criterion = GLMCrossEntropy(GLMCrossEntropyConfig())
    expected = criterion(model, batch).loss.item()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = criterion(model, batch)
    assert output.loss.dtype == torch.float32
    assert output.loss.item() == pytest.approx(expected, rel=1e-2)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_generic_cross_entropy_asks_for_tokens_alone(label_smoothing: float) -> None:
    model = torch.nn.Embedding(20, 20)  # tokens [B, T] -> logits [B, T, 20]
    batch = {name: small_batch()[name] for name in ("tokens", "targets", "loss_mask")}
    output = CrossEntropy(CrossEntropyConfig(label_smoothing=label_smoothing))(model, batch)
    mask = batch["loss_mask"]
    expected = torch.nn.functional.cross_entropy(
        model(batch["tokens"])[mask], batch["targets"][mask], reduction="sum", label_smoothing=label_smoothing
    )
    torch.testing.assert_close(output.loss, expected)
    assert output.num_targets == mask.sum()


def test_criterions_are_built_by_name() -> None:
    for name, kind in (("cross_entropy", CrossEntropy), ("glm_cross_entropy", GLMCrossEntropy)):
        entry = CRITERIONS.get(name)
        assert entry.config is not None
        assert isinstance(entry.target(entry.config()), kind)


@pytest.mark.parametrize("value", [-0.1, 1.0])
def test_impossible_smoothing_is_named(value: float) -> None:
    assert list(GLMCrossEntropyConfig(label_smoothing=value).validate()) == [
        f"label_smoothing is {value}; it must be in [0, 1)"
    ]
