"""Building a tokenizer by its registered name, and loading a saved one."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

from ftk.builtins import UNNAMED_SPECIAL_TOKENS
from ftk.config import Chosen
from ftk.config.build import build_options
from ftk.errors import UserError, did_you_mean
from ftk.registry import SPECIAL_TOKENS, TOKENIZERS, Entry
from ftk.tokenizers.base import Tokenizer, TokenizerConfig
from ftk.tokenizers.files import DESCRIPTION, find_description, read_description
from ftk.tokenizers.special_tokens import PLAIN


def build_tokenizer(name: str, **options: Any) -> Tokenizer:
    """The tokenizer registered as `name`.

        build_tokenizer("gpt2_bpe", path="gpt2/", special_tokens="with_end")

    Args:
        name: "bert_wordpiece", "fairseq_dict", "gpt2_bpe", "hf", "sentencepiece", or a plugin's.
        **options: the fields of its config dataclass; `path` is the vocabulary, a file or a folder. `special_tokens`
            is the name of a layout of special tokens, whose fields are options, too; without it, `plain`.

    Raises:
        UserError: no such name, a wrong option, or a vocabulary that is missing or damaged.
    """
    entry = TOKENIZERS.get(name)
    layout = SPECIAL_TOKENS.get(options.pop("special_tokens", PLAIN))
    if "path" in options:
        options["path"] = os.fspath(options["path"])
    own, of_layout = (_names(config) for config in (entry.config, layout.config))
    for key in options.keys() - {*own, *of_layout}:
        raise UserError(f"tokenizer {name} has no option {key!r}; {did_you_mean(key, [*own, *of_layout])}")
    of_layout = [key for key in of_layout if key not in own]
    special_tokens = _chosen("special_tokens", layout, {key: options[key] for key in of_layout if key in options})
    tokenizer = _chosen("tokenizer", entry, {key: options[key] for key in own if key in options})
    return tokenizer.build(special_tokens=special_tokens)


def load_tokenizer(folder: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer that a folder keeps: a checkpoint, a data folder, or what `Tokenizer.save` wrote.

    Raises:
        UserError: there is no tokenizer in it, or its files are not those that were saved.
    """
    path = find_description(folder)
    description = read_description(path)
    names = [listed["name"] for listed in description["files"]]
    vocabulary = path.parent / names[0] if names else path.parent
    options = {"special_tokens": UNNAMED_SPECIAL_TOKENS, **description["options"], "path": vocabulary}
    if description["name"] not in TOKENIZERS:
        raise UserError(
            f"{path}: unknown tokenizer {description['name']!r:.80}; give the plugin that has it by `user_dir`"
        )
    tokenizer = build_tokenizer(description["name"], **options)
    saved = description.get("command_tokens", {})
    now = {token.name: token.id for token in tokenizer.command_tokens}
    if saved != now:
        raise UserError(
            f"{path}: its command tokens have other ids than this ftk gives them "
            f"(saved {saved}, now {now}); use the ftk that wrote it"
        )
    if "source" in description:
        place = find_description(path.parent / Tokenizer.SOURCE)
        if "source" in read_description(place):
            raise UserError(f"{place}: a tokenizer of sources has none for sources itself; preprocess the text again")
        tokenizer.source = load_tokenizer(place.parent)
    return tokenizer


def saved_special_tokens(path: str | os.PathLike[str]) -> Chosen | None:
    """The layout of the saved tokenizer whose vocabulary, or folder, is at `path`; None if none was saved there.

    Raises:
        UserError: the tokenizer there is damaged.
    """
    folder = Path(path) if os.path.isdir(path) else Path(path).parent
    return load_tokenizer(folder).special_tokens if (folder / DESCRIPTION).is_file() else None


def with_special_tokens(tokenizer: Tokenizer, name: str) -> Tokenizer:
    """The tokenizer with the special tokens of a layout, if it has none but those of its vocabulary; else itself. So
    with its tokenizer of sources, each by what it has; the one that is given stays as it is.

    Raises:
        UserError: the vocabulary lacks a token that the layout needs, or the ids of text would change.
    """
    made = _with_layout(tokenizer, name)
    if tokenizer.source is not None:
        source = with_special_tokens(tokenizer.source, name)
        if made is tokenizer and source is not tokenizer.source:
            made = _rebuilt(tokenizer, tokenizer.config)
        made.source = source
    return made


def _with_layout(tokenizer: Tokenizer, name: str) -> Tokenizer:
    if tokenizer.special_tokens is None or tokenizer.special_tokens.name != PLAIN:
        return tokenizer
    chosen = Chosen(TOKENIZERS.get(tokenizer.name), tokenizer.config)
    made: Tokenizer = chosen.build(special_tokens=_chosen("special_tokens", SPECIAL_TOKENS.get(name), {}))
    if made.text_offset != tokenizer.text_offset:
        raise UserError(f"`special_tokens` {name} changes the ids of text; preprocess with it")
    return tokenizer if made.command_tokens == tokenizer.command_tokens else made


def with_vocabulary(tokenizer: Tokenizer, path: Path) -> Tokenizer:
    """A tokenizer of the same kind, with the same options, from another vocabulary."""
    return _rebuilt(tokenizer, dataclasses.replace(tokenizer.config, path=str(path)))


def _rebuilt(tokenizer: Tokenizer, config: TokenizerConfig) -> Tokenizer:
    return Chosen(TOKENIZERS.get(tokenizer.name), config).build(special_tokens=tokenizer.special_tokens)


def _chosen(key: str, entry: Entry, options: dict[str, Any]) -> Chosen:
    return Chosen(entry, build_options(key, entry.config, options) if entry.config is not None else None)


def _names(config: type | None) -> list[str]:
    return [field.name for field in dataclasses.fields(config)] if config is not None else []
