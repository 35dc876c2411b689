"""The optimizers and their options, registered here without importing torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ftk.config.options import option
from ftk.registry import register_optimizer

_PENALTY = "L2 penalty added to the gradient; biases and norms are never decayed"


@dataclass(kw_only=True)
class OptimizerConfig:
    """Options of every optimizer."""

    lr: float = option(1e-4, "peak learning rate; the schedule scales it", "[0, inf)", daily=True)
    weight_decay: float = option(0.1, "decoupled weight decay; biases and norms are never decayed", "[0, inf)")

    @property
    def state_bytes(self) -> float:
        """Approximate optimizer state per parameter, without weight and gradient: here two moments in fp32."""
        return 8.0


def two_betas(first: float, second: float) -> Any:
    """The option of Adam and its kin."""
    text = "decay rates of the running means of gradient and squared gradient"
    return option([first, second], text, "[0, 1)", count=2)


@dataclass(kw_only=True)
class AdamWConfig(OptimizerConfig):
    """Options of AdamW; the defaults are those of large language models (decay 0.1, a second beta of 0.98)."""

    betas: list[float] = two_betas(0.9, 0.98)
    eps: float = option(1e-6, "added to the denominator for stability", "[0, inf)")


@dataclass(kw_only=True)
class AdamConfig(OptimizerConfig):
    """Options of Adam; the defaults are the paper's."""

    weight_decay: float = option(0.0, _PENALTY, "[0, inf)")
    betas: list[float] = two_betas(0.9, 0.999)
    eps: float = option(1e-8, "added to the denominator for stability", "[0, inf)")


@dataclass(kw_only=True)
class SGDConfig(OptimizerConfig):
    """Options of SGD."""

    weight_decay: float = option(0.0, _PENALTY, "[0, inf)")
    momentum: float = option(0.0, "share of the last step that is kept", "[0, 1)")
    nesterov: bool = option(False, "Nesterov's momentum (needs momentum above 0)")

    @property
    def state_bytes(self) -> float:
        return 4.0 if self.momentum else 0.0

    def validate(self) -> Iterator[str]:
        if self.nesterov and self.momentum == 0.0:
            yield "nesterov is true; it needs a momentum above 0"


@dataclass(kw_only=True)
class LionConfig(OptimizerConfig):
    """Options of Lion. Against AdamW take a rate 3 to 10 times smaller and a decay as much larger (sec. 5)."""

    weight_decay: float = option(1.0, "decoupled weight decay; biases and norms are never decayed", "[0, inf)")
    betas: list[float] = option(
        [0.9, 0.99], "share of the momentum in the step's direction; decay rate of the momentum", "[0, 1)", count=2
    )

    @property
    def state_bytes(self) -> float:
        return 4.0


@dataclass(kw_only=True)
class LambConfig(OptimizerConfig):
    """Options of LAMB; betas and eps are the paper's for BERT."""

    lr: float = option(2e-3, "peak learning rate; the schedule scales it", "[0, inf)", daily=True)
    weight_decay: float = option(0.01, "decoupled weight decay; biases and norms are never decayed", "[0, inf)")
    betas: list[float] = two_betas(0.9, 0.999)
    eps: float = option(1e-6, "added to the denominator for stability", "[0, inf)")
    always_adapt: bool = option(
        False, "scale the steps of parameters without weight decay (biases, norms) too, as in the paper"
    )


@dataclass(kw_only=True)
class AdafactorConfig(OptimizerConfig):
    """Options of Adafactor; with the defaults and a constant schedule it is algorithm 4 of the paper."""

    lr: float = option(1e-2, "peak learning rate; relative to the weights, see below", "[0, inf)", daily=True)
    weight_decay: float = option(0.0, "decoupled weight decay; biases and norms are never decayed", "[0, inf)")
    relative_step: bool = option(True, "the rate of update t is at most 1 / sqrt(t)")
    scale_parameter: bool = option(True, "the rate is multiplied by the root mean square of the parameter")
    clip_threshold: float = option(
        1.0, "steps are scaled down to this root mean square before the rate is applied", "(0, inf)"
    )
    beta2_decay: float = option(
        -0.8, "the decay rate of the second moment at update t is 1 - t ** this; below 0", "(-inf, 0)"
    )
    beta1: float = option(0.0, "decay rate of the running mean of the steps; 0: no such mean is kept", "[0, 1)")
    eps: list[float] = option(
        [1e-30, 1e-3], "added to squared gradients; floor of a parameter's root mean square", "(0, inf)", count=2
    )

    @property
    def state_bytes(self) -> float:
        return 4.0 if self.beta1 else 0.0  # rows and columns are next to nothing


@dataclass(kw_only=True)
class MuonConfig(AdamWConfig):
    """Options of Muon; betas and eps are those of its AdamW."""

    lr: float = option(
        1e-3, "peak learning rate of the hidden matrices; the schedule scales it", "[0, inf)", daily=True
    )
    momentum: float = option(0.95, "decay rate of the mean of gradients", "[0, 1)")
    nesterov: bool = option(True, "look one step ahead, as Nesterov's momentum does")
    ns_steps: int = option(
        5, "Newton-Schulz iterations that make a step orthogonal", "[1, inf)", max=100, unit="iterations"
    )
    muon_scale: str = option(
        "match_rms_adamw",
        "size of a step of an N x M matrix: 0.2 sqrt(max(N, M)), as large as AdamW's, so that rates and "
        "decays for AdamW are good here; or sqrt(max(1, N / M)), for which rates are about 0.02",
        choices=("match_rms_adamw", "original"),
    )
    adamw_params: list[str] = option(
        ["*embed*", "*lm_head*", "*output_projection*"],
        "matrices that AdamW updates, by name or by module; shell patterns",
        metavar="PATTERNS",
    )
    adamw_lr_ratio: float = option(1.0, "the rate of the AdamW part as a multiple of `lr`", "(0, inf)")


register_optimizer("adamw", config=AdamWConfig)("ftk.optim.torch_optim:adamw")
register_optimizer("adam", config=AdamConfig)("ftk.optim.torch_optim:adam")
register_optimizer("sgd", config=SGDConfig)("ftk.optim.foreach:SGD")
register_optimizer("lion", config=LionConfig)("ftk.optim.foreach:Lion")
register_optimizer("lamb", config=LambConfig)("ftk.optim.foreach:Lamb")
register_optimizer("adafactor", config=AdafactorConfig)("ftk.optim.foreach:Adafactor")
register_optimizer("muon", config=MuonConfig)("ftk.optim.muon:Muon")
