"""One update: its gradient, its clipping, its learning rate, its randomness, and when it is skipped."""

from __future__ import annotations

import math
import traceback
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ftk.criterions.base import LossOutput
from ftk.criterions.cross_entropy import CrossEntropy, CrossEntropyConfig
from ftk.model_parallel.compile import is_compiled
from ftk.model_parallel.config import EngineConfig
from ftk.model_parallel.world import Sizes, World, make_world
from ftk.trainer.step import mix
from tests.distributed import run_ranks
from tests.paths import ROOT
from tests.records import records_of
from tests.trainer.toy import ToyModel, ToyTask, assert_same, collate, everything, toy_trainer


def records(tmp_path, event="train", save_dir="run"):
    return records_of(tmp_path / save_dir, event)


def test_updates_are_those_of_the_slow_way(tmp_path):
    trainer = toy_trainer(
        tmp_path,
        model=ToyModel(dropout=0.0),
        training__update_freq=2,
        training__clip_norm=0.7,
        dataloader__batch_size=5,
        training__max_update=5,
        logging__log_interval=1,
    )
    expected = ToyModel(dropout=0.0)
    expected.load_state_dict(trainer.run.model.state_dict())
    weights = [p for p in expected.parameters() if p.ndim > 1]
    others = [p for p in expected.parameters() if p.ndim <= 1]
    slow = torch.optim.AdamW(
        [{"params": weights, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        betas=(0.9, 0.98),
        eps=1e-6,
        foreach=False,
        fused=False,
    )
    iterator = toy_trainer(tmp_path, save_dir="other", dataloader__batch_size=5).run.train_iterator
    groups = []
    while len(groups) < 5:
        epoch = list(iterator.batches())
        groups += [epoch[i : i + 2] for i in range(0, len(epoch), 2)]  # an update does not cross epochs
    losses, norms = [], []
    for update, group in enumerate(groups[:5]):
        logits = torch.cat([expected(**b.inputs).flatten(0, 1)[b.places] for b in group])
        loss = F.cross_entropy(logits, torch.cat([b.targets for b in group]))
        slow.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(expected.parameters(), 0.7).item())
        losses.append(loss.item())
        for param_group in slow.param_groups:
            param_group["lr"] = [0.01 / 3, 0.02 / 3, 0.01, 0.01, 0.005][update]
        slow.step()
    trainer.train()
    assert [r["loss"] for r in records(tmp_path)] == pytest.approx(losses, rel=1e-5)
    assert [r["gnorm"] for r in records(tmp_path)] == pytest.approx(norms, rel=1e-5)
    assert [r["lr"] for r in records(tmp_path)] == pytest.approx([0.01 / 3, 0.02 / 3, 0.01, 0.01, 0.005])
    for name, parameter in expected.named_parameters():
        assert torch.allclose(parameter, trainer.run.model.get_parameter(name), rtol=0, atol=1e-6), name


def test_accumulation_equals_the_large_batch(tmp_path):
    one = toy_trainer(tmp_path, model=ToyModel(0.0), save_dir="one", dataloader__batch_size=12)
    many = toy_trainer(
        tmp_path, model=ToyModel(0.0), save_dir="many", dataloader__batch_size=3, training__update_freq=4
    )
    one.run.model.load_state_dict(many.run.model.state_dict())
    one.train()
    many.train()
    for name, tensor in everything(one).items():
        assert torch.allclose(tensor, everything(many)[name], rtol=1e-4, atol=1e-6), name
    assert [r["loss"] for r in records(tmp_path, save_dir="one")] == pytest.approx(
        [r["loss"] for r in records(tmp_path, save_dir="many")], rel=1e-5
    )


class Spoiled(CrossEntropy):
    """Makes the loss of some calls (counted from 1 while training) infinite or not a number."""

    def __init__(self, spoil):
        super().__init__(CrossEntropyConfig())
        self.spoil = spoil
        self.calls = 0

    def __call__(self, model, batch):
        output = super().__call__(model, batch)
        if not model.training:
            return output
        self.calls += 1
        return LossOutput(output.loss * self.spoil.get(self.calls, 1.0), output.num_targets, output.meters)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_non_finite_update_is_skipped_and_counted(tmp_path, value, caplog):
    trainer = toy_trainer(
        tmp_path, criterion=Spoiled({3: value, 4: value}), training__max_update=3, logging__log_interval=3
    )
    snapshots = []
    step = trainer.train_step

    def watched_step(batches):
        step(batches)
        snapshots.append(everything(trainer))

    trainer.train_step = watched_step
    trainer.train()
    assert snapshots[1].keys() == snapshots[2].keys()
    assert all(torch.equal(snapshots[1][name], snapshots[2][name]) for name in snapshots[1])
    assert any(not torch.equal(snapshots[0][name], snapshots[1][name]) for name in snapshots[1])
    [record] = records(tmp_path)
    assert record["skipped_updates"] == 1
    assert math.isfinite(record["loss"])
    assert math.isfinite(record["gnorm"])
    assert "1 update was skipped" in caplog.text


def test_a_log_line_of_skipped_updates_only_is_still_json(tmp_path):
    spoil = dict.fromkeys((3, 4), math.nan)
    toy_trainer(tmp_path, criterion=Spoiled(spoil), training__max_update=4).train()
    last = records(tmp_path)[-1]
    assert (last["loss"], last["ppl"], last["gnorm"], last["skipped_updates"]) == (None, None, None, 2)
    assert "NaN" not in (tmp_path / "run" / "metrics.jsonl").read_text()


def test_a_run_that_only_skips_gives_up(tmp_path):
    spoil = dict.fromkeys(range(4, 100), math.nan)
    trainer = toy_trainer(tmp_path, criterion=Spoiled(spoil), training__max_nonfinite_updates=3)
    with pytest.raises(FloatingPointError, match="the last 3 updates were all skipped"):
        trainer.train()
    assert trainer.state.num_updates == 6


class ForbidReading(TorchFunctionMode):
    """Fails where the host reads a value of a tensor: on a GPU it would wait there."""

    READERS = ("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__")

    def __torch_function__(self, func, types, args=(), kwargs=None):
        assert getattr(func, "__name__", "") not in self.READERS, "the host read a tensor"
        return func(*args, **(kwargs or {}))


def test_a_step_never_reads_a_value_from_the_device(tmp_path):
    trainer = toy_trainer(tmp_path, criterion=Spoiled({2: math.nan}))
    batches = list(trainer.run.train_iterator.batches())
    with ForbidReading():
        trainer.train_step(batches[:2])
        trainer.train_step(batches[2:4])
    assert trainer.figures.skipped()[0] == 1
    with pytest.raises(AssertionError, match="the host read a tensor"), ForbidReading():
        trainer._log()


def test_bf16_computes_in_bf16_and_keeps_fp32_weights(tmp_path):
    model = ToyModel(dropout=0.0)
    kinds = set()
    model.output.register_forward_hook(lambda module, inputs, output: kinds.add(output.dtype))
    trainer = toy_trainer(tmp_path, model=model, training__precision="bf16")
    trainer.train()
    assert kinds == {torch.bfloat16}
    assert {tensor.dtype for tensor in everything(trainer).values()} == {torch.float32}
    reference = toy_trainer(tmp_path, model=ToyModel(0.0), save_dir="fp32")
    reference.train()
    assert [r["loss"] for r in records(tmp_path)] == pytest.approx(
        [r["loss"] for r in records(tmp_path, save_dir="fp32")], abs=0.15
    )


def test_the_seed_fixes_dropout_whatever_was_drawn_before(tmp_path):
    trainers = []
    for name, seed, drawn in (("a", 7, 0), ("b", 7, 5), ("c", 8, 0)):
        trainer = toy_trainer(tmp_path, save_dir=name, common__seed=seed)
        trainer.run.train_iterator.seed = 1  # the same batches for all
        torch.rand(drawn)
        trainer.train()
        trainers.append(trainer)
    assert_same(trainers[0], trainers[1])
    with pytest.raises(AssertionError):
        assert_same(trainers[0], trainers[2])


def test_seeds_of_updates_do_not_repeat():
    seeds = {mix(seed, update) for seed in range(50) for update in range(200)}
    assert len(seeds) == 50 * 200
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_batch_without_targets_does_no_harm(tmp_path):
    class Empty(ToyTask):
        def collater(self):
            return collate_without_targets

    trainer = toy_trainer(tmp_path, task=Empty(tmp_path), dataloader__valid_subset=None)
    trainer.train()
    assert all(torch.isfinite(tensor).all() for tensor in everything(trainer).values())


def collate_without_targets(samples):
    return collate(samples).without_loss()


def test_three_functions_of_ftk_stand_between_the_trainers_step_and_the_model(tmp_path):
    seen = []

    class Watched(ToyModel):
        def forward(self, tokens):
            if self.training:
                seen.append(
                    [
                        frame.name
                        for frame in traceback.extract_stack()
                        if Path(frame.filename).is_relative_to(ROOT / "ftk")
                    ]
                )
            return super().forward(tokens)

    toy_trainer(tmp_path, model=Watched(), training__max_update=1).train()
    (frames,) = seen
    between = frames[len(frames) - frames[::-1].index("train_step") :]
    assert between == ["forward_backward", "forward", "__call__"]


def test_the_model_is_back_in_training_mode_after_a_validation(tmp_path):
    modes = []

    class Watching(CrossEntropy):
        def __call__(self, model, batch):
            modes.append((model.training, torch.is_grad_enabled()))
            return super().__call__(model, batch)

    trainer = toy_trainer(tmp_path, criterion=Watching(CrossEntropyConfig()))
    trainer.train()
    assert set(modes) == {(True, True), (False, False)}
    assert trainer.run.model.training


@pytest.mark.parametrize("options", [{"activation_checkpointing": "full"}, {"activation_checkpointing": "selective"}])
def test_activation_checkpointing_changes_no_bit_of_a_run(tmp_path, options):
    class Deep(ToyModel):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.1)) for _ in range(3))

        def forward(self, tokens):
            hidden = self.embedding(tokens)
            for layer in self.layers:
                hidden = hidden + layer(hidden)
            return self.output(self.norm(hidden))

    trainers = []
    for name, chosen in (("plain", {}), ("engine", options)):
        torch.manual_seed(3)
        engine = {f"engine__{key}": value for key, value in chosen.items()}
        trainers.append(toy_trainer(tmp_path, model=Deep(), save_dir=name, **engine))
        trainers[-1].train()
    assert_same(*trainers)


COMPILE = nn.Module.compile


class ToyBlock(nn.Linear):
    def forward(self, hidden):
        return hidden + super().forward(hidden)


class ToyBlocks(ToyModel):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__(dropout=0.3)
        self.layers = nn.ModuleList(ToyBlock(8, 8) for _ in range(2))

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.output(self.dropout(self.norm(hidden)))


def compiled_trainer(tmp_path, monkeypatch, backend, **options):
    """A run whose blocks are compiled as on a GPU, by another backend."""
    monkeypatch.setattr(EngineConfig, "compile_on", lambda self, device: "block" if self.compile != "none" else "none")
    monkeypatch.setattr("ftk.model_parallel.engine.can_compile", lambda model: True)
    monkeypatch.setattr(nn.Module, "compile", lambda block: COMPILE(block, backend=backend))
    return toy_trainer(tmp_path, model=ToyBlocks(), training__max_update=2, **options)


def test_a_compiled_run_is_warmed_before_its_first_update_and_takes_the_same_ones(tmp_path, monkeypatch):
    expected = toy_trainer(tmp_path, model=ToyBlocks(), training__max_update=2, save_dir="plain")
    expected.train()
    order = []

    def backend(graph, inputs):
        order.append("compiled")
        return graph

    trainer = compiled_trainer(tmp_path, monkeypatch, backend)
    apply = trainer.run.update.apply
    monkeypatch.setattr(trainer.run.update, "apply", lambda *given: (order.append("applied"), apply(*given))[1])
    trainer.train()
    assert order[0] == "compiled"
    assert order.count("applied") == 2
    assert_same(trainer, expected)


def test_what_torch_cannot_compile_runs_uncompiled_where_nobody_asked_for_it(tmp_path, monkeypatch, caplog):
    def backend(graph, inputs):
        raise ValueError("no such instruction")

    trainer = compiled_trainer(tmp_path, monkeypatch, backend)
    assert trainer.train().num_updates == 2
    assert "torch cannot compile the blocks of this model, which run uncompiled: BackendCompilerFailed" in caplog.text
    assert "compiled in" not in caplog.text
    asked = compiled_trainer(tmp_path, monkeypatch, backend, save_dir="asked", engine__compile="block")
    with pytest.raises(Exception, match="no such instruction"):
        asked.train()


def test_what_another_rank_cannot_compile_runs_uncompiled_here(tmp_path, monkeypatch, caplog):
    trainer = compiled_trainer(tmp_path, monkeypatch, lambda graph, inputs: graph)
    update, batch = trainer.run.update, next(iter(trainer.run.train_iterator.batches()))
    assert is_compiled(update.model)
    monkeypatch.setattr(World, "gather_json", lambda self, value: [value, "BackendCompilerFailed: elsewhere"])
    update.warm_up([batch])
    assert not is_compiled(update.model)
    assert "run uncompiled: BackendCompilerFailed: elsewhere (`compile` none" in caplog.text


def on_each_rank(folder):
    """Runs of replicas and of shards, on ranks that cannot compile or need not: parameters and warnings."""

    def backend(graph, inputs):
        raise ValueError("no such instruction")

    found = []
    for sizes in (Sizes(replicate=2), Sizes(shard=2)):
        for name in ("plain", "compiled"):
            own = Path(folder, f"{name} {sizes.shard}")
            own.mkdir(exist_ok=True)
            options = {"world": make_world(sizes, "cpu"), "logging__log_all_ranks": str(own / "logs")}
            with pytest.MonkeyPatch.context() as monkeypatch:
                if name == "compiled":
                    trainer = compiled_trainer(own, monkeypatch, backend, **options)
                else:
                    trainer = toy_trainer(own, model=ToyBlocks(), training__max_update=2, **options)
                trainer.train()
            log = (own / "logs" / f"rank_{trainer.run.world.rank}.log").read_text()
            sums = {name: value.double().sum().item() for name, value in everything(trainer).items()}
            found.append([sums, log.count("which run uncompiled: BackendCompilerFailed")])
    return found


@pytest.mark.slow
def test_ranks_that_cannot_compile_run_uncompiled(tmp_path):
    for found in run_ranks(on_each_rank, 2, str(tmp_path)):
        for plain, compiled in (found[:2], found[2:]):
            assert plain[1] == 0
            assert compiled == [plain[0], 1]


def test_nothing_is_warmed_or_said_to_be_compiled_where_a_model_cannot_be(tmp_path, monkeypatch):
    monkeypatch.setattr(EngineConfig, "compile_on", lambda self, device: "block")  # as on a GPU
    monkeypatch.setattr("ftk.model_parallel.engine.can_compile", lambda model: False)
    assert not toy_trainer(tmp_path, model=ToyBlocks()).run.update.is_cold
