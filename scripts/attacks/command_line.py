"""Options of ftk-train: each with nonsense, by flag; configuration files that are damaged, bottomless or strangers'."""

from __future__ import annotations

import os
import random

import yaml
from attacks.harness import Place, case
from attacks.mutations import TREES, mutated
from attacks.options import add_options

TRAIN = ("ftk-train", "--task=glm_blank", "--dry-run")


def add_cases(chance: random.Random) -> None:
    from ftk.trainer.config import TrainConfig

    def command(place: Place, chosen: list[str], given: list[str], positional: bool) -> list[str]:
        arch = [] if any(choice.startswith("--arch") for choice in chosen) else ["--arch=glm_tiny"]
        data = [] if positional else [str(place.workspace / "data-bin")]
        return [*TRAIN, *arch, *chosen, *data, *given]

    add_options("options/", TrainConfig, command, chance)
    for number in range(40):
        _mutated_config(number, chance.randrange(2**32))
    for name, content in TREES.items():
        _config_file(name, content)


def _mutated_config(number: int, seed: int) -> None:
    @case(f"configuration/mutation {number}", codes=(0, 2))
    def _(place: Place) -> list[str]:
        tree = yaml.safe_load((place.workspace / "run" / "config.yaml").read_text())
        file = place.folder / "config.yaml"
        file.write_text(yaml.safe_dump(mutated(tree, random.Random(seed)), allow_unicode=True))
        return ["ftk-train", "--config", str(file), "--dry-run", "--save-dir", str(place.folder / "run")]


def _config_file(name: str, content: bytes) -> None:
    @case(f"configuration/14 {name}", codes=(2,))
    def _(place: Place) -> list[str]:
        file = place.folder / "config.yaml"
        file.write_bytes(content)
        return ["ftk-train", str(place.workspace / "data-bin"), "--config", str(file), "--dry-run"]


@case("configuration/7 a stranger's plugin folder is not imported", codes=(2,), says="--user-dir")
def _(place: Place) -> list[str]:
    plugin = place.folder / "plugin"
    plugin.mkdir()
    (plugin / "__init__.py").write_text(f"open({str(place.victim)!r}, 'w').close()")
    tree = yaml.safe_load((place.workspace / "run" / "config.yaml").read_text())
    tree["common"]["user_dir"] = str(plugin)
    (place.folder / "config.yaml").write_text(yaml.safe_dump(tree))
    return ["ftk-train", "--config", str(place.folder / "config.yaml"), "--dry-run"]


@case("configuration/14 a pipe", says="is a pipe")
def _(place: Place) -> list[str]:
    os.mkfifo(place.folder / "config.yaml")
    return ["ftk-train", "--config", str(place.folder / "config.yaml"), "--dry-run"]


@case("configuration/14 a device", says="is a device")
def _(place: Place) -> list[str]:
    return ["ftk-train", "--config", "/dev/zero", "--dry-run"]


@case("unknown/a flag with escapes", says=r"\\x1b")
def _(place: Place) -> list[str]:
    return [*TRAIN, "--arch=glm_tiny", str(place.workspace / "data-bin"), "--\x1b[2J=1"]
