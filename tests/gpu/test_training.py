"""What training does on a GPU alone: flash kernels on runs of keys, compiled blocks, clipping by the optimizer."""

from __future__ import annotations

import contextlib
import logging
from functools import partial

import pytest
import torch
import torch._dynamo
from step_ways import LEARNING_RATE, Way, build_step, make_batches, model_config
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ftk.model_parallel.compile import can_compile
from ftk.model_parallel.config import ParallelConfig
from ftk.model_parallel.world import open_world
from ftk.modules import flex_attention, varlen_attention
from ftk.modules.attention_forms import attention_form, sequence_attention
from ftk.modules.masks import Visibility
from ftk.optim import ema
from ftk.optim.base import step_unless
from tests.gpu.test_gpu import BATCHES, CONFIG, SHAPE, losses, no_waiting
from tests.modules.weight_by_weight import errors

CONTEXT = [0, 1, 64, 100, 127, 128]
LENGTHS = [128, 1, 64, 100, 127, 2]


def inputs_of(device: torch.device, head_size: int = 64, num_kv_heads: int = 4, num_keys: int = 128) -> list[Tensor]:
    """Heads as a joint projection leaves them, not contiguous."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(6, 128, 4, head_size), *[(6, num_keys, num_kv_heads, head_size)] * 2]
    drawn = [torch.randn(shape, generator=generator).to(device, torch.bfloat16).transpose(1, 2) for shape in shapes]
    return [one.requires_grad_() for one in drawn]


def visibility_of(kind: str, device: torch.device) -> Visibility:
    if kind == "prefix":
        return Visibility(torch.tensor(CONTEXT, device=device))
    if kind == "packed":
        documents = [0] * 40 + [1] * 40 + [2] * 20 + [1] * 8 + [0] * 8 + [-1] * 12
        prefix = torch.tensor([100, 0, 128, 60, 90, 1], device=device)
        return Visibility(prefix, documents=torch.tensor([documents] * 6, device=device), num_documents=8)
    return Visibility(causal=False, length=torch.tensor(LENGTHS, device=device))


@pytest.mark.parametrize(
    ("kind", "head_size", "num_kv_heads", "num_keys"),
    [
        ("prefix", 64, 4, 128),
        ("prefix", 128, 2, 128),
        ("packed", 64, 4, 128),
        ("length", 64, 4, 128),
        ("length", 64, 4, 200),
    ],
)
def test_runs_of_keys_give_values_and_gradients_of_the_mask(cuda, kind, head_size, num_kv_heads, num_keys, monkeypatch):
    """Empty runs of queries and of keys among them, which the flash kernel must neither read nor leave undefined."""
    monkeypatch.setattr(varlen_attention.Replays, "are_on", False)  # whatever ran before in this process
    inputs, results = inputs_of(cuda, head_size, num_kv_heads, num_keys), {}
    torch.manual_seed(0)
    seed = torch.randn(6, 4, 128, head_size, device=cuda, dtype=torch.bfloat16)
    for form in ("varlen", "sdpa"):
        more = {} if num_keys == 128 else {"num_keys": num_keys}
        visibility = visibility_of(kind, cuda)
        with no_waiting(cuda):
            attended = sequence_attention(form, visibility, 128, cuda, dtype=torch.bfloat16, **more)(*inputs)
            results[form] = [attended, *torch.autograd.grad(attended, inputs, seed)]
    for found, expected in zip(results["varlen"], results["sdpa"], strict=True):
        assert found.isfinite().all()
        torch.testing.assert_close(found, expected, rtol=3e-2, atol=3e-2)


def test_the_flash_kernel_drops_weights_and_keeps_their_mean(cuda):
    query, key, _ = (one.detach() for one in inputs_of(cuda))
    value = torch.ones_like(key)  # what is attended is the sum of the weights that are left
    attend = sequence_attention("varlen", visibility_of("prefix", cuda), 128, cuda, 0.1, torch.bfloat16)
    torch.manual_seed(1)
    sums = torch.stack([attend(query, key, value).float() for _ in range(50)])
    assert sums.std() > 0.01
    assert sums[:, 2:].mean().item() == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("size", "key_heads", "num_tokens", "prefix", "dropout"),
    [
        (64, 4, 512, [0, 300, 400, 512], 0.0),
        (64, 2, 413, [413, 77, 1, 200], 0.1),
        (128, 4, 1024, [700, 256], 0.5),
        (128, 2, 128, CONTEXT, 0.0),
        (80, 1, 333, [100, 256], 0.9),
        (8, 4, 17, [3], 0.0),
    ],
)
def test_prefix_kernels_give_values_and_gradients_of_every_weight(
    cuda, size, key_heads, num_tokens, prefix, dropout, dtype
):
    assert max(errors(size, key_heads, num_tokens, prefix, dropout, dtype, cuda)) < 1e-2


def test_auto_takes_the_kernels_without_a_mask(cuda):
    forms = [attention_form("auto", cuda, dtype, 512, 64, 0.1) for dtype in (torch.bfloat16, torch.float16)]
    assert forms == ["varlen"] * 2
    assert attention_form("auto", cuda, torch.float32, 512, 64, 0.0) == "sdpa"


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
@pytest.mark.parametrize("compile", ["none", "block"])
def test_varlen_changes_no_update(cuda, checkpointing, compile):
    found, expected = (
        losses(Way("ftk", "bf16", attention=form, checkpointing=each[0], compile=each[1]), cuda)
        for form, each in (("varlen", (checkpointing, compile)), ("sdpa", ("none", "none")))
    )
    assert found == pytest.approx(expected, rel=1e-2)


def test_checkpointed_dropout_of_the_flash_kernel_is_the_same_again(cuda):
    config = model_config(SHAPE, 256, dropout=0.1)
    gradients = []
    for checkpointing in ("none", "selective", "full"):
        step = build_step(Way("ftk", "bf16", attention="varlen", checkpointing=checkpointing), config, cuda)
        with step.update.gradients(0, step.update.count(BATCHES[:1])) as scale:
            step.update.runner.forward_backward(BATCHES[:1], scale)
        gradients.append([parameter.grad.clone() for parameter in step.update.model.parameters()])
    for other in gradients[1:]:
        torch.testing.assert_close(other, gradients[0], rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("compile", ["none", "block"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_replayed_passes_change_no_update(cuda, precision, compile):
    found, expected = (
        losses(Way("ftk", precision, compile=compile, cuda_graphs=graphs), cuda, count=12) for graphs in ("on", "off")
    )
    assert found == pytest.approx(expected, rel={"fp32": 1e-4, "bf16": 1e-2, "fp16": 1e-2}[precision])


def test_replayed_passes_add_to_gradients_draw_dropout_and_do_not_wait(cuda):
    config, updates = model_config(SHAPE, 256, dropout=0.1), []
    for graphs in ("on", "off"):
        step = build_step(Way("ftk", "bf16", compile="block", cuda_graphs=graphs), config, cuda)
        for number in range(8):
            waiting = no_waiting(cuda) if graphs == "on" and number > 5 else contextlib.nullcontext()
            with waiting, step.update.gradients(number, step.update.count(BATCHES)) as scale:
                sums = step.update.runner.forward_backward(BATCHES, scale)
        updates.append([sums["loss"][0], *(p.grad for p in step.update.model.parameters())])
        assert graphs == "off" or len(step.update.runner._recorded) > 1
    torch.testing.assert_close(*updates, rtol=2e-2, atol=1e-4)


def compilations() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("form", ["varlen", "flex", "sdpa"])
def test_batches_of_padded_lengths_soon_compile_nothing_more(cuda, form):
    torch._dynamo.reset()
    config = model_config(SHAPE, 512, dropout=0.0)
    step = build_step(Way("ftk", "bf16", attention=form, compile="block"), config, cuda)
    batches = [
        batch.longer(128, step.update.model.INPUTS)
        for length in (100, 130, 260, 400, 500)
        for batch in make_batches(config, 2, length, 1)
    ]
    for batch in batches:
        step.step(batch)
    before = compilations()
    for batch in [*reversed(batches), *batches]:
        step.step(batch)
    assert compilations() == before


def test_flex_goes_on_as_sdpa_when_its_programs_are_too_many(cuda, monkeypatch, caplog):
    torch._dynamo.reset()
    flex_attention._flex_program.cache_clear()
    monkeypatch.setattr(flex_attention, "FLEX_MAX_SHAPES", 1)
    monkeypatch.setattr(flex_attention.FlexPrograms, "are_too_many", False)
    with torch._dynamo.config.patch(recompile_limit=1), caplog.at_level(logging.WARNING):
        for num_tokens in (128, 256, 384, 512):
            query = torch.randn(1, 2, num_tokens, 64, device=cuda, requires_grad=True)
            attend = sequence_attention("flex", Visibility(torch.tensor([9], device=cuda)), num_tokens, cuda)
            attend(query, query, query).sum().backward()
            assert query.grad.isfinite().all()
    flex_attention._flex_program.cache_clear()
    torch._dynamo.reset()
    assert caplog.text.count("from here on sdpa") == 1


def kernels(step, batch) -> dict[str, int]:
    """Names of the kernels of an update, and how often each ran."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step.step(batch)
        torch.cuda.synchronize()
    return {event.key: event.count for event in profile.key_averages()}


def test_selective_checkpointing_runs_flex_forward_once(cuda):
    counts = {}
    for checkpointing in ("none", "selective", "full"):
        step = build_step(Way("ftk", "bf16", attention="flex", checkpointing=checkpointing), CONFIG, cuda)
        step.step(BATCHES[0])
        found = kernels(step, BATCHES[0])
        names = [name for name in found if "flex_attention" in name and "backward" not in name]
        counts[checkpointing] = sum(found[name] for name in names)
    assert 0 < counts["none"] < counts["full"]
    assert counts["selective"] == counts["none" if IS_SEEN else "full"]


IS_SEEN = torch.__version__ >= "2.13"
"""Whether checkpointing sees what flex attention was compiled to (`flex_attention._flex_program`)."""


def test_flex_is_visible_as_a_compiled_region(cuda):
    """The operator that selective checkpointing keeps is that which its policy is asked about."""
    seen = []

    def noted(context, operator, *arguments, **keywords):
        seen.append(str(operator))
        return CheckpointPolicy.PREFER_RECOMPUTE

    query = torch.randn(1, 2, 128, 64, device=cuda, requires_grad=True)
    mask = Visibility(torch.tensor([9], device=cuda)).blocks(128, cuda)
    checkpoint(
        lambda query: flex_attention.compiled_flex_attention(query, query, query, block_mask=mask),
        query,
        use_reentrant=False,
        context_fn=partial(create_selective_checkpoint_contexts, noted),
    ).sum().backward()
    assert query.grad.isfinite().all()
    assert ("inductor_compiled_code" in seen) == IS_SEEN


def test_blocks_are_compiled_here(cuda):
    assert can_compile(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))


def test_the_optimizer_clips_as_clipping_before_it_does(cuda, monkeypatch):
    trained = []
    for by_optimizer in (True, False):
        step = build_step(Way("ftk", attention="sdpa"), CONFIG, cuda)
        step.update.config.training.clip_norm = 0.1
        if not by_optimizer:
            monkeypatch.setattr("ftk.trainer.step.takes_scale", lambda optimizer: False)
        for batch in BATCHES:
            step.step(batch)
        trained.append([parameter.detach() for parameter in step.update.model.parameters()])
    torch.testing.assert_close(*trained, rtol=1e-4, atol=LEARNING_RATE / 10)


@pytest.mark.parametrize("skipped", [False, True])
def test_averages_move_in_a_few_launches_without_a_wait(cuda, skipped):
    weights = [torch.randn(100, 7, device=cuda) for _ in range(50)]
    averages = [torch.randn(100, 7, device=cuda) for _ in range(50)]
    before = [average.clone() for average in averages]
    share = torch.full((), 0.0 if skipped else 0.3, device=cuda)
    with no_waiting(cuda):
        ema._lerp(averages, weights, share)
    expected = before if skipped else torch._foreach_lerp(before, weights, 0.3)
    torch.testing.assert_close(averages, list(expected), rtol=0 if skipped else 1e-5, atol=0 if skipped else 1e-6)


def test_a_process_group_is_connected_to_its_device_at_once(cuda):
    with open_world(ParallelConfig(cpu_offload=True), cuda) as world:
        assert torch.distributed.group.WORLD.bound_device_id == world.device
        total = torch.ones(2, device=world.device)
        torch.distributed.all_reduce(total, group=world.group("shard"))
        assert total.tolist() == [1.0, 1.0]
        assert world.sum_host([2.0]) == [2.0]


def test_a_scale_of_the_gradients_is_divided_out_by_fused_adamw(cuda):
    parameters = [nn.Parameter(torch.ones(8, 8, device=cuda)) for _ in range(2)]
    optimizers = [torch.optim.AdamW([parameter], lr=0.1, fused=True) for parameter in parameters]
    gradient = torch.randn(8, 8, device=cuda)
    parameters[0].grad, parameters[1].grad = gradient.clone(), gradient * 4.0
    skip = torch.zeros((), dtype=torch.bool, device=cuda)
    step_unless(optimizers[0], skip)
    step_unless(optimizers[1], skip, torch.full((), 4.0, device=cuda))
    assert torch.equal(*parameters)
