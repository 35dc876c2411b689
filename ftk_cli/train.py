"""ftk-train: trains a model on the folder that ftk-preprocess wrote."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ftk.config import compose
from ftk.config.build import as_mapping
from ftk.config.root import load_yaml
from ftk.errors import UserError, visible, with_flags
from ftk.plugins import naming_plugin, user_dirs
from ftk.trainer.config import CheckpointConfig, TrainConfig
from ftk_cli import ranks
from ftk_cli.command import report_errors, run, value_of
from ftk_cli.launch import launch

if TYPE_CHECKING:
    from ftk.model_parallel.world import World
    from ftk.tasks.base import Task
    from ftk.trainer.log.log_file import HeldLines

DESCRIPTION = """Trains a model. A run found in --save-dir is continued where it stopped.
Example: ftk-train data-bin --arch gpt2 --max-update 100000 --save-dir run"""


def main(argv: Sequence[str] | None = None) -> int:
    return run("ftk-train", body, argv)


def body(argv: list[str]) -> int:
    if (code := launch("train", argv)) is not None:
        return code
    plugin, words = (None, set()) if value_of(argv, "--user-dir") else _plugin_of_run(argv)
    with naming_plugin(plugin, words):
        config = compose(TrainConfig, "ftk-train", DESCRIPTION, argv)
    return train(config)


def _plugin_of_run(argv: Sequence[str]) -> tuple[object, set[str]]:
    """The plugin of the run in --save-dir, and all words of the run's file, its names and options among them.

    The plugin is None if there is no run, it has none, or its file cannot be read.
    """
    file = Path(value_of(argv, "--save-dir") or CheckpointConfig.save_dir, "config.yaml")
    with suppress(UserError):
        tree = load_yaml(file)
        return as_mapping("common", tree.get("common")).get("user_dir"), set(re.findall(r"\w+", str(tree)))
    return None, set()


def train(config: TrainConfig) -> int:
    """Builds everything that the configuration names, and trains. Returns the exit code.

    Of several processes each does this, with its share of the work.
    """
    from ftk.trainer.log.log_file import HeldLines

    with HeldLines() as held_lines:
        return _train(config, held_lines)


def _train(config: TrainConfig, held_lines: HeldLines) -> int:
    import torch

    if config.command.launch > 1 and "WORLD_SIZE" not in os.environ:
        raise UserError(
            f"command.launch is {config.command.launch}, but a file or an override starts no processes; give "
            f"--launch on the command line of ftk-train"
        )
    if config.common.user_dir is not None:  # so that config.yaml works from every working directory
        places = user_dirs(config.common.user_dir)
        config.common.user_dir = os.pathsep.join(str(Path(place).resolve()) for place in places)
    if config.common.num_threads is not None:
        torch.set_num_threads(config.common.num_threads)

    from ftk.model_parallel.same_start import options_by_flag
    from ftk.model_parallel.world import is_main_process, open_world, resolve_device
    from ftk.tasks.data_facts import check_same_data
    from ftk.trainer.auto_parallel import choose_layout
    from ftk.trainer.dataloading import split_names
    from ftk.trainer.parallel_check import check_parallel
    from ftk.trainer.run import build_task

    config, task = build_task(config)
    config = choose_layout(config, task)
    sizes = check_parallel(config, task)

    if config.command.dry_run:
        if is_main_process():
            from ftk.trainer.dry_run import describe_run

            with torch.device("meta"):
                model = task.build_model(config.model)
            print(with_flags(visible(describe_run(config, task, model, sizes))))
        return 0

    device, longer = resolve_device(config.common.device), "; --collective-timeout-minutes gives it longer"
    facts = options_by_flag("ftk-train", config)
    with (
        open_world(config.parallel, device, facts) as world,
        report_errors("ftk-train"),
        world.name_missing_ranks(longer),
    ):
        check_same_data(task, split_names(config.dataloader), world)
        return _train_in(world, config, task, held_lines)


def _train_in(world: World, config: TrainConfig, task: Task, held_lines: HeldLines) -> int:
    """What one rank of the run does. Returns its exit code."""
    from ftk.trainer.run import build_run
    from ftk.trainer.trainer import Trainer

    if config.lr_range.lr_range_test:
        from ftk.trainer.watch.lr_range import describe_range, lr_range_test, range_config, write_range

        trainer = Trainer(build_run(range_config(config), task=task, world=world), held_lines=held_lines)
        found = lr_range_test(trainer)
        if world.is_main:
            print(
                with_flags("\n".join([*describe_range(found), f"written to {write_range(found, trainer.info.folder)}"]))
            )
        return 0
    summary = Trainer(build_run(config, task=task, world=world), held_lines=held_lines).train()
    if summary.warning is not None:
        ranks.record_failure(summary.warning)
    return summary.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
