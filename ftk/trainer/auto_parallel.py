"""`parallel` auto: the planner's first layout that the run can have, for the processes that are there."""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
from typing import Any

import torch

from ftk.errors import UserError
from ftk.model_parallel.config import ParallelConfig
from ftk.model_parallel.world import Sizes, is_main_process, launched_processes, resolve_device
from ftk.planner.cluster import GIB, PRESETS, Cluster, ClusterConfig
from ftk.planner.layout import Layout, Workload
from ftk.planner.model_shape import model_shape
from ftk.planner.plan_config import LimitsConfig, WorkConfig
from ftk.planner.search import Plan, best_of_each_mesh, search
from ftk.tasks.base import Task
from ftk.tasks.encoder_decoder import both_lengths
from ftk.trainer.config import TrainConfig
from ftk.trainer.dataloading import DEFAULT_BATCH_SIZE
from ftk.trainer.parallel_check import check_parallel
from ftk.trainer.watch.hardware import known_peak

logger = logging.getLogger(__name__)

_CHOSEN = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_shard_size",
    "data_parallel_replicate_size",
    "sequence_parallel",
    "zero_stage",
    "pipeline_stages_per_rank",
    "cpu_offload",
)
# Of one process on a usual server; a plan needs their ratios, and none of a CPU is printed on a data sheet.
_CPU = Cluster(
    "cpu",
    memory_bytes=0.0,
    half_flops=5e10,
    fp32_flops=1e11,
    memory_bandwidth=1e10,
    node_bandwidth=2e9,
    network_bandwidth=1e9,
)


def choose_layout(config: TrainConfig, task: Task) -> TrainConfig:
    """The configuration with sizes instead of `parallel` auto; as it is, if that is not asked for.

    Micro-batches keep their size, and an update its number of samples: `batch_size` x `update_freq` x processes.

    Args:
        config: of the run, with the model's configuration completed by the task.
        task: builds the model, on the meta device.

    Raises:
        UserError: no layout fits, the model cannot be planned, or options leave nothing to choose.
    """
    if config.parallel.layout != "auto":
        return config
    _check(config)
    given = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, layout="given"))
    processes = launched_processes() or 1
    if processes == 1:
        logger.info("parallel auto: one process, nothing to share out")
        return given
    with torch.device("meta"):
        shape = model_shape(task.build_model(config.model), config.model.config)
    batch_size = config.dataloader.batch_size or DEFAULT_BATCH_SIZE
    lengths = (getattr(config.task.config, "seq_length", None) or shape.max_positions, 0)
    if shape.encoder_layers:
        lengths = both_lengths(type(task), config.task.config) or lengths
        if not lengths[1]:
            raise UserError(
                f"`parallel` auto: `task` {config.task.name} does not say how many tokens the decoder reads, so the "
                f"layout cannot be planned; give sizes instead, such as `data_parallel_shard_size`"
            )
    work = workload_of(config, task, batch_size * config.training.update_freq * processes, *lengths)
    mode = config.engine.activation_checkpointing
    limits = LimitsConfig(
        batch_size=batch_size,
        activation_checkpointing=None if mode == "none" else mode,
        pipeline_schedule=config.parallel.pipeline_schedule,
    )
    cluster = this_cluster(resolve_device(config.common.device), processes)
    found = search(shape, work, cluster, processes, limits, WorkConfig.matmul_efficiency)
    plans = best_of_each_mesh(found.plans)
    refusal: UserError | None = None
    for number, plan in enumerate(plans):
        chosen = _with_layout(given, plan.layout, work)
        try:
            check_parallel(chosen, task)
        except UserError as error:  # what a plan does not know: an adapter, a teacher, frozen layers
            refusal = refusal or error
            continue
        if is_main_process():
            logger.info("%s", _reasons(chosen, plan, plans[number + 1 :], cluster))
        return chosen
    if refusal is not None:
        raise UserError(f"`parallel` auto: no layout that fits can be used; of the fastest: {refusal}")
    raise UserError(f"`parallel` auto: {_nothing_fits(found.smallest, processes, cluster)}")


def workload_of(config: TrainConfig, task: Task, samples: int, num_tokens: int, decoder_tokens: int) -> Workload:
    """The work of one update of a run with this number of samples, for the planner."""
    criterion = config.criterion.config
    is_plain = getattr(criterion, "loss_form", "auto") == "plain"
    chunk = getattr(criterion, "loss_chunk_tokens", None) or Workload.loss_chunk_tokens  # the default of GPUs
    return Workload(
        global_batch=samples,
        num_tokens=num_tokens,
        loss_share=task.loss_share(config.task.config),
        precision=config.compute_type,
        state_bytes=getattr(config.optimizer.config, "state_bytes", 8.0),
        loss_chunk_tokens=sys.maxsize if is_plain else chunk,
        average_bytes=4 if config.ema.ema_decay else 0,
        decoder_tokens=decoder_tokens,
    )


def this_cluster(device: torch.device, processes: int) -> Cluster:
    """The machines of this run, as far as they can be asked: memory and rates of the device, processes of a node."""
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    usable = 1.0 - ClusterConfig.memory_reserve
    if device.type != "cuda":
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return dataclasses.replace(_CPU, memory_bytes=usable * total / per_node, gpus_per_node=per_node)
    name, total = torch.cuda.get_device_name(device), torch.cuda.get_device_properties(device).total_memory
    base = next((preset for preset in PRESETS.values() if preset.name in name.lower()), PRESETS["a100-40g"])
    peak = known_peak(name)
    rates: dict[str, Any] = {} if peak is None else {"half_flops": peak.half * 1e12, "fp32_flops": peak.tf32 * 1e12}
    return dataclasses.replace(base, name=name, memory_bytes=usable * total, gpus_per_node=per_node, **rates)


def _check(config: TrainConfig) -> None:
    usual = ParallelConfig()
    given = [name for name in _CHOSEN if getattr(config.parallel, name) != getattr(usual, name)]
    if given:
        raise UserError(f"`parallel` auto chooses this itself; leave it out, or `{given[0]}`")
    if config.dataloader.max_tokens is not None:
        raise UserError("`parallel` auto plans a fixed number of samples; give `batch_size` instead of `max_tokens`")


def _with_layout(config: TrainConfig, layout: Layout, work: Workload) -> TrainConfig:
    parallel = dataclasses.replace(
        config.parallel,
        tensor_parallel_size=layout.tensor,
        pipeline_parallel_size=layout.pipeline,
        data_parallel_shard_size=layout.shard,
        data_parallel_replicate_size=layout.replicate,
        sequence_parallel=layout.sequence_parallel,
        zero_stage=layout.zero_stage if layout.shard > 1 else None,
    )
    training = dataclasses.replace(config.training, update_freq=layout.micro_batches(work.global_batch))
    engine = dataclasses.replace(config.engine, activation_checkpointing=layout.checkpointing)
    return dataclasses.replace(config, parallel=parallel, training=training, engine=engine)


def _reasons(config: TrainConfig, plan: Plan, others: list[Plan], cluster: Cluster) -> str:
    """Which layout, and why: what it takes, and what the next one would."""
    layout, mode = plan.layout, plan.layout.checkpointing
    changes = f", `update_freq` {config.training.update_freq}"
    changes += f", `activation_checkpointing` {mode}" if mode != "none" else ""
    text = f"parallel auto: {_sizes(layout).describe(config.parallel)}{changes}: the fastest that fits"
    text += f", {plan.memory.total / GIB:.2f} of {cluster.memory_bytes / GIB:.2f} GiB a process by estimate"
    if others:
        ratio = others[0].time.total / plan.time.total
        text += f"; next: {_sizes(others[0].layout).describe()}, {ratio:.2f} times as long"
    return text


def _sizes(layout: Layout) -> Sizes:
    return Sizes(layout.pipeline, layout.replicate, layout.shard, layout.tensor)


def _nothing_fits(smallest: Any, processes: int, cluster: Cluster) -> str:
    if smallest is None:
        return f"no layout of {processes} processes is possible for this model; ftk-plan says why"
    layout, needed = smallest
    return (
        f"nothing fits {processes} processes: {_sizes(layout).describe()} needs {needed.total / GIB:.2f} GiB a "
        f"process, which has {cluster.memory_bytes / GIB:.2f}; use more processes, or a smaller `batch_size`"
    )
