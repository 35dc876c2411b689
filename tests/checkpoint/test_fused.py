"""Checkpoints of layers that lie fused in one weight: those of one process, however the layers are shared."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from ftk.checkpoint import load_extra_tensors, load_model_state, load_optimizer_state, save_checkpoint, transfer_weights
from ftk.checkpoint.export import stream_safetensors
from ftk.checkpoint.index import read_index
from ftk.checkpoint.reading import read_tensors
from ftk.checkpoint.save import write_snapshot
from ftk.checkpoint.snapshot import Buffers, take_snapshot
from ftk.model_parallel.materialize import materialize
from ftk.model_parallel.tensor_parallel.apply import apply_plan, whole_state_dict
from ftk.model_parallel.tensor_parallel.plan import Plan
from ftk.model_parallel.world import Sizes, World, make_world
from ftk.optim.config import EMAConfig
from ftk.optim.ema import EMA
from ftk.optim.foreach import Adafactor
from ftk.optim.muon import Muon
from ftk.optim.optimizers import AdafactorConfig, AdamWConfig, MuonConfig
from ftk.optim.parameter_groups import parameter_groups
from ftk.optim.torch_optim import adamw
from tests.distributed import run_ranks

PLAN: Plan = {
    "layers.*.inner": {"style": "column", "fused": 3},
    "layers.*.output": "row",
    "layers.*.flipped": {"style": "column", "fused": 2, "transposed": True},
    "layers.*.last": "row",
}
# With three layers in a weight, two shards of two processes' parts end inside of a layer.
ARRANGEMENTS = {
    "copies": Sizes(replicate=2, tensor=2),
    "shards": Sizes(shard=2, tensor=2),
    "stages": Sizes(pipeline=2, tensor=2),
    "four": Sizes(tensor=4),
}
OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda groups: adamw(AdamWConfig(lr=0.01), groups),
    "adafactor": lambda groups: Adafactor(AdafactorConfig(lr=0.01, beta1=0.9), groups),
    "muon": lambda groups: Muon(MuonConfig(lr=0.01), groups),
}


class Flipped(nn.Module):
    """As Hugging Face's Conv1D: the weight is [inputs, outputs]."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.empty(outputs))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden @ self.weight + self.bias


class Block(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.inner, self.output = nn.Linear(8, 3 * size), nn.Linear(size, 8)
        self.flipped, self.last = Flipped(8, 2 * size), nn.Linear(size, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        gate, up, shift = self.inner(hidden).chunk(3, -1)
        hidden = hidden + self.output(F.silu(gate) * up + shift)
        left, right = self.flipped(hidden).chunk(2, -1)
        return hidden + self.last(left.tanh() * right)


class Net(nn.Module):
    def __init__(self, size: int = 12) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(size) for _ in range(2))
        self.norm = nn.LayerNorm(8)

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return self.norm(hidden)


def value_of(name: str, shape: Sequence[int]) -> Tensor:
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(sum(map(ord, name)))) / 3


def arranged(world: World, *, meta: bool = False, size: int = 12) -> Net:
    """A model of nines, cut as its world wants."""
    with torch.device("meta" if meta else "cpu"):
        model = Net(size)
    if not meta:
        for parameter in model.parameters():
            nn.init.constant_(parameter, 9.0)
    if world.mesh is None:
        return model
    stages = world.sizes.pipeline
    if stages > 1:
        own = world.pipeline_rank
        model.layers = nn.ModuleDict({str(own): model.layers[own]})  # type: ignore[assignment]
        if not world.is_last_stage:
            del model.norm
    apply_plan(model, PLAN, world.mesh["tensor"], partial=stages > 1)
    if world.sizes.data > 1:
        fully_shard(model, mesh=world.mesh["replicate", "shard"])
    return model


def run_on(source: Path | None, target: Path, world: World, optimizer_name: str, updates: int) -> None:
    """Go on from a checkpoint, or begin anew, for so many updates, and save."""
    model = arranged(world, meta=source is None)
    if source is None:
        materialize(model, model, torch.device("cpu"), value_of)
    optimizer = OPTIMIZERS[optimizer_name](parameter_groups(model, 0.1))
    ema = EMA(model, EMAConfig(ema_decay=0.9, ema_warmup=False))
    if source is not None:
        load_model_state(source, model, world=world)
        load_optimizer_state(source, model, optimizer, world=world)
        load_extra_tensors(source, "ema", ema.state_dict(), world=world)
    inputs = value_of("inputs", (6, 8))
    for _ in range(updates):
        model(inputs).square().mul(value_of("weights", (6, 8))).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        ema.update(5)
    snapshot = take_snapshot(
        model=model,
        optimizer=optimizer,
        trainer_state={},
        config={"a": 1},
        extra_tensors={"ema": ema.state_dict()},
        buffers=Buffers(),
        world=world,
    )
    write_snapshot(target, snapshot, world=world.with_own_host_group() if world.size > 1 else world)


def contents(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint."""
    found = {}
    for part in ("model", "optimizer", "ema"):
        tensors = {name: torch.empty(t.shape, dtype=t.dtype) for name, t in read_index(folder / part).tensors.items()}
        read_tensors(folder / part, tensors)
        found |= {f"{part} {name}": tensor for name, tensor in tensors.items()}
    return found


def chain(folder: str, arrangements: dict[str, list[str]]) -> None:
    """For each optimizer, in each of its arrangements: begin, go on from one process's checkpoint, save that again."""
    worlds = {name: make_world(sizes, "cpu") for name, sizes in ARRANGEMENTS.items()}
    for optimizer, names in arrangements.items():
        path = Path(folder) / optimizer
        for name in names:
            run_on(path / "one", path / f"{name} at once", worlds[name], optimizer, 0)
            if worlds[name].sizes.pipeline == 1:
                run_on(None, path / f"{name} anew", worlds[name], optimizer, 0)
                run_on(path / "one", path / name, worlds[name], optimizer, 2)


def take_common_rows(folder: Path, world: World) -> Net:
    """Fill a model from one with fewer rows: those that both have, in the order in which one process has them."""
    model = arranged(world)
    patterns = ["*.output.weight", "*.last.weight", "*.flipped.weight"]  # which have fewer columns
    transfer_weights(folder, model, skip=patterns, common_rows=True, world=world)
    return model


def whole_after_taking_rows(folder: str) -> list[str]:
    """Names of what is not as on one process."""
    expected = take_common_rows(Path(folder), World.single()).state_dict()
    wrong = []
    for name in ("shards", "four"):
        world = make_world(ARRANGEMENTS[name], "cpu")
        loaded = arranged(world)
        loaded.load_state_dict(expected)  # whole tensors, of which each process takes its part
        for model in (take_common_rows(Path(folder), world), loaded):
            state = whole_state_dict(model)
            wrong += [f"{name} {key}" for key, value in expected.items() if not torch.equal(state[key], value)]
    return wrong


def assert_equal(one: Path, other: Path, tolerance: float = 0.0) -> None:
    expected, found = contents(one), contents(other)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.shape == expected[name].shape, name
        assert torch.allclose(tensor, expected[name], rtol=tolerance, atol=tolerance), name


@pytest.mark.slow
def test_checkpoints_of_fused_layers_are_those_of_one_process(tmp_path: Path) -> None:
    arrangements = {"adamw": list(ARRANGEMENTS), "adafactor": ["shards"], "muon": ["shards"]}
    alone = World.single()
    for optimizer in arrangements:
        path = tmp_path / optimizer
        run_on(None, path / "begin", alone, optimizer, 0)
        run_on(None, path / "one", alone, optimizer, 2)
        run_on(path / "one", path / "expected", alone, optimizer, 2)
        run_on(path / "expected", path / "expected further", alone, optimizer, 2)
    run_ranks(chain, 4, str(tmp_path), arrangements)
    for optimizer, names in arrangements.items():
        path, tolerance = tmp_path / optimizer, 2e-3 if optimizer == "muon" else 1e-5  # Muon computes in bf16
        for name in names:
            assert_equal(path / "one", path / f"{name} at once")
            run_on(path / f"{name} at once", path / f"{name} again", alone, optimizer, 0)
            assert_equal(path / "one", path / f"{name} again")
            if ARRANGEMENTS[name].pipeline == 1:
                assert_equal(path / "begin", path / f"{name} anew")
                assert_equal(path / "expected", path / name, tolerance)
                run_on(path / name, path / f"{name} further", alone, optimizer, 2)
                assert_equal(path / "expected further", path / f"{name} further", tolerance)
    for ema in (False, True):
        exported = load_file(stream_safetensors(tmp_path / "adamw/shards", tmp_path / f"{ema}.safetensors", ema=ema))
        assert {name: t.shape for name, t in exported.items()} == {n: p.shape for n, p in Net().named_parameters()}


def test_rows_that_a_fused_weight_has_in_common_with_a_checkpoint(tmp_path: Path) -> None:
    small = Net(8)
    for name, parameter in small.named_parameters():
        parameter.data = value_of(name, parameter.shape)
    folder = save_checkpoint(tmp_path / "small", model=small, trainer_state={}, config={"a": 1})
    weight = take_common_rows(folder, World.single()).layers[0].inner.weight
    assert torch.equal(weight[:24], small.layers[0].inner.weight)
    assert weight[24:].eq(9.0).all()
    assert run_ranks(whole_after_taking_rows, 4, str(folder)) == [[]] * 4
