"""Operators, vocab-parallel cross entropy and random streams of tensor parallel, against torch's on one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from ftk.criterions.chunked_loss import chunked_loss
from ftk.errors import UserError
from ftk.model_parallel.tensor_parallel import functions
from ftk.model_parallel.tensor_parallel.apply import own_chunk
from ftk.model_parallel.tensor_parallel.cross_entropy import VocabShard, vocab_parallel_cross_entropy
from ftk.model_parallel.tensor_parallel.random import RandomStreams
from ftk.model_parallel.world import Sizes, make_world
from tests.distributed import run_ranks

VOCAB, HIDDEN = 131, 16
UNEVEN = 37  # of these rows the first of two processes has 19


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
    }


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    return run_ranks(find_calls, 2)


def find_calls() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2,))
    return {"loss": calls(mesh), "loss refused": refused_losses(mesh), "marked": marked(mesh)}


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


def largest(one: Tensor, other: Tensor) -> float:
    return (one - other).abs().max().item()


def message(call: Callable[[], Any]) -> str:
    with pytest.raises(UserError) as raised:
        call()
    return str(raised.value)


def example(mesh: Any, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """logits [2, 5, V], this process's part of them, targets [2, 5] of which one is -100."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 5, UNEVEN, generator=generator, dtype=dtype)
    targets = torch.randint(UNEVEN, (2, 5), generator=generator)
    targets[0, 2] = -100
    return logits.requires_grad_(), own_chunk(logits.detach(), mesh, 2).requires_grad_(), targets


def calls(mesh: Any) -> dict[str, list[float]]:
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
    compare("ignored by default", vocab_size=UNEVEN)
    compare("float64", torch.float64, vocab_size=UNEVEN, label_smoothing=0.1)
    compare("a mesh", over=mesh, vocab_size=UNEVEN)
    logits, own, targets = example(mesh)
    row = int(targets[0, 0])
    expected = F.cross_entropy(logits[0], targets[0], reduction="none", ignore_index=-100)
    expected[0] = 0.0
    others = torch.where(targets[0] == -100, row, targets[0])
    loss = vocab_parallel_cross_entropy(own[0], others, group, ignore_index=row)
    found["another ignored"] = [largest(loss, expected), 0.0]
    one = vocab_parallel_cross_entropy(own[0, 1], targets[0, 1], group, vocab_size=UNEVEN)
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
        return message(lambda: vocab_parallel_cross_entropy(logits, targets, over, **{"vocab_size": UNEVEN, **options}))

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
        "logits [2, 5, 19] and targets [5] do not match",
        "logits are torch.float32 and targets torch.int32",
        "logits are torch.int64 and targets torch.int64",
        "a mesh of (1, 2) with the names None; the vocabulary is shared over one dimension",
    ]
    for found, start in zip(two[0]["loss refused"], wanted, strict=True):
        assert found.startswith(f"vocab_parallel_cross_entropy: {start}")


def marked(mesh: Any) -> list[Any]:
    """Where nobody waits for the device, a target out of range makes its own loss and gradients NaN."""
    _, own, targets = example(mesh)
    targets[1, 3] = UNEVEN
    compiled = torch.compile(vocab_parallel_cross_entropy, backend="eager")
    loss = compiled(own, targets, mesh.get_group(), vocab_size=UNEVEN)
    loss.sum().backward()
    assert own.grad is not None
    return [loss.isnan().nonzero().tolist(), own.grad.isnan().all(-1).nonzero().tolist(), int(own.grad.isnan().sum())]


def test_a_target_out_of_range_is_nan_where_it_is_not_looked_at(two: list[dict[str, Any]]) -> None:
    for rank, results in enumerate(two):
        assert results["marked"] == [[[1, 3]], [[1, 3]], (19, 18)[rank]]


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
