"""One pass over a validation split: the loss per target token, of all and of each objective."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ftk.data.iterator import EpochBatchIterator
from ftk.errors import UserError
from ftk.tasks.base import Batch, Task
from ftk.trainer.device import autocast, to_device
from ftk.trainer.metrics import Meters, averages, with_perplexities
from ftk.trainer.records import Record


def validate_splits(
    task: Task, model: nn.Module, criterion: Any, splits: Mapping[str, EpochBatchIterator], **options: Any
) -> dict[str, Record] | None:
    """Evaluate a model on several splits, each time on the same samples.

    Args:
        splits: name -> iterator; `options` and the rest as of `validate`.

    Returns:
        Name -> figures; None if it was stopped.

    Raises:
        UserError: a split has no target token.
    """
    results: dict[str, Record] = {}
    for split, iterator in splits.items():
        iterator.load_state_dict({"epoch": 1, "samples_consumed": 0})
        figures = validate(task, model, criterion, iterator.batches(), **options)
        if figures is None and options["should_stop"]():
            return None
        if figures is None:
            raise UserError(f"split {split!r} has no target token; choose another --valid-subset")
        results[split] = figures
    return results


def validate(
    task: Task,
    model: nn.Module,
    criterion: Any,
    batches: Iterable[Batch],
    *,
    device: torch.device,
    precision: str = "fp32",
    should_stop: Callable[[], bool] = lambda: False,
) -> Record | None:
    """Evaluate a model on a whole split, in evaluation mode and without gradients.

    Args:
        task: offers `valid_step`.
        model: on `device`; its mode is restored.
        criterion: as the task's `valid_step` wants it.
        batches: CPU batches of the split.
        device: where the model is.
        precision: fp32, bf16 or fp16.
        should_stop: asked before each batch; true ends the pass without a result.

    Returns:
        `loss` (nats per target token), `ppl` (exp of it, the loss capped at 20), the criterion's own meters and
        their perplexities, `num_targets`, `num_batches`, `valid_seconds`. None if it was stopped, or without a target.
    """
    began = time.perf_counter()
    meters = Meters(device)
    num_batches = 0
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            for batch in batches:
                if should_stop():
                    return None
                with autocast(device, precision):
                    output = task.valid_step(model, criterion, to_device(batch, device))
                meters.add({"loss": (output.loss, output.num_targets), **output.meters})
                num_batches += 1
    finally:
        model.train(was_training)
    sums = meters.read()
    if not sums or sums["loss"][1] == 0:
        return None
    losses = averages(sums)
    record: Record = with_perplexities({"loss": losses.pop("loss"), "ppl": math.nan, **losses})
    record["num_targets"] = int(sums["loss"][1])
    record["num_batches"] = num_batches
    record["valid_seconds"] = time.perf_counter() - began
    return record
