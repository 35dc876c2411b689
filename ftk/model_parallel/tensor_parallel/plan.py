"""A plan of tensor parallelism: data next to a model, from patterns of module names to styles.

    {"layers.*.feed_forward.inner": "column",
     "layers.*.attention.qkv": {"style": "column", "units": 16, "unit_name": "attention heads"}}

A pattern is a module's name as in `named_modules()`, "" for the model itself; `*` stands for any characters but a dot.
Styles and their options are in `styles`. What is not named stays whole on every process.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, get_type_hints

from torch import nn

from ftk.errors import UserError
from ftk.model_parallel.blocks import refuse_added_tokens
from ftk.model_parallel.tensor_parallel.styles import (
    STYLES,
    Column,
    Row,
    Sequence,
    Sharded,
    Style,
    VocabEmbedding,
    drops,
)

Plan = Mapping[str, str | Mapping[str, Any]]
"""Pattern -> the name of a style, or {"style": name, option: value, ...}."""

_KINDS: dict[Any, tuple[str, Callable[[Any], bool]]] = {
    bool: ("true or false", lambda value: isinstance(value, bool)),
    int: ("a whole number of 1 or more", lambda value: _counts(value)),
    int | None: ("a whole number of 1 or more, or None", lambda value: value is None or _counts(value)),
    str: ("text", lambda value: isinstance(value, str)),
    tuple[str, ...]: (
        "a list of names",
        lambda value: isinstance(value, list | tuple) and all(isinstance(name, str) for name in value),
    ),
}
"""The type of a style's option -> what a plan may give, in words, and whether a value is that."""

_ROOT = 'the model itself (pattern "")'


def plan_of(model: nn.Module, size: int) -> Plan:
    """The plan that a model offers.

    Raises:
        UserError: it offers none.
    """
    plan: Plan | None = getattr(model, "tensor_parallel_plan", None)
    if plan is None:
        raise UserError(
            f"`tensor_parallel_size` {size}: {type(model).__name__} has no plan for tensor parallel; offer one as its "
            f"property tensor_parallel_plan, or leave the size at 1: `data_parallel_shard_size` shards the "
            f"parameters of any model in training, `pipeline_parallel_size` layers also in generation"
        )
    return plan


def match_plan(
    model: nn.Module, plan: Plan, size: int, sequence_parallel: bool = False, partial: bool = False
) -> dict[str, Style]:
    """The style of each module that the plan names.

    Args:
        model: also on the meta device.
        size: processes that share each layer.
        partial: the model is a part of the one that the plan is for, so that patterns may match nothing.

    Raises:
        UserError: with every mistake: a pattern that matches nothing, two that match one module, a style or an option
            that does not exist, a size that cannot be divided, with sequence parallel what is missing for it.
    """
    if sequence_parallel:
        refuse_added_tokens(model, "sequence_parallel")
    wrong = _entry_mistakes(plan)
    if wrong:
        raise UserError("tensor parallel plan: " + "\n  ".join(_some(wrong)))
    styles = {pattern: _style(entry) for pattern, entry in plan.items()}
    names = [name for name, _ in model.named_modules() if name]
    found: dict[str, Style] = {}
    by: dict[str, str] = {}
    mistakes: list[str] = []
    for pattern, style in styles.items():
        expression = re.compile("[^.]*".join(map(re.escape, pattern.split("*"))))
        matched = [name for name in names if expression.fullmatch(name)] if pattern else [""]
        if not matched and not partial:
            mistakes.append(_no_match(pattern, names, model))
        for name in matched:
            if name in by:
                mistakes.append(f"{name} is named twice, by {by[name]!r} and {pattern!r}; let one pattern match it")
            found[name], by[name] = style, pattern
    for name in list(found):
        found.update(_of_parts(model.get_submodule(name), name, plan[by[name]]))
    same: dict[str, list[str]] = {}  # mistake -> modules; that of a layer is that of all layers
    for name, style in found.items():
        for text in style.check(model.get_submodule(name), size):
            same.setdefault(text, []).append(name or _ROOT)
    for text, modules in same.items():
        mistakes.append(f"{modules[0]} {text}" + (f"; so with {len(modules) - 1} more" if len(modules) > 1 else ""))
    inside = _inside_mistakes(model, found)
    mistakes += inside.values()
    if sequence_parallel:
        mistakes += _sequence_mistakes(model, found, inside, partial)
    if mistakes:
        raise UserError(f"tensor parallel plan of {type(model).__name__}: " + "\n  ".join(_some(mistakes)))
    return found


def _entry_mistakes(plan: Any) -> list[str]:
    """Mistakes that do not depend on the model: one message for each pattern."""
    if not isinstance(plan, Mapping):
        return [f"{plan!r} is no mapping from patterns of module names to styles"]
    found = []
    for pattern, entry in plan.items():
        if not isinstance(pattern, str):
            found.append(f"{pattern!r} must be a pattern of module names, a string")
        elif isinstance(entry, str):
            found += _style_mistakes(pattern, entry, {})
        elif isinstance(entry, Mapping):
            options = dict(entry)
            found += _style_mistakes(pattern, options.pop("style", None), options)
        else:
            found.append(
                f'{pattern!r} has {entry!r}, which must be the name of a style, or {{"style": name, option: value}}'
            )
    return found


def _style_mistakes(pattern: str, name: Any, options: Mapping[Any, Any]) -> list[str]:
    if not isinstance(name, str) or name not in STYLES:
        return [f"{pattern!r} has the style {name!r}, {_choices(name, STYLES)}"]
    known = [field.name for field in dataclasses.fields(STYLES[name])]
    types = get_type_hints(STYLES[name])
    wrong = []
    for option, value in options.items():
        if option not in known:
            wrong.append(f"gives {name!r} the option {option!r}, {_choices(option, known)}")
            continue
        allowed, fits = _KINDS[types[option]]
        if not fits(value):
            wrong.append(f"gives {name!r} the option {option!r} as {value!r}; it must be {allowed}")
    return [f"{pattern!r} {'; it '.join(wrong)}"] if wrong else []


def _style(entry: str | Mapping[str, Any]) -> Style:
    options: dict[str, Any] = {"style": entry} if isinstance(entry, str) else dict(entry)
    style = STYLES[options.pop("style")]
    return style(**{option: tuple(value) if isinstance(value, list) else value for option, value in options.items()})


def _of_parts(module: Any, name: str, entry: str | Mapping[str, Any]) -> dict[str, Style]:
    """The styles of the parts of a module that knows them (an adapter's), where the plan has this entry for it."""
    if not hasattr(module, "parts_in_plan"):
        return {}
    options: dict[str, Any] = {"style": entry} if isinstance(entry, str) else dict(entry)
    parts: Plan = module.parts_in_plan(options.pop("style"), options)
    return {f"{name}.{part}": _style(of_part) for part, of_part in parts.items()}


def _counts(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _some(mistakes: list[str]) -> list[str]:
    return mistakes[:8] + ([f"and {len(mistakes) - 8} more"] if len(mistakes) > 8 else [])


def _choices(name: Any, known: Iterable[str]) -> str:
    known = sorted(known)
    near = difflib.get_close_matches(str(name), known, n=1)
    hint = f"did you mean {near[0]!r}? There" if near else "there"
    return f"which does not exist; {hint} are {', '.join(known) or 'none'}"


def _no_match(pattern: str, names: list[str], model: nn.Module) -> str:
    names = list(dict.fromkeys(re.sub(r"(?<=\.)\d+\b", "*", name) for name in names))  # as a pattern would be
    near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.4) or names[:3]
    return f"the pattern {pattern!r} matches no module; there are {', '.join(map(repr, near)) or 'none'}, ..."


def _inside_mistakes(model: nn.Module, found: Mapping[str, Style]) -> dict[str, str]:
    """By name. Inside a sharded module only the plan's author knows what stands behind the row layer, and is whole."""
    sharded = {f"{name}.": style for name, style in found.items() if isinstance(style, Sharded)}
    drawing = tuple(name for name, style in sharded.items() if style.own_random)
    mistakes = {}
    for name, module in model.named_modules():
        if name in found or not name.startswith(tuple(sharded)):
            continue
        if drops(module) and name.startswith(drawing):
            is_a, part = "is dropout", "of what it drops"
        elif any(parameter is not None for parameter in module._parameters.values()):
            is_a, part = "has parameters of its own", "of what it works on, such as some of the heads"
        else:
            continue
        mistakes[name] = (
            f'{name} {is_a} inside a sharded module and has no style; give it "sharded" if each process has a part '
            f'{part}, "column" if it is linear and reads the whole, "replicated" or "sequence" behind the row layer'
        )
    return mistakes


def _sequence_mistakes(
    model: nn.Module, found: Mapping[str, Style], named: Collection[str], partial: bool
) -> list[str]:
    """Plans that would silently give wrong values or gradients: nothing sharded, nothing gathered, a missing norm."""
    styles = list(found.values())
    mistakes = [
        f"{name or _ROOT} has parameters of its own and no style; with `sequence_parallel` every such "
        f'module needs one: "sequence" if it works on a part of the sequence, "replicated" if on the whole'
        for name, module in model.named_modules()
        if name not in found
        and name not in named
        and any(parameter is not None for parameter in module._parameters.values())
    ]
    if not partial:
        cuts = any(
            (isinstance(style, VocabEmbedding) and not style.whole_sequence)
            or (isinstance(style, Sequence) and style.scatter_input)
            for style in styles
        )
        gathers = any(isinstance(style, Sequence) and style.gather_output for style in styles)
        if not cuts:
            mistakes.append('`sequence_parallel`: nothing shares the sequence; give a "sequence" style scatter_input')
        if not gathers:
            mistakes.append("`sequence_parallel`: nothing gathers the sequence; give the last norm gather_output")
        if not any(isinstance(style, Column | Row) for style in styles):
            mistakes.append("`sequence_parallel`: the plan has no column and row layers")
    return mistakes
