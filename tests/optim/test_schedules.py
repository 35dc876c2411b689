"""Learning rate schedules against a table worked out by hand, and against torch's where the rule is long."""

from __future__ import annotations

import json
import math
import random
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ftk.config.options import mistakes
from ftk.errors import UserError
from ftk.optim.schedules import LRScheduler, LRSchedulerConfig
from ftk.registry import LR_SCHEDULERS

TABLES = [
    # name, options, base lr, total updates, {updates done before: learning rate}
    ("constant", {}, 0.5, None, {0: 0.5, 10**6: 0.5}),
    ("constant", {"warmup_updates": 4}, 1.0, None, {0: 0.25, 1: 0.5, 2: 0.75, 3: 1.0, 4: 1.0, 99: 1.0}),
    ("constant", {"warmup_updates": 4, "warmup_init_lr": 0.2}, 1.0, None, {0: 0.4, 1: 0.6, 3: 1.0}),
    ("constant", {"warmup_ratio": 0.1}, 1.0, 40, {0: 0.25, 3: 1.0, 39: 1.0}),
    ("linear", {}, 1.0, 10, {0: 1.0, 5: 0.5, 9: 0.1, 10: 0.0, 99: 0.0}),
    ("linear", {"warmup_updates": 2, "min_lr": 0.2}, 1.0, 10, {0: 0.5, 1: 1.0, 2: 1.0, 6: 0.6, 10: 0.2, 99: 0.2}),
    ("linear", {"min_lr_ratio": 0.1, "decay_updates": 4}, 2.0, 100, {0: 2.0, 2: 1.1, 4: 0.2, 50: 0.2}),
    ("cosine", {}, 1.0, 8, {0: 1.0, 2: (1 + math.sqrt(0.5)) / 2, 4: 0.5, 6: (1 - math.sqrt(0.5)) / 2, 8: 0.0}),
    (
        "cosine",
        {"warmup_updates": 2, "min_lr_ratio": 0.05, "decay_updates": 4},
        4e-4,
        None,
        {0: 2e-4, 1: 4e-4, 2: 4e-4, 4: 2.1e-4, 6: 2e-5, 1000: 2e-5},
    ),
    (  # cycles of 2, 4 and 8 updates, with peaks of 1, 0.5 and 0.25
        "cosine",
        {"warmup_updates": 2, "lr_period_updates": 2, "t_mult": 2.0, "lr_shrink": 0.5, "min_lr": 0.1},
        1.0,
        None,
        {0: 0.5, 2: 1.0, 3: 0.55, 4: 0.5, 6: 0.3, 8: 0.25, 12: 0.175, 16: 0.125, 10**6: 0.1},
    ),
    ("polynomial", {"power": 2.0}, 1.0, 10, {0: 1.0, 5: 0.25, 9: 0.01, 10: 0.0}),
    ("polynomial", {"power": 0.5, "min_lr": 0.5}, 1.5, 4, {0: 1.5, 3: 1.0, 4: 0.5}),
    ("exponential", {"decay_rate": 0.01}, 1.0, 10, {0: 1.0, 5: 0.1, 10: 0.01, 20: 1e-4}),
    ("exponential", {"decay_rate": 0.01, "min_lr": 0.05}, 1.0, 10, {5: 0.1, 10: 0.05, 20: 0.05}),
    ("inverse_sqrt", {"warmup_updates": 4}, 1.0, None, {0: 0.25, 3: 1.0, 4: 1.0, 16: 0.5, 64: 0.25}),
    ("inverse_sqrt", {"warmup_updates": 4, "min_lr": 0.3}, 1.0, None, {16: 0.5, 64: 0.3}),
    ("inverse_sqrt", {}, 1.0, None, {0: 1.0, 1: 1.0, 4: 0.5}),
    (
        "noam",
        {"warmup_updates": 4, "model_size": 16},
        2.0,
        None,
        {0: 2 / 4 * 1 / 8, 1: 2 / 4 * 2 / 8, 3: 2 / 4 / 2, 8: 2 / 4 / 3, 15: 2 / 4 / 4},
    ),
    ("noam", {"warmup_updates": 4, "model_size": 1, "min_lr": 0.25}, 1.0, None, {3: 0.5, 15: 0.25, 99: 0.25}),
    (
        "warmup_stable_decay",
        {"warmup_updates": 2, "decay_updates": 4},
        1.0,
        20,
        {0: 0.5, 2: 1.0, 16: 1.0, 18: 0.5, 20: 0.0},
    ),
    (
        "warmup_stable_decay",
        {"decay_ratio": 0.2, "min_lr": 0.2},
        1.0,
        20,
        {16: 1.0, 17: 0.8, 18: 0.6, 20: 0.2, 30: 0.2},
    ),
    ("warmup_stable_decay", {"decay_shape": "1-sqrt"}, 1.0, 40, {36: 1.0, 37: 0.5, 40: 0.0}),
    (
        "warmup_stable_decay",
        {"decay_shape": "cosine", "decay_updates": 4},
        1.0,
        8,
        {4: 1.0, 5: (1 + math.sqrt(0.5)) / 2, 6: 0.5},
    ),
    ("one_cycle", {"anneal": "linear"}, 1.0, 10, {0: 0.36, 1: 0.68, 2: 1.0, 3: 1.0, 10: 4e-6, 50: 4e-6}),
    (
        "one_cycle",
        {"warmup_updates": 2, "min_lr": 0.2, "warmup_init_lr": 0.5, "anneal": "linear"},
        1.0,
        6,
        {0: 0.75, 4: 0.6, 6: 0.2},
    ),
    ("reduce_on_plateau", {"warmup_updates": 2}, 1.0, None, {0: 0.5, 1: 1.0, 1000: 1.0}),
]
PEAK = 0.8


@pytest.mark.parametrize(("name", "options", "base_lr", "total_updates", "table"), TABLES)
def test_learning_rates_are_those_of_the_table(name, options, base_lr, total_updates, table):
    schedule = build(name, options, base_lr, total_updates)
    assert {n: schedule.lr(n) for n in table} == pytest.approx(table, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("name", [name for name in LR_SCHEDULERS.names() if name != "one_cycle"])  # rises otherwise
def test_the_warm_up_is_linear_and_the_floor_holds(name):
    schedule = build(name, {"warmup_updates": 10, "min_lr_ratio": 0.3}, 1.0, 50)
    peak = schedule.lr(9)
    assert [schedule.lr(n) for n in range(10)] == pytest.approx([peak * (n + 1) / 10 for n in range(10)])
    assert min(schedule.lr(n) for n in range(10, 1000)) >= 0.3 * peak * (1 - 1e-12)
    assert max(schedule.lr(n) for n in range(1000)) <= peak


@pytest.mark.parametrize("name", ["linear", "cosine", "polynomial", "exponential", "one_cycle", "warmup_stable_decay"])
def test_a_decay_without_a_length_is_refused(name):
    with pytest.raises(UserError, match="`max_update`"):
        build(name, {}, 1.0, None)


def test_the_published_schedule_of_glm_base():
    # the original's AnnealingLR after its warm-up: lr * (0.05 + 0.95 * (1 + cos(pi * i / 120000)) / 2)
    schedule = build("cosine", {"warmup_updates": 6000, "decay_updates": 120_000, "min_lr_ratio": 0.05}, 4e-4, 150_000)
    for i in (0, 1, 30_000, 60_000, 119_999, 130_000):
        expected = 4e-4 * (0.05 + 0.95 * (1 + math.cos(math.pi * min(1.0, i / 120_000))) / 2)
        assert schedule.lr(6000 + i) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("constant", {"warmup_updates": -1}, "warmup_updates is -1; it must be at least 0"),
        ("constant", {"warmup_ratio": 1.0}, r"warmup_ratio is 1.0; it must be at least 0 and below 1"),
        ("constant", {"min_lr": 1e-5, "min_lr_ratio": 0.1}, "give one of them"),
        ("linear", {"decay_updates": -3}, "decay_updates is -3"),
        ("cosine", {"decay_updates": 3, "lr_period_updates": 4}, "lr_period_updates 4; give one of them"),
        ("cosine", {"lr_period_updates": 4, "t_mult": 0.5}, "t_mult is 0.5; it must be at least 1"),
        ("polynomial", {"power": 0.0}, "power is 0.0; it must be above 0"),
        ("exponential", {"decay_rate": 1.5}, r"decay_rate is 1.5; it must be above 0 and at most 1"),
        ("noam", {}, "noam needs a warm-up"),
        ("noam", {"model_size": 0, "warmup_updates": 1}, "model_size is 0"),
        ("warmup_stable_decay", {"decay_ratio": 0.0}, "decay_ratio is 0.0"),
        ("one_cycle", {"div_factor": 0.5}, "div_factor is 0.5; it must be at least 1"),
        ("one_cycle", {"final_div_factor": 0.0}, "final_div_factor is 0.0; it must be at least 1"),
        ("reduce_on_plateau", {"lr_shrink": 1.0}, r"lr_shrink is 1.0; it must be above 0 and below 1"),
        ("reduce_on_plateau", {"lr_patience": -1}, "lr_patience is -1"),
        ("reduce_on_plateau", {"lr_threshold": -0.1}, "lr_threshold is -0.1"),
        ("reduce_on_plateau", {"lr_cooldown": -1}, "lr_cooldown is -1"),
    ],
)
def test_options_out_of_range_are_named(name, options, message):
    errors = mistakes(LR_SCHEDULERS.get(name).config(**options))
    assert len(errors) == 1
    assert re.search(message, errors[0])


@pytest.mark.parametrize("name", ["step", "tri_stage"])
def test_a_removed_name_says_what_to_use_instead(name):
    with pytest.raises(UserError, match=f"lr_scheduler '{name}' was removed; use ") as caught:
        LR_SCHEDULERS.get(name)
    assert str(caught.value).split()[-1] in LR_SCHEDULERS.names()


def build(name, options, base_lr, total_updates):
    entry = LR_SCHEDULERS.get(name)
    config = entry.config(**options)
    assert mistakes(config) == []
    return entry.target(config, base_lr=base_lr, total_updates=total_updates)


def test_a_rate_that_the_warm_up_has_not_reached_yet_is_no_fall():
    schedule = build("linear", {"warmup_updates": 10, "min_lr": 0.1}, 1.0, 20)
    assert [n for n in range(25) if schedule.has_fallen_to(0.1, n)] == [20, 21, 22, 23, 24]
    assert [n for n in range(25) if schedule.has_fallen_to(0.5, n)] == list(range(16, 25))


@st.composite
def schedules(draw):
    """Any schedule with any options that fit a run of 60 updates."""
    name = draw(st.sampled_from(LR_SCHEDULERS.names()))
    options = {"warmup_updates": draw(st.integers(0 if name != "noam" else 1, 20))}
    if draw(st.booleans()):
        options["min_lr_ratio"] = draw(st.floats(0.0, 0.9))
    if hasattr(LR_SCHEDULERS.get(name).config, "decay_updates") and draw(st.booleans()):
        options["decay_updates"] = draw(st.integers(21, 40))
    if name == "warmup_stable_decay":
        options["decay_shape"] = draw(st.sampled_from(["linear", "cosine", "1-sqrt"]))
    if name == "one_cycle":
        options["anneal"] = draw(st.sampled_from(["linear", "cosine"]))
    return name, options


@given(schedules())
def test_every_schedule_rises_then_falls_and_stays_between_floor_and_peak(chosen):
    name, options = chosen
    schedule = build(name, options, 0.5, 60)
    peak, warmup = schedule.base_lr, schedule.warmup_updates
    rates = [schedule.lr(n) for n in range(100)]
    assert all(math.isfinite(rate) and 0.0 <= rate <= peak * (1 + 1e-12) for rate in rates)
    assert rates[:warmup] == sorted(rates[:warmup])
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)
    assert min(rates[warmup:]) >= schedule.floor
    if warmup:
        assert rates[warmup - 1] == pytest.approx(peak)


def torch_rates(make, num_updates):
    """The rate of each update under a scheduler of torch, made by `make(optimizer)`."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK, momentum=0.9)
    scheduler = make(optimizer)
    rates = []
    for _ in range(num_updates):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize(("period", "factor"), [(7, 1), (5, 2), (4, 3)])
def test_cosine_with_restarts_is_torchs(period, factor):
    options = {"lr_period_updates": period, "t_mult": factor, "lr_shrink": 1.0, "min_lr": 0.01}
    schedule = build("cosine", options, PEAK, None)
    restarts = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts
    expected = torch_rates(lambda optimizer: restarts(optimizer, period, factor, eta_min=0.01), 500)
    assert [schedule.lr(n) for n in range(500)] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("anneal", ["cosine", "linear"])
def test_one_cycle_is_torchs(anneal):
    total, rise = 100, 30
    options = {"warmup_updates": rise, "anneal": anneal, "div_factor": 20.0}
    schedule = build("one_cycle", options, PEAK, total)
    expected = torch_rates(
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(
            optimizer,
            PEAK,
            total_steps=total + 1,
            pct_start=(rise + 1) / (total + 1),
            anneal_strategy={"cosine": "cos"}.get(anneal, anneal),
            div_factor=20.0,
        ),
        total,
    )
    # torch spends its first update at the start of the rise and one at the peak; the warm-up here two at the peak.
    ours = [schedule.lr(n) for n in range(total)]
    assert ours[: rise - 1] == pytest.approx(expected[1:rise], rel=1e-9)
    assert ours[rise - 1] == pytest.approx(PEAK)
    assert ours[rise:] == pytest.approx(expected[rise:], rel=1e-9)
    assert schedule.lr(total) == pytest.approx(PEAK / 20 / 1e4)


def test_warmup_stable_decay_does_not_depend_on_the_end_while_it_is_stable():
    short, long = (build("warmup_stable_decay", {"warmup_updates": 5, "decay_updates": 10}, 1.0, n) for n in (50, 500))
    assert [short.lr(n) for n in range(41)] == [long.lr(n) for n in range(41)]
    with pytest.raises(UserError, match="warm-up of 30 and a decay of 25 updates do not fit into the run's 50"):
        build("warmup_stable_decay", {"warmup_updates": 30, "decay_updates": 25}, 1.0, 50)


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("threshold_mode", ["rel", "abs"])
@pytest.mark.parametrize(("patience", "cooldown"), [(0, 0), (2, 0), (1, 2)])
def test_reduce_on_plateau_is_torchs(mode, threshold_mode, patience, cooldown):
    options = {"lr_patience": patience, "lr_cooldown": cooldown, "lr_threshold": 0.05, "lr_shrink": 0.5}
    schedule = build("reduce_on_plateau", options | {"lr_threshold_mode": threshold_mode, "min_lr": 0.01}, PEAK, None)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    reference = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer,
        mode,
        factor=0.5,
        patience=patience,
        threshold=0.05,
        threshold_mode=threshold_mode,
        cooldown=cooldown,
        min_lr=0.01,
    )
    random.seed(3)
    rates = set()
    for num_updates in range(60):
        metric = math.nan if num_updates % 13 == 5 else 3.0 - num_updates / 40 + random.uniform(-0.5, 0.5)
        metric = -metric if mode == "max" and num_updates > 50 else metric
        reference.step(metric)
        schedule.observe(metric, num_updates=num_updates, maximize=mode == "max")
        rates.add(schedule.lr(num_updates))
        assert schedule.lr(num_updates) == pytest.approx(optimizer.param_groups[0]["lr"])
        # as saved and restored after each validation
        state = json.loads(json.dumps(schedule.state_dict(), allow_nan=False))
        schedule = build(
            "reduce_on_plateau", options | {"lr_threshold_mode": threshold_mode, "min_lr": 0.01}, PEAK, None
        )
        schedule.load_state_dict(state)
    assert len(rates) > 3


def test_reduce_on_plateau_does_not_count_validations_of_the_warm_up():
    schedule = build("reduce_on_plateau", {"warmup_updates": 10}, 1.0, None)
    for num_updates, metric in ((4, 1.0), (8, 2.0), (12, 3.0)):
        schedule.observe(metric, num_updates=num_updates)
    assert schedule.lr(12) == 1.0
    schedule.observe(3.0, num_updates=16)
    assert schedule.lr(16) == pytest.approx(0.1)


@pytest.mark.parametrize("rate", [float("nan"), float("inf"), None])
def test_a_rate_that_is_no_number_is_refused(rate):
    class Broken(LRScheduler):
        def decayed(self, num_decayed):
            return rate

    schedule = Broken(LRSchedulerConfig(warmup_updates=1), base_lr=1.0)
    assert schedule.lr(0) == 1.0
    with pytest.raises(UserError, match=rf"Broken \(.*: the learning rate after 1 updates is {rate}; make it a "):
        schedule.lr(1)
