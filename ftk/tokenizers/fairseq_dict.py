"""fairseq's dict.txt: words between spaces, numbered by their line after four special symbols."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftk.config import Chosen
from ftk.config.options import option
from ftk.errors import UserError
from ftk.registry import register_tokenizer
from ftk.tokenizers.base import Tokenizer, TokenizerConfig
from ftk.tokenizers.build import build_tokenizer
from ftk.tokenizers.files import as_text, lines_of, read_file, single_file
from ftk.tokenizers.token_bytes import MAYBE_SPACE, META, TokenBytes, spelled_with_meta, whole_words

SPECIAL_SYMBOLS = ("<s>", "<pad>", "</s>", "<unk>")  # ids 0 to 3; no dict.txt holds them
OVERWRITE = "#fairseq:overwrite"

_STARTS = {"none": (), "bos": ("<s>",), "eos": ("</s>",)}


@dataclass(kw_only=True)
class FairseqDictConfig(TokenizerConfig):
    remove_bpe: str = option(
        "none",
        "what ids become on the way to text: symbols between spaces, or words made of subword-nmt's (@@) or "
        "SentencePiece's pieces",
        choices=("none", "subword_nmt", "sentencepiece"),
    )
    text_start: str = option(
        "none",
        "what texts that a model continues begin with: eos, as those of fairseq's language models; bos where they were "
        "trained with add_bos_token",
        choices=tuple(_STARTS),
    )


@register_tokenizer("fairseq_dict", config=FairseqDictConfig)
class FairseqDictTokenizer(Tokenizer):
    """The vocabulary of data that fairseq-preprocess has made.

    Text is cut at white space, as fairseq-preprocess does; pieces (BPE, ...) must be made before. A word that the
    dictionary lacks is `<unk>`.

    `path` is a dict.txt, or a folder with one dict.txt or dict.LANGUAGE.txt.

    Raises:
        UserError: the file is missing or damaged, or repeats a symbol without `#fairseq:overwrite`.
    """

    name = "fairseq_dict"

    def __init__(self, config: FairseqDictConfig, special_tokens: Chosen | None = None) -> None:
        path = find_dictionary(Path(config.path))
        content, file = read_file(path)
        self.symbols, vocab = parse_dictionary(as_text(content, path), path)
        fixed = {symbol: id_ for id_, symbol in enumerate(SPECIAL_SYMBOLS)}  # even where a line overwrites one
        super().__init__(
            config,
            special_tokens,
            files=(file,),
            num_text_tokens=len(self.symbols),
            vocab=vocab | fixed,
            spellings=dict(enumerate(self.symbols)),
        )
        self._remove_bpe = config.remove_bpe
        self.prompt_prefix = [fixed[symbol] for symbol in _STARTS[config.text_start]]
        self._unk = fixed["<unk>"]
        commands = {token.text for token in self.command_tokens}
        self._words = {symbol: id_ for symbol, id_ in vocab.items() if symbol not in commands}

    def decode(self, ids: Iterable[int]) -> str:
        """The symbols with spaces between them, joined to words as `remove_bpe` says."""
        spellings = (self._spellings.get(int(id_)) for id_ in ids)
        text = " ".join(symbol for symbol in spellings if symbol is not None)
        if self._remove_bpe == "subword_nmt":
            return f"{text} ".replace("@@ ", "").rstrip(" ")
        if self._remove_bpe == "sentencepiece":
            return text.replace(" ", "").replace(META, " ").strip(" ")
        return text

    def token_bytes(self) -> TokenBytes:
        if self._remove_bpe == "none":
            raise whole_words("a dict.txt (with `remove_bpe` none)")
        if self._remove_bpe == "subword_nmt":
            raise UserError(
                "guide: in subword-nmt's pieces (`remove_bpe` subword_nmt) a token decides about the space after it, "
                "and no guide can follow that; leave the guide out"
            )
        without = self._ids_without_text() | {*range(len(SPECIAL_SYMBOLS))}
        found = [
            b"" if id_ in without else spelled_with_meta(self._spellings.get(id_, ""), bytes_too=False)
            for id_ in range(self.vocab_size)
        ]
        return TokenBytes(found, MAYBE_SPACE)

    def _encode_text(self, text: str) -> list[int]:
        return [self._words.get(word, self._unk) for word in text.split()]

    def _encode_texts(self, texts: list[str]) -> list[list[int]]:
        return [self._encode_text(text) for text in texts]


def dictionaries(folder: Path, languages: Sequence[str], **options: Any) -> Tokenizer:
    """The dictionary of a folder; where it has those of two languages, the target's, with the other as its `source`.

    Args:
        folder: with dict.txt, or dict.LANGUAGE.txt.
        languages: of the source and of the target; none: not known.
        options: of the tokenizer.
    """
    paths = [folder / f"dict.{language}.txt" for language in languages]
    if len(paths) != 2 or not all(map(Path.is_file, paths)):
        return build_tokenizer("fairseq_dict", path=folder, **options)
    source, target = (build_tokenizer("fairseq_dict", path=path, **options) for path in paths)
    if source.files[0].sha256 != target.files[0].sha256:
        target.source = source
    return target


def find_dictionary(path: Path) -> Path:
    """`path` itself if it is a file; in a folder its dict.txt, or its dict.LANGUAGE.txt.

    Raises:
        UserError: there is none, or there are several that differ.
    """
    if not path.is_dir():
        return path
    if (path / "dict.txt").is_file():
        return path / "dict.txt"
    found = sorted(path.glob("dict.*.txt"))
    if len({read_file(each)[1].sha256 for each in found}) == 1:  # of all languages, with --joined-dictionary
        return found[0]
    return single_file(path, found, "dict.*.txt", "the dictionary of fairseq-preprocess")


def parse_dictionary(text: str, path: Path) -> tuple[list[str], dict[str, int]]:
    """The symbols by id, and the id that each symbol stands for: the last one where it was overwritten.

    A line is `SYMBOL COUNT`, or `SYMBOL COUNT #fairseq:overwrite`, which allows a symbol that is there already:
    it gets a new id, and the older id keeps its place.

    Raises:
        UserError: a line has another form, or repeats a symbol.
    """
    symbols = list(SPECIAL_SYMBOLS)
    ids = {symbol: id_ for id_, symbol in enumerate(symbols)}
    for number_, line in enumerate(lines_of(text), start=1):
        symbol, _, count = line.rstrip().rpartition(" ")
        overwrite = count == OVERWRITE
        if overwrite:
            symbol, _, count = symbol.rpartition(" ")
        if not symbol or re.fullmatch("-?[0-9]+", count) is None:
            raise UserError(f"{path}:{number_}: {line[:80]!r} is not a symbol, a space and its count")
        if symbol in ids and not overwrite:
            raise UserError(
                f"{path}:{number_}: {symbol!r} is already in it (id {ids[symbol]}); to give it a new id, "
                f"end the line with {OVERWRITE}"
            )
        ids[symbol] = len(symbols)
        symbols.append(symbol)
    return symbols, ids
