"""Which figures are the better the larger they are, by the last word of their names: `macro_f1`, `cloze_accuracy`."""

from __future__ import annotations

_SCORES = ("accuracy", "em", "f1", "f1a", "mcc", "pearson", "spearman", "bleu", "chrf")


def larger_is_better(figure: str) -> bool:
    """Whether the name of a figure is that of a score; of a loss, and of a name that is not known, it is not."""
    word = figure.lower().rpartition("_")[2]
    return word in _SCORES or word.startswith("rouge")
