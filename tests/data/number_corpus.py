"""Small corpora and a tokenizer of letters for the data tests."""

from __future__ import annotations

import numpy as np

from ftk.data.corpora.documents import DocumentList
from ftk.tokenizers import SpecialTokens

PAD, EOS, CLS, MASK, SMASK, GMASK, SOP, EOP, SEP, UNK, DBLOCK = 0, 0, 2, 3, 4, 5, 6, 7, 8, 9, 10
FIRST_WORD = 20
FULL_STOP, CHINESE_STOP, QUESTION = 11, 12, 13
VOCAB_SIZE = 600


class NumberTokenizer:
    """Ids 20 .. 599 are words; 11, 12 and 13 end sentences."""

    name = "numbers"
    vocab_size = VOCAB_SIZE
    special_tokens = "glm"

    def __init__(self, sentinels=200, **changes):
        special = {
            "pad": PAD,
            "eos": EOS,
            "cls": CLS,
            "mask": MASK,
            "smask": SMASK,
            "gmask": GMASK,
            "sop": SOP,
            "eop": EOP,
            "sep": SEP,
            "unk": UNK,
            "dblock": DBLOCK,
            **{f"{name}{n + 1}": at + 2 * n for n in range(sentinels) for name, at in (("mask", 1000), ("sop", 1001))},
        }
        self.special = SpecialTokens(**{**special, **changes})

    def decode(self, ids):
        texts = {FULL_STOP: ".", CHINESE_STOP: "。", QUESTION: '?"'}
        return " ".join(texts.get(token, f"w{token}") for token in ids)


def random_documents(lengths, seed=0, sentence_length=12):
    """Documents of random words with a sentence end about every sentence_length tokens."""
    generator = np.random.default_rng(seed)
    documents = []
    for length in lengths:
        document = generator.integers(FIRST_WORD, VOCAB_SIZE, size=length)
        ends = generator.random(length) < 1 / sentence_length
        document[ends] = generator.choice([FULL_STOP, CHINESE_STOP, QUESTION], size=ends.sum())
        documents.append(document)
    return DocumentList(documents)
