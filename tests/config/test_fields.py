"""Every field of every part and of every command: nonsense is taken within the stated bounds or answered by name."""

from __future__ import annotations

import dataclasses
import importlib
import math
import pkgutil
import re
from typing import Any

import pytest

import ftk_cli
from ftk import registry
from ftk.config import options
from ftk.config.build import build_options
from ftk.config.common import CommonConfig
from ftk.config.options import MISSING, Option, mistakes, options_of
from ftk.config.root import sections_of
from ftk.errors import UserError, shown

NONSENSE = (-1, 0, 10**12, 2**64, 10**30, 10**5000, 1.5, "1e400", "nan", "inf", "-inf", "1e-400", "", "x", "1" * 9999)
OTHER_TYPES = (None, True, [], [1], ["x"], {}, {1: 2}, b"x", "\0", "~no-such-user/x", "\ud800")


def config_types() -> dict[type, str]:
    """The dataclasses of all registered parts and of the sections of all commands, each with a name."""
    found: dict[type, str] = {}
    for kind in vars(registry).values():
        if isinstance(kind, registry.Registry):
            for name in kind.names():
                if (config := kind.get(name).config) is not None:
                    found.setdefault(config, f"{kind.kind}_{name}")
    for module in pkgutil.iter_modules(ftk_cli.__path__, "ftk_cli."):
        for root in vars(importlib.import_module(module.name)).values():
            is_config = isinstance(root, type) and dataclasses.is_dataclass(root)
            if is_config and any("section" in field.metadata for field in dataclasses.fields(root)):
                for key, (_, config) in sections_of(root).items():
                    found.setdefault(config, key)
    return found


TYPES = config_types()
OPTIONS = [(config, option) for config, key in TYPES.items() for option in options_of(key, config)]


def test_an_interval_is_read_with_any_blanks_and_refused_where_it_is_none():
    @dataclasses.dataclass(kw_only=True)
    class Shares:
        share: float = options.option(0.1, "a share", "[0,1 ]")

    assert options_of("shares", Shares)[0].within == "from 0 to 1"
    assert mistakes(Shares(share=2.0)) == ["share is 2.0; it must be from 0 to 1"]
    for text in ("[0, 1", "0 to 1", "[1, 0]", "", "[0, 1, 2]", "[a, b]"):
        with pytest.raises(ValueError, match=re.escape(f"an option is within {text!r}, which is no interval such as ")):
            options.option(0.1, "a share", text)


def test_the_walk_finds_parts_and_commands():
    assert {"optimizer_adamw", "model_glm", "training", "validation", "cluster", "common"} <= set(TYPES.values())
    assert len(OPTIONS) > 400


@pytest.mark.parametrize("value", [*NONSENSE, *OTHER_TYPES], ids=lambda value: shown(value)[:20])
def test_nonsense_is_within_bounds_or_refused_by_name(value):
    for config, option in OPTIONS:
        needed, without = NEEDED[config, option.section]
        built = build_or_error(option.section, config, {**needed, option.name: value})
        if isinstance(built, str):
            about_another = built == without
            assert about_another or option.name in built, (option.key, built)
            assert len(built) < 1000 or option.kind is str, option.key
        else:
            taken = getattr(built, option.name)
            for number in taken if isinstance(taken, list) else [taken]:
                assert is_sane(number, option), (option.key, number)


def build_or_error(*arguments: Any) -> Any:
    try:
        return build_options(*arguments)
    except UserError as error:
        return str(error)


def needed_of(config: type, section: str) -> tuple[dict[str, str], Any]:
    """The options that must be given, and what is built of them alone."""
    needed = {option.name: "1" for option in options_of("", config) if option.default is MISSING}
    return needed, build_or_error(section, config, needed)


NEEDED = {(config, option.section): needed_of(config, option.section) for config, option in OPTIONS}


def is_sane(value: object, option: Option) -> bool:
    if option.kind is float and option.name == "unk_penalty":  # infinity: never the unknown token
        return True
    if option.kind not in (int, float) or value is None:
        return True
    least, greatest = option.bounds
    return isinstance(value, (int, float)) and math.isfinite(value) and least <= value <= greatest


@pytest.mark.parametrize("name", ["num_threads", "num_workers", "workers"])
def test_no_machine_has_a_hundred_thousand_threads_or_processes(name):
    found = [(config, option) for config, option in OPTIONS if option.name == name]
    assert found
    for _, option in found:
        with pytest.raises(ValueError, match=f"{name} is 100000; it must be at most 1,024"):
            option.convert(100000)


@pytest.mark.parametrize("device", ["cuda:²", "cuda:" + 5000 * "1", "cuda:-1", "cpu:1", "cuda:1:2", ""])
def test_a_device_that_cannot_be_is_refused(device):
    with pytest.raises(UserError, match="device is .*; it must be auto, cpu, cuda or cuda:N"):
        build_options("common", CommonConfig, {"device": device})


def test_what_names_a_file_or_folder_is_a_path():
    words = ("PATH", "DIR", "FILE", "DATA", "DATA-BIN", "SRC", "DST", "RUN", "F[,F...]")
    assert not [option.key for _, option in OPTIONS if option.metavar in words and not option.path]
    folders = {option.key.partition(".")[2] for _, option in OPTIONS if option.path}
    assert {"save_dir", "restore_from", "finetune_from", "tensorboard_dir", "log_file", "user_dir", "data"} <= folders


def test_what_a_subclass_redefines_keeps_bounds():
    limits = ("within", "min", "max")
    for config, option in OPTIONS:
        own, *inherited = (
            {name for name in limits if base.__dataclass_fields__[option.name].metadata.get(name) is not None}
            for base in config.__mro__
            if option.name in getattr(base, "__dataclass_fields__", {})
        )
        assert "within" in own or all(one <= own for one in inherited), (config, option.name)
