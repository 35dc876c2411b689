"""`ftk.parallelize`: any model, with and without a plan, learns as on one process."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import ftk
from ftk.errors import UserError
from tests.distributed import run_ranks

HAS_TRANSFORMERS = importlib.util.find_spec("transformers") is not None
NEEDS_TRANSFORMERS = pytest.mark.skipif(not HAS_TRANSFORMERS, reason="needs transformers")
GPT2_PLAN = {
    "transformer.wte": "vocab_embedding",
    "transformer.h.*.attn": {"style": "sharded", "divide": ["split_size"]},
    "transformer.h.*.attn.c_attn": {"style": "column", "fused": 3, "units": 4, "transposed": True, "divide": ["nf"]},
    "transformer.h.*.attn.c_proj": {"style": "row", "transposed": True},
    "transformer.h.*.mlp.c_fc": {"style": "column", "transposed": True, "divide": ["nf"]},
    "transformer.h.*.mlp.c_proj": {"style": "row", "transposed": True},
    "lm_head": "vocab_output",
}
BLOCK_PLAN = {"blocks.*.inner": "column", "blocks.*.outer": "row"}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, values: Tensor) -> Tensor:
        return values + self.outer(torch.tanh(self.inner(values)))


class Network(nn.Module):
    """A model of nobody's room: blocks, a buffer, an output that is no multiple of anything."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList(Block(8) for _ in range(3))
        self.output = nn.Linear(8, 5)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, values: Tensor) -> Tensor:
        for block in self.blocks:
            values = block(values)
        return self.output(values) * self.scale


def network_loss(model: nn.Module, rank: int, size: int, update: int) -> Tensor:
    """Of this process's part of an update's 8 samples, divided by all 8."""
    inputs = torch.randn(8, 8, generator=torch.Generator().manual_seed(update))
    return model(inputs[rank::size]).square().sum() / 8


def gpt2(seed: int = 0) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=131, n_embd=32, n_layer=2, n_head=4, n_positions=32,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def gpt2_loss(model: nn.Module, rank: int, size: int, update: int) -> Tensor:
    tokens = torch.randint(131, (4, 16), generator=torch.Generator().manual_seed(update))
    own = tokens[rank::size]
    logits = model(own).logits[:, :-1]
    return nn.functional.cross_entropy(logits.flatten(0, 1), own[:, 1:].flatten(), reduction="sum") / (4 * 15)


def learn(model: nn.Module, loss_of: Any, rank: int = 0, size: int = 1) -> list[float]:
    """Losses of ten updates over all processes of data parallel."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6)
    losses = []
    for update in range(10):
        loss = loss_of(model, rank, size, update)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def summed(losses: list[float], group: Any) -> list[float]:
    total = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(total, group=group)
    return total.tolist()


def refusal(*arguments: Any) -> str:
    try:
        ftk.parallelize(*arguments)
    except UserError as error:
        return str(error)
    return ""


def unlike(rank: int, options: dict[str, int], change: str) -> str:
    """What is said to two processes of training that have built a model alike but for one thing."""
    from ftk.model_parallel.engine_config import EngineConfig
    from ftk.model_parallel.parallel_config import ParallelConfig
    from ftk.model_parallel.parallelize import parallelize_training
    from ftk.model_parallel.world import make_world, resolve_sizes

    config = ParallelConfig(**options)
    model = Network(rank if change == "values" else 0)
    model.register_buffer("scratch", torch.full((3,), float(rank if change == "scratch" else 0)), persistent=False)
    if change == "buffer":
        model.scale += rank
    if change == "names" and rank:
        model.more = nn.Linear(1, 1)
    if change == "shape" and rank:
        model.output.weight = nn.Parameter(model.output.weight.detach().T.contiguous())
    try:
        parallelize_training(model, make_world(resolve_sizes(config, 2), "cpu"), config, EngineConfig())
    except UserError as error:
        return str(error)
    return ""


def names_filled(fill: bool) -> list[str]:
    """Names that a model on the meta device is asked the values of."""
    from ftk.model_parallel.engine_config import EngineConfig
    from ftk.model_parallel.parallel_config import ParallelConfig
    from ftk.model_parallel.parallelize import parallelize_training
    from ftk.model_parallel.world import make_world, resolve_sizes

    asked: list[str] = []

    def value_of(name: str, shape: Any, seed: int) -> Tensor:
        asked.append(name)
        return torch.full(tuple(shape), 3.0)

    config = ParallelConfig(data_parallel_shard_size=2)
    with torch.device("meta"):
        model = Network()
        model.register_buffer("scratch", torch.zeros(3), persistent=False)
    model.initial_value = value_of
    parallelize_training(model, make_world(resolve_sizes(config, 2), "cpu"), config, EngineConfig(), fill=fill)
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert model.scratch.tolist() == [3.0] * 3
    return asked


def run_two() -> dict[str, Any]:
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2,))
    named = init_device_mesh("cpu", (1, 1, 2, 1), mesh_dim_names=("pipeline", "replicate", "shard", "tensor"))
    results: dict[str, Any] = {}
    # Every process starts from values of its own: those of the first one count.
    for name, model, loss_of, options in (
        ("network", Network(rank), network_loss, {}),
        ("network, stage 1", Network(rank), network_loss, {"zero_stage": 1, "activation_checkpointing": "none"}),
        ("network, offload", Network(rank), network_loss, {"cpu_offload": True}),
        ("network, meta", on_meta(), network_loss, {"initial_value": initial_value}),
        ("network, meta, offload", on_meta(), network_loss, {"initial_value": initial_value, "cpu_offload": True}),
        ("network, bf16", Network(rank), network_loss, {"gather_dtype": "bf16"}),
        ("gpt2", gpt2(rank) if HAS_TRANSFORMERS else None, gpt2_loss, {}),
    ):
        if model is None:
            continue
        names = [name for name, _ in model.named_parameters()]
        parallel = ftk.parallelize(model, named if name == "network" else mesh, **options)
        assert parallel is model
        assert [name for name, _ in model.named_parameters()] == names
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        blocks = model.blocks if isinstance(model, Network) else model.transformer.h
        assert all(isinstance(block, FSDPModule) for block in blocks)
        results[name] = summed(learn(model, loss_of, rank, 2), mesh.get_group())
    for name, model, loss_of, plan in (
        ("network, plan", Network(rank), network_loss, BLOCK_PLAN),
        ("gpt2, plan", gpt2(rank) if HAS_TRANSFORMERS else None, gpt2_loss, GPT2_PLAN),
    ):
        if model is None:
            continue
        ftk.parallelize(model, mesh, plan)
        parts = [parameter.to_local().numel() for parameter in model.parameters()]
        results[name] = learn(model, loss_of)
        results[f"{name}, share"] = sum(parts) / sum(parameter.numel() for parameter in model.parameters())
    results["filled"] = [names_filled(fill) for fill in (True, False)]
    results["unlike"] = {
        " x ".join(options): [
            unlike(rank, options, change) for change in ("", "values", "buffer", "scratch", "names", "shape")
        ]
        for options in ({"data_parallel_replicate_size": 2}, {"data_parallel_shard_size": 2})
    }
    results["refused"] = [
        refusal(nn.Linear(2, 2), mesh),
        refusal(on_meta(), mesh),
        refusal(Network(), mesh, {"blocks.*.outher": "row"}),
        refusal(Network(), init_device_mesh("cpu", (2,), mesh_dim_names=("replicate",))),
        refusal(Network(), init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))),
        refusal(Network(), init_device_mesh("cpu", (2,), mesh_dim_names=("shard",)), BLOCK_PLAN),
        refusal(Network(), init_device_mesh("cpu", (1, 2), mesh_dim_names=("here", "there"))),
    ]
    return results


def run_four() -> dict[str, Any]:
    rank = dist.get_rank()
    results: dict[str, Any] = {}
    copies = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = ftk.parallelize(Network(rank), copies)
    results["network, copies of shares"] = summed(learn(model, network_loss, rank, 4), None)
    cut = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    model = ftk.parallelize(Network(rank), cut, BLOCK_PLAN)
    losses = learn(model, network_loss, cut.get_local_rank("shard"), 2)
    results["network, plan and shares"] = summed(losses, cut.get_group("shard"))
    return results


def on_meta() -> Network:
    with torch.device("meta"):
        return Network()


@functools.cache
def first_values() -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in Network(0).state_dict().items()}


def initial_value(name: str, shape: Any) -> Tensor:
    assert tuple(first_values()[name].shape) == tuple(shape)
    return first_values()[name]


@pytest.fixture(scope="module")
def two():
    return run_ranks(run_two, 2)


@pytest.fixture(scope="module")
def four():
    return run_ranks(run_four, 4)


@functools.cache
def alone(kind: str) -> list[float]:
    return learn(Network(0), network_loss) if kind == "network" else learn(gpt2(0), gpt2_loss)


@pytest.mark.parametrize(
    "name",
    [
        "network",
        "network, stage 1",
        "network, offload",
        "network, meta",
        "network, meta, offload",
        "network, plan",
        pytest.param("gpt2", marks=NEEDS_TRANSFORMERS),
        pytest.param("gpt2, plan", marks=NEEDS_TRANSFORMERS),
    ],
)
def test_two_processes_learn_as_one(two, name):
    for result in two:
        assert result[name] == pytest.approx(alone(name.partition(",")[0]), rel=1e-5)


def test_parameters_may_be_gathered_in_bf16(two):
    assert two[0]["network, bf16"] == pytest.approx(alone("network"), rel=0.1)
    assert two[0]["network, bf16"] != pytest.approx(alone("network"), rel=1e-4)


@pytest.mark.parametrize("name", ["network, copies of shares", "network, plan and shares"])
def test_four_processes_learn_as_one(four, name):
    for result in four:
        assert result[name] == pytest.approx(alone(name.partition(",")[0]), rel=1e-5)


@pytest.mark.parametrize("name", ["network, plan", pytest.param("gpt2, plan", marks=NEEDS_TRANSFORMERS)])
def test_a_plan_halves_what_it_names(two, name):
    assert 0.5 < two[0][f"{name}, share"] < 0.6


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (0, "Linear has no nn.ModuleList of blocks"),
        (1, "Network is on the meta device, and has no initial_value"),
        (2, "blocks.*.outher"),
        (3, "give one of one dimension, or with the names"),
        (4, "a plan is for a dimension"),
        (5, "a plan is for a dimension"),
        (6, "give one of one dimension, or with the names"),
    ],
)
def test_what_does_not_go_together_is_refused(two, place, message):
    assert message in two[0]["refused"][place]


@pytest.mark.parametrize("kind", ["data_parallel_replicate_size", "data_parallel_shard_size"])
def test_processes_that_built_different_models_are_refused_on_all_of_them(two, kind):
    for result in two:
        alike, values, buffer, scratch, names, shape = result["unlike"][kind]
        assert alike == scratch == ""
        for message, name in ((values, "blocks.0.inner.weight"), (buffer, "scale"), (shape, "output.weight")):
            assert message.startswith(f"{name} differs from process to process; build the model alike on all")
        assert names.startswith("more.bias differs")


def test_what_a_checkpoint_will_fill_is_not_drawn_and_what_it_will_not_is(two):
    for result in two:
        everything, unsaved = result["filled"]
        assert everything == [*(name for name, _ in Network().named_parameters()), "scale", "scratch"]
        assert unsaved == ["scratch"]


def test_offloading_on_one_process_is_said_to_be_left_out(caplog):
    from ftk.model_parallel.engine_config import EngineConfig
    from ftk.model_parallel.parallel_config import ParallelConfig
    from ftk.model_parallel.parallelize import parallelize_training
    from ftk.model_parallel.world import World

    model = Network()
    assert parallelize_training(model, World.single(), ParallelConfig(cpu_offload=True), EngineConfig()) is model
    assert "--cpu-offload is for several processes" in caplog.text
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())


def test_it_is_there_without_importing_torch():
    import subprocess
    import sys

    code = "import ftk, sys; print('parallelize' in ftk.__all__, 'torch' in sys.modules); ftk.parallelize"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True False\n"
