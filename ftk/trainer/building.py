"""A run's model, before and after it is spread over processes."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from torch import nn

from ftk.config import Chosen
from ftk.criterions.base import Criterion
from ftk.model_parallel.parallelize import parallelize_training
from ftk.model_parallel.step_module import StepModule
from ftk.model_parallel.world import World
from ftk.optim.parameter_groups import ParameterRules
from ftk.tasks.base import Task
from ftk.trainer.hooks import Hook
from ftk.trainer.runner import Runner, SequentialRunner
from ftk.trainer.train_config import TrainConfig
from ftk.trainer.watch.anomaly import DetectAnomaly
from ftk.trainer.watch.model_inspection import Inspection
from ftk.trainer.watch.nonfinite import SkippedUpdates
from ftk.trainer.watch.profile import Profile


def build_model(config: TrainConfig, task: Task, world: World) -> nn.Module:
    """The whole model with its initial values; without values where several processes will have a part of it each.

    A model that cannot fill itself name by name (`initial_value`) is built whole on each of them.
    """
    if world.size > 1 and world.sizes.replicate < world.size:
        with torch.device("meta"):
            model = task.build_model(config.model)
        if hasattr(model, "initial_value"):
            return model
    return task.build_model(config.model)


class Spread(NamedTuple):
    """A model that is spread over processes.

    Attributes:
        runner: takes batches through it.
        model: what this process holds of it, under the names of the whole one.
    """

    runner: Runner
    model: nn.Module


def spread(config: TrainConfig, model: nn.Module, criterion: Criterion, world: World, *, fill: bool = True) -> Spread:
    """Spread a model over the processes, in place, and say how micro-batches go through it.

    Args:
        config: of the run.
        model: as `build_model` made it, frozen where it is to be.
        criterion: computes the loss.
        world: the processes.
        fill: off: what has no values yet gets none, as a checkpoint will fill it.
    """
    precision, seed = config.training.precision, config.common.seed
    if world.sizes.pipeline > 1:
        from ftk.model_parallel.pipeline.build import build_pipeline

        pipeline = build_pipeline(
            model,
            criterion,
            world,
            config.parallel,
            config.engine,
            update_freq=config.training.update_freq,
            precision=precision,
            seed=seed,
            fill=fill,
        )
        return Spread(pipeline, pipeline.part.model)
    step = StepModule(model, criterion)
    module = parallelize_training(
        step, world, config.parallel, config.engine, precision=precision, seed=seed, fill=fill
    )
    return Spread(SequentialRunner(module, world.device, precision, several=world.size > 1), model)


def build_optimizer(chosen: Chosen, rules: ParameterRules, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of what this process holds of a model.

    Args:
        chosen: which one; a class whose `__init__` has a parameter `all_names` is also told the names of all trained
            parameters, those of other processes too.
        rules: of the whole model.
        model: this process's part of it.
    """
    target: Any = chosen.entry.target
    known = inspect.signature(target).parameters
    more = {"all_names": rules.names} if "all_names" in known else {}
    return chosen.build(param_groups=rules.groups_of(model), **more)


def debug_hooks(config: TrainConfig, model: nn.Module, world: World) -> list[Hook]:
    """What the section `debug` asks for, and the watch for skipped updates, which every run has.

    The first process alone is profiled; all of them are inspected and searched, at the same time.

    Raises:
        UserError: an `--inspect` pattern matches nothing.
    """
    debug = config.debug
    hooks: list[Hook] = [SkippedUpdates()]
    if debug.profile and world.is_main:
        hooks.append(Profile(debug.profile, debug.profile_start))
    if debug.inspect_interval:
        compiled = config.engine.compile == "model"
        hooks.append(Inspection(debug.inspect_interval, debug.inspect, model, compiled=compiled, world=world))
    if debug.detect_anomaly:  # the last one: it takes the gradients away
        hooks.append(DetectAnomaly())
    return hooks
