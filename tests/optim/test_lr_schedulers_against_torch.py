"""Schedules against those of torch.optim.lr_scheduler and against fairseq's formulas, update by update."""

from __future__ import annotations

import json
import math
import random

import pytest
import torch

from ftk.errors import UserError
from tests.optim.test_lr_schedulers import build

PEAK = 0.8


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


@pytest.mark.parametrize("anneal", ["cosine", "linear"])
@pytest.mark.parametrize("three_phase", [False, True])
def test_one_cycle_is_torchs(anneal, three_phase):
    total, rise = 100, 30
    options = {"warmup_updates": rise, "anneal": anneal, "three_phase": three_phase, "div_factor": 20.0}
    schedule = build("one_cycle", options, PEAK, total)
    expected = torch_rates(
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(
            optimizer,
            PEAK,
            total_steps=total + 1,
            pct_start=(rise + 1) / (total + 1),
            anneal_strategy={"cosine": "cos"}.get(anneal, anneal),
            div_factor=20.0,
            three_phase=three_phase,
        ),
        total,
    )
    # torch spends its first update at the start of the rise and one at the peak; the warm-up here two at the peak.
    ours = [schedule.lr(n) for n in range(total)]
    assert ours[: rise - 1] == pytest.approx(expected[1:rise], rel=1e-9)
    assert ours[rise - 1] == pytest.approx(PEAK)
    assert ours[rise:] == pytest.approx(expected[rise:], rel=1e-9)
    assert schedule.lr(total) == pytest.approx(PEAK / 20 / 1e4)


def test_one_cycle_refuses_three_phases_that_do_not_fit():
    with pytest.raises(UserError, match="must be longer than the rise of 60"):
        build("one_cycle", {"warmup_updates": 60, "three_phase": True}, PEAK, 100)


def test_step_is_torchs():
    every = build("step", {"step_updates": 7, "gamma": 0.7}, PEAK, None)
    expected = torch_rates(lambda o: torch.optim.lr_scheduler.StepLR(o, 7, gamma=0.7), 50)
    assert [every.lr(n) for n in range(50)] == pytest.approx(expected, rel=1e-12)
    given = build("step", {"milestones": [3, 17, 40], "gamma": 0.3}, PEAK, None)
    expected = torch_rates(lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [3, 17, 40], gamma=0.3), 50)
    assert [given.lr(n) for n in range(50)] == pytest.approx(expected, rel=1e-12)


def test_warmup_stable_decay_is_torchs_sequence():
    warmup, stable, decay = 10, 25, 15
    schedule = build("warmup_stable_decay", {"warmup_updates": warmup, "decay_updates": decay}, PEAK, 50)
    expected = torch_rates(
        lambda o: torch.optim.lr_scheduler.SequentialLR(
            o,
            [
                torch.optim.lr_scheduler.LinearLR(o, 1 / warmup, 1.0, warmup - 1),  # its updates: 1/W ... 1
                torch.optim.lr_scheduler.ConstantLR(o, 1.0),
                torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.0, decay),
            ],
            [warmup, warmup + stable],
        ),
        50,
    )
    assert [schedule.lr(n) for n in range(50)] == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_warmup_stable_decay_does_not_depend_on_the_end_while_it_is_stable():
    short, long = (build("warmup_stable_decay", {"warmup_updates": 5, "decay_updates": 10}, 1.0, n) for n in (50, 500))
    assert [short.lr(n) for n in range(41)] == [long.lr(n) for n in range(41)]
    with pytest.raises(UserError, match="warm-up of 30 and a decay of 25 updates do not fit into the run's 50"):
        build("warmup_stable_decay", {"warmup_updates": 30, "decay_updates": 25}, 1.0, 50)


@pytest.mark.parametrize("ratio", [[0.1, 0.4, 0.5], [0.0, 0.5, 0.5], [0.5, 0.0, 0.5]])
def test_tri_stage_is_fairseqs(ratio):
    total, final_scale, init_lr = 200, 0.02, 0.05
    schedule = build(
        "tri_stage", {"phase_ratio": ratio, "final_lr_scale": final_scale, "warmup_init_lr": init_lr}, PEAK, total
    )
    warmup, hold, decay = (int(share * total) for share in ratio)

    def fairseq(step):
        if step < warmup:
            return init_lr + (PEAK - init_lr) / warmup * step
        if step < warmup + hold:
            return PEAK
        if step <= total:
            return PEAK * math.exp(math.log(final_scale) / decay * (step - warmup - hold))
        return PEAK * final_scale

    for n in range(total + 20):
        # fairseq spends its first update at the initial rate; the warm-up here is one step ahead, as everywhere in ftk
        assert schedule.lr(n) == pytest.approx(fairseq(n + 1) if n < warmup - 1 else PEAK if n < warmup else fairseq(n))


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
