"""`--profile`: a trace and a table of some updates; nothing else changes."""

from __future__ import annotations

import gzip
import json

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
    folder = watched.run.checkpoints.folder
    names = [event.get("name", "") for event in trace_of(folder, "profile_4-5.json.gz")]
    assert names.count("Optimizer.step#AdamW.step") == 2
    assert len(list(folder.glob("*profile_*"))) == 2  # nothing temporary is left
    text = (folder / "profile_4-5.txt").read_text().rstrip()
    assert text.startswith("profile of updates 4 to 5\n")
    assert "aten::" in text
    assert "Self CPU %" in text
    assert text in caplog.text

    plain = toy_trainer(tmp_path, save_dir="plain", training__max_update=8)
    plain.train()
    assert_same(watched, plain)


def test_without_the_option_there_is_no_hook(tmp_path):
    assert not any(isinstance(hook, Profile) for hook in toy_trainer(tmp_path).run.hooks)


def test_a_run_that_ends_before_says_so_and_one_that_ends_amidst_keeps_what_it_has(tmp_path, caplog):
    toy_trainer(tmp_path, debug__profile=2, debug__profile_start=3, training__max_update=3).train()
    assert "nothing was profiled" in caplog.text
    amidst = toy_trainer(tmp_path, save_dir="amidst", debug__profile=9, debug__profile_start=1, training__max_update=3)
    amidst.train()
    assert trace_of(amidst.run.checkpoints.folder, "profile_2-3.json.gz")


def test_a_full_disk_costs_the_profile_and_not_the_run(tmp_path, caplog, monkeypatch):
    def fail(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("torch.profiler.profile.export_chrome_trace", fail)
    trainer = toy_trainer(tmp_path, debug__profile=1, debug__profile_start=0, training__max_update=3)
    assert trainer.train().num_updates == 3
    assert "the profile could not be written" in caplog.text
