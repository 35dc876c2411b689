"""The frozen models of a run, teacher and reference: whether they read the batches as they are, and their weights."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ftk.checkpoint import read_config, resolve_model
from ftk.checkpoint.head import head_in
from ftk.checkpoint.weights import tokenizer_of
from ftk.config import Chosen
from ftk.config.build import as_mapping
from ftk.criterions.base import Criterion
from ftk.criterions.distillation import Distillation
from ftk.errors import UserError
from ftk.hub import load_model
from ftk.model_parallel.collective import on_main
from ftk.model_parallel.engine import adds_alone, lower_residual
from ftk.model_parallel.fully_sharded import cast_as_gathered
from ftk.model_parallel.world import World
from ftk.modules.heads import HeadShape
from ftk.tasks.restore import restore_objective
from ftk.trainer.config import TrainConfig
from ftk.trainer.resume import config_of_run

if TYPE_CHECKING:
    from ftk.tasks.base import Task

logger = logging.getLogger(__name__)


def with_teacher_checkpoint(config: TrainConfig, task: Task) -> TrainConfig:
    """The configuration with the checkpoint that is the teacher, which can read what the task makes.

    Args:
        config: of the run, with the model's configuration completed by the task.

    Raises:
        UserError: there is no model; it has another tokenizer, reads batches otherwise, scores something else, has too
            few positions, or other options that the task decides.
    """
    path = config.distillation.teacher
    if path is None:
        return config
    before = as_mapping("distillation", (config_of_run(config) or {}).get("distillation"))
    path = checkpoint_of("teacher", path, before.get("teacher"))
    teacher = check_frozen("teacher", path, config, task)
    if config.distillation.teacher_hidden_weight:
        if config.engine.compile == "model":
            raise UserError("`teacher_hidden_weight` reads what layers give; use `compile` block or none")
        config.distillation.layer_pairs(*(_num_layers(chosen.config) for chosen in (config.model, teacher)))
    return dataclasses.replace(config, distillation=dataclasses.replace(config.distillation, teacher=path))


def checkpoint_of(option: str, path: str, before: str | None = None) -> str:
    """The checkpoint that is read of a frozen model.

    Args:
        option: what names it.
        path: its folder.
        before: the checkpoint that was read before the run was continued. If it is one of the run that `path` names, it
            is read on: that run may have a better one by now.

    Raises:
        UserError: there is none.
    """
    given = Path(path)
    folders = {given.resolve(), given.parent.resolve() if given.is_symlink() else None}
    if before is not None and Path(before).parent in folders:
        path = before
    try:
        return str(resolve_model(path))
    except UserError as error:
        raise UserError(f"`{option}` {error}; if it was moved, give its new folder by `{option}`") from None


def check_frozen(option: str, path: str, config: TrainConfig, task: Task) -> Chosen:
    """Refuse a frozen model that cannot read what the task makes for the model that is trained.

    Args:
        option: what names it.
        path: its folder.
        config, task: as of `with_teacher_checkpoint`.

    Returns:
        Its family and its options.

    Raises:
        UserError: as of `with_teacher_checkpoint`.
    """
    if hasattr(config.adapter.config, "prompt_ids"):
        raise UserError(
            f"`adapter` {config.adapter.name} has prompt tokens, which a `{option}` does not know; leave one out"
        )
    folder = resolve_model(path)
    learned = restore_objective(folder)
    tokenizer, teacher, own = task.add_special_tokens(tokenizer_of(folder)), learned.model, config.model
    if tokenizer.fingerprint != task.tokenizer.fingerprint:
        raise UserError(
            f"`{option}` {path} has another tokenizer ({tokenizer.described}) than the run "
            f"({task.tokenizer.described}); choose a {option} with the same"
        )
    if teacher.name != own.name and (teacher.entry.task, _inputs(teacher)) != (own.entry.task, _inputs(own)):
        raise UserError(
            f"`{option}` {path} is of the family {teacher.name}, which reads {_described(teacher)}, but the batches "
            f"are for {own.name}, which reads {_described(own)}; choose a {option} that reads the same"
        )
    shape = getattr(task, "shape", None)
    shape = shape if isinstance(shape, HeadShape) else None
    _check_heads(option, path, head_in(read_config(folder)), shape)
    for name in ("kind", "labels"):  # what the scores of a head stand for
        its, ours = (getattr(options, name, None) for options in (learned.task.config, config.task.config))
        if shape is not None and its != ours:
            raise UserError(
                f"`{option}` {path} was trained with `{name}` {_listed(its)}, and the run has {_listed(ours)}"
            )
    try:
        wanted = task.complete_model_config(teacher.config)
    except UserError as error:
        raise UserError(f"`{option}` {path} does not fit the task: {error}") from None
    for name, value in dataclasses.asdict(wanted).items():
        its = getattr(teacher.config, name)
        # A vocabulary is padded as each run likes, and the tokens that end an answer are no part of what is read.
        if value != its and not name.endswith("vocab_size") and name != "end_tokens":
            raise UserError(f"`{option}` {path} was made with `{name}` {its}, but the batches are for {value}")
    return teacher


def with_teacher(own: Criterion, config: TrainConfig, world: World, task: Task) -> Criterion:
    """A task's criterion, and beside it the teacher's probabilities where the run has a teacher.

    Args:
        world: the ranks, each of which has the whole teacher.
    """
    path = config.distillation.teacher
    if path is None:
        return own
    teacher = frozen(path, world, config)
    logger.info("learning from %s, %s parameters", path, f"{sum(p.numel() for p in teacher.parameters()):,}")
    of_labels = isinstance(getattr(task, "shape", None), HeadShape)
    num_tokens = None if of_labels else task.tokenizer.vocab_size
    return Distillation(config.distillation, own, teacher, config.common.seed, num_tokens)


def frozen(path: str, world: World, config: TrainConfig | None = None) -> nn.Module:
    """A whole model on this rank, of which nothing is trained.

    Args:
        config: of a run; the weights have the types that the trained model computes with. None: float32.
    """
    folder = on_main(world, lambda: str(resolve_model(path)))  # once: a run that saves meanwhile moves its links
    model = load_model(folder, "cpu", dtype=torch.float32).requires_grad_(False)
    if config is not None and (world.sizes.shard > 1 or config.parallel.needs_fsdp):
        cast_as_gathered(model, config.parallel, world.device.type, config.training.precision)
    if config is not None and config.engine.residual_precision == "same" and adds_alone(model):
        lower_residual(model)
    return model.to(world.device)


def _num_layers(config: Any) -> int:
    """Layers of a model, of an encoder-decoder those of the decoder."""
    found = getattr(config, "decoder_layers", getattr(config, "num_layers", None))
    if found is None:
        raise UserError("`teacher_hidden_weight` needs models with `num_layers` and a list 'layers'; leave it out")
    return int(found)


def _check_heads(option: str, path: str, its: HeadShape | None, own: HeadShape | None) -> None:
    """Refuse heads whose scores are not of the same things, or give no probabilities."""
    theirs, ours = (
        "the output layer of its family" if one is None else f"a head of {one.num_outputs} scores" for one in (its, own)
    )
    if theirs != ours:
        raise UserError(
            f"`{option}` {path} has {theirs}, and the run {ours}; choose one that was trained for this task"
        )
    if own is not None and own.num_outputs == 1:
        raise UserError(
            f"`{option}`: the run predicts one number for each text, and no probabilities to learn; leave it out"
        )


def _listed(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _inputs(model: Chosen) -> dict[str, str] | None:
    """Names and axes of what a family reads."""
    with torch.device("meta"):
        made: Any = model.build()
    return getattr(made, "INPUTS", None)


def _described(model: Chosen) -> str:
    return f"{', '.join(_inputs(model) or ['inputs of its own'])} of the task {model.entry.task}"
