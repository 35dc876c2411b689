"""Scorers for short answers: exact match and token F1, normalised as in SQuAD (Rajpurkar et al. 2016)."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter

from ftk.evaluation.base import Scorer
from ftk.registry import register_scorer

_ARTICLES = frozenset(("a", "an", "the"))
# One Chinese or Japanese character, or Korean syllable, is a word by itself.
_IDEOGRAPH = re.compile("[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff\U00020000-\U0003ffff]")
_PUNCTUATION = re.compile(r"[\W_]")


def words_of(text: str) -> list[str]:
    """The words of a text for comparison: lower case, without punctuation and English articles.

    "The U.S. army" -> ["us", "army"]; "北京 city" -> ["北", "京", "city"].
    """
    text = unicodedata.normalize("NFKC", text).casefold()
    words = (_PUNCTUATION.sub("", chunk) for chunk in _IDEOGRAPH.sub(r" \g<0> ", text).split())
    return [word for word in words if word and word not in _ARTICLES]


def token_f1(answer: str, reference: str) -> float:
    """Harmonic mean of precision and recall over words, in [0, 1]; 1 if both have none."""
    found, expected = words_of(answer), words_of(reference)
    if not found or not expected:
        return float(found == expected)
    common = sum((Counter(found) & Counter(expected)).values())
    return 2 * common / (len(found) + len(expected))


class _Mean(Scorer):
    """Mean over pairs of a number in [0, 1], in percent."""

    name = ""

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def result(self) -> dict[str, float]:
        return {self.name: 100.0 * self.total / self.count} if self.count else {}


@register_scorer("exact_match")
class ExactMatch(_Mean):
    """Share of answers whose words are those of the reference."""

    name = "exact_match"

    def add(self, answer: str, reference: str) -> None:
        self.total += words_of(answer) == words_of(reference)
        self.count += 1


@register_scorer("token_f1")
class TokenF1(_Mean):
    """Mean of `token_f1`."""

    name = "token_f1"

    def add(self, answer: str, reference: str) -> None:
        self.total += token_f1(answer, reference)
        self.count += 1
