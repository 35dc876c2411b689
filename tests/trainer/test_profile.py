"""`--profile`: a trace and a table of some updates; nothing else changes."""

from __future__ import annotations

import gzip
import json
import re

import pytest

from ftk.trainer.watch.profile import Profile
from tests.trainer.toy import assert_same, toy_trainer


def trace_of(folder, name):
    with gzip.open(folder / name, "rt", encoding="utf-8") as stream:
        return json.load(stream)["traceEvents"]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_trace_holds_the_chosen_updates_alone(tmp_path, num_workers, caplog):
    caplog.set_level("INFO")
    options = {"debug__profile": 2, "debug__profile_start": 3, "training__max_update": 8}
    watched = toy_trainer(tmp_path, dataloader__num_workers=num_workers, save_dir="watched", **options)
    watched.train()
    folder = watched.checkpoints.folder
    names = {event.get("name", "") for event in trace_of(folder, "profile_4-5.json.gz")}
    ranges = {name for name in names if re.match(r"update \d+:", name)}
    steps = ("forward and backward", "optimizer")
    assert ranges == {f"update {number}: {step}" for number in (4, 5) for step in steps}
    assert {"aten::addmm", "aten::_fused_adamw_"} <= names
    assert len(list(folder.glob("*profile_*"))) == 2  # nothing temporary is left

    text = (folder / "profile_4-5.txt").read_text()
    assert text.startswith("profile of updates 4 to 5\n")
    rows = text.splitlines()[2:-1]
    assert 5 <= len(rows) <= 10
    cells = [row.rsplit(maxsplit=3) for row in rows]  # operator, calls, milliseconds, share
    calls = {name: int(count) for name, count, _, _ in cells}
    # Which operators are the dearest of a toy is chance; ranges are none.
    assert any(name.startswith("aten::") for name in calls)
    assert not any(name.startswith("update ") for name in calls)
    assert calls.get("aten::mm", 4) == 4  # of the gradients of one linear layer, in two updates
    times = [float(milliseconds) for _, _, milliseconds, _ in cells]
    assert times == sorted(times, reverse=True)
    assert text.strip() in "\n".join(record.getMessage() for record in caplog.records)

    plain = toy_trainer(tmp_path, save_dir="plain", training__max_update=8)
    plain.train()
    assert_same(watched, plain)


def test_without_the_option_there_is_no_hook(tmp_path):
    assert not any(isinstance(hook, Profile) for hook in toy_trainer(tmp_path).hooks)


def test_a_run_that_ends_before_says_so_and_one_that_ends_amidst_keeps_what_it_has(tmp_path, caplog):
    toy_trainer(tmp_path, debug__profile=2, debug__profile_start=3, training__max_update=3).train()
    assert "nothing was profiled" in caplog.text
    amidst = toy_trainer(tmp_path, save_dir="amidst", debug__profile=9, debug__profile_start=1, training__max_update=3)
    amidst.train()
    assert trace_of(amidst.checkpoints.folder, "profile_2-3.json.gz")


def test_a_full_disk_costs_the_profile_and_not_the_run(tmp_path, caplog, monkeypatch):
    def fail(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("torch.profiler.profile.export_chrome_trace", fail)
    trainer = toy_trainer(tmp_path, debug__profile=1, debug__profile_start=0, training__max_update=3)
    assert trainer.train().num_updates == 3
    assert "the profile could not be written" in caplog.text
