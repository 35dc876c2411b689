"""JSON and YAML text to plain values, nested no deeper, and no larger with aliases followed, than a limit; and back."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

MAX_DEPTH = 100
"""Nesting of mappings and lists. Deeper files are attacks on the reader's stack."""

_MAX_YAML_NODES = 100_000  # an alias counts as the nodes that it repeats
_WIDE = "，：｛｝［］"
MEANT = dict(zip(f"{_WIDE}“”„＂'", ",:{}[]" + '"' * 5, strict=True))
"""What other characters stand in place of, as an input method or a word processor writes them."""
_EXPECTED = {
    "Expecting value": '"{[',
    "Expecting property name enclosed in double quotes": '"}',
    "Expecting ':' delimiter": ":",
    "Expecting ',' delimiter": ",}]",
}
"""What may stand in a place, by what Python's reader says of it."""


def parse_json(content: bytes | str) -> Any:
    """The value of JSON text.

    Raises:
        ValueError: it is not JSON in a Unicode encoding, or is nested too deeply.
    """
    try:
        value = json.loads(content)
    except RecursionError:
        raise ValueError("is not JSON (nested too deeply)") from None
    except ValueError as error:
        raise ValueError(f"is not JSON ({error})") from None
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        inner = (part.values() if isinstance(part, dict) else part for part in level if isinstance(part, (dict, list)))
        level = [part for parts in inner for part in parts if isinstance(part, (dict, list))]
        if not level:
            return value
    raise ValueError("is not JSON (nested too deeply)")  # json reads it, but recursive functions on it would fail


def json_fault(error: ValueError) -> str:
    """Why text is not JSON, with the place; where a character is not JSON's own, what has to be written."""
    if not isinstance(error, json.JSONDecodeError):
        return str(error)
    place = f"column {error.colno}" if error.lineno == 1 else f"line {error.lineno}, column {error.colno}"
    found = error.doc[error.pos : error.pos + 1]
    if found == "\ufeff":
        return f"a byte order mark at {place}; remove it"
    meant = MEANT.get(found, "")
    if meant and meant in _EXPECTED.get(error.msg, ""):
        return f"{found!r} at {place}; write {meant!r} there"
    return f"{error.msg.removesuffix(' at')} at {place}"


def strict_object(text: str) -> dict[str, Any]:
    """A JSON object without NaN or Infinity, in which no key stands twice and no character is half of one.

    Raises:
        ValueError: the text is none.
    """
    try:
        found = json.loads(text, parse_constant=_no_number, object_pairs_hook=_once_each)
        json.dumps(found, ensure_ascii=False).encode("utf-8")
    except json.JSONDecodeError as error:
        raise ValueError(json_fault(error)) from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except UnicodeEncodeError:
        raise ValueError(r"it holds half a character (a lone \ud800 to \udfff)") from None
    if not isinstance(found, dict):
        raise ValueError(f"it is a {type(found).__name__}")
    return found


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number of JSON")


def _once_each(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the key {name!r} is given twice")
        found[name] = value
    return found


def json_in_html(value: Any) -> str:
    """JSON in which nothing can end the script element that holds it."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text.translate({ord(one): f"\\u{ord(one):04x}" for one in "<>&\u2028\u2029"})


def parse_yaml(content: bytes | str) -> Any:
    """The value of YAML text, without Python objects.

    Raises:
        ValueError: it is not one YAML document, is nested too deeply, or its aliases repeat it too often.
    """
    import yaml

    kind = _yaml_loader()
    try:
        problem = _yaml_excess(yaml.parse(content, Loader=kind))
        if problem is None:
            loader = kind(content)
            try:
                return loader.get_single_data()
            finally:
                loader.dispose()
    except (
        yaml.YAMLError,
        ArithmeticError,
        AttributeError,
        LookupError,
        RecursionError,
        TypeError,
        ValueError,
    ) as error:
        # Of a broken scalar or key, such as a date in month 13, PyYAML raises what Python raises.
        problem = " ".join(str(error).split())
        if "nesting depth" in problem:  # libyaml may meet a limit of its own first
            problem = "nested too deeply"
        problem += _yaml_hint(content, getattr(error, "problem_mark", None))
    raise ValueError(f"is not a YAML file: {problem}")


def _yaml_hint(content: bytes | str, mark: Any) -> str:
    """What is likely wrong where PyYAML stopped: another encoding, a tab, or a sign of another keyboard."""
    try:
        text = content if isinstance(content, str) else content.decode("utf-8")
    except UnicodeDecodeError:
        return "; it is not UTF-8: convert it, e.g. with iconv -f GB18030 -t UTF-8 if it is Chinese (GBK)"
    if mark is None:
        return ""
    before, line = ["", *text.splitlines(), "", ""][mark.line : mark.line + 2]
    if "\t" in line[: len(line) - len(line.lstrip())]:
        return "; it is a tab: indent with spaces"
    signs = (sign for sign in before + line if sign in _WIDE)
    return next((f"; near it is {sign!r}: write {MEANT[sign]!r}" for sign in signs), "")


def dump_yaml(value: Any) -> str:
    """YAML text of plain values, in their order."""
    import yaml

    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)  # without libyaml: slow
    return yaml.dump(value, Dumper=dumper, sort_keys=False, allow_unicode=True)


@functools.cache
def _yaml_loader() -> Any:
    """PyYAML's safe loader, which also refuses a number that a float can only hold as 0, such as 1.0e-400."""
    import yaml

    class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]  # without libyaml: slow
        pass

    def number(loader: Any, node: Any) -> float:
        value: float = loader.construct_yaml_float(node)
        if value == 0.0 and any(digit in "123456789" for digit in node.value.lower().partition("e")[0]):
            raise ValueError(f"{node.value} is too small to differ from 0")
        return value

    Loader.add_constructor("tag:yaml.org,2002:float", number)
    return Loader


def _yaml_excess(events: Iterable[Any]) -> str | None:
    """The limit that a YAML text exceeds, checked without building its values; None if it exceeds none."""
    import yaml

    sizes = [0]  # nodes in each collection that is open, those of its aliases included
    anchors: dict[str, int | None] = {}
    opened: list[str | None] = []
    for event in events:
        if isinstance(event, (yaml.MappingStartEvent, yaml.SequenceStartEvent)):
            if len(sizes) > MAX_DEPTH:
                return "nested too deeply"
            sizes.append(1)
            opened.append(event.anchor)
            if event.anchor is not None:
                anchors[event.anchor] = None
        elif isinstance(event, (yaml.MappingEndEvent, yaml.SequenceEndEvent)):
            size, anchor = sizes.pop(), opened.pop()
            sizes[-1] += size
            if anchor is not None:
                anchors[anchor] = size
        elif isinstance(event, yaml.AliasEvent):
            size_of_alias = anchors.get(event.anchor or "", 1)
            if size_of_alias is None:
                return "an alias within its own anchor"
            sizes[-1] += size_of_alias
        elif isinstance(event, yaml.ScalarEvent):
            sizes[-1] += 1
            if event.anchor is not None:
                anchors[event.anchor] = 1
        if sizes[-1] > _MAX_YAML_NODES:
            return f"more than {_MAX_YAML_NODES:,} values"
    return None
