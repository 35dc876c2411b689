"""Runs of several processes: signals to one of them, one that fails or is killed, mistakes in what is asked for."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import time

import pytest
import torch

import ftk.checkpoint.save
from ftk.errors import Diverged, UserError
from ftk_cli import ranks
from ftk_cli.command import Reported, report_errors
from ftk_cli.train import main
from ftk_cli.validate import main as validate_main
from tests.distributed import run_main
from tests.torchrun import rank_pid, started, torchrun

PLUGIN = """
import time

from ftk.registry import register_hook
from ftk.trainer.hooks import Hook


@register_hook("ill")
class Ill(Hook):
    def before_step(self, step, micro_batches):
        if step.world.rank == 1 and step.num_updates == 3:
            raise ValueError("the hardware is ill")


@register_hook("stuck")
class Stuck(Hook):
    def before_step(self, step, micro_batches):
        if step.world.rank == 1 and step.num_updates == 3:
            time.sleep(1000)
"""


@pytest.fixture
def arguments(data_bin, tmp_path):
    words = f"-m ftk_cli.train {data_bin} --arch glm_tiny --num-layers 2 --seq-length 32 --device cpu --batch-size 2 "
    words += f"--max-update 100000 --log-interval 1 --log-format json --save-dir {tmp_path / 'run'}"
    return words.split()


def wait_for_updates(folder, number):
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        path = folder / "metrics.jsonl"
        if path.exists() and len(path.read_text().splitlines()) >= number:
            return
        time.sleep(0.05)
    raise AssertionError(f"{folder} has not come to update {number}")


def own_lines(stderr):
    """What our processes say, without torchrun's report and without the log."""
    return [line for line in stderr.splitlines() if line.startswith("ftk-train:")]


def root_cause(stderr):
    return stderr.partition("Root Cause")[2]


def assert_goes_on(arguments, folder, stdout):
    """The checkpoint is of the last update that was printed, and the same command takes the one after it."""
    last = max(json.loads(line)["num_updates"] for line in stdout.splitlines())
    assert (folder / "checkpoint_last").resolve().name == f"checkpoint_{last}"
    continued = torchrun(2, *[str(last + 1) if word == "100000" else word for word in arguments])
    assert continued.returncode == 0, continued.stderr
    assert f"continuing after {last} updates" in continued.stderr
    assert json.loads(continued.stdout.splitlines()[0])["num_updates"] == last + 1


@pytest.mark.slow
def test_a_signal_to_one_process_stops_all_after_the_same_update(arguments, tmp_path):
    with started(2, *arguments) as process:
        wait_for_updates(tmp_path / "run", 2)
        os.kill(rank_pid(process.pid, 1), signal.SIGTERM)
        stdout, stderr = process.communicate(timeout=300)
    assert process.returncode == 0, stderr
    assert "stopped: SIGTERM was received" in stderr
    assert_goes_on(arguments, tmp_path / "run", stdout)


@pytest.mark.slow
def test_torchrun_passes_a_signal_on_and_the_run_is_saved(arguments, tmp_path):
    with started(2, *arguments) as process:
        wait_for_updates(tmp_path / "run", 2)
        rank_0 = rank_pid(process.pid, 0)
        process.send_signal(signal.SIGTERM)  # torchrun passes it on ...
        os.kill(rank_0, signal.SIGTERM)  # ... as does whoever ends all processes of the job
        stdout, stderr = process.communicate(timeout=300)
    assert process.returncode != 0  # torchrun's own: it was ended
    assert stderr.count("SIGTERM: finishing this update") == 1
    assert "stopped: SIGTERM was received" in stderr
    assert own_lines(stderr) == []
    assert_goes_on(arguments, tmp_path / "run", stdout)


@pytest.mark.slow
def test_a_killed_process_takes_the_others_along_and_is_named(arguments, tmp_path):
    with started(2, *arguments) as process:
        wait_for_updates(tmp_path / "run", 2)
        killed = rank_pid(process.pid, 1)
        os.kill(killed, signal.SIGKILL)
        _, stderr = process.communicate(timeout=300)
    assert process.returncode != 0
    assert "rank      : 1" in root_cause(stderr)
    assert f"Signal 9 (SIGKILL) received by PID {killed}" in root_cause(stderr)
    assert len(own_lines(stderr)) <= 1  # one of those that are left, and it blames no one
    assert not any("Error" in line for line in own_lines(stderr))


def test_a_failure_of_one_process_is_shown_first_and_last(arguments, tmp_path):
    (tmp_path / "ill.py").write_text(PLUGIN)
    done = torchrun(2, *arguments, "--user-dir", tmp_path / "ill.py", "--hooks", "ill")
    assert done.returncode != 0
    assert [json.loads(line)["num_updates"] for line in done.stdout.splitlines()] == [1, 2, 3]
    [said] = own_lines(done.stderr)
    assert said.startswith("ftk-train: process 1: ValueError: the hardware is ill")
    before, _, after = done.stderr.partition(said)
    assert "Traceback" not in before
    assert "rank      : 1" in root_cause(after)
    assert "the hardware is ill" in root_cause(after)


@pytest.mark.slow
def test_a_process_that_hangs_is_named_by_those_that_wait_for_it(arguments, tmp_path):
    (tmp_path / "ill.py").write_text(PLUGIN)
    hangs = ["--user-dir", tmp_path / "ill.py", "--hooks", "stuck", "--collective-timeout-minutes", 0.25]
    done = torchrun(2, *arguments, *hangs, options=("--shutdown-timeout", "1"))
    assert done.returncode != 0
    [said] = own_lines(done.stderr)
    assert said.startswith("ftk-train: process 0: ProcessHangs: timed out after 15 seconds; process")
    assert "process 1 hangs or has lost the connection; --collective-timeout-minutes gives it longer" in said
    assert "process 1 hangs" in root_cause(done.stderr)


def test_a_mistake_is_said_once_before_anything_starts(arguments, tmp_path):
    flags = ["--tensor-parallel-size", "2", "--num-attention-heads", "3", "--hidden-size", "48"]
    ended = run_main(main, [[*arguments[2:], *flags]] * 2)
    assert ended.codes == [2, 2]
    [said] = own_lines(ended.stderr)
    assert "3 attention heads, which 2" in said
    assert not (tmp_path / "run").exists()
    assert ended.stdout == ""


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--max-update 7", "--max-update is 100000 on process 0 and 7 on process 1."),
        ("--tensor-parallel-size 2", "--tensor-parallel-size is 1 on process 0 and 2 on process 1."),
    ],
)
def test_processes_that_were_started_differently_are_refused_before_anything_is_written(
    arguments, tmp_path, flags, message
):
    ended = run_main(main, [arguments[2:], [*arguments[2:], *flags.split()]])
    assert ended.codes == [2, 2]
    assert own_lines(ended.stderr) == [
        f"ftk-train: the processes were started differently: {message} Start all of them with the same command"
    ]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--tensor-parallel-size 3", "--tensor-parallel-size 3 does not divide the number of processes, 2"),
        ("--data-parallel-shard-size 2 --data-parallel-replicate-size 2", "is not the number of processes, 2"),
        ("--tensor-parallel-size 2 --num-attention-heads 3 --hidden-size 48", "3 attention heads, which 2"),
        ("--pipeline-parallel-size 2 --num-layers 1", "has 1 layers"),
        ("--pipeline-parallel-size 2", "needs 2 micro-batches per update or more, --update-freq is 1"),
        ("--pipeline-parallel-size 2 --update-freq 2 --compile model", "--compile model is for whole models"),
        (
            "--pipeline-parallel-size 2 --update-freq 2 --freeze *_embedding layers.0",
            "--freeze leaves rank 0 of the pipeline, with the layers 0, no parameter to train",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_the_numbers(arguments, tmp_path, flags, message, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    assert main([*arguments[2:], *flags.split()]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert not torch.distributed.is_initialized()


def test_ftk_validate_counts_every_sample_once(arguments, data_bin, tmp_path, capsys):
    assert main([*arguments[2:], "--max-update", "1"]) == 0
    validate = [str(data_bin), "--path", str(tmp_path / "run"), "--batch-size", "3", "--output-format", "json"]
    validate += ["--device", "cpu", "--max-samples", "13", "--unigram"]
    capsys.readouterr()
    assert validate_main(validate) == 0
    expected = json.loads(capsys.readouterr().out)
    ended = run_main(validate_main, [validate] * 2)
    assert ended.codes == [0, 0], ended.stderr
    [found] = map(json.loads, ended.stdout.splitlines())
    for figures in (expected, found):
        figures.pop("valid_seconds")
        assert figures.pop("subset") == "valid"
    for name in ("path", "settings"):
        assert found.pop(name) == expected.pop(name)
    assert found == pytest.approx(expected, rel=1e-6)
    assert found["num_batches"] == 5


@pytest.mark.parametrize(
    ("flags", "row"),
    [
        ("", None),
        ("--tensor-parallel-size 2 --data-parallel-shard-size 4", "8 (shard 4 x tensor 2), 4 data-parallel"),
        ("--pipeline-parallel-size 2 --update-freq 2", "2 (pipeline 2), 1 data-parallel"),
    ],
)
def test_a_dry_run_says_what_the_processes_would_be(arguments, flags, row, capsys):
    assert main([*arguments[2:], *flags.split(), "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line for line in lines if line.startswith("processes ")]
    assert (rows == []) if row is None else (row in rows[0])
    samples = next(line for line in lines if line.startswith("samples per update"))
    assert samples.split()[-1] == {None: "2"}.get(row, "8" if "shard" in flags else "4")


def test_a_process_alone_is_told_how_to_start_several(arguments, capsys):
    assert main([*arguments[2:], "--tensor-parallel-size", "2"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith("use torchrun --nproc-per-node 2 ...")


@pytest.mark.parametrize("size", [1, 2])
def test_log_files_have_what_is_said_before_the_first_update(arguments, tmp_path, size):
    logs = ["--log-file", tmp_path / "log.txt", "--log-all-ranks", tmp_path / "ranks"]
    first, longer = (
        ["2" if word == "100000" else word for word in [*arguments, "--update-freq", "2"]],
        ["--max-update", "3"],
    )
    assert main([*first[2:], *map(str, logs), "--restore-from", str(tmp_path / "nothing")]) == 2
    assert not (tmp_path / "log.txt").exists()  # a run that is refused changes nothing
    assert main(first[2:]) == 0
    done = run_main(main, [[*first[2:], *longer, *map(str, logs), "--update-freq", str(2 // size)]] * size)
    assert done.returncode == 0, done.stderr
    paths = [tmp_path / "log.txt", *(tmp_path / "ranks" / f"rank_{rank}.log" for rank in range(size))]
    for lines in (path.read_text().splitlines() for path in paths):
        said = [line.partition("| INFO | ")[2] or line.partition("| WARNING | ")[2] for line in lines]
        assert len([line for line in said if line.startswith("loading ") and "checkpoint_2" in line]) == 1
        assert any(line.startswith("changed since this checkpoint") for line in said)
        assert "train | update 3/3" in "".join(lines)
    on_console = [line for line in done.stderr.splitlines() if "| INFO |" in line or "| WARNING |" in line]
    assert set(on_console) <= set(paths[0].read_text().splitlines())


# -- who speaks: the parts by themselves ---------------------------------------------------------------------


@pytest.fixture
def as_rank(tmp_path, monkeypatch):
    """Makes this process one of two."""

    def become(rank):
        (tmp_path / str(rank)).mkdir(exist_ok=True)
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv(ranks.ERROR_FILE, str(tmp_path / str(rank) / "error.json"))

    monkeypatch.setattr(ranks, "WAIT_SECONDS", 0.2)
    monkeypatch.setattr(ranks.time, "sleep", lambda seconds: None)
    return become


def test_the_first_to_fail_speaks_and_the_others_do_not(as_rank, tmp_path):
    as_rank(1)
    assert ranks.message_to_print(ValueError("a"), "ValueError: a") == "process 1: ValueError: a"
    as_rank(0)
    assert ranks.message_to_print(ValueError("b"), "ValueError: b") is None
    for rank, text in ((1, "ValueError: a"), (0, "ValueError: b")):
        assert json.loads((tmp_path / str(rank) / "error.json").read_text())["message"]["message"] == text


def test_a_last_save_that_fails_is_left_where_torchrun_looks(arguments, tmp_path, monkeypatch):
    def full(*arguments, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(ftk.checkpoint.save, "write_tensors", full)
    monkeypatch.setenv(ranks.ERROR_FILE, str(tmp_path / "error.json"))
    assert main(["2" if word == "100000" else word for word in arguments[2:]]) == 1
    told = json.loads((tmp_path / "error.json").read_text())["message"]
    assert told["message"].startswith("the end of this run is not saved")
    assert told["message"].endswith("the same command starts from the beginning")
    assert told["extraInfo"]["py_callstack"] == told["message"]


@pytest.mark.parametrize("kind", [UserError, Diverged])
def test_what_all_ranks_raise_is_not_one_processs(as_rank, kind):
    as_rank(1)
    assert ranks.message_to_print(kind("no such file"), "no such file") == "no such file"


@pytest.mark.parametrize(
    ("torchrun_runs", "end"), [(True, "; torchrun names the first failure below"), (False, "")], ids=str
)
def test_a_lost_connection_leaves_the_word_to_the_cause(as_rank, tmp_path, monkeypatch, torchrun_runs, end):
    lost = RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:1234")
    as_rank(1)
    if torchrun_runs:
        monkeypatch.setenv(ranks.TORCHRUN, "none")
    assert ranks.message_to_print(lost, "RuntimeError: ...") == f"process 1 lost its connection to another process{end}"
    assert not (tmp_path / "1" / "error.json").exists()
    as_rank(0)
    assert ranks.message_to_print(lost, "RuntimeError: ...") is None


def test_a_time_limit_is_not_a_lost_connection(as_rank, tmp_path):
    as_rank(0)
    in_vain = RuntimeError("[unbound_buffer.cc:78] Timed out waiting 600000ms for recv operation to complete")
    assert ranks.message_to_print(in_vain, "in vain") == "process 0: in vain"
    assert json.loads((tmp_path / "0" / "error.json").read_text())["message"]["message"] == "in vain"


def test_a_reader_of_the_output_who_has_gone_is_not_said(capsys):
    with pytest.raises(BrokenPipeError), report_errors("ftk-train"):
        raise BrokenPipeError(32, "Broken pipe")
    with pytest.raises(Reported) as said, report_errors("ftk-train"):
        raise ValueError("ill")
    assert said.value.args == (1,)
    place = r"at \S+test_ranks.py:\d+: raise ValueError\(.ill.\)"  # in what is not ftk's, as in a plugin
    told = capsys.readouterr().err
    assert re.fullmatch(rf"ftk-train: ValueError: ill \({place}\) \(--traceback shows where\)\n", told)


def test_a_signal_is_said_by_the_first_process_alone(as_rank):
    as_rank(1)
    assert ranks.message_to_print(KeyboardInterrupt(), "interrupted") is None
    as_rank(0)
    assert ranks.message_to_print(KeyboardInterrupt(), "interrupted") == "interrupted"
