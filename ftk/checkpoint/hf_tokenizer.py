"""The tokenizer of a folder in Hugging Face's form: which one it holds, and the files that are written for one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ftk.config.build import build_options
from ftk.errors import UserError
from ftk.models.conversion import Converter
from ftk.registry import TASKS
from ftk.tokenizers import SpecialTokens, Tokenizer, build_tokenizer, load_tokenizer
from ftk.tokenizers.files import DESCRIPTION, TEMPLATE
from ftk.tokenizers.hf_files import BYTE_PAIRS, TOKENIZER, WORD_PIECES, why_unreadable
from ftk.tokenizers.sentencepiece import SentencePieceTokenizer
from ftk.tokenizers.sentencepiece_json import json_files

logger = logging.getLogger(__name__)


def own_tokenizer(source: Path, converter: Converter, task: str) -> Callable[[], Tokenizer] | None:
    """Makes the tokenizer of a folder: one that ftk wrote, one of ftk's kinds, or any of `transformers`; None: none."""
    if (source / DESCRIPTION).is_file():
        return lambda: load_tokenizer(source)
    found = next((name for name in converter.vocabularies if (source / name).is_file()), None)
    if found is not None and not (source / TOKENIZER).is_file():
        kind = converter.vocabularies[found]
        of_task: Any = TASKS.get(task)
        return lambda: of_task.target.add_special_tokens(build_tokenizer(kind, path=source / found))
    return (lambda: build_tokenizer("hf", path=source)) if why_unreadable(source) is None else None


def tokenizer_files(tokenizer: Tokenizer | None, tasks: Sequence[str]) -> dict[str, bytes]:
    """What stands in a folder of their form; with ftk's description, if it is not one of theirs itself.

    `tasks`: what the model has learned, and what its family is for; empty: the family has its own tokenizers there.
    """
    if tokenizer is None:
        return {}
    if tokenizer.source is not None:
        logger.warning("a folder in this form has one tokenizer, but this model has two; neither is written")
        return {}
    files = {file.path.name: file.path.read_bytes() for file in tokenizer.files}
    if tokenizer.name != "hf":
        files[DESCRIPTION] = (tokenizer.files[0].path.parent / DESCRIPTION).read_bytes()
        if type(tokenizer) is SentencePieceTokenizer and tasks:
            files |= json_files(tokenizer, _around(tokenizer, tasks))
        if not files.keys() & {TOKENIZER, WORD_PIECES, BYTE_PAIRS}:
            logger.warning(
                "transformers does not read ftk's tokenizer %s; with this model, take ids from ftk.load_tokenizer",
                tokenizer.name,
            )
    return files


def template_file(tokenizer: Tokenizer | None, section: Mapping[str, Any], model_config: Any) -> dict[str, bytes]:
    """The chat template by which the task of this `section` asks, where that is not the tokenizer's own.

    Raises:
        UserError: the section has options that the task does not have.
    """
    name = str(section.get("_name"))
    if tokenizer is None or name not in TASKS:
        return {}
    kind: Any = TASKS.get(name)
    options = {key: value for key, value in section.items() if key != "_name"}
    template = kind.target.chat_template(build_options("task", kind.config, options), tokenizer, model_config)
    if template is None:
        return {}
    is_pieces = isinstance(tokenizer, SentencePieceTokenizer)
    if is_pieces and tokenizer.decode([*tokenizer.encode("a"), *tokenizer.encode("b")]) != "ab":
        logger.warning(
            "%s: with this tokenizer ftk puts a space in front of each text, and transformers does not: conversations "
            "have other ids there than in training; ftk itself, opening the folder, gives those of the training",
            TEMPLATE,
        )
    return {TEMPLATE: template.encode()}


def _around(tokenizer: Tokenizer, tasks: Sequence[str]) -> tuple[Sequence[int], Sequence[int]]:
    """Tokens around a text, as the first of the tasks puts them that says so; none where the tokenizer lacks one."""
    kinds: list[Any] = [TASKS.get(name).target for name in tasks if name in TASKS]
    try:
        return next((found for kind in kinds if (found := kind.around_text(tokenizer)) is not None), ([], []))
    except UserError:
        return [], []


def special_id(special: SpecialTokens, role: str) -> int | None:
    """The id of a special token; where there is none of the role eos or bos that of BERT's kind of tokenizers."""
    instead = {"eos": special.sep, "bos": special.cls}
    found: int | None = getattr(special, role)
    return instead.get(role) if found is None else found
