"""`--dry-run`: configuration, parameters, tokens per update, updates and memory of a run, without training."""

from __future__ import annotations

import math

import numpy as np
from torch import nn

from ftk.config import dump
from ftk.data.corpora.blending import BlendedDataset
from ftk.data.sample_dataset import SampleDataset, lengths_of
from ftk.errors import UserError
from ftk.model_parallel.blocks import has_two_stacks
from ftk.model_parallel.world import Sizes
from ftk.optim.parameter_groups import parameter_rules
from ftk.parsing import dump_yaml
from ftk.planner.cluster import GIB
from ftk.planner.layout import Layout, Workload
from ftk.planner.memory import memory
from ftk.planner.model_shape import model_shape
from ftk.tasks.base import Task
from ftk.tasks.contract import check_parts, load_samples
from ftk.tasks.encoder_decoder import both_lengths
from ftk.terminal import in_columns
from ftk.trainer.adapters import adapt_and_freeze
from ftk.trainer.auto_parallel import workload_of
from ftk.trainer.config import TrainConfig, describe_sources
from ftk.trainer.dataloading import DEFAULT_BATCH_SIZE, total_updates

MEASURED_SAMPLES = 64  # whose mean length is used


def describe_run(config: TrainConfig, task: Task, model: nn.Module, sizes: Sizes) -> str:
    """The text that `ftk-train --dry-run` prints.

    Args:
        config: of the run, with the model's configuration completed by the task.
        model: only its shapes are read, so it may be on the meta device; adapter and `freeze` are applied to it.

    Raises:
        UserError: a pattern of the section "parameters" matches nothing, or task and model do not fit each other.
    """
    adapt_and_freeze(model, config)
    parameter_rules(model, 0.0, config.parameters)  # refuses patterns that match nothing
    parameters = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    dataset = load_samples(task, config.dataloader.train_subset, train=True)
    check_parts(task, dataset, model, config.criterion.build(), config.model)
    lengths = dataset.sizes(1)
    batch = _batch(config, lengths)
    tokens = round(batch * _mean_length(dataset))
    batches = config.training.update_freq * sizes.data
    per_update = tokens * batches
    samples = int(lengths_of(dataset).mean())  # of an epoch; shards differ
    per_update_samples = batch * batches
    per_epoch = math.ceil(samples / per_update_samples)
    test = config.lr_range
    updates = test.lr_range_updates if test.lr_range_test else total_updates(config.training, [per_epoch])
    assert updates is not None, "validated"
    longest = int(lengths.max())
    read = (longest, 0)  # by the encoder, or all; by a decoder behind it, if the task does not say at most as much
    if has_two_stacks(model):
        source, target = both_lengths(type(task), config.task.config) or (longest, longest)
        read = (min(source, longest), min(target, longest))
    work = workload_of(config, task, batch, *read)
    weights = 4 * parameters + (4 + work.state_bytes + work.average_bytes) * trained
    state = "weights, gradients, optimizer state" + (", moving average" if config.ema.ema_decay else "")
    frozen = {"teacher": config.distillation.teacher, "reference": getattr(config.criterion.config, "reference", None)}
    state += "".join(f"; without the {name}" for name, path in frozen.items() if path is not None)
    on_host = " on the host" if config.parallel.cpu_offload else ""
    rows = [
        *_process_rows(sizes),
        ("parameters", f"{parameters:,} ({trained:,} trained)"),
        ("samples per epoch", f"{samples:,}"),
        ("samples per update", f"{per_update_samples:,}"),
        ("tokens per update", f"about {per_update:,}"),
        ("updates per epoch", f"{per_epoch:,}"),
        ("updates in total", f"{updates:,}"),
        ("memory, weights", f"{weights / GIB:.2f} GiB{on_host} ({state}{_shared(sizes)})"),
        ("memory, activations", activation_memory(config, model, work)),
    ]
    lines = in_columns(rows, left=(0, 1))
    text = dump_yaml(dump(config))
    mixture = mixture_lines(dataset, updates * per_update_samples) if isinstance(dataset, BlendedDataset) else []
    return "\n".join([text, *task.describe(), *describe_sources(config), *mixture, *lines])


def _process_rows(sizes: Sizes) -> list[tuple[str, str]]:
    """The row about the mesh, if there are several processes."""
    if sizes.world == 1:
        return []
    mesh = " x ".join(f"{name} {size}" for name, size in sizes._asdict().items() if size > 1)
    return [("processes", f"{sizes.world} ({mesh}), {sizes.data} data-parallel")]


def _shared(sizes: Sizes) -> str:
    """A note on memory figures if several ranks share a model."""
    return (
        ""
        if sizes.world == sizes.replicate
        else "; summed over the ranks that share the model; ftk-plan shows each rank's"
    )


def mixture_lines(dataset: BlendedDataset, samples: int) -> list[str]:
    """A table of the corpora of a blend: their sizes, their shares, and how often a run passes over each.

    Args:
        samples: of the whole run.
    """
    rows: list[tuple[str, ...]] = [
        ("corpus", "tokens", "samples", "share", "per epoch", "passes per epoch", "passes in total")
    ]
    for share in dataset.table():
        passes = share.passes * samples / dataset.samples_per_epoch
        held = int(lengths_of(share.part.dataset).sum())
        figures = (f"{share.part.tokens:,}", f"{held:,}", f"{share.weight:.2%}", f"{share.samples:,}")
        rows.append((share.part.name, *figures, f"{share.passes:.2f}", f"{passes:.2f}"))
    return in_columns(rows)


def activation_memory(config: TrainConfig, model: nn.Module, work: Workload) -> str:
    """What a micro-batch takes besides weights, gradients and states, by the planner's estimate for one GPU."""
    try:
        shape = model_shape(model, config.model.config)
    except UserError as error:
        return f"not estimated ({error})"
    engine, found = config.engine, []
    for mode in (engine.activation_checkpointing, "none"):
        needed = memory(Layout(batch_size=work.global_batch, checkpointing=mode), shape, work)
        found.append(needed.activations + needed.logits_and_loss + needed.buffers)
    plain = 1 - math.ceil(shape.num_layers / engine.checkpoint_every) / shape.num_layers  # share of the layers
    return f"about {(found[0] + plain * (found[1] - found[0])) / GIB:.2f} GiB (estimate for one batch)"


def _batch(config: TrainConfig, sizes: np.ndarray) -> int:
    """Number of samples in a typical batch."""
    if config.dataloader.max_tokens is None:
        return config.dataloader.batch_size or DEFAULT_BATCH_SIZE
    samples = max(1, config.dataloader.max_tokens // int(sizes.max()))
    return min(samples, config.dataloader.batch_size or samples)


def _mean_length(dataset: SampleDataset) -> float:
    """Mean number of tokens of the first samples, which may have several rows."""
    samples = [dataset.sample(1, index) for index in range(min(MEASURED_SAMPLES, len(dataset)))]
    return sum(row["tokens"].shape[-1] for sample in samples for row in sample.get("rows", [sample])) / len(samples)
