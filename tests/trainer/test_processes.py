"""What the Trainers of a run's processes agree on: targets, skips, stops, figures, and who writes."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from ftk.checkpoint import load_model_tensors, verify
from ftk.criterions.cross_entropy import CrossEntropy, CrossEntropyConfig
from ftk.errors import UserError
from ftk.model_parallel.config import ParallelConfig
from ftk.model_parallel.world import Sizes, make_world
from ftk.trainer import Trainer, build_run, parallel_check
from ftk.trainer.hooks import Hook
from ftk.trainer.log.metrics import summed
from ftk.trainer.signals import StopSignals
from ftk.trainer.step import mix, seed_update
from ftk.trainer.watch.lr_range import lr_range_test, range_config
from ftk_cli.command import run
from tests.distributed import run_ranks
from tests.records import records_of
from tests.trainer.toy import ToyModel, ToyTask, everything, toy_config


class IllTask(ToyTask):
    """Its criterion's loss is infinite in some updates on one process."""

    def __init__(self, tmp_path, world, updates, rank):
        super().__init__(tmp_path)
        self.world, self.updates, self.rank = world, updates, rank
        self.trainer = None

    def criterion(self):
        task = self

        class Ill(CrossEntropy):
            def __call__(self, model, batch):
                output = super().__call__(model, batch)
                is_due = task.world.rank == task.rank and task.trainer.state.num_updates + 1 in task.updates
                return output._replace(loss=output.loss * math.inf) if model.training and is_due else output

        return Ill(CrossEntropyConfig())


def train(folder, world, name, *, task=None, model=None, **options):
    torch.manual_seed(0)
    task = task or ToyTask(folder)
    config = toy_config(folder / name, **options)
    criterion = task.criterion() if isinstance(task, IllTask) else CrossEntropy(CrossEntropyConfig())
    trainer = Trainer(build_run(config, task=task, model=model or ToyModel(0.0), criterion=criterion, world=world))
    task.trainer = trainer
    return trainer, trainer.train()


def numbers(trainer):
    return {name: value.double().sum().item() for name, value in everything(trainer).items()}


def on_each_process(folder):
    folder = Path(folder)
    world = make_world(Sizes(replicate=dist.get_world_size()), "cpu")
    told = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("ftk").addHandler(handler)
    logging.getLogger("ftk").setLevel(logging.INFO)
    found = {"rank": world.rank}

    options = {"dataloader__batch_size": 2, "logging__log_all_ranks": str(folder / "logs")}
    trainer, summary = train(folder, world, "together", dataloader__num_workers=1, **options)
    found["together"] = numbers(trainer)
    found["updates"] = summary.num_updates

    ill = IllTask(folder, world, {3, 4}, rank=1)
    trainer, _ = train(folder, world, "ill", task=ill, debug__detect_anomaly=True, **options)
    found["ill"] = {"skipped": trainer.figures.skipped()[0], "numbers": numbers(trainer), "told": list(told)}

    trainer, summary = train(folder, world, "hours", training__stop_time_hours=1e-9, **options)
    found["hours"] = [summary.num_updates, summary.reason]

    try:
        hopeless = IllTask(folder, world, set(range(5, 100)), rank=0)
        train(folder, world, "hopeless", task=hopeless, training__max_nonfinite_updates=2, **options)
    except FloatingPointError as error:
        found["hopeless"] = str(error)

    class Spoiled(ToyTask):
        """After the fourth update the last process has NaN in its weights."""

        def hooks(self):
            class Spoil(Hook):
                def after_step(self, step):
                    if world.rank == 1 and step.num_updates == 4:
                        with torch.no_grad():
                            step.model.norm.weight[0] = math.nan

            return (Spoil(),)

    def spoiled(arguments):
        train(folder, world, "spoiled", task=Spoiled(folder), checkpoint__save_interval_updates=2, **options)

    found["spoiled"] = run("ftk-train", spoiled, [])

    config = toy_config(folder / "range", lr_range__lr_range_test=True, lr_range__lr_range_updates=12, **options)
    task = ToyTask(folder)
    torch.manual_seed(0)
    trainer = Trainer(
        build_run(
            range_config(config),
            task=task,
            model=ToyModel(0.0),
            criterion=CrossEntropy(CrossEntropyConfig()),
            world=world,
        )
    )
    found["range"] = lr_range_test(trainer).losses

    class Graded(ToyTask):
        """Its hook grades validations: where `mine`, each process by a figure of its own, else the main one alone."""

        def __init__(self, tmp_path, mine):
            super().__init__(tmp_path)
            self.mine = mine

        def hooks(self):
            mine = self.mine

            class Grade(Hook):
                def after_validation(self, step, results):
                    if mine or step.world.is_main:
                        updates = step.num_updates
                        results["valid"]["grade"] = torch.tensor(float(-updates if step.world.rank else updates))

            return (Grade(),)

    for name in ("mine", "main"):
        task = Graded(folder, name == "mine")
        trainer, summary = train(folder, world, name, task=task, checkpoint__best_metric="grade", **options)
        found[name] = [summary.best.value, summary.best.num_updates]

    # The same names need not be known to all.
    found["summed"] = summed({"loss": (1.5, 2.0), **({"late": (0.1, 1.0)} if world.rank else {})}, world)
    agreement = trainer.coordinator
    trainer.signals.received = "SIGUSR1" if world.rank else None
    found["signal"] = [agreement.signal, agreement.should_stop(), agreement.signal]
    return found


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    return folder, run_ranks(on_each_process, 2, str(folder), timeout=240.0)


def test_nan_in_the_weights_of_one_process_ends_all_with_1_and_is_not_saved(processes):
    folder, found = processes
    assert [rank["spoiled"] for rank in found] == [1, 1]
    run_folder = folder / "spoiled"
    assert sorted(path.name for path in run_folder.glob("checkpoint_*[0-9]")) == ["checkpoint_2"]
    assert (run_folder / "checkpoint_last").resolve().name == "checkpoint_2"
    assert verify(run_folder / "checkpoint_2") == []
    assert all(tensor.isfinite().all() for tensor in load_model_tensors(run_folder / "checkpoint_2").values())


def test_all_hold_the_same_and_it_is_that_of_one_process(processes, tmp_path):
    folder, found = processes
    trainer, summary = train(tmp_path, None, "alone", training__update_freq=2, dataloader__batch_size=2)
    assert found[0]["together"] == found[1]["together"]
    assert found[0]["together"] == pytest.approx(numbers(trainer), rel=1e-4, abs=1e-5)
    assert found[0]["updates"] == summary.num_updates == 10
    for event in ("train", "valid"):
        several, one = records_of(folder / "together", event), records_of(tmp_path / "alone", event)
        assert len(several) == len(one) > 1
        for figure in ("loss", "num_updates", "num_targets", "num_batches", "gnorm"):
            values = [record[figure] for record in one if figure in record]
            assert [record[figure] for record in several if figure in record] == pytest.approx(values, rel=1e-5)


def test_one_writes_and_each_keeps_its_own_log_on_request(processes):
    folder, _ = processes
    assert len(records_of(folder / "together", "train")) == 5  # and not twice as many
    assert len(json.loads((folder / "together" / "environment.json").read_text())) == 1
    logs = [(folder / "logs" / f"rank_{rank}.log").read_text() for rank in (0, 1)]
    assert all("training" in text and "stopped: max_update" in text for text in logs)


def test_a_loss_that_is_bad_on_one_process_is_skipped_by_all_and_said_by_name(processes):
    _, found = processes
    assert [each["ill"]["skipped"] for each in found] == [2, 2]
    assert found[0]["ill"]["numbers"] == found[1]["ill"]["numbers"]
    assert all(math.isfinite(value) for value in found[0]["ill"]["numbers"].values())
    for each in found:
        told = "\n".join(each["ill"]["told"])
        assert "update 3, epoch 1: loss; micro-batch 1: samples" in told
        assert "micro-batch 2: samples" in told  # of the other process
        assert "anomaly in update 3, epoch 1: rank 1, in the forward pass: the loss" in told


def test_the_clock_of_one_process_stops_all(processes):
    _, found = processes
    assert found[0]["hours"] == found[1]["hours"]
    assert found[0]["hours"][0] == 0
    assert "stop_time_hours" in found[0]["hours"][1]


def test_a_run_without_progress_ends_on_all_and_is_saved(processes):
    folder, found = processes
    assert found[0]["hopeless"] == found[1]["hopeless"]
    assert "the last 2 updates were all skipped" in found[0]["hopeless"]
    assert (folder / "hopeless" / "checkpoint_6").is_dir()


def test_the_range_test_finds_the_same_on_all(processes):
    _, found = processes
    assert found[0]["range"] == found[1]["range"]
    assert len(found[0]["range"]) >= 3


@pytest.mark.parametrize("name", ["mine", "main"])
def test_figures_of_hooks_rank_checkpoints_by_what_the_main_process_says(processes, name):
    folder, found = processes
    assert [each[name] for each in found] == [[5.0, 5], [5.0, 5]]
    assert [record["grade"] for record in records_of(folder / name, "valid")] == [5.0, 10.0]


def test_sums_and_signals_are_those_of_all(processes):
    _, found = processes
    for each in found:
        assert each["summed"] == {"loss": [3.0, 4.0], "late": [0.1, 1.0]}
        assert each["signal"] == [None, True, "SIGUSR1"]


def test_processes_with_other_batches_or_layers_draw_other_numbers():
    drawn = {}
    for data_rank in range(3):
        for pipeline_rank in range(3):
            seed_update(1, 7, data_rank, pipeline_rank)
            drawn[data_rank, pipeline_rank] = torch.rand(1).item()
    assert len(set(drawn.values())) == 9
    seed_update(1, 7)
    assert torch.rand(1).item() == drawn[0, 0]
    assert torch.initial_seed() == mix(1, 7)


def test_a_signal_that_comes_twice_at_once_is_one_where_there_are_several_processes(capfd, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("ftk.trainer.signals.time.monotonic", lambda: now[0])
    signals = StopSignals(many_ranks=True, reports=False)
    signals._handle(15, None)
    signals._handle(15, None)
    assert signals.received == "SIGTERM"
    assert capfd.readouterr().err == ""
    now[0] += 6.0
    with pytest.raises(KeyboardInterrupt):
        signals._handle(15, None)
    alone = StopSignals()
    alone._handle(15, None)
    assert "finishing this update" in capfd.readouterr().err
    with pytest.raises(KeyboardInterrupt):
        alone._handle(15, None)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"training__precision": "fp16"}, "use `precision` bf16"), ({"optimizer": "muon"}, "use `optimizer` adamw")],
)
def test_what_offloading_on_a_gpu_cannot_do_is_refused(monkeypatch, change, message):
    config = SimpleNamespace(
        parallel=ParallelConfig(cpu_offload=True),
        common=SimpleNamespace(device="auto"),
        training=SimpleNamespace(precision=change.get("training__precision", "bf16")),
        optimizer=SimpleNamespace(name=change.get("optimizer", "adamw")),
    )
    parallel_check._check_types(config)  # on a CPU all is in one place
    monkeypatch.setattr(parallel_check, "resolve_device", lambda name: torch.device("cuda"))
    with pytest.raises(UserError, match=message):
        parallel_check._check_types(config)


@pytest.mark.parametrize(
    ("sizes", "option", "message"),
    [
        (Sizes(shard=2), {"gradient_compression": "bf16"}, "replicas of the whole model, but the mesh is shard 2"),
        (Sizes(replicate=2, tensor=2), {"gradient_compression": "bf16"}, "give `data_parallel_replicate_size` 4"),
        (Sizes(replicate=2), {"zero_stage": 2}, "`zero_stage` 2 is for sharded parameters"),
        (Sizes(replicate=2), {"reduce_dtype": "bf16"}, "but the mesh is replicate 2"),
        (Sizes(tensor=2), {"reduce_dtype": "bf16"}, "give `data_parallel_shard_size`"),
        (Sizes(pipeline=2), {"prefetch_blocks": 0}, "`prefetch_blocks` 0 is for"),
        (Sizes(pipeline=2, shard=2), {"zero_stage": 2}, "whole gradients until an update ends; use `zero_stage` 1"),
        (Sizes(pipeline=2, shard=2), {"zero_stage": 3}, "whole parameters until an update ends; use `zero_stage` 1"),
        (Sizes(pipeline=2), {"zero_stage": 2, "cpu_offload": True}, "use `zero_stage` 1"),
    ],
)
def test_options_for_another_way_of_sharing_are_refused_once_the_sizes_are_known(sizes, option, message):
    with pytest.raises(UserError, match=message):
        parallel_check._check_options_apply(ParallelConfig(**option), sizes)


@pytest.mark.parametrize(
    ("sizes", "option"),
    [
        (Sizes(replicate=2), {"gradient_compression": "bf16"}),
        (Sizes(shard=2), {"zero_stage": 2, "reduce_dtype": "bf16", "prefetch_blocks": 0}),
        (Sizes(replicate=2, tensor=2), {"weights": "bf16"}),  # copies of a part are shares of size 1
        (Sizes(replicate=2), {"cpu_offload": True, "reduce_dtype": "bf16"}),
        (Sizes(pipeline=2, shard=2), {"zero_stage": 1}),
        (Sizes(pipeline=2, tensor=2), {}),
    ],
)
def test_options_that_count_are_taken(sizes, option, caplog):
    parallel_check._check_options_apply(ParallelConfig(**option), sizes)
    assert caplog.text == ""


def test_options_for_several_processes_are_said_to_do_nothing_on_one(caplog):
    parallel_check._check_options_apply(ParallelConfig(gradient_compression="bf16", zero_stage=1), Sizes())
    assert "`gradient_compression` bf16, `zero_stage` 1: for several processes" in caplog.text
