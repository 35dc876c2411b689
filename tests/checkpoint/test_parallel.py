"""Checkpoints that several processes write together and read in another arrangement."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ftk.checkpoint import (
    load_extra_tensors,
    load_model_state,
    load_optimizer_state,
    read_trainer_state,
    save_checkpoint,
    transfer_weights,
    verify,
)
from ftk.checkpoint.export import stream_safetensors
from ftk.checkpoint.save import write_snapshot
from ftk.checkpoint.snapshot import Buffers, TensorPart, take_snapshot
from ftk.errors import UserError
from ftk.model_parallel.collective import RankFailure, collective, on_main
from ftk.model_parallel.world import Sizes, World, make_world
from tests.distributed import run_ranks

ARRANGEMENTS = {"tensor": Sizes(tensor=2), "shard": Sizes(shard=2), "pipeline": Sizes(pipeline=2)}
FOUR = {
    "2x2": Sizes(shard=2, tensor=2),
    "pipelines": Sizes(pipeline=2, tensor=2),
    "hybrid": Sizes(replicate=2, shard=2),
}


class Net(nn.Module):
    """Two blocks around 7 uneven rows; a tied output."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(7, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.norm = nn.LayerNorm(4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return self.norm(hidden) @ self.embedding.weight.T


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() != 2]
    return torch.optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], lr=0.1, foreach=False)


def trained() -> tuple[Net, torch.optim.Optimizer]:
    """A model and its optimizer after an update, the same bits in every process.

    The values are drawn, not computed: what a matrix product gives depends on the number of threads, and the ranks
    have one thread each.
    """
    model = Net()
    optimizer = make_optimizer(model)
    model(torch.tensor([[0, 1, 2, 3]])).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    generator = torch.Generator().manual_seed(4)
    for parameter in model.parameters():
        parameter.data = torch.rand(parameter.shape, generator=generator)
        state = optimizer.state[parameter]
        for entry in ("exp_avg", "exp_avg_sq"):
            state[entry] = torch.rand(parameter.shape, generator=generator)
    return model, optimizer


def arranged(model: Net, world: World) -> Net:
    """The same model cut and sharded; only the names and shapes of its parameters are right."""
    assert world.mesh is not None
    stages = world.sizes.pipeline
    if stages > 1:  # the last stage has the tied embedding too
        keep = range(4)[world.pipeline_rank * 4 // stages :][: 4 // stages]
        model.layers = nn.ModuleDict({str(i): model.layers[i] for i in keep})  # type: ignore[assignment]
        if not world.is_last_stage:
            del model.norm
    if world.sizes.tensor > 1:
        mesh = world.mesh["tensor"]
        for module in model.modules():
            for name, parameter in list(module._parameters.items()):
                assert parameter is not None
                cut = Shard(0) if parameter.dim() == 2 and parameter.size(0) % 2 == 0 else Replicate()
                module._parameters[name] = nn.Parameter(distribute_tensor(parameter.data, mesh, [cut]))
    if world.sizes.data > 1:
        fully_shard(model, mesh=world.mesh["replicate", "shard"])
    return model


def differences(model: nn.Module, optimizer: torch.optim.Optimizer, extra: dict[str, torch.Tensor]) -> list[str]:
    """Names of what is not exactly as one process has it after training."""
    right, right_optimizer = trained()
    found = []

    def compare(name: str, here: Any, wanted: Any) -> None:
        whole = here.full_tensor() if hasattr(here, "full_tensor") else here
        if not torch.equal(torch.as_tensor(whole), torch.as_tensor(wanted)):
            found.append(name)

    parameters = dict(right.named_parameters())
    for name, parameter in model.named_parameters():
        compare(name, parameter.detach(), parameters[name].detach())
        for entry, value in right_optimizer.state[parameters[name]].items():
            compare(f"{name}/{entry}", optimizer.state[parameter][entry], value)
        compare(f"ema {name}", extra[name], parameters[name].detach() + 1)
    decays = [g["weight_decay"] for g in optimizer.param_groups if g["params"]]
    if decays != [0.01, 0.0][: len(decays)] or any(g["lr"] != 0.1 for g in optimizer.param_groups):
        found.append(f"groups {decays}")
    return found


def extra_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: torch.empty_like(p.detach()) for name, p in model.named_parameters()}


def load_into(folder: Path, world: World) -> tuple[nn.Module, torch.optim.Optimizer, list[str]]:
    torch.manual_seed(0)
    model = Net()
    for parameter in model.parameters():
        nn.init.constant_(parameter, 9.0)
    model = arranged(model, world) if world.mesh is not None else model
    optimizer = make_optimizer(model)
    extra = extra_of(model)
    load_model_state(folder, model, world=world)
    load_optimizer_state(folder, model, optimizer, world=world)
    load_extra_tensors(folder, "ema", extra, world=world)
    return model, optimizer, differences(model, optimizer, extra)


def chain(folder: str, sizes: dict[str, list[int]]) -> dict[str, Any]:
    """Load one checkpoint in each arrangement, save it from there, and go on from that one."""
    path, results = Path(folder), {}
    last = path / "one"
    for name, numbers in sizes.items():
        world = make_world(Sizes(*numbers), "cpu")
        model, optimizer, wrong = load_into(last, world)
        writers = world.with_own_host_group()
        extra = {"ema": {n: p.detach() + 1 for n, p in model.named_parameters()}}
        snapshot = take_snapshot(
            model=model,
            optimizer=optimizer,
            trainer_state={"num_updates": 2, "written_by": name},
            config={"a": 1},
            extra_tensors=extra,
            buffers=Buffers(),
            world=world,
        )
        last = write_snapshot(path / name, snapshot, world=writers)
        results[name] = wrong + verify(last, world=world)
    return results


@pytest.fixture
def one(tmp_path: Path) -> Path:
    model, optimizer = trained()
    extra = {"ema": {name: p.detach() + 1 for name, p in model.named_parameters()}}
    state = {"num_updates": 2, "written_by": "one"}
    return save_checkpoint(
        tmp_path / "one", model=model, optimizer=optimizer, trainer_state=state, config={"a": 1}, extra_tensors=extra
    )


@pytest.mark.parametrize(("size", "arrangements"), [(2, ARRANGEMENTS), pytest.param(4, FOUR, marks=pytest.mark.slow)])
def test_every_arrangement_takes_the_checkpoints_of_the_others(one, tmp_path, size, arrangements):
    order = [*arrangements, *(f"{name}-again" for name in arrangements)]
    sizes = {name: list(arrangements[name.removesuffix("-again")]) for name in order}
    for of_rank in run_ranks(chain, size, str(tmp_path), sizes):
        assert of_rank == {name: [] for name in order}
    for name in order:  # and so does one process
        assert verify(tmp_path / name) == []
        assert load_into(tmp_path / name, World.single())[2] == []
        assert read_trainer_state(tmp_path / name)["written_by"] == name
        stored = json.loads((tmp_path / name / "optimizer" / "index.json").read_text())
        assert [len(group["params"]) for group in stored["extra"]["param_groups"]] == [5, 6]
    assert len(list((tmp_path / order[0] / "model").glob("*.safetensors"))) == size
    files = [stream_safetensors(tmp_path / name, tmp_path / f"{name}.safetensors") for name in ("one", order[0])]
    assert files[0].read_bytes() == files[1].read_bytes()


def bad_things(folder: str) -> dict[str, Any]:
    world = make_world(Sizes(pipeline=2), "cpu")
    found: dict[str, Any] = {}

    def attempt(name: str, work: Any) -> None:
        try:
            work()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"

    model = arranged(Net(), world)
    model.extra = nn.Linear(2, 2) if world.is_last_stage else nn.Identity()
    attempt("mismatch", lambda: load_model_state(Path(folder) / "one", model, world=world))
    attempt("not there", lambda: on_main(world, lambda: (Path(folder) / "none").read_bytes()))

    def fail() -> None:
        if world.rank == 1:
            raise ValueError("odd")

    attempt("elsewhere", lambda: collective(world, fail))
    snapshot = take_snapshot(model=model, trainer_state={}, config={}, world=world)
    attempt(
        "in the way", lambda: write_snapshot(Path(folder) / "file" / "c", snapshot, world=world.with_own_host_group())
    )

    shorter = Net()
    shorter.embedding = nn.Embedding(5, 4)
    tensors = make_world(Sizes(tensor=2), "cpu")
    with torch.no_grad():
        shorter.embedding.weight.fill_(7.0)
    arranged(shorter, tensors)
    rows = transfer_weights(Path(folder) / "one", shorter, common_rows=True, world=tensors).rows
    found["rows"] = [list(rows.items()), shorter.embedding.weight.full_tensor().tolist()]
    longer = Net()
    longer.embedding = nn.Embedding(10, 4)
    with torch.no_grad():
        longer.embedding.weight.fill_(7.0)
    arranged(longer, tensors)
    transfer_weights(Path(folder) / "one", longer, common_rows=True, world=tensors)
    found["more rows"] = longer.embedding.weight.full_tensor().tolist()
    return found


def test_what_fails_on_one_process_fails_on_all_with_the_same_words(one, tmp_path):
    (tmp_path / "file").write_text("in the way")
    results = run_ranks(bad_things, 2, str(tmp_path))
    model, _ = trained()
    weight = model.embedding.weight.tolist()
    for result in results:
        assert "missing in the checkpoint: extra.weight, extra.bias" in result["mismatch"]
        assert result["mismatch"].startswith("UserError")
        assert "No such file or directory" in result["not there"]
        assert "in the way" in result
        assert "Error: " in result["in the way"]
        assert result["rows"] == [[["embedding.weight", [5, 5]]], weight[:5]]
        assert result["more rows"] == weight + [[7.0] * 4] * 3
    assert results[0]["elsewhere"] == "RankFailure: process 1 failed: ValueError: odd"
    assert results[1]["elsewhere"] == "ValueError: odd"


def test_one_process_does_things_together_with_itself():
    world = World.single()
    assert collective(world, lambda: (1, 2)) == (1, 2)
    assert on_main(world, lambda: (1, 2)) == (1, 2)
    with pytest.raises(UserError, match="no"):
        collective(world, lambda: (_ for _ in ()).throw(UserError("no")))
    assert issubclass(RankFailure, Exception)


def test_copies_of_shards_stay_on_the_host_whatever_the_device_of_their_mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        values = torch.arange(4.0)
        spec = DTensor.from_local(values, DeviceMesh("cpu", [0]), [Shard(0)])._spec
        spec = dataclasses.replace(spec, mesh=DeviceMesh("cuda", [0]))  # shards of offloaded parameters are like this
        copies = Buffers().copy({"model": TensorPart({"w": DTensor(values, spec, requires_grad=False)}, {})})
        copy = copies["model"].tensors["w"].to_local()
        assert copy.device.type == "cpu"
        assert copy.data_ptr() != values.data_ptr()
        assert torch.equal(copy, values)
    finally:
        dist.destroy_process_group()
