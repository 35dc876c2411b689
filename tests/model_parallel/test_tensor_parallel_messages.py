"""What tensor and sequence parallel send is what the papers say, number for number."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from ftk.model_parallel.activation_checkpointing import checkpoint_blocks
from ftk.model_parallel.tensor_parallel.apply import sum_sequence_gradients
from tests.distributed import run_ranks
from tests.model_parallel.tensor_models import HIDDEN, LAYERS, POSITIONS, SEQUENCE, batch_of, loss_of, parallel


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    return run_ranks(find_all, 2)


def find_all() -> dict[str, Any]:
    return {str(length): messages(length) for length in (32, 31)}


class Volume(TorchDispatchMode):
    """Counts messages, and the numbers in them: of a sum or a scattered sum those that each process puts in, of a
    gathering those that each gets. (torch's CommDebugMode fails where a module is called twice, as dropout is.)"""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: Counter[str] = Counter()
        self.messages: Counter[str] = Counter()

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        result = operator(*arguments, **(keywords or {}))
        if operator.namespace in ("_c10d_functional", "c10d") and "wait" not in operator.name():
            name = operator.name().partition("::")[2].partition(".")[0]
            self.numbers[name] += (result if "gather" in name else arguments[0]).numel()
            self.messages[name] += 1
        return result


def messages(length: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for sequence in SEQUENCE:
        for mode in ("selective", "full") if length == 32 else ():
            model = parallel(sequence)
            checkpoint_blocks(model, mode)
            with Volume() as volume:
                loss_of(model, batch_of(0, length), loss_form="plain").backward()
            results[f"{sequence} {mode}"] = dict(volume.messages)
        model, batch = parallel(sequence), batch_of(0, length)
        with Volume() as volume:
            loss_of(model, batch, loss_form="plain").backward()
        with Volume() as at_the_end:
            sum_sequence_gradients(model)
        results[str(sequence)] = {
            "numbers": dict(volume.numbers),
            "messages": dict(volume.messages),
            "end": dict(at_the_end.numbers),
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
        assert results["False"]["numbers"] == {"all_reduce": LAYERS * 4 * hidden + hidden + output}
        assert results["False"]["messages"] == {"all_reduce": LAYERS * 4 + 1 + 3}
        assert results["False"]["end"] == {}

        filled = samples * (length + length % size) * HIDDEN
        assert results["True"]["numbers"] == {
            "all_gather_into_tensor": LAYERS * 4 * filled
            + filled
            + filled,  # the embedding's backward, the end's forward
            "reduce_scatter_tensor": LAYERS * 4 * filled + filled,  # the embedding's forward
            "all_reduce": output,
        }
        assert results["True"]["messages"] == {
            "all_gather_into_tensor": LAYERS * 4 + 2,
            "reduce_scatter_tensor": LAYERS * 4 + 1,
            "all_reduce": 3,
        }
        norms, tables = 2 * HIDDEN * (2 * LAYERS + 1), 2 * (POSITIONS + 1) * HIDDEN
        assert results["True"]["end"] == {"all_reduce": norms + tables}  # once an update, not once a micro-batch


def test_checkpointing_sends_no_sum_twice_unless_it_keeps_nothing(two: list[dict[str, Any]]) -> None:
    for results in (results["32"] for results in two):
        plain, shared = results["False"]["messages"], results["True"]["messages"]
        assert results["False selective"] == plain
        # What the column layers read is gathered again instead of kept: the part of the sequence is kept.
        assert results["True selective"] == shared | {
            "all_gather_into_tensor": shared["all_gather_into_tensor"] + 2 * LAYERS
        }
        # Nothing behind the block's last sum is computed again.
        assert results["False full"] == {"all_reduce": plain["all_reduce"] + LAYERS}
        assert results["True full"] == results["True selective"] | {
            "reduce_scatter_tensor": shared["reduce_scatter_tensor"] + LAYERS
        }
