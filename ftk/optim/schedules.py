"""Learning rate schedules: pure functions of the number of updates done, each with a warm-up and a floor."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from numbers import Real
from typing import Any

from ftk.config.options import option
from ftk.errors import UserError
from ftk.registry import named, register_lr_scheduler

# Shapes of a fall: the share of the way that is left, from 1 at progress 0 to 0 at progress 1.
SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: (1.0 + math.cos(math.pi * progress)) / 2.0,
    "1-sqrt": lambda progress: 1.0 - math.sqrt(progress),  # Hägele et al. 2024, https://arxiv.org/abs/2405.18392
}


@dataclass(kw_only=True)
class LRSchedulerConfig:
    warmup_updates: int = option(
        0, "the rate rises linearly over this many updates", "[0, inf)", unit="updates", daily=True
    )
    warmup_ratio: float = option(0.0, "warm-up as a share of the whole run; instead of `warmup_updates`", "[0, 1)")
    warmup_init_lr: float = option(
        0.0, "rate from which the warm-up rises", "[0, inf)", needs={("warmup_updates", "warmup_ratio"): True}
    )
    min_lr: float = option(0.0, "floor of the rate after the warm-up", "[0, inf)")
    min_lr_ratio: float = option(0.0, "floor as a share of `lr`; instead of `min_lr`", "[0, 1]")

    def validate(self) -> Iterator[str]:
        for name, ratio in (("warmup_updates", "warmup_ratio"), ("min_lr", "min_lr_ratio")):
            if getattr(self, name) and getattr(self, ratio):
                yield f"{name} is {getattr(self, name)}, {ratio} {getattr(self, ratio)}; give one of them"


@dataclass(kw_only=True)
class DecayConfig(LRSchedulerConfig):
    decay_updates: int = option(
        0, "updates that the decay takes after the warm-up; 0: the rest of the run", "[0, inf)", unit="updates"
    )

    def given_updates(self) -> int:
        """The length of the decay, or of the first of several; 0: the rest of the run."""
        return self.decay_updates


class LRScheduler(ABC):
    """A linear warm-up to `base_lr`, then the rate from `decayed`, never below the floor.

    With W warm-up updates, the n-th update done before (n from 0) has

        lr(n) = init + (base - init) * (n + 1) / W     for n < W   (so no update is spent at a rate of 0)
        lr(n) = max(floor, decayed(n - W))             for n >= W

    Args:
        base_lr: the peak, `lr`.
        total_updates: length of the run where it is known.

    Raises:
        UserError: the schedule needs the length of the run, and there is none.
    """

    OPTIONS = LRSchedulerConfig  # base class of the config of every schedule
    config: Any
    decay_updates: int  # of the schedules whose options are a `DecayConfig`

    def __init__(self, config: LRSchedulerConfig, *, base_lr: float, total_updates: int | None = None) -> None:
        self.config, self.base_lr, self.total_updates = config, base_lr, total_updates
        self.floor = config.min_lr_ratio * base_lr if config.min_lr_ratio else config.min_lr
        self.warmup_init_lr, self.warmup_updates = config.warmup_init_lr, config.warmup_updates
        if config.warmup_ratio:
            self.warmup_updates = round(config.warmup_ratio * self.length("warmup_ratio"))
        if isinstance(config, DecayConfig):
            self.decay_updates = config.given_updates() or max(1, self.length("a decay") - self.warmup_updates)
        self.prepare()

    def prepare(self) -> None:  # noqa: B027 (optional)
        """What a schedule does at the end of `__init__`."""

    def lr(self, num_updates: int) -> float:
        """The learning rate of the update that comes after `num_updates` updates."""
        if num_updates < self.warmup_updates:
            progress = self.rising((num_updates + 1) / self.warmup_updates)
            return self.warmup_init_lr + (self.base_lr - self.warmup_init_lr) * progress
        rate = self.decayed(num_updates - self.warmup_updates)
        if not isinstance(rate, Real) or not math.isfinite(rate):
            raise UserError(
                f"{named(self)}: the learning rate after {num_updates} updates is {rate}; make it a finite number"
            )
        return max(self.floor, rate)

    def rising(self, progress: float) -> float:
        """Share of the way from `warmup_init_lr` to the peak at `progress` of the warm-up in (0, 1]: linear."""
        return progress

    @abstractmethod
    def decayed(self, num_decayed: int) -> float:
        """The learning rate `num_decayed` updates after the warm-up, before the floor is applied."""

    def has_fallen_to(self, lr: float, num_updates: int) -> bool:
        """Whether after `num_updates` updates the warm-up is over and the rate is `lr` or less."""
        return num_updates >= self.warmup_updates and self.lr(num_updates) <= lr * (1 + 1e-9)

    def observe(self, metric: float, *, num_updates: int | None = None, maximize: bool = False) -> None:  # noqa: B027 (optional)
        """Called with the metric after each validation; schedules that depend on it store it.

        Args:
            metric: what ranks checkpoints, `best_metric`.
            num_updates: updates done before the validation; None if that is not known.
            maximize: whether larger is better.
        """

    def state_dict(self) -> dict[str, Any]:
        """The schedule's state for JSON; empty for a pure function of the number of updates."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027 (optional)
        """Restores what `state_dict` returned."""

    def length(self, what: str) -> int:
        """The length of the run, which `what` needs."""
        if self.total_updates is None:
            raise UserError(
                f"lr_scheduler: {what} needs the length of the run; give `max_update` or `max_epoch`, or the "
                f"numbers of updates themselves (`warmup_updates`, `decay_updates`)"
            )
        return self.total_updates


@register_lr_scheduler("constant", config=LRSchedulerConfig)
class Constant(LRScheduler):
    """The peak rate for ever."""

    def decayed(self, num_decayed: int) -> float:
        return self.base_lr


class Annealing(LRScheduler):
    """From `base_lr` to the floor in `decay_updates` updates after the warm-up."""

    shape: Callable[[float], float]
    """Progress in [0, 1] -> the share of the way from the floor to the peak that is left, from 1 to 0."""

    def decayed(self, num_decayed: int) -> float:
        return self.floor + (self.base_lr - self.floor) * self.shape(min(1.0, num_decayed / self.decay_updates))


@register_lr_scheduler("linear", config=DecayConfig)
class Linear(Annealing):
    """A straight line."""

    shape = staticmethod(SHAPES["linear"])


@dataclass(kw_only=True)
class CosineConfig(DecayConfig):
    lr_period_updates: int = option(0, "restart from the peak, first after this many updates; 0: never", "[0, inf)")
    t_mult: float = option(
        1.0, "factor of the length of each next cycle", "[1, inf)", needs={"lr_period_updates": True}
    )
    lr_shrink: float = option(0.1, "factor of the peak at each restart", "(0, 1]", needs={"lr_period_updates": True})

    def given_updates(self) -> int:
        return self.lr_period_updates or self.decay_updates

    def validate(self) -> Iterator[str]:
        yield from super().validate()
        if self.decay_updates and self.lr_period_updates:
            yield f"decay_updates is {self.decay_updates}, lr_period_updates {self.lr_period_updates}; give one of them"


@register_lr_scheduler("cosine", config=CosineConfig)
class Cosine(Annealing):
    """Half a cosine wave, (1 + cos(pi * progress)) / 2 (Loshchilov and Hutter 2017), once or with restarts, whose
    options are fairseq's."""

    shape = staticmethod(SHAPES["cosine"])

    def decayed(self, num_decayed: int) -> float:
        period, factor = self.config.lr_period_updates, self.config.t_mult
        if not period:
            return super().decayed(num_decayed)
        if factor == 1.0:
            cycle, start = num_decayed // period, float(num_decayed // period * period)
        else:  # cycles end at period * (factor ** number - 1) / (factor - 1)
            cycle = int(math.log(1.0 + num_decayed / period * (factor - 1.0), factor) + 1e-9)
            start = period * (factor**cycle - 1.0) / (factor - 1.0)
        progress = max(0.0, num_decayed - start) / (period * factor**cycle)
        peak = self.base_lr * self.config.lr_shrink**cycle
        return self.floor + (peak - self.floor) * self.shape(progress)


@dataclass(kw_only=True)
class PolynomialConfig(DecayConfig):
    power: float = option(1.0, "exponent of (1 - progress)", "(0, inf)")


@register_lr_scheduler("polynomial", config=PolynomialConfig)
class Polynomial(Annealing):
    """(1 - progress) ** power."""

    def shape(self, progress: float) -> float:
        return (1.0 - progress) ** self.config.power


@dataclass(kw_only=True)
class ExponentialConfig(DecayConfig):
    decay_rate: float = option(0.1, "factor by which the rate has fallen after `decay_updates` updates", "(0, 1]")


@register_lr_scheduler("exponential", config=ExponentialConfig)
class Exponential(LRScheduler):
    """base_lr * decay_rate ** (updates after the warm-up / decay_updates), on and on down to the floor."""

    def decayed(self, num_decayed: int) -> float:
        return self.base_lr * self.config.decay_rate ** (num_decayed / self.decay_updates)


@register_lr_scheduler("inverse_sqrt", config=LRSchedulerConfig)
class InverseSqrt(LRScheduler):
    """base_lr * sqrt(W / n) after W warm-up updates: the peak is `lr` (as in fairseq)."""

    def decayed(self, num_decayed: int) -> float:
        start = max(1, self.warmup_updates)
        return self.base_lr * (start / max(start, num_decayed + self.warmup_updates)) ** 0.5


@dataclass(kw_only=True)
class NoamConfig(LRSchedulerConfig):
    model_size: int = option(512, "d in the factor d^-0.5; 1 leaves the factor out", "[1, inf)")

    def validate(self) -> Iterator[str]:
        yield from super().validate()
        if self.warmup_updates < 1 and not self.warmup_ratio:
            yield f"warmup_updates is {self.warmup_updates}; noam needs a warm-up, e.g. `warmup_updates` 4000"
        if self.warmup_init_lr:
            yield f"warmup_init_lr is {self.warmup_init_lr}; the warm-up of noam always rises from 0"


@register_lr_scheduler("noam", config=NoamConfig)
class Noam(LRScheduler):
    """lr * d^-0.5 * min(s^-0.5, s * W^-1.5) at step s = n + 1 (Vaswani et al. 2017, eq. 3).

    Here `lr` is a factor (2.0, say), not the peak; the peak is lr * (d * W)^-0.5.
    """

    def prepare(self) -> None:
        self.warmup_updates = max(1, self.warmup_updates)
        self.base_lr *= (self.config.model_size * self.warmup_updates) ** -0.5
        if self.config.min_lr_ratio:
            self.floor = self.config.min_lr_ratio * self.base_lr

    def decayed(self, num_decayed: int) -> float:
        return self.base_lr * (self.warmup_updates / (self.warmup_updates + num_decayed + 1)) ** 0.5


@dataclass(kw_only=True)
class WarmupStableDecayConfig(DecayConfig):
    decay_updates: int = option(
        0, "updates of the decay at the end of the run; 0: from `decay_ratio`", "[0, inf)", unit="updates"
    )
    decay_ratio: float = option(0.1, "the decay as a share of the run", "(0, 1]")
    decay_shape: str = option("linear", "form of the decay", choices=tuple(SHAPES))


@register_lr_scheduler("warmup_stable_decay", config=WarmupStableDecayConfig)
class WarmupStableDecay(Annealing):
    """Constant after the warm-up, then a decay to the floor at the end (MiniCPM: Hu et al. 2024,
    https://arxiv.org/abs/2404.06395).

    While the rate is constant the length of the run has no influence: a run may be continued with a larger
    `max_update`, and its checkpoints may be decayed on their own.

    Raises:
        UserError: warm-up and decay are longer than the run.
    """

    def prepare(self) -> None:
        config, total = self.config, self.length("warmup_stable_decay")
        self.decay_updates = config.decay_updates or max(1, round(config.decay_ratio * total))
        self.stable_updates, self.shape = total - self.warmup_updates - self.decay_updates, SHAPES[config.decay_shape]
        if self.stable_updates < 0:
            raise UserError(
                f"lr_scheduler: a warm-up of {self.warmup_updates} and a decay of {self.decay_updates} updates do not "
                f"fit into the run's {total}; shorten one of them, or raise `max_update`"
            )

    def decayed(self, num_decayed: int) -> float:
        return super().decayed(max(0, num_decayed - self.stable_updates))


DEFAULT_RISE = 0.3  # of the run, as in torch.optim.lr_scheduler.OneCycleLR


@dataclass(kw_only=True)
class OneCycleConfig(DecayConfig):
    warmup_ratio: float = option(
        0.0, f"the rise as a share of the run; if neither it nor `warmup_updates` is given: {DEFAULT_RISE}", "[0, 1)"
    )
    div_factor: float = option(
        25.0, "the rise starts at `lr` divided by this, unless `warmup_init_lr` is given", "[1, inf)"
    )
    final_div_factor: float = option(
        1e4, "the fall ends at the start's rate divided by this, unless `min_lr`(-ratio) is given", "[1, inf)"
    )
    anneal: str = option("cosine", "form of rise and fall", choices=("cosine", "linear"))


@register_lr_scheduler("one_cycle", config=OneCycleConfig)
class OneCycle(Annealing):
    """One cycle (Smith 2018, https://arxiv.org/abs/1803.09820; the options are those of torch's OneCycleLR).

    From base / div_factor to base in the warm-up; then down to base / (div_factor * final_div_factor). The paper's
    cycle of the momentum is left out.
    """

    def __init__(self, config: OneCycleConfig, *, base_lr: float, total_updates: int | None = None) -> None:
        if not config.warmup_updates and not config.warmup_ratio:
            config = dataclasses.replace(config, warmup_ratio=DEFAULT_RISE)
        super().__init__(config, base_lr=base_lr, total_updates=total_updates)
        self.shape = SHAPES[config.anneal]
        self.warmup_init_lr = config.warmup_init_lr or base_lr / config.div_factor
        self.floor = self.floor or self.warmup_init_lr / config.final_div_factor

    def rising(self, progress: float) -> float:
        return 1.0 - self.shape(progress)


@dataclass(kw_only=True)
class ReduceOnPlateauConfig(LRSchedulerConfig):
    lr_shrink: float = option(0.1, "factor of each drop", "(0, 1)")
    lr_patience: int = option(
        0, "validations in a row that may be no better before the rate drops", "[0, inf)", unit="validations"
    )
    lr_threshold: float = option(1e-4, "by how much a validation must be better to count", "[0, inf)")
    lr_threshold_mode: str = option(
        "rel", "the threshold is a share of the best value, or a difference to it", choices=("rel", "abs")
    )
    lr_cooldown: int = option(0, "validations after a drop that do not count", "[0, inf)", unit="validations")


@register_lr_scheduler("reduce_on_plateau", config=ReduceOnPlateauConfig)
class ReduceOnPlateau(LRScheduler):
    """base_lr * lr_shrink ** (drops until now), the rule of torch's ReduceLROnPlateau.

    Observes `best_metric` after each validation.
    Validations during the warm-up do not count, as in fairseq. Without a validation the rate never drops.
    """

    drops = 0
    best: float | None = None
    validations_without_better = 0
    cooldown_left = 0
    _STATE = ("drops", "best", "validations_without_better", "cooldown_left")

    def decayed(self, num_decayed: int) -> float:
        return self.base_lr * self.config.lr_shrink**self.drops

    def observe(self, metric: float, *, num_updates: int | None = None, maximize: bool = False) -> None:
        if num_updates is not None and num_updates < self.warmup_updates:
            return
        if self._is_better(metric, maximize):
            self.best = metric
            self.validations_without_better = 0
        else:
            self.validations_without_better += 1
        if self.cooldown_left > 0:
            self.cooldown_left -= 1
            self.validations_without_better = 0
        if self.validations_without_better > self.config.lr_patience:
            self.drops += 1
            self.cooldown_left = self.config.lr_cooldown
            self.validations_without_better = 0

    def _is_better(self, metric: float, maximize: bool) -> bool:
        """Whether `metric` is better than the best until now by the threshold; not a number never is."""
        if self.best is None:
            return metric == metric
        margin = self.config.lr_threshold * (self.best if self.config.lr_threshold_mode == "rel" else 1.0)
        return metric > self.best + margin if maximize else metric < self.best - margin

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._STATE}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned; another schedule's state, or none, leaves the initial state."""
        for name in self._STATE:
            setattr(self, name, state.get(name, getattr(self, name)))
