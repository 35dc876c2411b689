"""Tensor and sequence parallel GLM on real processes: losses, gradients and messages are those that they should be."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ftk.criterions.cross_entropy import CrossEntropy, CrossEntropyConfig
from ftk.errors import UserError
from ftk.generation.engine.decoder import CachedDecoder
from ftk.generation.engine.request import Frame
from ftk.model_parallel.activation_checkpointing import checkpoint_blocks
from ftk.model_parallel.gradients import GlobalGradients
from ftk.model_parallel.tensor_parallel.apply import apply_plan, sum_sequence_gradients, whole_state_dict
from ftk.model_parallel.world import Sizes, World, make_world
from ftk.models.glm.model import GLM
from ftk.modules import few_rows, few_rows_layer
from tests.distributed import run_ranks
from tests.held import kept_bytes
from tests.model_parallel.small_steps import relative_difference
from tests.model_parallel.tensor_models import (
    LAYERS,
    SEQUENCE,
    VOCAB,
    batch_of,
    gradients,
    loss_of,
    parallel,
    shape,
    whole,
)


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    """What two processes found; they are started once, which takes longer than what they do."""
    return run_ranks(find_all, 2)


def find_all() -> dict[str, Any]:
    inputs = batch_of(0, 32).inputs
    of_one_document = {name: inputs[name] for name in ("tokens", "position_ids", "context_length")}
    return {
        "compare": compare(),
        "ways": ways(),
        "dropped": dropped(),
        "compiled": compiled(),
        "kept": {str(sequence): kept_bytes(parallel(sequence), **of_one_document) for sequence in SEQUENCE},
        "frozen": frozen(),
        "whole vocabulary": whole_vocabulary(),
        "generation": generation(),
        "refused": refuse(),
    }


# -- exactness ------------------------------------------------------------------------------------------------


def first_update(model: GLM, **options: Any) -> tuple[float, dict[str, Tensor], float]:
    """Loss, gradients and norm of two micro-batches of different lengths: what is remembered of one fits no other."""
    total = 0.0
    for micro in range(2):
        loss = loss_of(model, batch_of(micro, 31 - micro), **options) / 2
        loss.backward()
        total += loss.item()
    sum_sequence_gradients(model)
    # Which processes share a gradient is read from the gradient; the world would only add the stages of a pipeline.
    norm = GlobalGradients(model, model.parameters(), World.single()).norm()
    return total, gradients(model), norm.item()


CASES: dict[str, dict[str, Any]] = {
    "plain": {"loss_form": "plain"},
    "chunked, smoothed": {"loss_form": "chunked", "loss_chunk_tokens": 8, "label_smoothing": 0.1},
}


def compare() -> dict[str, Any]:
    results: dict[str, Any] = {}
    for case, options in CASES.items():
        expected = first_update(GLM(shape(), seed=1), **options)
        for sequence in SEQUENCE:
            loss, found, norm = first_update(parallel(sequence), **options)
            results[f"{case}, sequence {sequence}"] = {
                "loss": abs(loss - expected[0]) / expected[0],
                "gradient": relative_difference(found, expected[1]),
                "norm": abs(norm - expected[2]) / expected[2],
            }
    # The same values in validation and generation, where sequences are not shared.
    one, batch = GLM(shape(), seed=1), batch_of(0)
    inputs = batch.inputs
    for sequence in SEQUENCE:
        model = parallel(sequence)
        with torch.no_grad():
            results[f"logits, sequence {sequence}"] = (model(**inputs) - one(**inputs)).abs().max().item()
        state = whole_state_dict(model)
        results[f"state, sequence {sequence}"] = relative_difference(state, dict(one.state_dict()))
    results["local rows"] = model.token_embedding.weight.to_local().size(0)
    return results


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_losses_and_gradients_are_those_of_one_process(size: int, two: list[dict[str, Any]]) -> None:
    """Uneven vocabulary and lengths, documents kept apart; runs of ten updates are in test_parallel_training.py."""
    found = run_ranks(compare, size) if size > 2 else [results["compare"] for results in two]
    for rank, results in enumerate(found):
        assert results.pop("local rows") == min(-(-VOCAB // size), VOCAB - rank * -(-VOCAB // size))
        for name, result in results.items():
            if isinstance(result, float):
                assert result < (1e-7 if name.startswith("state") else 5e-6), (name, result)
                continue
            assert max(result.values()) < 1e-5, (name, result)


# -- precision, memory, random numbers, compilation -----------------------------------------------------------


def ways() -> dict[str, Any]:
    results: dict[str, Any] = {}
    batch = batch_of(0)
    reference = GLM(shape(), seed=1)
    loss_of(reference, batch).backward()
    exact = gradients(reference)
    for sequence in SEQUENCE:
        errors = {}
        for name, model in ("one", GLM(shape(), seed=1)), ("parallel", parallel(sequence)):
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(model, batch, label_smoothing=0.0)
            loss.backward()
            sum_sequence_gradients(model)
            assert all(value.dtype == torch.float32 for value in gradients(model).values())
            errors[name] = relative_difference(gradients(model), exact)
        results[f"bf16, sequence {sequence}"] = errors

        # With dropout: what is computed again draws the same numbers, and whatever is drawn, a seed gives it again.
        found = {}
        for mode in ("none", "selective", "full"):
            model = parallel(sequence, dropout=0.3)
            checkpoint_blocks(model, mode)
            torch.manual_seed(5)
            loss = loss_of(model, batch)
            loss.backward()
            sum_sequence_gradients(model)
            found[mode] = loss.item(), gradients(model), torch.rand(()).item()
        results[f"checkpointing, sequence {sequence}"] = {
            mode: [
                abs(found[mode][0] - found["none"][0]),
                relative_difference(found[mode][1], found["none"][1]),
                abs(found[mode][2] - found["none"][2]),
            ]
            for mode in ("selective", "full")
        }
        results[f"next number, sequence {sequence}"] = found["none"][2]
        results[f"loss, sequence {sequence}"] = found["none"][0]
        results[f"gradient sums, sequence {sequence}"] = [
            whole(p.grad).double().sum().item() for p in model.parameters() if p.grad is not None
        ]
    return results


def test_bf16_checkpointing_and_dropout(two: list[dict[str, Any]]) -> None:
    ranks = [results["ways"] for results in two]
    for results in ranks:
        for sequence in SEQUENCE:
            errors = results[f"bf16, sequence {sequence}"]
            assert errors["parallel"] < 2.0 * errors["one"], errors  # rounded sums of two rounded halves
            for mode, differences in results[f"checkpointing, sequence {sequence}"].items():
                assert differences == [0.0, 0.0, 0.0], (mode, sequence)
    for sequence in SEQUENCE:
        # The processes agree in the loss, in the gradients of what is whole, and in where the common stream stands.
        for name in ("loss", "gradient sums", "next number"):
            key = f"{name}, sequence {sequence}"
            assert ranks[0][key] == ranks[1][key], key


def dropped() -> dict[str, Any]:
    """Which places dropout hits where, seen from the outside."""
    results: dict[str, Any] = {}
    for sequence in SEQUENCE:
        model = parallel(sequence, dropout=0.5)
        seen: dict[str, Tensor] = {}
        model.embedding_dropout.register_forward_hook(lambda *call, seen=seen: seen.update(embedding=call[2]))
        model.layers[0].dropout.register_forward_hook(lambda *call, seen=seen: seen.update(residual=call[2]))
        attend = model.attend

        def recording(tokens: Tensor, attend: Any = attend, seen: dict[str, Tensor] = seen, **inputs: Any) -> Any:
            inner = attend(tokens, **inputs)

            def wrapped(query: Tensor, key: Tensor, values: Tensor) -> Tensor:
                ones = torch.ones_like(values)
                seen["attention"] = inner(torch.zeros_like(query), torch.zeros_like(key), ones)
                return inner(query, key, values)

            return wrapped

        model.attend = recording  # type: ignore[method-assign]
        sums = []
        for _ in range(2):
            torch.manual_seed(3)
            loss_of(model, batch_of(0, 32))
            sums.append({name: output.detach().eq(0).double().flatten().tolist() for name, output in seen.items()})
            sums[-1]["attention"] = seen["attention"].detach().double().flatten().tolist()
        assert sums[0] == sums[1]  # one seed, one result
        results[str(sequence)] = sums[0]
    return results


def test_dropout_is_equal_where_values_are_whole_and_differs_where_they_are_shared(two: list[dict[str, Any]]) -> None:
    one, other = (results["dropped"] for results in two)
    for name in ("embedding", "residual", "attention"):
        assert (one["False"][name] == other["False"][name]) == (name != "attention")
        assert one["True"][name] != other["True"][name]
        assert len(one["True"][name]) == len(one["False"][name]) // (1 if name == "attention" else 2)
    for places in one["False"]["embedding"], one["True"]["residual"]:
        assert 0.4 < sum(places) / len(places) < 0.6


def compiled() -> dict[str, Any]:
    differences = []
    # Shared sequences are refused with --compile before torch 2.13 (test_engine).
    for sequence in SEQUENCE if torch.__version__ >= "2.13" else (False,):
        found = []
        for compiles in (False, True):
            model = parallel(sequence)
            for block in model.layers[:1] if compiles else []:  # a graph takes a second, and the others are like it
                # Everything but the C++ compiler, which takes a minute; one graph a block, nothing is left out of it.
                block.compile(backend="aot_eager", fullgraph=True)
            loss = loss_of(model, batch_of(0, 32))
            loss.backward()
            sum_sequence_gradients(model)
            found.append((loss.item(), gradients(model)))
        differences += [abs(found[0][0] - found[1][0]), relative_difference(found[1][1], found[0][1])]
    model = parallel(False, dropout=0.3)  # a switch of random streams is no graph
    model.layers[0].compile(backend="aot_eager")
    losses = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        losses.append(loss_of(model, batch_of(0, 32)).item())
    return {"differences": differences, "losses": losses}


def test_compiled_blocks_equal_eager_ones(two: list[dict[str, Any]]) -> None:
    one, other = (results["compiled"] for results in two)
    assert max(one["differences"] + other["differences"]) < 1e-5
    assert one["losses"] == other["losses"]  # with dropout
    assert one["losses"][0] == one["losses"][1] != one["losses"][2]


# -- what else is done with models ----------------------------------------------------------------------------


def test_shared_sequences_keep_less(two: list[dict[str, Any]]) -> None:
    for results in two:
        # Norms' inputs and outputs are parts; what the column layers read is whole, unless it is gathered again
        # (selective checkpointing, see below).
        assert results["kept"]["True"] < 0.9 * results["kept"]["False"]


def frozen() -> list[Any]:
    """Frozen norms, embeddings and output layer; a deep copy is a model of its own on the same processes."""
    results: list[Any] = []
    expected: dict[str, Tensor] = {}
    for model in GLM(shape(), seed=1), parallel(False), copy.deepcopy(parallel(True)):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("feed_forward." in name or "attention.qkv" in name)
        loss_of(model, batch_of(0), loss_form="chunked").backward()
        sum_sequence_gradients(model)
        found = {name: whole(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}
        expected = expected or found
        results.append([len(found), relative_difference(found, expected)])
    return results


def test_frozen_parameters_and_copies(two: list[dict[str, Any]]) -> None:
    for results in two:
        assert [count for count, _ in results["frozen"]] == [6 * LAYERS] * 3
        assert max(error for _, error in results["frozen"]) < 1e-5


def whole_vocabulary() -> list[float]:
    """A plan that leaves the tied embedding whole, which is told nothing of it."""
    one, model = GLM(shape(), seed=1), GLM(shape(), seed=1)
    mesh = make_world(Sizes(tensor=2), "cpu").mesh
    assert mesh is not None
    plan = {name: style for name, style in model.tensor_parallel_plan.items() if name != "token_embedding"}
    apply_plan(model, plan, mesh["tensor"])
    results = []
    for form in ("plain", "chunked"):
        for each in (one, model):
            each.zero_grad(set_to_none=True)
            loss_of(each, batch_of(0), loss_form=form).backward()
        results.append(relative_difference(gradients(model), gradients(one)))
    return results


def test_the_vocabulary_may_stay_whole(two: list[dict[str, Any]]) -> None:
    for results in two:
        assert max(results["whole vocabulary"]) < 1e-5


def frame(tokens: list[int]) -> Frame:
    """A context of these tokens."""
    positions = np.stack((np.arange(len(tokens)), np.zeros(len(tokens), np.int64)))
    return Frame(tokens, {"position_ids": positions}, {"position_ids": np.array((0, 1))}, len(tokens))


def generation() -> dict[str, Any]:
    """Prompts, then tokens one by one through the cache, as ftk-generate does; which kernel multiplies is counted."""
    taken: list[bool] = []
    original = few_rows._has_few_rows
    logits, one = [], GLM(shape(), seed=1).eval()
    few_rows_layer.prepare(one)
    for model in one, parallel(True, prepared=True).eval():
        taken.clear()
        few_rows._has_few_rows = lambda *inputs: taken.append(original(*inputs)) or taken[-1]  # type: ignore[assignment]
        try:
            with torch.inference_mode():
                decoder = CachedDecoder(model, 2, 1, 16, 8)
                found = [decoder.read([0, 1], [frame([1, 2, 3, 4, 5]), frame([7, 8, 9])])]
                for _ in range(4):
                    found.append(decoder.step(found[-1].view(2, 1, -1).argmax(-1)))
        finally:
            few_rows._has_few_rows = original
        logits.append([value.flatten() for value in found])
    return {
        "difference": max((a - b).abs().max().item() for a, b in zip(*logits, strict=True)),
        "fast": [sum(taken), len(taken)],
    }


def test_cached_generation_equals_one_process_by_the_same_kernels(two: list[dict[str, Any]]) -> None:
    for results in two:
        assert results["generation"]["difference"] < 5e-6
        fast, count = results["generation"]["fast"]
        assert fast == count == 5 * (4 * LAYERS + 1)


# -- refusals -------------------------------------------------------------------------------------------------


def refuse() -> str:
    linear = CrossEntropyConfig(loss_form="linear")
    with pytest.raises(UserError) as raised:
        CrossEntropy(linear)(parallel(False), batch_of(0))
    return str(raised.value)


def test_a_loss_that_needs_the_whole_vocabulary_is_refused(two: list[dict[str, Any]]) -> None:
    for results in two:
        assert results["refused"].startswith("`loss_form` linear needs the whole vocabulary on each process")
