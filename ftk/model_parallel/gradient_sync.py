"""When gradients are summed over processes: once an update, where memory allows, not once a micro-batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def gradient_sync(model: nn.Module, enabled: bool) -> Iterator[None]:
    """Forward and backward pass of a micro-batch; the sums over processes are whole after the last one of an update.

    Copies of the model (DDP) and ZeRO stage 1 keep gradients on each process until then; stages 2 and 3 cannot, as
    each process has memory for its share alone. A model of one process is left alone.

    Args:
        model: as it is called in the step; wrapped by DDP, sharded by FSDP2, or neither.
        enabled: false for all micro-batches of an update but the last.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel):
        if enabled:
            yield
        else:
            with model.no_sync():
                yield
        return
    if hasattr(model, "set_requires_gradient_sync"):  # FSDP2, which takes a second to import
        from ftk.model_parallel.fully_sharded import accumulate

        accumulate(model, last=enabled)  # type: ignore[arg-type]
    yield
