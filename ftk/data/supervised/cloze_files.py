"""Cloze tasks of YAML files: one of `clozes/`, or a user's own. docs/finetuning.md says what may stand in it."""

from __future__ import annotations

import functools
import itertools
import logging
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ftk.config.root import load_any_yaml
from ftk.data.supervised.cloze import BORDER, EACH, GAP, PROMPT, Cloze, Pattern, Piece
from ftk.data.supervised.cloze_readers import READERS
from ftk.errors import UserError, counted, did_you_mean, shown
from ftk.files import reason
from ftk.parsing import parse_yaml

logger = logging.getLogger(__name__)

_FOLDER = Path(__file__).with_name("clozes")
_PIECE = re.compile(r"\{([^{}]*)\}")
_FIELD = re.compile(r"(?P<space> ?)(?P<name>[A-Za-z_][\w.]*)(?P<modifiers>(?::[a-z]+)*)")
_MODIFIERS = ("shorten", "optional", "lower", "bare")
_KEYS = (
    "name",
    "like",
    "rename",
    "reader",
    "standard_punctuation",
    "label",
    "labels",
    "texts",
    "words",
    "candidates",
    "scoring",
    "end",
    "pattern",
    "metrics",
    "patterns",
)
_PATTERN_KEYS = ("text", "words", "candidates", "each")
METRICS = ("accuracy", "em", "macro_f1", "f1", "f1a", "mcc")


def cloze_names() -> list[str]:
    """The tasks that ftk has."""
    return sorted(path.stem for path in _FOLDER.glob("*.yaml"))


def load_cloze(cloze: str) -> Cloze:
    """A cloze task.

    Args:
        cloze: one of `cloze_names()`, the path of a YAML file, or what `with_content` has returned.

    Raises:
        UserError: there is no such task or file, or what it holds is no task.
    """
    where, tree = _tree_of(cloze)
    return _built(tree, where)


def with_content(cloze: str) -> str:
    """The option `cloze` with the content of a file in place of its path, so that a checkpoint holds it.

    Args:
        cloze: as of `load_cloze`.

    Raises:
        UserError: as of `load_cloze`.
    """
    where, tree = _tree_of(cloze)
    _built(tree, where)
    if cloze in cloze_names():
        return cloze
    import yaml

    # YAML on one line, as JSON knows texts alone as keys, and the labels of `words` are also numbers and booleans.
    options: dict[str, Any] = {"default_flow_style": True, "width": math.inf, "sort_keys": False, "allow_unicode": True}
    text: str = yaml.safe_dump({"name": where, **tree}, **options)
    return text.strip()


def _tree_of(cloze: str) -> tuple[str, dict[str, Any]]:
    """What a task is called in messages, and its mapping."""
    if cloze in cloze_names():
        return cloze, _merged(load_any_yaml(_FOLDER / f"{cloze}.yaml"), cloze)
    if cloze.startswith("{"):
        try:
            own = parse_yaml(cloze)
        except ValueError as error:
            raise UserError(f"`cloze` {reason(error)}") from None
        tree = _merged(own, "`cloze`")
        return str(tree.get("name", "`cloze`")), tree
    if Path(cloze).suffix not in (".yaml", ".yml"):
        raise UserError(
            f"unknown cloze task {cloze!r}; {did_you_mean(cloze, cloze_names())} (or a YAML file of your own)"
        )
    return cloze, _merged(load_any_yaml(cloze, "the cloze task"), cloze)


def _merged(own: Any, where: str) -> dict[str, Any]:
    """The mapping of a file, with that of the task it is like where it says nothing; texts and patterns are added."""
    _check_mapping(where, "a cloze task", own, _KEYS)
    if "texts" in own:
        _check_mapping(where, "'texts'", own["texts"])
    if "patterns" in own:
        own["patterns"] = _by_number(own["patterns"], where)
    like = own.pop("like", None)
    if like is None:
        return dict(own)
    if like not in cloze_names() or like == where:
        raise UserError(f"{where}: 'like' is {shown(like)}; {did_you_mean(str(like), cloze_names())}")
    _, base = _tree_of(like)
    added = {key: {**base.get(key, {}), **own[key]} for key in ("texts", "patterns") if key in own}
    return {**base, **own, **added}


def _by_number(patterns: Any, where: str) -> dict[int, Any]:
    """Patterns by their numbers, whether they stand in a list or a mapping."""
    found = dict(enumerate(patterns)) if isinstance(patterns, list) else patterns
    if not isinstance(found, dict) or not found or not all(type(number) is int for number in found):
        raise UserError(f"{where}: 'patterns' must be a list of patterns, or a mapping of numbers to them")
    return found


def _built(tree: dict[str, Any], where: str) -> Cloze:
    """The task of a mapping."""
    patterns = _by_number(tree.get("patterns"), where)
    texts = tree.get("texts", {})
    built = {number: _built_pattern(value, tree, f"{where}: pattern {number}") for number, value in patterns.items()}
    kinds: dict[str, type] = dict.fromkeys(("name", "label", "reader", "scoring"), str)
    kinds |= {"end": bool, "pattern": int, "standard_punctuation": bool}
    for key, kind in kinds.items():
        if key in tree and type(tree[key]) is not kind:
            raise UserError(f"{where}: {key!r} is {shown(tree[key])}; it must be of type {kind.__name__}")
    values = {key: tree[key] for key in kinds if key in tree}
    if values.get("reader", "plain") not in READERS:
        raise UserError(f"{where}: 'reader' is {shown(values['reader'])}; {did_you_mean(values['reader'], [*READERS])}")
    number = values.setdefault("pattern", min(built))
    if number not in built:
        raise UserError(f"{where}: 'pattern' is {number}; there are: {', '.join(map(str, built))}")
    rename = tree.get("rename", {})
    _check_mapping(where, "'rename'", rename)
    values.setdefault("scoring", "sum" if built[number].words is None else "restricted_logits")
    values.setdefault("end", built[number].words is None)
    values.setdefault("name", where)
    cloze = Cloze(
        patterns=built,
        labels=tuple(_list_of(where, "labels", tree)),
        metrics=tuple(_list_of(where, "metrics", tree)),
        texts={name: _parsed(text, f"{where}: text {name}", gaps=0) for name, text in texts.items()},
        rename=rename,
        **values,
    )
    _check_labels(cloze)
    _check_metrics(cloze)
    return cloze


def _check_labels(cloze: Cloze) -> None:
    """Raises UserError if a label is no text, number or boolean."""
    for label in (*cloze.labels, *(label for pattern in cloze.patterns.values() for label in pattern.words or ())):
        if type(label) not in (str, int, float, bool):
            raise UserError(f"{cloze.name}: the label {shown(label)} must be a text, a number, true or false")


def _check_metrics(cloze: Cloze) -> None:
    """Raises UserError if a metric is unknown, or not defined for the labels of a pattern."""
    for name in cloze.metrics:
        if name not in METRICS:
            raise UserError(f"{cloze.name}: unknown metric {shown(name)}; {did_you_mean(str(name), METRICS)}")
        if name in ("accuracy", "em") or (name == "f1" and cloze.has_texts):
            continue
        for number, pattern in cloze.patterns.items():
            count = len(pattern.words or cloze.labels)
            if count < 2 or (count > 2 and name != "macro_f1"):
                wanted = "two labels or more" if name == "macro_f1" else "two labels"
                raise UserError(
                    f"{cloze.name}: the metric {name} is for {wanted}, and pattern {number} has {count}; "
                    f"choose another metric"
                )


def _built_pattern(value: Any, task: Mapping[str, Any], where: str) -> Pattern:
    """A pattern of a mapping, or of its text alone, with the task's words or candidates if it has none of its own."""
    own = {"text": value} if isinstance(value, str) else value
    _check_mapping(where, "a pattern", own, _PATTERN_KEYS)
    pieces = _parsed(own.get("text"), where)
    if any(piece.kind == GAP and before.text.endswith(" ") for before, piece in itertools.pairwise(pieces)):
        _warn_of_space(where)
    chosen = own if "words" in own or "candidates" in own else task
    words, candidates = chosen.get("words"), chosen.get("candidates")
    if (words is None) == (candidates is None):
        raise UserError(f"{where} needs either 'words', a mapping of labels to words, or 'candidates'")
    each = tuple(_list_of(where, EACH, own))
    if not all(isinstance(name, str) for name in each):
        raise UserError(f"{where}: 'each' is {shown(own[EACH])}; it must be a list of fields")
    if words is not None:
        if each:
            raise UserError(f"{where}: 'each' gives each of the 'candidates' its own text; it is not for 'words'")
        if not isinstance(words, dict) or len(words) < 2 or not all(isinstance(word, str) for word in words.values()):
            raise UserError(f"{where}: 'words' must be a mapping of two or more labels to words")
        return Pattern(pieces, words)
    templates = [candidates] if isinstance(candidates, str) else candidates
    if not isinstance(templates, list) or not templates:
        raise UserError(f"{where}: 'candidates' must be a text with fields, or a list of such")
    templates = templates * max(1, len(each)) if len(templates) == 1 else templates
    if len(each) not in (0, len(templates)):
        problem = f"has {counted(len(templates), 'candidate')}, but 'each' has {len(each)} fields"
        raise UserError(f"{where} {problem}; their numbers must be equal")
    return Pattern(pieces, None, tuple(_parsed(text, f"{where}: candidates", gaps=0) for text in templates), each)


@functools.cache  # a task is built several times
def _warn_of_space(where: str) -> None:
    logger.warning(
        "%s: a space stands before {gap}; in most vocabularies it belongs to the word behind it: leave it out there, "
        "and write it in front of each candidate (' yes')",
        where,
    )


def _parsed(text: Any, where: str, gaps: int = 1) -> tuple[Piece, ...]:
    """The pieces of a text with fields."""
    if not isinstance(text, str) or not text:
        raise UserError(
            f"{where}: the text is {shown(text)}; write a text with fields, such as '{{question}}?{{gap}}.'"
        )
    pieces: list[Piece] = []
    for number, part in enumerate(_PIECE.split(text)):
        if number % 2 == 0:
            if "{" in part or "}" in part:
                raise UserError(f"{where}: a brace has no partner in {shown(text)}; fields are written {{name}}")
            pieces += [Piece("text", part)] if part else []
        elif part in (GAP, PROMPT, BORDER):
            if part != GAP and not gaps:
                raise UserError(f"{where}: {shown(text)} has {{{part}}}, which only the text of a pattern may have")
            pieces.append(Piece(part))
        elif part:
            pieces.append(_parsed_field(part, where))
    found = sum(piece.kind == GAP for piece in pieces)
    if found != gaps:
        wanted = "one {gap}" if gaps else "no {gap}"
        raise UserError(f"{where}: {shown(text)} has {found} gaps; it must have {wanted}")
    return tuple(pieces)


def _parsed_field(part: str, where: str) -> Piece:
    found = _FIELD.fullmatch(part)
    if found is None:
        raise UserError(f"{where}: {{{part}}} is no field; write {{name}}, {{ name}} or {{name:modifier}}")
    modifiers = tuple(found["modifiers"].split(":")[1:])
    for modifier in modifiers:
        if modifier not in _MODIFIERS:
            raise UserError(f"{where}: {{{part}}}: unknown modifier {modifier!r}; {did_you_mean(modifier, _MODIFIERS)}")
    return Piece("field", found["name"], found["space"], modifiers)


def _list_of(where: str, key: str, tree: Mapping[str, Any]) -> list[Any]:
    values = tree.get(key, [])
    if not isinstance(values, list):
        raise UserError(f"{where}: {key!r} is {shown(values)}; it must be a list")
    return values


def _check_mapping(where: str, what: str, value: Any, keys: Sequence[str] = ()) -> None:
    """Raises UserError if a value is no mapping with texts as keys, of those that are known."""
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise UserError(f"{where}: {what} must be a mapping, not {shown(value)}")
    for key in value:
        if keys and key not in keys:
            raise UserError(f"{where}: unknown key {key!r}; {did_you_mean(key, keys)}")
