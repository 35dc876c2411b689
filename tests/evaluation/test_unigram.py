"""The unigram baseline beside a slow one, in batches and with weights; what it says at the end of a run."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from ftk.evaluation.unigram import Unigram, token_counts
from ftk.trainer.log.summary import Summary


def slow_loss(documents, targets, absent, vocab_size):
    """Every probability by its definition, in Python."""
    counts = [1 + sum(int(token == v) for d in documents for token in d) for v in range(vocab_size)]
    text = sum(count for v, count in enumerate(counts) if v not in absent)
    shares = {v: list(targets).count(v) / len(targets) for v in absent}
    left = 1.0 - sum(shares.values())
    return -sum(math.log(shares[t] if t in absent else left * counts[t] / text) for t in targets) / len(targets)


@pytest.mark.parametrize("special", [[], [9], [9, 7, 0]])
def test_it_is_the_loss_of_the_training_frequencies(special):
    random = np.random.default_rng(3)
    documents = [random.integers(0, 7, length) for length in (5, 1, 30)]
    targets = random.choice([0, 1, 4, 6, 7, 8, 9], 200)
    model = Unigram(token_counts(documents, 10), special)
    sums = {}
    for part in np.array_split(targets, 7):
        for name, (total, count) in model.sums(part).items():
            old = sums.get(name, (0.0, 0.0))
            sums[name] = (old[0] + total, old[1] + count)
    expected = slow_loss(documents, targets.tolist(), set(special) - {0}, 10)
    assert Unigram.loss(sums) == pytest.approx(expected)
    assert Unigram.loss(model.sums(targets, np.full(200, 0.25))) == pytest.approx(expected)
    twice = model.sums(np.repeat(targets, 1 + (targets == 4)))
    assert Unigram.loss(model.sums(targets, 1.0 + (targets == 4))) == pytest.approx(Unigram.loss(twice))


def test_of_many_documents_some_from_everywhere_are_counted():
    documents = [np.full(10, index // 100) for index in range(1000)]
    assert token_counts(documents, 10).tolist() == [1000] * 10
    counts = token_counts(documents, 10, max_tokens=1000)
    assert counts.tolist() == [100] * 10


@pytest.mark.parametrize(
    ("facts", "said", "left_out"),
    [
        ({"loss": 5.0, "generates": True}, "next: ftk-interactive --path run", "unigram"),
        ({"loss": 5.0, "generates": True, "user_dir": "my plugin"}, "--path run --user-dir 'my plugin'", "unigram"),
        (
            {"loss": 5.0, "generates": True, "evaluation": "boolq", "data": "rows/valid.jsonl"},
            "next: ftk-evaluate --path run --evaluation boolq --data rows/valid.jsonl",
            "interactive",
        ),
        ({"loss": 5.0, "data": "data-bin"}, "next: ftk-validate data-bin --path run", "interactive"),
        ({"loss": 6.5, "generates": True}, "6.5000 is no better than the unigram baseline 6.0000", "interactive"),
        ({"loss": 6.5}, "validation loss 6.5000 is", "nll_loss"),
        ({"loss": 6.5, "loss_name": "nll_loss"}, "validation nll_loss 6.5000 is", "validation loss"),
        ({"loss": 5.0}, "(10 updates, epoch 1, 0:00:01 with validation and saving)", "of training"),
        ({"loss": 6.5, "warmup_updates": 50}, "next: a larger `max_update` or fewer `warmup_updates`", "lr_range"),
        ({"loss": 6.5}, "next: a larger `max_update`, or in another `save_dir` another `lr`", "ftk-"),
        ({"loss": 5.0, "generates": True, "skipped_updates": 6}, "next: a lower `lr` or longer", "interactive"),
        ({"loss": 5.0, "generates": True, "signal": "SIGTERM"}, "the same command continues this run", "next:"),
    ],
)
def test_the_end_of_a_run_names_what_it_can_do_next(facts, said, left_out):
    usual = {"signal": None, "skipped_updates": 0, "unigram_loss": 6.0}
    summary = Summary(
        num_updates=10, epoch=1, seconds=1.0, best=None, reason="max_update 10 is reached", folder=Path("run"),
        saved=True, save_failure=None, **{**usual, **facts},
    )  # fmt: skip
    text = "\n".join(summary.lines())
    assert said in text
    assert left_out not in text
