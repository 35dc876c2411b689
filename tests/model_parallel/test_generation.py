"""Generation and scoring over processes that share a model: what one process finds."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import ftk
from ftk.batch import Batch
from ftk.criterions.cross_entropy import CrossEntropy, CrossEntropyConfig
from ftk.errors import UserError
from ftk.model_parallel.world import Sizes, World, make_world
from ftk.models import build_model
from ftk.tasks.glm_blank import BlankGenerator
from tests.distributed import run_ranks
from tests.generation.slow import SPECIAL, small_model
from tests.small_run import save_model
from tests.tasks.glm_blank.infill.test_orders import CONTEXTS

STRATEGIES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beam": {"beam": 3, "nbest": 2, "alternatives": 2},
    "sampling": {"sampling": True, "top_p": 0.9, "seed": 5},
    "in flight": {"batch_size": 2, "min_len": 1},
    "written back": {"reencode": True, "blank_order": "confident"},
}
TENSOR = {"tensor": Sizes(tensor=2), "pipeline": Sizes(pipeline=2)}
BOTH = {"both": Sizes(pipeline=2, tensor=2)}
TWO_STACKS = Batch(
    {"tokens": torch.arange(14).view(2, 7), "decoder_tokens": torch.arange(10).view(2, 5)},
    targets=torch.tensor([3, 4, 5]),
    places=torch.tensor([1, 4, 8]),
)
ON_FOUR = ("greedy", "beam", "sampling")  # four processes on two cores take their time


def answers_of(folder: str, world: World) -> dict[str, Any]:
    """Answers under every strategy, and scores of given ones, as JSON."""
    model = ftk.load_model(folder, world=world)
    found: dict[str, Any] = {"parameters": sum(p.to_local().numel() if hasattr(p, "to_local") else p.numel()
                                               for p in model.parameters())}  # fmt: skip
    for name, options in STRATEGIES.items():
        if world.size == 4 and name not in ON_FOUR:
            continue
        filled = BlankGenerator(model, SPECIAL, max_len=6, **options).fill_ids(CONTEXTS)
        found[name] = [[dataclasses.asdict(answer) for answer in answers] for answers in filled]
    given = [[[[7, 8], [9, 2], [10]]]]
    scored = BlankGenerator(model, SPECIAL, max_len=6).score(CONTEXTS[:1], given)
    found["scores"] = [[[dataclasses.asdict(answer) for answer in answers] for answers in own] for own in scored]
    return json.loads(json.dumps(found))


def on_rank(folder: str, sizes: dict[str, list[int]]) -> dict[str, Any]:
    return {name: answers_of(folder, make_world(Sizes(*numbers), "cpu")) for name, numbers in sizes.items()}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    model = small_model(seed=1, vocab_size=22, num_layers=4, num_attention_heads=4)  # 22 rows: uneven on 4
    return save_model(tmp_path_factory.mktemp("generation") / "checkpoint_1", model)


def assert_same(found: Any, wanted: Any, path: str = "") -> None:
    """Tokens equal, numbers within rounding."""
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys(), path
        for key in wanted:
            assert_same(found[key], wanted[key], f"{path}.{key}")
    elif isinstance(wanted, list):
        assert len(found) == len(wanted), path
        for index, (one, other) in enumerate(zip(found, wanted, strict=True)):
            assert_same(one, other, f"{path}[{index}]")
    elif isinstance(wanted, float):
        assert found == pytest.approx(wanted, abs=2e-5), path
    else:
        assert found == wanted, path


@pytest.mark.parametrize(("size", "arrangements"), [(2, TENSOR), pytest.param(4, BOTH, marks=pytest.mark.slow)])
def test_every_process_finds_what_one_alone_finds(checkpoint, size, arrangements):
    wanted = answers_of(str(checkpoint), World.single())
    whole = wanted.pop("parameters")
    results = run_ranks(on_rank, size, str(checkpoint), {name: list(sizes) for name, sizes in arrangements.items()})
    for name in arrangements:
        for result in results:
            held = result[name].pop("parameters")
            assert held < 0.75 * whole, f"{name}: {held} of {whole}"  # embeddings and positions are most of it
            expected = {key: value for key, value in wanted.items() if key in result[name]}
            assert_same(result[name], expected)
            assert set(expected) >= {*ON_FOUR, "scores"}
            assert size == 4 or len(expected) == len(wanted)
    assert any(answer["others"] for answers in wanted["beam"] for answer in answers)


def two_stacks_on_rank(folder: str) -> tuple[float | None, str]:
    """The loss of a batch by the last stage, and why the model cannot be called."""
    model: Any = ftk.load_model(folder, world=make_world(Sizes(pipeline=2), "cpu"))
    runner = model.evaluation_runner(CrossEntropy(CrossEntropyConfig()), torch.device("cpu"), "fp32")
    with torch.no_grad():
        output = runner.evaluate(TWO_STACKS)
    with pytest.raises(UserError) as caught:
        model(**TWO_STACKS.inputs)
    return None if output is None else output.loss.item(), str(caught.value)


def test_stages_of_an_encoder_decoder_validate_and_are_not_called(tmp_path):
    torch.manual_seed(1)
    model = build_model("t5", vocab_size=32, num_layers=1, hidden_size=16, num_attention_heads=2, head_dim=8).eval()
    folder = save_model(tmp_path / "checkpoint_1", model)
    expected = CrossEntropy(CrossEntropyConfig())(model, TWO_STACKS).loss.item()
    first, last = run_ranks(two_stacks_on_rank, 2, str(folder))
    assert (first[0], last[0]) == (None, pytest.approx(expected))
    assert first[1] == last[1]
    assert first[1].startswith("an encoder-decoder does not go with a pipeline except in validation; use `tensor_par")


def refusals(folder: str) -> list[str]:
    world = make_world(Sizes(pipeline=2), "cpu")
    said = []
    with pytest.raises(UserError) as caught:
        ftk.load_generator(folder, world=world, lm_path=folder)
    said.append(str(caught.value))
    with pytest.raises(UserError) as caught:
        ftk.load_generator(f"{folder}:{folder}", world=world)
    return [*said, str(caught.value)]


def test_what_a_pipeline_cannot_do_is_refused(checkpoint):
    for said in run_ranks(refusals, 2, str(checkpoint)):
        assert [text.split(" does")[0] for text in said] == [
            "a language model (lm_path)", "an ensemble",
        ]  # fmt: skip
