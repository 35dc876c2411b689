"""Single facts of pipelines of real processes; `tests/trainer/test_parallel_training.py` trains with each schedule."""

from __future__ import annotations

import math
from dataclasses import replace
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
from ftk.model_parallel.world import make_world, resolve_sizes
from tests.distributed import run_ranks
from tests.model_parallel import pipeline_steps as steps
from tests.model_parallel.small_steps import whole


def facts() -> dict[str, Any]:
    parallel = ParallelConfig(pipeline_parallel_size=2)
    world = make_world(resolve_sizes(parallel, dist.get_world_size()), "cpu")

    def built(precision: str = "fp32", loss_of: Any = None, model_options: Any = None, **options: Any) -> Any:
        with torch.device("meta"):
            model = steps.five_layers(**(model_options or {}))
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
        "first update": first_update(built(pipeline_layers=[1, 4]), world),
        "bf16": update(built("bf16")),
        "refused": refusal(lambda: built().forward_backward([strange_batch()], torch.tensor(0.01))),
        "not finite": update(built(loss_of=Infinite(CrossEntropyConfig())))[1],
        "untrained": update_frozen(built(), world),
        "evaluated in training mode": mode_after_evaluation(built()),
    }


def first_update(runner: Any, world: Any) -> dict[str, Any]:
    """Beside one process: its loss, how far gradients are from its own, and whether tied copies stay equal."""
    model, batches = steps.five_layers(), steps.varied_batches(0)
    outputs = [steps.criterion()(model, batch) for batch in batches]
    count = sum(len(batch.targets) for batch in batches)
    sum(output.loss / count for output in outputs).backward()
    runner.forward_backward(batches, torch.tensor(1.0 / count))
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    least = 1e-3 * max(float(gradient.abs().max()) for gradient in expected.values())
    own = dict(runner.part.model.named_parameters())
    errors = {
        name: float((whole(parameter.grad) - expected[name]).abs().max() / expected[name].abs().max().clamp_min(least))
        for name, parameter in own.items()
    }
    torch.optim.AdamW(own.values(), lr=1e-2, weight_decay=0.1).step()
    tied = world.gather_json(whole(own["token_embedding.weight"]).tolist())
    return {
        "loss": float(sum(output.loss for output in outputs)) / count,
        "errors": errors,
        "tied": [copy == tied[0] for copy in tied],
        "moved": tied[0] != model.token_embedding.weight.tolist(),
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


def test_gradients_of_each_parameter_are_those_of_one_process_and_tied_copies_stay_equal(found):
    updates = [rank["first update"] for rank in found]
    assert (
        len(updates[0]["errors"]) + len(updates[1]["errors"]) == len(dict(steps.five_layers().named_parameters())) + 1
    )
    for update in updates:
        assert max(update["errors"].values()) < 1e-5, update["errors"]
        assert (update["tied"], update["moved"]) == ([True, True], True)


def test_bf16_is_near_fp32_and_not_equal(found):
    (loss, count), _ = found[1]["bf16"]
    expected = found[1]["first update"]["loss"]
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
