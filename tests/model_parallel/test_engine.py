"""Ways to run a model change what it keeps and how fast it is, never what it computes."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
import torch._dynamo
import torch._inductor.config
from torch import nn
from torch._higher_order_ops.wrap import inductor_compiled_code
from torch.torch_version import TorchVersion
from torch.utils.checkpoint import CheckpointPolicy

from ftk.checkpoint import save_checkpoint
from ftk.checkpoint.load import load_model_state
from ftk.config.options import mistakes
from ftk.errors import UserError
from ftk.model_parallel import data_parallel
from ftk.model_parallel.activation_checkpointing import _keep_expensive_results, checkpoint_blocks
from ftk.model_parallel.compile import MAX_PROGRAMS, compile_model, is_compiled, uncompiled
from ftk.model_parallel.config import EngineConfig, ParallelConfig
from ftk.model_parallel.engine import prepare_model
from ftk.model_parallel.world import World
from ftk.models import build_model
from ftk.modules.adapters import LoRAConfig
from ftk.modules.adapters.adapt import adapt
from ftk.modules.adapters.lora import LoRA
from tests.held import kept_bytes

FLASH = torch.ops.aten._flash_attention_forward.default
SHAPE = {"hidden_size": 32, "num_attention_heads": 4, "vocab_size": 64, "max_positions": 32}


def tiny(dropout=0.0, num_layers=4):
    torch.manual_seed(1)
    dropouts = dict.fromkeys(("dropout", "attention_dropout", "embedding_dropout"), dropout)
    return build_model("glm_tiny", **SHAPE, num_layers=num_layers, **dropouts).train()


def gradients(model, precision=None, length=24):
    """Loss and gradients of one batch, with the random numbers of seed 7."""
    model.zero_grad()
    torch.manual_seed(7)
    tokens = torch.arange(2 * length).view(2, length) % 64  # [B, T]
    context = torch.tensor([10, 14])
    with torch.autocast("cpu", enabled=precision is not None, dtype=torch.bfloat16):
        loss = model(tokens, context_length=context).double().logsumexp(-1).sum()
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_same(one, other, **tolerance):
    torch.testing.assert_close(one[0], other[0], **tolerance)
    assert one[1].keys() == other[1].keys()
    for name in one[1]:
        torch.testing.assert_close(one[1][name], other[1][name], msg=name, **tolerance)


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize(("mode", "every"), [("selective", 1), ("full", 1), ("full", 2), ("selective", 3)])
def test_checkpointing_changes_no_bit(mode, every, dropout, precision):
    plain, checkpointed = tiny(dropout), tiny(dropout)
    checkpoint_blocks(checkpointed, mode, every)
    assert_same(gradients(plain, precision), gradients(checkpointed, precision), rtol=0, atol=0)


@pytest.mark.parametrize("mode", ["none", "full"])
def test_a_lower_residual_path_has_the_type_of_matrix_products_and_nearly_the_loss(mode):
    engine = EngineConfig(residual_precision="same", activation_checkpointing=mode)
    plain, lower, types = tiny(), tiny(), []
    prepare_model(lower, engine, torch.device("cpu"))
    for layer in lower.layers:
        layer.register_forward_hook(lambda layer, inputs, output: types.append(output.dtype))
    found, expected = gradients(lower, "bf16"), gradients(plain, "bf16")
    assert set(types) == {torch.bfloat16}
    torch.testing.assert_close(found[0], expected[0], rtol=1e-3, atol=0)
    assert not found[0].equal(expected[0])
    types.clear()
    assert_same(gradients(lower), gradients(plain), rtol=0, atol=0)
    assert set(types) == {torch.float32}


def test_a_lower_residual_path_is_one_whatever_an_adapter_adds():
    model, types = tiny(), []
    adapt(model, LoRA(LoRAConfig(weight_decomposed=True)))
    prepare_model(model, EngineConfig(residual_precision="same"), torch.device("cpu"))
    for layer in model.layers:
        layer.attention_norm.register_forward_pre_hook(lambda norm, inputs: types.append(inputs[0].dtype))
    gradients(model, "bf16")
    assert types == [torch.bfloat16] * 4


def test_the_more_is_checkpointed_the_less_is_kept():
    kept, tokens = [], torch.arange(48).view(2, 24) % 64
    for mode, every in [("none", 1), ("full", 2), ("full", 1)]:
        model = tiny()
        checkpoint_blocks(model, mode, every)
        kept.append(kept_bytes(model, tokens=tokens, context_length=torch.tensor([10, 14])))
    assert kept[0] > 1.5 * kept[1] > 1.5 * kept[2]


def test_selective_checkpointing_multiplies_no_matrix_again():
    class Counter(torch.utils._python_dispatch.TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.count = 0

        def __torch_dispatch__(self, operator, types, arguments=(), keywords=None):
            self.count += operator.name().partition(".")[0] in ("aten::mm", "aten::addmm")
            return operator(*arguments, **(keywords or {}))

    counts = {}
    for mode in ("none", "selective", "full"):
        model = tiny()
        checkpoint_blocks(model, mode)
        with Counter() as counter:
            gradients(model)
        counts[mode] = counter.count
    assert counts["none"] == counts["selective"] < counts["full"]


def test_nothing_is_checkpointed_without_gradients():
    model = tiny()
    with torch.no_grad():  # for both: few rows have a kernel of their own where no gradient is asked for
        expected = model(torch.arange(24)[None])
        checkpoint_blocks(model, "full")
        assert torch.equal(model(torch.arange(24)[None]), expected)


def test_names_and_checkpoints_stay_as_they_are(tmp_path):
    plain, engine = tiny(), tiny()
    checkpoint_blocks(engine, "full")
    compile_model(engine, "block")
    assert list(plain.state_dict()) == list(engine.state_dict())
    save_checkpoint(tmp_path / "checkpoint_1", model=engine, trainer_state={}, config={})
    with torch.no_grad():
        plain.final_norm.weight.zero_()
    load_model_state(tmp_path / "checkpoint_1", plain)
    assert torch.equal(plain.final_norm.weight, engine.final_norm.weight)


@pytest.fixture(scope="module")
def kernel_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kernels")
    yield folder
    assert any(folder.iterdir())  # kept for the next run


@pytest.fixture
def kept_kernels(kernel_folder, monkeypatch):
    """An empty folder for the first test; those after it find Inductor's compiled headers there."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(kernel_folder))
    return kernel_folder


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "checkpointing"), [("block", "none"), ("block", "selective"), ("model", "none")])
def test_compiled_equals_eager(mode, checkpointing, kept_kernels):
    torch.compiler.reset()
    plain, compiled = tiny(num_layers=2), tiny(num_layers=2)
    checkpoint_blocks(compiled, checkpointing)
    compile_model(compiled, mode)
    expected = gradients(plain)
    torch.manual_seed(7)
    loss = compiled.head(
        compiled.hidden_states(torch.arange(48).view(2, 24) % 64, context_length=torch.tensor([10, 14]))
    )
    loss = loss.double().logsumexp(-1).sum()
    loss.backward()
    actual = loss.detach(), {name: parameter.grad for name, parameter in compiled.named_parameters()}
    assert_same(expected, actual, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", ["full", "selective"])
def test_a_compiled_block_draws_the_same_dropout_again_at_any_length(checkpointing, kept_kernels):
    """By the slope of the loss: from torch 2.14 on, one that keeps its activations has other masks."""
    torch.compiler.reset()
    model, step = tiny(num_layers=1, dropout=0.1).double(), 1e-6
    prepare_model(model, EngineConfig(activation_checkpointing=checkpointing, compile="block"), torch.device("cpu"))
    weights = [one.detach() for one in model.parameters()]
    for length in (16, 24):
        slopes = [*gradients(model, length=length)[1].values()]
        losses = []
        for change in (step, -2 * step):
            torch._foreach_add_(weights, slopes, alpha=change)
            losses.append(gradients(model, length=length)[0].item())
        torch._foreach_add_(weights, slopes, alpha=step)
        expected = sum(one.square().sum().item() for one in slopes)
        assert (losses[0] - losses[1]) / (2 * step) == pytest.approx(expected, rel=1e-5)


def test_random_numbers_are_eager_where_an_old_torch_cannot_compile_them_again(monkeypatch):
    for version, mode, is_eager in (
        ("2.12.1+cu130", "block", True),
        ("2.12.1+cu130", "none", False),
        ("2.13.0+cu130", "block", False),
    ):
        monkeypatch.setattr(torch, "__version__", TorchVersion(version))
        config = EngineConfig(activation_checkpointing="full", compile=mode)
        with torch._inductor.config.patch(fallback_random=False):
            prepare_model(tiny(num_layers=1), config, torch.device("cpu"))
            assert torch._inductor.config.fallback_random is is_eager


@pytest.mark.slow
def test_blocks_are_compiled_for_more_shapes_and_modes_than_torch_allows(monkeypatch):
    """Masks or none, few or many rows, in training and in validation."""
    monkeypatch.setattr(nn.Module, "compile", lambda self, compile=nn.Module.compile: compile(self, backend="eager"))
    torch.compiler.reset()
    with torch._dynamo.config.patch(recompile_limit=8, fail_on_recompile_limit_hit=True):
        model = build_model("mistral_tiny", vocab_size=64, num_layers=1, sliding_window=20)
        compile_model(model, "block")
        for length in (16, 32, 24):
            for rows in (2, 1):
                model.train()(torch.zeros(rows, length, dtype=torch.int64)).sum().backward()
                with torch.no_grad():
                    model.eval()(torch.zeros(rows, length, dtype=torch.int64))
    torch.compiler.reset()


@pytest.mark.parametrize("mode", ["block", "model"])
def test_compilation_can_be_left_out_for_a_while(mode):
    model = tiny(num_layers=1)
    assert not is_compiled(model)
    with torch._dynamo.config.patch(recompile_limit=8):
        compile_model(model, mode)
        assert torch._dynamo.config.recompile_limit == MAX_PROGRAMS
    block, whole = model.layers[0]._compiled_call_impl, model.hidden_states
    with uncompiled(model):
        assert not is_compiled(model)
    assert is_compiled(model)
    assert (model.layers[0]._compiled_call_impl, model.hidden_states) == (block, whole)


def test_an_old_torch_that_compiles_shared_sequences_wrongly_is_refused(monkeypatch):
    model = tiny(num_layers=1)
    model.layers[0].tensor_region = SimpleNamespace(sequence_parallel=True)
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.11.0+cpu"))
    with pytest.raises(UserError, match=r"`sequence_parallel` needs torch 2\.13 or newer: 2\.11\.0\+cpu may"):
        compile_model(model, "block")
    model.layers[0].tensor_region.sequence_parallel = False
    compile_model(model, "block")
    assert model.layers[0]._compiled_call_impl is not None


def test_a_model_without_blocks_is_named():
    for apply in (lambda model: checkpoint_blocks(model, "full"), lambda model: compile_model(model, "block")):
        with pytest.raises(UserError, match=r"Linear has no nn\.ModuleList of blocks"):
            apply(nn.Linear(2, 2))


def test_exactness_is_set_for_the_process(command):
    code = """
import torch
from ftk.model_parallel.engine import prepare_process
from ftk.model_parallel import data_parallel
from ftk.model_parallel.config import EngineConfig, ParallelConfig
from ftk.model_parallel.world import World
prepare_process(EngineConfig(tf32=True, deterministic=True))
assert torch.are_deterministic_algorithms_enabled() and torch.get_float32_matmul_precision() == "high"
prepare_process(EngineConfig())
assert not torch.are_deterministic_algorithms_enabled() and torch.get_float32_matmul_precision() == "highest"
"""
    assert command("-c", code).returncode == 0


def test_options_that_cannot_be_are_named():
    [error] = mistakes(EngineConfig(checkpoint_every=0, activation_checkpointing="full"))
    assert "checkpoint_every is 0; it must be at least 1" in error


@pytest.mark.parametrize(
    ("operator", "dropout", "expected"),
    [
        (inductor_compiled_code, {}, CheckpointPolicy.MUST_SAVE),
        (torch.ops.higher_order.flex_attention, {}, CheckpointPolicy.MUST_SAVE),
        (FLASH, {"dropout_p": 0.0}, CheckpointPolicy.MUST_SAVE),
        (FLASH, {"dropout_p": 0.1}, CheckpointPolicy.PREFER_RECOMPUTE),
        (torch.ops.aten._scaled_dot_product_efficient_attention.default, {}, CheckpointPolicy.MUST_SAVE),
        (torch.ops.aten.gelu.default, {}, CheckpointPolicy.PREFER_RECOMPUTE),
    ],
    ids=str,
)
def test_selective_checkpointing_keeps_every_form_of_attention(operator, dropout, expected):
    assert _keep_expensive_results(None, operator, **dropout) == expected
    if dropout:
        places = [dropout.get(argument.name) for argument in operator._schema.arguments]
        assert _keep_expensive_results(None, operator, *places[: places.index(dropout["dropout_p"]) + 1]) == expected


def test_dropout_behind_an_attention_with_dropout_draws_the_same_again():
    """The flash kernel of a GPU, of which each value here sees itself alone."""

    def forward(query, key, value, first, second, most, max_keys, dropout, *flags, scale=None):
        kept = (torch.rand_like(value) >= dropout) / (1.0 - dropout)
        return value * kept, value.new_zeros(1), kept, value.new_zeros(1), value.new_zeros(1)

    def backward(gradient, query, key, value, *given, scale=None):
        kept = given[-2]  # what the forward pass returned in its place
        return torch.zeros_like(query), torch.zeros_like(key), gradient * kept

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, hidden):
            heads = self.inner(hidden).view(-1, 2, 4)
            bounds = torch.tensor([0, len(heads)], dtype=torch.int32)
            attended = FLASH(heads, heads, heads, bounds, bounds, 6, 6, 0.5, False, False)[0].flatten(1)
            return hidden + nn.functional.dropout(self.outer(attended), 0.5)

    found = {}
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_flash_attention_forward", forward, "CPU")
        library.impl("_flash_attention_backward", backward, "CPU")
        for mode in ("none", "selective", "full"):
            torch.manual_seed(0)
            model = nn.Sequential(Block(), Block())
            checkpoint_blocks(model, mode)
            model(torch.linspace(-1, 1, 48).view(6, 8)).square().sum().backward()
            found[mode] = [parameter.grad for parameter in model.parameters()]
    for mode in ("selective", "full"):
        torch.testing.assert_close(found[mode], found["none"], rtol=0, atol=0)


@pytest.mark.slow
def test_selective_checkpointing_keeps_what_a_compiled_region_computed(tmp_path, monkeypatch):
    """A region that is compiled for itself, as flex attention is. It counts its runs."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    runs = []

    @torch.library.custom_op("ftk_test::counted_exp", mutates_args=())
    def counted_exp(hidden: torch.Tensor) -> torch.Tensor:
        runs.append(hidden.shape)
        return hidden.exp()

    def keep(ctx, inputs, output):
        ctx.save_for_backward(output)

    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0]

    counted_exp.register_fake(torch.empty_like)
    counted_exp.register_autograd(backward, setup_context=keep)
    region = torch.compile(counted_exp, fullgraph=True, options={"wrap_inductor_compiled_regions": True})

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, hidden):
            return self.outer(region(self.inner(hidden)))

    gradients, counts = {}, {}
    for mode in ("none", "selective", "full"):
        torch.manual_seed(0)
        model = nn.Sequential(Block(), Block())
        checkpoint_blocks(model, mode)
        runs.clear()
        model(torch.linspace(-1, 1, 12).view(3, 4)).sum().backward()
        gradients[mode], counts[mode] = [parameter.grad for parameter in model.parameters()], len(runs)
    assert counts == {"none": 2, "selective": 2, "full": 4}
    for mode in ("selective", "full"):
        torch.testing.assert_close(gradients[mode], gradients["none"], rtol=0, atol=0)


@pytest.mark.parametrize(("device", "cuts"), [("cuda", False), ("cpu", True)])
def test_programs_are_not_cut_for_copies_on_gpus(monkeypatch, device, cuts):
    monkeypatch.setattr(data_parallel, "DistributedDataParallel", MagicMock())
    with torch._dynamo.config.patch(optimize_ddp=True):
        data_parallel.wrap_in_ddp(nn.Linear(2, 2), World.single(device), ParallelConfig())
        assert torch._dynamo.config.optimize_ddp == cuts
