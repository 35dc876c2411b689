"""ftk-hydra-train: the same training through Hydra's launcher, with its overrides, multirun and sweeps."""

from __future__ import annotations

import os
import re
import shlex
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ftk.config.options import NONE, underflows
from ftk.errors import UserError, closest, shown, visible
from ftk_cli.command import USER_ERROR, run

if TYPE_CHECKING:
    from omegaconf import DictConfig

USAGE = """usage: ftk-hydra-train [--config-name RECIPE] [--config-dir DIR] [-m] [key.sub=value ...]

Trains with Hydra: groups and values are overridden by key=value, -m (--multirun) runs every combination, and prints
mean and deviation over the seeds of each.
Recipes: {recipes}; or your own YAML by --config-dir.

examples:
  ftk-hydra-train --config-name glm_large dataset.data=data-bin checkpoint.save_dir=run
  ftk-hydra-train -m --config-name glm_tiny dataset.data=data-bin optimizer.lr=1e-3,3e-4 common.seed=1,2,3 \\
      'checkpoint.save_dir=runs/lr_${{optimizer.lr}}_seed_${{common.seed}}'
  ftk-hydra-train --config-name glm_tiny dataset.data=data-bin common.user_dir=my_plugin task=my_task

  --cfg job          print the composed configuration and stop
  --help, --version  this help; the version
Everything else is Hydra's own: see https://hydra.cc/docs/advanced/hydra-command-line-flags
"""


USER_DIR = "common.user_dir"
NO_SETTINGS = "no table of settings: {}"


def main(argv: Sequence[str] | None = None) -> int:
    return run("ftk-hydra-train", body, argv)


def body(argv: list[str]) -> int:
    from ftk.config.hydra import recipes

    if "--version" in argv:
        from ftk.version import __version__

        print(f"ftk {__version__}")
        return 0
    if "--help" in argv or "-h" in argv:
        print(USAGE.format(recipes=", ".join(recipes())))
        return 0
    return _launch(argv)


def _launch(argv: list[str]) -> int:
    import hydra

    from ftk.config.hydra import composition_errors, recipe_folder, register_groups
    from ftk.plugins import import_entry_points, import_user_dir
    from ftk.trainer.config import TrainConfig

    given = _read(argv)
    user_dirs = [value for name, value in map(_override, given.overrides) if name == USER_DIR]
    _check_recipe(given, bool(user_dirs))
    import_entry_points()
    for path in user_dirs:
        if path.lower() not in ("", *NONE):
            import_user_dir(path)
    register_groups(TrainConfig)
    jobs = _Jobs(given, has_plugin=bool(user_dirs))
    # Hydra reads the process's own arguments; and with this variable it lets errors through to `run`.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    sys.argv = ["ftk-hydra-train", *_in_order(given)]
    try:
        hydra.main(version_base="1.3", config_path=str(recipe_folder()), config_name=None)(jobs.run)()
    except Exception as error:
        if isinstance(error, composition_errors(with_pythons=not jobs.is_composed)):
            raise UserError(_explained(error, TrainConfig, given)) from error
        if given.multirun:
            print(NO_SETTINGS.format("a run failed; `ftk-report FOLDER ... --settings FILE` has those that ended"))
        raise
    if jobs.mistakes:
        raise jobs.mistakes[0]
    if given.multirun and not jobs.folders:
        print(NO_SETTINGS.format("the launcher ran them elsewhere; `ftk-report FOLDER ... --settings FILE` makes it"))
    elif given.multirun:
        tell_settings(jobs.folders, Path(jobs.sweep))
    return max(jobs.codes, default=0)


@dataclass
class _Jobs:
    """The trainings that Hydra launches."""

    given: Namespace
    has_plugin: bool  # in the arguments
    codes: list[int] = field(default_factory=list)
    mistakes: list[UserError] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)
    sweep: str = ""  # folder of Hydra's own files
    is_composed: bool = False

    def run(self, composed: DictConfig) -> int:
        """One training; returns its exit code."""
        from hydra.core.hydra_config import HydraConfig

        from ftk.config.build import build
        from ftk.config.hydra import to_tree
        from ftk.plugins import refuse_recorded
        from ftk.trainer.config import TrainConfig
        from ftk_cli.train import train

        self.is_composed = True
        tree, self.sweep = to_tree(composed), HydraConfig.get().sweep.dir
        if self.given.multirun and not HydraConfig.get().job.chdir:
            _check_folders(self.given.overrides, composed)
        if not self.has_plugin:  # in a file that the recipe is made of
            refuse_recorded("the recipe", tree, f"{USER_DIR}=")
        try:
            config = build(TrainConfig, tree, given=[name for name, _ in map(_override, self.given.overrides)])
            self.folders.append(config.checkpoint.save_dir)
            self.codes.append(train(config))
        except UserError as mistake:
            if self.given.multirun:
                raise
            self.mistakes.append(mistake)  # Hydra would put a line of its own before the message
            _remove_records(HydraConfig.get())
            return USER_ERROR
        if self.codes[-1] != 0:  # a signal ended this job, and with it the whole sweep
            raise KeyboardInterrupt
        return self.codes[-1]


def _check_folders(overrides: list[str], composed: Any) -> None:
    """Refuses a sweep whose runs would write into one folder."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from omegaconf import OmegaConf

    parsed = OverridesParser.create().parse_overrides(overrides)
    swept = [override.key_or_group for override in parsed if override.is_sweep_override()]
    own: Any = OmegaConf.to_container(composed, resolve=False)
    folder = str((own.get("checkpoint") or {}).get("save_dir", ""))
    if swept and "checkpoint.save_dir" not in swept and "${" not in folder:
        example = f"'checkpoint.save_dir=runs/{swept[0].rpartition('.')[2]}_${{{swept[0]}}}'"
        raise UserError(f"each run of a sweep needs a folder of its own; give it a name with what is swept: {example}")


def _remove_records(hydra: Any) -> None:
    """Remove what Hydra has written about a job that did not start, and the folders that it made for that."""
    folder = Path(hydra.runtime.output_dir)
    if hydra.output_subdir is not None:
        folder /= hydra.output_subdir
        for name in ("config.yaml", "hydra.yaml", "overrides.yaml"):
            (folder / name).unlink(missing_ok=True)
    while folder != Path.cwd() and not any(folder.iterdir()):
        folder.rmdir()
        folder = folder.parent


def tell_settings(folders: list[str], sweep: Path) -> None:
    """Print what the runs of a sweep found, by setting, and write it beside Hydra's own files of the sweep."""
    from ftk.model_parallel.world import is_main_process
    from ftk.report.runs import read_runs
    from ftk.report.settings import settings_of

    if len(folders) < 2 or not is_main_process():
        return
    recorded = [folder for folder in dict.fromkeys(folders) if (Path(folder) / "metrics.jsonl").is_file()]
    if len(recorded) < 2:
        print(NO_SETTINGS.format("the runs have one checkpoint.save_dir, or wrote no metrics.jsonl"))
        return
    found = settings_of(read_runs(recorded))
    found.write(sweep / "settings.json")
    print(visible("\n".join(["", *found.lines(), f"written to {sweep / 'settings.json'}"])))


def _explained(error: Exception, root: type, given: Namespace) -> str:
    """Hydra's message in one line; of an unknown key the key that is near instead of advice to add another."""
    from ftk.config.build import sections_of_options
    from ftk.config.hydra import explained
    from ftk.config.root import sections_of, slots_of

    text = explained(error)
    unknown = re.search(r"Could not override '([^']+)'", text)
    if unknown is None:
        return text
    section, _, name = unknown[1].rpartition(".")
    if unknown[1] in slots_of(root):
        return f"the recipe does not choose {unknown[1]}; add it: +{unknown[1]}._name=NAME"
    if section in sections_of_options(root).get(name, ()):
        return f"the recipe does not set {unknown[1]}; add it: +{unknown[1]}=VALUE"
    sections = [*sections_of(root), *slots_of(root)]
    homes = sections_of_options(root)
    elsewhere = [f"{home}.{name}" for home in homes.get(name, ())]  # in another section than the one that is there
    near = closest(name, [each for each, own in homes.items() if section in own])
    meant = f"{section}.{near}" if near else elsewhere[0] if len(elsewhere) == 1 else None
    if section not in sections and (section or meant is None):
        meant = closest(
            unknown[1], [f"{home}.{option}" for option in homes for home in homes[option]] if section else sections
        )
    named = {"--config-dir": given.config_dir, "--config-path": given.config_path, "--config-name": given.config_name}
    recipe = " ".join(f"{flag} {shlex.quote(value)}" for flag, value in named.items() if value is not None)
    hint = f"did you mean {meant}?" if meant else f"ftk-hydra-train {recipe} --cfg job shows all keys"
    return f"unknown key {unknown[1]}; {hint}"


def _read(argv: list[str]) -> Namespace:
    """The arguments as Hydra's own parser reads them, wherever its flags stand between the overrides.

    Raises:
        UserError: an unknown flag or a value that it does not take, or a number that is too small for a float.
    """
    from hydra._internal.utils import get_args_parser

    parser = get_args_parser()
    parser.allow_abbrev = False
    known = {value for action in parser._actions if action.dest == "info" for value in action.choices or ()}
    arguments = list(argv)
    for place, argument in enumerate(argv):
        if argument in ("--info", "-i") and argv[place + 1 : place + 2] and argv[place + 1] not in known:
            arguments[place] = "--info=all"  # what follows is an override, and not what to tell of

    def refuse(message: str) -> NoReturn:
        from ftk.config.build import sections_of_options
        from ftk.trainer.config import TrainConfig

        homes = sections_of_options(TrainConfig)
        for flag in re.findall(r"(?<=--)[a-z][\w-]*", message):
            for home in homes.get(name := flag.replace("-", "_"), ()):
                raise UserError(f"unknown flag --{flag}; values are given without dashes: {home}.{name}=VALUE")
        raise UserError(message)

    parser.error = refuse  # type: ignore[method-assign]
    given = parser.parse_intermixed_args(arguments)
    if given.experimental_rerun is not None:
        raise UserError("--experimental-rerun is left out: it unpickles a file, which may run any code")
    if given.resolve and given.cfg is None:
        raise UserError("--resolve goes with --cfg")
    if sum([given.run, given.multirun, given.shell_completion, given.cfg is not None, given.info is not None]) > 1:
        raise UserError("give one of --run, --multirun, --cfg, --info and --shell-completion")
    for override in given.overrides:
        for word in re.split(r"[^\w.+-]+", override):
            if underflows(word):
                raise UserError(f"{shown(override)}: {word} is too small to differ from 0")
    return given


def _in_order(given: Namespace) -> list[str]:
    """Flags first, then the overrides: Hydra's parser takes them in no other order."""
    flags = []
    for name, value in vars(given).items():
        if name != "overrides" and value not in (None, False):
            flag = f"--{name.replace('_', '-')}"
            flags.append(flag if value is True else f"{flag}={value}")
    # Hydra's own logging would write to stdout, which belongs to the figures.
    overrides = [] if given.hydra_help else given.overrides  # its help is composed without the recipe
    names = {name for name, _ in map(_override, given.overrides)}
    quiet = [f"hydra/{kind}=none" for kind in ("job_logging", "hydra_logging") if f"hydra/{kind}" not in names]
    return [*flags, *overrides, *quiet]


def _override(argument: str) -> tuple[str, str]:
    """Name and value of `name=value`, with or without signs before it and quotes around the value."""
    name, _, value = argument.lstrip("+~").partition("=")
    return name, value.strip("'\"")


def _check_recipe(given: Namespace, with_plugin: bool) -> None:
    """Checks a recipe before Hydra does: its name, the classes that it names, and whether it needs a plugin."""
    from ftk.config.compose import recipe_file
    from ftk.config.hydra import recipes
    from ftk.config.root import load_any_yaml, load_yaml
    from ftk.plugins import refuse_recorded

    own = [folder for folder in (given.config_dir, given.config_path) if folder is not None]
    if given.config_name is None and not (given.hydra_help or given.info or given.shell_completion):
        raise UserError(f"--config-name is missing; recipes: {', '.join(recipes())}")
    if not own and given.config_name is not None:
        recipe_file(given.config_name, "--config-name")
    for folder in own:
        for file in filter(Path.is_file, sorted(Path(folder).rglob("*.yaml"))):
            _check_targets(file, load_any_yaml(file))  # Hydra's own records of earlier runs lie here, too
    name = f"{given.config_name}".removesuffix(".yaml")
    for file in (Path(folder) / f"{name}.yaml" for folder in own):
        if file.is_file() and not with_plugin:
            refuse_recorded(file, load_yaml(file), f"{USER_DIR}=")


def _check_targets(file: Path, node: Any) -> None:
    """Refuse a file that would have Hydra call what it names, other than Hydra's own classes."""
    if isinstance(node, dict):
        for key, value in node.items():
            if key == "_target_" and not str(value).startswith(("hydra._internal.", "hydra_plugins.")):
                raise UserError(f"{file}: hydra must not call {shown(value)}: a file cannot choose the code that runs")
            _check_targets(file, value)
    elif isinstance(node, list):
        for value in node:
            _check_targets(file, value)


if __name__ == "__main__":
    raise SystemExit(main())
