"""Guides: a JSON schema, a regular expression, a list or a grammar that all of an answer must match, compiled."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakMethod

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ftk.errors import UserError
from ftk.files import read_bytes, reason
from ftk.tokenizers.token_bytes import ALWAYS_SPACE, MAYBE_SPACE, NO_SPACE

if TYPE_CHECKING:
    from ftk.tokenizers import Tokenizer

KINDS = ("json", "regex", "choice", "grammar")
"""What may stand in front of the colon of a guide."""

ANY_OBJECT = "json"
"""The guide that any JSON object matches."""

_SUFFIXES = {".json": "json", ".regex": "regex", ".txt": "regex", ".lark": "grammar", ".gbnf": "grammar"}
_MOST_CHARACTERS = 1 << 18
_REMEMBERED = 32  # sets of tokens that may follow
_SHOWN = 60  # characters of a guide or an answer in a message
# Else the library writes what must come by itself, in tokens of its choice.
_OPTIONS = '%llguidance {"no_forcing": true}\n'
# Tokens that the library allows together where a guide allows all such texts, instead of one after the other; it has
# its own for texts in JSON. The length is for guides that count characters.
_SLICES = ("[a-z ]{1,20}", "[A-Za-z ]{1,20}")
_STARTS = {NO_SPACE: "start: @answer", MAYBE_SPACE: 'start: " " @answer | @answer', ALWAYS_SPACE: 'start: " " @answer'}


class GuideError(UserError):
    """A guide that cannot be compiled, or that no token of the vocabulary goes on with."""


def guide_text(value: Any) -> Any:
    """A guide as text: of an object, which is a JSON schema, "json:" and the schema; anything else as it is."""
    return f"json:{json.dumps(value)}" if isinstance(value, Mapping) else value


def guide_of_file(path: str) -> str:
    """The guide that a file holds; the end of its name tells which kind.

    Raises:
        UserError: it cannot be read, or its name ends otherwise.
    """
    kind = _SUFFIXES.get(Path(path).suffix)
    if kind is None:
        raise UserError(f"guide_file {path}: its name must end in {', '.join(_SUFFIXES)}, which tells what it holds")
    text = text_of_file("guide_file", path, 4 * _MOST_CHARACTERS, "a text file")
    return f"{kind}:{text.rstrip() if kind == 'regex' else text}"


def text_of_file(option: str, path: str, most_bytes: int, what: str) -> str:
    """The text of a file that an option names.

    Raises:
        UserError: it is not `what`.
    """
    try:
        return read_bytes(path, most_bytes).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{option} {path}: not UTF-8 at byte {error.start + 1}; convert it to UTF-8") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{option} {path}: {reason(error)}; give {what}") from None


class GuidedTokens:
    """A vocabulary as guides see it: made once for a tokenizer, in some 0.4 s for 30,000 tokens.

    Args:
        tokenizer: says what its tokens write.
        ends: tokens that end an answer.

    Raises:
        UserError: its tokens' text depends on their neighbours; llguidance is not installed.
    """

    def __init__(self, tokenizer: Tokenizer, ends: Collection[int]) -> None:
        try:
            import llguidance
        except ImportError:
            raise UserError("guide: needs llguidance; run: pip install 'ftk[guided]'") from None
        written = tokenizer.token_bytes()
        self.ends = sorted(ends)
        self.first_space = written.first_space
        self._decode = WeakMethod(tokenizer.decode)  # else `_known` would keep the tokenizer for ever
        tokens = list(written.of_ids)
        for end in self.ends:
            tokens[end] = b"<end>"
        self.tokens, self.special_token_ids = tokens, self.ends
        self.eos_token_id, self.bos_token_id = self.ends[0], None
        self.words: npt.NDArray[np.bool_] = np.array([bool(token) for token in tokens])  # [V]
        self.words[self.ends] = False
        self.can_quote = any(token.startswith(b'"') for token in written.of_ids)
        # The library holds what it is given where Python finds no cycles: a copy, which does not hold the library.
        own = llguidance.TokenizerWrapper(copy.copy(self))
        self.library: Any = llguidance.LLTokenizer(own, slices=[*_SLICES, *llguidance.LLTokenizer.general_slices()])
        # Most states of a guide allow the same tokens as one before.
        self.limits = functools.lru_cache(_REMEMBERED)(self._limits)

    def decode(self, tokens: Collection[int]) -> str:
        """The text of tokens, for messages."""
        decode = self._decode()
        assert decode is not None, "who generates holds the tokenizer"
        return decode(list(tokens))

    def _limits(self, bits: bytes, with_ends: bool, size: int) -> Tensor | None:
        """The most that scores of tokens may be: infinity where a token may follow, else -infinity.

        Args:
            bits: of the tokens that may follow, as the library gives them.
            with_ends: whether end tokens may follow, of which the bits say nothing.
            size: V, of the scores; tokens without a bit may not follow.

        Returns:
            float32 [V]; None where no token may follow.
        """
        found = np.zeros(max(size, len(self.words)), dtype=np.bool_)
        found[: len(self.words)] = self.words & np.unpackbits(
            np.frombuffer(bits, dtype=np.uint8), count=len(self.words), bitorder="little"
        )
        found[self.ends] = with_ends
        return torch.from_numpy(np.where(found[:size], np.inf, -np.inf)).float() if found.any() else None

    def __call__(self, text: Any) -> list[int]:
        """Asked by the library where it writes text by itself, which is switched off."""
        return []


_known: WeakKeyDictionary[Tokenizer, dict[tuple[int, ...], GuidedTokens]] = WeakKeyDictionary()


def guided_tokens(tokenizer: Tokenizer, ends: Collection[int]) -> GuidedTokens:
    """`GuidedTokens` of a tokenizer, which is made once."""
    own = _known.setdefault(tokenizer, {})
    key = tuple(sorted(ends))
    if key not in own:
        own[key] = GuidedTokens(tokenizer, ends)
    return own[key]


class Guide:
    """A compiled guide: which tokens may follow some tokens of an answer.

    Args:
        text: "json" (any object), "json:SCHEMA", "regex:...", "choice:[...]" (texts in JSON) or "grammar:..." (Lark, or
            GBNF as of llama.cpp).

    Raises:
        GuideError: it cannot be compiled, or no answer matches it.

    Attributes:
        start: the state before the first token.
    """

    def __init__(self, text: str, tokens: GuidedTokens) -> None:
        import llguidance

        self.tokens = tokens
        self.shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
        if len(text) > _MOST_CHARACTERS:
            raise GuideError(f"guide {self.shown}: has {len(text):,} characters; at most {_MOST_CHARACTERS:,} are read")
        grammar = self._grammar(text)
        if text.strip().startswith("json") and not tokens.can_quote:
            raise GuideError(
                f"guide {self.shown}: the vocabulary has no token that closes a text in JSON without a space in front; "
                "give a regular expression or a grammar that allows one"
            )
        # A regular expression that takes too long, and the like, is refused, not waited for.
        self.start: Any = llguidance.LLMatcher(tokens.library, grammar, log_level=0)
        if self.start.is_error():
            raise GuideError(f"guide {self.shown}: {_first_line(self.start.get_error())}")
        size = len(tokens.words)
        first = (self.allowed(self.start, size) > 0).nonzero().flatten().tolist()
        if all(tokens.tokens[token] == b" " for token in first):  # which says nothing of the guide
            self.allowed(self.after(self.start, first[0]), size)

    def after(self, state: Any, *tokens: int) -> Any | None:
        """The state after further tokens; None where they do not match.

        Raises:
            GuideError: the guide is too complex.
        """
        found = state.deep_copy()
        if found.consume_tokens(list(tokens)):
            return found
        if state.validate_tokens(list(tokens)) < len(tokens):
            return None
        raise GuideError(f"guide {self.shown}: {_first_line(found.get_error())}")

    def allowed(self, state: Any, size: int) -> Tensor:
        """The tokens that may follow, the end tokens where the answer may end: float32 [V], see `GuidedTokens`.

        Raises:
            GuideError: there is none.
        """
        found = self.tokens.limits(state.compute_bitmask(), state.is_accepting(), size)
        if found is None:
            error = state.get_error()
            stuck = not error or error.startswith("NoExtension")
            why = "no token of the vocabulary goes on with it" if stuck else _first_line(error)
            raise GuideError(f"guide {self.shown}: {why}")
        return found

    def _grammar(self, text: str) -> str:
        """The library's form of a guide, with the space that is in front of a first token but not in its text."""
        from llguidance import grammar_from

        kind, colon, content = text.partition(":")
        kind = kind.strip()
        if text.strip() == ANY_OBJECT:
            kind, colon, content = "json", ":", '{"type": "object"}'
        if kind not in KINDS or not colon:
            raise GuideError(f"guide {self.shown}: write json, or {', '.join(f'{kind}:...' for kind in KINDS)}")
        if kind in ("json", "choice"):
            content = self._checked_json(kind, content)
        try:
            made = grammar_from(kind, content)  # type: ignore[arg-type]
        except ValueError as error:
            raise GuideError(f"guide {self.shown}: {_first_line(str(error))}") from None
        answer = json.loads(made)["grammars"][0] if made.startswith("{") else {"lark_grammar": made}
        start = {"lark_grammar": _OPTIONS + _STARTS[self.tokens.first_space]}
        return json.dumps({"grammars": [start, {**answer, "name": "answer"}]})

    def _checked_json(self, kind: str, content: str) -> str:
        """Raises GuideError if a schema, or a list of texts, is none."""
        try:
            found = json.loads(content)
        except (ValueError, RecursionError) as error:
            why = "nested too deeply" if isinstance(error, RecursionError) else error
            raise GuideError(f"guide {self.shown}: not JSON: {why}") from None
        if kind == "json":
            if not isinstance(found, (dict, bool)):
                raise GuideError(f"guide {self.shown}: a JSON schema is an object, {{...}}")
        elif not isinstance(found, list) or not found or not all(isinstance(text, str) and text for text in found):
            raise GuideError(f'guide {self.shown}: choices are a list of texts, e.g. choice:["yes", "no"]')
        return content


def _first_line(message: str) -> str:
    """What the library says is wrong; of a regular expression it says so further below."""
    lines = [line for line in message.strip().splitlines() if line.strip()] or ["it cannot be compiled"]
    why = next((line.strip() for line in lines[1:] if line.strip().startswith("error: ")), "")
    return f"{lines[0][:300]} {why[:200]}".strip()
