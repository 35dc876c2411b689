"""Scorers for short answers: exact match and token F1, normalised as in SQuAD (Rajpurkar et al. 2016)."""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher

from ftk.evaluation.base import SumScorer
from ftk.registry import register_scorer

_ARTICLES = frozenset(("a", "an", "the"))
# One Chinese or Japanese character, or Korean syllable, is a word by itself.
IDEOGRAPH = re.compile("[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff\U00020000-\U0003ffff]")
_PUNCTUATION = re.compile(r"[\W_]")
_CMRC_MARKS = str.maketrans("", "", "-:_*^/\\~`+=，。：？！“”；’《》·、「」（）－～『』,?!;()")
_CMRC_WORD = re.compile(r"[\u4e00-\u9fa5]|[^\W\u4e00-\u9fa5]+(?:[.,]\d+)*|[^\w\s]")

Score = Callable[[str, str], float]
"""A number in [0, 1] of an answer and a text that is right."""


class MeanScorer(SumScorer):
    """The mean of a score over answers, in percent; of several references the one that fits best counts."""

    def __init__(self, name: str, score: Score) -> None:
        super().__init__()
        self.name, self.score = name, score

    def measure(self, answer: str, references: Sequence[str]) -> Sequence[float]:
        return [max(self.score(answer, reference) for reference in references), 1.0]

    def values(self, sums: Sequence[float]) -> dict[str, float]:
        total, count = sums
        return {self.name: 100.0 * total / count}


def _register_mean_scorer(name: str) -> Callable[[Score], Score]:

    def decorate(score: Score) -> Score:
        register_scorer(name)(lambda: MeanScorer(name, score))
        return score

    return decorate


def words_of(text: str) -> list[str]:
    """The words of a text for comparison: lower case, without punctuation and English articles.

    "The U.S. army" -> ["us", "army"]; "北京 city" -> ["北", "京", "city"].
    """
    text = unicodedata.normalize("NFKC", text).casefold()
    words = (_PUNCTUATION.sub("", chunk) for chunk in IDEOGRAPH.sub(r" \g<0> ", text).split())
    return [word for word in words if word and word not in _ARTICLES]


def has_words_of(answer: str, reference: str) -> bool:
    """Whether two texts have the same words, however they are divided: BERT's tokenizer writes "dog's" as "dog ' s"."""
    return "".join(words_of(answer)) == "".join(words_of(reference))


@_register_mean_scorer("token_f1")
def token_f1(answer: str, reference: str) -> float:
    """Harmonic mean of precision and recall over words, in [0, 1]; 1 if both have none."""
    return f1_of_words(words_of(answer), words_of(reference))


def f1_of_words(found: Sequence[str], expected: Sequence[str]) -> float:
    """The same of words; a word counts as often as it stands in both."""
    if not found or not expected:
        return float(found == expected)
    common = sum((Counter(found) & Counter(expected)).values())
    return 2 * common / (len(found) + len(expected))


@_register_mean_scorer("exact_match")
def exact_match(answer: str, reference: str) -> float:
    """Whether the words of an answer are those of the reference."""
    return float(has_words_of(answer, reference))


def squad_words(text: str) -> list[str]:
    """The words of a text by the rule of SQuAD's evaluation script, with which published numbers are comparable.

    Lower case, without ASCII punctuation and English articles, divided at white space. A Chinese character is a word
    by itself, of which the script knows nothing: texts without any are divided as it does.
    """
    kept = "".join(character for character in text.lower() if character not in string.punctuation)
    return IDEOGRAPH.sub(r" \g<0> ", re.sub(r"\b(a|an|the)\b", " ", kept)).split()


@_register_mean_scorer("squad_em")
def squad_em(answer: str, reference: str) -> float:
    """Exact match as of SQuAD 1.1 and ReCoRD."""
    return float(squad_words(answer) == squad_words(reference))


@_register_mean_scorer("squad_f1")
def squad_f1(answer: str, reference: str) -> float:
    """F1 of words as of SQuAD 2.0, which counts two empty answers as equal."""
    return f1_of_words(squad_words(answer), squad_words(reference))


def cmrc_text(text: str) -> str:
    """A text as CMRC 2018's evaluation script compares it: lower case, without the marks that it knows.

    What tokenizers change counts as equal, too: SentencePiece writes ，？！；（） in their ASCII forms, and BERT's puts
    white space beside Chinese characters.
    """
    kept = text.lower().strip().translate(_CMRC_MARKS)
    return re.sub(r"\s*([\u4e00-\u9fa5])\s*", r"\g<1>", kept)


def cmrc_words(text: str) -> list[str]:
    """Its words: Chinese characters; words of other scripts and numbers, for which the script asks NLTK; other marks.

    "《BERT》模型3.5" -> ["bert", "模", "型", "3.5"]
    """
    return _CMRC_WORD.findall(cmrc_text(text))


@_register_mean_scorer("cmrc_em")
def cmrc_em(answer: str, reference: str) -> float:
    """Exact match as of CMRC 2018 (Cui et al. 2019, https://arxiv.org/abs/1810.07366)."""
    return float(cmrc_text(answer) == cmrc_text(reference))


@_register_mean_scorer("cmrc_f1")
def cmrc_f1(answer: str, reference: str) -> float:
    """F1 as of CMRC 2018: what counts is the longest run of words that both texts have."""
    found, expected = cmrc_words(answer), cmrc_words(reference)
    if not found or not expected:
        return 0.0
    common = SequenceMatcher(None, found, expected, autojunk=False).find_longest_match().size
    return 2 * common / (len(found) + len(expected))
