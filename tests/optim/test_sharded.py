"""Optimizers, norms, clipping, loss scale and moving averages of parameters that lie on several processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from ftk.checkpoint import load_model_state, load_optimizer_state
from ftk.checkpoint.save import write_snapshot
from ftk.checkpoint.snapshot import take_snapshot
from ftk.errors import UserError
from ftk.model_parallel.gradients import GlobalGradients, clip_factor
from ftk.model_parallel.shards import local, local_part, multiply_gradients, whole
from ftk.model_parallel.world import Sizes, World, make_world
from ftk.optim.base import step_unless, takes_scale
from ftk.optim.config import EMAConfig, LossScaleConfig
from ftk.optim.ema import EMA
from ftk.optim.loss_scaler import LossScaler
from ftk.optim.parameter_groups import parameter_groups
from ftk.registry import OPTIMIZERS
from tests.distributed import run_ranks
from tests.optim import test_optimizer_contract as contract

CPU = torch.device("cpu")
# Shapes that do not divide, and every way of cutting: over shard and tensor, twice along one dimension, not at all.
PARAMETERS = {
    "both.weight": ((7, 10), (Shard(0), Shard(1))),
    "rows.weight": ((9, 6), (Shard(0), Shard(0))),
    "columns.weight": ((6, 8), (Replicate(), Shard(1))),
    "whole.weight": ((4, 5), (Replicate(), Replicate())),
    "fused.weight": ((4, 3, 5), (Shard(0), Replicate())),
    "norm.bias": ((7,), (Shard(0), Replicate())),
    "tiny.bias": ((1,), (Shard(0), Replicate())),  # three processes of four have none of it
}
OPTIONS = dict(contract.OPTIONS)
OPTIONS |= {f"torch.optim.{name}": {"lr": 1e-2} for name in ("ASGD", "Adagrad", "Adamax", "NAdam")}
OPTIONS |= {"torch.optim.Adadelta": {"lr": 1.0}}
STEPS = 3


class Holder(nn.Module):
    """Parameters under their names."""

    def __init__(self, values):
        super().__init__()
        for name, value in values.items():
            module, _, own = name.partition(".")
            self.add_module(module, nn.Module())
            getattr(self, module).register_parameter(own, nn.Parameter(value))


def numbers(seed):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, (shape, _) in PARAMETERS.items()}


def laid_out(values, mesh):
    if mesh is None:
        return values
    cut = {name: placements for name, (_, placements) in PARAMETERS.items()}
    return {name: distribute_tensor(value, mesh, cut[name]) for name, value in values.items()}


def trained(name, mesh, world):
    """The parameters after a few steps, whole, with the norms on the way and the averages at the end."""
    model = Holder(laid_out(numbers(0), mesh))
    options = OPTIMIZERS.get(name).config(**OPTIONS[name])
    optimizer = OPTIMIZERS.get(name).target(options, parameter_groups(model, getattr(options, "weight_decay", 0.0)))
    gradients = GlobalGradients(model, list(model.parameters()), world)
    scaler = LossScaler(LossScaleConfig(fp16_init_scale=4.0), CPU)
    average = EMA(model, EMAConfig(ema_decay=0.5))
    norms = []
    for step in range(STEPS):
        given = laid_out(numbers(step + 1), mesh)
        for own, parameter in model.named_parameters():
            parameter.grad = given[own].clone()
        scaler.unscale(model.parameters())
        multiply_gradients([model.get_parameter("both.weight"), model.get_parameter("norm.bias")], 0.5)
        norm, scale = gradients.norm(), None
        if step == STEPS - 1 and takes_scale(optimizer):  # as where the host must not wait
            scale = clip_factor(1.0, norm).reciprocal()
        else:
            gradients.clip(1.0, norm)
        norms += [norm.item(), gradients.norm().item()]
        step_unless(optimizer, torch.tensor(True), scale)
        step_unless(optimizer, torch.tensor(False), scale)
        average.update(step + 1, torch.tensor(False))
    with average.swapped_in():
        averaged = {own: plain(value) for own, value in model.named_parameters()}
    return {own: plain(value) for own, value in model.named_parameters()}, averaged, norms


def plain(value):
    return (value.detach().full_tensor() if hasattr(value, "full_tensor") else value.detach()).tolist()


def gone_on(folder, mesh, world):
    """Whether Adafactor has the same state, parts and all, after it was saved and loaded, and the same next step."""
    options = OPTIMIZERS.get("adafactor").config(**OPTIONS["adafactor"])
    models = [Holder(laid_out(numbers(0), mesh)) for _ in range(2)]
    optimizers = [OPTIMIZERS.get("adafactor").target(options, parameter_groups(model, 0.1)) for model in models]

    def step(place, seed):
        for own, value in laid_out(numbers(seed), mesh).items():
            models[place].get_parameter(own).grad = value.clone()
        optimizers[place].step()

    step(0, 1)
    snapshot = take_snapshot(model=models[0], optimizer=optimizers[0], trainer_state={}, config={}, world=world)
    saved = write_snapshot(Path(folder) / "saved", snapshot, world=world.with_own_host_group())
    load_model_state(saved, models[1], world=world)
    load_optimizer_state(saved, models[1], optimizers[1], world=world)
    same = []
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        before, after = optimizers[0].state[one], optimizers[1].state[other]
        same += [before.keys() == after.keys()]
        same += [torch.equal(local(before[entry]), local(after[entry])) for entry in before]
    for place in range(2):
        step(place, 2)
    pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
    return same + [torch.equal(local(one.detach()), local(other.detach())) for one, other in pairs]


def all_trained(folder):
    world = make_world(Sizes(shard=2, tensor=2), "cpu")
    mesh = world.mesh["shard", "tensor"]
    found = {name: trained(name, mesh, world) for name in OPTIONS}
    tensors = laid_out(numbers(0), mesh)
    parts = [torch.equal(whole(local_part(numbers(0)[name], t), t), numbers(0)[name]) for name, t in tensors.items()]
    same = gone_on(folder, mesh, world)
    refused = refusal("torch.optim.Adafactor", mesh)
    return {"found": found, "parts": parts, "same": same, "refused": refused, "rank": dist.get_rank()}


def refusal(name, mesh):
    entry = OPTIMIZERS.get(name)
    with pytest.raises(UserError) as caught:
        entry.target(entry.config(), parameter_groups(Holder(laid_out(numbers(0), mesh)), 0.0))
    return str(caught.value)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run_ranks(all_trained, 4, str(tmp_path_factory.mktemp("sharded")))


@pytest.mark.parametrize("name", OPTIONS)
def test_an_optimizer_does_what_it_does_on_one_process(results, name):
    expected = trained(name, None, World.single())
    moved = (torch.tensor(expected[0]["both.weight"]) - numbers(0)["both.weight"]).abs().max().item()
    assert moved > 3e-4  # the comparison is not of parameters that have not moved
    tolerance = 0.1 * moved if name == "muon" else 1e-5  # Newton-Schulz runs in bf16
    for result in results:
        for before, after in zip(expected[:2], result["found"][name][:2], strict=True):
            for own, value in before.items():
                torch.testing.assert_close(
                    torch.tensor(after[own]), torch.tensor(value), rtol=tolerance, atol=tolerance, msg=own
                )
        assert result["found"][name][2] == pytest.approx(expected[2], rel=1e-6)


def test_every_process_finds_the_same_norm(results):
    norms = [result["found"]["adamw"][2] for result in results]
    assert norms[0][1] == pytest.approx(1.0, rel=1e-5)
    assert all(other == norms[0] for other in norms)


def test_statistics_of_rows_and_columns_come_back_in_parts(results):
    for result in results:
        assert len(result["same"]) > 3 * len(PARAMETERS)
        assert all(result["same"])


def test_parts_put_together_are_the_whole(results):
    assert all(all(result["parts"]) for result in results)


def test_what_cannot_be_sharded_is_refused_in_one_line(results):
    for result in results:
        assert result["refused"] == "optimizer 'torch.optim.Adafactor' cannot shard parameters; use adafactor"
