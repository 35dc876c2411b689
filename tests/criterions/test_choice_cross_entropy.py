"""The loss of choices among candidates, against the slow way that goes question by question."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from ftk.batch import Batch
from ftk.criterions.base import Scores
from ftk.criterions.choice_cross_entropy import LOSSES, ChoiceCrossEntropy, ChoiceCrossEntropyConfig
from tests.distributed import run_ranks

VOCAB, HIDDEN = 13, 8
# Of each question, how many tokens its candidates have, and which are right.
QUESTIONS: list[tuple[list[int], list[int]]] = [
    ([1, 3, 2], [1]),
    ([2, 2], [0]),
    ([1, 1, 2, 4], [0, 3]),
    ([3], [0]),
    ([2], []),
]


class Output(nn.Module):
    """An output layer without a bias."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        values = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(1))
        self.weight = nn.Parameter(scale * values)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden @ self.weight.T


def batch_of(divided: bool = True) -> Batch:
    """The batch of `QUESTIONS`."""
    draw = torch.Generator().manual_seed(2)
    lengths = [length for candidates, _ in QUESTIONS for length in candidates]
    right = [number in of for candidates, of in QUESTIONS for number in range(len(candidates))]
    question = [number for number, (candidates, _) in enumerate(QUESTIONS) for _ in candidates]
    divisor = torch.tensor(lengths, dtype=torch.float32) if divided else torch.ones(len(lengths))
    return Batch(
        inputs={},
        targets=torch.randint(VOCAB, (sum(lengths),), generator=draw),
        places=torch.arange(sum(lengths)),
        extras={
            "right": torch.tensor(right),
            "question": torch.tensor(question),
            "answerable": torch.tensor([float(bool(of)) for _, of in QUESTIONS]),
            "candidate": torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
            "divisor": divisor,
        },
    )


def words_of() -> Batch:
    """Three questions, each with its words at one place."""
    return Batch(
        inputs={},
        targets=torch.tensor([4, 7, 2]),
        places=torch.arange(3),
        extras={
            "right": torch.tensor([True, False, False, True, False, False, True]),
            "question": torch.tensor([0, 0, 1, 1, 2, 2, 2]),
            "answerable": torch.ones(3),
            "token": torch.tensor([4, 5, 5, 7, 1, 0, 2]),
        },
    )


def hidden_of(batch: Batch) -> Tensor:
    values = torch.randn(len(batch.places), HIDDEN, generator=torch.Generator().manual_seed(3))
    return values.requires_grad_()


def slow(logits: Tensor, batch: Batch, kind: str) -> tuple[Tensor, int, int]:
    """Loss, questions with a right candidate, questions that are answered rightly."""
    logprobs = logits.log_softmax(-1)
    extras = batch.extras
    total, count, num_right = logits.sum() * 0, 0, 0
    for number in range(len(extras["answerable"])):
        candidates = (extras["question"] == number).nonzero().flatten().tolist()
        scores = []
        greedy = False
        for candidate in candidates:
            if "token" in extras:
                scores.append((logits if kind == "cross_entropy" else logprobs)[number, extras["token"][candidate]])
                continue
            places = (extras["candidate"] == candidate).nonzero().flatten()
            scores.append(logprobs[places, batch.targets[places]].sum() / extras["divisor"][candidate])
            greedy = bool((logprobs[places].argmax(-1) == batch.targets[places]).all())
        right = [bool(extras["right"][candidate]) for candidate in candidates]
        best = max(range(len(scores)), key=lambda place: float(scores[place].detach()))
        num_right += (right[best] if greedy else not any(right)) if len(scores) == 1 else right[best]
        if any(right):
            of_right = torch.stack([one for one, fits in zip(scores, right, strict=True) if fits]).logsumexp(0)
            choice = torch.stack(scores).logsumexp(0) - of_right
            total = total + {"cross_entropy": choice, "generative": -of_right, "mix": choice - of_right}[kind]
            count += 1
    return total, count, num_right


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("batch", [batch_of(), batch_of(divided=False), words_of()], ids=["mean", "sum", "words"])
def test_loss_count_accuracy_and_gradients_equal_the_slow_way(batch: Batch, kind: str) -> None:
    criterion, head, hidden = ChoiceCrossEntropy(ChoiceCrossEntropyConfig(choice_loss=kind)), Output(), hidden_of(batch)
    output = criterion.loss(head, hidden, batch)
    expected, count, num_right = slow(head(hidden), batch, kind)
    torch.testing.assert_close(output.loss, expected)
    assert float(output.num_targets) == count == criterion.count(batch)
    assert [float(part) for part in output.meters["accuracy"]] == [num_right, len(batch.extras["answerable"])]
    ours = torch.autograd.grad(output.loss, [hidden, head.weight])
    theirs = torch.autograd.grad(expected, [hidden, head.weight])
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


def test_words_are_compared_by_their_logits_and_other_rows_have_no_gradient() -> None:
    batch, head = words_of(), Output()
    hidden = hidden_of(batch)
    output = ChoiceCrossEntropy(ChoiceCrossEntropyConfig()).loss(head, hidden, batch)
    logits = head(hidden)
    expected = [
        nn.functional.cross_entropy(logits[row, tokens], torch.tensor(right))
        for row, (tokens, right) in enumerate((([4, 5], 0), ([5, 7], 1), ([1, 0, 2], 2)))
    ]
    torch.testing.assert_close(output.loss, torch.stack(expected).sum())
    (gradient,) = torch.autograd.grad(output.loss, [head.weight])
    rows = gradient.abs().sum(1).nonzero().flatten().tolist()
    assert rows == sorted({4, 5, 7, 1, 0, 2})


def test_scores_far_apart_keep_their_gradients() -> None:
    batch, head = batch_of(divided=False), Output(scale=200.0)
    hidden = hidden_of(batch)
    output = ChoiceCrossEntropy(ChoiceCrossEntropyConfig()).loss(head, hidden, batch)
    assert math.isfinite(output.loss.item())
    gradients = torch.autograd.grad(output.loss, [hidden, head.weight])
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert gradients[0].abs().sum() > 0


def test_of_equal_scores_the_first_is_chosen() -> None:
    batch = words_of()
    accuracy = (
        ChoiceCrossEntropy(ChoiceCrossEntropyConfig()).loss(Output(0.0), hidden_of(batch), batch).meters["accuracy"]
    )
    assert [float(part) for part in accuracy] == [1, 3]  # the first question's right word stands first


def test_an_only_candidate_is_chosen_where_the_model_would_write_it() -> None:
    targets, likeliest = torch.tensor([4, 4, 4, 4]), torch.tensor([4, 5, 4, 5])
    extras = {
        "right": torch.tensor([True, True, False, False]),
        "question": torch.arange(4),
        "answerable": torch.tensor([1.0, 1.0, 0.0, 0.0]),
        "candidate": torch.arange(4),
        "divisor": torch.ones(4),
    }
    batch = Batch({}, targets, torch.arange(4), extras=extras)
    logits = nn.functional.one_hot(likeliest, VOCAB).float().requires_grad_()
    output = ChoiceCrossEntropy(ChoiceCrossEntropyConfig()).loss(Scores(), logits, batch)
    # Right: it would write the right one, and it would not write the wrong one.
    assert [float(part) for part in output.meters["accuracy"]] == [2, 4]


@pytest.mark.parametrize("batch", [batch_of(), words_of()], ids=["texts", "words"])
def test_a_batch_without_loss_still_depends_on_the_hidden_states(batch: Batch) -> None:
    empty = batch.without_loss()
    hidden = torch.zeros(0, HIDDEN, requires_grad=True)
    for kind in LOSSES:
        criterion = ChoiceCrossEntropy(ChoiceCrossEntropyConfig(choice_loss=kind))
        output = criterion.loss(Output(), hidden, empty)
        assert (float(output.loss), float(output.num_targets), criterion.count(empty)) == (0.0, 0.0, 0.0)
        (gradient,) = torch.autograd.grad(output.loss, [hidden])
        assert gradient.shape == (0, HIDDEN)


def of_a_shared_vocabulary() -> list[list[Any]]:
    """Loss, accuracy and gradients of this rank, whose output layer has a part of the rows."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    found = []
    for batch in (batch_of(), words_of()):
        for kind in LOSSES:
            head, hidden = Output(), hidden_of(batch)
            head.weight = nn.Parameter(distribute_tensor(head.weight.data, mesh, [Shard(0)]))
            output = ChoiceCrossEntropy(ChoiceCrossEntropyConfig(choice_loss=kind)).loss(head, hidden, batch)
            output.loss.backward()
            assert head.weight.grad is not None
            values = (output.loss, output.meters["accuracy"][0], hidden.grad, head.weight.grad.full_tensor())
            found.append([value.tolist() for value in values])
    return found


def test_ranks_that_share_the_vocabulary_find_the_same() -> None:
    expected = []
    for batch in (batch_of(), words_of()):
        for kind in LOSSES:
            head, hidden = Output(), hidden_of(batch)
            output = ChoiceCrossEntropy(ChoiceCrossEntropyConfig(choice_loss=kind)).loss(head, hidden, batch)
            output.loss.backward()
            expected.append([output.loss.detach(), output.meters["accuracy"][0], hidden.grad, head.weight.grad])
    for found in run_ranks(of_a_shared_vocabulary, 2):
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close([*map(torch.tensor, ours)], theirs, atol=1e-6, rtol=1e-5)
