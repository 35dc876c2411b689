"""ftk-hydra-train: the same training through Hydra's launcher, with its overrides, multirun and sweeps."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from ftk.errors import UserError
from ftk_cli.frame import run

USAGE = """usage: ftk-hydra-train [--config-name RECIPE] [--config-dir DIR] [-m] [key.sub=value ...]

Trains with Hydra: groups and values are overridden by key=value, -m (--multirun) runs every combination.
Recipes: {recipes}; or your own YAML by --config-dir.

examples:
  ftk-hydra-train --config-name glm_large dataset.data=data-bin checkpoint.save_dir=run
  ftk-hydra-train -m --config-name glm_tiny dataset.data=data-bin optimizer.lr=1e-3,3e-4 \\
      'checkpoint.save_dir=runs/lr_${{optimizer.lr}}'
  ftk-hydra-train --config-name glm_tiny dataset.data=data-bin common.user_dir=my_plugin task=my_task

  --cfg job          print the composed configuration and stop
  --help, --version  this help; the version
Everything else is Hydra's own: see https://hydra.cc/docs/advanced/hydra-command-line-flags
"""


def main(argv: Sequence[str] | None = None) -> int:
    return run("ftk-hydra-train", body, argv)


def body(argv: list[str]) -> int:
    from ftk.config.hydra import recipe_folder

    if "--version" in argv:
        from ftk.version import __version__

        print(f"ftk {__version__}")
        return 0
    if "--help" in argv or "-h" in argv:
        print(USAGE.format(recipes=", ".join(sorted(path.stem for path in recipe_folder().glob("*.yaml")))))
        return 0
    return _launch(argv)


def _launch(argv: list[str]) -> int:
    import hydra
    from hydra.errors import HydraException
    from omegaconf import DictConfig
    from omegaconf.errors import OmegaConfBaseException

    from ftk.config.build import build
    from ftk.config.hydra import recipe_folder, register_groups, to_tree
    from ftk.plugins import import_entry_points, import_user_dir
    from ftk.trainer.train_config import TrainConfig
    from ftk_cli.train import train

    import_entry_points()
    for argument in argv:
        name, _, value = argument.lstrip("+").partition("=")
        if name == "common.user_dir":
            import_user_dir(value)
    register_groups(TrainConfig)
    _check_recipe(argv)
    codes: list[int] = []

    def job(composed: DictConfig) -> int:
        codes.append(train(build(TrainConfig, to_tree(composed))))
        if codes[-1] != 0:  # a signal ended this job, and with it the whole sweep
            raise KeyboardInterrupt
        return codes[-1]

    # Hydra reads the process's own arguments; and with this variable it lets errors through to `run`.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    # Hydra's own logging would write to stdout, which belongs to the figures.
    quiet = [f"hydra/{kind}=none" for kind in ("job_logging", "hydra_logging") if not _names(argv, f"hydra/{kind}")]
    sys.argv = ["ftk-hydra-train", *argv, *quiet]
    try:
        hydra.main(version_base="1.3", config_path=str(recipe_folder()), config_name="glm_base")(job)()
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(" ".join(str(error).split())) from error
    return max(codes, default=0)


def _names(argv: list[str], key: str) -> bool:
    return any(argument.lstrip("+~").startswith(f"{key}=") for argument in argv)


def _check_recipe(argv: list[str]) -> None:
    """Names the recipes that there are before Hydra says that it finds none."""
    from ftk.config.compose import recipe_file

    given = [argument.partition("=") for argument in argv]
    if any(name in ("--config-dir", "-cd", "--config-path", "-cp") for name, _, _ in given):
        return
    for place, (name, _, value) in enumerate(given):
        if name in ("--config-name", "-cn"):
            recipe_file(value or (argv[place + 1] if place + 1 < len(argv) else ""))


if __name__ == "__main__":
    sys.exit(main())
