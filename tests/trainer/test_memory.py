"""Runs of one process whose optimizer is on the host, or whose model computes with weights in bf16."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import DTensor

from ftk.checkpoint import read_config
from ftk.checkpoint.index import read_index
from ftk.config.changes import find_changes
from ftk.model_parallel.config import ParallelConfig
from ftk.model_parallel.gradients import gradient_sync
from ftk.model_parallel.world import open_world
from tests.model_parallel.small_steps import micro_batches, small_glm, train
from tests.records import losses_of
from tests.tiers import slow_but
from tests.trainer.test_glm_runs import glm_trainer
from tests.trainer.toy import assert_same, toy_config

KINDS = {
    "offload": {"parallel__cpu_offload": True, "parallel__zero_stage": 1},
    "bf16": {"parallel__weights": "bf16", "optimizer___name": "lamb", "ema__ema_decay": 0.9},
    "both": {"parallel__cpu_offload": True, "parallel__weights": "bf16", "training__precision": "bf16"},
}


@pytest.fixture(scope="module")
def world():
    with open_world(ParallelConfig(cpu_offload=True), torch.device("cpu")) as world:
        yield world


def same_start(kind):
    """Options of a run that begins with the same numbers, and has everything in fp32."""
    return {name: value for name, value in KINDS[kind].items() if not name.startswith(("parallel", "training"))}


@pytest.mark.parametrize("kind", slow_but(["offload", "bf16"], KINDS))
def test_a_run_resumed_in_mid_epoch_ends_with_the_same_bits_and_goes_on_in_the_plain_form(
    tmp_path, data_bin, world, kind
):
    options = KINDS[kind]
    whole = glm_trainer(data_bin, tmp_path / "whole", world=world, **options)
    whole.train()
    stopped = glm_trainer(data_bin, tmp_path / "run", signal_at=5, world=world, **options)
    assert stopped.train().signal == "SIGTERM"
    assert stopped.state.num_updates == 3
    resumed = glm_trainer(data_bin, tmp_path / "run", world=world, **options)
    resumed.train()
    assert_same(resumed, whole)
    plain = glm_trainer(data_bin, tmp_path / "run", training__max_update=9, **same_start(kind))
    assert plain.run.world.mesh is None
    assert_same(plain, whole)
    plain.train()
    assert plain.state.num_updates == 9


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoints_and_averages_hold_fp32(tmp_path, data_bin, world, kind):
    trainer = glm_trainer(data_bin, tmp_path / "run", world=world, training__max_update=1, **KINDS[kind])
    trainer.train()
    folder = tmp_path / "run" / "checkpoint_last"
    parts = ["model", "optimizer", *(["ema"] if trainer.run.ema else [])]
    for part in parts:
        kept = read_index(folder / part).tensors.values()
        assert {entry.dtype for entry in kept} == {torch.float32}, part
    assert read_config(folder)["parallel"]["weights"] == KINDS[kind].get("parallel__weights", "auto")


def test_an_offloaded_run_has_the_losses_of_a_plain_one(tmp_path, data_bin, world):
    for name, options in ("plain", {}), ("offload", {"world": world, **KINDS["offload"]}):
        glm_trainer(data_bin, tmp_path / name, logging__log_interval=1, **options).train()
    assert losses_of(tmp_path / "offload") == pytest.approx(losses_of(tmp_path / "plain"), rel=1e-6)
    assert losses_of(tmp_path / "offload", "valid") == pytest.approx(losses_of(tmp_path / "plain", "valid"), rel=1e-6)


def test_twenty_updates_with_weights_in_bf16_are_near_to_autocast(tmp_path, data_bin, world):
    same = {"training__max_update": 20, "logging__log_interval": 1, "checkpoint__save": False}
    same |= {"model__dropout": 0.0, "model__attention_dropout": 0.0}
    glm_trainer(data_bin, tmp_path / "autocast", training__precision="bf16", **same).train()
    expected = losses_of(tmp_path / "autocast")
    assert expected[-1] < expected[0] - 0.3
    for precision, type_of_hidden in ("fp32", torch.bfloat16), ("bf16", torch.float32):
        half = {"parallel__weights": "bf16", "training__precision": precision}
        trainer = glm_trainer(data_bin, tmp_path / precision, world=world, **half, **same)
        types: set[tuple[str, torch.dtype]] = set()
        note_types(trainer.run.model.layers[0], types)
        trainer.train()
        assert types == {("weight", torch.bfloat16), ("hidden", type_of_hidden)}
        assert losses_of(tmp_path / precision) == pytest.approx(expected, rel=1e-2)


def note_types(layer, types):
    layer.attention_norm.register_forward_hook(lambda norm, *_: types.add(("weight", norm.weight.dtype)))
    layer.register_forward_hook(lambda layer, given, hidden: types.add(("hidden", hidden.dtype)))


def test_updates_below_the_steps_of_bf16_are_kept(world):
    _, _, module = train(world, ParallelConfig(weights="bf16"), num_updates=0, on_meta=True)
    before = small_glm().state_dict()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    for parameter in module.parameters():
        parameter.grad = torch.full_like(parameter, 1e-5)
    optimizer.step()
    name = "layers.0.attention_norm.weight"
    after = dict(module.model.named_parameters())[name].full_tensor()
    assert torch.equal(after, before[name] - 1e-5)
    assert torch.equal(after.bfloat16(), before[name].bfloat16())


def test_a_configuration_that_says_gather_dtype_is_read(tmp_path):
    old = {"gather_dtype": "bf16", "zero_stage": 3}
    config = toy_config(tmp_path / "run", **{f"parallel__{name}": value for name, value in old.items()})
    assert config.parallel == ParallelConfig(weights="bf16")
    changes = find_changes({"parallel": old}, config)
    assert [change.key for change in changes if change.key.startswith("parallel.")] == []


BLOCKS = {"stage 3": {}, "stage 3, bf16": {"weights": "bf16"}, "stage 1": {"zero_stage": 1}}


@pytest.mark.parametrize("name", BLOCKS)
def test_an_offloaded_model_has_on_its_device_what_it_is_computing_with(world, name):
    """What is gathered lies on the device, DTensors on the host (tests/gpu has it on a GPU)."""
    options = BLOCKS[name]
    _, _, module = train(world, ParallelConfig(cpu_offload=True, **options), num_updates=0, on_meta=True)
    held = []

    def note(*_):
        held.append(gathered_bytes(module))

    for part in module.model.layers.modules():
        part.register_forward_pre_hook(note)
        part.register_full_backward_pre_hook(note)
    batches = micro_batches(0)
    for place, batch in enumerate(batches):
        with gradient_sync(module, enabled=place == len(batches) - 1):
            module(batch).loss.backward()
    size = 2 if options.get("weights") == "bf16" else 4
    block = sum(parameter.numel() for parameter in small_glm().layers[0].parameters())
    all_of_it = sum(parameter.numel() for parameter in small_glm().parameters())
    most = all_of_it if "zero_stage" in options else all_of_it - block  # of two blocks
    assert max(held) == size * most
    assert gathered_bytes(module) == 0
    assert all(parameter.grad.dtype == torch.float32 for parameter in module.parameters())


def gathered_bytes(module):
    return sum(value.numel() * value.element_size() for value in module.parameters() if not isinstance(value, DTensor))
