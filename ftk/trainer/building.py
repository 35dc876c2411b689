"""A run's model, before and after it is spread over processes."""

from __future__ import annotations

import functools
import inspect
import os
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from ftk.config import Chosen
from ftk.errors import UserError
from ftk.model_parallel.parallelize import parallelize_training
from ftk.model_parallel.step_module import StepModule
from ftk.model_parallel.world import Sizes, World, launched_by_torchrun, resolve_sizes
from ftk.optim.parameter_groups import ParameterRules, apply_freeze
from ftk.tasks.base import Task
from ftk.trainer.device import resolve_device, to_device
from ftk.trainer.runner import Runner, SequentialRunner
from ftk.trainer.train_config import TrainConfig

if TYPE_CHECKING:
    from ftk.model_parallel.pipeline.layout import PipelineLayout


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


def spread(config: TrainConfig, task: Task, model: nn.Module, criterion: Any, world: World) -> Spread:
    """Spread a model over the processes, in place, and say how micro-batches go through it.

    Args:
        config: of the run.
        task: takes the forward pass.
        model: as `build_model` made it, frozen where it is to be.
        criterion: what the task computes the loss with.
        world: the processes.
    """
    precision, seed = config.training.precision, config.common.seed
    if world.sizes.pipeline > 1:
        from ftk.model_parallel.pipeline.build import build_pipeline

        pipeline = build_pipeline(
            model,
            task,
            criterion,
            world,
            config.parallel,
            config.engine,
            update_freq=config.training.update_freq,
            precision=precision,
            to_device=functools.partial(to_device, device=world.device),
            seed=seed,
        )
        return Spread(pipeline, pipeline.part.model)
    step = StepModule(model, task, criterion)
    module = parallelize_training(step, world, config.parallel, config.engine, precision=precision, seed=seed)
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


def _check_offload(config: TrainConfig) -> None:
    """Refuse what would mix tensors of the host and of a GPU in the optimizer's step."""
    if not config.parallel.cpu_offload or resolve_device(config.common.device).type != "cuda":
        return
    if config.training.precision == "fp16":
        raise UserError(
            "--cpu-offload keeps gradients on the host, where fp16's loss scale is not; use --precision bf16"
        )
    if config.optimizer.name in ("muon", "composite"):
        raise UserError(
            f"--cpu-offload keeps parameters on the host, --optimizer {config.optimizer.name} needs them whole on the "
            f"GPU; use --optimizer adamw"
        )


def check_parallel(config: TrainConfig, task: Task) -> Sizes:
    """Refuse what cannot be spread as the options say, with the numbers: before any process waits for another.

    Args:
        config: the model's completed by the task.
        task: builds the model, on the meta device.

    Returns:
        How many processes there are along each dimension; for --dry-run alone as many as the options need.

    Raises:
        UserError: sizes do not go with the number of processes, heads, layers, schedule or micro-batches.
    """
    parallel = config.parallel
    num_processes = int(os.environ["WORLD_SIZE"]) if launched_by_torchrun() else 1
    if config.command.dry_run and not launched_by_torchrun():
        given = (parallel.data_parallel_shard_size, parallel.data_parallel_replicate_size)
        num_processes = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
        num_processes *= (given[0] or 1) * (given[1] or 1)
    sizes = resolve_sizes(parallel, num_processes)
    _check_offload(config)
    if sizes.pipeline == sizes.tensor == 1:
        return sizes
    with torch.device("meta"):
        model = task.build_model(config.model)
    if sizes.tensor > 1:
        plan = getattr(model, "tensor_parallel_plan", None)
        if plan is None:
            raise UserError(
                f"--tensor-parallel-size {sizes.tensor}: {type(model).__name__} has no plan for tensor parallel; use "
                f"--data-parallel-shard-size, which needs none"
            )
        from ftk.model_parallel.tensor_parallel.apply import check_plan

        check_plan(model, plan, sizes.tensor, parallel.sequence_parallel)
    if sizes.pipeline > 1:
        from ftk.model_parallel.pipeline.layout import check_pipeline

        layers = getattr(model, "layers", ())
        layout = check_pipeline(parallel, config.engine, len(layers), config.training.update_freq)
        if config.parameters.freeze:
            _check_that_all_train(config, model, layout)
    return sizes


def _check_that_all_train(config: TrainConfig, model: nn.Module, layout: PipelineLayout) -> None:
    """Refuse a pipeline of which a process would have no parameter to train: there is no optimizer of none.

    Args:
        model: whole, on the meta device; what is frozen is frozen in it.
    """
    from ftk.model_parallel.pipeline.stages import cut_model

    apply_freeze(model, config.parameters)
    for rank in range(layout.num_ranks):
        if not any(parameter.requires_grad for parameter in cut_model(model, layout, rank).model.parameters()):
            layers = ", ".join(str(layer) for stage in layout.stages_of(rank) for layer in layout.layers_of(stage))
            raise UserError(
                f"--freeze leaves process {rank} of the pipeline, with the layers {layers}, nothing to train; give it "
                f"others too by --pipeline-layers, or take fewer processes"
            )
