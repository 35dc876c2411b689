"""When gradients are summed over processes: once an update, not once a micro-batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def gradient_sync(model: nn.Module, enabled: bool) -> Iterator[None]:
    """What goes backward inside is summed over the processes, or left on each until a later backward is.

    For DDP the forward pass has to lie inside as well. A model of one process is left alone.

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
    if (switch := getattr(model, "set_requires_gradient_sync", None)) is not None:  # FSDP2
        switch(enabled)
    yield
