"""Runs that are continued with another length, with which a schedule may change."""

from __future__ import annotations

from typing import Any

import pytest

from ftk.config import dump
from ftk.config.choice import choice
from ftk.criterions.cross_entropy import CrossEntropy, CrossEntropyConfig
from ftk.registry import LR_SCHEDULERS
from ftk.trainer import Trainer, build_run
from ftk.trainer.resume import describe_stretch
from tests.trainer.toy import ToyModel, ToyTask, toy_config, toy_trainer


@pytest.mark.parametrize(
    ("schedule", "advice"),
    [
        ({"": "cosine"}, {"decay_updates": 2}),
        ({"": "linear", "warmup_updates": 0}, {"decay_updates": 5}),
        ({"": "cosine", "warmup_updates": 0, "warmup_ratio": 0.4}, {"warmup_updates": 2, "decay_updates": 3}),
        ({"": "one_cycle", "warmup_updates": 0}, {"warmup_updates": 2, "decay_updates": 3}),
        ({"": "warmup_stable_decay", "warmup_updates": 1, "decay_updates": 2}, None),  # nothing keeps that
    ],
    ids=str,
)
def test_a_longer_run_says_what_becomes_of_its_schedule_and_what_keeps_it(tmp_path, caplog, schedule, advice):
    def run(max_update: int, schedule: dict[str, Any], **options: Any) -> Trainer:
        chosen = {f"lr_scheduler__{name}".removesuffix("__"): value for name, value in schedule.items()}
        return toy_trainer(tmp_path, training__max_update=max_update, **chosen, **options)

    run(5, schedule).train()
    longer = run(10, schedule)
    (said,) = [text for text in caplog.messages if "the schedule ends with the run" in text]
    assert "now at update 10 instead of 5: the learning rate after update 5 is" in said
    if advice is None:
        assert said.endswith(" instead of 0")
        longer.run.checkpoints.release()
        return
    shown = " ".join(f"`{name}` {value}" for name, value in advice.items())
    shown += " `reset_lr_scheduler`" + (" without `warmup_ratio`" if "warmup_ratio" in schedule else "")
    assert said.endswith(f" ({shown} keep the old one)")
    old = longer.run.config.lr_scheduler.build(base_lr=0.01, total_updates=5)
    longer.run.checkpoints.release()
    caplog.clear()
    kept = run(10, {**schedule, "warmup_ratio": 0.0, **advice}, checkpoint__reset_lr_scheduler=True)
    assert "the schedule ends with the run" not in caplog.text
    assert [kept.run.schedule.lr(update) for update in range(5, 10)] == [old.lr(update) for update in range(5, 10)]
    kept.run.checkpoints.release()


def test_a_shorter_run_is_no_mistake_where_nothing_keeps_its_schedule(tmp_path):
    schedule = {"": "warmup_stable_decay", "warmup_updates": 0, "warmup_ratio": 0.4, "decay_ratio": 0.4}
    chosen = {f"lr_scheduler__{name}".removesuffix("__"): value for name, value in schedule.items()}
    long, short = (toy_config(tmp_path, training__max_update=length, **chosen) for length in (100, 50))
    said = describe_stretch(short, dump(long), [7], 10)
    assert str(said).endswith(" instead of 0.00275")


def test_a_schedule_that_does_not_fit_the_old_length_is_taken_with_the_new_one(tmp_path, caplog):
    toy_trainer(tmp_path, training__max_update=5).train()
    config = toy_config(tmp_path / "run", training__max_update=20, checkpoint__reset_lr_scheduler=True)
    config.lr_scheduler = choice("warmup_stable_decay warmup_updates=2 decay_updates=10", LR_SCHEDULERS, "")
    longer = Trainer(
        build_run(config, task=ToyTask(tmp_path), model=ToyModel(), criterion=CrossEntropy(CrossEntropyConfig()))
    )
    assert longer.state.num_updates == 5
    assert "the schedule ends with the run" not in caplog.text
    longer.run.checkpoints.release()
