"""Forward and backward passes whose shapes repeat: each is recorded once, as a CUDA graph, and replayed.

The passes of a micro-batch are some 1,500 kernels; where a batch is small, launching them takes the host longer than it
takes the GPU to run them. A graph launches them at once.
"""

from __future__ import annotations

import gc
import logging
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from numbers import Number
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ftk.batch import Batch, Group
from ftk.model_parallel.step_module import add_sums
from ftk.modules.cuda_graphs import Recorder, Step
from ftk.modules.varlen_attention import Replays
from ftk.trainer.log.metrics import Sums
from ftk.trainer.step import SequentialRunner

logger = logging.getLogger(__name__)

PASSES_BEFORE = 2
"""Passes of a size that are taken as they are: they load kernels, and a size that is rare is not recorded."""

MOST_GRAPHS = 16
"""Sizes that are recorded; the kernels of each stay in memory as long as the run lasts."""


class RecordedRunner(SequentialRunner):
    """`SequentialRunner` for one process, which replays the passes of a micro-batch where it has those of its size.

    What the host decides within the passes is fixed when they are recorded: not for a model or a criterion that decides
    anew in each update. Gradients are where the first graph has put them, for all graphs.

    Args:
        record: see `Recorder`.
        weighs: `Criterion.weighs`. Then targets of weight 0 are added, so that their number is one of few.
        module, device, precision, options: as of `SequentialRunner`.
    """

    def __init__(
        self,
        record: Recorder[Sums],
        module: nn.Module,
        device: torch.device,
        precision: str,
        *,
        weighs: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(module, device, precision, **options)
        self._options = options
        Replays.are_on = True
        self._record = record
        self._weighs = weighs
        self._parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._gradients: dict[nn.Parameter, Tensor] = {}
        self._seen: Counter[Hashable] = Counter()
        self._recorded: dict[Hashable, _Recorded] = {}
        self._refused: set[Hashable] = set()

    def forward_backward(self, micro_batches: Sequence[Batch], backward_scale: Tensor) -> Sums:
        totals: Sums = {}
        for place, batch in enumerate(micro_batches, start=1):
            add_sums(totals, self._passes(batch, backward_scale))
            if place < len(micro_batches):
                self._move_gradients()
        return totals

    def _passes(self, batch: Batch, backward_scale: Tensor) -> Sums:
        """Those of one micro-batch, replayed or not."""
        adds = any(parameter.grad is not None for parameter in self._parameters)
        if adds and not all(parameter.grad is self._gradients.get(parameter) for parameter in self._parameters):
            return super().forward_backward([batch], backward_scale)  # no graph adds to these gradients
        if self._weighs and not batch.extras:  # whose own losses have no weights
            batch = with_targets(batch, num_targets(len(batch.targets)))
        size = (adds, *size_of(batch))
        self._seen[size] += 1
        is_new = size not in self._recorded and size not in self._refused
        if is_new and self._seen[size] > PASSES_BEFORE and len(self._recorded) < MOST_GRAPHS:
            self._try_to_record(size, batch, backward_scale, adds)
        recorded = self._recorded.get(size)
        if recorded is None:
            return super().forward_backward([batch], backward_scale)
        for own, new in zip(tensors_of(recorded.batch), tensors_of(batch), strict=True):
            own.copy_(new.pin_memory() if own.is_cuda else new, non_blocking=True)
        recorded.scale.copy_(backward_scale)
        sums = recorded.replay()
        for parameter, gradient in self._gradients.items():
            parameter.grad = gradient
        # The next replay overwrites them.
        return {name: (total.clone(), count.clone()) for name, (total, count) in sums.items()}

    def plain(self) -> SequentialRunner:
        return SequentialRunner(self.module, self.device, self.precision, **self._options)

    def _try_to_record(self, size: Hashable, batch: Batch, backward_scale: Tensor, adds: bool) -> None:
        """Where it fails, the passes of this size are taken as they are from here on."""
        own = batch.map(lambda tensor: tensor.to(self.device, copy=True))
        scale = backward_scale.clone()

        def step() -> Sums:
            sums = super(RecordedRunner, self).forward_backward([own], scale)
            self._settle_gradients(adds)
            return sums

        before = [parameter.grad for parameter in self._parameters]
        if self.device.type == "cuda":  # a graph has memory of its own
            gc.collect()
            torch.cuda.empty_cache()
        try:
            self._recorded[size] = _Recorded(own, scale, self._record(step))
        except Exception as error:  # of a module that asks the device, or of memory
            if not self._refused:
                logger.warning(
                    "passes cannot be recorded as a CUDA graph, so their kernels are launched one by one: %s",
                    str(error).partition("\n")[0],
                )
            self._refused.add(size)
        finally:
            for parameter, gradient in zip(self._parameters, before, strict=True):
                parameter.grad = gradient

    def _settle_gradients(self, adds: bool) -> None:
        """Those of passes that are being recorded: the first graph's place is that of all."""
        found = self._found_gradients()
        if not self._gradients:
            self._gradients = found
        elif found.keys() != self._gradients.keys():
            raise RuntimeError("a batch gives gradients to other parameters than an earlier one")
        elif not adds:
            torch._foreach_copy_(list(self._gradients.values()), list(found.values()))

    def _move_gradients(self) -> None:
        """Those of passes that were taken as they are go where graphs add to them."""
        found = self._found_gradients()
        if found.keys() == self._gradients.keys() and any(found[one] is not self._gradients[one] for one in found):
            torch._foreach_copy_(list(self._gradients.values()), list(found.values()))
            for parameter, gradient in self._gradients.items():
                parameter.grad = gradient

    def _found_gradients(self) -> dict[nn.Parameter, Tensor]:
        return {parameter: parameter.grad for parameter in self._parameters if parameter.grad is not None}


class _Recorded(NamedTuple):
    """The passes of a micro-batch of one size."""

    batch: Batch  # on the device, where the graph reads it
    scale: Tensor  # 0-d
    replay: Step[Sums]


def num_targets(count: int) -> int:
    """The size for a number of targets: a multiple of 64, and of a sixteenth of the power of two above it."""
    size = max(64, (1 << max(count - 1, 0).bit_length()) // 16)
    return -(-count // size) * size


def with_targets(batch: Batch, count: int) -> Batch:
    """The batch with its first target repeated with weight 0, so that there are `count`."""
    more = count - len(batch.targets)
    weights = torch.ones(len(batch.targets)) if batch.weights is None else batch.weights

    def longer(tensor: Tensor) -> Tensor:
        return torch.cat((tensor, tensor[:1].expand(more, *tensor.shape[1:])))

    return replace(
        batch,
        targets=longer(batch.targets),
        places=longer(batch.places),
        weights=torch.cat((weights, weights.new_zeros(more))),
        groups={name: Group(group.names, longer(group.index)) for name, group in batch.groups.items()},
    )


def size_of(batch: Batch) -> tuple[Hashable, ...]:
    """All of a batch that is no value of a tensor."""
    numbers = tuple((name, value) for name, value in batch.inputs.items() if isinstance(value, Number))
    groups = tuple((name, group.names) for name, group in batch.groups.items())
    names = (*batch.inputs, *batch.extras, batch.weights is None)
    return (names, numbers, groups, *((tensor.shape, tensor.dtype) for tensor in tensors_of(batch)))


def tensors_of(batch: Batch) -> Iterator[Tensor]:
    """All tensors of a batch, in the same order for batches of one size."""
    yield from (value for value in batch.inputs.values() if not isinstance(value, Number))
    yield from (batch.targets, batch.places)
    if batch.weights is not None:
        yield batch.weights
    yield from (group.index for group in batch.groups.values())
    yield from batch.extras.values()
