"""Options of ftk-train: each with nonsense, by flag; configuration files that are damaged, bottomless or strangers'."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import yaml
from attacks.harness import Place, case
from attacks.mutations import TREES, mutated

NONSENSE = ("", "-1", "x", "nan", "inf", "1e400", "1e-400", str(10**30), str(-(10**30)), "[1]", "\x1b[2J")
TRAIN = ("ftk-train", "--task=glm_blank", "--dry-run")


def add_cases(chance: random.Random) -> None:
    from ftk.trainer.train_config import TrainConfig

    for chosen, flag, positional in _flags(TrainConfig):
        for value in NONSENSE:
            _option(chosen, flag, value, positional)
    for number in range(150):
        _mutated_config(number, chance.randrange(2**32))
    for name, content in TREES.items():
        _config_file(name, content)


def _flags(root: type) -> Iterator[tuple[list[str], str, bool]]:
    """(flags that choose a part, a flag of an option, whether it is given by place) of all sections and parts."""
    from ftk.config.options import options_of
    from ftk.config.root import sections_of, slots_of

    for key, (_, config) in sections_of(root).items():
        yield from (([], option.flag, option.positional) for option in options_of(key, config) if not option.derived)
    for key, slot in slots_of(root).items():
        for name in slot.registry.names():
            choice = "glm_tiny" if key == "model" else name
            config = slot.registry.get(name).config
            for option in options_of(key, config) if config is not None else []:
                if not option.derived:
                    yield [f"{slot.flag}={choice}"], option.flag, option.positional


def _option(chosen: list[str], flag: str, value: str, positional: bool) -> None:
    @case(f"options/{' '.join([*chosen, flag])} {value!r}", codes=(0, 2))
    def _(place: Place) -> list[str]:
        arch = [] if any(choice.startswith("--arch") for choice in chosen) else ["--arch=glm_tiny"]
        given = [value] if positional else [str(place.workspace / "data-bin"), f"{flag}={value}"]
        return [*TRAIN, *arch, *chosen, *given]


def _mutated_config(number: int, seed: int) -> None:
    @case(f"configuration/mutation {number}", codes=(0, 2))
    def _(place: Place) -> list[str]:
        tree = yaml.safe_load((place.workspace / "run" / "config.yaml").read_text())
        file = place.folder / "config.yaml"
        file.write_text(yaml.safe_dump(mutated(tree, random.Random(seed)), allow_unicode=True))
        return ["ftk-train", "--config", str(file), "--dry-run", "--save-dir", str(place.folder / "run")]


def _config_file(name: str, content: bytes) -> None:
    @case(f"configuration/{name}", codes=(2,))
    def _(place: Place) -> list[str]:
        (place.folder / "config.yaml").write_bytes(content)
        return [
            "ftk-train",
            str(place.workspace / "data-bin"),
            "--config",
            str(place.folder / "config.yaml"),
            "--dry-run",
        ]


@case("configuration/a stranger's plugin folder is not imported", codes=(2,), says="--user-dir")
def _(place: Place) -> list[str]:
    plugin = place.folder / "plugin"
    plugin.mkdir()
    (plugin / "__init__.py").write_text(f"open({str(place.victim)!r}, 'w').close()")
    tree = yaml.safe_load((place.workspace / "run" / "config.yaml").read_text())
    tree["common"]["user_dir"] = str(plugin)
    (place.folder / "config.yaml").write_text(yaml.safe_dump(tree))
    return ["ftk-train", "--config", str(place.folder / "config.yaml"), "--dry-run"]


@case("configuration/a pipe", says="is a pipe")
def _(place: Place) -> list[str]:
    os.mkfifo(place.folder / "config.yaml")
    return ["ftk-train", "--config", str(place.folder / "config.yaml"), "--dry-run"]


@case("configuration/a device", says="is a device")
def _(place: Place) -> list[str]:
    return ["ftk-train", "--config", "/dev/zero", "--dry-run"]


for _links in (".lock", "config.yaml.tmp", "environment.json.tmp", "environment.json", "metrics.jsonl", "config.yaml"):

    @case(f"links/{_links} in a run that goes on", codes=(0, 1, 2))
    def _(place: Place, name: str = _links) -> list[str]:
        (place.run / name).unlink(missing_ok=True)
        (place.run / name).symlink_to(place.victim)
        return _train_on(place)


def _train_on(place: Place) -> list[str]:
    config = str(place.run / "config.yaml") if (place.run / "config.yaml").exists() else ""
    source = str(place.workspace / "run" / "config.yaml") if not config or Path(config).is_symlink() else config
    return ["ftk-train", "--config", source, "--save-dir", str(place.run), "--max-update=3"]


@case("unknown/a flag with escapes", says=r"\\x1b")
def _(place: Place) -> list[str]:
    return [*TRAIN, "--arch=glm_tiny", str(place.workspace / "data-bin"), "--\x1b[2J=1"]
