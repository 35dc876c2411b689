"""`--dry-run`: configuration, parameters, tokens per update, updates and memory of a run, without training."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from torch import nn

from ftk.config import dump
from ftk.data.corpora.blending import BlendedDataset
from ftk.data.sample_dataset import SampleDataset, lengths_of
from ftk.model_parallel.config import EngineConfig
from ftk.model_parallel.world import Sizes
from ftk.optim.parameter_groups import parameter_rules
from ftk.parsing import dump_yaml
from ftk.planner.cluster import GIB
from ftk.tasks.base import Task
from ftk.tasks.contract import check_parts, load_samples
from ftk.terminal import in_columns
from ftk.trainer.adapters import choose_trained
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
    choose_trained(model, config)
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
    weights, activations = memory_bytes(config, trained, parameters, batch, int(lengths.max()))
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
        (
            "memory, activations",
            f"about {activations / GIB:.2f} GiB (estimate for one batch)"
            if activations
            else "not estimated (unknown model shape)",
        ),
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


def memory_bytes(config: TrainConfig, trained: int, parameters: int, batch: int, tokens: int) -> tuple[int, int]:
    """(bytes of weights, gradients, optimizer state and moving average; bytes of activations of one micro-batch).

    fp32 weights, gradients and the moving average take 4 bytes each; the optimizer's options state the size of its
    state. For the backward pass a pre-LN layer stores about 17 H values per token in the computing precision: two layer
    norms 2, qkv 3, attention 1, output 1, feed-forward input 1, inner size before and after the activation 8, residuals
    1. A checkpointed layer stores its input (full) or about 10 H (selective: qkv, attention, both outputs, the inner
    size once), and one layer at a time is recomputed. The loss stores about 2 V values in fp32 for each target (about
    18 % of the positions), or for those of one chunk.
    """
    average = 4 if config.ema.ema_decay else 0
    weights = 4 * parameters + round((4 + average + getattr(config.optimizer.config, "state_bytes", 8.0)) * trained)
    shape: Any = config.model.config
    if not all(hasattr(shape, name) for name in ("num_layers", "hidden_size", "vocab_size")):
        return weights, 0
    value = 4 if config.compute_type == "fp32" else 2
    # As if the decoder behind an encoder read as many tokens: no less than is needed.
    num_layers = shape.num_layers + getattr(shape, "decoder_layers", 0)
    layers = _values_per_token(config.engine, num_layers) * value * shape.hidden_size * batch * tokens
    loss = int(0.18 * batch * tokens)
    if getattr(config.criterion.config, "loss_form", "plain") in ("auto", "chunked", "linear"):
        loss = min(loss, config.criterion.config.loss_chunk_tokens or 1024)  # the default of GPUs
    return weights, layers + loss * 2 * 4 * shape.vocab_size


def _values_per_token(engine: EngineConfig, num_layers: int) -> int:
    """Values per token that all layers store for the backward pass, in multiples of H."""
    kept = {"none": 17, "selective": 10, "full": 1}[engine.activation_checkpointing]
    checkpointed = 0 if kept == 17 else -(-num_layers // engine.checkpoint_every)
    return 17 * (num_layers - checkpointed) + kept * checkpointed + (17 - kept if checkpointed else 0)


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
