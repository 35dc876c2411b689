"""Training a SentencePiece model from text: the same text and settings always give the same model."""

from __future__ import annotations

import io
import logging
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from ftk.errors import UserError
from ftk.files import write_whole

logger = logging.getLogger(__name__)

MODEL_NAME = "sentencepiece.model"
MODEL_TYPES = ("unigram", "bpe", "char", "word")
# SentencePiece skips longer sentences; we cut them instead. In bytes; a character has at most four.
_MAX_SENTENCE_BYTES = 16384
_MAX_SENTENCE_CHARACTERS = _MAX_SENTENCE_BYTES // 4
_MIN_SAMPLED_LINES = 101
# The sums of the EM steps depend on the number of threads, so it is the same on every machine.
_NUM_THREADS = 4


def train_sentencepiece(
    text: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    folder: str | os.PathLike[str],
    vocab_size: int = 32000,
    *,
    model_type: str = "unigram",
    character_coverage: float = 0.9995,
    byte_fallback: bool = True,
    normalization: str = "identity",
    max_lines: int = 0,
) -> Path:
    """Train a model on text and write it to `folder/sentencepiece.model`.

    `build_tokenizer("sentencepiece", path=folder)` reads it.

    Args:
        text: a text file (`Path` or `str`), several (`Path`s), or an iterable of strings, which are lines of
            text. Empty lines are skipped.
        folder: made if it does not exist; an older model in it is replaced.
        vocab_size: number of pieces, without command tokens.
        model_type: "unigram", "bpe", "char" or "word".
        character_coverage: share of the text's characters that get a piece of their own, in (0, 1].
        byte_fallback: write rarer characters as bytes (256 pieces) instead of losing them to <unk>.
        normalization: "identity" keeps characters as they are; "nmt_nfkc" is SentencePiece's own default.
        max_lines: train on a sample of this many lines (at least 101), always the same one; 0: on all.

    Raises:
        UserError: a file is missing, there is no text, an option is out of range, or the vocabulary is too
            large or too small for the text.
    """
    problems = list(_wrong_options(vocab_size, model_type, character_coverage, max_lines))
    if problems:
        raise UserError("\n".join(problems))
    import sentencepiece

    lines = _Lines(text)
    model = io.BytesIO()
    sentencepiece.set_random_generator_seed(0)
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            vocab_size=vocab_size,
            model_type=model_type,
            character_coverage=character_coverage,
            byte_fallback=byte_fallback,
            normalization_rule_name=normalization,
            input_sentence_size=max_lines,
            shuffle_input_sentence=max_lines > 0,
            max_sentence_length=_MAX_SENTENCE_BYTES,
            num_threads=_NUM_THREADS,
            unk_id=0,
            bos_id=-1,
            eos_id=-1,
            pad_id=-1,
            minloglevel=2,
        )
    except (RuntimeError, ValueError, OSError) as error:
        if lines.error is not None:
            raise lines.error from None
        raise UserError(_translated(str(error), lines, vocab_size, character_coverage)) from error
    if lines.error is not None:
        raise lines.error
    if lines.num_replaced:
        logger.warning("%d lines were not UTF-8; their bad bytes count as U+FFFD", lines.num_replaced)
    path = Path(folder) / MODEL_NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, model.getvalue())
    return path


class _Lines:
    """The lines to train on, counted; remembers the error that ended them, which the C++ trainer swallows."""

    def __init__(self, text: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> None:
        self.num_lines = 0
        self.num_replaced = 0
        self.error: BaseException | None = None
        sources: Iterable[str | os.PathLike[str]] = [Path(text)] if isinstance(text, (str, os.PathLike)) else text
        if isinstance(sources, (list, tuple)):
            for path in (Path(source) for source in sources if isinstance(source, os.PathLike)):
                if not path.exists():
                    raise UserError(f"{path}: no such file")
                if path.is_dir():
                    raise UserError(f"{path}: is a directory; give a text file")
            if sources and all(isinstance(source, str) and _is_file(source) for source in sources):
                raise UserError(
                    f"{sources[0]!r} is the name of a file, but strings in a list are lines of text; "
                    "give pathlib.Path objects to train on files"
                )
        self._sources = sources

    def __iter__(self) -> Iterator[str]:
        try:
            for line in self._raw_lines():
                line = line.replace("\0", " ").strip()
                if not line:
                    continue
                self.num_lines += 1
                yield from _cut(line)
        except OSError as error:
            self.error = UserError(f"{error.filename}: cannot be read ({error.strerror})")
        except BaseException as error:  # Ctrl-C too: the trainer would make a RuntimeError of it
            self.error = error

    def _raw_lines(self) -> Iterator[str]:
        for source in self._sources:
            if isinstance(source, os.PathLike):
                yield from self._file_lines(Path(source))
            else:
                yield from source.encode("utf-8", "replace").decode("utf-8").split("\n")

    def _file_lines(self, path: Path) -> Iterator[str]:
        with open(path, "rb") as stream:
            for num, raw in enumerate(stream):
                if num == 0 and raw.startswith((b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")):
                    raise UserError(f"{path}: is compressed; train on text, or give an iterable of its lines")
                try:
                    line = raw.decode("utf-8-sig" if num == 0 else "utf-8")
                except UnicodeDecodeError:
                    self.num_replaced += 1
                    line = raw.decode("utf-8", "replace")
                yield line


def _is_file(text: str) -> bool:
    return "\0" not in text and len(text) < 4096 and os.path.isfile(text)


def _cut(line: str) -> Iterator[str]:
    """`line` in parts that SentencePiece does not skip, cut at a space where there is one."""
    start = 0
    while len(line) - start > _MAX_SENTENCE_CHARACTERS:
        end = line.rfind(" ", start + 1, start + _MAX_SENTENCE_CHARACTERS)
        end = end if end > 0 else start + _MAX_SENTENCE_CHARACTERS
        yield line[start:end]
        start = end
    yield line[start:]


def _wrong_options(vocab_size: int, model_type: str, coverage: float, max_lines: int) -> Iterator[str]:
    if vocab_size < 1:
        yield f"vocab_size is {vocab_size}; it must be at least 1"
    if model_type not in MODEL_TYPES:
        yield f"model_type is {model_type!r}; it must be one of {', '.join(MODEL_TYPES)}"
    if not 0.0 < coverage <= 1.0:
        yield f"character_coverage is {coverage}; it must be above 0 and at most 1"
    if max_lines != 0 and max_lines < _MIN_SAMPLED_LINES:
        yield f"max_lines is {max_lines}; it must be 0 (all) or at least {_MIN_SAMPLED_LINES}"


def _translated(message: str, lines: _Lines, vocab_size: int, coverage: float) -> str:
    """What the trainer's message means for the user."""
    if lines.num_lines == 0:
        return "there is no text to train a SentencePiece model on: every line is empty"
    too_high = re.search(r"too high.*?<=\s*(\d+)", message, re.DOTALL)
    if too_high:
        return (
            f"`vocab_size` {vocab_size} is too large for this text ({lines.num_lines} lines); "
            f"it allows at most {too_high.group(1)}"
        )
    too_low = re.search(r"smaller than required_chars\.?\s*(\d+)\s*vs\s*(\d+)", message)
    if too_low:
        return (
            f"`vocab_size` {vocab_size} is too small for the characters of this text; give at least "
            f"{too_low.group(2)}, or a `character_coverage` below {coverage}"
        )
    return f"training a SentencePiece model failed: {message.strip()}"
