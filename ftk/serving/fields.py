"""The body of a request: strict JSON, whose fields are taken one by one and by type."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from ftk.errors import did_you_mean
from ftk.parsing import strict_object
from ftk.serving.refusal import Refusal

T = TypeVar("T")


def parsed(body: bytes) -> dict[str, Any]:
    """A JSON object.

    Raises:
        Refusal: 400; not UTF-8, not JSON, NaN, half a character, a key twice, or something else than an object.
    """
    try:
        return strict_object(body.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise Refusal(400, f"the body is not UTF-8: byte {error.start}") from None
    except ValueError as error:
        raise Refusal(400, f"the body is not a JSON object: {error}") from None


class Fields:
    """The fields of a request, which are taken one by one; what is left in the end is a mistake.

    A field that is null is as good as not there.

    Args:
        values: the request.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = {name: value for name, value in values.items() if value is not None}
        self.known: list[str] = []

    def take(self, name: str, check: Callable[[Any], T | None], what: str, default: Any = None) -> Any:
        """A field's value.

        Args:
            name: of the field.
            check: gives the value as it is used; None where it is not allowed.
            what: says what is allowed, behind "must be".
            default: where the field is not there.

        Raises:
            Refusal: 400, with the field's name.
        """
        self.known.append(name)
        if name not in self.values:
            return default
        value = self.values.pop(name)
        found = check(value)
        if found is None:
            raise Refusal(400, f"{name} is {json.dumps(value, ensure_ascii=False):.80}; it must be {what}", name)
        return found

    def text(self, name: str, default: str | None = None) -> Any:
        return self.take(name, lambda value: value if isinstance(value, str) else None, "a text", default)

    def object(self, name: str, default: Mapping[str, Any] | None = None) -> Any:
        return self.take(name, lambda value: value if isinstance(value, dict) else None, "an object", default)

    def flag(self, name: str, default: bool = False) -> bool:
        return bool(self.take(name, lambda value: value if isinstance(value, bool) else None, "true or false", default))

    def whole(self, name: str, low: int, high: int, default: int | None = None) -> Any:
        def check(value: Any) -> int | None:
            return value if type(value) is int and low <= value <= high else None

        return self.take(name, check, f"a whole number from {low} to {high}", default)

    def number(self, name: str, low: float, high: float, default: float | None = None) -> Any:
        def check(value: Any) -> float | None:
            return float(value) if type(value) in (int, float) and low <= value <= high else None

        return self.take(name, check, f"a number from {low:g} to {high:g}", default)

    def texts(self, name: str, most: int) -> list[str]:
        """A text, or a list of at most `most` texts; an empty list is as good as none."""

        def check(value: Any) -> list[str] | None:
            given = [value] if isinstance(value, str) else value
            is_list = isinstance(given, list) and all(isinstance(text, str) for text in given)
            return given if is_list and len(given) <= most else None

        return list(self.take(name, check, f"a text, or a list of at most {most} texts", []))

    def must_be(self, name: str, neutral: Sequence[Any], why: str) -> None:
        """A field that only has values that change nothing."""

        def check(value: Any) -> Any:
            is_neutral = any(value == own and isinstance(value, bool) == isinstance(own, bool) for own in neutral)
            return value if is_neutral else None

        self.take(name, check, f"left out: {why}")

    def end(self) -> None:
        """Raises Refusal if there is a field that nothing has asked for."""
        for name in self.values:
            raise Refusal(
                400,
                f"unknown field {name!r:.80}; {did_you_mean(name, [*dict.fromkeys(self.known)])}",
                name,
                "unknown_field",
            )
