"""Eager, SDPA and flex attention are one attention, with any context and with packed documents."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch.torch_version import TorchVersion

from ftk.config.build import build_options
from ftk.errors import UserError
from ftk.models import build_model
from ftk.modules import attention_forms, flex_attention, masked_attention
from ftk.modules.attention import Attend, Attention
from ftk.modules.attention_forms import EAGER_MAX_TOKENS, attention_form, sequence_attention
from ftk.modules.banded_attention import BandedAttention
from ftk.modules.flex_attention import FlexAttention
from ftk.modules.masked_attention import EagerAttention, MaskedAttention
from ftk.modules.masks import Visibility
from ftk.registry import ATTENTIONS, register_attention

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
CONTEXT = torch.tensor([9, 0, 24])
DOCUMENTS = (torch.arange(24) // 10).expand(3, -1)


PLACES = torch.arange(24)


def attend_of(
    form: str, documents: Tensor | None = None, dropout: float = 0.0, dtype: torch.dtype = torch.float32
) -> Attend:
    visibility = Visibility(CONTEXT, documents=documents)
    return sequence_attention(form, visibility, 24, CPU, dropout, dtype)


def query_key_value(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(3, 2, 24, 16, generator=generator).to(dtype).requires_grad_() for _ in range(3)]


def slow_attention(
    query: Tensor, key: Tensor, value: Tensor, visibility: Visibility, bias: Tensor | None = None, scale: float = 0.25
) -> Tensor:
    """One query at a time, over the keys that it sees."""
    mask = visibility.boolean(PLACES, PLACES).expand(3, -1, -1, -1)
    added = torch.zeros(3, 2, 24, 24) if bias is None else bias.expand(3, 2, 24, 24)
    attended = torch.zeros_like(value)
    for sample, head, place in product(range(3), range(2), range(24)):
        seen = mask[sample, 0, place].nonzero().squeeze(1)
        scores = key[sample, head, seen] @ query[sample, head, place] * scale + added[sample, head, place, seen]
        attended[sample, head, place] = scores.softmax(0) @ value[sample, head, seen]
    return attended


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["one text", "packed"])
@pytest.mark.parametrize("form", ["sdpa", "eager"])
def test_values_and_gradients_equal_the_slow_way(form: str, documents: Tensor | None) -> None:
    inputs = query_key_value()
    expected = slow_attention(*inputs, Visibility(CONTEXT, documents=documents))
    computed = attend_of(form, documents)(*inputs)
    torch.testing.assert_close(computed, expected, rtol=1e-5, atol=1e-6)
    seed = torch.randn_like(expected)
    wanted, found = (torch.autograd.grad(result, inputs, seed) for result in (expected, computed))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


GLOBAL = torch.tensor([[1] + [0] * 23, [0, 0, 1] + [0] * 17 + [1] * 2 + [0] * 2, [0] * 24])
WINDOWS = {
    "causal": Visibility(window=5),
    "packed": Visibility(window=8, documents=DOCUMENTS),
    "both ways": Visibility(causal=False, window=4, length=torch.tensor([24, 9, 2])),
    "global keys": Visibility(causal=False, window=3, length=torch.tensor([24, 24, 7]), global_keys=GLOBAL),
    "longer than the text": Visibility(causal=False, window=30, global_keys=GLOBAL),
    "none": Visibility(documents=DOCUMENTS),
    "prefix": Visibility(CONTEXT, window=3),
}


@pytest.mark.parametrize("visibility", WINDOWS.values(), ids=WINDOWS)
def test_a_band_equals_the_slow_way(visibility: Visibility) -> None:
    """Where there is no padding."""
    inputs = query_key_value()
    real = torch.ones(3, 24, dtype=torch.bool) if visibility.length is None else visibility.length[:, None] > PLACES
    expected = slow_attention(*inputs, visibility) * real[:, None, :, None]
    computed = sequence_attention("banded", visibility, 24, CPU)(*inputs)
    assert computed.isfinite().all()
    computed = computed * real[:, None, :, None]
    torch.testing.assert_close(computed, expected, rtol=1e-5, atol=1e-6)
    seed = torch.randn_like(expected)
    wanted, found = (torch.autograd.grad(result, inputs, seed) for result in (expected, computed))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_a_band_makes_no_scores_outside_of_it() -> None:
    """Of 1024 tokens with a window of 32 a tenth of the pairs of queries and keys."""
    attend = sequence_attention("banded", Visibility(causal=False, window=32), 1024, CPU)
    assert isinstance(attend, BandedAttention)
    assert attend.mask.numel() == 1024 * (32 + 31 + 31)
    forms = [attention_form("auto", CPU, torch.float32, num_tokens, 16, 0.0, window=32) for num_tokens in (127, 128)]
    assert forms == ["sdpa", "banded"]


@pytest.mark.parametrize(
    "visibility",
    [Visibility(CONTEXT), Visibility(), Visibility(causal=False)],
    ids=["prefix", "causal alone", "all"],
)
@pytest.mark.parametrize("form", ["sdpa", "eager"])
def test_a_bias_and_a_scale_of_the_scores_equal_the_slow_way(form: str, visibility: Visibility) -> None:
    inputs, bias = query_key_value(), torch.randn(1, 2, 24, 24, requires_grad=True)
    expected = slow_attention(*inputs, visibility, bias, scale=0.1)
    attend = sequence_attention(form, visibility, 24, CPU)
    computed = attend(*inputs, bias=bias, scale=0.1)
    torch.testing.assert_close(computed, expected, rtol=1e-5, atol=1e-6)
    seed = torch.randn_like(expected)
    wanted, found = (torch.autograd.grad(result, [*inputs, bias], seed) for result in (expected, computed))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(attend(*inputs), slow_attention(*inputs, visibility), rtol=1e-5, atol=1e-6)


def additive(shape: tuple[int, ...]) -> Tensor:
    mask = torch.zeros(shape).masked_fill_(
        torch.rand(shape, generator=torch.Generator().manual_seed(3)) < 0.3, -torch.inf
    )
    return mask.index_fill_(-1, torch.tensor([0]), 0.0)  # each query sees a key


@pytest.mark.parametrize(
    ("count", "mask", "bias", "is_causal"),
    [
        (1, (3, 1, 1, 16), None, False),
        (3, (3, 1, 3, 16), None, False),
        (3, (1, 1, 1, 16), None, False),
        (3, (3, 16), None, False),
        (3, (3, 1, 3, 16), (1, 4, 3, 16), False),
        (3, None, (1, 4, 1, 16), False),
        (16, None, (1, 4, 16, 16), True),
        (16, None, None, True),
        (3, None, None, False),
    ],
)
def test_shared_keys_are_more_queries_of_a_head_where_no_kernel_takes_them_with_a_mask(
    monkeypatch, count, mask, bias, is_causal
) -> None:
    """On CUDA."""
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(3, heads, length, 8, generator=generator).requires_grad_()
        for heads, length in ((4, count), (2, 16), (2, 16))
    ]
    added = None if bias is None else torch.randn(bias, generator=generator).requires_grad_()
    given = [each for each in (*inputs, added) if each is not None]
    seen = None if mask is None else additive(mask)
    plain = torch.full((count, 16), -torch.inf).triu(1) if is_causal else seen
    expected = EagerAttention(plain)(*inputs, bias=added, scale=0.3)

    def kernel(query, key, value, attn_mask=None, *, is_causal=False, enable_gqa=False, **more):
        assert (query.size(1), is_causal, enable_gqa) == (key.size(1), False, False)
        if attn_mask is not None:
            assert attn_mask.stride(-1) == 1
            assert all(stride % 8 == 0 for stride in attn_mask.stride()[:-1]), "it would be copied"
        return sdpa(query, key, value, attn_mask, **more)

    sdpa = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", kernel)
    monkeypatch.setattr(masked_attention, "_has_no_grouped_kernel", lambda query: True)
    found = masked_attention.fused_attention(*inputs, seen, is_causal, bias=added, scale=0.3)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    seed = torch.randn_like(expected)
    torch.testing.assert_close(
        *(torch.autograd.grad(result, given, seed) for result in (found, expected)), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("is_causal", [True, False])
def test_shared_keys_are_left_to_flash_where_it_takes_them(monkeypatch, is_causal) -> None:
    called = []
    monkeypatch.setattr(masked_attention, "_has_no_grouped_kernel", lambda query: True)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", lambda *given, **how: called.append(how))
    query, key = (torch.zeros(1, heads, 3, 8, dtype=torch.bfloat16) for heads in (4, 2))
    masked_attention.fused_attention(query, key, key, None, is_causal)
    [how] = called
    assert (how["attn_mask"], how["is_causal"], how["enable_gqa"]) == (None, is_causal, True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="flex attention goes backward on CUDA only")
@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["one text", "packed"])
def test_flex_trains_as_eager_does_on_cuda(documents: Tensor | None) -> None:
    inputs = [tensor.detach().cuda().requires_grad_() for tensor in query_key_value()]
    visibility = Visibility(CONTEXT.cuda(), documents=None if documents is None else documents.cuda())
    seed = torch.randn(3, 2, 24, 16, device="cuda")
    results = {}
    for form in ("eager", "sdpa", "flex"):
        computed = sequence_attention(form, visibility, 24, CUDA)(*inputs)
        results[form] = computed, torch.autograd.grad(computed, inputs, seed)
    torch.testing.assert_close(results["sdpa"], results["eager"], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(results["flex"], results["eager"], rtol=1e-3, atol=1e-3)


def test_flex_refuses_to_train_on_a_cpu() -> None:
    attend = attend_of(attention_form("flex", CPU, torch.float32, 24, 16, 0.0))
    with pytest.raises(UserError, match="`attention` flex trains on CUDA only, this is cpu; use `attention` auto, or"):
        attend(*query_key_value())


@pytest.mark.parametrize("form", ["sdpa", "eager"])
def test_bfloat16_stays_near_float32(form: str) -> None:
    exact = attend_of(form)(*query_key_value())
    rounded = attend_of(form, dtype=torch.bfloat16)(*query_key_value(torch.bfloat16))
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.float(), exact, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("form", ["sdpa", "eager"])
def test_dropout_of_weights_keeps_the_mean(form: str) -> None:
    torch.manual_seed(0)
    inputs = query_key_value()
    plain = attend_of(form)(*inputs)
    attend = attend_of(form, dropout=0.5)
    assert not torch.allclose(attend(*inputs), plain)
    mean = sum(attend(*inputs).detach() for _ in range(2000)) / 2000
    assert (mean - plain).abs().max() < 0.15


def test_eager_runs_under_autocast_as_a_layer_uses_it() -> None:
    layer, hidden = Attention(hidden_size=32, num_heads=2), torch.randn(3, 24, 32)
    expected = layer(hidden, attend_of("sdpa"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        computed = layer(hidden, attend_of("eager", dtype=torch.bfloat16))
    assert computed.dtype == torch.bfloat16
    torch.testing.assert_close(computed.float(), expected, rtol=0.1, atol=0.05)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch with triton, and a GPU with flash kernels, as far as forms are chosen by them."""
    monkeypatch.setattr(attention_forms, "HAS_TRITON", True)
    monkeypatch.setattr(attention_forms, "has_flash", lambda device: device.type == "cuda")


FORMS = [
    (CUDA, torch.bfloat16, 512, 0.0, {}, "varlen"),
    (CUDA, torch.float16, 512, 0.1, {}, "varlen"),
    (CUDA, torch.bfloat16, 512, 0.0, {"is_slow_behind_prefix": True}, "flex"),
    (CUDA, torch.bfloat16, 512, 0.1, {"is_slow_behind_prefix": True}, "varlen"),
    (CUDA, torch.bfloat16, 512, 0.0, {"in_runs": False}, "flex"),
    (CUDA, torch.bfloat16, 512, 0.1, {"in_runs": False}, "sdpa"),
    (CUDA, torch.bfloat16, 512, 0.0, {"window": 100}, "flex"),
    (CUDA, torch.bfloat16, 512, 0.0, {"window": 512}, "varlen"),
    (CUDA, torch.bfloat16, 512, 0.0, {"has_bias": True}, "sdpa"),
    (CUDA, torch.float32, 512, 0.0, {}, "sdpa"),
    (CPU, torch.float32, 512, 0.0, {}, "sdpa"),
    (CPU, torch.float32, 512, 0.1, {}, "eager"),
    (CPU, torch.bfloat16, 512, 0.0, {}, "eager"),
    (CPU, torch.bfloat16, EAGER_MAX_TOKENS + 1, 0.0, {}, "sdpa"),
]


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("device", "dtype", "num_tokens", "dropout", "more", "expected"), FORMS)
def test_auto_takes_the_fastest_form_that_can(device, dtype, num_tokens, dropout, more, expected) -> None:
    assert attention_form("auto", device, dtype, num_tokens, 64, dropout, **more) == expected
    assert attention_form("eager", device, dtype, num_tokens, 64, dropout, **more) == "eager"


@pytest.mark.usefixtures("gpu")
def test_auto_leaves_forms_alone_where_they_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert attention_form("auto", CUDA, torch.bfloat16, 512, 256, 0.0) == "flex"  # heads too large for dropout
    assert attention_form("auto", CUDA, torch.bfloat16, 512, 20, 0.0) == "flex"  # not a multiple of 8
    assert attention_form("auto", CUDA, torch.bfloat16, 512, 4, 0.0) == "sdpa"  # heads too small
    monkeypatch.setattr(attention_forms, "has_flash", lambda device: False)
    assert attention_form("auto", CUDA, torch.bfloat16, 512, 64, 0.0) == "flex"
    monkeypatch.setattr(attention_forms, "HAS_TRITON", False)
    assert attention_form("auto", CUDA, torch.bfloat16, 512, 64, 0.0) == "sdpa"


@pytest.mark.parametrize("about", [(CPU, torch.bfloat16), (CUDA, torch.float32)], ids=["cpu", "float32"])
@pytest.mark.usefixtures("gpu")
def test_varlen_is_sdpa_where_its_kernels_do_not_run(about) -> None:
    assert attention_form("varlen", *about, 512, 64, 0.0) == "sdpa"
    assert attention_form("varlen", CUDA, torch.bfloat16, 512, 64, 0.0) == "varlen"


@pytest.mark.parametrize(("arch", "expected"), [("llama_tiny", "flex"), ("t5_tiny", "sdpa"), ("cpmant_tiny", "sdpa")])
def test_auto_leaves_flex_alone_where_a_model_has_a_bias_of_positions(arch, expected, monkeypatch) -> None:
    """In the encoder, the decoder and between them; the choice on CUDA is noted, and SDPA runs."""
    monkeypatch.setattr(attention_forms, "HAS_TRITON", True)
    # Which asks a GPU, where torch is built for it.
    monkeypatch.setattr(attention_forms, "has_flash", lambda device: False)
    chosen = []

    def on_cuda(form, device, dtype, *about, **more):
        chosen.append(attention_form(form, CUDA, torch.bfloat16, *about, **more))
        return "sdpa"

    monkeypatch.setattr("ftk.models.base.attention_form", on_cuda)
    model = build_model(arch, vocab_size=16, num_layers=1, attention_dropout=0.0)
    tokens = torch.arange(12)[None]
    model(tokens, **{name: tokens for name in ("decoder_tokens",) if name in model.INPUTS})
    assert chosen == [expected] * (3 if "decoder_tokens" in model.INPUTS else 1)


@pytest.mark.usefixtures("gpu")
def test_the_choice_is_traced_without_a_graph_break() -> None:
    def chosen(tokens: Tensor) -> Tensor:
        form = attention_form("auto", CUDA, torch.bfloat16, tokens.size(0), 64, 0.0, in_runs=False)
        return tokens + len(form)

    assert torch.compile(chosen, fullgraph=True, backend="eager")(torch.zeros(3)).tolist() == [4.0] * 3


# -- flex, compiled for many shapes -----------------------------------------------------------------------------


@pytest.fixture
def flex_of_one_shape(monkeypatch: pytest.MonkeyPatch):
    """Flex attention that is compiled for one shape and no more, by a backend that runs on a CPU."""
    torch._dynamo.reset()
    compiled = torch.compile(flex_attention.flex_attention, fullgraph=True, backend="eager", dynamic=False)
    monkeypatch.setattr(flex_attention, "_flex_program", lambda: compiled)
    monkeypatch.setattr(flex_attention.FlexPrograms, "are_too_many", False)
    with torch._dynamo.config.patch(recompile_limit=1):
        yield
    torch._dynamo.reset()


def test_flex_that_is_compiled_for_too_many_shapes_goes_on_as_sdpa(flex_of_one_shape, caplog, monkeypatch) -> None:
    monkeypatch.setattr(attention_forms, "HAS_TRITON", True)
    monkeypatch.setattr(flex_attention, "refuse_flex_without_cuda", lambda query: None)
    for num_tokens in (16, 24, 24, 16):
        inputs = [each[:, :, :num_tokens].detach() for each in query_key_value()]
        visibility = Visibility(CONTEXT.clamp(max=num_tokens))
        with torch.no_grad():  # flex attention has no backward pass on a CPU
            attended, expected = (
                sequence_attention(form, visibility, num_tokens, CPU)(*inputs) for form in ("flex", "sdpa")
            )
        torch.testing.assert_close(attended, expected, rtol=1e-4, atol=1e-5)
    assert [record.message for record in caplog.records if "from here on sdpa" in record.message] == [
        "attention flex was compiled for 64 shapes, and torch compiles no more: from here on sdpa, which is slower; "
        "batches of fewer different lengths avoid it (`pad_to_multiple`)"
    ]
    for form in ("flex", "auto"):
        assert attention_form(form, CUDA, torch.bfloat16, 512, 64, 0.0, in_runs=False) == "sdpa"


@pytest.mark.parametrize(
    ("version", "options"), [("2.13.0+cu130", {"wrap_inductor_compiled_regions": True}), ("2.11.0+cu130", None)]
)
def test_flex_is_compiled_for_many_shapes_and_seen_by_checkpointing(monkeypatch, version, options) -> None:
    compiled: list[dict] = []
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    monkeypatch.setattr(torch, "compile", lambda function, **how: compiled.append(how))
    with torch._dynamo.config.patch(recompile_limit=8):
        flex_attention._flex_program.__wrapped__()
        assert torch._dynamo.config.recompile_limit == flex_attention.FLEX_MAX_SHAPES
    assert compiled == [{"fullgraph": True, "options": options}]


def test_flex_scores_by_sdpa_on_a_cpu() -> None:
    with torch.no_grad():
        assert attention_form("flex", CPU, torch.float32, 512, 64, 0.0) == "sdpa"
        assert attention_form("flex", CUDA, torch.float32, 512, 64, 0.0) == "flex"


@pytest.mark.parametrize("form", ["sdpa", "eager"])
def test_no_mask_is_made_where_all_is_seen(form: str) -> None:
    def attend(lengths: list[int] | None) -> Attend:
        length = None if lengths is None else torch.tensor(lengths)
        return sequence_attention(form, Visibility(causal=False, length=length), 24, CPU)

    inputs = query_key_value()
    for lengths in None, [24, 24, 24]:
        assert attend(lengths).mask is None
        torch.testing.assert_close(attend(lengths)(*inputs), slow_attention(*inputs, Visibility(causal=False)))
    assert attend([24, 23, 24]).mask is not None


def test_each_form_is_its_own_kind() -> None:
    kinds = {form: type(attend_of(form)) for form in ("sdpa", "eager", "flex")}
    assert kinds == {"sdpa": MaskedAttention, "eager": EagerAttention, "flex": FlexAttention}


def test_a_users_form_is_a_choice_and_is_called_in_every_layer(monkeypatch):
    monkeypatch.setattr(ATTENTIONS, "_entries", dict(ATTENTIONS._entries))
    masks = []

    @register_attention("counting")
    def counting(visibility, num_tokens, device, dropout, dtype):
        def attend(*tensors, **more):
            masks.append(visibility)
            return own(*tensors, **more)

        own = sequence_attention("eager", visibility, num_tokens, device, dropout, dtype)
        return attend

    tokens = torch.arange(12)[None] % 7
    logits = {}
    for form in ("eager", "counting"):
        torch.manual_seed(3)
        model = build_model("llama_tiny", attention=form, vocab_size=16).eval()
        logits[form] = model(tokens, position_ids=torch.arange(12)[None])
    assert torch.equal(logits["counting"], logits["eager"])
    assert len(masks) == len(model.layers)
    with pytest.raises(UserError, match=r"it must be one of auto, banded, counting, eager, flex, sdpa, varlen$"):
        build_options("model", type(model.config), {"attention": "count"})
