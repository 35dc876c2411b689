"""Types of the compiled module _json_texts.pyx."""

from collections.abc import Callable

def json_texts(text: str, key: str, fallback: Callable[[str], str | None]) -> list[str] | None: ...
