"""From dataclasses to flags and YAML and back: precedence, types, and every error at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

import pytest
import yaml

from ftk.config import Chosen, compose, dump, section, slot
from ftk.config.build import build
from ftk.config.common import CommandConfig
from ftk.errors import UserError
from ftk.registry import Registry

PARTS, SHAPES = Registry("part"), Registry("shape")


@dataclass(kw_only=True)
class PlainConfig:
    data: str = field(metadata={"help": "folder", "positional": True, "metavar": "DATA"})
    steps: int = field(default=10, metadata={"help": "how many", "unit": "updates"})
    rate: float = field(default=0.5, metadata={"help": "share"})
    betas: list[float] = field(default_factory=lambda: [0.9, 0.98], metadata={"help": "decays"})
    shuffle: bool = field(default=True, metadata={"help": "in random order"})
    limit: int | None = field(default=None, metadata={"help": "at most"})
    mode: str = field(default="a", metadata={"help": "which", "choices": ("a", "b")})

    def validate(self) -> Iterator[str]:
        if self.steps < 1:
            yield f"steps is {self.steps}; it must be at least 1"


@dataclass(kw_only=True)
class SizeConfig:
    group_title: ClassVar[str] = "size of it"

    size: int = field(default=1, metadata={"help": "how big"})


@dataclass(kw_only=True)
class ColourConfig:
    group_title: ClassVar[str] = "colour of it"

    colour: str = field(default="red", metadata={"help": "which"})


@dataclass(kw_only=True)
class ThingConfig(SizeConfig, ColourConfig):
    weight: float = field(default=1.0, metadata={"help": "how heavy"})


@dataclass(kw_only=True)
class BoxConfig:
    width: int = field(default=1, metadata={"help": "width"})
    height: int = field(default=1, metadata={"help": "height"})


@dataclass(kw_only=True)
class BallConfig:
    radius: float = field(default=1.0, metadata={"help": "radius"})


@PARTS.register("box", config=BoxConfig)
class Box: ...


@PARTS.register("ball", config=BallConfig)
class Ball: ...


@dataclass(kw_only=True)
class ConeConfig:
    depth: float = field(default=1.0, metadata={"help": "depth"})


@PARTS.register("cone", config=ConeConfig)
class Cone: ...


@SHAPES.register("big_box", model="box")
def big_box() -> BoxConfig:
    return BoxConfig(width=10, height=20)


@dataclass(kw_only=True)
class Root:
    command: CommandConfig = section("command", saved=False)
    plain: PlainConfig = section("plain")
    part: Chosen = slot(PARTS, flag="--part", default="ball")
    shape: Chosen = slot(PARTS, flag="--shape", architectures=SHAPES, default="big_box")


@dataclass(kw_only=True)
class ThingRoot:
    thing: ThingConfig = section("the thing")


def run(*argv: str) -> Root:
    return compose(Root, "prog", "A test.", argv)


def test_defaults_then_architecture_then_file_then_flags(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("plain: {steps: 20, rate: 1e-3}\nshape: {arch: big_box, width: 11}\n")
    config = run("d", "--config", str(file), "--steps", "30")
    assert (config.plain.steps, config.plain.rate, config.plain.mode) == (30, 1e-3, "a")
    assert (config.shape.config.width, config.shape.config.height, config.shape.arch) == (11, 20, "big_box")


def test_another_part_than_the_files_starts_from_its_own_defaults(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("part: {_name: cone, depth: 3.0}\n")
    assert run("d", "--config", str(file)).part.config == ConeConfig(depth=3.0)
    assert run("d", "--config", str(file), "--part", "ball").part.config == BallConfig(radius=1.0)


def test_two_options_that_want_the_same_flag_are_refused():
    with pytest.raises(UserError, match=r"part\.width and shape\.width both want the flag --width"):
        run("d", "--part", "box")


def test_types_come_from_the_dataclass():
    config = run("d", "--steps", "1e3", "--betas", "0.1,0.2", "--no-shuffle", "--limit", "none", "--mode", "b").plain
    assert config == PlainConfig(data="d", steps=1000, betas=[0.1, 0.2], shuffle=False, limit=None, mode="b")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["d", "--stesp", "3"], r"unknown flag --stesp; did you mean --steps\?"),
        (["d", "--steps", "many"], "--steps is 'many'; it must be a whole number"),
        (["d", "--steps", "1.5"], "--steps is '1.5'; it must be a whole number"),
        (["d", "--mode", "c"], "--mode is 'c'; it must be one of a, b"),
        (["d", "--steps"], "expected one argument"),
        (["d", "e"], "unexpected argument 'e'"),
        (["d", "--part", "cube"], "unknown part 'cube'; .*there are: ball, box, cone"),
        (["d", "--steps", "0"], "^--steps: steps is 0; it must be at least 1$"),
        ([], "plain.data is missing; give the argument DATA"),
        (["d", "--config", "/nowhere.yaml"], "cannot read the configuration /nowhere.yaml: No such file"),
    ],
)
def test_a_mistake_is_named_with_its_flag(argv, message):
    with pytest.raises(UserError, match=message):
        run(*argv)


def test_a_value_from_a_file_is_named_with_its_key(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("plain:\n  steps: 0\n")
    with pytest.raises(UserError, match=r"^plain\.steps is 0; it must be at least 1$"):
        run("d", "--config", str(file))
    with pytest.raises(UserError, match=r"^--steps: steps is -1; it must be at least 1$"):
        run("d", "--config", str(file), "--steps", "-1")


def test_all_errors_are_reported_at_once():
    tree = {"plain": {"steps": "x", "rate": None, "betas": "1,y", "colour": 3}, "planet": {}, "part": {"radius": []}}
    with pytest.raises(UserError) as caught:
        build(Root, tree)
    message = str(caught.value)
    assert message.startswith("7 errors in the configuration:")
    for part in (
        "plain.steps",
        "plain.rate",
        "plain.betas",
        "plain.colour",
        "section planet",
        "part.radius",
        "plain.data",
    ):
        assert part in message


def test_a_dumped_configuration_composes_to_itself(tmp_path):
    config = run("d", "--steps", "7", "--width", "3", "--betas", "0.5")
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(dump(config)))
    again = run("--config", str(file))
    assert dump(again) == dump(config)
    assert (again.plain, again.shape.config) == (config.plain, config.shape.config)
    assert "command" not in dump(config)


def test_help_without_a_part_lists_names_and_with_one_its_options(capsys):
    with pytest.raises(SystemExit):
        run("--help")
    names_only = capsys.readouterr().out
    assert "ball, box, cone" in names_only
    assert "--radius" not in names_only
    with pytest.raises(SystemExit):
        run("--shape", "big_box", "--help")
    with_options = capsys.readouterr().out
    assert "--radius" in with_options
    assert "default: 20" in with_options  # the architecture's, not the dataclass's
    assert "how many (updates; default: 10)" in with_options


def test_broken_yaml_and_a_list_are_refused(tmp_path):
    file = tmp_path / "c.yaml"
    for text, message in (("a: [1", "is not a YAML file"), ("- 1\n", "holds no configuration")):
        file.write_text(text)
        with pytest.raises(UserError, match=message):
            run("d", "--config", str(file))
    with pytest.raises(UserError, match="is a folder"):
        run("d", "--config", str(tmp_path))
    file.write_text("plain: !!python/object/apply:os.system ['true']\n")
    with pytest.raises(UserError, match="is not a YAML file"):
        run("d", "--config", str(file))


def test_a_section_of_several_parts_is_one_mapping_and_in_help_a_group_for_each_part(capsys):
    config = compose(ThingRoot, "prog", "A test.", ["--size", "3", "--colour", "blue"])
    assert dump(config) == {"thing": {"colour": "blue", "size": 3, "weight": 1.0}}
    assert build(ThingRoot, dump(config)) == config
    with pytest.raises(SystemExit):
        compose(ThingRoot, "prog", "A test.", ["--help"])
    lines = capsys.readouterr().out.splitlines()
    headings = ["the thing:", "size of it:", "colour of it:"]
    assert [line for line in lines if line in headings] == headings
    for heading, flag in zip(headings, ("--weight", "--size", "--colour"), strict=True):
        assert flag in lines[lines.index(heading) + 1]
