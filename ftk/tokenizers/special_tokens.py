"""Special tokens as data: layouts of rows, numbered around a vocabulary; their roles; finding them in a prompt.

A layout is read from top to bottom with a counter that starts at the size of the text vocabulary. A row either takes
the id of a token of the vocabulary (`in_vocab`) or the counter's value, which then moves on. Layouts are registered
under the names of `special_tokens`:

    @register_special_tokens("mine", config=MineConfig)
    def my_layout(config: MineConfig, *, tokenizer: str, vocab: Mapping[str, int]) -> Layout: ...
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ftk.config.options import option
from ftk.errors import UserError
from ftk.registry import register_special_tokens

PLAIN = "plain"


@dataclass(frozen=True)
class CommandToken:
    """A token that steers the model instead of standing for text.

    Attributes:
        name: its layout's name for it, e.g. "MASK"; saved with the tokenizer.
        text: how it is written in prompts, e.g. "[MASK]".
        id: its id.
        lstrip: whether it swallows the white space on its left.
        role: what it is for, e.g. "mask"; "": the name in lower case.
    """

    name: str
    text: str
    id: int
    lstrip: bool = False
    role: str = ""


@dataclass(frozen=True)
class Row:
    """One row of a layout: a `CommandToken` without its id.

    Attributes:
        needs: the option of its layout without which the token does not exist.
        in_vocab: the token of the vocabulary whose id it takes; "": the counter's.
        skip: ids that stay unused before it.
        advance: by how much the counter moves on; 0: the next row has the same id.
    """

    name: str
    text: str
    needs: str = ""
    lstrip: bool = False
    in_vocab: str = ""
    skip: int = 0
    advance: int = 1
    role: str = ""


@dataclass(frozen=True)
class Layout:
    """Special tokens in front of the text tokens (ids from 0, the text is shifted) and after them."""

    first: tuple[Row, ...] = ()
    last: tuple[Row, ...] = ()

    def with_options(self, options: Collection[str]) -> Layout:
        """The rows that need no option or one of `options`."""
        first, last = (tuple(r for r in rows if not r.needs or r.needs in options) for rows in (self.first, self.last))
        return Layout(first, last)


class SpecialTokens:
    """Ids of special tokens by their role: `special.eos`, None where the tokenizer has no token of that role.

    `bos`, `eos`, `pad`, `unk` and `mask` are every task's; a layout may name any other role.

    Args:
        **roles: role -> id.
    """

    bos: int | None
    eos: int | None
    pad: int | None
    unk: int | None
    mask: int | None

    def __init__(self, **roles: int | None) -> None:
        self.roles = {role: id_ for role, id_ in roles.items() if id_ is not None}

    def __getattr__(self, role: str) -> int | None:
        if role.startswith("_") or role == "roles":  # looked for while an object is copied or unpickled
            raise AttributeError(role)
        return self.roles.get(role)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SpecialTokens) and self.roles == other.roles

    def __repr__(self) -> str:
        return f"SpecialTokens({', '.join(f'{role}={id_}' for role, id_ in self.roles.items())})"

    @property
    def text_end(self) -> int | None:
        """What closes a text: `eos`, or `sep` where there is no other, as of BERT's tokenizers."""
        return self.sep if self.eos is None else self.eos

    @classmethod
    def of(cls, tokens: Sequence[CommandToken]) -> SpecialTokens:
        """The roles of a list of command tokens."""
        return cls(**{token.role or token.name.lower(): token.id for token in tokens})


def number(
    layout: Layout, *, num_text_tokens: int, vocab: Mapping[str, int] | None = None, where: str = "the vocabulary"
) -> tuple[list[CommandToken], int]:
    """Give every token of a layout its id.

    Args:
        layout: its rows.
        vocab: text -> id, for rows with `in_vocab`.
        where: file of the vocabulary, for messages.

    Returns:
        the command tokens in the layout's order, and by how much the text tokens are shifted.

    Raises:
        UserError: the vocabulary lacks a token that a row takes from it.
    """
    vocab = vocab or {}
    missing = [row.in_vocab for row in layout.last if row.in_vocab and row.in_vocab not in vocab]
    if missing:
        raise UserError(
            f"{where}: holds no {', '.join(dict.fromkeys(missing))}; "
            "is this the vocabulary of another kind of tokenizer?"
        )
    tokens: list[CommandToken] = []
    for rows, start in ((layout.first, 0), (layout.last, len(layout.first) + num_text_tokens)):
        counter = start
        for row in rows:
            counter += row.skip if not row.in_vocab else 0
            id_ = vocab[row.in_vocab] if row.in_vocab else counter
            tokens.append(CommandToken(row.name, row.text, id_, row.lstrip, row.role))
            counter += row.advance if not row.in_vocab else 0
    return tokens, len(layout.first)


_SPELLINGS = {
    "bos": ("<s>", "<|endoftext|>"),
    "eos": ("</s>", "<|endoftext|>"),
    "pad": ("<pad>", "[PAD]", "<|endoftext|>", "</s>"),
    "unk": ("<unk>", "[UNK]"),
    "mask": ("<mask>", "[MASK]"),
    "cls": ("[CLS]",),
    "sep": ("[SEP]",),
}


@register_special_tokens(PLAIN)
def plain_layout(*, tokenizer: str, vocab: Mapping[str, int]) -> Layout:
    """The special tokens of the vocabulary, and no others: its size does not change."""
    found = {role: next((text for text in texts if text in vocab), None) for role, texts in _SPELLINGS.items()}
    rows = (Row(role, text, lstrip=role == "mask", in_vocab=text) for role, text in found.items() if text is not None)
    return Layout(last=tuple(rows))


@register_special_tokens("with_end")
def layout_with_end(*, tokenizer: str, vocab: Mapping[str, int]) -> Layout:
    """Those of `plain`, and an end token after the vocabulary if it has none."""
    plain = plain_layout(tokenizer=tokenizer, vocab=vocab)
    has_end = any(row.name == "eos" for row in plain.last)
    return plain if has_end else Layout(last=(*plain.last, Row("eos", "<|endoftext|>")))


@register_special_tokens("with_mask")
def layout_with_mask(*, tokenizer: str, vocab: Mapping[str, int]) -> Layout:
    """Those of `plain`, and after the vocabulary those it lacks for texts some of whose tokens are hidden."""
    found = _with_own_pad(tokenizer, vocab)
    wanted = {"[PAD]": {"pad"}, "[CLS]": {"cls", "bos"}, "[SEP]": {"sep", "eos"}, "[MASK]": {"mask"}}
    lacking = [text for text, roles in wanted.items() if roles.isdisjoint(found)]
    added = (Row(text.strip("[]").lower(), text, lstrip=text == "[MASK]") for text in lacking)
    return Layout(last=(*found.values(), *added))


@dataclass(kw_only=True)
class SentinelsConfig:
    extra_ids: int = option(
        100,
        "number of sentinels, <extra_id_0> and so on, which stand for hidden spans",
        min=1,
        max=10**4,
        unit="tokens",
    )


@register_special_tokens("with_sentinels", config=SentinelsConfig)
def layout_with_sentinels(config: SentinelsConfig, *, tokenizer: str, vocab: Mapping[str, int]) -> Layout:
    """Those of `plain`, padding and end if it lacks them, and sentinels: the first has the highest id, as T5's."""
    found = _with_own_pad(tokenizer, vocab)
    added = [Row(role, text) for role, text in (("pad", "<pad>"), ("eos", "</s>")) if role not in found]
    texts = {f"extra_id_{number}": f"<extra_id_{number}>" for number in reversed(range(config.extra_ids))}
    sentinels = (Row(name, text, in_vocab=text if text in vocab else "") for name, text in texts.items())
    return Layout(last=(*found.values(), *added, *sentinels))


def _with_own_pad(tokenizer: str, vocab: Mapping[str, int]) -> dict[str, Row]:
    """The rows of `plain` by name; padding only if it is a token of its own."""
    found = {row.name: row for row in plain_layout(tokenizer=tokenizer, vocab=vocab).last}
    if "pad" in found and found["pad"].text in {row.text for name, row in found.items() if name != "pad"}:
        del found["pad"]
    return found


class CommandTokenSplitter:
    """Finds command tokens in a text by their literal names.

    No name holds another or overlaps with it (each has its only opening bracket at its start), so that one pass over
    all names finds what one pass for each would.
    """

    def __init__(self, tokens: Sequence[CommandToken]) -> None:
        self._by_text = {token.text: token for token in tokens}
        longest_first = sorted(self._by_text, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def split(self, text: str) -> Iterator[str | CommandToken]:
        """The text's parts in order: pieces of ordinary text (never empty) and command tokens."""
        start = 0
        for match in self._pattern.finditer(text):
            token = self._by_text[match.group()]
            before = text[start : match.start()]
            if token.lstrip:
                before = before.rstrip()
            if before:
                yield before
            yield token
            start = match.end()
        if start < len(text):
            yield text[start:]
