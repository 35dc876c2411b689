"""JSON and YAML text to plain values, nested no deeper, and no larger with aliases followed, than a limit; and back."""

from __future__ import annotations

import codecs
import functools
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

MAX_DEPTH = 100
"""Nesting of mappings and lists. Deeper files are attacks on the reader's stack."""

JSON_TYPES: dict[type, str] = {
    **dict.fromkeys((int, float), "a number"),
    **{type(None): "null", bool: "a boolean", str: "a string", list: "a list", dict: "an object"},
}
"""What a value of JSON is called in messages, by its type."""
_MAX_YAML_NODES = 100_000  # an alias counts as the nodes that it repeats
_OF_JSON = dict(zip("，：｛｝［］“”„＂'", ",:{}[]" + '"' * 5, strict=True))
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
    meant = _OF_JSON.get(found, "")
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
        raise ValueError(f"it is {JSON_TYPES[type(found)]}")
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


def how_to_convert(data: bytes) -> str:
    """For messages about text that is not UTF-8: what converts it, with the arguments where they are known."""
    try:
        data.decode("gb18030")
    except UnicodeDecodeError:
        return "e.g. with iconv"
    return "e.g. with iconv -f GB18030 -t UTF-8 if it is Chinese (GBK)"


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
        problem = _yaml_fault(error, content)
    raise ValueError(f"is not a YAML file: {problem}")


def _yaml_fault(error: Exception, content: bytes | str) -> str:
    """Why text is not YAML; where a tab or a sign of an input method is the cause, what has to be written."""
    data = content if isinstance(content, bytes) else b""
    text = content if isinstance(content, str) else ""
    if not data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        try:
            text = text or data.decode("utf-8")
        except UnicodeDecodeError:
            return f"it is not UTF-8; convert it, {how_to_convert(data)}"
    # Of a broken scalar or key, such as a date in month 13, PyYAML raises what Python raises.
    problem = re.sub(r'in "<\w+ string>", ', "at ", " ".join(str(error).split()))
    if "nesting depth" in problem:  # libyaml may meet a limit of its own first
        return "nested too deeply"
    if (mark := getattr(error, "problem_mark", None)) is not None:
        before = max(0, mark.line - 1)  # where a key may stand that is no key
        for number, line in enumerate(text.splitlines()[before : mark.line + 1], start=before + 1):
            if "\t" in line[: len(line) - len(line.lstrip())]:
                return f"line {number} begins with a tab; indent it with spaces"
            if (hint := fullwidth_hint(line.partition("#")[0])) is not None:
                return f"{problem}; line {number}: {hint}"
    return problem


def fullwidth_hint(text: str) -> str | None:
    """For messages: what to write in place of the first sign in a text that stands for one of JSON or YAML."""
    found = next((one for one in text if one in _OF_JSON), None)
    return None if found is None else f"write {_OF_JSON[found]!r} for {found!r}"


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
