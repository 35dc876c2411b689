"""The optimizers that torch lacks against their papers' equations written out in float64, and Muon."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from ftk.registry import OPTIMIZERS

NUM_STEPS = 6


def build(name, parameters, **options):
    entry = OPTIMIZERS.get(name)
    return entry.target(entry.config(**options), param_groups=[{"params": parameters}])


def run(name, shape, reference, **options):
    """Weights after each step of the optimizer and of `reference(weight, gradient, step)`, in float64."""
    generator = torch.Generator().manual_seed(3)
    weight = nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64))
    optimizer = build(name, [weight], **options)
    expected = weight.detach().clone()
    for step in range(1, NUM_STEPS + 1):
        weight.grad = torch.randn(shape, generator=generator, dtype=torch.float64)
        expected = reference(expected, weight.grad.clone(), step)
        optimizer.step()
        yield weight.detach(), expected


def assert_follows(name, shape, reference, tolerance=1e-12, **options):
    for step, (found, expected) in enumerate(run(name, shape, reference, **options), start=1):
        error = (found - expected).abs().max().item()
        assert error < tolerance, f"step {step}: off by {error}"


def test_lion():
    m = 0.0

    def reference(weight, gradient, step):
        nonlocal m
        direction = torch.sign(0.9 * m + 0.1 * gradient)
        m = 0.99 * m + 0.01 * gradient
        return weight - 0.01 * (direction + 0.5 * weight)

    assert_follows("lion", (5, 3), reference, lr=0.01, weight_decay=0.5)


@pytest.mark.parametrize(
    ("weight_decay", "always_adapt", "adapted"),
    [(0.1, False, True), (0.0, False, False), (0.0, True, True)],
)
def test_lamb(weight_decay, always_adapt, adapted):
    m, v = 0.0, 0.0

    def reference(weight, gradient, step):
        nonlocal m, v
        m = 0.9 * m + 0.1 * gradient
        v = 0.98 * v + 0.02 * gradient**2
        direction = (m / (1 - 0.9**step)) / ((v / (1 - 0.98**step)).sqrt() + 1e-6) + weight_decay * weight
        ratio = math.sqrt((weight**2).sum()) / math.sqrt((direction**2).sum()) if adapted else 1.0
        return weight - 0.01 * ratio * direction

    # Step counts are fp32, as torch's are.
    options = {"lr": 0.01, "betas": [0.9, 0.98], "weight_decay": weight_decay, "always_adapt": always_adapt}
    assert_follows("lamb", (5, 3), reference, tolerance=1e-8, **options)


def test_lamb_moves_weights_that_are_zero():
    weight = nn.Parameter(torch.zeros(4, 2))
    optimizer = build("lamb", [weight], lr=0.1, weight_decay=0.1)
    weight.grad = torch.ones(4, 2)
    optimizer.step()
    assert torch.allclose(weight, torch.full((4, 2), -0.1))
    weight.grad = torch.zeros(4, 2)
    for state in optimizer.state[weight].values():
        state.zero_()
    weight.detach().zero_()
    optimizer.step()  # both norms are 0
    assert torch.equal(weight, torch.zeros(4, 2))


@pytest.mark.parametrize("shape", [(5, 3), (2, 4, 3), (7,), ()])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lr": 0.05, "relative_step": False, "scale_parameter": False},
        {"lr": 0.3, "beta1": 0.9, "weight_decay": 0.1, "clip_threshold": 0.5, "beta2_decay": -0.5},
        {"lr": 0.3, "eps": [1e-2, 3.0]},
    ],
    ids=["paper", "plain", "everything", "epsilons"],
)
def test_adafactor(shape, options):
    """Algorithms 4 and 5 of the paper; a tensor of more dimensions is a stack of matrices."""
    chosen = {"lr": 1e-2, "beta1": 0.0, "weight_decay": 0.0, "clip_threshold": 1.0, "beta2_decay": -0.8}
    chosen |= {"relative_step": True, "scale_parameter": True, "eps": [1e-30, 1e-3]} | options
    rows, columns, squares, mean = 0.0, 0.0, 0.0, 0.0

    def rms(tensor):
        return math.sqrt((tensor**2).sum() / tensor.numel())

    def reference(weight, gradient, step):
        nonlocal rows, columns, squares, mean
        beta2 = 1 - step ** chosen["beta2_decay"]
        square = gradient**2 + chosen["eps"][0]
        if gradient.ndim >= 2:
            rows = beta2 * rows + (1 - beta2) * square.sum(-1)
            columns = beta2 * columns + (1 - beta2) * square.sum(-2)
            second = torch.einsum("...n,...m->...nm", rows, columns) / rows.sum(-1)[..., None, None]
        else:
            squares = beta2 * squares + (1 - beta2) * square
            second = squares
        update = gradient / second.sqrt()
        update = update / max(1.0, rms(update) / chosen["clip_threshold"])
        rho = min(chosen["lr"], 1 / math.sqrt(step)) if chosen["relative_step"] else chosen["lr"]
        alpha = max(chosen["eps"][1], rms(weight)) * rho if chosen["scale_parameter"] else rho
        mean = chosen["beta1"] * mean + (1 - chosen["beta1"]) * alpha * update
        return weight - rho * chosen["weight_decay"] * weight - mean

    assert_follows("adafactor", shape, reference, tolerance=1e-6, **chosen)


def test_adafactor_keeps_a_row_and_a_column():
    weight = nn.Parameter(torch.randn(300, 200))
    optimizer = build("adafactor", [weight])
    weight.grad = torch.randn(300, 200)
    optimizer.step()
    assert sum(tensor.numel() for tensor in optimizer.state[weight].values()) == 300 + 200 + 1


def test_adafactor_is_near_torchs_where_both_do_the_same():
    """torch puts the first epsilon elsewhere; with gradients far above it that does not show."""
    ours, theirs = (nn.Parameter(torch.linspace(-1, 1, 35).view(7, 5)) for _ in range(2))
    optimizer, reference = build("adafactor", [ours], lr=0.02), torch.optim.Adafactor([theirs], lr=0.02)
    for _ in range(NUM_STEPS):
        ours.grad = torch.randn(7, 5)
        theirs.grad = ours.grad.clone()
        optimizer.step()
        reference.step()
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-6)


def newton_schulz(matrix, num_iterations):
    """Jordan's loop on one wide matrix."""
    if matrix.shape[0] > matrix.shape[1]:
        return newton_schulz(matrix.T, num_iterations).T
    x = matrix / math.sqrt((matrix**2).sum())
    for _ in range(num_iterations):
        x = 3.4445 * x - 4.7750 * (x @ x.T) @ x + 2.0315 * (x @ x.T) @ (x @ x.T) @ x
    return x


@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (5, 5)])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("scale", ["match_rms_adamw", "original"])
def test_muon(shape, nesterov, scale):
    m = 0.0
    factor = 0.2 * math.sqrt(max(shape)) if scale == "match_rms_adamw" else math.sqrt(max(1, shape[0] / shape[1]))

    def reference(weight, gradient, step):
        nonlocal m
        m = 0.9 * m + 0.1 * gradient
        step = newton_schulz(0.9 * m + 0.1 * gradient if nesterov else m, 5)
        return weight - 0.02 * 0.1 * weight - 0.02 * factor * step

    options = {"lr": 0.02, "momentum": 0.9, "nesterov": nesterov, "weight_decay": 0.1, "muon_scale": scale}
    assert_follows("muon", shape, reference, tolerance=1e-10, **options)


@pytest.mark.parametrize("scale", ["match_rms_adamw", "original"])
def test_muon_is_near_torchs(scale):
    """Both compute in bf16, torch matrix by matrix, so that steps differ by its rounding."""
    shapes = [(32, 16), (16, 32), (32, 16)]
    ours = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    theirs = [nn.Parameter(weight.detach().clone()) for weight in ours]
    before = [weight.detach().clone() for weight in ours]
    optimizer = build("muon", ours, lr=0.01, muon_scale=scale, weight_decay=0.1)
    reference = torch.optim.Muon(theirs, lr=0.01, adjust_lr_fn=scale, weight_decay=0.1)
    for _ in range(NUM_STEPS):
        for left, right in zip(ours, theirs, strict=True):
            left.grad = torch.randn_like(left)
            right.grad = left.grad.clone()
        optimizer.step()
        reference.step()
    for left, right, start in zip(ours, theirs, before, strict=True):
        assert (left - right).norm() < 0.02 * (right - start).norm()


def test_muon_leaves_embeddings_and_vectors_to_adamw():
    torch.manual_seed(0)
    names = ["token_embedding.weight", "layers.0.inner.weight", "layers.0.inner.bias", "lm_head.weight"]
    shapes = [(9, 4), (4, 6), (6,), (4, 9)]
    parameters = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    copies = [nn.Parameter(parameter.detach().clone()) for parameter in parameters]
    entry = OPTIMIZERS.get("muon")
    config = entry.config(lr=0.01, adamw_lr_ratio=0.5, weight_decay=0.1)
    groups = [{"params": parameters, "names": names, "weight_decay": 0.1, "lr_scale": 1.0}]
    optimizer = entry.target(config, param_groups=groups)
    adamw = torch.optim.AdamW(
        [copies[0], copies[2], copies[3]], lr=0.005, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.1
    )
    for left, right in zip(parameters, copies, strict=True):
        left.grad = torch.randn_like(left)
        right.grad = left.grad.clone()
    optimizer.step()
    adamw.step()
    for place in (0, 2, 3):
        assert torch.allclose(parameters[place], copies[place], rtol=0, atol=1e-6)
    assert [group["names"] for group in optimizer.param_groups] == [[names[1]], [names[0], names[2], names[3]]]
    assert set(optimizer.state[parameters[1]]) == {"momentum_buffer"}
    config.adamw_params = ["layers.0.inner"]
    matrices, rest = entry.target(config, param_groups=groups).param_groups
    assert (matrices["names"], rest["names"]) == ([names[0], names[3]], names[1:3])
