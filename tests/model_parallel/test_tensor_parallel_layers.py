"""Megatron's layers for models of one's own, and the vocab-parallel cross entropy, against torch's on one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from ftk.criterions.chunked_loss import chunked_loss
from ftk.errors import UserError
from ftk.model_parallel.tensor_parallel import functions
from ftk.model_parallel.tensor_parallel.apply import apply_plan, sum_sequence_gradients
from ftk.model_parallel.tensor_parallel.cross_entropy import VocabShard, sharded_output, vocab_parallel_cross_entropy
from ftk.model_parallel.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    works_on_sequence,
)
from ftk.model_parallel.tensor_parallel.random import RandomStreams
from ftk.model_parallel.tensor_parallel.sharding import own_chunk
from ftk.model_parallel.world import Sizes, make_world
from tests.distributed import run_ranks

VOCAB, HIDDEN, INNER = 131, 16, 24


@pytest.fixture(scope="module")
def four() -> list[dict[str, Any]]:
    return run_ranks(find_all, 4)


def find_all() -> dict[str, Any]:
    mesh = make_world(Sizes(tensor=4), "cpu").mesh
    assert mesh is not None
    mesh = mesh["tensor"]
    return {
        "operators": operators(mesh),
        "loss": losses(mesh),
        "model": {str(sequence): own_model(mesh, sequence) for sequence in (False, True)},
        "outputs": whole_inputs_and_outputs(mesh),
        "refused": refusals(mesh),
    }


# -- f and g --------------------------------------------------------------------------------------------------


def operators(mesh: Any) -> dict[str, bool]:
    """Forward and backward against the definition, for a length that 4 does not divide."""
    group, rank, size, length = mesh.get_group(), mesh.get_local_rank(), 4, 10
    part = functions.part_size(length, size)
    everyone = [torch.randn(2, length, 3, generator=torch.Generator().manual_seed(r)) for r in range(size)]
    own, total = everyone[rank], sum(everyone)

    def cut(values: Tensor, r: int) -> Tensor:
        filled = F.pad(values, (0, 0, 0, size * part - length))
        return filled[:, r * part : (r + 1) * part]

    shares = [cut(values, r) for r, values in enumerate(everyone)]  # what each process would hold as its part
    joined = torch.cat(shares, 1)[:, :length]

    def check(function: Callable[[Tensor], Tensor], given: Tensor, output: Tensor, grad: Tensor, back: Tensor) -> bool:
        given = given.clone().requires_grad_()
        found = function(given)
        (gradient,) = torch.autograd.grad(found, given, grad)
        torch.testing.assert_close(found, output)
        torch.testing.assert_close(gradient, back)
        return True

    length_of = {"dim": 1, "length": length}
    return {
        "copy": check(lambda x: functions.copy_to_region(x, group), own, own, own, total),
        "reduce": check(lambda x: functions.reduce_from_region(x, group), own, total, own, own),
        "scatter": check(lambda x: functions.scatter_to_region(x, group, 1), own, cut(own, rank), shares[rank], joined),
        "gather": check(
            lambda x: functions.gather_from_region(x, group, **length_of), shares[rank], joined, own, cut(own, rank)
        ),
        "gather sequence": check(
            lambda x: functions.gather_from_sequence_region(x, group, **length_of),
            shares[rank],
            joined,
            own,
            cut(total, rank),
        ),
        "reduce scatter": check(
            lambda x: functions.reduce_scatter_to_sequence_region(x, group, 1),
            own,
            cut(total, rank),
            shares[rank],
            joined,
        ),
    }


def test_operators_and_their_mirror_images(four: list[dict[str, Any]]) -> None:
    for results in four:
        assert len(results["operators"]) == 6
        assert all(results["operators"].values())


# -- cross entropy --------------------------------------------------------------------------------------------


def losses(mesh: Any) -> dict[str, list[float]]:
    group, results = mesh.get_group(), {}
    for vocab_size in (VOCAB, 128):
        for smoothing in (0.0, 0.1):
            for dtype in (torch.float32, torch.bfloat16):
                generator = torch.Generator().manual_seed(vocab_size)
                logits = (torch.randn(3, 5, vocab_size, generator=generator) * 4).to(dtype).requires_grad_()
                targets = torch.randint(vocab_size, (3, 5), generator=generator)
                weights = torch.rand(3, 5, generator=generator)
                targets[0, 1] = targets[2, 3] = -100
                expected = F.cross_entropy(
                    logits.float().flatten(0, 1), targets.flatten(), reduction="none", label_smoothing=smoothing
                ).view(3, 5)
                (wanted,) = torch.autograd.grad((expected * weights).sum(), logits)
                own = own_chunk(logits.detach(), mesh, 2).requires_grad_()
                size = {} if vocab_size % 4 == 0 else {"vocab_size": vocab_size}
                found = vocab_parallel_cross_entropy(
                    own, targets, group, label_smoothing=smoothing, mask=targets != -100, **size
                )
                assert found.dtype == torch.float32
                (found * weights).sum().backward(retain_graph=True)
                assert own.grad is not None
                assert own.grad.dtype == dtype
                assert not own.grad[0, 1].any()
                first = own.grad.clone()
                (found * weights).sum().backward()  # what is kept is not written over
                assert torch.equal(own.grad, 2 * first)
                wanted_part = own_chunk(wanted, mesh, 2)
                results[f"{vocab_size} {smoothing} {dtype}"] = [
                    (found - expected).abs().max().item(),
                    (first - wanted_part).abs().max().item(),
                ]
    results["huge logits"] = [huge(group), 0.0]
    results |= chunked(mesh)
    return results


def huge(group: Any) -> float:
    """Softmax by its largest logit, which another process may have: nothing overflows."""
    logits = torch.full((1, 3), 1e4 if dist.get_rank() == 2 else -1e4)
    return abs(vocab_parallel_cross_entropy(logits, torch.tensor([7]), group).item() - torch.tensor(3.0).log().item())


def chunked(mesh: Any) -> dict[str, list[float]]:
    """Output layer and loss in one, a few rows of logits at a time."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(21, HIDDEN, generator=generator).requires_grad_()
    weight = torch.randn(VOCAB, HIDDEN, generator=generator).requires_grad_()
    targets = torch.randint(VOCAB, (21,), generator=generator)
    shard, results = VocabShard.of(mesh.get_group(), VOCAB), {}
    for smoothing in (0.0, 0.1):
        expected = chunked_loss(hidden, weight, targets, smoothing, 8)
        wanted = torch.autograd.grad(expected.total, (hidden, weight))
        own = own_chunk(weight.detach(), mesh, 0).requires_grad_()
        computed = chunked_loss(hidden, own, targets, smoothing, 8, shard)
        found = torch.autograd.grad(computed.total, (hidden, own))
        torch.testing.assert_close(computed.losses, expected.losses)
        torch.testing.assert_close(computed.nll, expected.nll)
        results[f"chunked {smoothing}"] = [
            abs(computed.total.item() - expected.total.item()) / expected.total.item(),
            max(
                (found[0] - wanted[0]).abs().max().item(), (found[1] - own_chunk(wanted[1], mesh, 0)).abs().max().item()
            ),
        ]
    return results


def test_vocab_parallel_cross_entropy_is_cross_entropy(four: list[dict[str, Any]]) -> None:
    """Uneven vocabulary, smoothing, masked targets, weights of tokens, bf16 logits, in chunks."""
    for results in four:
        assert len(results["loss"]) == 11
        for case, (loss, gradient) in results["loss"].items():
            assert loss < 1e-5, (case, loss)
            assert gradient < (5e-3 if "bfloat16" in case else 2e-5 if "chunked" in case else 1e-6), (case, gradient)


# -- a model of one's own -------------------------------------------------------------------------------------


class Plain(nn.Module):
    """tokens [B, T] -> the mean loss of the next tokens, with a tied output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN, padding_idx=3)
        self.norm = nn.LayerNorm(HIDDEN)
        self.inner = nn.Linear(HIDDEN, INNER)
        self.output = nn.Linear(INNER, HIDDEN)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        hidden = hidden + self.output(F.gelu(self.inner(self.norm(hidden))))
        logits = hidden[:, :-1] @ self.embedding.weight.T
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), label_smoothing=0.1)


class Parallel(nn.Module):
    """The same, written with parallel layers."""

    def __init__(self, mesh: Any, sequence: bool) -> None:
        super().__init__()
        self.group, self.sequence = mesh.get_group(), sequence
        shared = {"sequence_parallel": sequence}
        self.embedding = VocabParallelEmbedding(VOCAB, HIDDEN, mesh, padding_idx=3, **shared)
        self.norm = nn.LayerNorm(HIDDEN)
        if sequence:
            works_on_sequence(self.norm, mesh)
        self.inner = ColumnParallelLinear(HIDDEN, INNER, mesh, **shared)
        self.output = RowParallelLinear(INNER, HIDDEN, mesh, **shared)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        hidden = hidden + self.output(F.gelu(self.inner(self.norm(hidden))))
        if self.sequence:
            hidden = functions.gather_from_region(hidden, self.group, 1, tokens.size(1))
        weight, shard = sharded_output(self.embedding.weight)
        logits = shard.enter(hidden[:, :-1]) @ weight.T
        return vocab_parallel_cross_entropy(
            logits, tokens[:, 1:], self.group, vocab_size=VOCAB, label_smoothing=0.1
        ).mean()


def own_model(mesh: Any, sequence: bool) -> list[float]:
    torch.manual_seed(0)
    plain = Plain()
    torch.manual_seed(0)
    parallel = Parallel(mesh, sequence)
    apply_plan(parallel, {}, mesh)  # what is beside the layers
    assert all(isinstance(parameter, DTensor) for parameter in parallel.parameters())
    tokens = torch.randint(VOCAB, (2, 12), generator=torch.Generator().manual_seed(1))
    tokens[0, 3] = 3
    expected, found = plain(tokens), parallel(tokens)
    expected.backward()
    found.backward()
    sum_sequence_gradients(parallel)
    differences = [abs(expected.item() - found.item())]
    own = dict(parallel.named_parameters())
    for name, parameter in plain.named_parameters():
        assert torch.equal(own[name].full_tensor(), parameter), name  # one seed, one model
        grad = own[name].grad
        assert isinstance(grad, DTensor)
        differences.append((grad.full_tensor() - parameter.grad).abs().max().item())
    return differences


def test_a_model_of_ones_own_equals_that_of_one_process(four: list[dict[str, Any]]) -> None:
    for results in four:
        for differences in results["model"].values():
            assert len(differences) == 8
            assert max(differences) < 1e-6


def whole_inputs_and_outputs(mesh: Any) -> list[float]:
    """Column layers that gather, row layers that cut: nn.Linear to the outside, in training and without gradients."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 5, bias=False))
    torch.manual_seed(0)
    parallel = nn.Sequential(
        ColumnParallelLinear(8, 12, mesh, gather_output=True),
        RowParallelLinear(12, 5, mesh, bias=False, input_is_parallel=False),
    )
    hidden = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    one, other = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    plain(one).square().sum().backward()
    parallel(other).square().sum().backward()
    assert one.grad is not None
    assert other.grad is not None
    with torch.no_grad():
        difference = (plain(hidden) - parallel(hidden)).abs().max().item()
    return [difference, (one.grad - other.grad).abs().max().item()]


def test_whole_inputs_and_outputs(four: list[dict[str, Any]]) -> None:
    for results in four:
        assert max(results["outputs"]) < 1e-6


def refusals(mesh: Any) -> list[str]:
    messages = []
    for build in (
        lambda: ColumnParallelLinear(8, 6, mesh),
        lambda: RowParallelLinear(10, 8, mesh),
        lambda: VocabParallelEmbedding(9, 8, mesh),
    ):
        with pytest.raises(UserError) as raised:
            build()
        messages.append(str(raised.value))
    return messages


def test_sizes_that_cannot_be_shared_are_named(four: list[dict[str, Any]]) -> None:
    assert four[0]["refused"] == [
        "ColumnParallelLinear has 6 outputs, which 4 tensor parallel processes do not divide (1, 2, 3, 6 would)",
        "RowParallelLinear has 10 inputs, which 4 tensor parallel processes do not divide (1, 2, 5, 10 would)",
        "VocabParallelEmbedding has 9 rows, too few for 4 processes; pad the vocabulary, or use fewer",
    ]


# -- random numbers -------------------------------------------------------------------------------------------

DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
    ),
]


@pytest.mark.parametrize("device", DEVICES)
def test_streams_differ_inside_and_agree_outside(device: str) -> None:
    def draw(rank: int, inside: int = 2) -> list[list[float]]:
        streams, place = RandomStreams(rank), torch.device(device)
        torch.manual_seed(7)
        drawn = [torch.rand(4, device=device)]
        with streams.own(place):
            drawn += [torch.rand(4, device=device) for _ in range(inside)]
            with streams.common(place), streams.common(place):
                drawn.append(torch.rand(4, device=device))
            with streams.own(place):
                drawn.append(torch.rand(4, device=device))
        drawn.append(torch.rand(4, device=device))
        with streams.own(place):
            drawn.append(torch.rand(4, device=device))
        drawn.append(torch.rand(4, device=device))
        return [values.tolist() for values in drawn]

    one, other = draw(0), draw(1)
    assert draw(0) == one
    assert [a == b for a, b in zip(one, other, strict=True)] == [True, False, False, True, False, True, False, True]
    assert len({tuple(values) for values in one + other}) == 12  # nothing is drawn twice
    # However much is drawn inside, the common stream goes on alike.
    assert draw(0, inside=5)[-3] == one[-3]


def test_a_failure_inside_leaves_the_common_stream() -> None:
    streams = RandomStreams(1)
    torch.manual_seed(7)
    expected = [torch.rand(()), torch.randint(2**62, ()), torch.rand(())][2]
    torch.manual_seed(7)
    torch.rand(())
    with pytest.raises(ValueError, match="inside"), streams.own(torch.device("cpu")):
        raise ValueError("inside")
    assert torch.equal(torch.rand(()), expected)
