"""Ids of any tokenizer as ids of a fairseq dictionary, whose first four are fixed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ftk.tokenizers import Tokenizer

_BOS, _PAD, _EOS, _UNK = range(4)
_SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")


class FairseqVocabulary:
    """The dictionary of converted data.

    A fairseq_dict tokenizer's dict.txt is kept, with its ids. Of other tokenizers id i becomes i + 4, and the command
    tokens that fairseq has too (beginning, padding, end, unknown) become 0 to 3; each document ends with `</s>`.

    Args:
        tokenizer: made the ids.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.kept = tokenizer.name == "fairseq_dict"
        shift = 0 if self.kept else len(_SPECIAL)
        self.size = tokenizer.vocab_size + shift
        self._table = np.arange(tokenizer.vocab_size, dtype=np.int64) + shift  # [V]
        if not self.kept:
            special = tokenizer.special
            roles = ((special.cls, _BOS), (special.pad, _PAD), (special.unk, _UNK), (special.eos, _EOS))
            for role, id_ in roles:  # the end last: where padding shares its id, ids in documents are ends
                if role is not None:
                    self._table[role] = id_
        self._counts = np.zeros(self.size, dtype=np.int64)

    def translate(
        self, tokens: npt.NDArray[Any], lengths: npt.NDArray[Any]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Ids in fairseq's numbers, each document with its end.

        Args:
            tokens: documents back to back, [sum of lengths].
            lengths: tokens of each.
        """
        ids = self._table[tokens]
        lengths = lengths.astype(np.int64)
        ends = np.cumsum(lengths)
        lacking = np.ones(len(lengths), dtype=bool)
        full = lengths > 0
        lacking[full] = ids[ends[full] - 1] != _EOS
        ids = np.insert(ids, ends[lacking], _EOS)
        lengths = lengths + lacking
        self._counts += np.bincount(ids, minlength=self.size)
        return ids, lengths

    def write(self, path: Path) -> None:
        """Writes dict.txt: one symbol a line with how often it was seen."""
        if self.kept:
            path.write_bytes(self.tokenizer.files[0].path.read_bytes())
            return
        seen = set(_SPECIAL)
        with open(path, "w", encoding="utf-8", newline="\n") as file:
            for id_ in range(self.tokenizer.vocab_size):
                symbol = self.tokenizer.token_text(id_)
                if not symbol.strip() or symbol in seen or "\n" in symbol or "\r" in symbol:
                    symbol = f"<ftk-{id_}>"
                seen.add(symbol)
                file.write(f"{symbol} {self._counts[id_ + len(_SPECIAL)]}\n")
