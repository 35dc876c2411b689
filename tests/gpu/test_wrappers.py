"""What wraps a model for several processes, on one GPU: a mesh of one process, whose updates are those of the CPU.

Wrappers of a size of one are put on by hand: a run of one process leaves them out.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
from step_ways import LEARNING_RATE, SEED, Way, build_step, make_batches, model_config, train_config
from torch import nn

from ftk.model_parallel.config import ParallelConfig
from ftk.model_parallel.data_parallel import wrap_in_ddp
from ftk.model_parallel.engine import prepare_model
from ftk.model_parallel.fully_sharded import apply_fsdp
from ftk.model_parallel.materialize import materialize
from ftk.model_parallel.parallelize import parallelize_training
from ftk.model_parallel.step_module import StepModule
from ftk.model_parallel.world import Sizes, World, make_world
from ftk.models.glm.model import GLM
from ftk.optim.parameter_groups import parameter_groups
from ftk.trainer.log.metrics import Stopwatch, TrainingFigures
from ftk.trainer.step import SequentialRunner, Update
from tests.gpu.test_gpu import SHAPE, no_waiting

CONFIG = model_config(SHAPE, 256, dropout=0.0)
BATCHES = [
    dataclasses.replace(batch, sample_ids=np.arange(2))  # as the iterator fills them in
    for batch in make_batches(CONFIG, 2, 256, 4)
]
PRECISIONS = ["fp32", "bf16"]
KINDS = ["copies", "shares", "offload"]


@pytest.fixture(scope="module")
def world(device) -> World:
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield make_world(Sizes(), torch.device("cuda", 0) if device.type == "cuda" else device)
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def expected():
    """The losses of the first updates on the CPU in float32, by a bare model."""
    step = build_step(Way("ftk", attention="sdpa", loss_form="plain"), CONFIG, torch.device("cpu"))
    return [step.step(batch).item() for batch in BATCHES]


class Wrapped:
    """The update of ftk's trainer on a model that is wrapped as for several processes.

    Args:
        kind: "copies": DDP; "shares": FSDP2, from the meta device; "offload": the same with shares on the host.
    """

    def __init__(self, kind: str, precision: str, world: World, compile: str = "none", attention: str = "auto") -> None:
        config = train_config(Way("ftk", precision, compile=compile))
        criterion = config.criterion.build()
        with torch.device("cpu" if kind == "copies" else "meta"):
            model = GLM(dataclasses.replace(CONFIG, attention=attention), SEED)
        step = StepModule(model, criterion)
        parallel = ParallelConfig(cpu_offload=kind == "offload")
        called: nn.Module = step
        if kind == "offload":
            called = parallelize_training(step, world, parallel, config.engine, precision=precision, seed=SEED).module
        else:
            prepare_model(model, config.engine, world.device)
            if kind == "copies":
                called = wrap_in_ddp(step.to(world.device), world, parallel)
            else:
                apply_fsdp(step, world.mesh["shard"], parallel, precision)
                materialize(step, model, world.device, lambda name, shape: model.initial_value(name, shape, SEED))
        self.model = model.train()
        optimizer = config.optimizer.build(param_groups=parameter_groups(model, 0.1))
        runner = SequentialRunner(called, world.device, precision, many_ranks=True)
        self.update = Update(config, model, criterion, optimizer, Stopwatch(), runner, world)
        self.figures = TrainingFigures(world, Stopwatch())
        self.num_updates = 0

    def gradients(self, batch):
        with self.update.gradients(self.num_updates, self.update.count([batch])) as scale:
            return self.update.runner.forward_backward([batch], scale)

    def step(self, batch):
        sums = self.gradients(batch)
        skip = self.update.apply(sums, LEARNING_RATE)
        self.figures.add(sums, skip=skip, num_tokens=1, num_targets=self.update.count([batch]).num_targets)
        self.num_updates += 1
        loss, count = sums["loss"]
        return loss / count


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_updates_of_a_wrapped_model_are_those_of_a_bare_one_on_the_cpu(world, expected, kind, precision):
    step = Wrapped(kind, precision, world)
    found = [step.step(batch).item() for batch in BATCHES]
    assert found == pytest.approx(expected, rel={"fp32": 1e-4, "bf16": 1e-2}[precision])
    record = step.figures.record()
    assert math.isfinite(record["loss"])
    assert record["gnorm"] > 0.0
    assert step.figures.skipped() == (0, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_where_parameters_and_gradients_are(world, kind):
    step = Wrapped(kind, "bf16", world)
    step.step(BATCHES[0])
    home = "cpu" if kind == "offload" else world.device.type
    for parameter in step.model.parameters():
        assert parameter.device.type == parameter.grad.device.type == home
        assert parameter.dtype == parameter.grad.dtype == torch.float32


@pytest.mark.parametrize("kind", KINDS)
def test_an_update_that_is_not_finite_is_skipped(world, kind):
    step = Wrapped(kind, "fp32", world)
    step.step(BATCHES[0])
    before = [parameter.detach().clone() for parameter in step.model.parameters()]
    spoilt = step.gradients(BATCHES[1])
    for parameter in step.model.parameters():
        parameter.grad.fill_(float("nan"))
    skip = step.update.apply(spoilt, LEARNING_RATE)
    assert skip.device.type == world.device.type
    assert bool(skip)
    assert all(torch.equal(old, new) for old, new in zip(before, step.model.parameters(), strict=True))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", ["copies", "shares"])
def test_a_wrapped_step_never_waits_for_the_device(world, kind, precision):
    step = Wrapped(kind, precision, world)
    for batch in BATCHES[:2]:
        step.step(batch)
    with no_waiting(world.device):
        for batch in BATCHES:
            step.step(batch)


@pytest.mark.parametrize("kind", KINDS)
def test_hidden_states_stay_float32_and_matrices_are_gathered_in_bf16(world, kind):
    step, types, hidden_types = Wrapped(kind, "bf16", world), [], []
    for layer in step.model.layers:
        # Inside the block, whose parameters are shares again before its own hooks are called.
        inner = layer.feed_forward.inner
        inner.register_forward_pre_hook(lambda part, given: types.append(part.weight.dtype))
        layer.register_forward_hook(lambda layer, given, hidden: hidden_types.append(hidden.dtype))
    step.step(BATCHES[0])
    gathered = torch.bfloat16 if kind != "copies" and world.device.type == "cuda" else torch.float32
    assert types == [gathered] * CONFIG.num_layers
    assert hidden_types == [torch.float32] * CONFIG.num_layers


@pytest.mark.parametrize("attention", ["sdpa", "flex"])
@pytest.mark.parametrize("compile", ["none", "block"])
@pytest.mark.parametrize("kind", ["copies", "shares"])
def test_compiled_blocks_are_wrapped(cuda, world, expected, kind, compile, attention):
    step = Wrapped(kind, "fp32", world, compile, attention)
    assert [step.step(batch).item() for batch in BATCHES] == pytest.approx(expected, rel=1e-4)
