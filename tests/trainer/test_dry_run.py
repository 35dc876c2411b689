"""What --dry-run estimates, against what runs take, and what it refuses."""

from __future__ import annotations

import re

import pytest

from ftk_cli.train import main
from tests.held import Held


def estimate(data_bin, capsys, *flags):
    """(GiB of weights and states, GiB of activations) that --dry-run prints."""
    assert main([str(data_bin), *flags, "--max-update", "1", "--dry-run"]) == 0
    found = re.findall(r"^memory, .*? ([0-9.]+) GiB", capsys.readouterr().out, re.MULTILINE)
    return tuple(map(float, found))


@pytest.mark.parametrize(
    ("flags", "each"),
    [
        ("", 16),  # weight, gradient, two moments
        ("--ema-decay 0.9", 20),
        ("--optimizer sgd", 8),
        ("--optimizer sgd --momentum 0.9", 12),
        ("--optimizer lion", 12),
        ("--optimizer adafactor", 8),
        ("--optimizer adafactor --beta1 0.9", 12),
        ("--adapter lora", 4),
    ],
)
def test_the_state_of_the_optimizer_counts(data_bin, capsys, flags, each):
    numel = 24 * 12 * 1024**2  # of the layers of glm_large, but for 3 %
    weights, _ = estimate(data_bin, capsys, "--arch", "glm_large", *flags.split())
    assert weights * 2**30 / numel == pytest.approx(each, rel=0.05)


@pytest.mark.parametrize(
    "flags",
    [
        "--arch glm_tiny",
        "--arch gpt2_tiny",
        "--arch gpt2_tiny --activation-checkpointing full",
        "--arch gpt2_tiny --activation-checkpointing selective --checkpoint-every 2",
    ],
)
def test_a_run_takes_about_as_much_as_estimated(data_bin, tmp_path, capsys, flags):
    """Of small models without dropout of attention, for which a CPU would make whole matrices of scores."""
    shape = [*flags.split(), "--attention-dropout", "0", "--batch-size", "32", "--seq-length", "256"]
    estimated = sum(estimate(data_bin, capsys, *shape))
    run = [
        "--max-update",
        "1",
        "--valid-subset",
        "none",
        "--num-workers",
        "0",
        "--save-dir",
        str(tmp_path),
        "--no-save",
    ]
    with Held() as held:
        assert main([str(data_bin), *shape, *run, "--device", "cpu"]) == 0
    assert held.peak / 2**30 == pytest.approx(estimated, rel=0.2)


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
        # Of a pipeline's ranks only the last would refuse it.
        (
            "--arch glm_tiny --loss-form linear --tensor-parallel-size 2 --update-freq 2 --pipeline-parallel-size 2",
            "--loss-form linear needs the whole vocabulary on each process",
        ),
        (
            "--arch bert_tiny --loss-form chunked --update-freq 2 --pipeline-parallel-size 2",
            "--loss-form chunked needs a model whose output layer is one matrix",
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
