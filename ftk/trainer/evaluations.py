"""Evaluations during training: their metrics become figures of each validation, by which checkpoints may be ranked."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ftk.config.choice import named_lines, values_by_name
from ftk.errors import UserError
from ftk.evaluation.cloze import options_as_trained
from ftk.evaluation.evaluation import Evaluation, all_records, build_evaluation
from ftk.evaluation.generation import GeneratedAnswers
from ftk.evaluation.metrics import Metric, measure
from ftk.evaluation.results import labelled
from ftk.files import reason
from ftk.generation.processors.steering import steering_of
from ftk.model_parallel.compile import uncompiled
from ftk.model_parallel.data_parallel import uses_fsdp
from ftk.model_parallel.step_module import StepModule, autocast
from ftk.model_parallel.world import World
from ftk.registry import MODELS, TASKS
from ftk.tasks.answers import usual_task
from ftk.tasks.sft.task import add_chat_framing
from ftk.trainer.config import TrainConfig
from ftk.trainer.hooks import Hook, StepInfo
from ftk.trainer.log.records import Record

if TYPE_CHECKING:
    from ftk.generation.text import TextGenerator
    from ftk.tasks.base import Task


class Prepared(NamedTuple):
    """An evaluation with what it asks, read before the training starts."""

    name: str
    evaluation: Evaluation[Any]
    questions: Sequence[Any]
    metrics: Sequence[Metric]


class EvaluateWith(Hook):
    """Asks the model at each validation; the figures NAME_METRIC stand in the record of the first split.

    Data ranks share the questions. The weights are asked, not their average: as they are, like ftk-evaluate; or in the
    run's precision where they are sharded, since they may be gathered in bf16.

    Args:
        config: of the run, with `evaluate_with`.
        split: where the rows are of evaluations that are given no file.
        module: the model with its loss, as it is trained.

    Raises:
        UserError: the model cannot be asked; an evaluation has no file, or a row of it cannot be asked about.
    """

    def __init__(self, config: TrainConfig, task: Task, split: str, module: StepModule, world: World) -> None:
        self._module, self._shares = module, uses_fsdp(world, config.parallel)
        self._precision = config.training.precision if self._shares else "fp32"
        self._generator = generator = _generator(task, config, module.model)
        self._prepared: list[Prepared] = []
        for name, line, file in _files(config, task, split):
            preset = {} if task.config is None else options_as_trained(dataclasses.asdict(task.config), name, line)
            evaluation = build_evaluation(line, preset)
            if self._precision != "fp32" and isinstance(evaluation, GeneratedAnswers):  # caches have the weights' type
                raise UserError(
                    f"`evaluate_with` {name} finds answers, and needs whole parameters or `precision` fp32; give "
                    f"`data_parallel_replicate_size` instead of `data_parallel_shard_size`"
                )
            try:
                questions = evaluation.questions(file, generator, config.evaluations.evaluation_limit)
            except OSError as error:
                raise UserError(f"`evaluation_data` {file}: {reason(error)}") from None
            self._prepared.append(Prepared(name, evaluation, questions, evaluation.metrics()))
        self.added_figures = [f"{one.name}_{metric.name}" for one in self._prepared for metric in one.metrics]

    def after_validation(self, step: StepInfo, results: dict[str, Record]) -> None:
        found = next(iter(results.values()))
        # Prompts, steps of generation and scored texts have many shapes.
        eager = uncompiled(self._module)
        with torch.no_grad(), self._whole(), autocast(step.device, self._precision), eager:
            for name, evaluation, questions, metrics in self._prepared:
                records = labelled(all_records(evaluation, questions, self._generator, step.world))
                for metric, one in measure(metrics, records, evaluation.group, draws=0).items():
                    found[f"{name}_{metric}"] = math.nan if one.value is None else one.value

    def _whole(self) -> AbstractContextManager[None]:
        """Inside, this process has all parameters."""
        if not self._shares:
            return nullcontext()
        from ftk.model_parallel.fully_sharded import whole_parameters

        return whole_parameters(self._module)


def _files(config: TrainConfig, task: Task, split: str) -> list[tuple[str, str, str]]:
    """Name, line and file of each evaluation."""
    lines = named_lines(config.evaluations.evaluate_with)
    given = values_by_name(config.evaluations.evaluation_data, [name for name, _ in lines], "`evaluation_data`")
    found = []
    for name, line in lines:
        own = task.corpus.file(split) if hasattr(task.corpus, "file") else None
        files = given.get(name) or ([] if own is None else [own])
        if len(files) != 1:
            of_rows = " (rows that `valid_ratio` holds out, or of several data sets)"
            problem = "more than one file" if files else f"no file{of_rows if hasattr(task.corpus, 'file') else ''}"
            raise UserError(f"the evaluation {name} has {problem}; give `evaluation_data` {name}=FILE")
        found.append((name, line, files[0]))
    return found


def _generator(task: Task, config: TrainConfig, model: Any) -> TextGenerator[Any]:
    """What evaluations ask: the model that is trained, with the task's usual options of generation."""
    kind, options, chosen = type(task), task.config, config.model.config
    if task.generates_as_usual:
        kind, usual = usual_task(chosen), TASKS.get(str(MODELS.of_config(chosen).task)).config
        options = None if usual is None else usual()
    framing = kind.framing_as_trained(task.tokenizer, chosen, options)
    has_source = task.tokenizer.source is not None
    if framing is None or not kind.text_generator().needs_framing or has_source:
        own = config.task.name
        if own in [name for name, _ in named_lines(config.evaluations.evaluate_with)]:
            raise UserError(f"`evaluate_with` {own}: its metrics stand in each validation already; leave it out")
        problem = "has a tokenizer of its own for sources" if has_source else "gives no probabilities of texts"
        raise UserError(f"`evaluate_with`: a model of the task {own} {problem}; leave it out")
    generation = kind.generation_config()
    if hasattr(options, "target_length"):
        generation = dataclasses.replace(generation, max_len=options.target_length)
    steering = steering_of(kind.processor_config, task.tokenizer, framing, generation)
    generator = kind.text_generator().assembled(task.tokenizer, model, framing, generation, steering)
    add_chat_framing(generator, chosen)
    return generator
