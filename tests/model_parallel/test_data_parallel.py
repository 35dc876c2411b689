"""Data parallel computes what one process computes on the same global batch, and sends what the papers say."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor

from ftk.config.options import mistakes
from ftk.criterions.cross_entropy import CrossEntropy, CrossEntropyConfig
from ftk.model_parallel import fully_sharded
from ftk.model_parallel.config import EngineConfig, ParallelConfig
from ftk.model_parallel.gradients import gradient_sync
from ftk.model_parallel.parallelize import parallelize_training
from ftk.model_parallel.step_module import StepModule
from ftk.model_parallel.world import World, make_world, resolve_sizes
from ftk.planner.communication import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from tests.distributed import run_ranks
from tests.held import Held
from tests.model_parallel.count_messages import CountMessages
from tests.model_parallel.small_steps import (
    MICRO_BATCHES,
    largest_difference,
    micro_batches,
    relative_difference,
    small_glm,
    train,
    whole,
    write_reference,
)
from tests.tiers import slow_but, wants_slow

NUM_PARAMETERS = 31_776
COPIES = {"data_parallel_replicate_size": 2}
SHARES = {"data_parallel_shard_size": 2}

EXACT: dict[int, dict[str, dict[str, Any]]] = {
    1: {"offload": {"cpu_offload": True}, "stage 1, offload": {"cpu_offload": True, "zero_stage": 1}},
    2: {
        "copies": {},
        "copies, offload": {"cpu_offload": True},
        "stage 3": SHARES,
        "stage 3, offload": {**SHARES, "cpu_offload": True},
        "stage 3, all ahead": {**SHARES, "prefetch_blocks": 3},
        "stage 2": {**SHARES, "zero_stage": 2},
        "stage 1": {**SHARES, "zero_stage": 1},
        "stage 1, offload, nothing ahead": {**SHARES, "zero_stage": 1, "cpu_offload": True, "prefetch_blocks": 0},
    },
    4: {
        "copies": {},
        "stage 3": {"data_parallel_shard_size": 4},
        "stage 2": {"data_parallel_shard_size": 4, "zero_stage": 2},
        "stage 1": {"data_parallel_shard_size": 4, "zero_stage": 1},
        "copies of shares, stage 3": {**SHARES, **COPIES},
        "copies of shares, stage 2": {**SHARES, **COPIES, "zero_stage": 2},
        "copies of shares, stage 1": {**SHARES, **COPIES, "zero_stage": 1},
    },
}
EACH_EXACT = [(size, name) for size, cases in EXACT.items() for name in cases]
# Before each commit: each stage, with and without what changes its messages.
QUICK = [(1, "stage 1, offload"), (2, "copies"), (2, "stage 3, offload"), (2, "stage 2")]
QUICK += [(2, "stage 1, offload, nothing ahead")]
EACH_EXACT = slow_but(QUICK, EACH_EXACT)
# torch has linear_cross_entropy from 2.13 on; what is said before that, tests/criterions asks.
LOSS_FORMS = ["chunked", "linear"] if hasattr(torch.nn, "LinearCrossEntropyOptions") else ["chunked"]


def world_of(options: dict[str, Any], size: int) -> tuple[World, ParallelConfig]:
    config = ParallelConfig(**options)
    assert mistakes(config) == []
    return make_world(resolve_sizes(config, size), "cpu"), config


def run_exact(folder: str, size: int, names: list[str]) -> dict[str, Any]:
    results = {}
    for name in names:
        options = EXACT[size][name]
        world, config = world_of(options, size)
        counter = CountMessages()
        with mock.patch.object(fully_sharded, "fully_shard", wraps=fully_sharded.fully_shard) as sharding:
            losses, gradients, module = train(world, config, on_meta=True, counter=counter)
        results[name] = {
            # On a CPU nothing else shows it.
            "offloads": [isinstance(call.kwargs["offload_policy"], CPUOffloadPolicy) for call in sharding.mock_calls],
            "losses": losses,
            "difference": largest_difference(gradients, folder),
            "bytes": counter.total_bytes(),
            "held": held_numbers(module),
            "equal": starts_equal(*world_of(options, size)),
        }
    return results


def starts_equal(world: World, config: ParallelConfig) -> bool:
    """Whether a model that was built on the meta device has the very values of one built on one process."""
    expected = dict(small_glm().named_parameters())
    _, _, module = train(world, config, num_updates=0, on_meta=True)
    return all(torch.equal(whole(value), expected[name]) for name, value in module.model.named_parameters())


def held_numbers(module: nn.Module) -> int:
    """Numbers of the parameters that this process holds between updates."""
    parameters = [p.to_local() if isinstance(p, DTensor) else p for p in module.parameters()]
    return sum(parameter.numel() for parameter in parameters)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reference")
    return str(folder), write_reference(folder)


@pytest.fixture(scope="module")
def results(reference, request):
    wanted = [(size, name) for size, cases in EXACT.items() for name in cases] if wants_slow(request) else QUICK
    names = {size: [name for of, name in wanted if of == size] for size, _ in wanted}
    return {size: run_ranks(run, size, reference[0], size, own) for size, own in names.items()}


def run(folder: str, size: int, names: list[str]) -> dict[str, Any]:
    return {"exact": run_exact(folder, size, names), "further": run_further(folder) if size == 2 else {}}


@pytest.fixture
def exact(results):
    return {size: [result["exact"] for result in ranks] for size, ranks in results.items()}


@pytest.fixture
def further(results):
    return results[2][0]["further"]


@pytest.mark.parametrize(("size", "name"), EACH_EXACT)
def test_ten_losses_and_the_first_gradients_are_those_of_one_process(exact, reference, size, name):
    for result in exact[size]:
        assert result[name]["losses"] == pytest.approx(reference[1]["fp32"], rel=1e-5)
        assert result[name]["difference"] < 1e-5, name
        offloads = set(result[name]["offloads"])
        assert offloads == {True} if "offload" in name else True not in offloads


@pytest.mark.parametrize(("size", "name"), EACH_EXACT)
def test_initial_values_are_the_same_for_every_number_of_processes(exact, size, name):
    assert all(result[name]["equal"] for result in exact[size])


@pytest.mark.parametrize(("size", "name"), EACH_EXACT)
def test_shares_are_all_that_is_held_between_updates(exact, size, name):
    shard = EXACT[size][name].get("data_parallel_shard_size", 1)
    held = [result[name]["held"] for result in exact[size]]
    assert sum(held) == NUM_PARAMETERS * size // shard
    assert max(held) < 1.03 * NUM_PARAMETERS / shard  # the vocabulary of 131 is uneven


@pytest.mark.parametrize(("size", "name"), EACH_EXACT)
def test_what_is_sent_is_the_volume_of_the_papers(exact, size, name):
    """Bytes of an update's collectives are multiples of the parameters Psi (Rajbhandari et al. 2020, section 7).

    With m micro-batches a process: copies sum Psi once; stage 1 gathers and scatters Psi once; stage 2 scatters m
    times; stage 3 scatters m times and gathers twice a micro-batch, what is in no block once. Copies of shares sum
    their share of the gradients once.
    """
    options = EXACT[size][name]
    shard = options.get("data_parallel_shard_size", 1)
    m = MICRO_BATCHES // size
    blocks, rest = padded_bytes(shard)
    if size == 1:
        expected = {}
    elif shard == 1:
        expected = {ALL_REDUCE: blocks + rest}
    else:
        gathered = {1: blocks + rest, 2: blocks + rest, 3: m * (2 * blocks + rest)}[options.get("zero_stage", 3)]
        scattered = (blocks + rest) * (1 if options.get("zero_stage") == 1 else m)
        expected = {ALL_GATHER: gathered, REDUCE_SCATTER: scattered}
        if shard < size:
            expected[ALL_REDUCE] = (blocks + rest) // shard
    for result in exact[size]:
        assert result[name]["bytes"] == expected


def padded_bytes(shard: int) -> tuple[int, int]:
    """Of the blocks and of the rest, each parameter's first dimension filled up to a multiple of `shard`."""
    blocks = rest = 0
    for name, parameter in small_glm().named_parameters():
        rows = math.ceil(len(parameter) / shard) * shard
        size = 4 * rows * parameter[0].numel()
        blocks, rest = (blocks + size, rest) if name.startswith("layers.") else (blocks, rest + size)
    return blocks, rest


def test_nothing_is_filled_up_where_one_process_holds_all():
    assert sum(padded_bytes(1)) == 4 * NUM_PARAMETERS


# -- what need not be exact, and what must not happen ----------------------------------------------------------------


def run_further(folder: str) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, options, precision in (
        ("copies", {}, "bf16"),
        ("stage 3", SHARES, "bf16"),
        ("bf16 gathered", {**SHARES, "weights": "bf16"}, "fp32"),
        ("bf16, bf16 gathered", {**SHARES, "weights": "bf16"}, "bf16"),
        ("bf16 summed", {**SHARES, "reduce_dtype": "bf16"}, "fp32"),
        ("bf16 compressed", {"gradient_compression": "bf16"}, "fp32"),
    ):
        world, config = world_of(options, 2)
        counter = CountMessages()
        losses, gradients, _ = train(world, config, precision=precision, counter=counter, num_updates=3)
        results[name] = {
            "losses": losses,
            "bytes": counter.total_bytes(),
            "difference": largest_difference(gradients, folder),
        }
    for mode in ("full", "selective"):
        world, config = world_of(SHARES, 2)
        engine = EngineConfig(activation_checkpointing=mode)
        results[mode] = train(world, config, engine=engine, num_updates=3)[0]
    for form in LOSS_FORMS:
        world, config = world_of(SHARES, 2)
        results[form] = train(world, config, loss_form=form, num_updates=3)[0]
    results["types"] = types_under_autocast()
    results["stale"] = [loss_after_a_change(stage) for stage in (1, 2, 3)]
    results["frozen"] = frozen_is_left_alone()
    results["peak"] = [peak_bytes(on_meta) for on_meta in (True, False)]
    return results


def types_under_autocast() -> dict[str, list[str]]:
    """Where blocks are gathered in bf16 and called under autocast, the types of what goes through the model."""
    world, config = world_of({**SHARES, "weights": "bf16"}, 2)
    _, _, module = train(world, config, num_updates=0, precision="bf16")
    model = module.model
    types: dict[str, list[str]] = {"hidden": [], "block": [], "rest": []}

    def note(part: nn.Module, arguments: Any, output: Tensor) -> None:
        types["hidden"].append(str(output.dtype))

    def note_weights(part: nn.Module, arguments: Any, output: Tensor) -> None:
        types["block" if part is not model.final_norm else "rest"].append(str(part.weight.dtype))

    for layer in model.layers:
        layer.register_forward_hook(note)
        layer.attention_norm.register_forward_hook(note_weights)
    model.final_norm.register_forward_hook(note)
    model.final_norm.register_forward_hook(note_weights)
    with torch.autocast("cpu", torch.bfloat16):
        module(micro_batches(0)[0]).loss.backward()
    types["gradients"] = sorted({str(parameter.grad.dtype) for parameter in model.parameters()})
    return types


def loss_after_a_change(stage: int) -> list[float]:
    """A forward pass without gradients, a change of all parameters, and another one."""
    world, config = world_of({**SHARES, "zero_stage": stage}, 2)
    _, _, module = train(world, config, num_updates=1)
    batch = micro_batches(0)[0]
    found = []
    for _ in range(2):
        with torch.no_grad():
            output = module(batch)
            found.append((output.loss / output.num_targets).item())
            for parameter in module.parameters():
                assert isinstance(parameter, DTensor)
                parameter.zero_()
    return found


def frozen_is_left_alone() -> list[float]:
    """Of the first gradients with frozen position embeddings, the largest difference from those of one process."""
    worst = []
    for options in ({}, SHARES):
        made = []
        for world, config in (world_of(options, 2), (World.single(), ParallelConfig())):
            model = small_glm()
            model.position_embedding.requires_grad_(False)
            module = StepModule(model, CrossEntropy(CrossEntropyConfig()))
            called = parallelize_training(module, world, config, EngineConfig()).module
            own = micro_batches(0)[world.data_rank :: world.sizes.data]
            for place, batch in enumerate(own, start=1):
                with gradient_sync(called, enabled=place == len(own)):
                    called(batch).loss.backward()
            grads = {name: parameter.grad for name, parameter in model.named_parameters()}
            assert all((grads[name] is None) == ("position" in name) for name in grads)
            made.append({name: whole(grad) for name, grad in grads.items() if grad is not None})
        worst.append(relative_difference(*made))
    return worst


def peak_bytes(on_meta: bool) -> int:
    """The most that is allocated while a model is built and shared out."""
    world, config = world_of(SHARES, 2)
    with Held() as counted:
        train(world, config, num_updates=0, on_meta=on_meta)
    return counted.peak


@pytest.mark.parametrize("name", ["copies", "stage 3", "bf16, bf16 gathered"])
def test_bf16_is_as_near_as_bf16_sums_allow(further, reference, name):
    assert further[name]["losses"] == pytest.approx(reference[1]["bf16"][:3], rel=1e-3)
    assert further[name]["losses"] != pytest.approx(reference[1]["fp32"][:3], rel=1e-6)


@pytest.mark.parametrize(
    ("name", "gathered", "summed", "limit"),
    [("bf16 gathered", 2, 4, 3e-2), ("bf16 summed", 4, 2, 1e-2), ("bf16 compressed", None, 2, 1e-2)],
)
def test_half_the_bytes_cost_little_exactness(further, reference, name, gathered, summed, limit):
    found = further[name]
    assert found["losses"] == pytest.approx(reference[1]["fp32"][:3], rel=1e-3)
    assert 1e-4 < found["difference"] < limit
    blocks, rest = padded_bytes(2)
    m = MICRO_BATCHES // 2
    if gathered is None:
        assert found["bytes"] == {ALL_REDUCE: 2 * NUM_PARAMETERS}
    else:
        assert found["bytes"][ALL_GATHER] == m * (2 * blocks + rest) * gathered // 4
        assert found["bytes"][REDUCE_SCATTER] == m * (blocks + rest) * summed // 4


def test_under_autocast_hidden_states_stay_float32_whatever_blocks_are_gathered_in(further):
    types = further["types"]
    assert types["hidden"] == ["torch.float32"] * 3
    assert types["block"] == ["torch.bfloat16"] * 2
    assert types["rest"] == types["gradients"] == ["torch.float32"]
    blocks, rest = padded_bytes(2)
    sent = further["bf16, bf16 gathered"]["bytes"]
    assert sent[ALL_GATHER] == MICRO_BATCHES // 2 * (2 * blocks // 2 + rest)


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_checkpointed_blocks_are_shared_out_too(further, reference, mode):
    assert further[mode] == pytest.approx(reference[1]["fp32"][:3], rel=1e-5)


@pytest.mark.parametrize("form", LOSS_FORMS)
def test_losses_that_read_the_output_matrix_find_it_whole(further, reference, form):
    assert further[form] == pytest.approx(reference[1]["fp32"][:3], rel=1e-5)


def test_a_change_of_the_shares_is_seen_by_the_next_forward_pass(further):
    for before, after in further["stale"]:
        assert before != pytest.approx(math.log(131), rel=1e-4)
        assert after == pytest.approx(math.log(131), rel=1e-6)  # all parameters zero: every token as likely


def test_frozen_parameters_stay_so(further):
    assert max(further["frozen"]) < 1e-5


def test_no_process_ever_holds_the_whole_model(further):
    from_meta, from_values = further["peak"]
    largest = 4 * max(parameter.numel() for parameter in small_glm().parameters())
    assert from_meta < 4 * NUM_PARAMETERS * 0.55 + 2 * largest < 4 * NUM_PARAMETERS
    assert from_values > 4 * NUM_PARAMETERS  # the counter sees it


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"zero_stage": 2}, "zero_stage 2 shards over processes; give `data_parallel_shard_size` too"),
        ({"zero_stage": 4}, "it must be one of 1, 2, 3"),
        ({"prefetch_blocks": -1}, "prefetch_blocks is -1"),
        ({"gradient_compression": "bf16", **SHARES}, "replicas of the whole model alone"),
        ({"gradient_compression": "bf16", "cpu_offload": True}, "replicas of the whole model alone"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options, message):
    [found] = mistakes(ParallelConfig(**options))
    assert message in found
