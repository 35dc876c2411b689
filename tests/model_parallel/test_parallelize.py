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
from ftk.model_parallel.blocks import blocks_of
from ftk.model_parallel.config import EngineConfig, ParallelConfig
from ftk.model_parallel.gradients import gradient_sync
from ftk.model_parallel.parallelize import parallelize_training
from ftk.model_parallel.tensor_parallel.apply import sum_sequence_gradients
from ftk.model_parallel.world import World, make_world, resolve_sizes
from ftk.models import build_model
from tests.distributed import run_ranks
from tests.model_parallel.small_steps import small_gpt2

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


def gpt2_loss(model: nn.Module, rank: int, size: int, update: int) -> Tensor:
    tokens = torch.randint(131, (4, 16), generator=torch.Generator().manual_seed(update))
    own = tokens[rank::size]
    logits = model(own).logits[:, :-1]
    return nn.functional.cross_entropy(logits.flatten(0, 1), own[:, 1:].flatten(), reduction="sum") / (4 * 15)


def learn(model: nn.Module, loss_of: Any, rank: int = 0, size: int = 1, parts: int = 1) -> list[float]:
    """Losses of five updates over all processes of data parallel, each of one or more micro-batches."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6)
    losses = []
    for update in range(5):
        losses.append(0.0)
        for part in range(parts):
            with gradient_sync(model, enabled=part == parts - 1):
                loss = loss_of(model, rank * parts + part, size * parts, update)
                loss.backward()
            losses[-1] += loss.item()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def summed(losses: list[float], group: Any) -> list[float]:
    total = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(total, group=group)
    return total.tolist()


def refusal(*arguments: Any, **options: Any) -> str:
    try:
        ftk.parallelize(*arguments, **options)
    except UserError as error:
        return str(error)
    return ""


def unlike(rank: int, options: dict[str, int], change: str) -> str:
    """What is said to two processes of training that have built a model alike but for one thing."""
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
        ("network, bf16", Network(rank), network_loss, {"weights": "bf16"}),
        ("gpt2", small_gpt2(seed=rank) if HAS_TRANSFORMERS else None, gpt2_loss, {}),
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
        ("gpt2, plan", small_gpt2(seed=rank) if HAS_TRANSFORMERS else None, gpt2_loss, GPT2_PLAN),
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
        refusal(nn.Linear(2, 2), mesh, activation_checkpointing="full"),
        refusal(on_meta(), mesh),
        refusal(Network(), mesh, {"blocks.*.outher": "row"}),
        refusal(Network(), init_device_mesh("cpu", (1, 2), mesh_dim_names=("tensor", "shard"))),
        refusal(Network(), init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))),
        refusal(Network(), init_device_mesh("cpu", (2,), mesh_dim_names=("shard",)), BLOCK_PLAN),
        refusal(Network(), init_device_mesh("cpu", (1, 2), mesh_dim_names=("here", "there"))),
        refusal(model, mesh),
        refusal(nn.Sequential(ftk.parallelize(Network(), mesh)), mesh),
        refusal(Network(), mesh, sequence_parallel=True),
        refusal(Network(), mesh, BLOCK_PLAN, zero_stage=1),
        refusal(Scaled(), mesh),
        refusal(nn.Linear(2, 2), mesh, compile="block"),
    ]
    return results


class Scaled(Network):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(1.0))


class Around(nn.Module):
    """Blocks, however they are held, between an input and an output layer."""

    def __init__(self, blocks: nn.Module) -> None:
        super().__init__()
        self.input, self.blocks, self.output = nn.Linear(8, 8), blocks, nn.Linear(8, 8)

    def forward(self, values: Tensor) -> Tensor:
        return self.output(called(self.blocks, self.input(values)))


def called(blocks: nn.Module, values: Tensor) -> Tensor:
    for block in blocks.children():
        values = called(block, values) if isinstance(block, nn.ModuleList) else block(values)
    return values


def model_of(kind: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    if kind == "no blocks":
        return nn.Linear(8, 5)
    blocks = [Block(8) for _ in range(4)]
    if kind == "sequential":
        return nn.Sequential(*blocks)
    held: dict[str, Any] = {
        "in a sequential": lambda: nn.Sequential(*blocks),
        "in a dict": lambda: nn.ModuleDict({f"block{place}": block for place, block in enumerate(blocks)}),
        "in lists of lists": lambda: nn.ModuleList([nn.ModuleList(blocks[:2]), nn.ModuleList(blocks[2:])]),
    }
    model = Around(held.get(kind, lambda: nn.ModuleList(blocks))())
    if kind == "with one parameter":
        for block in blocks[1:]:
            block.inner.weight = blocks[0].inner.weight
    if kind == "with one part":
        for block in blocks[2:]:
            block.inner = blocks[1].inner
    if kind == "with a parameter from outside":
        model.output.weight = model.input.weight
        for block in blocks:
            block.tied = model.input
    if kind == "all alike":
        for block in blocks[1:]:
            block.inner, block.outer = blocks[0].inner, blocks[0].outer
    return model


APART = {
    "no blocks": 0,
    "sequential": 4,
    "in a sequential": 4,
    "in a dict": 4,
    "in lists of lists": 4,
    "with one parameter": 3,
    "with one part": 3,
    "with a parameter from outside": 4,
    "all alike": 0,
}
"""Kinds of models, and how many of their four blocks are gathered on their own."""


def run_kinds() -> dict[str, Any]:
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2,))
    results: dict[str, Any] = {}
    for kind in APART:
        model = ftk.parallelize(model_of(kind, rank), mesh)
        apart = sum(isinstance(part, FSDPModule) for part in model.modules()) - 1
        results[kind] = [apart, summed(learn(model, network_loss, rank, 2), None)]
    copies = ftk.parallelize(Network(rank), init_device_mesh("cpu", (2,), mesh_dim_names=("replicate",)))
    assert all(parameter.to_local().shape == parameter.shape for parameter in copies.parameters())
    results["network, copies"] = summed(learn(copies, network_loss, rank, 2), None)
    for zero_stage in (1, 3):
        model = ftk.parallelize(Network(rank), mesh, zero_stage=zero_stage)
        results[f"network, stage {zero_stage}"] = summed(learn(model, network_loss, rank, 2, parts=2), None)
    tensor = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
    results["lengths"] = [lengths_error(tensor, mode) for mode in ("none", "full", "selective")]
    return results


def lengths_error(mesh: Any, mode: str) -> float:
    """How far gradients are from those of one process, after forward passes of an odd and an even length."""
    off = {"dropout": 0.0, "attention_dropout": 0.0, "embedding_dropout": 0.0}
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(build_model("glm_tiny", num_layers=2, vocab_size=67, **off))
    plan = models[1].tensor_parallel_plan
    ftk.parallelize(models[1], mesh, plan, sequence_parallel=True, activation_checkpointing=mode)
    for model in models:
        losses = [model(torch.arange(2 * length).view(2, length)).square().sum() for length in (7, 8, 5)]
        sum(losses).backward(retain_graph=mode == "full")
        if mode == "full":
            sum(losses).backward()
    sum_sequence_gradients(models[1])
    expected, actual = ([parameter.grad for parameter in model.parameters()] for model in models)
    return max(
        float((whole.full_tensor() - one).abs().max() / one.abs().max())
        for one, whole in zip(expected, actual, strict=True)
    )


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
    copied = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "tensor"))
    model = ftk.parallelize(Network(rank), copied, BLOCK_PLAN)
    losses = learn(model, network_loss, copied.get_local_rank("replicate"), 2)
    results["network, plan and copies"] = summed(losses, copied.get_group("replicate"))
    results["refused"] = refusal(Network(), copied["replicate"])
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
    return learn(Network(0), network_loss) if kind == "network" else learn(small_gpt2(), gpt2_loss)


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


@pytest.fixture(scope="module")
def kinds():
    return run_ranks(run_kinds, 2)


@pytest.mark.parametrize("kind", APART)
def test_a_model_of_any_kind_learns_on_two_processes_as_on_one(kinds, kind):
    expected = learn(model_of(kind), network_loss)
    for result in kinds:
        apart, losses = result[kind]
        assert losses == pytest.approx(expected, rel=1e-5)
        assert apart == APART[kind]


@pytest.mark.parametrize("name", ["copies", "stage 1", "stage 3"])
def test_copies_and_micro_batches_change_nothing(kinds, name):
    for result in kinds:
        assert result[f"network, {name}"] == pytest.approx(alone("network"), rel=1e-5)


def test_sequences_of_several_lengths_before_one_backward_pass_are_computed_again_as_they_were(kinds):
    for result in kinds:
        assert max(result["lengths"]) < 1e-5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"activation_checkpointing": "ful"}, "activation_checkpointing is 'ful'; it must be 'auto', 'none', 'selec"),
        ({"activation_checkpointing": None}, "activation_checkpointing is None; it must be"),
        ({"activation_checkpointing": True}, "activation_checkpointing is True; it must be"),
        ({"compile": "blcok"}, "compile is 'blcok'; it must be 'auto', 'none', 'block' or 'model'"),
        ({"compile": True}, "compile is True; it must be"),
        ({"zero_stage": 5}, "zero_stage is 5; it must be 1, 2 or 3"),
        ({"zero_stage": 0}, "zero_stage is 0; it must be"),
        ({"zero_stage": True}, "zero_stage is True; it must be"),
        ({"weights": "fp16"}, "weights is 'fp16'; it must be 'auto', 'fp32' or 'bf16'"),
        ({"weights": torch.bfloat16}, "weights is torch.bfloat16; it must be"),
        ({"cpu_offload": "no"}, "cpu_offload is 'no'; it must be False or True"),
        ({"zero_stage": 5, "compile": 1}, "compile is 1; it must be 'auto', 'none', 'block' or 'model'; zero_stage"),
        ({}, "mesh is None; it must be a DeviceMesh"),
    ],
)
def test_options_that_cannot_be_are_refused_by_their_names(options, message):
    assert message in refusal(Network(), None, **options)


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (nn.Linear(2, 2), []),
        (nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)), ["0", "2"]),
        (nn.Sequential(nn.Embedding(9, 2), nn.Sequential(Block(2), Block(2)), nn.Linear(2, 2)), ["1.0", "1.1"]),
        (nn.Sequential(nn.Embedding(9, 2), Block(2), Block(2)), ["0", "1", "2"]),
        (nn.ModuleDict({"embed": nn.Embedding(99, 2), "layers": nn.ModuleList([Block(2)])}), ["layers.0"]),
        (nn.ModuleDict({"few": nn.ModuleList([Block(2)]), "many": nn.ModuleList([Block(4)])}), ["many.0"]),
        (nn.Sequential(Network(), Network()), ["0", "1"]),
        (
            nn.ModuleDict({"image": Network(), "text": Network()}),
            [f"{tower}.{name}" for tower in ("image", "text") for name, _ in blocks_of(Network())],
        ),
        (nn.ModuleList([nn.Sequential(Block(2), Block(2)), nn.ModuleList([Block(2)])]), ["0", "1.0"]),
        (nn.ModuleList([block := Block(2), nn.ModuleDict({"again": block})]), ["0"]),
    ],
)
def test_blocks_are_found_in_lists_rows_and_dicts(model, names):
    assert [name for name, _ in blocks_of(model)] == names


@pytest.mark.slow
def test_copies_on_some_of_the_processes_are_refused(four):
    message = 'give it a dimension "shard" after "replicate", of size 1 for plain copies'
    assert all(message in result["refused"] for result in four)


@pytest.mark.parametrize("name", ["network, copies of shares", "network, plan and shares", "network, plan and copies"])
@pytest.mark.slow
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
        (3, '"replicate", "shard" and "tensor" that are wanted, in this order'),
        (4, "a plan is for a dimension"),
        (5, "a plan is for a dimension"),
        (6, "give one of one dimension, or with those of the names"),
        (7, "is parallelized already; give ftk.parallelize the whole model, once"),
        (8, "0 is parallelized already; give ftk.parallelize the whole model, once"),
        (9, "sequence_parallel=True is for layers that a plan cuts"),
        (10, "zero_stage=1 is for parameters that are sharded, and this mesh is all for tensor parallel"),
        (11, "factor is a parameter without dimensions, of shape []"),
        (12, 'compile works block by block; put its layers into one, or give compile="none"'),
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
            assert message.startswith(f"{name} differs between processes; build the same model on all")
        assert names.startswith("more.bias differs")


def test_what_a_checkpoint_will_fill_is_not_drawn_and_what_it_will_not_is(two):
    for result in two:
        everything, unsaved = result["filled"]
        assert everything == [*(name for name, _ in Network().named_parameters()), "scale", "scratch"]
        assert unsaved == ["scratch"]


def test_offloading_without_a_process_group_is_refused():
    with pytest.raises(UserError, match="use the world of 'open_world'"):
        parallelize_training(Network(), World.single(), ParallelConfig(cpu_offload=True), EngineConfig())
