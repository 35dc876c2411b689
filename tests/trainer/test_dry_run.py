"""What --dry-run estimates, against the same by hand."""

from __future__ import annotations

import pytest

from ftk.config import compose
from ftk.trainer.config import TrainConfig
from ftk.trainer.dry_run import memory_bytes
from ftk_cli.train import main

SHAPE = ("--num-layers", "4", "--hidden-size", "64", "--arch", "glm_tiny", "--max-update", "1")
LAYERS, HIDDEN, BATCH, TOKENS = 4, 64, 2, 100
LOSS = 36 * 2 * 4  # bytes a row of the vocabulary: 18 % of 200 positions, two values each


def estimate(*flags):
    """(bytes of each trained parameter, values of H that a token leaves, bytes of a value) with the loss taken out."""
    config = compose(TrainConfig, "ftk-train", "", ["data", *SHAPE, *flags])
    weights, activations = memory_bytes(config, 1000, 1000, BATCH, TOKENS)
    return weights / 1000, (activations - LOSS * config.model.config.vocab_size) / (HIDDEN * BATCH * TOKENS)


@pytest.mark.parametrize(
    ("flags", "weight"),
    [
        ((), 16),  # weight, gradient, two moments
        (("--ema-decay", "0.9"), 20),
        (("--optimizer", "sgd"), 8),
        (("--optimizer", "sgd", "--momentum", "0.9"), 12),
        (("--optimizer", "lion"), 12),
        (("--optimizer", "adafactor"), 8),
        (("--optimizer", "adafactor", "--beta1", "0.9"), 12),
    ],
)
def test_the_state_of_the_optimizer_counts(flags, weight):
    assert estimate(*flags)[0] == weight


@pytest.mark.parametrize(
    ("flags", "values"),
    [
        ((), 17 * LAYERS * 4),
        (("--precision", "bf16"), 17 * LAYERS * 2),
        (("--precision", "fp16"), 17 * LAYERS * 2),
        (("--activation-checkpointing", "full"), (LAYERS + 16) * 4),
        (("--activation-checkpointing", "full", "--checkpoint-every", "3"), (2 * 17 + 2 + 16) * 4),
        (("--activation-checkpointing", "selective"), (10 * LAYERS + 7) * 4),
    ],
)
def test_precision_and_checkpointing_count(flags, values):
    assert estimate(*flags)[1] == values


def test_the_chunked_loss_holds_one_chunk():
    rows = []
    for flags in ((), ("--loss-chunk-tokens", "9"), ("--loss-form", "plain")):
        config = compose(TrainConfig, "ftk-train", "", ["data", *SHAPE, *flags])
        layers = 17 * LAYERS * 4 * HIDDEN * BATCH * TOKENS
        rows.append((memory_bytes(config, 1, 1, BATCH, TOKENS)[1] - layers) / (8 * config.model.config.vocab_size))
    assert rows == [36, 9, 36]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--arch bert_tiny --task causal_lm", "bert_tiny is trained by --task masked_lm: leave --task out"),
        ("--arch glm_tiny --task causal_lm", "glm_tiny is trained by --task glm_blank: leave --task out"),
        ("--arch gpt2_tiny --task glm_blank", "does not fit the model gpt2 (GPT2Config.__init__() got an"),
        ("--arch glm_tiny --criterion masked_lm", "--criterion masked_lm is for --task masked_lm, not for glm_blank"),
        ("--arch bert_tiny --pairs --criterion cross_entropy", "reads one hidden state for each target, but"),
        ("--arch glm_tiny --seq-length 513", "--seq-length 513 is beyond the model's 512 positions"),
        (
            "--arch glm_tiny --task causal_lm --seq-length 1024",
            "--seq-length 1024 (the task's default) is beyond the model's 512 positions",
        ),
    ],
)
def test_what_the_first_batch_would_refuse_is_refused(data_bin, capsys, flags, message):
    given = flags if "--seq-length" in flags else f"{flags} --seq-length 32"
    assert main([str(data_bin), *given.split(), "--max-update", "1", "--dry-run"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("arch", ["glm_tiny", "bert_tiny --pairs", "gpt2_tiny"])
def test_what_fits_is_described(data_bin, capsys, arch):
    assert main([str(data_bin), "--arch", *arch.split(), "--seq-length", "32", "--max-update", "1", "--dry-run"]) == 0
    assert "updates in total" in capsys.readouterr().out
