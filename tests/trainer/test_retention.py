"""Pruning keeps what it is told to, and the last and the best checkpoint whatever happens."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ftk.trainer.checkpoints
from ftk.checkpoint import numbered_checkpoints, verify
from ftk.trainer.checkpoints import Checkpoints
from ftk.trainer.config import CheckpointConfig
from ftk.trainer.run_folder import SavedStatus, best_of, stale
from ftk.trainer.state import TrainerState
from tests.trainer.test_saving import trained
from tests.trainer.toy import toy_config

# What happens at successive saves: a validation score (or none), whether the write fails, and what befalls the links.
EVENTS = st.lists(
    st.tuples(
        st.one_of(st.none(), st.integers(0, 6)),
        st.sampled_from(["ok", "ok", "ok", "write fails", "link fails", "removal fails"]),
        st.sampled_from(
            ["", "", "", "last dangles", "best dangles", "last is gone", "best is gone", "best is damaged"]
        ),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    events=EVENTS,
    keep_last=st.integers(0, 3),
    keep_best=st.integers(1, 3),
    every=st.sampled_from([0, 3]),
    maximize=st.booleans(),
)
def test_the_last_and_the_best_are_never_removed(events, keep_last, keep_best, every, maximize):
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        config = toy_config(
            Path(folder) / "run",
            checkpoint__keep_last=keep_last,
            checkpoint__keep_best=keep_best,
            checkpoint__keep_interval_updates=every,
            checkpoint__maximize_best_metric=maximize,
            checkpoint__async_save=False,
        )
        run(Path(folder) / "run", config, events, patch)


def run(folder, config, events, patch):
    tokenizer = folder.parent / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "vocabulary.txt").write_text("toy")
    checkpoints = Checkpoints(config, tokenizer)
    checkpoints.prepare_folder()
    state = TrainerState()
    saved: list[str] = []  # names of what was written whole, in order
    damaged = set()
    model, optimizer = trained()
    for number, (score, disk, mishap) in enumerate(events, start=1):
        state.num_updates = number
        name = f"checkpoint_{number}"
        if score is not None:
            state.rank("loss", float(score), config.checkpoint.maximize_best_metric)
        with patch.context() as failing:
            break_disk(failing, disk)
            checkpoints.save(state, model, optimizer)
            checkpoints.collect(wait=True)
        if disk != "write fails":
            saved.append(name)
        present = {path.name for path in numbered_checkpoints(folder)}
        assert not list(folder.glob("*.tmp-*")) or disk == "removal fails"
        for path in folder.glob("*.tmp-*"):
            shutil.rmtree(path)
        if saved:
            assert saved[-1] in present  # the last one that was written
        if state.best is not None and f"checkpoint_{state.best.num_updates}" in saved:
            assert f"checkpoint_{state.best.num_updates}" in present
        if disk == "ok":
            assert (folder / "checkpoint_last").resolve().name == name
            limit = keep_limit(config.checkpoint, number)
            assert len(present) <= limit + sum(disk != "ok" for _, disk, _ in events)
        if disk == "ok" and state.best is not None and f"checkpoint_{state.best.num_updates}" in present:
            assert (folder / "checkpoint_best").resolve().name == f"checkpoint_{state.best.num_updates}"
        assert all(verify(folder / one) == [] for one in present - damaged)
        damaged |= befall(folder, mishap)
    checkpoints.release()


def keep_limit(config, number):
    if config.keep_last == 0:
        return number
    every = config.keep_interval_updates
    return config.keep_last + config.keep_best + 2 + (number // every if every else 0)


def break_disk(patch, disk):
    def fails(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if disk == "write fails":
        patch.setattr(ftk.trainer.checkpoints, "write_snapshot", fails)
    elif disk == "link fails":
        patch.setattr(ftk.trainer.checkpoints, "point_to", fails)
    elif disk == "removal fails":
        patch.setattr(ftk.trainer.checkpoints, "remove_checkpoint", fails)


def befall(folder, mishap):
    """Does it to the folder; returns the names of checkpoints that are damaged now."""
    what, _, how = mishap.partition(" ")
    link = folder / f"checkpoint_{what}"
    if not mishap or not link.is_symlink():
        return set()
    if how == "is damaged":
        if link.exists():
            (link / "model" / "index.json").write_text("")
            return {link.resolve().name}
        return set()
    link.unlink()
    if how == "dangles":
        link.symlink_to("checkpoint_999")
    return set()


def test_the_best_link_comes_back_to_the_best_that_is_there(tmp_path):
    for number in (1, 2, 3):
        (tmp_path / f"checkpoint_{number}").mkdir()
        (tmp_path / f"checkpoint_{number}" / "manifest.json").write_text("{}")
    scores = {"checkpoint_1": 2.0, "checkpoint_3": 1.0, "checkpoint_9": 0.5}
    lost = SavedStatus(num_updates=9, best=9, scores=scores)  # the best could not be saved
    assert best_of(tmp_path, lost, CheckpointConfig()) == tmp_path / "checkpoint_3"
    assert best_of(tmp_path, lost, CheckpointConfig(maximize_best_metric=True)) == tmp_path / "checkpoint_1"
    (tmp_path / "checkpoint_best").symlink_to("checkpoint_2")
    assert best_of(tmp_path, lost, CheckpointConfig()) is None
    there = SavedStatus(num_updates=3, best=3, scores=scores)
    assert best_of(tmp_path, there, CheckpointConfig()) == tmp_path / "checkpoint_3"


def test_checkpoints_beyond_the_present_update_are_not_the_newest(tmp_path):
    for number in (1, 2, 3, 8, 9):
        (tmp_path / f"checkpoint_{number}").mkdir()
    standing = SavedStatus(num_updates=3, best=None, scores={})
    gone = stale(tmp_path, numbered_checkpoints(tmp_path), standing, CheckpointConfig(keep_last=2))
    assert [path.name for path in gone] == ["checkpoint_1"]
