"""Frozen, slowed and multiplied parameters in a run, against the slow way; plateaus; stopping by the rate."""

from __future__ import annotations

import json

import pytest
import torch
from torch.nn import functional as F

from ftk.checkpoint import load_model_tensors
from ftk.checkpoint.index import read_index
from ftk.errors import UserError
from tests.trainer.test_policy import EACH, Scripted
from tests.trainer.test_step import ForbidReading, records
from tests.trainer.toy import ToyModel, assert_same, everything, toy_trainer


def test_frozen_parameters_keep_their_values_and_have_no_state(tmp_path):
    trainer = toy_trainer(tmp_path, parameters__freeze=["embedding", "norm.bias"])
    before = {name: tensor.clone() for name, tensor in trainer.run.model.state_dict().items()}
    trainer.train()
    changed = {name for name, tensor in trainer.run.model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == {"norm.weight", "output.weight", "output.bias"}
    saved = load_model_tensors(tmp_path / "run" / "checkpoint_last")
    assert torch.equal(saved["embedding.weight"], before["embedding.weight"])
    index = read_index(tmp_path / "run" / "checkpoint_last" / "optimizer")
    assert {path.split("/")[0] for path in index.tensors} == changed


def test_a_pattern_without_a_parameter_ends_the_run_before_it_begins(tmp_path):
    with pytest.raises(UserError, match="`freeze` 'embeding' matches no parameter; there are for example embedding"):
        toy_trainer(tmp_path, parameters__freeze=["embeding"])
    with pytest.raises(UserError, match="`gradient_multipliers` 'x' matches no parameter"):
        toy_trainer(tmp_path, parameters__gradient_multipliers=["x=2"])


def test_scaled_rates_and_multiplied_gradients_are_those_of_the_slow_way(tmp_path):
    trainer = toy_trainer(
        tmp_path,
        model=ToyModel(dropout=0.0),
        optimizer="sgd",
        optimizer__weight_decay=0.01,
        optimizer__lr=0.3,
        training__update_freq=2,
        training__clip_norm=0.2,
        training__max_update=4,
        logging__log_interval=1,
        parameters__lr_scales=["norm=0.25", "output.bias=3"],
        parameters__gradient_multipliers=["embedding=4", "output.weight=0.5"],
        parameters__decay_embeddings=False,
    )
    expected = ToyModel(dropout=0.0)
    expected.load_state_dict(trainer.run.model.state_dict())
    epoch = list(toy_trainer(tmp_path, save_dir="other").run.train_iterator.batches())
    groups = [epoch[i : i + 2] for i in range(0, 6, 2)]
    second = toy_trainer(tmp_path, save_dir="third").run.train_iterator
    list(second.batches())
    groups.append(list(second.batches())[:2])
    scales = {"norm.weight": 0.25, "norm.bias": 0.25, "output.bias": 3.0}
    norms = []
    for update, group in enumerate(groups):
        logits = torch.cat([expected(**b.inputs).flatten(0, 1)[b.places] for b in group])
        loss = F.cross_entropy(logits, torch.cat([b.targets for b in group]))
        expected.zero_grad()
        loss.backward()
        expected.embedding.weight.grad *= 4
        expected.output.weight.grad *= 0.5
        norms.append(torch.nn.utils.clip_grad_norm_(expected.parameters(), 0.2).item())
        rate = [0.1, 0.2, 0.3, 0.3][update]
        with torch.no_grad():
            for name, parameter in expected.named_parameters():
                decay = 0.01 if name == "output.weight" else 0.0
                parameter -= rate * scales.get(name, 1.0) * (parameter.grad + decay * parameter)
    trainer.train()
    assert [r["gnorm"] for r in records(tmp_path)] == pytest.approx(norms, rel=1e-5)
    for name, parameter in expected.named_parameters():
        assert torch.allclose(parameter, trainer.run.model.get_parameter(name), rtol=0, atol=1e-6), name


def test_a_step_with_them_reads_nothing_from_the_device(tmp_path):
    trainer = toy_trainer(
        tmp_path,
        parameters__freeze=["norm"],
        parameters__lr_scales=["output=0.5"],
        parameters__gradient_multipliers=["output=2"],
    )
    batches = list(trainer.run.train_iterator.batches())
    with ForbidReading():
        trainer.train_step(batches[:2])
        trainer.train_step(batches[2:4])


def test_a_run_with_them_continues_where_it_stopped(tmp_path):
    options = {
        "parameters__freeze": ["norm.bias"],
        "parameters__lr_scales": ["output=0.5"],
        "parameters__gradient_multipliers": ["embedding=2"],
        "lr_scheduler__decay_updates": 7,
    }
    whole = toy_trainer(tmp_path, save_dir="whole", **options)
    whole.train()
    toy_trainer(tmp_path, training__max_update=4, **options).train()
    resumed = toy_trainer(tmp_path, **options)
    assert resumed.state.num_updates == 4
    resumed.train()
    assert_same(resumed, whole)
    assert len(everything(whole)) > 4


PLATEAU = {"lr_scheduler": "reduce_on_plateau", "lr_scheduler__lr_shrink": 0.5, "logging__log_interval": 1}


def rates(tmp_path):
    return [record["lr"] / 0.01 for record in records(tmp_path)]


def test_the_rate_drops_on_a_plateau_and_the_next_process_remembers(tmp_path):
    losses = [3.0, 2.0, 2.1, 2.2, 1.0, 1.1, 1.2, 1.3]
    options = {**EACH, **PLATEAU, "lr_scheduler__warmup_updates": 0, "lr_scheduler__lr_patience": 1}
    toy_trainer(tmp_path, criterion=Scripted(losses[:3]), training__max_update=3, **options).train()
    resumed = toy_trainer(tmp_path, criterion=Scripted(losses[3:]), training__max_update=8, **options)
    assert resumed.state.num_updates == 3
    resumed.train()
    # validations 3 and 4 are no better, then 6 and 7; each pair halves the rate of the updates after it
    assert rates(tmp_path) == pytest.approx([1, 1, 1, 1, 0.5, 0.5, 0.5, 0.25])


def test_a_plateau_of_a_metric_that_should_grow(tmp_path):
    options = {**EACH, **PLATEAU, "checkpoint__maximize_best_metric": True}
    toy_trainer(tmp_path, criterion=Scripted([1.0, 2.0, 3.0, 2.5, 4.0, 3.9]), training__max_update=6, **options).train()
    # warm-up over 3 updates, whose validations do not count; 2.5 < 3.0 and 3.9 < 4.0
    assert rates(tmp_path) == pytest.approx([1 / 3, 2 / 3, 1, 1, 0.5, 0.5])


@pytest.mark.parametrize(("rate", "updates"), [(0.005, 7), (0.0015, 9), (1e-9, 10)])
def test_a_run_stops_when_its_rate_has_fallen_so_far(tmp_path, rate, updates):
    # three updates of warm-up from 0.01 / 3, which is below 0.005 and stops nothing; then (10 - n) / 7 of 0.01
    options = {"training__stop_min_lr": rate, "training__max_update": 10}
    summary = toy_trainer(tmp_path, **options).train()
    assert summary.num_updates == updates
    if updates < 10:
        assert f"the learning rate has fallen to stop_min_lr {rate:g}" in summary.reason
        again = toy_trainer(tmp_path, **options).train()
        assert (again.num_updates, again.reason) == (updates, summary.reason)
    last = json.loads((tmp_path / "run" / "checkpoint_last" / "trainer.json").read_text())
    assert last["num_updates"] == updates
