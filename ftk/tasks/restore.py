"""The task, corpus and criterion that a checkpoint was trained with, over a data folder given now."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from ftk.checkpoint import is_checkpoint, read_config, resolve_model, tokenizer_of
from ftk.checkpoint.adapter import config_beside
from ftk.checkpoint.weights import has_tokenizer
from ftk.config import Chosen, dump, slot
from ftk.config.build import as_mapping, build, build_options
from ftk.config.common import CommonConfig
from ftk.config.options import options_of
from ftk.config.root import Base, Tree
from ftk.data.corpora.corpus import Corpus
from ftk.errors import UserError
from ftk.plugins import naming_plugin
from ftk.registry import ADAPTERS, ARCHITECTURES, CRITERIONS, DATASETS, MODELS, TASKS
from ftk.tasks.base import Task


@dataclass(kw_only=True)
class RestoredTask:
    """The sections of a checkpoint's config.yaml that say its task: where none is named, the model's usual one."""

    model: Chosen = slot(MODELS, flag="--arch", architectures=ARCHITECTURES)
    task: Chosen = slot(TASKS, flag="--task", default_from="model")
    adapter: Chosen = slot(ADAPTERS, flag="--adapter", default="none")


@dataclass(kw_only=True)
class RestoredObjective(RestoredTask):
    """The sections that say what was learned."""

    criterion: Chosen = slot(CRITERIONS, flag="--criterion", default_from="task")


@dataclass(kw_only=True)
class RestoredParts(RestoredObjective):
    """All sections of a checkpoint's config.yaml that make its task."""

    dataset: Chosen = slot(DATASETS, flag="--dataset", default="indexed", default_from="task")


def restore_objective(folder: Path, adapter: str | Path | None = None) -> RestoredObjective:
    """The task and the criterion that a checkpoint, or a separate adapter, was trained with; their plugin is already
    imported."""
    tree = config_beside(folder, adapter)
    with naming_plugin(as_mapping("common", tree.get("common")).get("user_dir")):
        return build(RestoredObjective, _sections(tree, "model", "task", "criterion"))


def restore_base(path: str, task: str | None = None) -> Base:
    """The model, the task and the adapter of a folder with all their options, as a start for further training.

    Of another task only `make_vocab_size_divisible_by` is given, which the model decides, and `template`, by which it
    has learned to be asked, where the task that is trained has one.

    `make_vocab_size_divisible_by` becomes one with which the folder's tokenizer gives the model's number of rows.
    Without a tokenizer there, it is what the folder says, or, if that is 1, the task's usual one where the number of
    rows is a multiple of that.

    Args:
        path: as of `restore_task`.
        task: the name of the one that is trained; None: the folder's.

    Raises:
        UserError: there is no model, or one that is not known here; there is no such task.
    """
    folder = resolve_model(path)
    tree = read_config(folder)
    with naming_plugin(as_mapping("common", tree.get("common")).get("user_dir")):
        parts = build(RestoredTask, _sections(tree, "model", "task", "adapter"))
    sections, entry = dump(parts), parts.task.entry
    divisor, rows = "make_vocab_size_divisible_by", getattr(parts.model.config, "vocab_size", None)
    multiple = sections["task"].get(divisor)
    if parts.adapter.name == "none":
        del sections["adapter"]
    if task is not None and TASKS.get(task) is not entry:
        entry = TASKS.get(task)
        known = [] if entry.config is None else [option.name for option in options_of("task", entry.config)]
        kept = {name: value for name, value in sections["task"].items() if name == "template" and name in known}
        sections["task"] = {"_name": entry.name, **kept}
    usual = getattr(entry.config, divisor, None)
    if usual is None or rows is None:
        return Base(path, sections)
    if has_tokenizer(folder):
        tokenizer = cast("type[Task]", entry.target).add_special_tokens(tokenizer_of(folder))
        if tokenizer.vocab_size <= rows != tokenizer.padded_vocab_size(multiple or usual):
            multiple = rows
    elif multiple in (None, 1) and rows % usual == 0:
        multiple = usual
    if multiple is not None and multiple != sections["task"].get(divisor, usual):
        sections["task"][divisor] = multiple
    return Base(path, sections)


def set_prompt_tokens(task: Task, adapter: Chosen, model_config: Any) -> None:
    """Give a task the prompt tokens of an adapter that has some.

    Raises:
        UserError: its samples have no places for them.
    """
    ids = getattr(adapter.config, "prompt_ids", None)
    if ids is not None:
        task.for_prompts(ids(getattr(model_config, "embedding_rows", model_config.vocab_size)))


def build_corpus(dataset: Chosen, folder: Path | None) -> Corpus:
    """The corpus that was chosen; one without a tokenizer of its own gets that of a model.

    Args:
        dataset: the part and its options.
        folder: of the model that is trained on, if there is one.
    """
    target: Any = dataset.entry.target
    if folder is not None and getattr(target, "TAKES_TOKENIZER", False) and dataset.config.tokenizer_folder is None:
        return dataset.build(tokenizer=tokenizer_of(folder))  # type: ignore[no-any-return]
    return dataset.build()  # type: ignore[no-any-return]


def restore_task(
    path: str | Path, data: str, changes: Tree | None = None, adapter: str | Path | None = None
) -> tuple[Task, RestoredParts]:
    """The checkpoint's task on the folder `data`. Its plugin, if it has one, must have been imported.

    Args:
        path: a checkpoint, a run's folder, or another program's folder that is opened as it is.
        data: folder to take the splits from instead of the one it was trained on.
        changes: section -> options that are not as in the checkpoint, e.g. {"task": {"seq_length": 64}}.
        adapter: folder of a separate adapter for the checkpoint; its task replaces the checkpoint's if it names one.

    Raises:
        UserError: no checkpoint or no data there, or the data was made with another tokenizer.
    """
    folder = resolve_model(path)
    tree = config_beside(folder, adapter)
    common = as_mapping("common", tree.get("common")) | (changes or {}).get("common", {})
    sections = _sections(tree, "model", "task", "dataset", "criterion", "adapter")
    for key in ("task", "criterion"):
        sections[key] |= (changes or {}).get(key, {})
    with naming_plugin(common.get("user_dir")):
        kept = {key: value for key, value in sections["dataset"].items() if key != "data_weights"}  # of other corpora
        sections["dataset"] = {**kept, _place_of_data(sections["dataset"]): data}
        if kept.get("tokenizer_folder") is not None:  # on the machine of the training; the checkpoint has its own
            sections["dataset"]["tokenizer_folder"] = str(folder)
        parts = build(RestoredParts, sections)
        seed = build_options("common", CommonConfig, {"seed": common["seed"]} if "seed" in common else {}).seed
    task: Task = parts.task.build(corpus=build_corpus(parts.dataset, folder), seed=seed)
    task.for_model(parts.model.config)
    set_prompt_tokens(task, parts.adapter, parts.model.config)
    trained_with = tokenizer_of(folder)
    if task.tokenizer.fingerprint != trained_with.fingerprint:
        place = folder / "tokenizer" if is_checkpoint(folder) else folder
        source = "" if trained_with.source is None else f" --source-tokenizer-path {place / trained_with.SOURCE}"
        raise UserError(
            f"{data} was made with another tokenizer ({task.tokenizer.described}) than {path} "
            f"({trained_with.described}); preprocess the text again by "
            f"ftk-preprocess --tokenizer {trained_with.name} --tokenizer-path {place}{source} ..."
        )
    return task, parts


def _sections(tree: Tree, *keys: str) -> dict[str, Tree]:
    return {key: as_mapping(key, tree.get(key)) for key in keys}


def _place_of_data(section: Tree) -> str:
    """The option of the dataset that is given as DATA on the command line."""
    config = DATASETS.get(section.get("_name", "indexed")).config
    assert config is not None, "a dataset without options has no place for DATA"
    return next((option.name for option in options_of("dataset", config) if option.positional), "data")
