"""Cloze tasks as data: patterns that put the fields of a row around a gap, and what may stand in the gap.

A task is a YAML file: one of `clozes/`, or a user's own. docs/finetuning.md says what may stand in it.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ftk.data.supervised.cloze_readers import READERS, Item, standard_punctuation, without_final_punctuation
from ftk.data.supervised.rows import Row
from ftk.errors import UserError, counted, did_you_mean, shown
from ftk.files import read_yaml, reason
from ftk.parsing import parse_yaml

_FOLDER = Path(__file__).with_name("clozes")
_GAP, _PROMPT, _BORDER = "gap", "prompt", "|"
_EACH = "each"
_PIECE = re.compile(r"\{([^{}]*)\}")
_FIELD = re.compile(r"(?P<space> ?)(?P<name>[A-Za-z_][\w.]*)(?P<modifiers>(?::[a-z]+)*)")
_MODIFIERS = ("shorten", "optional", "lower", "bare")
_KEYS = (
    "name",
    "like",
    "rename",
    "reader",
    "standard_punctuation",
    "label",
    "labels",
    "texts",
    "words",
    "candidates",
    "scoring",
    "end",
    "pattern",
    "metrics",
    "patterns",
)
_PATTERN_KEYS = ("text", "words", "candidates", "each")
METRICS = ("accuracy", "em", "macro_f1", "f1", "f1a", "mcc")


class Part(NamedTuple):
    """A piece of a question's text, which is encoded by itself.

    Attributes:
        text: with its spaces.
        shorten: whether it may lose tokens from its end where a question is too long.
        second: whether it belongs to the second half of the pattern; the longer half is shortened first.
        ids: of prompt tokens, which stand here in place of a text.
    """

    text: str
    shorten: bool = False
    second: bool = False
    ids: tuple[int, ...] = ()


class Text(NamedTuple):
    """What stands before and behind the gap."""

    before: tuple[Part, ...]
    behind: tuple[Part, ...]

    @property
    def ends_in_gap(self) -> bool:
        """Whether nothing but punctuation stands behind the gap."""
        return all(_is_punctuation(part.text) for part in self.behind)


@dataclass(frozen=True, slots=True)
class ClozeQuestion:
    """A text with a gap, and the candidates for it.

    Attributes:
        texts: the text that all K candidates share, or one for each.
        candidates: K texts, with the space in front of them.
        labels: what choosing each of them says, K values.
        right: which of them are right; none may be (none of one candidate). None: the row has no label.
        otherwise: the label if the only candidate is not chosen.
        idx: of the row, as the data set has it.
        group: what questions that are counted together have in common.
        answers: all right answers as texts, where they are more than what is among the candidates.
        place: file:line.
    """

    texts: tuple[Text, ...]
    candidates: tuple[str, ...]
    labels: tuple[Any, ...]
    right: tuple[int, ...] | None
    otherwise: Any
    idx: Any
    group: Any
    answers: tuple[str, ...]
    place: str

    @property
    def before(self) -> tuple[Part, ...]:
        """The text in front of the gap."""
        return self.texts[0].before

    @property
    def behind(self) -> tuple[Part, ...]:
        """The text behind the gap."""
        return self.texts[0].behind

    @property
    def label(self) -> int | None:
        """The number of the right candidate; None: there is none, or the row has no label."""
        return self.right[0] if self.right else None

    def text_of(self, number: int) -> Text:
        """The text around the gap for a candidate."""
        return self.texts[number if len(self.texts) > 1 else 0]


class Piece(NamedTuple):
    """A piece of a pattern: literal text, a field, the gap, a slot for continuous prompts or the border of halves."""

    kind: str
    text: str = ""  # literal, or the name of the field
    space: str = ""  # in front of the field, encoded with it
    modifiers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Pattern:
    """One way to ask.

    Attributes:
        pieces: of the text.
        words: label -> what stands for it in the gap; None: there are candidates.
        candidates: texts with fields; a field that holds a list gives one candidate for each of its texts.
        each: fields, one for each candidate, of which the text shows the candidate's own.
    """

    pieces: tuple[Piece, ...]
    words: Mapping[Any, str] | None
    candidates: tuple[tuple[Piece, ...], ...] = ()
    each: tuple[str, ...] = ()

    @property
    def ends_in_gap(self) -> bool:
        """Whether nothing but punctuation, and fields that may be empty, stands behind the gap."""
        kinds = [piece.kind for piece in self.pieces]
        behind = self.pieces[kinds.index(_GAP) + 1 :]
        return all(
            "optional" in piece.modifiers if piece.kind == "field" else _is_punctuation(piece.text) for piece in behind
        )

    def dealt(self, ids: Sequence[int], reads_behind: bool) -> list[tuple[int, ...]]:
        """What each slot for prompt tokens gets, from left to right: the same number, until none is left.

        Args:
            ids: of the prompt tokens.
            reads_behind: whether slots behind the gap get some, too.

        Raises:
            UserError: there is no slot.
        """
        kinds = [piece.kind for piece in self.pieces]
        slots = (kinds if reads_behind else kinds[: kinds.index(_GAP)]).count(_PROMPT)
        if ids and not slots:
            raise UserError(
                f"`num_prompt_tokens` {len(ids)}: the pattern has no {{prompt}} that is read; choose another "
                f"`pattern`, or give `num_prompt_tokens` 0 and `prefix_prompt`"
            )
        share = math.ceil(len(ids) / max(slots, 1))
        return [tuple(ids[share * slot : share * (slot + 1)]) for slot in range(slots)]


@dataclass(frozen=True)
class Cloze:
    """A cloze task.

    Attributes:
        name: for messages and results.
        patterns: by their numbers.
        pattern: the number of the usual one.
        scoring: the usual score of candidates, one of `ftk.generation.questions.SCORINGS`.
        end: whether that includes the end of the answer.
        metrics: names of what an evaluation counts.
        label: the field of the right answer; labels: its values by candidate, where the candidates are fields.
        reader: makes rows of questions of the rows of a file (`ftk.data.supervised.cloze_readers`).
        texts: texts with fields that a pattern names like a field, and which are encoded as a whole. What they name are
            fields of the row, no other texts.
        rename: the name of a field in patterns -> that in the file.
        standard_punctuation: whether typographic quotes and dashes become plain ones.
    """

    name: str
    patterns: Mapping[int, Pattern]
    pattern: int
    scoring: str
    end: bool = False
    metrics: tuple[str, ...] = ()
    label: str = "label"
    labels: tuple[Any, ...] = ()
    reader: str = "plain"
    texts: Mapping[str, tuple[Piece, ...]] = field(default_factory=dict)
    rename: Mapping[str, str] = field(default_factory=dict)
    standard_punctuation: bool = False

    @property
    def has_texts(self) -> bool:
        """Whether the right answers are texts, which are compared as such (ReCoRD)."""
        return self.reader == "record"

    def pattern_of(self, number: int | None = None) -> Pattern:
        """The pattern with a number; None: the usual one.

        Raises:
            UserError: there is none.
        """
        number = self.pattern if number is None else number
        if number not in self.patterns:
            raise UserError(f"`pattern` {number}: {self.name} has the patterns {', '.join(map(str, self.patterns))}")
        return self.patterns[number]

    def usual_pattern(self, number: int | None = None, *, reads_behind: bool = True) -> int:
        """The number itself; None: the task's own, or the first that a model reads which reads nothing behind a gap."""
        if number is not None:
            return number
        fitting = (self.pattern, *self.patterns)
        return next((one for one in fitting if reads_behind or self.patterns[one].ends_in_gap), self.pattern)

    def questions(
        self,
        rows: Iterable[Row],
        pattern: int | None = None,
        train: bool = False,
        *,
        prompts: tuple[Sequence[int], Sequence[int]] = ((), ()),
        reads_behind: bool = True,
    ) -> list[ClozeQuestion]:
        """The questions of rows, by a pattern.

        Args:
            rows: of a file.
            pattern: its number; None: the usual one.
            train: whether to make what is learned: every question has a right candidate, some rows make several
                questions or none.
            prompts: ids of prompt tokens in front of the text, and of those that are dealt to the slots of the pattern.
            reads_behind: whether slots behind the gap get some, too.

        Raises:
            UserError: a field is missing or not as it must be; there is no slot for prompt tokens.
        """
        chosen, (front, rest) = self.pattern_of(pattern), prompts
        slots = [tuple(front), *chosen.dealt(rest, reads_behind)]
        return [self._question(item, chosen, train, slots) for item in READERS[self.reader](rows, train)]

    def _question(self, item: Item, pattern: Pattern, train: bool, slots: Sequence[tuple[int, ...]]) -> ClozeQuestion:
        row = item.row
        if pattern.words is not None:
            candidates, labels = tuple(pattern.words.values()), tuple(pattern.words)
        else:
            candidates = tuple(text for pieces in pattern.candidates for text in self._expanded(pieces, row))
            labels = item.labels or self.labels
            if len(candidates) != len(labels):
                problem = f"has {counted(len(candidates), 'candidate')}, but {self.name} has {len(labels)} labels"
                raise UserError(f"{row.place}: {problem}; write as many of one as of the other")
            if len(pattern.each) not in (0, len(candidates)):
                problem = f"has {counted(len(candidates), 'candidate')}, but 'each' has {len(pattern.each)} fields"
                raise UserError(f"{row.place}: {problem}; write as many of one as of the other")
        right = item.right
        if right is None and not item.own_label:
            right = self._right(row, labels)
        if train and right is None:
            row.refuse(self.label, "is missing; a row to learn from says which answer is right")
        texts = tuple(self._text(pattern, row, each, slots) for each in pattern.each or ("",))
        return ClozeQuestion(
            texts=texts,
            candidates=candidates,
            labels=labels,
            right=right,
            otherwise=item.otherwise,
            idx=row.values.get("idx", row.values.get("id", row.line - 1)) if item.idx is None else item.idx,
            group=item.group,
            answers=item.answers,
            place=row.place,
        )

    def _right(self, row: Row, labels: Sequence[Any]) -> tuple[int, ...] | None:
        """The number of the candidate that the label names; None: there is no label, as in test files."""
        if not row.has_label(self.label, labels):
            return None
        value = row.get(self.label, tuple({type(label) for label in labels}), labels)
        return (labels.index(value),)

    def _text(self, pattern: Pattern, row: Row, each: str, slots: Sequence[tuple[int, ...]]) -> Text:
        """What stands around the gap; `each`: the field that `{each}` stands for; `slots`: ids of prompt tokens."""
        (front, *others), second = slots, False
        waiting = iter(others)
        before: list[Part] = [Part("", ids=front)]
        behind: list[Part] = []
        own = before
        for piece in pattern.pieces:
            if piece.kind == _GAP:
                own = behind
            elif piece.kind == _BORDER:
                second = True
            elif piece.kind == _PROMPT:
                own.append(Part("", second=second, ids=next(waiting, ())))
            else:
                text = piece.text if piece.kind == "text" else self._value(piece, row, each)
                own.append(Part(text, "shorten" in piece.modifiers, second))
        return Text(*(tuple(part for part in parts if part.text or part.ids) for parts in (before, behind)))

    def _value(self, piece: Piece, row: Row, each: str = "") -> str:
        """The text of a field, or of one of `texts`, with the space in front of it."""
        name = each if piece.text == _EACH and each else piece.text
        if name not in self.texts:
            return self._field(piece, row, name)
        return self._changed("".join(self._field(part, row, part.text) for part in self.texts[name]), piece)

    def _field(self, piece: Piece, row: Row, name: str) -> str:
        """Literal text as it is, or the text of a field."""
        if piece.kind == "text":
            return piece.text
        name = self.rename.get(name, name)
        if "optional" in piece.modifiers:
            text: str = "" if row.find(name) is None else row.get(name)
        else:
            text = row.text(name)
        return self._changed(text, piece)

    def _changed(self, text: str, piece: Piece) -> str:
        if self.standard_punctuation:
            text = standard_punctuation(text)
        if "lower" in piece.modifiers:
            text = text[:1].lower() + text[1:]
        if "bare" in piece.modifiers:
            text = without_final_punctuation(text)
        return piece.space + text

    def _expanded(self, pieces: Sequence[Piece], row: Row) -> Iterator[str]:
        """The text of a candidate, or of several where it is a field that holds a list."""
        first = pieces[0]
        name = self.rename.get(first.text, first.text)
        if len(pieces) > 1 or first.kind == "text" or not isinstance(row.find(name), list):
            yield "".join(piece.text if piece.kind == "text" else self._value(piece, row) for piece in pieces)
            return
        for text in row.get(name, list):
            if not isinstance(text, str) or not text.strip():
                row.refuse(name, f"holds {shown(text)}; a candidate is a text that is not empty")
            yield self._changed(text, first)


def _is_punctuation(text: str) -> bool:
    """Whether a text holds punctuation and white space alone; an empty one does."""
    return all(letter.isspace() or unicodedata.category(letter).startswith("P") for letter in text)


def cloze_names() -> list[str]:
    """The tasks that ftk has."""
    return sorted(path.stem for path in _FOLDER.glob("*.yaml"))


def load_cloze(cloze: str) -> Cloze:
    """A cloze task.

    Args:
        cloze: one of `cloze_names()`, the path of a YAML file, or what `with_content` has returned.

    Raises:
        UserError: there is no such task or file, or what it holds is no task.
    """
    where, tree = _tree_of(cloze)
    return _built(tree, where)


def with_content(cloze: str) -> str:
    """The option `cloze` with the content of a file in place of its path, so that a checkpoint holds it.

    Args:
        cloze: as of `load_cloze`.

    Raises:
        UserError: as of `load_cloze`.
    """
    where, tree = _tree_of(cloze)
    _built(tree, where)
    if cloze in cloze_names():
        return cloze
    import yaml

    # YAML on one line, as JSON knows texts alone as keys, and the labels of `words` are also numbers and booleans.
    options: dict[str, Any] = {"default_flow_style": True, "width": math.inf, "sort_keys": False, "allow_unicode": True}
    text: str = yaml.safe_dump({"name": where, **tree}, **options)
    return text.strip()


def _tree_of(cloze: str) -> tuple[str, dict[str, Any]]:
    """What a task is called in messages, and its mapping."""
    if cloze in cloze_names():
        return cloze, _merged(_from_file(_FOLDER / f"{cloze}.yaml", cloze), cloze)
    if cloze.startswith("{"):
        try:
            own = parse_yaml(cloze)
        except ValueError as error:
            raise UserError(f"`cloze` {reason(error)}") from None
        tree = _merged(own, "`cloze`")
        return str(tree.get("name", "`cloze`")), tree
    if Path(cloze).suffix not in (".yaml", ".yml"):
        raise UserError(
            f"unknown cloze task {cloze!r}; {did_you_mean(cloze, cloze_names())} (or a YAML file of your own)"
        )
    return cloze, _merged(_from_file(Path(cloze), cloze), cloze)


def _from_file(path: Path, where: str) -> Any:
    try:
        return read_yaml(path)
    except OSError as error:
        raise UserError(f"cannot read the cloze task {where}: {reason(error)}") from error
    except ValueError as error:
        raise UserError(f"{where} {reason(error)}") from error


def _merged(own: Any, where: str) -> dict[str, Any]:
    """The mapping of a file, with that of the task it is like where it says nothing; texts and patterns are added."""
    _check_mapping(where, "a cloze task", own, _KEYS)
    if "texts" in own:
        _check_mapping(where, "'texts'", own["texts"])
    if "patterns" in own:
        own["patterns"] = _by_number(own["patterns"], where)
    like = own.pop("like", None)
    if like is None:
        return dict(own)
    if like not in cloze_names() or like == where:
        raise UserError(f"{where}: 'like' is {shown(like)}; {did_you_mean(str(like), cloze_names())}")
    _, base = _tree_of(like)
    added = {key: {**base.get(key, {}), **own[key]} for key in ("texts", "patterns") if key in own}
    return {**base, **own, **added}


def _by_number(patterns: Any, where: str) -> dict[int, Any]:
    """Patterns by their numbers, whether they stand in a list or a mapping.

    Raises:
        UserError: they stand in neither, or there are none.
    """
    found = dict(enumerate(patterns)) if isinstance(patterns, list) else patterns
    if not isinstance(found, dict) or not found or not all(type(number) is int for number in found):
        raise UserError(f"{where}: 'patterns' must be a list of patterns, or a mapping of numbers to them")
    return found


def _built(tree: dict[str, Any], where: str) -> Cloze:
    """The task of a mapping.

    Raises:
        UserError: a key is missing, or a value not as it must be.
    """
    patterns = _by_number(tree.get("patterns"), where)
    texts = tree.get("texts", {})
    common = {key: tree.get(key) for key in ("words", "candidates")}
    built = {number: _built_pattern(value, common, f"{where}: pattern {number}") for number, value in patterns.items()}
    values = {key: tree[key] for key in ("name", "label", "reader", "scoring", "end", "pattern") if key in tree}
    kinds: dict[str, type] = dict.fromkeys(("name", "label", "reader", "scoring"), str)
    kinds |= {"end": bool, "pattern": int, "standard_punctuation": bool}
    for key, kind in kinds.items():
        if key in tree and type(tree[key]) is not kind:
            raise UserError(f"{where}: {key!r} is {shown(tree[key])}; it must be of type {kind.__name__}")
    if values.get("reader", "plain") not in READERS:
        raise UserError(f"{where}: 'reader' is {shown(values['reader'])}; {did_you_mean(values['reader'], [*READERS])}")
    number = values.setdefault("pattern", min(built))
    if number not in built:
        raise UserError(f"{where}: 'pattern' is {number}; there are: {', '.join(map(str, built))}")
    rename = tree.get("rename", {})
    _check_mapping(where, "'rename'", rename)
    values.setdefault("scoring", "sum" if built[number].words is None else "restricted_logits")
    values.setdefault("end", built[number].words is None)
    values.setdefault("name", where)
    cloze = Cloze(
        patterns=built,
        labels=tuple(_list_of(where, "labels", tree)),
        metrics=tuple(_list_of(where, "metrics", tree)),
        texts={name: _parsed(text, f"{where}: text {name}", gaps=0) for name, text in texts.items()},
        rename=rename,
        standard_punctuation=tree.get("standard_punctuation", False),
        **values,
    )
    _check_labels(cloze)
    _check_metrics(cloze)
    return cloze


def _check_labels(cloze: Cloze) -> None:
    """Raises UserError if a label is no text, number or boolean."""
    for label in (*cloze.labels, *(label for one in cloze.patterns.values() for label in one.words or ())):
        if type(label) not in (str, int, float, bool):
            raise UserError(f"{cloze.name}: the label {shown(label)} must be a text, a number, true or false")


def _check_metrics(cloze: Cloze) -> None:
    """Raises UserError if a metric is unknown, or not defined for the labels of a pattern."""
    for name in cloze.metrics:
        if name not in METRICS:
            raise UserError(f"{cloze.name}: unknown metric {shown(name)}; {did_you_mean(str(name), METRICS)}")
        if name in ("accuracy", "em") or (name == "f1" and cloze.has_texts):
            continue
        for number, pattern in cloze.patterns.items():
            count = len(pattern.words or cloze.labels)
            if count < 2 or (count > 2 and name != "macro_f1"):
                wanted = "two labels or more" if name == "macro_f1" else "two labels"
                raise UserError(
                    f"{cloze.name}: the metric {name} is for {wanted}, and pattern {number} has {count}; "
                    f"choose another metric"
                )


def _built_pattern(value: Any, common: Mapping[str, Any], where: str) -> Pattern:
    """A pattern of a mapping, or of its text alone; `common`: the words and candidates of the task."""
    own = {"text": value} if isinstance(value, str) else value
    _check_mapping(where, "a pattern", own, _PATTERN_KEYS)
    pieces = _parsed(own.get("text"), where)
    chosen = own if "words" in own or "candidates" in own else common
    words, candidates = chosen.get("words"), chosen.get("candidates")
    if (words is None) == (candidates is None):
        raise UserError(f"{where} needs either 'words', a mapping of labels to words, or 'candidates'")
    each = tuple(_list_of(where, _EACH, own))
    if not all(isinstance(name, str) for name in each):
        raise UserError(f"{where}: 'each' is {shown(own[_EACH])}; it must be a list of fields")
    if words is not None:
        if each:
            raise UserError(f"{where}: 'each' gives each of the 'candidates' its own text; it is not for 'words'")
        if not isinstance(words, dict) or len(words) < 2 or not all(isinstance(word, str) for word in words.values()):
            raise UserError(f"{where}: 'words' must be a mapping of two or more labels to words")
        return Pattern(pieces, words)
    templates = [candidates] if isinstance(candidates, str) else candidates
    if not isinstance(templates, list) or not templates:
        raise UserError(f"{where}: 'candidates' must be a text with fields, or a list of such")
    templates = templates * max(1, len(each)) if len(templates) == 1 else templates
    if len(each) not in (0, len(templates)):
        problem = f"has {counted(len(templates), 'candidate')}, but 'each' has {len(each)} fields"
        raise UserError(f"{where} {problem}; write as many of one as of the other")
    return Pattern(pieces, None, tuple(_parsed(text, f"{where}: candidates", gaps=0) for text in templates), each)


def _parsed(text: Any, where: str, gaps: int = 1) -> tuple[Piece, ...]:
    """The pieces of a text with fields.

    Raises:
        UserError: it is no text, a brace is alone, a field or modifier is unknown, the number of gaps is wrong, or
            a slot for prompts or a border where there is no gap.
    """
    if not isinstance(text, str) or not text:
        raise UserError(
            f"{where}: the text is {shown(text)}; write a text with fields, such as '{{question}}?{{gap}}.'"
        )
    pieces: list[Piece] = []
    for number, part in enumerate(_PIECE.split(text)):
        if number % 2 == 0:
            if "{" in part or "}" in part:
                raise UserError(f"{where}: a brace has no partner in {shown(text)}; fields are written {{name}}")
            pieces += [Piece("text", part)] if part else []
        elif part in (_GAP, _PROMPT, _BORDER):
            if part != _GAP and not gaps:
                raise UserError(f"{where}: {shown(text)} has {{{part}}}, which only the text of a pattern may have")
            pieces.append(Piece(part))
        elif part:
            pieces.append(_parsed_field(part, where))
    found = sum(piece.kind == _GAP for piece in pieces)
    if found != gaps:
        wanted = "one {gap}" if gaps else "no {gap}"
        raise UserError(f"{where}: {shown(text)} has {found} gaps; it must have {wanted}")
    return tuple(pieces)


def _parsed_field(part: str, where: str) -> Piece:
    found = _FIELD.fullmatch(part)
    if found is None:
        raise UserError(f"{where}: {{{part}}} is no field; write {{name}}, {{ name}} or {{name:modifier}}")
    modifiers = tuple(found["modifiers"].split(":")[1:])
    for modifier in modifiers:
        if modifier not in _MODIFIERS:
            raise UserError(f"{where}: {{{part}}}: unknown modifier {modifier!r}; {did_you_mean(modifier, _MODIFIERS)}")
    return Piece("field", found["name"], found["space"], modifiers)


def _list_of(where: str, key: str, tree: Mapping[str, Any]) -> list[Any]:
    values = tree.get(key, [])
    if not isinstance(values, list):
        raise UserError(f"{where}: {key!r} is {shown(values)}; it must be a list")
    return values


def _check_mapping(where: str, what: str, value: Any, keys: Sequence[str] = ()) -> None:
    """Raises UserError if a value is no mapping with texts as keys, of those that are known."""
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise UserError(f"{where}: {what} must be a mapping, not {shown(value)}")
    for key in value:
        if keys and key not in keys:
            raise UserError(f"{where}: unknown key {key!r}; {did_you_mean(key, keys)}")
