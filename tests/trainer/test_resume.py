"""A run that was stopped, killed or hurt goes on as if nothing had been: bit for bit on the CPU."""

from __future__ import annotations

import dataclasses
import itertools
import json
import multiprocessing
import os
import signal

import pytest
import torch

from ftk.checkpoint import BrokenCheckpoint, read_trainer_state, save_checkpoint
from ftk.criterions.cross_entropy import CrossEntropy, CrossEntropyConfig
from ftk.errors import UserError
from ftk.trainer import Trainer, build_run, checkpoints
from ftk.trainer.log.metrics import PARTS
from tests.tiers import slow_but
from tests.trainer.toy import ToyModel, ToyTask, assert_same, toy_config, toy_trainer

TIMES = {
    "seconds",
    "valid_seconds",
    "ema_valid_seconds",
    "tokens_per_second",
    "target_tokens_per_second",
    "updates_per_second",
    "flops_per_second",
    "peak_memory_bytes",
    "other_share",
    *(f"{name}_share" for name in PARTS),
}
OPTIONS = {
    "training__max_update": 17,
    "training__update_freq": 2,
    "training__validate_interval": 1,
    "training__validate_interval_updates": 4,
    "logging__log_interval": 3,
    "dataloader__batch_size": 3,  # 24 samples: 8 batches, 4 updates an epoch
}


class Acting(CrossEntropy):
    """Calls a function when the criterion has been called a given number of times."""

    def __init__(self, call, action):
        super().__init__(CrossEntropyConfig())
        self.left = call
        self.action = action

    def __call__(self, model, batch):
        self.left -= 1
        if self.left == 0:
            self.action()
        return super().__call__(model, batch)


def send(signum):
    return lambda: os.kill(os.getpid(), signum)


def fail():
    raise RuntimeError("a worker died")


def figures(folder):
    """The records of a run without what depends on the clock."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in TIMES} for line in lines]


def standing(trainer):
    state = trainer.state.to_dict()
    return {key: value for key, value in state.items() if key not in ("seconds", "scores")}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("uninterrupted")
    trainer = toy_trainer(tmp_path, **OPTIONS)
    assert trainer.train().exit_code == 0
    return trainer


CALLS = [1, 2, 5, 7, 8, 9, 10, 11, 13, 20, 31, 45]
SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1]


@pytest.mark.parametrize(
    ("call", "signum"), slow_but(list(zip(CALLS, itertools.cycle(SIGNALS))), itertools.product(CALLS, SIGNALS))
)
def test_a_signal_at_any_moment_changes_nothing(tmp_path, uninterrupted, call, signum):
    stopped = toy_trainer(tmp_path, criterion=Acting(call, send(signum)), **OPTIONS)
    summary = stopped.train()
    assert summary.signal == signum.name
    assert summary.exit_code == (1 if signum == signal.SIGINT else 0)  # preempted and saved is well ended
    assert 0 < summary.num_updates <= 17
    resumed = toy_trainer(tmp_path, model=ToyModel(), dataloader__num_workers=call % 2, **OPTIONS)
    assert resumed.state.num_updates == summary.num_updates
    assert resumed.train().exit_code == 0
    assert_same(resumed, uninterrupted)
    assert standing(resumed) == standing(uninterrupted)
    assert figures(tmp_path / "run") == figures(uninterrupted.run.checkpoints.folder)


def test_a_validation_that_was_cut_short_is_done_again(tmp_path, uninterrupted):
    stopped = toy_trainer(tmp_path, criterion=Acting(9, send(signal.SIGTERM)), **OPTIONS)
    stopped.train()  # 8 training steps, then the validation after update 4
    assert (stopped.state.num_updates, stopped.state.validation_pending) == (4, True)
    assert [record["num_updates"] for record in figures(tmp_path / "run")] == [3]
    without = toy_trainer(tmp_path, dataloader__valid_subset=None, checkpoint__reset_meters=True, **OPTIONS)
    assert not without.state.validation_pending
    without.run.checkpoints.release()
    resumed = toy_trainer(tmp_path, **OPTIONS)
    resumed.train()
    assert figures(tmp_path / "run") == figures(uninterrupted.run.checkpoints.folder)


@pytest.mark.parametrize("call", [None, 1, 3])  # of the loss: within the first validation, and the first update
def test_the_start_is_validated_once_and_the_rest_is_as_without(tmp_path, uninterrupted, call):
    options = {**OPTIONS, "training__validate_at_start": True}
    if call is not None:
        stopped = toy_trainer(tmp_path, criterion=Acting(call, send(signal.SIGTERM)), **options)
        stopped.train()
        assert stopped.state.validation_pending == (call == 1)
    trainer = toy_trainer(tmp_path, **options)
    trainer.train()
    assert_same(trainer, uninterrupted)
    first, *rest = figures(tmp_path / "run")
    assert (first["num_updates"], first["loss"] != rest[0]["loss"]) == (0, True)
    assert rest == figures(uninterrupted.run.checkpoints.folder)
    toy_trainer(tmp_path, **options).train()
    assert figures(tmp_path / "run") == [first, *rest]


@pytest.mark.parametrize("update_freq", [2, 3])  # 8 batches an epoch: the last update has as many as others, or fewer
def test_a_validation_at_an_epochs_end_that_was_cut_short_is_of_that_epoch(tmp_path, update_freq):
    options = {"training__update_freq": update_freq, "training__max_update": 8, "training__validate_interval": 1}
    options = {**OPTIONS, **options, "training__validate_interval_updates": 0}
    whole = toy_trainer(tmp_path, save_dir="whole", **options)
    whole.train()
    stopped = toy_trainer(tmp_path, criterion=Acting(9, send(signal.SIGTERM)), **options)
    stopped.train()
    assert (stopped.state.iterator["epoch"], stopped.state.validation_pending) == (1, True)
    resumed = toy_trainer(tmp_path, **options)
    resumed.train()
    assert_same(resumed, whole)
    assert figures(tmp_path / "run") == figures(tmp_path / "whole")


def test_an_optimizer_without_a_learning_rate_is_named(tmp_path):
    config = toy_config(tmp_path / "run")
    config.optimizer = dataclasses.replace(config.optimizer, config=None)
    with pytest.raises(UserError, match="optimizer 'adamw' must have an option `lr`"):
        Trainer(
            build_run(config, task=ToyTask(tmp_path), model=ToyModel(), criterion=CrossEntropy(CrossEntropyConfig()))
        )


def test_the_handlers_of_before_are_back_after_training(tmp_path):
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    toy_trainer(tmp_path).train()
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_sighup_stays_ignored_where_nohup_ignores_it(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        summary = toy_trainer(tmp_path, criterion=Acting(2, send(signal.SIGHUP))).train()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (summary.signal, summary.num_updates) == (None, 10)


@pytest.mark.parametrize("call", [99, 9])  # to the end, or a signal in a validation
def test_a_run_that_has_ended_leaves_no_data_worker(tmp_path, call):
    before = multiprocessing.active_children()
    toy_trainer(tmp_path, criterion=Acting(call, send(signal.SIGTERM)), dataloader__num_workers=1, **OPTIONS).train()
    assert multiprocessing.active_children() == before


def test_a_second_signal_stops_at_once(tmp_path, caplog):
    def twice():
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)

    options = {**OPTIONS, "checkpoint__async_save": False}  # a background save would be stopped
    trainer = toy_trainer(tmp_path, criterion=Acting(13, twice), **options)
    with caplog.at_level("INFO"), pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert "stopped at once, after update 4; the same command continues from the newest checkpoint" in caplog.text
    assert trainer.run.checkpoints.last_saved == 4  # of the validation after update 4


@pytest.mark.parametrize("call", [3, 8, 10, 16, 30])
def test_after_a_failure_the_last_whole_update_is_there(tmp_path, uninterrupted, call):
    hurt = toy_trainer(tmp_path, criterion=Acting(call, fail), **OPTIONS)
    with pytest.raises(RuntimeError, match="a worker died"):
        hurt.train()
    assert hurt.run.checkpoints.last_saved == hurt.state.num_updates
    resumed = toy_trainer(tmp_path, model=ToyModel(), **OPTIONS)
    assert resumed.state.num_updates == hurt.state.num_updates
    resumed.train()
    assert_same(resumed, uninterrupted)
    assert figures(tmp_path / "run") == figures(uninterrupted.run.checkpoints.folder)


def test_a_killed_run_goes_on_from_its_last_checkpoint(tmp_path, uninterrupted):
    class Killed(BaseException):
        """Nothing runs after it, as after SIGKILL."""

    def kill():
        raise Killed

    options = {**OPTIONS, "checkpoint__save_interval_updates": 5}
    killed = toy_trainer(tmp_path, criterion=Acting(26, kill), **options)
    with pytest.raises(Killed):
        killed.train()
    (tmp_path / "run" / "checkpoint_99.tmp-x").mkdir()
    assert max(record["num_updates"] for record in figures(tmp_path / "run")) > killed.run.checkpoints.last_saved
    with open(tmp_path / "run" / "metrics.jsonl", "a") as stream:
        stream.write('{"event": "train", "num_upd')
    resumed = toy_trainer(tmp_path, **options)
    assert resumed.state.num_updates == killed.run.checkpoints.last_saved
    resumed.train()
    assert_same(resumed, uninterrupted)
    assert figures(tmp_path / "run") == figures(uninterrupted.run.checkpoints.folder)
    assert not (tmp_path / "run" / "checkpoint_99.tmp-x").exists()


@pytest.mark.parametrize("where", ["checkpoint_last", "checkpoint_best", "removal"])
def test_what_a_kill_at_the_end_of_the_last_save_left_undone_is_done_by_the_next_start(tmp_path, monkeypatch, where):
    class Killed(BaseException):
        """Nothing runs after it, as after SIGKILL."""

    options = {"checkpoint__save_interval_updates": 3, "checkpoint__keep_last": 1, "checkpoint__async_save": False}
    toy_trainer(tmp_path, save_dir="whole", **options).train()
    with monkeypatch.context() as patch:

        def kill_at(name, is_there):
            function = getattr(checkpoints, name)

            def call(*arguments):
                if is_there(arguments):
                    raise Killed
                return function(*arguments)

            patch.setattr(checkpoints, name, call)

        if where == "removal":
            kill_at("remove_checkpoint", lambda _: (tmp_path / "run" / "checkpoint_10").exists())
        else:
            kill_at("point_to", lambda arguments: (arguments[1], arguments[2].name) == (where, "checkpoint_10"))
        with pytest.raises(Killed):
            toy_trainer(tmp_path, **options).train()
    left, expected = links(tmp_path / "run"), links(tmp_path / "whole")
    assert left != expected
    assert expected["checkpoint_best"] == expected["checkpoint_last"] == "checkpoint_10"
    toy_trainer(tmp_path, **options).train()
    assert links(tmp_path / "run") == expected


def links(run):
    """The checkpoints of a run, and where its links lead."""
    return {path.name: os.readlink(path) if path.is_symlink() else None for path in run.glob("checkpoint_*")}


def test_a_run_with_no_whole_checkpoint_is_not_begun_anew(tmp_path):
    toy_trainer(tmp_path).train()
    for manifest in (tmp_path / "run").glob("checkpoint_*/manifest.json"):
        manifest.write_text("")
    with pytest.raises(BrokenCheckpoint):
        toy_trainer(tmp_path)


def test_a_finished_run_stays_as_it_is(tmp_path, caplog):
    first = toy_trainer(tmp_path)
    first.train()
    before = times(tmp_path / "run")
    again = toy_trainer(tmp_path)
    caplog.set_level("INFO")
    caplog.clear()
    summary = again.train()
    assert "this run has had all its updates" in caplog.text
    assert "training " not in caplog.text
    assert summary.reason == "max_update 10 is reached"
    assert summary.exit_code == 0
    after = times(tmp_path / "run")
    assert after == before


def times(folder):
    """When each file was written, but for those that are written at every start."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file() and path.parent != folder}


def test_another_tokenizer_is_refused(tmp_path):
    toy_trainer(tmp_path).train()
    task = ToyTask(tmp_path)
    task.tokenizer.fingerprint = "another"
    with pytest.raises(UserError, match="another tokenizer"):
        toy_trainer(tmp_path, task=task)
    said = "run holds a glm_tiny of task glm_blank, and glm_tiny of causal_lm is asked for; choose another `save_dir`"
    with pytest.raises(UserError, match=said):
        toy_trainer(tmp_path, task=task, task___name="causal_lm")


def test_restore_from_continues_another_run_in_a_new_folder(tmp_path, uninterrupted):
    options = {**OPTIONS, "checkpoint__save_interval_updates": 7, "checkpoint__keep_last": 0}
    toy_trainer(tmp_path, **options).train()
    start = tmp_path / "run" / "checkpoint_7"
    resumed = toy_trainer(tmp_path, save_dir="new", checkpoint__restore_from=str(start), **OPTIONS)
    assert resumed.state.num_updates == 7
    resumed.train()
    assert_same(resumed, uninterrupted)


def test_restore_from_bare_weights_begins_a_run_with_them(tmp_path):
    donor = toy_trainer(tmp_path)
    donor.train()
    bare = tmp_path / "bare"
    save_checkpoint(bare, model=donor.run.model, trainer_state={}, config={})
    assert read_trainer_state(bare) == {}
    trainer = toy_trainer(tmp_path, save_dir="new", checkpoint__restore_from=str(bare))
    assert trainer.state.num_updates == 0
    for name, tensor in donor.run.model.state_dict().items():
        assert torch.equal(tensor, trainer.run.model.state_dict()[name])


def test_a_damaged_checkpoint_does_not_count_as_one_that_is_kept(tmp_path):
    options = {"checkpoint__save_interval_updates": 3, "checkpoint__keep_last": 2, "lr_scheduler": "constant"}
    options |= {"training__validate_interval_updates": 0, "dataloader__valid_subset": None}
    toy_trainer(tmp_path, training__max_update=6, **options).train()
    [broken] = (tmp_path / "run" / "checkpoint_6" / "model").glob("*.safetensors")
    broken.write_bytes(broken.read_bytes()[:-1])
    options["checkpoint__save_interval_updates"] = 4  # so that checkpoint_6 is not written again
    resumed = toy_trainer(tmp_path, training__max_update=9, **options)
    assert resumed.state.num_updates == 3
    resumed.train()
    left = {path.name for path in (tmp_path / "run").glob("checkpoint_[0-9]*")}
    assert left == {"checkpoint_6", "checkpoint_8", "checkpoint_9"}


def test_a_checkpoint_to_begin_with_is_not_used_where_a_run_goes_on(tmp_path, caplog):
    caplog.set_level("INFO")
    toy_trainer(tmp_path, save_dir="other").train()
    toy_trainer(tmp_path).train()
    other = str(tmp_path / "other")
    toy_trainer(tmp_path, checkpoint__restore_from=other)
    assert f"run holds checkpoint_10: `restore_from` {other} is not used" in caplog.text
