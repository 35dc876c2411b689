"""Pipelines of real processes against one process: losses, gradients, norms, validation."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ftk.batch import Batch
from ftk.criterions.cross_entropy import CrossEntropy, CrossEntropyConfig
from ftk.errors import UserError
from ftk.model_parallel.config import EngineConfig, ParallelConfig
from ftk.model_parallel.gradients import GlobalGradients
from ftk.model_parallel.pipeline.build import build_pipeline, sum_shared_gradients
from tests.distributed import run_ranks
from tests.model_parallel import pipeline_steps as steps

TWO: dict[str, dict[str, Any]] = {
    "1f1b": {},
    "1f1b, uneven, chunked loss": {"pipeline_layers": [1, 4], "options": {"loss_form": "chunked"}},
    "gpipe, smoothed": {"pipeline_schedule": "gpipe", "options": {"label_smoothing": 0.1}},
    "interleaved": {"pipeline_schedule": "interleaved"},
    "interleaved, uneven": {"pipeline_schedule": "interleaved", "pipeline_layers": [1, 2, 1, 1]},
    "zero-bubble, chunked loss": {"pipeline_schedule": "zero-bubble", "options": {"loss_form": "chunked"}},
    "zero-bubble, full checkpointing": {
        "pipeline_schedule": "zero-bubble",
        "pipeline_stages_per_rank": 2,
        "engine": {"activation_checkpointing": "full"},
    },
    "1f1b, selective checkpointing": {"engine": {"activation_checkpointing": "selective"}},
}


@pytest.fixture(scope="module")
def references(tmp_path_factory) -> tuple[Path, steps.References]:
    folder = tmp_path_factory.mktemp("references")
    return folder, steps.write_references(folder, TWO)


@pytest.fixture(scope="module")
def of_two(references) -> list[dict[str, Any]]:
    return run_ranks(steps.run_cases, 2, str(references[0]), TWO, timeout=300)


@pytest.mark.parametrize("name", TWO)
def test_two_processes_learn_what_one_does(name, of_two, references):
    steps.check(name, TWO[name], of_two, references[1])


# -- single facts, several in one start of processes -----------------------------------------------------------


def facts() -> dict[str, Any]:
    parallel = ParallelConfig(pipeline_parallel_size=2)
    world = steps.open_test_world(parallel)

    def built(precision: str = "fp32", loss_of: Any = None, model_options: Any = None, **options: Any) -> Any:
        with torch.device("meta"):
            model = steps.small_glm(**(model_options or {}))
        config = ParallelConfig(pipeline_parallel_size=2, **options)
        loss_of = loss_of or steps.criterion()
        freq = steps.UPDATE_FREQ
        return build_pipeline(
            model, loss_of, world, config, EngineConfig(), update_freq=freq, precision=precision, seed=3
        )

    def update(runner: Any, seed: int = 1) -> tuple[list[float], float]:
        torch.manual_seed(seed + world.rank)
        runner.part.model.zero_grad()
        totals = runner.forward_backward(steps.varied_batches(0), torch.tensor(0.01))
        parameters = runner.part.model.parameters()
        norm = GlobalGradients(runner.part.model, parameters, world, runner.uncounted).norm()
        return [float(value) for value in totals.get("loss", ())], norm.item()

    return {
        "dropout": [update(built(model_options=DROPOUT), seed) for seed in (1, 1, 2)],
        "bf16": update(built("bf16")),
        "refused": refusal(lambda: built().forward_backward([strange_batch()], torch.tensor(0.01))),
        "not finite": update(built(loss_of=Infinite(CrossEntropyConfig())))[1],
        "untrained": update_frozen(built(), world),
        "evaluated in training mode": mode_after_evaluation(built()),
    }


DROPOUT = {"embedding_dropout": 0.1, "attention_dropout": 0.1, "dropout": 0.1}


def strange_batch() -> Batch:
    """With an input that the model does not have."""
    batch = steps.varied_batches(0)[0]
    return replace(batch, inputs={**batch.inputs, "pixels": torch.zeros(1)})


class Infinite(CrossEntropy):
    def loss(self, head: Any, hidden: Any, batch: Any) -> Any:
        output = super().loss(head, hidden, batch)
        return output._replace(loss=output.loss * math.inf)


def refusal(action: Any) -> str:
    try:
        action()
    except UserError as error:
        return str(error)
    return "none"


def update_frozen(runner: Any, world: Any) -> list[str]:
    """Names of the parameters with a gradient when all but the last norm are frozen."""
    for name, parameter in runner.part.model.named_parameters():
        parameter.requires_grad_(name.startswith("final_norm"))
    runner.forward_backward(steps.varied_batches(0), torch.tensor(0.01))
    return [name for name, parameter in runner.part.model.named_parameters() if parameter.grad is not None]


def mode_after_evaluation(runner: Any) -> list[bool]:
    runner.part.model.eval()
    runner.evaluate(steps.varied_batches(0)[0])
    stages = [stage.training for stage in runner.stages]
    runner.part.model.train()
    runner.forward_backward(steps.varied_batches(0), torch.tensor(0.01))
    return stages + [stage.training for stage in runner.stages]


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_ranks(facts, 2, timeout=300)


def test_dropout_is_reproducible_and_depends_on_the_seed(found):
    first, again, other = found[1]["dropout"]
    assert first == again
    assert first != other
    assert first[1] == found[0]["dropout"][0][1]


def test_bf16_is_near_fp32_and_not_equal(found, references):
    (loss, count), _ = found[1]["bf16"]
    expected = references[1]["plain"]["losses"][0]
    assert loss / count == pytest.approx(expected, rel=1e-2)
    assert loss / count != pytest.approx(expected, rel=1e-7)


def test_only_the_last_stage_reports_a_loss(found):
    assert found[0]["bf16"][0] == []


def test_a_users_error_in_a_stage_stays_one(found):
    assert [rank["refused"] for rank in found] == [
        "GLM takes no pixels; its inputs are tokens, position_ids, context_length, document_ids, num_documents"
    ] * 2


def test_a_loss_that_is_not_finite_makes_the_norm_of_all_stages_so(found):
    assert [math.isfinite(rank["not finite"]) for rank in found] == [False, False]


def test_frozen_parameters_get_no_gradient(found):
    assert [rank["untrained"] for rank in found] == [[], ["final_norm.weight", "final_norm.bias"]]


def test_evaluation_is_in_the_models_own_mode(found):
    assert [rank["evaluated in training mode"] for rank in found] == [[False, True]] * 2


def shared_sums() -> list[list[float]]:
    rank = dist.get_rank()
    shared = [(nn.Parameter(torch.zeros(2)), ranks) for ranks in ((0, 1, 2), (1, 2)) if rank in ranks]
    for parameter, _ in shared:
        parameter.grad = torch.tensor([10.0**rank, rank])
    sum_shared_gradients(shared, rank, dist.group.WORLD)
    return [parameter.grad.tolist() for parameter, _ in shared]


def test_all_ranks_that_hold_a_parameter_get_the_sum_of_its_gradients():
    of_all, of_two = [111.0, 3.0], [110.0, 3.0]
    assert run_ranks(shared_sums, 3) == [[of_all], [of_all, of_two], [of_all, of_two]]
