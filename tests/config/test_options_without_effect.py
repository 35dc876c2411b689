"""An option that needs another one has no effect without it: that is refused, and the help says it."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from ftk.config import compose
from ftk.config.build import build
from ftk.config.needs import without_effect
from ftk.config.options import MISSING, Option
from ftk.config.root import Chosen, sections_of, slots_of
from ftk.errors import UserError
from ftk.trainer.config import TrainConfig
from tests.config.all_options import ROOTS, options_of_root

TRAIN = ["data", "--arch", "glm_tiny", "--max-update", "1"]
DEPENDENT = [
    (name, option)
    for name, root in ROOTS.items()
    for option in {option.flag: option for option in options_of_root(root)}.values()
    if option.needs
]


def other_value(option: Option) -> Any:
    """A value that is not the default."""
    if option.choices is not None:
        return next(choice for choice in option.choices if choice != option.default)
    if option.is_list:
        return ["x"]
    if option.kind is bool:
        return not option.default
    return "x" if option.kind is str else (option.default or 0) + 1


def values_of(root: type, option: Option) -> Any:
    """A configuration of the root's options, at their defaults but for one, as `without_effect` reads it."""
    config = object.__new__(root)
    by_key: dict[str, list[Any]] = {key: [kind] for key, (_, kind) in sections_of(root).items()}
    by_key |= {
        key: [entry.config for entry in map(slot.registry.get, slot.registry.names()) if entry.config is not None]
        for key, slot in slots_of(root).items()
    }
    for key, kinds in by_key.items():
        fields = [{field.name: field.metadata.get("needs", {}) for field in dataclasses.fields(kind)} for kind in kinds]
        own = key == option.section  # of two parts that have an option of this name, the one that needs the same
        kind = next(
            k for k, needs in zip(kinds, fields, strict=True) if not own or needs.get(option.name) == option.needs
        )
        section = object.__new__(kind)
        for field in dataclasses.fields(kind):
            default = field.default if field.default_factory is MISSING else field.default_factory()
            setattr(section, field.name, None if default is MISSING else default)
        setattr(config, key, section)
    part = getattr(config, option.section)
    setattr(part, option.name, other_value(option))
    for key in slots_of(root):
        setattr(config, key, Chosen(None, getattr(config, key)))
    return config


@pytest.mark.parametrize(("name", "option"), DEPENDENT, ids=lambda value: getattr(value, "flag", ""))
def test_an_option_that_needs_another_is_refused_without_it_and_silent_with_it(name, option):
    root = ROOTS[name]
    known = {other.name: other for other in options_of_root(root)}
    config = values_of(root, option)
    for names, wanted in option.needs.items():
        for needed in [names] if isinstance(names, str) else names:
            if needed not in known:
                assert not isinstance(names, str), f"{option.key} needs {needed}, which {name} has not"
                continue
            place = getattr(config, known[needed].section)
            place = place.config if isinstance(place, Chosen) else place
            off = known[needed].default is not None and known[needed].choices is not None
            if known[needed].kind is bool:
                setattr(place, needed, False)
            elif not off:
                setattr(place, needed, None)
            elif wanted is not True:
                allowed = wanted if isinstance(wanted, tuple) else (wanted,)
                setattr(place, needed, next(choice for choice in known[needed].choices if choice not in allowed))
    [message] = without_effect(config, [option.key])
    assert option.flag.lstrip("-") in message.partition(" has no effect without ")[0]
    assert not list(without_effect(config, []))
    for names, wanted in option.needs.items():
        needed = next(one for one in ([names] if isinstance(names, str) else names) if one in known)
        place = getattr(config, known[needed].section)
        place = place.config if isinstance(place, Chosen) else place
        good = {"> 1": 2, True: "given"}.get(wanted, wanted) if not isinstance(wanted, tuple) else wanted[0]
        setattr(place, needed, good)
    assert not list(without_effect(config, [option.key]))


SAYS_MORE = {
    "common.base",
    "average.inputs",
    "show.num_samples",
    "show.packed",
    "dataset.data_temperature",  # of several corpora
    "generate.data",
    "generate.input_format",
    "generate.results_path",
    "generate.score_reference",
    "generation.search",
    "generation.early_stopping",
    "generation.lm_weight",  # checked by `validate`, which holds in Python, too
    "generation.lm_ends",
    "work.seq_length",
    "cluster.peak_tflops",
    "optimizer.adamw_lr_ratio",
    "parameters.gradient_multipliers",
    "dataloader.batch_size",
    "dataloader.curriculum_updates",
    "task.pairs",
    "task.window_stride",
    "parallel.layout",
    "parallel.data_parallel_shard_size",
    "parallel.zero_stage",  # checked by `validate`: shards may be what the other sizes leave
    "parallel.weights",
    "lr_scheduler.warmup_ratio",
    "lr_scheduler.min_lr_ratio",
    "lr_scheduler.decay_rate",
    "lr_scheduler.div_factor",
    "lr_scheduler.final_div_factor",
    "lr_scheduler.decay_updates",
    "form.copy_gmask_row",
    "written.copy_gmask_row",
}
"""Options whose help names another one for more than that they need it."""


def test_an_option_whose_help_names_another_says_whether_it_needs_it():
    named = set()
    for root in ROOTS.values():
        options = list(options_of_root(root))
        names = {option.name for option in options}
        for option in options:
            words = re.findall(r"`(\w+)`", option.help)
            words += [flag.replace("-", "_") for flag in re.findall(r"--([a-z-]+)", option.help)]
            if not option.needs and names & set(words) - {option.name}:
                named.add(option.key)
    assert named <= SAYS_MORE


def test_only_what_the_user_gives_now_must_have_an_effect(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("debug: {profile_start: 9}\nema: {ema_warmup: false}\n")
    for silent in (["--config", str(file)], ["--profile-start", "5"], ["--profile", "2", "--profile-start", "9"]):
        compose(TrainConfig, "ftk-train", "", [*TRAIN, *silent])
    compose(TrainConfig, "ftk-train", "", [*TRAIN, "--validate-interval", "0", "--valid-subset", "none"])
    for loud in ([], ["--config", str(file)]):
        with pytest.raises(UserError, match="^--profile-start has no effect without --profile; add that, or leave"):
            compose(TrainConfig, "ftk-train", "", [*TRAIN, "--profile-start", "7", *loud])
    tree = {
        "model": {"arch": "gpt2_tiny"},
        "debug": {"profile_start": 7},
        "training": {"max_update": 1},
        "dataset": {"data": "d"},
    }
    build(TrainConfig, tree)
    with pytest.raises(UserError, match=r"^debug\.profile_start has no effect without debug\.profile; "):
        build(TrainConfig, tree, given=["debug.profile_start"])
