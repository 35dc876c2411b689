"""Plain, chunked and linear are one loss: in value, in gradients, in meters, for every size and precision."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ftk.batch import Batch
from ftk.config.options import mistakes
from ftk.criterions import chunked_loss as chunked
from ftk.criterions import loss_forms
from ftk.criterions.chunked_loss import chunked_loss
from ftk.criterions.cross_entropy import CrossEntropy, CrossEntropyConfig
from ftk.criterions.loss_forms import linear_loss
from ftk.criterions.token_loss import TokenLosses, token_losses
from ftk.errors import UserError
from tests.dense import batch_of, small_glm, small_tensors

HAS_LINEAR = hasattr(torch.nn, "LinearCrossEntropyOptions")
needs_linear = pytest.mark.skipif(not HAS_LINEAR, reason="torch.nn.functional.linear_cross_entropy: torch 2.13")
FUSED = [pytest.param(chunked_loss, id="chunked"), pytest.param(linear_loss, id="linear", marks=needs_linear)]
HIDDEN, VOCAB = 16, 103  # a vocabulary that no power of two divides


def inputs(num_targets: int, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_targets)
    hidden = torch.randn(num_targets, HIDDEN, generator=generator) * scale
    weight = torch.randn(VOCAB, HIDDEN, generator=generator)
    targets = torch.randint(VOCAB, (num_targets,), generator=generator)
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets


def plain(
    hidden: Tensor, weight: Tensor, targets: Tensor, label_smoothing: float, weights: Tensor | None = None
) -> TokenLosses:
    return token_losses(hidden @ weight.T, targets, label_smoothing, weights)


def gradients(total: Tensor, *inputs: Tensor, factor: float = 1.0) -> tuple[Tensor, ...]:
    return torch.autograd.grad(total * factor, inputs)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("num_targets", [0, 1, 7, 8, 9, 21])  # against chunks of 8: none, less, whole, uneven
@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("fused", FUSED)
def test_loss_and_gradients_equal_the_plain_form(fused, is_weighted, num_targets: int, label_smoothing: float) -> None:
    hidden, weight, targets = inputs(num_targets)
    weights = torch.linspace(0.5, 2.0, num_targets) if is_weighted else None
    expected = plain(hidden, weight, targets, label_smoothing, weights)
    computed = fused(hidden, weight, targets, label_smoothing, 8, weights=weights)
    assert (computed.total.dtype, computed.total.shape) == (torch.float32, ())
    for name in TokenLosses._fields:
        torch.testing.assert_close(getattr(computed, name), getattr(expected, name), rtol=2e-6, atol=2e-6)
    assert not computed.losses.requires_grad
    assert not computed.nll.requires_grad
    wanted = gradients(expected.total, hidden, weight, factor=0.37)
    for left, right in zip(gradients(computed.total, hidden, weight, factor=0.37), wanted, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=2e-6)
        assert left.dtype == right.dtype


@pytest.mark.parametrize("fused", FUSED)
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_double_precision_agrees_to_the_last_digits_of_float32(fused, label_smoothing: float) -> None:
    """The formula, apart from rounding: what float64 inputs give under the float32 softmax of every form."""
    hidden, weight, targets = inputs(21)
    exact_hidden, exact_weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    log_probs = (exact_hidden @ exact_weight.T).log_softmax(-1)
    nll = -log_probs[torch.arange(21), targets]
    exact = ((1 - label_smoothing) * nll - label_smoothing * log_probs.mean(-1)).sum()
    computed = fused(hidden, weight, targets, label_smoothing, 8).total
    assert computed.item() == pytest.approx(exact.item(), rel=1e-6)
    wanted = torch.autograd.grad(exact, (exact_hidden, exact_weight))
    for left, right in zip(gradients(computed, hidden, weight), wanted, strict=True):
        assert (left - right).norm() < 1e-6 * right.norm()


@pytest.mark.parametrize("fused", FUSED)
def test_huge_logits_stay_finite(fused) -> None:
    hidden, weight, targets = inputs(9, scale=1e4)
    expected, computed = plain(hidden, weight, targets, 0.1), fused(hidden, weight, targets, 0.1, 4)
    torch.testing.assert_close(computed.losses, expected.losses, rtol=1e-5, atol=1e-1)
    for left, right in zip(
        gradients(computed.total, hidden, weight), gradients(expected.total, hidden, weight), strict=True
    ):
        assert left.isfinite().all()
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fused", FUSED)
def test_under_autocast_it_is_as_near_to_float32_as_the_plain_form(fused, dtype: torch.dtype) -> None:
    hidden, weight, targets = inputs(40)
    exact = plain(hidden, weight, targets, 0.1)
    exact_gradients = gradients(exact.total, hidden, weight)

    def errors(form) -> list[float]:
        with torch.autocast("cpu", dtype=dtype):
            computed = form(hidden, weight, targets, 0.1)
        assert computed.total.dtype == torch.float32
        found = gradients(computed.total, hidden, weight)
        assert all(left.dtype == torch.float32 for left in found)
        distances = [(left - right).norm() / right.norm() for left, right in zip(found, exact_gradients, strict=True)]
        return [(computed.total - exact.total).abs() / exact.total, *distances]

    rounding = 2**-8 if dtype == torch.bfloat16 else 2**-11
    for mine, theirs in zip(errors(fused), errors(plain), strict=True):
        assert mine < 2 * theirs + 2 * rounding


def test_many_chunks_under_bfloat16_do_not_lose_the_weights_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum of many small parts in bfloat16 would stand still; it is kept in float32."""
    monkeypatch.setattr(chunked, "_ROWS", 40)  # of 103
    hidden, weight, targets = inputs(2000)
    wanted = gradients(plain(hidden, weight, targets, 0.0).total, weight)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        computed = chunked_loss(hidden, weight, targets, 0.0, 4)
    found = gradients(computed.total, weight)[0]
    assert (found - wanted).norm() < 0.01 * wanted.norm()


def test_float16_keeps_the_gradients_of_unlikely_tokens() -> None:
    """With V equal logits p is 1 / V; a loss scale that comes after the forward could not bring it back."""
    vocab_size = 100_000
    hidden = torch.full((1, 4), 0.01, requires_grad=True)
    weight = torch.zeros(vocab_size, 4, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.float16):
        computed = chunked_loss(hidden, weight, torch.tensor([0]))
    (gradient,) = gradients(computed.total, weight)
    assert gradient[1:].mean().item() == pytest.approx(0.01 / vocab_size, rel=1e-3)


def test_float16_has_room_for_the_gradients_of_targets_of_any_weight() -> None:
    hidden, weight, targets = inputs(3)
    weights = torch.tensor([1.0, 600.0, 20_000.0])
    with torch.autocast("cpu", dtype=torch.float16):
        computed = chunked_loss(hidden, weight, targets, weights=weights)
    expected = gradients(plain(hidden, weight, targets, 0.0, weights).total, hidden, weight)
    for left, right in zip(gradients(computed.total, hidden, weight), expected, strict=True):
        assert (left - right).norm() < 2**-9 * right.norm()


def test_weights_in_bfloat16_get_gradients_in_bfloat16() -> None:
    hidden, weight, targets = inputs(9, dtype=torch.bfloat16)
    found = gradients(chunked_loss(hidden, weight, targets, 0.0, 4).total, hidden, weight)
    wanted = gradients(plain(hidden, weight, targets, 0.0).total, hidden, weight)
    for left, right in zip(found, wanted, strict=True):
        assert left.dtype == torch.bfloat16
        assert (left - right).norm() < 0.02 * right.norm()


def test_the_chunked_form_holds_the_logits_of_a_chunk_at_most() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, (tuple, list)) else (result,):
                if isinstance(tensor, Tensor):
                    largest = max(largest, tensor.numel())
            return result

    hidden, weight, targets = inputs(100)
    with Sizes():
        chunked_loss(hidden, weight, targets, 0.1, 10).total.backward()
    assert largest == VOCAB * HIDDEN  # the weight's gradient; all logits would be 100 * V
    assert hidden.grad is not None
    assert weight.grad is not None


def test_without_gradients_none_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> Tensor:
        raise AssertionError("a gradient was made")

    monkeypatch.setattr(chunked._CrossEntropy, "gradient", refuse)
    hidden, weight, targets = inputs(9)
    expected = plain(hidden, weight, targets, 0.1)
    with torch.no_grad():
        computed = chunked_loss(hidden, weight, targets, 0.1, 4)
    torch.testing.assert_close(computed.total, expected.total)
    frozen = chunked_loss(hidden.detach(), weight.detach(), targets, 0.1, 4)
    assert not frozen.total.requires_grad
    with pytest.raises(AssertionError, match="a gradient was made"):
        chunked_loss(hidden, weight, targets, 0.1, 4)


def test_a_frozen_output_layer_gets_no_gradient() -> None:
    hidden, weight, targets = inputs(9)
    (found,) = gradients(chunked_loss(hidden, weight.detach(), targets, 0.0, 4).total, hidden)
    (wanted,) = gradients(plain(hidden, weight.detach(), targets, 0.0).total, hidden)
    torch.testing.assert_close(found, wanted)
    (found,) = gradients(chunked_loss(hidden.detach(), weight, targets, 0.0, 4).total, weight)
    (wanted,) = gradients(plain(hidden.detach(), weight, targets, 0.0).total, weight)
    torch.testing.assert_close(found, wanted)


def test_a_second_backward_is_refused_in_words() -> None:
    hidden, weight, targets = inputs(5)
    total = chunked_loss(hidden, weight, targets).total
    with pytest.raises(RuntimeError, match="no second derivative; use `loss_form` plain"):
        torch.autograd.grad(total, hidden, create_graph=True)
    total = chunked_loss(hidden, weight, targets).total
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="goes backward only once; use `loss_form` plain"):
        total.backward()


# -- through the criterions ---------------------------------------------------------------------------------


def tokens_alone() -> Batch:
    batch = batch_of(small_tensors())
    return replace(batch, inputs={"tokens": batch.inputs["tokens"]}, groups={})


@pytest.mark.parametrize("loss_share", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("form", ["chunked", pytest.param("linear", marks=needs_linear)])
def test_the_criterion_gives_the_same_in_every_form(form: str, loss_share: float) -> None:
    """Through a tied embedding, whose gradient comes from both ends; meters included."""
    results = {}
    for name in ("plain", form):
        model = small_glm()
        config = CrossEntropyConfig(loss_form=name, loss_chunk_tokens=5, label_smoothing=0.1)
        output = CrossEntropy(config)(model, batch_of(small_tensors(loss_share)))
        (output.loss / 20).backward()
        results[name] = output, {key: p.grad for key, p in model.named_parameters()}
    (plain_output, plain_grads), (output, grads) = results.values()
    torch.testing.assert_close(output.loss, plain_output.loss)
    assert output.num_targets == plain_output.num_targets
    torch.testing.assert_close(output.meters, plain_output.meters)
    torch.testing.assert_close(grads, plain_grads, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("form", ["chunked", pytest.param("linear", marks=needs_linear)])
def test_the_forms_are_the_same_loss_as_that_of_all_logits(form: str) -> None:
    model = small_glm()
    batch = tokens_alone()
    expected = CrossEntropy(CrossEntropyConfig(loss_form="plain"))(lambda tokens: model(tokens), batch)
    for name in ("plain", "auto", form):
        computed = CrossEntropy(CrossEntropyConfig(loss_form=name))(model, batch)
        torch.testing.assert_close(computed.loss, expected.loss)


def test_a_model_without_a_head_keeps_the_plain_form() -> None:
    table = torch.nn.Embedding(50, 50)

    def model(tokens: Tensor) -> Tensor:
        return table(tokens)  # [B, T] -> logits [B, T, 50]

    batch = tokens_alone()
    auto, plain = (CrossEntropy(CrossEntropyConfig(loss_form=form))(model, batch) for form in ("auto", "plain"))
    assert torch.equal(auto.loss, plain.loss)
    with pytest.raises(
        UserError,
        match=r"`loss_form` chunked needs a model whose output layer is one matrix, .*; use `loss_form` plain",
    ):
        CrossEntropy(CrossEntropyConfig(loss_form="chunked"))(model, batch)


def test_auto_takes_chunks_for_many_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []

    def recorded(*arguments: object, **options: object) -> TokenLosses:
        taken.append("chunked")
        return chunked_loss(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(loss_forms, "chunked_loss", recorded)
    criterion = CrossEntropy(CrossEntropyConfig())
    criterion(small_glm(), batch_of(small_tensors()))
    assert taken == []
    monkeypatch.setattr(loss_forms, "_CHUNKED_FROM_BYTES", {"cpu": 1000})
    criterion(small_glm(), batch_of(small_tensors()))
    assert taken == ["chunked"]


def test_linear_names_the_torch_that_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.nn, "LinearCrossEntropyOptions", raising=False)
    with pytest.raises(UserError, match=r"`loss_form` linear needs torch 2.13 or newer"):
        linear_loss(*inputs(3))


def test_chunks_are_as_the_device_has_memory() -> None:
    chunks = [
        CrossEntropyConfig(loss_chunk_tokens=given).chunk_tokens(on) for given in (None, 7) for on in ("cpu", "cuda")
    ]
    assert chunks == [256, 1024, 7, 7]


def test_impossible_options_are_named() -> None:
    assert mistakes(CrossEntropyConfig(loss_chunk_tokens=0)) == ["loss_chunk_tokens is 0; it must be at least 1"]


@pytest.mark.parametrize(
    ("device", "num_targets", "expected"),
    [("cpu", 100, "plain"), ("cpu", 1475, "chunked"), ("meta", 1475, "plain"), ("meta", 12000, "chunked")],
)
def test_chunks_start_at_larger_losses_on_other_devices_than_a_cpu(device, num_targets, expected):
    hidden, weight = torch.empty(num_targets, 4, device=device), torch.empty(30592, 4, device=device)
    assert loss_forms._cheaper_form(hidden, weight) == expected
