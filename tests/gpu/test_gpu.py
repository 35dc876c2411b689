"""What a GPU does must be what the CPU does; and the training step must never make the host wait for it."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from step_ways import Way, build_step, make_batches, model_config
from torch import nn

from ftk.model_parallel.config import EngineConfig
from ftk.model_parallel.engine import prepare_process
from ftk.optim.base import step_unless
from ftk.optim.parameter_groups import parameter_groups
from ftk.registry import OPTIMIZERS
from ftk.tasks.glm_blank import BlankGenerator
from tests.generation.slow import SPECIAL, small_model

# Head size 64, as published; flex attention takes 16 or more.
SHAPE = {"num_layers": 2, "hidden_size": 128, "num_attention_heads": 2, "vocab_size": 1024}
CONFIG = model_config(SHAPE, 256, dropout=0.0)
BATCHES = make_batches(CONFIG, 2, 256, 4)
CPU = torch.device("cpu")


def losses(way, device, count=4):
    step = build_step(way, CONFIG, device)
    return [step.step(BATCHES[number % len(BATCHES)]).item() for number in range(count)]


@pytest.fixture(scope="module")
def expected():
    """The losses of the first updates on the CPU in float32."""
    return losses(Way("ftk", attention="sdpa", loss_form="plain"), CPU)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_updates_are_those_of_the_cpu(device, expected, precision):
    tolerance = {"fp32": 1e-4, "bf16": 1e-2, "fp16": 1e-2}[precision]
    found = losses(Way("ftk", precision), device)
    assert found == pytest.approx(expected, rel=tolerance)
    assert found[-1] < found[0] - 0.1  # it learned, so the trajectory is worth following


@pytest.mark.parametrize("loss_form", ["plain", "chunked"])
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_options_of_the_engine_change_no_update(device, expected, loss_form, checkpointing):
    way = Way("ftk", loss_form=loss_form, checkpointing=checkpointing)
    assert losses(way, device) == pytest.approx(expected, rel=1e-4)


@pytest.fixture
def tf32():
    prepare_process(EngineConfig(tf32=True))
    yield
    prepare_process(EngineConfig())


def test_tf32_is_close(cuda, expected, tf32):
    assert losses(Way("ftk", tf32=True), cuda) == pytest.approx(expected, rel=5e-3)


def test_flex_attention_equals_sdpa_in_loss_and_gradients(cuda):
    gradients = {}
    for attention in ("sdpa", "flex"):
        step = build_step(Way("ftk", attention=attention), CONFIG, cuda)
        with step.update.gradients(0, step.update.count(BATCHES[:1])) as scale:
            sums = step.update.runner.forward_backward(BATCHES[:1], scale)
        named = {name: p.grad.clone() for name, p in step.update.model.named_parameters()}
        gradients[attention] = {"loss": sums["loss"][0], **named}
    assert gradients["flex"].keys() == gradients["sdpa"].keys()
    for name, found in gradients["flex"].items():
        expected = gradients["sdpa"][name]
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("attention", ["sdpa", "flex"])
def test_compilation_by_blocks_changes_no_update(cuda, expected, attention):
    way = Way("ftk", attention=attention, compile="block")
    assert losses(way, cuda) == pytest.approx(expected, rel=1e-4)


@contextmanager
def no_waiting(device):
    """An error where the host waits for the GPU."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_step_never_waits_for_the_device(device, precision):
    step = build_step(Way("ftk", precision), CONFIG, device)
    for batch in BATCHES[:2]:
        step.step(batch)  # kernels are compiled, states made
    with no_waiting(device):
        for batch in BATCHES:  # in ordinary memory, as data workers leave them
            step.step(batch)


def test_the_sync_detector_detects(cuda):
    value = torch.ones((), device=cuda)
    with pytest.raises(RuntimeError, match="synchroniz"), no_waiting(cuda):
        value.item()


@pytest.mark.parametrize("name", ["adafactor", "adam", "adamw", "lamb", "lion", "muon", "sgd"])
def test_a_step_is_skipped_on_the_device(device, name):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 8)).to(device)
    entry = OPTIMIZERS.get(name)
    optimizer = entry.target(entry.config(lr=0.01), parameter_groups(model, 0.1))

    def fill_gradients(value=None):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter) if value is None else torch.full_like(parameter, value)

    def snapshot():
        states = [state.values() for state in optimizer.state_dict()["state"].values()]
        tensors = [value for values in states for value in values if isinstance(value, torch.Tensor)]
        return [tensor.clone() for tensor in [*model.state_dict().values(), *tensors]]

    no, yes = torch.zeros((), dtype=torch.bool, device=device), torch.ones((), dtype=torch.bool, device=device)
    fill_gradients()
    step_unless(optimizer, no)
    before = snapshot()
    fill_gradients(float("nan"))
    with no_waiting(device):
        step_unless(optimizer, yes)
    assert all(torch.equal(old, new) for old, new in zip(before, snapshot(), strict=True))
    fill_gradients()
    with no_waiting(device):
        step_unless(optimizer, no)
    assert not torch.equal(before[0], snapshot()[0])


def test_greedy_answers_are_those_of_the_cpu(device):
    contexts = [[7, 8, 3, 9, 10], [11, 3, 12, 4, 13, 14, 15, 5], [3], [3, 3, 3, 3], [19, 18, 17, 4, 16]]
    tokens, scores = [], []
    for where in (CPU, device):
        filled = BlankGenerator(small_model().to(where), SPECIAL, max_len=7).fill_ids(contexts)
        tokens.append([[answer.tokens for answer in row] for row in filled])
        scores.append([score for row in filled for answer in row for score in answer.token_logprobs])
    assert tokens[1] == tokens[0]
    assert scores[1] == pytest.approx(scores[0], abs=1e-3)


def test_checkpointing_takes_less_memory(cuda):
    config = model_config(SHAPE | {"num_layers": 12}, 512, 0.0)
    [batch] = make_batches(config, 8, 512, 1)
    peaks = {}
    for checkpointing in ("none", "selective", "full"):
        step = build_step(Way("ftk", attention="sdpa", checkpointing=checkpointing), config, cuda)
        step.step(batch)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step.step(batch)
        peaks[checkpointing] = torch.cuda.max_memory_allocated() - before
    assert peaks["full"] < peaks["selective"] < peaks["none"]
