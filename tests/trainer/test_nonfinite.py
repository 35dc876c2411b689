"""The hunt for NaN: a skipped update is named with its samples, and --detect-anomaly names what made it."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest
import torch
from torch import nn

from ftk.criterions.cross_entropy import CrossEntropy, CrossEntropyConfig
from ftk.trainer.checkpoints import NotFinite
from ftk.trainer.hooks import Hook
from ftk.trainer.watch.nonfinite import SkippedUpdates
from tests.trainer.test_hooks import WithHooks
from tests.trainer.toy import Explode, ToyDataset, ToyModel, ToyTask, assert_same, collate, toy_trainer

POISONED = 13


def warnings(caplog, module):
    return [
        r.getMessage() for r in caplog.records if r.name == f"ftk.trainer.watch.{module}" and r.levelname == "WARNING"
    ]


class BreaksAt(ToyModel):
    """A module in the middle breaks in some updates: `forward` gives NaN, `backward` inf."""

    def __init__(self, updates=(), place="forward"):
        super().__init__()
        self.middle = Breaking(place)
        self.updates = set(updates)

    def forward(self, tokens):
        return self.output(self.dropout(self.middle(self.norm(self.embedding(tokens)))))


class Breaking(nn.Module):
    def __init__(self, place):
        super().__init__()
        self.place = place
        self.is_on = False

    def forward(self, hidden):
        if not self.is_on:
            return hidden
        if self.place == "forward":
            return hidden / torch.zeros(())  # inf, and NaN from 0 / 0
        return hidden + (hidden - hidden.detach()).abs().sqrt()  # of 0: finite, but its slope is not


def breaking_trainer(tmp_path, updates, place, num_samples=24, **options):
    torch.manual_seed(0)
    model = BreaksAt(updates, place)

    class TurnOn(Hook):
        def before_step(self, step, micro_batches):
            model.middle.is_on = step.num_updates + 1 in model.updates

    task = WithHooks(tmp_path, TurnOn())
    task.num_samples = num_samples
    return toy_trainer(tmp_path, task=task, model=model, **options)


def ids_of(tmp_path, update, **options):
    """The samples of an update, by a run of its own."""
    trainer = toy_trainer(tmp_path, save_dir="ids", **options)
    batches = []
    while len(batches) < update:
        batches += [batch.sample_ids.tolist() for batch in trainer.run.train_iterator.batches()]
    trainer.run.checkpoints.release()
    return batches[update - 1]


@pytest.mark.parametrize(("place", "what"), [("forward", "loss"), ("backward", "gradient")])
def test_a_skipped_update_is_named_at_the_next_line(tmp_path, caplog, place, what):
    trainer = breaking_trainer(tmp_path, {3, 8}, place, logging__log_interval=4)
    trainer.train()
    first, second = warnings(caplog, "nonfinite")
    assert first.splitlines() == [
        "1 update was skipped, loss or gradient was infinite or not a number:",
        f"  update 3, epoch 1: {what}; samples {', '.join(map(str, ids_of(tmp_path, 3)))}",
    ]
    assert f"update 8, epoch 2: {what}; samples {', '.join(map(str, ids_of(tmp_path, 8)))}" in second


def test_micro_batches_are_told_apart_and_long_lists_cut(tmp_path, caplog):
    trainer = breaking_trainer(
        tmp_path, {1}, "forward", 72, training__update_freq=2, dataloader__batch_size=40, training__max_update=1
    )
    trainer.train()
    (text,) = warnings(caplog, "nonfinite")
    line = text.splitlines()[1]
    assert "micro-batch 1: samples " in line
    assert " ... (40 samples); micro-batch 2: samples " in line
    assert line.endswith(tuple("0123456789"))  # the second one has 32, and none more


def test_many_skipped_updates_make_a_short_text(tmp_path, caplog):
    trainer = breaking_trainer(
        tmp_path,
        set(range(1, 31)),
        "forward",
        logging__log_interval=30,
        training__max_update=30,
        training__validate_interval_updates=0,
    )
    trainer.train()
    (text,) = warnings(caplog, "nonfinite")
    assert len(text.splitlines()) == 10
    assert text.endswith("and 22 more, the last of them update 30")


def test_only_so_many_updates_are_remembered(tmp_path, caplog):
    trainer = breaking_trainer(
        tmp_path, {2, 9}, "forward", logging__log_interval=10, training__validate_interval_updates=0
    )
    small = SkippedUpdates(capacity=4)
    hooks = trainer.run.hooks._hooks
    hooks[[isinstance(hook, SkippedUpdates) for hook in hooks].index(True)] = small
    trainer.train()
    (text,) = warnings(caplog, "nonfinite")
    assert "1 of them with unknown samples" in text
    assert "update 9, epoch 2" in text
    assert "update 2," not in text


class PoisonedDataset(ToyDataset):
    """One sample has NaN among its features."""

    def sample(self, epoch, index):
        features = np.full(3, np.nan if index == POISONED else 0.5, dtype=np.float32)
        return {**super().sample(epoch, index), "features": features}


def collate_features(samples):
    features = torch.stack([torch.from_numpy(sample["features"]) for sample in samples])  # [B, 3]
    batch = collate(samples)
    batch.inputs["features"] = features
    return batch


class PoisonedTask(ToyTask):
    def load_split(self, split):
        made = super().load_split(split)
        return PoisonedDataset(made.num_samples, made.seed) if split == "train" else made

    def collater(self):
        return collate_features


class FeatureModel(ToyModel):
    """Adds what a linear layer makes of the features."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(3, 8)

    def forward(self, tokens, features=None):
        hidden = self.norm(self.embedding(tokens))
        if features is not None:
            hidden = hidden + self.project(features)[:, None]
        return self.output(self.dropout(hidden))


def poisoned_trainer(tmp_path, **options):
    options = {"dataloader__valid_subset": None, "training__max_update": 6, **options}
    return toy_trainer(tmp_path, task=PoisonedTask(tmp_path), model=FeatureModel(), **options)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("interrupt", [False, True])
def test_a_poisoned_sample_is_named_with_workers_and_after_a_resume(tmp_path, caplog, num_workers, interrupt):
    iterator = poisoned_trainer(tmp_path, save_dir="order").run.train_iterator
    epoch = [batch.sample_ids.tolist() for batch in iterator.batches()]
    update = next(number for number, ids in enumerate(epoch, start=1) if POISONED in ids)
    assert 1 < update < 6
    options = {"dataloader__num_workers": num_workers, "debug__detect_anomaly": True, "logging__log_interval": 3}
    if interrupt:
        poisoned_trainer(tmp_path, training__max_update=update - 1).train()
        caplog.clear()
    trainer = poisoned_trainer(tmp_path, **options)
    trainer.train()
    assert trainer.figures.skipped()[0] == 1
    (text,) = warnings(caplog, "nonfinite")
    assert f"update {update}, epoch 1: loss; samples {', '.join(map(str, epoch[update - 1]))}" in text
    (anomaly,) = warnings(caplog, "anomaly")
    assert anomaly == (f"anomaly in update {update}, epoch 1: the batch itself: 'features' has 3 NaN of 12 numbers")


def test_what_was_skipped_before_a_stop_is_said_before_the_checkpoint(tmp_path, caplog):
    """The next process could not: it does not know the samples."""
    trainer = breaking_trainer(tmp_path, {2}, "forward", logging__log_interval=100)
    step = trainer.train_step

    def train_step(micro_batches):
        step(micro_batches)
        if trainer.state.num_updates == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    trainer.train_step = train_step
    assert trainer.train().signal == "SIGTERM"
    (text,) = warnings(caplog, "nonfinite")
    assert "update 2, epoch 1" in text
    caplog.clear()
    breaking_trainer(tmp_path, set(), "forward", logging__log_interval=100).train()
    assert warnings(caplog, "nonfinite") == []


# -- --detect-anomaly ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ("forward", "in the forward pass: the output of middle (Breaking) has "),
        ("backward", "in the backward pass of middle (Breaking): the gradient of its input has "),
    ],
)
def test_the_module_that_breaks_is_named(tmp_path, caplog, place, expected):
    breaking_trainer(tmp_path, {3}, place, debug__detect_anomaly=True).train()
    (text,) = warnings(caplog, "anomaly")
    assert text.startswith(f"anomaly in update 3, epoch 1: {expected}")
    assert "inf of 224 numbers" in text or "NaN of 224 numbers" in text or place == "forward"
    assert place == "backward" or "; its input: -" in text


def test_modules_inside_of_compiled_code_are_named(tmp_path, caplog):
    model = ToyModel()
    model.norm = nn.Sequential(model.norm, Breaking("forward"))
    model.norm[1].is_on = True
    trainer = toy_trainer(tmp_path, model=model, debug__detect_anomaly=True, training__max_update=1)
    model.norm.compile(backend="eager")
    trainer.run.config.engine.compile = "block"
    trainer.train()
    assert "in the forward pass: the output of norm.1 (Breaking) has " in warnings(caplog, "anomaly")[0]


class Between(ToyModel):
    def forward(self, tokens):
        return self.output(self.dropout(self.norm(self.embedding(tokens)) * float("nan")))


class MinusInfinity(nn.Module):
    def forward(self, hidden):
        return hidden.masked_fill(torch.ones_like(hidden, dtype=torch.bool), -torch.inf)


class Masked(ToyModel):
    """A mask of -inf before the module that breaks."""

    def __init__(self):
        super().__init__()
        self.mask, self.middle = MinusInfinity(), Breaking("forward")
        self.middle.is_on = True

    def forward(self, tokens):
        hidden = self.norm(self.embedding(tokens))
        self.mask(hidden)
        return self.output(self.middle(hidden))


class OnlyOnce(ToyModel):
    calls = 0

    def forward(self, tokens):
        self.calls += 1
        return super().forward(tokens) * (float("nan") if self.calls == 1 else 1.0)


class ChangedLoss(CrossEntropy):
    """The loss times a factor."""

    def __init__(self, factor):
        super().__init__(CrossEntropyConfig())
        self.factor = factor

    def __call__(self, model, batch):
        output = super().__call__(model, batch)
        return output._replace(loss=output.loss * self.factor)


@pytest.mark.parametrize(
    ("model", "factor", "expected"),
    [
        (Between, 1.0, "in the forward pass: the input of dropout has"),
        (Masked, 1.0, "in the forward pass: the output of middle (Breaking) has"),
        (ToyModel, float("nan"), "in the forward pass: the loss is nan"),
        (OnlyOnce, 1.0, "a second pass over the same batches was finite"),
        (ToyModel, 1e25, "a second pass over the same batches was finite: the norm of the gradients overflows"),
    ],
)
def test_what_no_single_module_makes_is_named_too(tmp_path, caplog, model, factor, expected):
    options = {"debug__detect_anomaly": True, "training__max_update": 1}
    toy_trainer(tmp_path, model=model(), criterion=ChangedLoss(factor), **options).train()
    assert f"anomaly in update 1, epoch 1: {expected}" in warnings(caplog, "anomaly")[0]


@pytest.mark.parametrize("update_freq", [1, 2])
def test_the_search_changes_no_bit_of_what_follows(tmp_path, update_freq):
    options = {"training__update_freq": update_freq}
    searched = breaking_trainer(tmp_path, {1, 3}, "backward", save_dir="on", debug__detect_anomaly=True, **options)
    plain = breaking_trainer(tmp_path, {1, 3}, "backward", save_dir="off", **options)
    searched.train()
    plain.train()
    assert_same(searched, plain)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in searched.run.model.modules())


def test_a_parameter_that_is_broken_already_is_named(tmp_path, caplog):
    model = ToyModel()
    with torch.no_grad():
        model.norm.weight[2] = float("nan")
    with pytest.raises(NotFinite, match=r"norm\.weight"):
        toy_trainer(tmp_path, model=model, debug__detect_anomaly=True, training__max_update=1).train()
    assert "the parameter norm.weight itself has 1 NaN of 8 numbers" in warnings(caplog, "anomaly")[0]


def test_overflows_of_the_fp16_scale_are_no_anomaly(tmp_path, caplog):
    caplog.set_level("INFO")
    trainer = toy_trainer(
        tmp_path,
        training__precision="fp16",
        loss_scale__fp16_init_scale=2.0**40,
        debug__detect_anomaly=True,
        training__max_update=4,
    )
    trainer.train()
    assert trainer.figures.skipped()[0] == 4
    assert warnings(caplog, "anomaly") == warnings(caplog, "nonfinite") == []
    assert "fp16 overflowed in 2 updates, skipped; the loss scale is" in caplog.text


def test_a_broken_backward_in_fp16_is_one(tmp_path, caplog):
    breaking_trainer(
        tmp_path,
        {2},
        "backward",
        training__precision="fp16",
        loss_scale__fp16_init_scale=16.0,
        debug__detect_anomaly=True,
        training__max_update=3,
    ).train()
    assert "in the backward pass of middle (Breaking)" in warnings(caplog, "anomaly")[0]


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_in_glm_a_parameter_of_a_block_is_found_also_when_it_is_computed_again(
    tmp_path, data_bin, caplog, checkpointing
):
    from tests.trainer.test_glm_runs import glm_trainer

    trainer = glm_trainer(
        data_bin,
        tmp_path / "run",
        engine__activation_checkpointing=checkpointing,
        debug__detect_anomaly=True,
        training__max_update=1,
        checkpoint__save=False,
    )
    block = trainer.run.model.layers[1]
    forward = block.feed_forward.forward
    block.feed_forward.forward = lambda hidden: Explode.apply(forward(hidden))
    trainer.train()
    (text,) = warnings(caplog, "anomaly")
    assert "in the backward pass of layers.1.feed_forward (FeedForward): the gradient of its input" in text
