"""FLOP/s, MFU and peak memory in the training records."""

from __future__ import annotations

import logging

import torch

from ftk.batch import Batch
from ftk.models.base import CountsFlops
from ftk.models.flops import DecoderWork
from ftk.trainer.hooks import Hook, StepInfo
from ftk.trainer.log.records import Record
from ftk.trainer.watch.hardware import peak_flops, peak_memory_bytes

logger = logging.getLogger(__name__)


class Throughput(Hook):
    """Counts the operations of each update from shapes, and adds figures to each training record.

    Fields: `flops_per_second` (for models with `training_flops`), `mfu` (its share of the device's peak, if that is
    known), `peak_memory_bytes`, and on a GPU `peak_reserved_bytes`. Operations are summed over ranks; memory is the
    maximum over ranks.

    Args:
        peak: as `peak_tflops`.
    """

    def __init__(self, peak: str = "auto") -> None:
        self._option = peak
        self._peak: float | None = None
        self._flops = 0  # since the last record

    def before_train(self, step: StepInfo) -> None:
        if not isinstance(step.model, CountsFlops):
            return
        found = peak_flops(self._option, step.device, step.config.compute_type)
        if found is not None:
            self._peak, source = found
            self._peak *= step.world.size
            logger.info("MFU is the share of %.4g TFLOP/s (%s)", self._peak / 1e12, source)

    def before_step(self, step: StepInfo, micro_batches: list[Batch]) -> None:
        if isinstance(step.model, CountsFlops):
            self._flops += sum(batch_flops(step.model, batch) for batch in micro_batches)

    def on_record(self, step: StepInfo, record: Record) -> None:
        if record["event"] != "train":
            return
        world = step.world
        flops = world.sum_host([self._flops if world.counts_loss else 0.0])[0]
        if flops:
            record["flops_per_second"] = flops / max(step.stopwatch.last_lap.seconds, 1e-9)
            if self._peak is not None:
                record["mfu"] = record["flops_per_second"] / self._peak
            self._flops = 0
        record["peak_memory_bytes"] = int(world.max_host([peak_memory_bytes(step.device)])[0])
        if step.device.type == "cuda":
            record["peak_reserved_bytes"] = int(world.max_host([torch.cuda.max_memory_reserved(step.device)])[0])


def batch_flops(model: CountsFlops, batch: Batch) -> int:
    """Operations of a step on one batch, padding included.

    Args:
        batch: on the CPU.
    """
    rows, num_keys = batch.inputs["tokens"].shape  # [B, S or T]
    counts = (rows * num_keys, len(batch.places), rows * num_keys**2)
    if "decoder_tokens" not in batch.inputs:
        return model.training_flops(*counts)
    num_queries = batch.inputs["decoder_tokens"].size(1)
    decoder = DecoderWork(rows * num_queries, rows * num_queries**2, rows * num_queries * num_keys)
    return model.training_flops(*counts, decoder)  # type: ignore[call-arg]
