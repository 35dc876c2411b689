"""Building a tokenizer by its registered name, and loading a saved one."""

from __future__ import annotations

import difflib
import os
from typing import Any

from ftk.config.options import MISSING, options_of
from ftk.errors import UserError
from ftk.registry import TOKENIZERS
from ftk.tokenizers.base import Tokenizer
from ftk.tokenizers.files import find_description, read_description


def build_tokenizer(name: str, **options: Any) -> Tokenizer:
    """The tokenizer registered as `name`.

        build_tokenizer("gpt2_bpe", path="gpt2/", task_mask=True, decoder_mask=True)

    Args:
        name: "sentencepiece", "bert_wordpiece", "gpt2_bpe", or a plugin's.
        **options: the fields of its config dataclass; `path` is the vocabulary, a file or a folder.

    Raises:
        UserError: no such name, a wrong option, or a vocabulary that is missing or damaged.
    """
    entry = TOKENIZERS.get(name)
    if "path" in options:
        options["path"] = os.fspath(options["path"])
    config = _configure(name, entry.config, options) if entry.config is not None else None
    return entry.target(config)


def load_tokenizer(folder: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer that a folder keeps: a checkpoint, a data folder, or what `Tokenizer.save` wrote.

    Raises:
        UserError: there is no tokenizer in it, or its files are not those that were saved.
    """
    path = find_description(folder)
    description = read_description(path)
    names = [listed["name"] for listed in description["files"]]
    vocabulary = path.parent / names[0] if names else path.parent
    tokenizer = build_tokenizer(description["name"], **{**description["options"], "path": vocabulary})
    saved = description.get("command_tokens", {})
    now = {token.name: token.id for token in tokenizer.command_tokens}
    if saved != now:
        raise UserError(
            f"{path}: its command tokens have other ids than this ftk gives them "
            f"(saved {saved}, now {now}); use the ftk that wrote it"
        )
    return tokenizer


def _configure(name: str, config_type: type, given: dict[str, Any]) -> Any:
    options = {option.name: option for option in options_of("tokenizer", config_type)}
    errors: list[str] = []
    for key in given.keys() - options.keys():
        close = difflib.get_close_matches(key, options, n=1)
        hint = f"did you mean {close[0]}?" if close else f"it has {', '.join(options)}"
        errors.append(f"tokenizer {name} has no option {key!r}; {hint}")
    values: dict[str, Any] = {}
    for key, option in options.items():
        if key in given:
            try:
                values[key] = option.convert(given[key])
            except ValueError as error:
                errors.append(str(error))
            except (OverflowError, TypeError) as error:
                errors.append(f"tokenizer {name}: {key} is {given[key]!r:.40} ({error})")
        elif option.default is MISSING:
            errors.append(f"tokenizer {name} needs {key}: {option.help}")
    if errors:
        raise UserError("\n".join(sorted(errors)))
    config = config_type(**values)
    errors.extend(f"tokenizer.{message}" for message in getattr(config, "validate", lambda: ())())
    if errors:
        raise UserError("\n".join(errors))
    return config
