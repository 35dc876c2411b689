"""Checkpoints are written beside the training: unchanged by it, in order, and a full disk is no end of a run."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

import ftk.checkpoint.manifest
import ftk.checkpoint.save
from ftk.checkpoint import load_model_tensors, read_trainer_state, verify
from ftk.checkpoint.background import Background
from ftk.checkpoint.manifest import Abandoned
from ftk.trainer.checkpoints import Checkpoints, NotFinite
from ftk.trainer.log.records import RecordFile, read_records
from ftk.trainer.state import TrainerState
from tests.trainer.test_resume import OPTIONS, Acting, figures, send
from tests.trainer.toy import ToyModel, assert_same, toy_config, toy_trainer

EVERY_UPDATE = {"checkpoint__save_interval_updates": 1, "dataloader__valid_subset": None}


class Gate:
    """A slow disk: the writing of tensors waits until the gate is opened."""

    def __init__(self, monkeypatch):
        self.opened = threading.Event()
        self.reached = threading.Event()
        write = ftk.checkpoint.save.write_tensors

        def slow(folder, *args, **kwargs):
            self.reached.set()
            assert self.opened.wait(60)
            return write(folder, *args, **kwargs)

        monkeypatch.setattr(ftk.checkpoint.save, "write_tensors", slow)


def checkpoints_of(tmp_path, **options):
    config = toy_config(tmp_path / "run", **options)
    (tmp_path / "tokenizer").mkdir(exist_ok=True)
    (tmp_path / "tokenizer" / "vocabulary.txt").write_text("toy")
    made = Checkpoints(config, tmp_path / "tokenizer")
    made.prepare_folder()
    return made


def trained(value=1.0):
    model = ToyModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, value)
    optimizer.step()
    return model, optimizer


def test_what_changes_after_save_returns_does_not_change_the_file(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)
    checkpoints = checkpoints_of(tmp_path)
    model, optimizer = trained()
    state = TrainerState(num_updates=3, scores={"checkpoint_3": 1.0})
    extra = {"ema": {"weight": torch.ones(4)}}
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    moments = {parameter: entry["exp_avg"].clone() for parameter, entry in optimizer.state.items()}
    checkpoints.save(state, model, optimizer, extra)
    assert gate.reached.wait(60)
    checkpoints.collect(wait=False)
    assert checkpoints.last_saved is None
    with torch.no_grad():
        for tensor in [*model.parameters(), extra["ema"]["weight"]]:
            tensor.add_(100.0)
        for entry in optimizer.state.values():
            entry["exp_avg"].zero_()
            entry["step"] += 1
        optimizer.param_groups[0]["lr"] = 99.0
    state.num_updates, state.scores["checkpoint_3"] = 4, 0.0
    gate.opened.set()
    checkpoints.collect(wait=True)
    assert checkpoints.last_saved == 3
    folder = tmp_path / "run" / "checkpoint_3"
    stored = load_model_tensors(folder)
    assert all(torch.equal(stored[name], before[name]) for name in before)
    again = torch.optim.AdamW(model.parameters(), lr=0.1)
    ftk.checkpoint.load_optimizer_state(folder, model, again)
    assert all(torch.equal(again.state[parameter]["exp_avg"], moment) for parameter, moment in moments.items())
    assert {float(entry["step"]) for entry in again.state.values()} == {1.0}
    assert again.param_groups[0]["lr"] == 0.1
    ema = {"weight": torch.zeros(4)}
    ftk.checkpoint.load_extra_tensors(folder, "ema", ema)
    assert ema["weight"].tolist() == [1.0] * 4
    assert read_trainer_state(folder)["scores"] == {"checkpoint_3": 1.0}
    checkpoints.release()


def opens_when_waited_for(checkpoints, gate, monkeypatch):
    collect = checkpoints._background.collect

    def waiting(*, wait):
        if wait:
            gate.opened.set()
        return collect(wait=wait)

    monkeypatch.setattr(checkpoints._background, "collect", waiting)


def test_training_goes_on_while_a_checkpoint_is_written_and_the_next_save_waits(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)
    checkpoints = checkpoints_of(tmp_path)
    model, optimizer = trained()
    checkpoints.save(TrainerState(num_updates=1), model, optimizer)  # it returns though the disk stands still
    assert not (tmp_path / "run" / "checkpoint_last").exists()
    opens_when_waited_for(checkpoints, gate, monkeypatch)
    checkpoints.save(TrainerState(num_updates=2), model, optimizer)
    assert checkpoints.last_saved == 1
    checkpoints.release()
    assert checkpoints.last_saved == 2
    assert (tmp_path / "run" / "checkpoint_last").resolve().name == "checkpoint_2"


def test_the_memory_of_a_snapshot_is_used_again(tmp_path):
    checkpoints = checkpoints_of(tmp_path)
    model, optimizer = trained()
    places = []
    for updates in (1, 2):
        checkpoints.save(TrainerState(num_updates=updates), model, optimizer)
        checkpoints.collect(wait=True)
        places.append({key: tensor.data_ptr() for key, tensor in checkpoints._buffers._buffers.items()})
    assert places[0] == places[1]
    assert len(places[0]) > 10
    model.embedding = torch.nn.Embedding(20, 8)
    checkpoints.save(TrainerState(num_updates=3), model, torch.optim.SGD(model.parameters(), lr=0.1))
    checkpoints.release()
    assert len(checkpoints._buffers._buffers) == len(model.state_dict())


def test_links_move_and_old_ones_go_only_after_the_rename(tmp_path, monkeypatch):
    events = []
    for module, name in (
        (ftk.files, "put_in_place"),
        (ftk.trainer.checkpoints, "point_to"),
        (ftk.trainer.checkpoints, "remove_checkpoint"),
    ):
        function = getattr(module, name)

        def note(*args, function=function, name=name):
            events.append((name, threading.current_thread().name))
            return function(*args)

        monkeypatch.setattr(module, name, note)
    options = {"checkpoint__keep_last": 1, **EVERY_UPDATE}
    toy_trainer(tmp_path, training__max_update=2, **options).train()
    names = [name for name, _ in events]
    assert names == ["put_in_place", "point_to", "put_in_place", "point_to", "remove_checkpoint"]
    assert {thread for _, thread in events} == {"ftk-checkpoint"}


@pytest.fixture(scope="module")
def at_once(tmp_path_factory):
    """A run that saves after each update, without a thread."""
    trainer = toy_trainer(tmp_path_factory.mktemp("at_once"), checkpoint__async_save=False, **{**OPTIONS, **SAVING})
    assert trainer.train().exit_code == 0
    return trainer


SAVING = {"checkpoint__save_interval_updates": 1, "checkpoint__keep_last": 0}


def test_saving_beside_the_training_writes_the_same_files(tmp_path, at_once):
    beside = toy_trainer(tmp_path, **{**OPTIONS, **SAVING})
    beside.train()
    assert_same(beside, at_once)
    one, other = (trainer.run.checkpoints.folder for trainer in (at_once, beside))
    names = sorted(path.relative_to(one) for path in one.glob("checkpoint_[0-9]*/*/*.safetensors"))
    assert len(names) == 2 * 17
    assert [name for name in names if (one / name).read_bytes() != (other / name).read_bytes()] == []
    assert threading.active_count() == 1 or all(t.name != "ftk-checkpoint" for t in threading.enumerate())


@pytest.mark.parametrize("call", [2, 9, 30])
def test_a_signal_waits_for_the_save_that_is_under_way(tmp_path, monkeypatch, at_once, call):
    gate = Gate(monkeypatch)
    stopped = toy_trainer(tmp_path, criterion=Acting(call, send(signal.SIGTERM)), **{**OPTIONS, **SAVING})
    opens_when_waited_for(stopped.run.checkpoints, gate, monkeypatch)
    summary = stopped.train()
    assert summary.exit_code == 0
    assert stopped.run.checkpoints.last_saved == summary.num_updates
    assert verify(tmp_path / "run" / "checkpoint_last") == []
    resumed = toy_trainer(tmp_path, **{**OPTIONS, **SAVING})
    assert resumed.state.num_updates == summary.num_updates
    resumed.train()
    assert_same(resumed, at_once)
    assert figures(tmp_path / "run") == figures(at_once.run.checkpoints.folder)


def test_a_second_signal_gives_up_the_save_that_is_under_way(tmp_path, monkeypatch):
    write = ftk.checkpoint.save.write_file

    def endless(path, pieces):
        if path.parent.name.startswith("checkpoint_3.tmp-"):
            while True:
                ftk.checkpoint.manifest._stop_if_told()
                time.sleep(0.01)
        return write(path, pieces)

    monkeypatch.setattr(ftk.checkpoint.save, "write_file", endless)

    def twice():
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)

    options = {**EVERY_UPDATE, "dataloader__batch_size": 4}
    trainer = toy_trainer(tmp_path, criterion=Acting(4, twice), **options)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert trainer.run.checkpoints.last_saved == 2
    assert not list((tmp_path / "run").glob("*.tmp-*"))
    assert verify(tmp_path / "run" / "checkpoint_last") == []


# -- a disk that refuses ------------------------------------------------------------------------------------------


def refuse(monkeypatch, where, name_of_checkpoint, error=errno.ENOSPC):
    """Make one system call fail for one checkpoint."""
    module, name = {"fsync": (os, "fsync"), "rename": (os, "rename"), "symlink": (Path, "symlink_to")}[where]
    real = getattr(module, name)

    def concerned(first, *others):
        if where == "fsync":  # the number of the file tells its path
            return name_of_checkpoint + ".tmp-" in os.readlink(f"/proc/self/fd/{first}")
        return Path(others[0]).name == name_of_checkpoint

    def call(*arguments, **options):
        if concerned(*arguments):
            raise OSError(error, os.strerror(error))
        return real(*arguments, **options)

    monkeypatch.setattr(module, name, call)


@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize("where", ["fsync", "rename", "symlink"])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_a_save_that_fails_is_said_and_the_run_goes_on(tmp_path, monkeypatch, caplog, where, beside, error):
    refuse(monkeypatch, where, "checkpoint_2", error)
    options = {"training__max_update": 3, "checkpoint__async_save": beside, **EVERY_UPDATE}
    trainer = toy_trainer(tmp_path, **options)
    summary = trainer.train()
    assert summary.exit_code == 0  # the next save went well
    assert summary.num_updates == 3
    [said] = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert "checkpoint_2 could not be saved" in said
    assert os.strerror(error) in said
    assert "(it needs 2.5 kB, " in said
    assert "are free)" in said
    assert said.endswith("older checkpoints stay; training continues, and the next save tries again")
    there = sorted(path.name for path in (tmp_path / "run").glob("checkpoint_*"))
    kept = ["checkpoint_2", "checkpoint_3"] if where == "symlink" else ["checkpoint_1", "checkpoint_3"]
    assert there == [*kept, "checkpoint_last"]
    assert (tmp_path / "run" / "checkpoint_last").resolve().name == "checkpoint_3"
    assert all(verify(tmp_path / "run" / name) == [] for name in kept)


@pytest.mark.parametrize("beside", [True, False])
def test_a_last_save_that_fails_ends_with_1_and_says_so(tmp_path, monkeypatch, caplog, beside):
    caplog.set_level("INFO")
    refuse(monkeypatch, "fsync", "checkpoint_3")
    options = {"training__max_update": 3, "checkpoint__async_save": beside, **EVERY_UPDATE}
    summary = toy_trainer(tmp_path, **options).train()
    assert summary.exit_code == 1
    assert "the end of this run is not saved" in caplog.text
    [said] = [record.message for record in caplog.records if "not saved" in record.message]
    assert said.endswith("once that is mended, the same command continues from checkpoint_2")
    monkeypatch.undo()
    resumed = toy_trainer(tmp_path, **options)
    assert resumed.state.num_updates == 2
    assert resumed.train().exit_code == 0


def test_a_run_of_which_nothing_is_saved_does_not_promise_to_go_on(tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO")
    refuse(monkeypatch, "fsync", "checkpoint_4")
    summary = toy_trainer(tmp_path, training__max_update=4).train()
    assert summary.exit_code == 1
    assert not list((tmp_path / "run").glob("checkpoint_*"))
    said = {record.message: record.levelname for record in caplog.records}
    [end] = [text for text in said if text.startswith("the end of this run is not saved")]
    assert end.endswith("once that is mended, the same command starts from the beginning")
    assert said[end] == "WARNING"
    assert "older checkpoints" not in caplog.text
    [best] = [text for text in said if text.startswith("best validation loss")]
    assert best.endswith("at update 4, which has no checkpoint")


def test_any_other_failure_of_a_save_ends_the_run_at_the_next_update(tmp_path, monkeypatch):
    def broken(*args, **kwargs):
        raise TypeError("a bug")

    monkeypatch.setattr(ftk.checkpoint.save, "write_tensors", broken)
    trainer = toy_trainer(tmp_path, **EVERY_UPDATE)
    with pytest.raises(TypeError, match="a bug"):
        trainer.train()
    assert trainer.state.num_updates < 4


def test_records_that_find_the_disk_full_are_written_later(tmp_path, caplog):
    records = RecordFile(tmp_path / "metrics.jsonl", 0)
    records.write({"event": "train", "num_updates": 1})
    stream = records._stream

    class Full:
        """Takes a part of a line, then nothing, until there is room."""

        room = 9

        def write(self, content):
            if not self.room:
                raise OSError(errno.ENOSPC, "No space left on device")
            taken = min(self.room, len(content))
            self.room -= taken
            return stream.write(content[:taken])

        def close(self):
            stream.close()

    records._stream = Full()
    records.write({"event": "train", "num_updates": 2})
    records.write({"event": "train", "num_updates": 3})
    assert len(read_records(tmp_path / "metrics.jsonl")) == 1
    records._stream.room = 10**6
    records.write({"event": "train", "num_updates": 4})
    records.close()
    assert [record["num_updates"] for record in read_records(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]
    assert caplog.text.count("cannot be written (No space left on device)") == 1


def test_records_that_never_find_room_are_counted(tmp_path, caplog):
    records = RecordFile(tmp_path / "missing" / "metrics.jsonl", 0)
    for num_updates in (1, 2):
        records.write({"event": "train", "num_updates": num_updates})
    records.close()
    assert caplog.text.count("cannot be written (No such file or directory)") == 1
    assert "the last 2 records are lost" in caplog.text


# -- the thread ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threaded", [True, False])
def test_a_job_hands_over_its_result_and_its_error_once(threaded):
    background = Background(threaded=threaded)
    assert background.collect(wait=True) is None
    background.start(lambda: 5)
    assert background.collect(wait=True) == 5
    assert background.collect(wait=True) is None
    background.start(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        background.collect(wait=True)
    assert background.collect(wait=True) is None


def test_a_job_that_is_abandoned_leaves_no_file(tmp_path):
    background = Background()
    started = threading.Event()

    def pieces():
        started.set()
        while True:
            yield bytes(1000)
            time.sleep(0.001)

    background.start(lambda: ftk.checkpoint.manifest.write_file(tmp_path / "file", pieces()))
    assert started.wait(30)
    assert background.collect(wait=False) is None
    background.abandon()
    with pytest.raises(Abandoned):
        background.collect(wait=True)
    background.start(lambda: ftk.checkpoint.manifest.write_file(tmp_path / "other", [b"abc"]).size)
    assert background.collect(wait=True) == 3


# -- what is not finite -------------------------------------------------------------------------------------------


def spoil(tensor, value=float("nan")):
    with torch.no_grad():
        tensor.view(-1)[0] = value


class Spoiling(Acting):
    """Makes a number of a trainer's state NaN or infinite in the update after the third."""

    def __init__(self, find, value):
        super().__init__(4, lambda: spoil(find(self.trainer), value))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("name", "find"),
    [
        ("model norm.weight", lambda trainer: trainer.run.model.norm.weight),
        ("ema norm.weight", lambda trainer: trainer.run.ema.averages["norm.weight"]),
        (
            "optimizer norm.weight/exp_avg_sq",
            lambda trainer: trainer.run.optimizer.state[trainer.run.model.norm.weight]["exp_avg_sq"],
        ),
    ],
)
def test_what_is_not_finite_is_never_saved_and_ends_the_run(tmp_path, name, find, value):
    criterion = Spoiling(find, value)
    options = {**EVERY_UPDATE, "ema__ema_decay": 0.5, "checkpoint__keep_last": 1}
    trainer = criterion.trainer = toy_trainer(tmp_path, criterion=criterion, **options)
    with pytest.raises(
        NotFinite, match=f"there is NaN or infinity in .*{name}.* continues from .*checkpoint_3, which is"
    ):
        trainer.train()
    folder = tmp_path / "run"
    assert sorted(path.name for path in folder.glob("checkpoint_*")) == ["checkpoint_3", "checkpoint_last"]
    assert verify(folder / "checkpoint_last") == []
    assert all(tensor.isfinite().all() for tensor in load_model_tensors(folder / "checkpoint_last").values())
    goes_on = toy_trainer(tmp_path, **options)
    assert goes_on.train().exit_code == 0


def test_a_run_without_checkpoints_ends_as_badly(tmp_path):
    criterion = Spoiling(lambda trainer: trainer.run.model.norm.weight, float("nan"))
    criterion.trainer = toy_trainer(tmp_path, criterion=criterion, checkpoint__save=False)
    with pytest.raises(NotFinite, match="model norm.weight; it is not saved; start again with a lower `lr`"):
        criterion.trainer.train()


def test_infinity_in_a_buffer_may_be_a_mask_and_nan_may_not(tmp_path):
    checkpoints = checkpoints_of(tmp_path)
    model, optimizer = trained()
    model.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
    checkpoints.save(TrainerState(num_updates=1), model, optimizer)
    spoil(model.mask)
    with pytest.raises(NotFinite, match="model mask"):
        checkpoints.save(TrainerState(num_updates=2), model, optimizer)
    checkpoints.release()
    assert checkpoints.last_saved == 1
