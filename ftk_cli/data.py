"""ftk-data: shows, checks and merges data folders. One body per subcommand; the work is done in `ftk.data`."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ftk.config import Chosen, compose, section, slot
from ftk.config.build import as_mapping
from ftk.config.options import option, required
from ftk.config.root import Base, Tree
from ftk.errors import UserError, counted
from ftk.files import as_user_error, write_whole
from ftk.registry import DATASETS, TASKS
from ftk_cli.command import Body, compose_options, run, subcommands

if TYPE_CHECKING:
    from ftk.tasks.base import Task

_NUMBER: dict[str, Any] = {"min": 0, "max": 2**63 - 1}


@dataclass(kw_only=True)
class FolderConfig:
    data: str = required("folder written by ftk-preprocess", positional=True, metavar="DATA-BIN", path=True)


@dataclass(kw_only=True)
class VerifyConfig(FolderConfig):
    user_dir: str | None = option(None, "your package, folder or file that registers the tokenizer", metavar="PATH")


@dataclass(kw_only=True)
class MergeConfig:
    shards: list[str] = required("folders of all shards, in any order; or a pattern", several=True, metavar="DIR")
    destdir: str = required("folder to make; it appears when all is done", metavar="DIR")
    overwrite: bool = option(False, "replace DIR, if ftk has written it")


@dataclass(kw_only=True)
class ShowConfig:
    split: str = option("train", "split to show")
    index: int = option(0, "which document of the split, from 0", **_NUMBER)
    draw: int = option(0, "which of the samples that can be drawn from it, from 0", **_NUMBER)
    seed: int = option(1, "fixes everything that is random", **_NUMBER)
    num_samples: int | None = option(
        None,
        "number of samples from --index on, per objective; default: 1, with --html 3",
        min=1,
        max=10**6,
        unit="samples",
    )
    packed: bool = option(
        False,
        "show samples as they are in training, several documents packed into one; --index is then the sample's number",
    )
    path: str | None = option(
        None,
        "checkpoint, run or Hugging Face folder of the model that reads the samples, for tasks where they depend on "
        "it, such as seq2seq and sft",
        metavar="PATH",
    )
    html: str | None = option(None, "write a page for a browser, one file, instead of printing", metavar="FILE")
    width: int | None = option(None, "width of the page; default: the terminal's", min=40, max=10**4, unit="columns")
    user_dir: str | None = option(
        None, "your package, folder or file that registers tasks, datasets ...", metavar="PATH"
    )


@dataclass(kw_only=True)
class ShowCommand:
    show: ShowConfig = section("what to show")
    dataset: Chosen = slot(
        DATASETS, flag="--dataset", default="indexed", default_from="task", help="where documents come from"
    )
    task: Chosen = slot(TASKS, flag="--task", help="what samples are made for")

    BASE_FROM: ClassVar[tuple[str, ...]] = ("show.path",)

    @staticmethod
    def base(tree: Tree) -> Base | None:
        """What a training that starts from `path` takes of its task: the options, or the template of another task."""
        path, task = (as_mapping(key, tree.get(key)).get(name) for key, name in (("show", "path"), ("task", "_name")))
        if path is None:
            return None
        from ftk.tasks.restore import restore_base

        found = restore_base(path, task)
        return Base(found.source, {"task": found.sections["task"]})


def main(argv: Sequence[str] | None = None) -> int:
    return run(
        "ftk-data",
        subcommands("ftk-data", "Shows, checks and merges the data that ftk-preprocess wrote.", COMMANDS),
        argv,
    )


def stats_body(argv: list[str]) -> int:
    from ftk.data.inspect_data import stats

    config = compose_options(FolderConfig, "ftk-data stats", "Counts and a histogram of document lengths.", argv)
    print(stats(config.data))
    return 0


def verify_body(argv: list[str]) -> int:
    from ftk.data.inspect_data import verify

    config = compose_options(VerifyConfig, "ftk-data verify", "Checks the files against preprocess.json.", argv)
    problems = verify(config.data)
    if problems:
        raise UserError("\n".join([f"{config.data}: found {counted(len(problems), 'problem')}", *problems]))
    recorded = (Path(config.data) / "preprocess.json").exists()
    what = "all files are as ftk-preprocess wrote them" if recorded else "the indexes are whole"
    print(f"{config.data}: {what}")
    return 0


def merge_body(argv: list[str]) -> int:
    from ftk.data.text.merge import merge

    config = compose_options(MergeConfig, "ftk-data merge", MERGE_DESCRIPTION, argv)
    print(merge(config.shards, config.destdir, config.overwrite))
    return 0


def show_body(argv: list[str]) -> int:
    config = compose(ShowCommand, "ftk-data show", SHOW_DESCRIPTION, argv)
    show = config.show
    task = _task_to_show(config)
    shown = task.show(
        show.split,
        page=None if show.html is None else f"ftk-data show {' '.join(argv)}",
        width=show.width or max(60, shutil.get_terminal_size((100, 24)).columns),
        num_samples=show.num_samples,
        index=show.index,
        draw=show.draw,
        seed=show.seed,
        packed=show.packed,
    )
    if show.html is None:
        print(shown)
        return 0
    with as_user_error(f"--html {show.html}"):
        write_whole(show.html, shown)
    print(f"wrote {show.html}")
    return 0


def _task_to_show(config: ShowCommand) -> Task:
    """The task over its corpus; for a model, if one is named, with its tokenizer where the corpus has none."""
    path, seed = config.show.path, config.show.seed
    if path is None:
        return config.task.build(corpus=config.dataset.build(), seed=seed)
    from ftk.checkpoint import resolve_model
    from ftk.tasks.restore import build_corpus, restore_objective

    folder = resolve_model(path)
    task = config.task.build(corpus=build_corpus(config.dataset, folder), seed=seed)
    task.for_model(restore_objective(folder).model.config)
    return task


SHOW_DESCRIPTION = """Shows documents and the samples that a task makes of them.
Example: ftk-data show data-bin --split valid --index 3 --task glm_blank --seq-length 64 --html samples.html"""

MERGE_DESCRIPTION = """Joins the folders that ftk-preprocess --shard 1/N to N/N wrote into the one without --shard.
Example: ftk-data merge --shards 'shards/*' --destdir data-bin"""

COMMANDS: dict[str, tuple[str, Body]] = {
    "stats": ("counts and a histogram of document lengths", stats_body),
    "show": ("shows documents and the samples made of them", show_body),
    "merge": ("joins the folders of ftk-preprocess --shard", merge_body),
    "verify": ("checks the files against preprocess.json", verify_body),
}


if __name__ == "__main__":
    raise SystemExit(main())
