"""Updates of a small GLM of five layers on one process and as a stage of a pipeline, and how they differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ftk.batch import Batch
from ftk.criterions.cross_entropy import CrossEntropy, CrossEntropyConfig
from ftk.model_parallel.config import EngineConfig, ParallelConfig
from ftk.model_parallel.gradients import GlobalGradients
from ftk.model_parallel.pipeline.build import build_pipeline
from ftk.model_parallel.pipeline.runner import PipelineRunner
from ftk.model_parallel.world import World, make_world, resolve_sizes
from ftk.models.glm import GLMConfig
from ftk.models.glm.model import GLM
from tests.dense import batch_of
from tests.model_parallel.small_steps import VOCAB, whole

SEED = 3
CLIP_NORM = 0.5  # below every norm of these updates
UPDATES = 10
UPDATE_FREQ = 4


def small_glm(**options: Any) -> GLM:
    """Five layers, on torch's present default device."""
    shape = {"vocab_size": VOCAB, "num_layers": 5, "hidden_size": 32, "num_attention_heads": 4, "max_positions": 32}
    dropout = {"embedding_dropout": 0.0, "attention_dropout": 0.0, "dropout": 0.0}
    return GLM(GLMConfig(**{**shape, **dropout, **options}), SEED)


def varied_batches(update: int, count: int = UPDATE_FREQ) -> list[Batch]:
    """Micro-batches of different rows and lengths with all that a collater can put into one; 1 to 3 rows, 17 to 24
    tokens. Every third update has one micro-batch less."""
    generator = torch.Generator().manual_seed(1000 + update)

    def numbers(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=generator)

    made = []
    for _ in range(count - (update % 3 == 2)):
        rows, length = 1 + int(numbers(3)), 17 + int(numbers(8))
        places = torch.arange(length)
        context = 5 + numbers(10, rows)
        made.append(
            batch_of(
                {
                    "tokens": numbers(VOCAB, rows, length),
                    "targets": numbers(VOCAB, rows, length),
                    "loss_mask": places >= context[:, None],
                    "position_ids": torch.stack((places, places // 3)).expand(rows, -1, -1).contiguous(),
                    "context_length": context,
                    "objective": numbers(3, rows),
                    "document_ids": (places >= 9).long().expand(rows, -1).contiguous(),
                }
            )
        )
        made[-1].sample_ids = numbers(10**6, rows).numpy()
    return made


def criterion(**options: Any) -> CrossEntropy:
    return CrossEntropy(CrossEntropyConfig(**options))


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    # An eps as large as that keeps gradients that are zero but for rounding (of key biases) from full steps.
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6, weight_decay=0.1)


References = dict[str, dict[str, Any]]
"""What one process computes, by `name_of` the options of the criterion."""


def write_references(folder: Path, cases: dict[str, dict[str, Any]]) -> References:
    forms = {name_of(options): options for options in (case.get("options", {}) for case in cases.values())}
    return {name: write_reference(folder / f"{name}.pt", **options) for name, options in forms.items()}


def write_reference(path: Path, num_layers: int = 5, **options: Any) -> dict[str, Any]:
    """What one process computes, one micro-batch after the other; the gradients of the first update go into a file."""
    model, loss_of = small_glm(num_layers=num_layers), criterion(**options)
    optimizer = optimizer_of(model)
    results: dict[str, Any] = {"losses": [], "norms": [], "meters": []}
    for update in range(UPDATES):
        batches = varied_batches(update)
        num_targets = sum(len(batch.targets) for batch in batches)
        optimizer.zero_grad()
        sums: dict[str, list[float]] = {}
        for batch in batches:
            output = loss_of(model, batch)
            (output.loss / num_targets).backward()
            add(sums, {"loss": (output.loss.detach(), output.num_targets), **output.meters})
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        if update == 0:
            scale = max(1.0, norm.item() / CLIP_NORM)
            torch.save({name: p.grad * scale for name, p in model.named_parameters()}, path)
        optimizer.step()
        record(results, sums, norm.item())
    model.eval()
    with torch.no_grad():
        results["valid"] = [loss_of(model, batch).loss.item() for batch in varied_batches(99)]
    return results


def train_pipeline(
    world: World,
    parallel: ParallelConfig,
    path: str,
    *,
    engine: EngineConfig | None = None,
    num_layers: int = 5,
    **options: Any,
) -> dict[str, Any]:
    """The same updates as a part of a pipeline, each data rank taking its share of the micro-batches.

    Returns:
        Losses, norms and meters as of `write_reference` on the last stage, and how far the gradients of the first
        update are from those of one process, relative to the largest of each parameter.
    """
    with torch.device("meta"):
        model = small_glm(num_layers=num_layers)
    runner = build_pipeline(
        model,
        criterion(**options),
        world,
        parallel,
        engine or EngineConfig(),
        update_freq=UPDATE_FREQ // world.sizes.data,
        seed=SEED,
    )
    part = runner.part
    optimizer = optimizer_of(part.model)
    gradients = GlobalGradients(part.model, part.model.parameters(), world, runner.uncounted)
    results: dict[str, Any] = {"losses": [], "norms": [], "meters": [], "held": sorted(names_of(runner))}
    for update in range(UPDATES):
        batches = varied_batches(update)
        num_targets = sum(len(batch.targets) for batch in batches)
        optimizer.zero_grad()
        part.model.train()
        own = batches[world.data_rank :: world.sizes.data]
        totals = runner.forward_backward(own, torch.tensor(1.0 / num_targets))
        if update == 0:
            results["gradient_error"] = gradient_error(runner, path)
        norm = gradients.norm()
        gradients.clip(CLIP_NORM, norm)
        optimizer.step()
        sums: dict[str, list[float]] = {}
        for other in world.gather_json({name: [float(v) for v in pair] for name, pair in told(world, totals).items()}):
            add(sums, other)
        record(results, sums, norm.item())
    part.model.eval()
    outputs = [runner.evaluate(batch) for batch in varied_batches(99)]
    losses = [float(output.loss) if world.counts_loss and world.data_rank == 0 else 0.0 for output in outputs]
    results["valid"] = world.sum_host(losses)
    results["tied"] = tied_difference(runner, world)
    return results


def told(world: World, totals: dict[str, Any]) -> dict[str, Any]:
    return totals if world.counts_loss else {}


def names_of(runner: PipelineRunner) -> list[str]:
    return [name for name, _ in runner.part.model.named_parameters()]


def gradient_error(runner: PipelineRunner, path: str) -> float:
    """The largest difference of a gradient from the reference's, relative to that parameter's largest."""
    reference = torch.load(path, weights_only=True)
    worst = 0.0
    largest = max(float(value.abs().max()) for value in reference.values())
    for name, parameter in runner.part.model.named_parameters():
        expected = reference[name]
        difference = (whole(parameter.grad) - expected).abs().max()
        worst = max(worst, float(difference) / max(float(expected.abs().max()), 1e-3 * largest))
    return worst


def tied_difference(runner: PipelineRunner, world: World) -> float:
    """How far the copies of tied parameters are apart, as the largest difference of their sums of squares."""
    own = dict(runner.part.model.named_parameters())
    values = [float(whole(own[name]).double().square().sum()) if name in own else -1.0 for name in TIED]
    found = world.gather_json(values)
    return max(
        max(value[place] for value in found) - min(value[place] for value in found if value[place] >= 0)
        for place in range(len(TIED))
    )


TIED = ["token_embedding.weight"]


def add(sums: dict[str, list[float]], more: dict[str, Any]) -> None:
    for name, (total, count) in more.items():
        old = sums.setdefault(name, [0.0, 0.0])
        sums[name] = [old[0] + float(total), old[1] + float(count)]


def record(results: dict[str, Any], sums: dict[str, list[float]], norm: float) -> None:
    results["losses"].append(sums["loss"][0] / sums["loss"][1])
    results["norms"].append(norm)
    results["meters"].append({name: total / max(1.0, count) for name, (total, count) in sums.items()})


def open_test_world(parallel: ParallelConfig) -> World:
    return make_world(resolve_sizes(parallel, dist.get_world_size()), "cpu")


def run_cases(folder: str, cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """On each rank."""
    results = {}
    for name, case in cases.items():
        case = {"pipeline_parallel_size": dist.get_world_size(), **case}
        engine, options = EngineConfig(**case.pop("engine", {})), case.pop("options", {})
        case.pop("limit", None)
        parallel = ParallelConfig(**case)
        path = f"{folder}/{name_of(options)}.pt"
        results[name] = train_pipeline(open_test_world(parallel), parallel, path, engine=engine, **options)
    return results


def name_of(options: dict[str, Any]) -> str:
    return "_".join(f"{name}={value}" for name, value in options.items()) or "plain"


def check(name: str, case: dict[str, Any], ranks: list[dict[str, Any]], references: References) -> None:
    """Every rank's results of a case are those of one process."""
    limit = case.get("limit", 1e-5)
    expected = references[name_of(case.get("options", {}))]
    for results in (rank[name] for rank in ranks):
        assert results["losses"] == pytest.approx(expected["losses"], rel=limit)
        assert results["norms"] == pytest.approx(expected["norms"], rel=limit)
        assert results["valid"] == pytest.approx(expected["valid"], rel=limit)
        assert results["gradient_error"] < limit
        assert results["tied"] == 0.0
        for meters, others in zip(results["meters"], expected["meters"], strict=True):
            assert meters == pytest.approx(others, rel=limit)
