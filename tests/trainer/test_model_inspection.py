"""`--inspect-interval`: the numbers are those of the model, and taking them changes nothing."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from ftk.errors import UserError
from ftk.trainer.hooks import Hook
from ftk.trainer.watch.model_inspection import Inspection
from tests.trainer.test_hooks import WithHooks
from tests.trainer.toy import ToyModel, assert_same, toy_trainer


def inspected(trainer):
    lines = (trainer.run.checkpoints.folder / "inspect.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


class SlowWay(Hook):
    """Notes weights, whole gradients and module outputs of every update."""

    def __init__(self):
        self.weights, self.grads, self.changed, self.outputs = [], [], [], []

    def before_train(self, step):
        def note(module, arguments, output):
            if module.training:
                self.outputs[-1].append(output.detach().clone())

        step.model.norm.register_forward_hook(note)

    def before_step(self, step, micro_batches):
        self.outputs.append([])
        self.weights.append({name: p.detach().clone() for name, p in step.model.named_parameters()})

    def after_backward(self, step):
        self.grads.append({name: p.grad.clone() for name, p in step.model.named_parameters()})

    def after_step(self, step):
        self.changed.append({name: p.detach().clone() for name, p in step.model.named_parameters()})


def test_the_numbers_are_those_of_the_slow_way(tmp_path):
    slow = SlowWay()
    trainer = toy_trainer(
        tmp_path,
        task=WithHooks(tmp_path, slow),
        debug__inspect_interval=2,
        training__update_freq=2,
        training__clip_norm=0.1,  # gradients are shown as they are before
        training__max_update=7,
        dataloader__batch_size=5,
    )
    trainer.train()
    records = inspected(trainer)
    assert [record["num_updates"] for record in records] == [2, 4, 6]
    for record in records:
        place = record["num_updates"] - 1
        assert list(record["parameters"]) == list(slow.weights[place])
        for name, row in record["parameters"].items():
            weight, grad = slow.weights[place][name].double(), slow.grads[place][name].double()
            change = slow.changed[place][name].double() - weight
            expected = {
                "norm": weight.norm(),
                "mean": weight.mean(),
                "std": weight.std(correction=0),
                "min": weight.min(),
                "max": weight.max(),
                "grad_norm": grad.norm(),
                "grad_mean": grad.mean(),
                "grad_std": grad.std(correction=0),
                "grad_min": grad.min(),
                "grad_max": grad.max(),
                "update_ratio": change.norm() / weight.norm(),
            }
            assert row == pytest.approx({key: value.item() for key, value in expected.items()}, rel=1e-3, abs=1e-7)
        outputs = torch.cat([output.flatten() for output in slow.outputs[place]]).double()  # of both micro-batches
        assert len(slow.outputs[place]) == {2: 2, 4: 2, 6: 1}[record["num_updates"]]  # of 5 batches in an epoch
        assert record["modules"]["norm"] == pytest.approx(
            {
                "mean": outputs.mean().item(),
                "std": outputs.std(correction=0).item(),
                "min": outputs.min().item(),
                "max": outputs.max().item(),
            },
            rel=1e-4,
            abs=1e-6,
        )
        assert set(record["modules"]) == {"embedding", "norm", "dropout", "output"}


def test_looking_changes_no_bit_and_hooks_are_there_only_while_it_looks(tmp_path):
    class Count(Hook):
        def __init__(self):
            self.seen = []

        def after_backward(self, step):
            self.seen.append(sum(len(module._forward_hooks) for module in step.model.modules()))

        def before_step(self, step, micro_batches):
            self.seen.append(sum(len(module._forward_hooks) for module in step.model.modules()))

    count = Count()
    looked_at = toy_trainer(
        tmp_path,
        task=WithHooks(tmp_path, count),
        save_dir="looked_at",
        debug__inspect_interval=2,
        training__max_update=4,
    )
    plain = toy_trainer(tmp_path, save_dir="plain", training__max_update=4)
    looked_at.train()
    plain.train()
    assert_same(looked_at, plain)
    assert count.seen == [0, 0, 4, 0, 0, 0, 4, 0]


def test_patterns_choose_parameters_and_modules(tmp_path, caplog):
    caplog.set_level("INFO")
    trainer = toy_trainer(tmp_path, debug__inspect_interval=5, debug__inspect=["norm", "*.bias", "drop*"])
    trainer.train()
    for record in inspected(trainer):
        assert list(record["parameters"]) == ["norm.weight", "norm.bias", "output.bias"]
        assert list(record["modules"]) == ["norm", "dropout"]
    table = next(r.getMessage() for r in caplog.records if r.name == "ftk.trainer.watch.model_inspection")
    head, *rows = table.splitlines()[1:]
    assert head.split() == [
        "parameter",
        *("norm", "mean", "std", "min", "max"),
        *("grad_norm", "grad_mean", "grad_std"),
        "update/w",
    ]
    assert rows[0].startswith("norm.weight ")
    assert float(rows[0].split()[1]) == pytest.approx(
        inspected(trainer)[0]["parameters"]["norm.weight"]["norm"], rel=0.01
    )


def test_a_pattern_that_matches_nothing_is_refused():
    with pytest.raises(UserError, match=r"`inspect` 'embeding\*': no such parameter or module; did you mean 'emb"):
        Inspection(1, ["embeding*"], ToyModel())


def test_frozen_parameters_have_no_gradient_figures(tmp_path, caplog):
    caplog.set_level("INFO")
    trainer = toy_trainer(tmp_path, debug__inspect_interval=5, parameters__freeze=["norm"])
    trainer.train()
    row = inspected(trainer)[0]["parameters"]["norm.weight"]
    assert row["grad_norm"] is None
    assert row["update_ratio"] == 0.0
    assert row["norm"] == pytest.approx(8**0.5)


def test_what_is_not_finite_is_shown_as_none(tmp_path):
    class Broken(ToyModel):
        def forward(self, tokens):
            return super().forward(tokens) * float("nan")

    trainer = toy_trainer(tmp_path, model=Broken(), debug__inspect_interval=2, training__max_update=2)
    trainer.train()
    row = inspected(trainer)[0]["parameters"]["norm.weight"]
    assert (row["grad_norm"], row["update_ratio"]) == (None, 0.0)


def test_a_continued_run_writes_each_update_once(tmp_path):
    options = {"debug__inspect_interval": 1, "checkpoint__save_interval_updates": 2}
    toy_trainer(tmp_path, training__max_update=4, **options).train()
    first = toy_trainer(tmp_path, training__max_update=6, **options)
    lines = (tmp_path / "run" / "inspect.jsonl").read_text()
    (tmp_path / "run" / "inspect.jsonl").write_text(
        lines + '{"event": "inspect", "num_updates": 5}\n'
    )  # of a killed run
    first.train()
    assert [record["num_updates"] for record in inspected(first)] == [1, 2, 3, 4, 5, 6]
    assert "parameters" in inspected(first)[4]


def test_compiled_modules_are_not_looked_into():
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    model[1].compile()  # only marks it; compiling begins with the first call
    assert list(Inspection(1, [], model).modules) == ["0"]
    assert list(Inspection(1, [], model, compiled=True).modules) == []


def test_activation_checkpointing_shows_the_same_numbers(tmp_path, data_bin):
    from tests.trainer.test_glm_runs import glm_trainer

    figures = []
    for mode in ("none", "full", "selective"):
        trainer = glm_trainer(
            data_bin,
            tmp_path / mode,
            debug__inspect_interval=1,
            training__max_update=1,
            engine__activation_checkpointing=mode,
            checkpoint__save=False,
        )
        trainer.train()
        figures.append(inspected(trainer)[0])
    assert len(figures[0]["modules"]) > 20
    assert figures[0]["parameters"] == figures[1]["parameters"] == figures[2]["parameters"]
    for other in figures[1:]:
        for name, row in figures[0]["modules"].items():
            assert other["modules"][name] == pytest.approx(row, rel=1e-6, abs=1e-9)
