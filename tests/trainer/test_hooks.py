"""Code of others in the training loop."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from ftk.config import compose
from ftk.criterions.base import OF_RECORDS
from ftk.errors import UserError
from ftk.registry import HOOKS, register_hook
from ftk.trainer.config import TrainConfig
from ftk.trainer.hooks import Hook, build_hooks
from tests.records import records_of
from tests.trainer.toy import ToyTask, assert_same, toy_trainer

PLACES = [name for name in vars(Hook) if name.startswith(("before_", "on_", "after_"))]


class Diary(Hook):
    """Writes down where it was called, and after how many updates."""

    def __init__(self):
        self.lines = []


for place in PLACES:

    def write(self, step, *arguments, place=place):
        self.lines.append((place, step.num_updates))

    setattr(Diary, place, write)


@dataclass(kw_only=True)
class LabelConfig:
    label: str = field(default="none", metadata={"help": "what records are labelled with"})
    every: int = field(default=1, metadata={"help": "updates between labels"})


@pytest.fixture
def label_hook():
    @register_hook("label", config=LabelConfig)
    class Label(Hook):
        def __init__(self, config):
            self.config = config

        def on_record(self, step, record):
            record["label"] = f"{self.config.label}{self.config.every}"

    yield
    del HOOKS._entries["label"]


class WithHooks(ToyTask):
    def __init__(self, tmp_path, *hooks):
        super().__init__(tmp_path)
        self.own = hooks

    def hooks(self):
        return self.own


def test_every_place_is_reached_in_order(tmp_path):
    diary = Diary()
    options = {"training__max_update": 2, "logging__log_interval": 1, "training__validate_interval_updates": 2}
    toy_trainer(tmp_path, task=WithHooks(tmp_path, diary), **options).train()
    one_step = ["before_step", "after_backward", "after_step"]
    assert [place for place, _ in diary.lines] == [
        "before_train",
        *one_step,
        "on_record",
        *one_step,
        "on_record",
        "before_validation",
        "after_validation",
        "on_record",
        "before_checkpoint",
        "after_checkpoint",
        "after_train",
    ]
    assert ("before_step", 0) in diary.lines
    assert ("after_step", 1) in diary.lines


def test_the_end_of_an_epoch_is_told(tmp_path):
    diary = Diary()
    trainer = toy_trainer(tmp_path, task=WithHooks(tmp_path, diary), training__max_update=13)
    trainer.train()  # 24 samples in batches of 4: an epoch has 6 updates
    assert [updates for place, updates in diary.lines if place == "after_epoch"] == [6, 12]


def test_a_hook_that_looks_on_changes_nothing(tmp_path):
    plain = toy_trainer(tmp_path, save_dir="plain")
    watched = toy_trainer(tmp_path, task=WithHooks(tmp_path, Diary()), save_dir="watched")
    plain.train()
    watched.train()
    assert_same(plain, watched)


def test_a_hook_may_change_gradients_before_they_are_clipped(tmp_path):
    class Freeze(Hook):
        def after_backward(self, step):
            step.model.embedding.weight.grad.zero_()

    trainer = toy_trainer(tmp_path, task=WithHooks(tmp_path, Freeze()), optimizer__weight_decay=0.0)
    before = trainer.run.model.embedding.weight.clone()
    trainer.train()
    assert torch.equal(before, trainer.run.model.embedding.weight)


def test_registered_hooks_are_chosen_with_their_options(tmp_path, label_hook):
    toy_trainer(tmp_path, training__hooks=["label label=x every=7"]).train()
    assert {record["label"] for record in records_of(tmp_path / "run")} == {"x7"}


def test_several_hooks_may_have_commas_in_their_options():
    flags = ["--hooks", "label label=a,b", "label every=2", "--arch", "glm_tiny", "--max-update", "1"]
    config = compose(TrainConfig, "ftk-train", "", ["data", *flags])
    assert config.training.hooks == ["label label=a,b", "label every=2"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("lable", "unknown hook 'lable'; did you mean 'label'?"),
        ("label 3", "`hooks`: '3' in 'label 3' is no option"),
        ("label 'x", "No closing quotation"),
        ("label evry=3", "unknown option `hooks`: label.evry; did you mean"),
        ("label every=soon", "every is 'soon'"),
    ],
)
def test_mistakes_in_hooks_are_named(label_hook, line, message):
    with pytest.raises(UserError) as caught:
        build_hooks([line])
    assert message in str(caught.value)


def test_a_hook_that_fails_is_named(tmp_path, caplog):
    class Absent(Hook):
        def after_step(self, step):
            return {}["absent"]

    with pytest.raises(KeyError, match="absent"):
        toy_trainer(tmp_path, task=WithHooks(tmp_path, Absent())).train()
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert line.startswith("the hook ")
    assert line.endswith("Absent (tests.trainer.test_hooks) failed in after_step")


def test_figures_of_hooks_may_be_tensors_and_others_are_named(tmp_path, caplog):
    class Figures(Hook):
        def on_record(self, step, record):
            record |= {"one": torch.tensor(1.5), "two": np.float64(2.5), "text": "yes"}
            record |= {"many": torch.tensor([1, 2]), "listed": [3], "odd": object(), "torn": [math.nan]}

    toy_trainer(tmp_path, task=WithHooks(tmp_path, Figures())).train()
    records = records_of(tmp_path / "run")
    assert len(records) > 3
    own = {"one", "two", "text", "many", "listed"}
    assert not [name for record in records for name in record.keys() - own if not OF_RECORDS.fullmatch(name)]
    assert {(r["one"], r["two"], r["text"]) for r in records} == {(1.5, 2.5, "yes")}
    assert all((r["many"], r["listed"]) == ([1, 2], [3]) for r in records)
    assert all("odd" not in r and "torn" not in r for r in records)
    assert "figure 'odd' is left out: JSON cannot represent this object" in caplog.text
    assert "figure 'torn' is left out" in caplog.text


def test_a_hook_with_a_method_that_is_never_called_is_refused():
    @register_hook("misspelt")
    class Misspelt(Hook):
        def on_records(self, step, record): ...

    @register_hook("with_helpers")
    class WithHelpers(Hook):
        after_warmup = 100

        def on_main(self, step): ...

    try:
        assert isinstance(build_hooks(["with_helpers"])[0], WithHelpers)
        with pytest.raises(UserError, match=r"Misspelt \(.*py:\d+\): on_records is never called; .*on_record\b"):
            build_hooks(["misspelt"])
    finally:
        del HOOKS._entries["misspelt"], HOOKS._entries["with_helpers"]
