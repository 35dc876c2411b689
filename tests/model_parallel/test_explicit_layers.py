"""Everyday use of the explicit layers and of the vocab-parallel loss, and calls that would be silently wrong."""

from __future__ import annotations

import copy
import functools
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from ftk.errors import UserError
from ftk.model_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    vocab_parallel_cross_entropy,
)
from ftk.model_parallel.gradients import add_finisher, finish_gradients
from ftk.model_parallel.tensor_parallel.apply import sum_sequence_gradients, whole_state_dict
from ftk.model_parallel.tensor_parallel.functions import gather_from_region, scatter_to_region
from ftk.model_parallel.tensor_parallel.layers import works_on_sequence
from ftk.model_parallel.tensor_parallel.sharding import own_chunk, whole_value
from tests.distributed import run_ranks

VOCAB, HIDDEN, INNER = 37, 12, 24  # of 37 rows the first of two processes has 19


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    return run_ranks(find_all, 2)


def find_all() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2,))
    return {
        "sequence": {str(length): on_parts_of_a_sequence(mesh, length) for length in (6, 7)},
        "finished": finished_gradients(mesh),
        "initial": initial_values(mesh),
        "frozen": frozen_weight(mesh),
        "loaded": loaded(mesh),
        "layers refused": refused_layers(mesh),
        "loss": losses(mesh),
        "loss refused": refused_losses(mesh),
        "marked": marked(mesh),
    }


class Block(nn.Module):
    """tokens [B, T] -> hidden [B, T, H]; with a mesh of parallel layers, on parts of the sequence: -> [B, n, H]"""

    def __init__(self, mesh: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        shared: Any = {"sequence_parallel": True}
        self.embedding = VocabParallelEmbedding(VOCAB, HIDDEN, mesh, **shared) if mesh else nn.Embedding(VOCAB, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN)
        self.inner = ColumnParallelLinear(HIDDEN, INNER, mesh, **shared) if mesh else nn.Linear(HIDDEN, INNER)
        self.output = RowParallelLinear(INNER, HIDDEN, mesh, **shared) if mesh else nn.Linear(INNER, HIDDEN)
        if mesh:
            works_on_sequence(self.norm, mesh)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        return hidden + self.output(torch.tanh(self.inner(self.norm(hidden))))


def largest(one: Tensor, other: Tensor) -> float:
    return (one - other).abs().max().item()


# -- sequence parallel ----------------------------------------------------------------------------------------


def on_parts_of_a_sequence(mesh: Any, length: int) -> list[float]:
    tokens = torch.randint(VOCAB, (2, length), generator=torch.Generator().manual_seed(1))
    plain, parallel = Block(), Block(mesh)
    with torch.no_grad():
        quiet = parallel(tokens)
    parts = parallel(tokens)
    assert parts.shape == quiet.shape == (2, -(-length // 2), HIDDEN)
    group = mesh.get_group()
    with torch.inference_mode():
        hidden = torch.randn(2, 8, HIDDEN, generator=torch.Generator().manual_seed(2))
        between = parallel.output(parallel.inner(scatter_to_region(hidden, group, 1)))
        expected = plain.output(plain.inner(hidden))
        assert between.shape == (2, 4, HIDDEN)
        apart = largest(gather_from_region(between, group, 1), expected)
    return [
        largest(gather_from_region(parts, group, 1, length), plain(tokens)),
        largest(gather_from_region(quiet, group, 1, length), plain(tokens)),
        apart,
    ]


def test_sequence_parallel_means_parts_with_and_without_gradients(two: list[dict[str, Any]]) -> None:
    """Also of a length that the processes do not divide."""
    for results in two:
        for differences in results["sequence"].values():
            assert max(differences) < 1e-6


def finished_gradients(mesh: Any) -> list[float]:
    tokens = torch.randint(VOCAB, (2, 7), generator=torch.Generator().manual_seed(1))
    plain, parallel = Block(), Block(mesh)
    add_finisher(parallel, functools.partial(sum_sequence_gradients, parallel))
    plain(tokens).square().sum().backward()
    gather_from_region(parallel(tokens), mesh.get_group(), 1, 7).square().sum().backward()
    before = whole_value(dict(parallel.named_parameters())["norm.weight"].grad).clone()
    finish_gradients(parallel)
    expected = dict(plain.named_parameters())
    assert largest(before, expected["norm.weight"].grad) > 1e-3
    return [
        largest(whole_value(parameter.grad), expected[name].grad) for name, parameter in parallel.named_parameters()
    ]


def test_finish_gradients_sums_those_of_modules_on_parts_where_it_was_told_to(two: list[dict[str, Any]]) -> None:
    for results in two:
        assert len(results["finished"]) == 7
        assert max(results["finished"]) < 1e-5


# -- values ---------------------------------------------------------------------------------------------------


def pairs(mesh: Any) -> list[tuple[nn.Module, Any]]:
    """Torch's layer and the parallel one, of different values."""
    torch.manual_seed(3)
    plain = [nn.Linear(HIDDEN, INNER), nn.Linear(INNER, HIDDEN), nn.Embedding(VOCAB, HIDDEN, padding_idx=2)]
    torch.manual_seed(4)
    parallel = [
        ColumnParallelLinear(HIDDEN, INNER, mesh),
        RowParallelLinear(INNER, HIDDEN, mesh),
        VocabParallelEmbedding(VOCAB, HIDDEN, mesh, padding_idx=2),
    ]
    return list(zip(plain, parallel, strict=True))


def equal(plain: nn.Module, parallel: nn.Module) -> bool:
    state = whole_state_dict(parallel)
    expected = plain.state_dict()
    assert list(state) == list(expected)
    return all(torch.equal(state[name], value) for name, value in expected.items())


def initial_values(mesh: Any) -> list[bool]:
    found = []
    for plain, parallel in pairs(mesh):
        assert not equal(plain, parallel)
        torch.manual_seed(5)
        plain.reset_parameters()
        torch.manual_seed(5)
        parallel.reset_parameters()
        found.append(equal(plain, parallel))
        torch.manual_seed(6)
        nn.init.normal_(plain.weight, std=0.02)
        torch.manual_seed(6)
        parallel.reset_parameters(weight=lambda whole: nn.init.normal_(whole, std=0.02))
        found.append(equal(plain, parallel))
        assert parallel.weight.requires_grad
    column = pairs(mesh)[0][1]
    before = whole_value(column.weight)
    column.reset_parameters(bias=nn.init.zeros_)
    found.append(not whole_value(column.bias).any() and torch.equal(whole_value(column.weight), before))
    return found


def test_initial_values_are_those_of_one_process(two: list[dict[str, Any]]) -> None:
    for results in two:
        assert results["initial"] == [True] * 7


def frozen_weight(mesh: Any) -> list[float]:
    """Weight and bias are the parameters themselves: frozen and looked at as on one process."""
    layers = (
        ColumnParallelLinear(HIDDEN, INNER, mesh, gather_output=True),
        RowParallelLinear(HIDDEN, INNER, mesh, input_is_parallel=False),
    )
    hidden, found = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(7)), []
    for layer in layers:
        plain = nn.Linear(HIDDEN, INNER)
        plain.load_state_dict(whole_state_dict(layer))
        plain(hidden).square().sum().backward()
        assert layer.weight is dict(layer.named_parameters())["weight"]
        layer.weight.requires_grad_(False)
        layer(hidden).square().sum().backward()
        assert layer.weight.grad is None
        found.append(largest(layer.bias.grad.full_tensor(), plain.bias.grad))
        layer.weight.requires_grad = True
        layer(hidden).square().sum().backward()
        found.append(largest(layer.weight.grad.full_tensor(), plain.weight.grad))
    return found


def test_a_weight_is_frozen_and_has_its_gradient_as_on_one_process(two: list[dict[str, Any]]) -> None:
    for results in two:
        assert max(results["frozen"]) < 1e-5


def loaded(mesh: Any) -> list[bool]:
    found = []
    for plain, parallel in pairs(mesh):
        other = copy.deepcopy(parallel)
        parallel.load_state_dict(plain.state_dict())
        found.append(equal(plain, parallel) and not equal(plain, other))
        other.load_state_dict(whole_state_dict(parallel), assign=True)
        found.append(equal(plain, other) and isinstance(other.weight, nn.Parameter))
        assert other.weight.to_local().untyped_storage().nbytes() < parallel.weight.numel() * 4
        parallel.load_state_dict(other.state_dict())  # of DTensors, as before
        found.append(equal(plain, parallel))
        with pytest.raises(RuntimeError, match="size mismatch for weight"):
            parallel.load_state_dict({**plain.state_dict(), "weight": torch.zeros(5, 5)})
    plain_block, block = Block(), Block(mesh)
    for parameter in plain_block.parameters():
        nn.init.normal_(parameter)
    block.load_state_dict(plain_block.state_dict())
    found.append(equal(plain_block, block))
    again = Block(mesh)
    again.load_state_dict(whole_state_dict(block))
    found.append(equal(plain_block, again))
    return found


def test_a_state_dict_of_one_process_is_loaded_and_given(two: list[dict[str, Any]]) -> None:
    for results in two:
        assert results["loaded"] == [True] * 11


def message(call: Callable[[], Any]) -> str:
    with pytest.raises(UserError) as raised:
        call()
    return str(raised.value)


def refused_layers(mesh: Any) -> list[str]:
    two_dimensions = init_device_mesh("cpu", (1, 2), mesh_dim_names=("shard", "tensor"))
    return [
        message(lambda: ColumnParallelLinear(HIDDEN, INNER, two_dimensions)),
        message(lambda: works_on_sequence(nn.LayerNorm(HIDDEN), two_dimensions)),
        message(lambda: RowParallelLinear(INNER, HIDDEN, mesh, bias=False).reset_parameters(bias=nn.init.zeros_)),
    ]


def test_layers_refuse_what_they_cannot_do(two: list[dict[str, Any]]) -> None:
    mesh = (
        "a mesh of (1, 2) with the names ('shard', 'tensor'); layers are shared over one dimension: give that alone, "
        'such as mesh["tensor"]'
    )
    assert two[0]["layers refused"] == [mesh, mesh, "RowParallelLinear has no bias to set"]


# -- the loss -------------------------------------------------------------------------------------------------


def example(mesh: Any, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """logits [2, 5, V], this process's part of them, targets [2, 5] of which one is -100."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 5, VOCAB, generator=generator, dtype=dtype)
    targets = torch.randint(VOCAB, (2, 5), generator=generator)
    targets[0, 2] = -100
    return logits.requires_grad_(), own_chunk(logits.detach(), mesh, 2).requires_grad_(), targets


def losses(mesh: Any) -> dict[str, list[float]]:
    """Loss and gradient against torch's, of calls that it takes too."""
    group, found = mesh.get_group(), {}

    def compare(name: str, dtype: torch.dtype = torch.float32, over: Any = group, **options: Any) -> None:
        logits, own, targets = example(mesh, dtype)
        smoothing = options.get("label_smoothing", 0.0)
        expected = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none", label_smoothing=smoothing)
        loss = vocab_parallel_cross_entropy(own, targets, over, **options)
        assert loss.dtype == dtype
        expected.sum().backward()
        loss.sum().backward()
        found[name] = [largest(loss, expected), largest(own.grad, own_chunk(logits.grad, mesh, 2))]

    compare("vocab_size left out")
    compare("smoothed, size left out", label_smoothing=0.1)
    compare("ignored by default", vocab_size=VOCAB)
    compare("float64", torch.float64, vocab_size=VOCAB, label_smoothing=0.1)
    compare("a mesh", over=mesh, vocab_size=VOCAB)
    logits, own, targets = example(mesh)
    row = int(targets[0, 0])
    expected = F.cross_entropy(logits[0], targets[0], reduction="none", ignore_index=-100)
    expected[0] = 0.0
    others = torch.where(targets[0] == -100, row, targets[0])
    loss = vocab_parallel_cross_entropy(own[0], others, group, ignore_index=row)
    found["another ignored"] = [largest(loss, expected), 0.0]
    one = vocab_parallel_cross_entropy(own[0, 1], targets[0, 1], group, vocab_size=VOCAB)
    assert one.shape == ()
    found["one row"] = [largest(one, expected[1]), 0.0]
    none = vocab_parallel_cross_entropy(own[:, :0], targets[:, :0], group)
    assert none.shape == (2, 0)
    return found


def test_the_loss_is_torchs(two: list[dict[str, Any]]) -> None:
    for results in two:
        assert len(results["loss"]) == 7
        for name, differences in results["loss"].items():
            assert max(differences) < (1e-14 if name == "float64" else 1e-6), name


def refused_losses(mesh: Any) -> list[str]:
    group = mesh.get_group()
    _, own, targets = example(mesh)

    def call(logits: Tensor = own, targets: Tensor = targets, over: Any = group, **options: Any) -> str:
        return message(lambda: vocab_parallel_cross_entropy(logits, targets, over, **{"vocab_size": VOCAB, **options}))

    return [
        call(targets=torch.full((2, 5), 40), mask=targets != -100),
        call(ignore_index=-1),
        call(vocab_size=100),
        call(vocab_size=1),
        call(label_smoothing=1.5),
        call(mask=torch.ones(2, 5)),
        call(mask=targets[0] > 0),
        call(targets=targets[0]),
        call(targets=targets.int()),
        call(logits=own.long()),
        call(over=init_device_mesh("cpu", (1, 2))),
    ]


def test_calls_that_would_be_silently_wrong_are_refused(two: list[dict[str, Any]]) -> None:
    wanted = [
        "the target 40 is no row of a vocabulary of 37; leave such places out with mask, or with ignore_index",
        "the target -100 is no row of a vocabulary of 37",
        "process 0 has logits of 19 rows; of a vocabulary of 100 over 2 processes its part is 50",
        "1 rows are too few for 2 processes",
        "label_smoothing is 1.5; it must be in [0, 1]",
        "the mask is torch.float32 [2, 5]; it must be torch.bool [2, 5], True where there is loss",
        "the mask is torch.bool [5]; it must be torch.bool [2, 5]",
        "logits [2, 5, 19] and targets [5] do not go together",
        "logits are torch.float32 and targets torch.int32",
        "logits are torch.int64 and targets torch.int64",
        "a mesh of (1, 2) with the names None; the vocabulary is shared over one dimension",
    ]
    for found, start in zip(two[0]["loss refused"], wanted, strict=True):
        assert found.startswith(f"vocab_parallel_cross_entropy: {start}")


def marked(mesh: Any) -> list[Any]:
    """Where nobody waits for the device, a target out of range makes its own loss and gradients NaN."""
    _, own, targets = example(mesh)
    targets[1, 3] = VOCAB
    compiled = torch.compile(vocab_parallel_cross_entropy, backend="eager")
    loss = compiled(own, targets, mesh.get_group(), vocab_size=VOCAB)
    loss.sum().backward()
    assert own.grad is not None
    return [loss.isnan().nonzero().tolist(), own.grad.isnan().all(-1).nonzero().tolist(), int(own.grad.isnan().sum())]


def test_a_target_out_of_range_is_nan_where_it_is_not_looked_at(two: list[dict[str, Any]]) -> None:
    for rank, results in enumerate(two):
        assert results["marked"] == [[[1, 3]], [[1, 3]], (19, 18)[rank]]


# -- names ----------------------------------------------------------------------------------------------------


def test_the_room_names_the_layers_and_imports_nothing_for_it() -> None:
    code = (
        "import sys, ftk.model_parallel as room; assert 'torch' not in sys.modules\n"
        "print([getattr(room, name).__name__ for name in room.__all__])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("'")[1::2] == [
        "ColumnParallelLinear",
        "RowParallelLinear",
        "VocabParallelEmbedding",
        "vocab_parallel_cross_entropy",
    ]
