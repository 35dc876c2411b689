"""What tensor and sequence parallel send is what the papers say, number for number."""

from __future__ import annotations

from typing import Any

import pytest

from ftk.model_parallel.activation_checkpointing import checkpoint_blocks
from ftk.model_parallel.tensor_parallel.apply import sum_sequence_gradients
from ftk.planner.communication import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from tests.distributed import run_ranks
from tests.model_parallel.count_messages import CountMessages
from tests.model_parallel.tensor_models import HIDDEN, LAYERS, POSITIONS, SEQUENCE, batch_of, loss_of, parallel


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    return run_ranks(find_all, 2)


def find_all() -> dict[str, Any]:
    return {str(length): messages(length) for length in (32, 31)}


def numbers(counted: CountMessages) -> dict[str, int]:
    """In all messages: of a sum or a scattered sum those that each process puts in, of a gathering those it gets."""
    return {collective: size // 4 for collective, size in counted.total_bytes().items()}


def messages(length: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for sequence in SEQUENCE:
        for mode in ("selective", "full") if length == 32 else ():
            model = parallel(sequence)
            checkpoint_blocks(model, mode)
            with CountMessages() as volume:
                loss_of(model, batch_of(0, length), loss_form="plain").backward()
            results[f"{sequence} {mode}"] = volume.total_counts()
        model, batch = parallel(sequence), batch_of(0, length)
        with CountMessages() as volume:
            loss_of(model, batch, loss_form="plain").backward()
        with CountMessages() as at_the_end:
            sum_sequence_gradients(model)
        results[str(sequence)] = {
            "numbers": numbers(volume),
            "messages": volume.total_counts(),
            "end": numbers(at_the_end),
            "targets": len(batch.targets),
        }
    return results


@pytest.mark.parametrize("length", [32, 31])
def test_communication_is_the_textbook_volume(length: int, two: list[dict[str, Any]]) -> None:
    """Shoeybi et al. 2019: 4 sums of B T H numbers a layer and step. Korthikanti et al. 2022: 4 gatherings and 4
    scattered sums of as many instead, which together cost what the sums did. Beside the layers: the embedding's sum,
    and the output layer and loss of N targets."""
    size, samples = 2, 3
    for results in (results[str(length)] for results in two):
        targets = results["False"]["targets"]
        hidden = samples * length * HIDDEN  # B T H
        output = targets * HIDDEN + targets + 2 * targets  # gradient of the output layer's input; maxima; two sums
        assert results["False"]["numbers"] == {ALL_REDUCE: LAYERS * 4 * hidden + hidden + output}
        assert results["False"]["messages"] == {ALL_REDUCE: LAYERS * 4 + 1 + 3}
        assert results["False"]["end"] == {}

        filled = samples * (length + length % size) * HIDDEN
        assert results["True"]["numbers"] == {
            ALL_GATHER: LAYERS * 4 * filled + filled + filled,  # the embedding's backward, the end's forward
            REDUCE_SCATTER: LAYERS * 4 * filled + filled,  # the embedding's forward
            ALL_REDUCE: output,
        }
        assert results["True"]["messages"] == {
            ALL_GATHER: LAYERS * 4 + 2,
            REDUCE_SCATTER: LAYERS * 4 + 1,
            ALL_REDUCE: 3,
        }
        norms, tables = 2 * HIDDEN * (2 * LAYERS + 1), 2 * (POSITIONS + 1) * HIDDEN
        assert results["True"]["end"] == {ALL_REDUCE: norms + tables}  # once an update, not once a micro-batch


def test_checkpointing_sends_no_sum_twice_unless_it_keeps_nothing(two: list[dict[str, Any]]) -> None:
    for results in (results["32"] for results in two):
        plain, shared = results["False"]["messages"], results["True"]["messages"]
        assert results["False selective"] == plain
        # What the column layers read is gathered again instead of kept: the part of the sequence is kept.
        assert results["True selective"] == shared | {ALL_GATHER: shared[ALL_GATHER] + 2 * LAYERS}
        # Nothing behind the block's last sum is computed again.
        assert results["False full"] == {ALL_REDUCE: plain[ALL_REDUCE] + LAYERS}
        assert results["True full"] == results["True selective"] | {REDUCE_SCATTER: shared[REDUCE_SCATTER] + LAYERS}
