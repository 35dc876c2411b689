"""What is code per data set: rows with the fields that patterns name, made of the rows of a file."""

from __future__ import annotations

import dataclasses
import random
import re
import string
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ftk.data.supervised.row import Row
from ftk.errors import shown

_PLAIN = str.maketrans({"“": '"', "”": '"', "’": "'", "‘": "'", "–": "-"})
_MAX_CANDIDATES = 10
"""Candidates of a question to learn from, the right one among them (ReCoRD and WSC)."""


@dataclass(frozen=True, slots=True)
class Item:
    """One question's row.

    Attributes:
        row: with the fields that patterns name.
        own_label: whether the reader has read the label: `right` says which candidates are right, None: not known.
        labels: what choosing each candidate says, where the task's `labels` do not.
        otherwise, idx, group, answers: as of `ftk.data.supervised.cloze.ClozeQuestion`.
    """

    row: Row
    own_label: bool = False
    right: tuple[int, ...] | None = None
    labels: tuple[Any, ...] = ()
    otherwise: Any = None
    idx: Any = None
    group: Any = None
    answers: tuple[str, ...] = ()


Reader = Callable[[Iterable[Row], bool], Iterator[Item]]
"""Rows of a file, and whether they are learned from -> questions."""


def standard_punctuation(text: str) -> str:
    """The text with typographic quotes and dashes as plain ones (Du et al. 2022)."""
    return text.translate(_PLAIN)


def without_final_punctuation(text: str) -> str:
    """The text without the ASCII punctuation at its end."""
    return text.rstrip(string.punctuation)


def _copa(rows: Iterable[Row], train: bool) -> Iterator[Item]:
    """`joiner` and `link` hold the word for cause or effect. Rows are trained on twice, once swapped."""
    for row in rows:
        because = row.get("question", str, ("cause", "effect")) == "cause"
        links = {"joiner": " because", "link": " because"} if because else {"joiner": ", so", "link": " so"}
        yield Item(_with_fields(row, links))
        if train:
            swapped = {"choice1": row.text("choice2"), "choice2": row.text("choice1")}
            label = 1 - row.get("label", int, (0, 1))
            yield Item(_with_fields(row, {**links, **swapped, "label": label}), idx=f"{row.idx}m")


def _wic(rows: Iterable[Row], train: bool) -> Iterator[Item]:
    """The places of the word have to lie within the sentences."""
    for row in rows:
        for number in "12":
            start_field, end_field, sentence = f"start{number}", f"end{number}", f"sentence{number}"
            if start_field not in row.values and end_field not in row.values:
                continue
            start, end, length = row.get(start_field, int), row.get(end_field, int), len(row.text(sentence))
            if not 0 <= start < end <= length:
                row.refuse(
                    start_field,
                    f"is {start} and {end_field!r} is {end}; they are places in {sentence!r}, "
                    f"0 <= {start_field} < {end_field} <= {length}",
                )
        yield Item(row)


def _wsc(rows: Iterable[Row], train: bool) -> Iterator[Item]:
    """`marked`: the text with stars around the pronoun; `spans`: what it may refer to, the asked one first.

    Only rows whose label is true are learned from, since the others do not say what is right; more candidates than
    there may be are dealt to several questions (tasks/superglue/dataset.py of Du et al. 2022).
    """
    for row in rows:
        pronoun, span = row.text("target.span2_text").strip(), row.text("target.span1_text")
        words = _with_separated_word(row, row.text("text").split(), pronoun, row.get("target.span2_index", int))
        others = list(dict.fromkeys(candidate.text("text") for candidate in _objects(row, "candidates", empty=True)))
        label = row.get("label", bool) if "label" in row.values else None
        if train and label is False:
            continue
        room = _MAX_CANDIDATES - 1
        dealt = [others[start : start + room] for start in range(0, len(others), room)] if train else [others]
        for some in dealt or [[]]:
            filled = [*some, *others[: room - len(some)]] if len(dealt) > 1 else some
            spans = [span, *filled]
            right = None if label is None else (0,) if label else tuple(range(1, len(spans)))
            values = {"marked": " ".join(words), "pronoun": pronoun, "spans": spans}
            labels = (True, *([False] * len(filled)))
            yield Item(_with_fields(row, values), own_label=True, right=right, labels=labels, otherwise=False)


def _with_separated_word(row: Row, words: list[str], word: str, near: int) -> list[str]:
    """The words with stars around one of them, which stands at a place or next to it, perhaps with punctuation."""
    places = [place for place in (near, near - 1, near + 1) if 0 <= place < len(words)]
    wanted = word.casefold()

    def begins(found: str) -> bool:
        return found.startswith(wanted) and not found[len(wanted) :][:1].isalnum()

    for fits in (wanted.__eq__, begins):
        for place in places:
            found = words[place]
            if fits(found.casefold()):
                rest = [found[len(word) :]] if len(found) > len(word) else []
                return [*words[:place], f"*{found[: len(word)]}*", *rest, *words[place + 1 :]]
    row.refuse("target.span2_index", f"is {near}, but {word!r} is not near it in the {len(words)} words of 'text'")


def _multirc(rows: Iterable[Row], train: bool) -> Iterator[Item]:
    """One question for each answer: is it right? Those of one question form a group."""
    for row in rows:
        passage = row.text("passage.text").rstrip()
        for number, question in enumerate(_objects(row, "passage.questions")):
            text = question.text("question").rstrip()
            for place, answer in enumerate(_objects(question, "answers")):
                key = (_idx(row, row.line - 1), _idx(question, number), _idx(answer, place))
                values = {"passage": passage, "question": text, "answer": answer.text("text")}
                yield Item(_with_fields(answer, values), idx=list(key), group=key[:2])


def _record(rows: Iterable[Row], train: bool) -> Iterator[Item]:
    """`left` and `right`: the query before and after its gap; `entities`: of the passage, sorted and distinct.

    One question with all entities for each query; to learn from, one for each right answer, with up to nine wrong ones
    that are drawn (tasks/superglue/dataset.py of Du et al. 2022).
    """
    draw = random.Random(42)
    for row in rows:
        text = standard_punctuation(row.text("passage.text"))
        entities = sorted({_span(row, text, entity) for entity in _objects(row, "passage.entities")})
        passage = text.replace("@highlight\n", "- ")
        for number, question in enumerate(_objects(row, "qas")):
            left, found, right = question.text("query").partition("@placeholder")
            if not found:
                question.refuse("query", "has no @placeholder, which stands where the answer is missing")
            key = (_idx(row, row.line - 1), _idx(question, number))
            values = {"passage": passage, "left": left.rstrip(), "right": right}
            answers = None
            if train or "answers" in question.values:
                texts = (answer.text("text") for answer in _objects(question, "answers"))
                answers = sorted({*map(standard_punctuation, texts)})
            if answers is None or not train:
                known = answers or []
                places = tuple(place for place, entity in enumerate(entities) if entity in known)
                chosen = None if answers is None else places
                yield _of_entities(question, values, entities, chosen, tuple(known), key[1], key)
                continue
            wrong = [entity for entity in entities if entity not in answers]
            for place, answer in enumerate(answers):
                some = [*wrong]
                if len(some) >= _MAX_CANDIDATES:
                    draw.shuffle(some)
                    some = some[: _MAX_CANDIDATES - 1]
                yield _of_entities(question, values, [answer, *some], (0,), (answer,), [*key, place], key)


def _of_entities(
    question: Row,
    values: Mapping[str, Any],
    entities: Sequence[str],
    right: tuple[int, ...] | None,
    answers: tuple[str, ...],
    idx: Any,
    group: Any,
) -> Item:
    row = _with_fields(question, {**values, "entities": list(entities)})
    return Item(row, own_label=True, right=right, labels=tuple(entities), answers=answers, idx=idx, group=group)


def _span(row: Row, text: str, entity: Row) -> str:
    """The text of an entity, whose end is its last letter."""
    start, end = entity.get("start", int), entity.get("end", int)
    if not 0 <= start <= end < len(text) or not text[start : end + 1].strip():
        row.refuse("passage.entities", f"has a span from {start} to {end} in a text of {len(text)} letters")
    return text[start : end + 1]


def _race(rows: Iterable[Row], train: bool) -> Iterator[Item]:
    """`left`, `right`: the question around its first `_`; without one all of it, between `asks` and `then`."""
    for row in rows:
        article = re.sub(r"\s+", " ", row.text("article"))
        for _ in range(3):
            article = article.replace(" . ", ". ")
        left, found, right = f" {row.text('question')}".partition("_")
        values = {"article": article, "left": left.rstrip() if found else left, "right": right}
        words = {"asks": "", "then": ""} if found else {"asks": " Question:", "then": " Answer:"}
        yield Item(_with_fields(row, {**values, **words}))


def _cluewsc(rows: Iterable[Row], train: bool) -> Iterator[Item]:
    """`marked`: the text with `*` around the pronoun and `#` around what it may refer to."""
    for row in rows:
        text = row.text("text")
        marks: list[tuple[int, int, str]] = []
        for number, mark in ((1, "#"), (2, "*")):
            span, near = row.text(f"target.span{number}_text"), row.get(f"target.span{number}_index", int)
            places = [found.start() for found in re.finditer(re.escape(span), text)]
            if not places:
                row.refuse(f"target.span{number}_text", f"is {shown(span)}, which is not in 'text'")
            place = min(places, key=lambda place: abs(place - near))
            marks += [(place, 1, mark), (place + len(span), 0, mark)]
        marked = text
        for place, _, mark in sorted(marks, reverse=True):  # at one place an end stands before a start
            marked = marked[:place] + mark + marked[place:]
        pronoun, target = row.text("target.span2_text"), row.text("target.span1_text")
        yield Item(_with_fields(row, {"marked": marked, "pronoun": pronoun, "target_text": target}))


def _with_fields(row: Row, values: Mapping[str, Any]) -> Row:
    return dataclasses.replace(row, values={**row.values, **values})


def _objects(row: Row, field: str, empty: bool = False) -> list[Row]:
    """The objects of a list as rows, at the place of the row that holds it.

    Args:
        row, field: that hold it.
        empty: whether it may be empty, or missing.
    """
    if empty and field not in row.values:
        return []
    values = row.get(field, list)
    if not values and not empty:
        row.refuse(field, "is empty; write at least one, or remove the row")
    for value in values:
        if not isinstance(value, dict):
            row.refuse(field, f"holds {shown(value)}; it must be a list of objects")
    return [dataclasses.replace(row, values=value) for value in values]


def _idx(row: Row, number: int) -> Any:
    """What a row is called by: its own idx, else a number."""
    idx = row.values.get("idx", number)
    return idx if isinstance(idx, (int, str)) else number


def _squad(rows: Iterable[Row], train: bool) -> Iterator[Item]:
    """The first answer is the only candidate."""
    for row in rows:
        yield Item(row, own_label=True, right=(0,), labels=(row.text("answer"),))


READERS: dict[str, Reader] = {
    "plain": lambda rows, train: map(Item, rows),
    "copa": _copa,
    "wic": _wic,
    "wsc": _wsc,
    "multirc": _multirc,
    "record": _record,
    "race": _race,
    "cluewsc": _cluewsc,
    "squad": _squad,
}
