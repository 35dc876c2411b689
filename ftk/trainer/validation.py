"""One pass over a validation split: the loss per target token, of all and of each group."""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ftk.batch import Batch, Group
from ftk.criterions.base import Criterion
from ftk.data.batches.iterator import EpochBatchIterator
from ftk.data.corpora.blending import BlendedDataset
from ftk.errors import UserError
from ftk.evaluation.unigram import Sums, Unigram
from ftk.model_parallel.step_module import add_sums
from ftk.model_parallel.world import World
from ftk.modules.evaluation_mode import evaluation_mode
from ftk.trainer.dataloading import SomeSamples
from ftk.trainer.log.metrics import Meters, averages, summed, with_perplexities
from ftk.trainer.log.records import Record
from ftk.trainer.step import Runner

CHECK_STOP_INTERVAL = 8  # batches between stop checks of several ranks, each of which waits for all ranks

OfScored = Callable[[Sequence[Sequence[float]]], dict[str, float]]
"""As `Task.figures`."""


def validate_splits(
    runner: Runner, model: nn.Module, splits: Mapping[str, EpochBatchIterator], **options: Any
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
        num_batches = iterator.batches_of_all_ranks()
        figures = validate(runner, model, batches_by_corpus(iterator), **options)
        if figures is None:
            return None
        if not figures["num_targets"]:
            raise UserError(f"split {split!r} has no target token; choose another `valid_subset`")
        results[split] = {**figures, "num_batches": num_batches}
    return results


def batches_by_corpus(iterator: EpochBatchIterator) -> Iterator[Batch]:
    """The remaining batches of a split; of a blend the targets are also grouped by the corpus that they are from.

    Targets are not grouped where samples have several rows each.
    """
    dataset: Any = iterator.dataset
    chosen = dataset.indices if isinstance(dataset, SomeSamples) else None
    dataset = dataset if chosen is None else dataset.dataset
    if not isinstance(dataset, BlendedDataset):
        yield from iterator.batches()
        return
    names = _short_names([part.name for part in dataset.parts])
    groups = list(dict.fromkeys(names))  # a corpus may be named twice
    group_of = torch.tensor([groups.index(name) for name in names])
    for batch in iterator.batches():
        assert batch.sample_ids is not None, "the iterator fills them in"
        num_rows, width = batch.placed_tokens.shape
        if len(batch.sample_ids) == num_rows and len(batch.places) == len(batch.targets):
            ids = batch.sample_ids if chosen is None else chosen[batch.sample_ids]
            corpora = torch.from_numpy(np.searchsorted(dataset.firsts, ids, side="right") - 1)  # [B]
            index = group_of[corpora[batch.places // width]]
            batch.groups["corpus"] = Group(tuple(f"corpus_{name}" for name in groups), index)
        yield batch


def _short_names(names: Sequence[str]) -> list[str]:
    """The last parts of the paths of corpora, `a:b` of one in shards; the names as they are if that says too little."""
    found = []
    for name in names:
        paths = [name] if os.path.exists(name) else name.split(":")
        found.append([os.path.abspath(path) for path in paths])
    short = [":".join(os.path.basename(path) for path in paths) for paths in found]
    return short if all(short) and len({*short}) == len({*map(tuple, found)}) else list(names)


def figures_to_come(
    runner: Runner,
    model: nn.Module,
    iterator: EpochBatchIterator,
    *,
    world: World,
    nats: Collection[str] = Criterion.nats,
    of_scored: OfScored | None = None,
) -> list[str]:
    """Names of the figures that a validation can give, found by the first batch, even if that has no targets for some.

    Args:
        iterator: of the split; the rest as of `validate`.
    """
    iterator.load_state_dict({"epoch": 1, "samples_consumed": 0})
    names: list[str] = []
    scored: list[Tensor] = []
    with evaluation_mode(model), torch.no_grad():
        for batch in itertools.islice(batches_by_corpus(iterator), 1):
            output = runner.evaluate(batch)
            names += [] if output is None else output.meters
            scored += [] if output is None or output.scored is None else [output.scored]
    meters = averages(summed(dict.fromkeys(names, (0.0, 1.0)), world))
    figures = with_perplexities({"loss": 0.0, "ppl": 0.0, **meters}, nats)
    if of_scored is not None:
        figures |= of_scored(_gathered(scored, world))
    return [*figures, "num_targets", "num_batches", "valid_seconds"]


def validate(
    runner: Runner,
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    world: World,
    should_stop: Callable[[], bool] = lambda: False,
    nats: Collection[str] = Criterion.nats,
    unigram: Unigram | None = None,
    of_scored: OfScored | None = None,
) -> Record | None:
    """Evaluate a model on a whole split, in evaluation mode and without gradients.

    Args:
        runner: computes the loss of a batch.
        model: on the world's device; its mode is restored.
        batches: this rank's CPU batches of the split; the same number on each rank.
        world: the ranks whose sums are added.
        should_stop: called before the same batches on every rank; true ends the pass without a result.
        nats: see `with_perplexities`.
        unigram: token frequencies of the training data, where the targets are tokens.
        of_scored: makes further figures of what the criterion scored (`Task.figures`).

    Returns:
        `loss` (nats per target token), `ppl` (exp of it, the loss capped at 20), the criterion's own meters and
        their perplexities, `unigram_loss` if `unigram` is given, `num_targets`, `num_batches`, `valid_seconds`.
        Without a target `num_targets` alone. None if it was stopped.
    """
    began = time.perf_counter()
    meters = Meters(world.device)
    baseline: Sums = {}
    scored: list[Tensor] = []
    num_batches = 0
    with evaluation_mode(model), torch.no_grad():
        for batch in batches:
            if (world.size == 1 or num_batches % CHECK_STOP_INTERVAL == 0) and should_stop():
                return None
            output = runner.evaluate(batch)
            if output is not None:
                meters.add({"loss": (output.loss, output.num_targets), **output.meters})
                scored += [] if output.scored is None else [output.scored]
                if unigram is not None:
                    weights = None if batch.weights is None else batch.weights.numpy()
                    add_sums(baseline, unigram.sums(batch.targets.numpy(), weights))
            num_batches += 1
    sums = summed({**meters.read(), **baseline} if world.counts_loss else {}, world)
    if not sums or sums["loss"][1] == 0:
        return {"num_targets": 0}
    baseline = {name: sums.pop(name) for name in list(sums) if name.startswith("unigram")}
    losses = averages(sums)
    record: Record = with_perplexities({"loss": losses.pop("loss"), "ppl": math.nan, **losses}, nats)
    if baseline:
        record["unigram_loss"] = Unigram.loss(baseline)
    if of_scored is not None:
        record |= of_scored(_gathered(scored, world))
    num_targets = sums["loss"][1]
    record["num_targets"] = num_targets if num_targets % 1 else int(num_targets)  # a sum of weights may have a fraction
    record["num_batches"] = num_batches
    record["valid_seconds"] = time.perf_counter() - began
    return record


def _gathered(scored: Sequence[Tensor], world: World) -> list[list[float]]:
    """What all ranks have scored, each batch once; waits for the device."""
    rows = torch.cat(list(scored)).tolist() if scored and world.counts_loss else []
    return [row for own in world.gather_json(rows) for row in own]


def with_averages(names: Iterable[str], averages: bool) -> list[str]:
    """Names of a validation's figures, and of those of the averaged weights if `averages`."""
    names = list(names)
    return [*names, *(f"ema_{name}" for name in names if averages and "num_" not in name)]
