"""From dataclasses to flags and YAML and back: precedence, types, and every error at once."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import yaml

from ftk.config import Chosen, compose, dump, section, slot
from ftk.config.build import build
from ftk.config.common import CommandConfig, CommonConfig
from ftk.errors import UserError
from ftk.registry import ARCHITECTURES, MODELS, Registry
from ftk.trainer.config import TrainConfig

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
    RETIRED: ClassVar[dict[str, Any]] = {"shade": None, "varnish": ...}
    group_title: ClassVar[str] = "colour of it"

    colour: str = field(default="red", metadata={"help": "which"})


@dataclass(kw_only=True)
class ThingConfig(SizeConfig, ColourConfig):
    weight: float = field(default=1.0, metadata={"help": "how heavy"})


@dataclass(kw_only=True)
class ColourRoot:
    colour: ColourConfig = section("colour")


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
class BoundedConfig:
    share: float = field(default=0.0, metadata={"help": "share", "min": 0, "max": 1})
    penalty: float = field(default=0.0, metadata={"help": "penalty", "max": float("inf")})
    place: str = field(default="", metadata={"help": "folders", "path": True})
    plain: str = field(default="", metadata={"help": "folder", "metavar": "DIR"})
    word: str = field(default="", metadata={"help": "a word"})


@dataclass(kw_only=True)
class BoundedRoot:
    bounded: BoundedConfig = section("bounded")


@dataclass(kw_only=True)
class CommonRoot:
    common: CommonConfig = section("common")
    part: Chosen = slot(PARTS, flag="--part", default="ball")
    command: CommandConfig = section("command", saved=False)


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
    with pytest.raises(UserError, match=r"part\.width and shape\.width both have the flag --width"):
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
        (["d", "--rate", "inf"], "^--rate is 'inf'; it must be a finite number$"),
        (["d", "--rate", "1e400"], "^--rate is '1e400'; it must be a finite number$"),
        (["d", "--rate=-1e-400"], "^--rate is '-1e-400', which is too small to differ from 0$"),
        (["d", "--rate", "1e31"], r"^--rate is 1e31; it must be at most 1e\+30$"),
        (["d", "--betas", "0.9,nan"], "^--betas is 'nan'; it must be a list, each item a finite number$"),
        (["d", "--steps", "1" + 30 * "0"], "^--steps is 10+; it must be at most 1,000,000,000,000,000$"),
        (["d", "--steps", 5000 * "9"], r"^--steps is '9+ \.\.\. \(5,000 characters\); it must be a whole number$"),
        (["d", "--mode", "c"], "--mode is 'c'; it must be one of a, b"),
        (["d", "--steps"], "^--steps needs a value$"),
        (["d", "--mode"], "^--mode needs a value: one of a, b$"),
        (["d", "--part", "--steps", "1"], "^--part needs a value: one of ball, box, cone$"),
        (["d", "--no-shuffle=a: expected b"], "--no-shuffle: ignored explicit argument 'a: expected b'$"),
        (["d", "e"], "unexpected argument 'e'"),
        (["d", "--part", "cube"], "unknown part 'cube'; .*there are: ball, box, cone"),
        (["d", "--steps", "0"], "^--steps is 0; it must be at least 1$"),
        ([], "^DATA is missing: folder$"),
        (["d", "--config", "/nowhere.yaml"], "cannot read the configuration /nowhere.yaml: No such file"),
    ],
)
def test_a_mistake_is_named_with_its_flag(argv, message):
    with pytest.raises(UserError, match=message):
        run(*argv)


def test_a_value_from_a_file_is_named_with_its_key(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("plain:\n  steps: 0\n")
    with pytest.raises(UserError, match=r"c\.yaml: plain\.steps is 0; it must be at least 1$"):
        run("d", "--config", str(file))
    with pytest.raises(UserError, match=r"^--steps is -1; it must be at least 1$"):
        run("d", "--config", str(file), "--steps", "-1")


def test_all_errors_are_reported_at_once():
    tree = {
        "plain": {"steps": "x", "rate": None, "betas": "1,y", "colour": 3, "mode": "c"},
        "planet": {},
        "part": {"radius": []},
    }
    with pytest.raises(UserError) as caught:
        build(Root, tree)
    message = str(caught.value)
    assert message.startswith("8 errors in the configuration:")
    for part in (
        "plain.steps",
        "plain.rate",
        "plain.betas",
        "plain.colour",
        "plain.mode is 'c'; it must be",
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


def test_an_option_that_is_gone_is_passed_over_at_the_default_that_it_had_or_at_any_value():
    old = build(ColourRoot, {"colour": {"colour": "blue", "shade": None, "varnish": "matt"}})
    assert old.colour.colour == "blue"
    with pytest.raises(UserError, match=r"option colour\.shade was removed; only None"):
        build(ColourRoot, {"colour": {"shade": "dark"}})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("steps: 3", "^steps is an option, not a section; write it under plain:$"),
        ("plai: {shape: a}", r"^unknown section plai; did you mean plain\?$"),
        ("1: {a: 2}", "unknown section 1"),
        ("train_batch_size: 8", "^this is DeepSpeed's configuration; give .data_parallel_shard_size., "),
        ("null: {a: 2}", "unknown section None"),
        ("true: x", "unknown section True"),
        ("2020-01-01: x", "unknown section datetime.date"),
        ("plain: {1: 2, null: 3, 1.5: 4}", "unknown option plain.None"),
        ("plain: [1]", r"plain is \[1\]; it must be a mapping of options"),
        ("plain: 5", "plain is 5; it must be a mapping of options"),
        ("plain: false", "plain is False; it must be a mapping of options"),
        ("plain: text", "unknown option plain._name"),
        ("part: [ball]", r"part is \['ball'\]; it must be a mapping"),
        ("part: {_name: [ball]}", "unknown part"),
        ("part: {_name: 0}", "unknown part '0'"),
        ("part: {_name: ''}", "unknown part ''"),
        ("shape: {arch: {a: b}}", "unknown shape"),
        ("plain: {steps: {a: b}}", "plain.steps is {'a': 'b'}; it must be a whole number"),
        ("plain: {steps: 0x" + 5000 * "f" + "}", "plain.steps is too large a int; it must be at most"),
        ("plain: {rate: .inf}", "plain.rate is inf; it must be a finite number"),
        ("plain: {rate: 1.0e-400}", "1.0e-400 is too small to differ from 0"),
        ("plain: " + 500 * "[" + 500 * "]", "nested too deeply"),
        ("plain: " + 90 * "{a: " + 90 * "}", "unknown option plain.a"),
        ("? {a: b}\n: c", "is not a YAML file"),
        ("? [a, b]\n: c", "is not a YAML file|unknown section"),
    ],
    ids=lambda text: text[:30],
)
@pytest.mark.parametrize("flags", [[], ["--steps", "3"]], ids=["file", "file and flag"])
def test_every_key_and_value_of_a_file_has_an_answer(tmp_path, text, message, flags):
    file = tmp_path / "c.yaml"
    file.write_text(text + "\n")
    if flags and "steps" in text:
        flags = ["--betas", "0.1"]
    with pytest.raises(UserError, match=message):
        run("d", "--config", str(file), *flags)


def test_a_bound_of_the_field_is_said_and_infinity_needs_one():
    assert build(BoundedRoot, {"bounded": {"share": ".5", "penalty": "inf"}}).bounded.penalty == float("inf")
    for values, message in (
        ({"share": 2}, "bounded.share is 2; it must be at most 1"),
        ({"share": -0.5}, "bounded.share is -0.5; it must be at least 0"),
        ({"penalty": "-inf"}, "bounded.penalty is '-inf'; it must be a finite number"),
        ({"penalty": "nan"}, "bounded.penalty is 'nan'; it must be a finite number"),
    ):
        with pytest.raises(UserError, match=f"^{message}$"):
            build(BoundedRoot, {"bounded": values})


def test_the_home_folder_is_expanded_in_paths_and_only_there(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    values = {"place": "~/a,x=~/b:~/c", "word": "~/a", "plain": "~"}
    assert build(BoundedRoot, {"bounded": values}).bounded == BoundedConfig(
        place=f"{tmp_path}/a,x={tmp_path}/b:{tmp_path}/c", word="~/a", plain=str(tmp_path)
    )
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])  # a container's user
    with pytest.raises(UserError, match=r"^bounded.plain is '~/x'; there is no such home folder; write a path without"):
        build(BoundedRoot, {"bounded": {"plain": "~/x"}})
    with pytest.raises(UserError, match="no file can have this name"):
        build(BoundedRoot, {"bounded": {"plain": "a\0b"}})


STRANGER = "from pathlib import Path\nPath({marker!r}).touch()\n"


@pytest.mark.parametrize("recipe", ["", "defaults: [base, _self_]\n"], ids=["config.yaml", "recipe"])
def test_a_files_own_plugin_is_imported_only_when_it_is_given(tmp_path, recipe):
    marker = tmp_path / "imported"
    plugin, file = tmp_path / f"stranger_{len(recipe)}.py", tmp_path / "stranger.yaml"
    plugin.write_text(STRANGER.format(marker=str(marker)))
    file.write_text(f"{recipe}common: {{user_dir: {plugin}}}\npart: {{_name: nobody_knows}}\n")
    how = f"names the plugin '{plugin}', which is not imported by itself.*give `user_dir` PATH to import it"
    for argv in ([], ["--dry-run"], ["--part", "ball"], ["--help"]):
        with pytest.raises(UserError, match=how):
            compose(CommonRoot, "prog", "A test.", ["--config", str(file), *argv])
    if recipe:  # said by a file that it is made of
        file.write_text("defaults: [base, other, _self_]\n")
        (tmp_path / "other.yaml").write_text(f"common: {{user_dir: {plugin}}}\n")
        with pytest.raises(UserError, match=how):
            compose(CommonRoot, "prog", "A test.", ["--config", str(file)])
    assert not marker.exists()
    argv = ["--config", str(file), "--part", "ball", "--user-dir"]
    assert compose(CommonRoot, "prog", "A test.", [*argv, "none"]).common.user_dir is None
    assert not marker.exists()
    assert compose(CommonRoot, "prog", "A test.", [*argv, str(plugin)]).common.user_dir == str(plugin)
    assert marker.exists()


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


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--arch", "glm_tiny"], ("glm_blank", "cross_entropy")),
        (["--arch", "no_usual_task", "--task", "glm_blank"], ("glm_blank", "cross_entropy")),
        (["--arch", "no_usual_task"], "--task is missing; there are: "),
        ([], "of the families bart, bert, "),
        (["--task", "glm_blank"], "of the families bart, bert, "),
    ],
)
def test_the_model_has_a_usual_task_and_the_task_a_usual_criterion(argv, expected, monkeypatch):
    model = dataclasses.replace(MODELS.get("glm"), name="no_usual_model", task=None)
    arch = dataclasses.replace(ARCHITECTURES.get("glm_tiny"), name="no_usual_task", model="no_usual_model")
    monkeypatch.setitem(MODELS._entries, "no_usual_model", model)
    monkeypatch.setitem(ARCHITECTURES._entries, "no_usual_task", arch)
    argv = ["data", "--max-update", "1", *argv]
    if isinstance(expected, str):
        with pytest.raises(UserError, match=re.escape(expected)):
            compose(TrainConfig, "ftk-train", "", argv)
    else:
        config = compose(TrainConfig, "ftk-train", "", argv)
        assert (config.task.name, config.criterion.name) == expected
