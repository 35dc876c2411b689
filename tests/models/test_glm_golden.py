"""Our GLM computes what the original code computed: logits, loss, gradients, and twenty steps of training."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ftk.batch import Batch
from ftk.criterions.cross_entropy import CrossEntropy, CrossEntropyConfig
from ftk.models.glm.convert import to_original
from ftk.models.glm.model import GLM
from ftk.modules.masked_attention import MaskedAttention
from ftk.modules.masks import Visibility
from ftk.optim.parameter_groups import parameter_groups
from tests import dense

criterion = CrossEntropy(CrossEntropyConfig())


def batch_of(arrays: dict[str, Tensor], index: int | None = None) -> Batch:
    """The golden arrays under the names of our batches; `index` picks one of several batches."""
    names = {
        "tokens": "input_ids",
        "targets": "targets",
        "position_ids": "position_ids",
        "context_length": "sep",
        "loss_mask": "loss_mask",
    }
    batch = {ours: arrays[theirs] for ours, theirs in names.items()}
    if index is not None:
        batch = {name: value[index] for name, value in batch.items()}
    return dense.batch_of(batch | {"loss_mask": batch["loss_mask"].bool()})


def test_logits_are_those_of_the_original(golden_model: GLM, golden_step: dict[str, Tensor]) -> None:
    with torch.no_grad():
        logits = golden_model(
            golden_step["input_ids"],
            position_ids=golden_step["position_ids"],
            context_length=golden_step["sep"],
        )
    torch.testing.assert_close(logits, golden_step["logits"], atol=1e-4, rtol=0)


def test_loss_is_that_of_the_original(golden_model: GLM, golden_step: dict[str, Tensor]) -> None:
    output = criterion(golden_model, batch_of(golden_step))
    assert output.num_targets == golden_step["loss_mask"].sum()
    mean = (output.loss / output.num_targets).item()
    assert mean == pytest.approx(golden_step["loss"].item(), abs=1e-5)


def test_every_gradient_is_that_of_the_original(
    golden_model: GLM, golden_step: dict[str, Tensor], golden_gradients: dict[str, Tensor]
) -> None:
    output = criterion(golden_model, batch_of(golden_step))
    (output.loss / output.num_targets).backward()
    gradients = {name: p.grad for name, p in golden_model.named_parameters() if p.grad is not None}
    gradients = to_original(gradients, golden_model.config)
    assert gradients.keys() == golden_gradients.keys()
    for name, expected in golden_gradients.items():
        torch.testing.assert_close(gradients[name], expected, atol=1e-4, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


def test_twenty_steps_of_adamw_follow_the_original(golden_model: GLM, golden_training: dict[str, Tensor]) -> None:
    optimizer = torch.optim.AdamW(
        parameter_groups(golden_model, weight_decay=0.1), lr=1e-3, betas=(0.9, 0.98), eps=1e-6, fused=True
    )
    losses, norms = [], []
    for step in range(20):
        output = criterion(golden_model, batch_of(golden_training, step % 2))
        loss = output.loss / output.num_targets
        optimizer.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(golden_model.parameters(), 1.0).item())
        losses.append(loss.item())
        optimizer.step()
    assert losses == pytest.approx(golden_training["losses"].tolist(), abs=1e-3)
    assert norms == pytest.approx(golden_training["grad_norms"].tolist(), abs=1e-3)
    assert losses[-1] < losses[0] - 0.5  # it learned, so the trajectory is worth following


def test_slow_reference_forward_gives_the_same_hidden_states(golden_model: GLM, golden_step: dict[str, Tensor]) -> None:
    """Attention as the textbook writes it, with the additive mask, in place of the fused kernel."""
    tokens, context_length = golden_step["input_ids"], golden_step["sep"]
    places = torch.arange(tokens.size(1))
    mask = Visibility(context_length).additive(places, places)

    def textbook(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = query @ key.transpose(-1, -2) / query.size(-1) ** 0.5
        return (scores + mask).softmax(dim=-1) @ value

    with torch.no_grad():
        hidden = golden_model.embed(tokens, golden_step["position_ids"])
        for layer in golden_model.layers:
            hidden = layer(hidden, textbook)
        expected = golden_model.final_norm(hidden)
        computed = golden_model.hidden_states(
            tokens, position_ids=golden_step["position_ids"], context_length=context_length
        )
    assert isinstance(golden_model.attend(tokens, context_length), MaskedAttention)
    torch.testing.assert_close(computed, expected, atol=1e-5, rtol=0)
