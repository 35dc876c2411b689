"""Operators, vocab-parallel cross entropy and random streams of tensor parallel, against torch's on one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from ftk.criterions.chunked_loss import chunked_loss
from ftk.errors import UserError
from ftk.model_parallel.tensor_parallel import functions
from ftk.model_parallel.tensor_parallel.apply import local_chunk
from ftk.model_parallel.tensor_parallel.cross_entropy import VocabShard, vocab_parallel_losses
from ftk.model_parallel.tensor_parallel.random import RandomStreams
from ftk.model_parallel.tensor_parallel.region import TensorRegion
from ftk.model_parallel.world import Sizes, make_world
from tests.distributed import run_ranks

VOCAB, HIDDEN = 131, 16


@pytest.fixture(scope="module")
def four() -> list[dict[str, Any]]:
    return run_ranks(find_all, 4)


def find_all() -> dict[str, Any]:
    mesh = make_world(Sizes(tensor=4), "cpu").mesh
    assert mesh is not None
    mesh = mesh["tensor"]
    return {"operators": operators(mesh), "loss": losses(mesh)}


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
    results = {}
    for vocab_size in (VOCAB, 128):
        shard = VocabShard.of(mesh.get_group(), vocab_size)
        for smoothing in (0.0, 0.1):
            for dtype in (torch.float32, torch.bfloat16, torch.float64):
                generator = torch.Generator().manual_seed(vocab_size)
                logits = (torch.randn(15, vocab_size, generator=generator) * 4).to(dtype).requires_grad_()
                targets = torch.randint(vocab_size, (15,), generator=generator)
                weights = torch.rand(15, generator=generator)
                values = logits.float() if dtype == torch.bfloat16 else logits
                expected = F.cross_entropy(values, targets, reduction="none", label_smoothing=smoothing)
                (wanted,) = torch.autograd.grad((expected * weights).sum(), logits)
                own = local_chunk(logits.detach(), mesh, 1).requires_grad_()
                found, nll = vocab_parallel_losses(own, targets, shard, smoothing)
                torch.testing.assert_close(nll, F.cross_entropy(values.detach(), targets, reduction="none"))
                assert found.dtype == values.dtype
                (found * weights).sum().backward(retain_graph=True)
                assert own.grad is not None
                assert own.grad.dtype == dtype
                first = own.grad.clone()
                (found * weights).sum().backward()  # what is kept is not written over
                assert torch.equal(own.grad, 2 * first)
                results[f"{vocab_size} {smoothing} {dtype}"] = [
                    (found - expected).abs().max().item(),
                    (first - local_chunk(wanted, mesh, 1)).abs().max().item(),
                ]
    results["huge logits"] = [huge(mesh.get_group()), 0.0]
    results |= chunked(mesh)
    return results


def huge(group: Any) -> float:
    """Softmax by its largest logit, which another process may have: nothing overflows."""
    logits = torch.full((1, 3), 1e4 if dist.get_rank() == 2 else -1e4)
    loss, _ = vocab_parallel_losses(logits, torch.tensor([7]), VocabShard.of(group, 12))
    return abs(loss.item() - torch.tensor(3.0).log().item())


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
        own = local_chunk(weight.detach(), mesh, 0).requires_grad_()
        computed = chunked_loss(hidden, own, targets, smoothing, 8, shard)
        found = torch.autograd.grad(computed.total, (hidden, own))
        torch.testing.assert_close(computed.losses, expected.losses)
        torch.testing.assert_close(computed.nll, expected.nll)
        results[f"chunked {smoothing}"] = [
            abs(computed.total.item() - expected.total.item()) / expected.total.item(),
            max(
                (found[0] - wanted[0]).abs().max().item(),
                (found[1] - local_chunk(wanted[1], mesh, 0)).abs().max().item(),
            ),
        ]
    return results


def test_the_loss_of_a_cut_vocabulary_is_torchs(four: list[dict[str, Any]]) -> None:
    """Uneven vocabulary, smoothing, weights of tokens, bf16 and float64 logits, in chunks."""
    for results in four:
        assert len(results["loss"]) == 15
        for case, (loss, gradient) in results["loss"].items():
            assert loss < (1e-13 if "float64" in case else 1e-5), (case, loss)
            limits = {"bfloat16": 5e-3, "chunked": 2e-5, "float64": 1e-13}
            limit = next((limit for name, limit in limits.items() if name in case), 1e-6)
            assert gradient < limit, (case, gradient)


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


def test_of_two_sequences_at_a_time_the_processes_must_divide_each():
    region = TensorRegion.__new__(TensorRegion)
    region.size, region.two_stacks, region.length = 2, True, None
    region.note_length(6)
    with pytest.raises(UserError, match=r"^a sequence of 7 tokens, which 2 tensor parallel processes do not divide"):
        region.note_length(7)
    assert region.length is None
