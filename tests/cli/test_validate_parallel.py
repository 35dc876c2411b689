"""ftk-validate of a model that processes share: the figures of one process, and no process holds the whole."""

from __future__ import annotations

import json
import shlex

import pytest

from ftk_cli.train import main as train_main
from ftk_cli.validate import main
from tests.cli.validate_jobs import run_all
from tests.distributed import run_jobs
from tests.tiers import slow_but, wants_slow

# Name: processes, flags, the largest share of the model that one of them holds. Of so small a model the embeddings are
# the most: tensor parallel cuts those of tokens, not those of positions; a pipeline has the former at both ends.
CASES = {
    "T2": (2, "--tensor-parallel-size 2", 0.65),
    "P2": (2, "--pipeline-parallel-size 2", 0.98),
    "T2 average": (2, "--tensor-parallel-size 2 --ema", 0.65),
    "P2 average": (2, "--pipeline-parallel-size 2 --ema", 0.98),
    "T2 bf16": (2, "--tensor-parallel-size 2 --precision bf16", 0.65),
    "P2 bf16": (2, "--pipeline-parallel-size 2 --precision bf16", 0.98),
    "T4": (4, "--tensor-parallel-size 4", 0.45),
    "P4": (4, "--pipeline-parallel-size 4", 0.95),
    "T2 P2": (4, "--tensor-parallel-size 2 --pipeline-parallel-size 2", 0.5),
    "T2 R2": (4, "--tensor-parallel-size 2", 0.65),
    "P2 R2": (4, "--pipeline-parallel-size 2", 0.98),
}
QUICK = ("T2", "P2", "P2 average", "T2 bf16")  # before each commit
SHARING = {"--tensor-parallel-size", "--pipeline-parallel-size"}


def without_sharing(flags):
    """The flags of the one process with which a case is compared."""
    words = shlex.split(flags)
    return [word for at, word in enumerate(words) if not SHARING & {word, words[at - 1]}]


@pytest.fixture(scope="module")
def run_folder(data_bin, tmp_path_factory):
    """A few updates at a high rate, so that the moving average is another model than the weights."""
    folder = tmp_path_factory.mktemp("validate") / "run"
    flags = "--arch glm_tiny --seq-length 48 --device cpu --batch-size 4 --max-update 3 --lr 3e-3 --warmup-updates 0 "
    # A loss that is made from the output layer's matrix, which a pipeline has on its last stage alone.
    flags += f"--label-smoothing 0.1 --loss-form chunked --ema-decay 0.9 --save-dir {folder}"
    assert train_main([str(data_bin), *shlex.split(flags)]) == 0
    return folder


@pytest.fixture(scope="module")
def figures(data_bin, run_folder, request):
    """Name -> (figures, numbers that each process holds); "alone" and its flags for one process."""
    found = {}
    cases = CASES if wants_slow(request) else {name: CASES[name] for name in QUICK}
    jobs = {name: (size, shlex.split(flags)) for name, (size, flags, _) in cases.items()}
    alone = {tuple(without_sharing(flags)) for _, flags, _ in cases.values()}
    jobs |= {("alone", *flags): (1, list(flags)) for flags in alone}
    base = [str(data_bin), "--path", str(run_folder), "--batch-size", "3", "--max-samples", "13", "--device", "cpu"]
    for size in sorted({size for size, _ in jobs.values()}):
        names = [name for name, (of, _) in jobs.items() if of == size]
        arguments = [[*base, "--output-format", "json", *jobs[name][1]] for name in names]
        done = run_jobs(run_all, size, arguments)
        assert done.returncode == 0, done.stderr
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        assert len(lines) == 2 * len(names), done.stdout  # the main process alone speaks
        found |= {name: (lines[2 * at + 1], lines[2 * at]["held"]) for at, name in enumerate(names)}
    return found


@pytest.mark.parametrize("name", slow_but(QUICK, CASES))
def test_processes_that_share_a_model_find_what_one_process_finds(figures, name):
    size, flags, share = CASES[name]
    expected, [whole] = figures[("alone", *without_sharing(flags))]
    found, held = figures[name]
    assert len(held) == size
    assert max(held) < share * whole
    assert found.keys() == expected.keys() >= {"loss", "nll_loss", "num_targets", "num_batches"}
    assert (found["num_targets"], found["num_batches"]) == (expected["num_targets"], 5)
    tolerance = 1e-3 if "bf16" in name else 1e-6  # in bf16 partial sums are rounded where tensor parallel cuts them
    assert found["settings"] == expected["settings"]
    for figure in expected.keys() - {"subset", "valid_seconds", "settings", "path"}:
        assert found[figure] == pytest.approx(expected[figure], rel=tolerance), figure


def test_the_comparison_sees_a_difference(figures):
    plain, average, bf16 = (
        figures[("alone", *flags)][0]["loss"] for flags in ((), ("--ema",), ("--precision", "bf16"))
    )
    assert abs(plain - average) > 1e-3
    assert plain != bf16


@pytest.mark.parametrize(
    ("size", "flags", "message"),
    [
        (2, "--tensor-parallel-size 3", "--tensor-parallel-size 3 does not divide the number of processes, 2"),
        (1, "--pipeline-parallel-size 2", "use torchrun --nproc-per-node 2 ..."),
        (1, "--tensor-parallel-size 0", "--tensor-parallel-size is 0; it must be at least 1"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(data_bin, run_folder, size, flags, message, monkeypatch, capsys):
    if size > 1:
        monkeypatch.setenv("WORLD_SIZE", str(size))
        monkeypatch.setenv("RANK", "0")
    capsys.readouterr()
    assert main([str(data_bin), "--path", str(run_folder), "--device", "cpu", *shlex.split(flags)]) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert out == ""
    assert "Traceback" not in err
