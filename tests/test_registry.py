"""Registries: names, duplicates, the table of built-in names, and that naming imports nothing heavy."""

from __future__ import annotations

import importlib
import subprocess
import sys
from dataclasses import dataclass

import pytest

from ftk import registry as registries
from ftk.builtins import BUILTIN_MODULES
from ftk.errors import UserError
from ftk.models.glm import ORIGINAL_FAMILIES
from ftk.registry import Registry, Subset

ALL = [*(value for value in vars(registries).values() if isinstance(value, Registry)), ORIGINAL_FAMILIES]


@dataclass
class Options:
    size: int = 1


def test_a_registered_class_is_found_under_its_name_with_its_config():
    registry = Registry("thing")

    @registry.register("one", config=Options)
    class One: ...

    entry = registry.get("one")
    assert (entry.target, entry.config, registry.names()) == (One, Options, ["one"])


def test_a_name_taken_twice_names_both_places():
    registry = Registry("thing")
    registry.register("one")(test_a_name_taken_twice_names_both_places)
    with pytest.raises(UserError, match=r"'one' is registered twice: .*test_registry\.py:\d+ and .*registry\.py:\d+"):
        registry.register("one")(Registry)


def test_a_plugin_cannot_take_a_built_in_name():
    with pytest.raises(UserError, match="'glm_tiny' is registered twice"):
        registries.register_architecture("glm_tiny", model="glm")(lambda: None)


def test_an_unknown_name_is_answered_with_the_closest_or_all_names():
    message = r"^unknown architecture 'glm_larg'; did you mean 'glm_large'\?$"  # not all 117 besides
    with pytest.raises(UserError, match=message):
        registries.ARCHITECTURES.get("glm_larg")
    with pytest.raises(UserError, match=r"^unknown architecture 'glm_tiny，'; write ',' for '，'$"):
        registries.ARCHITECTURES.get("glm_tiny，")
    with pytest.raises(UserError, match=r"^unknown architecture 'xyzzy'; there are \d+, which begin with .*, glm,"):
        registries.ARCHITECTURES.get("xyzzy")
    with pytest.raises(UserError, match=r"^unknown tokenizer 'bpe'; did you mean 'gpt2_bpe'\? there are: bert_"):
        registries.TOKENIZERS.get("bpe")


def test_a_subset_has_the_names_that_fulfil_its_condition_later_ones_too():
    registry = Registry("thing")
    subset = Subset(registry, lambda entry: entry.config is Options)
    registry.register("one", config=Options)(Options)
    registry.register("two")(Registry)
    assert list(subset) == subset.names() == ["one"]
    assert "one" in subset
    assert subset.get("one") is registry.get("one")
    with pytest.raises(UserError, match=r"unknown thing 'two'; .*there are: one"):
        subset.get("two")


def test_a_part_may_be_named_and_is_imported_when_it_is_used():
    things = Registry("thing")
    things.register("later", config=Options)("fractions:Fraction")
    assert things.get("later").target(3, 4).denominator == 4
    with pytest.raises(UserError, match=r"thing 'other' is registered as 'fractions'; it must be 'module:name'"):
        things.register("other")("fractions")
    with pytest.raises(
        UserError, match=r"'later' is registered twice: .*fractions\.py:\d+ and .*test_registry\.py:\d+"
    ):
        things.register("later")(Options)


def test_a_config_that_is_no_dataclass_is_refused():
    with pytest.raises(UserError, match=r"thing 'one', Options \(.*test_registry.py:\d+\): config must be a dataclass"):
        Registry("thing").register("one", config=int)(Options)


@pytest.mark.parametrize("registry", ALL, ids=lambda r: r.kind)
def test_the_table_of_built_ins_equals_what_the_modules_register(registry):
    table = BUILTIN_MODULES.get(registry.kind, {})
    for module in set(table.values()):
        importlib.import_module(module)
    entries = registry._entries.items()
    registered = {name: entry for name, entry in entries if entry.target.__module__.startswith("ftk.")}
    assert set(registered) == set(table)
    for name, module in table.items():
        entry = registered[name]  # one that is imported when it is used is registered where its options are
        assert (entry.config if isinstance(entry.builder, str) else entry.target).__module__ == module


def test_every_kind_has_built_in_parts():
    # Hooks of ftk's own come from options (--profile ...), not by name.
    assert {registry.kind for registry in ALL if registry.names()} == {registry.kind for registry in ALL} - {"hook"}
    assert BUILTIN_MODULES.keys() == {registry.kind for registry in ALL} - {"hook"}


def test_importing_ftk_and_listing_names_imports_neither_torch_nor_numpy():
    code = (
        "import sys, ftk, ftk.registry as r; [x.names() for x in vars(r).values() if isinstance(x, r.Registry)];"
        "print(sorted(m for m in ('torch', 'numpy', 'hydra', 'sentencepiece') if m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
