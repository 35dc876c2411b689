"""`--parallel auto`: which layout a run gets, why, and that it trains as if the layout had been given."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import yaml

from ftk.config import compose
from ftk.errors import UserError
from ftk.planner.cluster import GIB
from ftk.planner.search import search
from ftk.trainer import auto_parallel
from ftk.trainer.config import TrainConfig
from ftk.trainer.run import build_task
from ftk_cli.train import main
from tests.distributed import run_main

SHAPE = ["--arch", "glm_tiny", "--num-layers", "2", "--seq-length", "32", "--device", "cpu", "--batch-size", "2"]


def chosen(data_bin, monkeypatch, processes, *flags, gib=1.0):
    """What `processes` with `gib` of memory each would be given."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    cluster = dataclasses.replace(auto_parallel._CPU, memory_bytes=gib * GIB, gpus_per_node=processes)
    monkeypatch.setattr(auto_parallel, "this_cluster", lambda device, number: cluster)
    words = [str(data_bin), *SHAPE, "--max-update", "1", "--parallel", "auto", *flags]
    return auto_parallel.choose_layout(*build_task(compose(TrainConfig, "ftk-train", "", words)))


def sizes(config):
    parallel = config.parallel
    replicas, shards = parallel.data_parallel_replicate_size, parallel.data_parallel_shard_size
    return replicas, shards, parallel.pipeline_parallel_size, parallel.tensor_parallel_size


def test_the_planners_first_layout_is_taken_with_its_reasons(data_bin, monkeypatch, caplog):
    with caplog.at_level("INFO"):
        config = chosen(data_bin, monkeypatch, 4, "--update-freq", "3")
    replicas, shards, pipeline, tensor = sizes(config)
    assert (replicas * shards, pipeline, tensor) == (4, 1, 1)  # small models send more by other ways than they compute
    assert (config.parallel.layout, config.training.update_freq) == ("given", 3)
    assert "parallel auto: 4 processes: " in caplog.text
    assert "`update_freq` 3: the fastest that fits, 0.00 of 1.00 GiB a process by estimate; next: " in caplog.text
    assert "times as long" in caplog.text


def test_where_data_parallel_does_not_fit_layers_are_shared_and_an_update_keeps_its_samples(data_bin, monkeypatch):
    flags, limit = ("--num-layers", "8", "--batch-size", "16"), 1.0
    while max(sizes(config := chosen(data_bin, monkeypatch, 4, *flags, gib=limit))[2:]) == 1:
        limit /= 1.25
    replicas, shards, _, _ = sizes(config)
    assert replicas * shards * config.training.update_freq == 4
    assert config.dataloader.batch_size == 16


def test_an_encoder_decoder_is_planned_with_both_lengths(data_bin, monkeypatch):
    planned = []
    monkeypatch.setattr(auto_parallel, "search", lambda *given: planned.append(given[1]) or search(*given))
    assert math.prod(sizes(chosen(data_bin, monkeypatch, 4, "--arch", "bart_tiny", "--insert", "0.25"))) == 4
    [work] = planned
    assert (work.num_tokens, work.decoder_tokens, work.loss_share) == (40, 32, 1.0)


def test_a_layout_that_the_run_refuses_is_passed_over(data_bin, monkeypatch):
    def check(config, task):
        if sizes(config)[1] > 1:
            raise UserError("no shards here")

    assert sizes(chosen(data_bin, monkeypatch, 4))[1] > 1
    monkeypatch.setattr(auto_parallel, "check_parallel", check)
    assert sizes(chosen(data_bin, monkeypatch, 4))[1] == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tensor-parallel-size", "2"], "--parallel auto chooses this itself; leave it out, or --tensor-parallel"),
        (["--cpu-offload"], "--parallel auto chooses this itself; leave it out, or --cpu-offload"),
        (["--max-tokens", "512"], "give --batch-size instead of --max-tokens"),
    ],
)
def test_what_leaves_nothing_to_choose_is_refused(flags, message, data_bin, capsys):
    assert main([str(data_bin), *SHAPE, "--max-update", "1", "--parallel", "auto", *flags, "--dry-run"]) == 2
    assert message in capsys.readouterr().err


def test_nothing_fits(data_bin, monkeypatch):
    with pytest.raises(UserError, match=r"nothing fits 2 processes: .* needs .* GiB a process, which has"):
        chosen(data_bin, monkeypatch, 2, gib=1e-4)


def test_one_process_has_nothing_to_share_out(data_bin, monkeypatch, caplog):
    with caplog.at_level("INFO"):
        config = chosen(data_bin, monkeypatch, 1)
    assert config.parallel == dataclasses.replace(config.parallel, layout="given", data_parallel_shard_size=None)
    assert "one process, nothing to share out" in caplog.text


def test_two_processes_train_as_with_the_layout_given(data_bin, tmp_path):
    words = [data_bin, *SHAPE, "--max-update", 2, "--log-interval", 1, "--log-format", "json", "--valid-subset", "none"]
    words = [str(word) for word in words]
    done = run_main(main, [[*words, "--save-dir", str(tmp_path / "auto"), "--parallel", "auto"]] * 2)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("parallel auto: 2 processes: ") == 1
    found = losses(done)
    assert len(found) >= 2
    saved = yaml.safe_load((tmp_path / "auto" / "config.yaml").read_text(encoding="utf-8"))["parallel"]
    names = [f"data_parallel_{kind}_size" for kind in ("replicate", "shard")]
    assert saved[names[0]] * saved[names[1]] == 2
    given = [word for name in names for word in (f"--{name.replace('_', '-')}", saved[name])]
    stage = [] if saved.get("zero_stage") is None else ["--zero-stage", saved["zero_stage"]]
    more = [str(word) for word in ("--save-dir", tmp_path / "given", *given, *stage)]
    done = run_main(main, [[*words, *more]] * 2)
    assert done.returncode == 0, done.stderr
    assert losses(done) == found


def losses(done):
    return [json.loads(line)["loss"] for line in done.stdout.splitlines() if '"loss"' in line]
