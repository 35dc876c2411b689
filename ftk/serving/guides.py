"""What all of an answer must match: `response_format` as OpenAI's clients give it, and vLLM's fields."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ftk.generation.processors.guides import KINDS
from ftk.serving.refusal import Refusal

if TYPE_CHECKING:
    from ftk.serving.fields import Fields

GUIDE_FIELDS = frozenset({"guide", "response_format", "structured_outputs", *(f"guided_{kind}" for kind in KINDS)})
_FORMATS = ("text", "json_object", "json_schema")


def guide_of(fields: Fields) -> str | None:
    """The option `guide` of a prompt that a request asks for; None where its answers are free.

    Read are `response_format` ({"type": "json_schema", "json_schema": {"schema": {...}}}, {"type": "json_object"}),
    `structured_outputs` ({"json": {...}}, or regex, choice, grammar) and vLLM's earlier names (`guided_json` ...).

    Raises:
        Refusal: 400; one has another form, or there are several.
    """
    found = {f"guided_{kind}": _guide(kind, fields, f"guided_{kind}") for kind in KINDS}
    found["response_format"] = _of_format(fields.object("response_format"))
    found["structured_outputs"] = _of_structure(fields.object("structured_outputs"))
    given = {name: guide for name, guide in found.items() if guide is not None}
    if len(given) > 1:
        raise Refusal(400, f"{' and '.join(given)} both say what an answer must match; give one", next(iter(given)))
    return next(iter(given.values()), None)


def field_of(values: Mapping[str, Any]) -> str:
    """The field of a request's values that says what its answer must match."""
    given = [name for name, value in values.items() if name in GUIDE_FIELDS and value not in (None, {"type": "text"})]
    return next(iter(given), "guide")


def _of_format(given: Mapping[str, Any] | None) -> str | None:
    if given is None:
        return None
    kind = given.get("type")
    if kind not in _FORMATS:
        shown = json.dumps(kind, ensure_ascii=False)
        raise Refusal(
            400, f"the type of response_format is {shown:.60}; it is one of {', '.join(_FORMATS)}", "response_format"
        )
    if kind == "text":
        return None
    own = given.get("json_schema") if kind == "json_schema" else given
    if not isinstance(own, dict) or (kind == "json_schema" and not isinstance(own.get("schema"), dict)):
        raise Refusal(
            400,
            'response_format lacks its schema; write {"type": "json_schema", "json_schema": {"schema": {...}}}',
            "response_format",
        )
    return "json" if own.get("schema") is None else _text("json", own["schema"], "response_format")


def _of_structure(given: Mapping[str, Any] | None) -> str | None:
    if given is None:
        return None
    named = [name for name, value in given.items() if value is not None]
    if len(named) != 1 or named[0] not in KINDS:
        raise Refusal(400, f"structured_outputs takes one of {', '.join(KINDS)}", "structured_outputs")
    return _text(named[0], given[named[0]], "structured_outputs")


def _guide(kind: str, fields: Fields, name: str) -> str | None:
    value = fields.take(name, lambda value: value, "a guide")
    return None if value is None else _text(kind, value, name)


def _text(kind: str, value: Any, name: str) -> str:
    """The guide as the option takes it; objects and lists are written as JSON."""
    if (kind == "json" and isinstance(value, (dict, bool))) or (kind == "choice" and isinstance(value, list)):
        value = json.dumps(value)
    if not isinstance(value, str):
        what = {"json": "a JSON schema", "choice": "a list of texts"}.get(kind, "a text")
        raise Refusal(400, f"{name} is {json.dumps(value, ensure_ascii=False):.80}; it must be {what}", name)
    return f"{kind}:{value}"
