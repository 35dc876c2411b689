"""How a model of any family reads a text or two, and where its hidden states stand for them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ftk.data.supervised.cloze import Part
from ftk.data.supervised.labelled import MULTIPLE_CHOICE, TOKEN_LABELS, LabelledConfig, LabelledText
from ftk.errors import UserError
from ftk.generation.questions import shortened
from ftk.registry import MODELS
from ftk.tasks.answers import usual_task
from ftk.tasks.pieces import special_ids

if TYPE_CHECKING:
    from ftk.generation.engine.request import Framing
    from ftk.tokenizers.base import Tokenizer

FIRST, LAST, BEHIND = POOLS = ("first", "last", "behind")

Ids = Sequence[int]


class Read(NamedTuple):
    """A text as a model reads it.

    Attributes:
        arrays: inputs of the model, as `ftk.data.batches.collate.padded` takes them.
        places: of the tokens that stand for the text, by `POOLS`; a model may lack some.
        words: the place of the text's first token, where words are labelled.
    """

    arrays: dict[str, NDArray[Any]]
    places: dict[str, int]
    words: int


class EncodedRow(NamedTuple):
    """A row in tokens.

    Attributes:
        pairs: the ids of one text or two, as they are read; of a multiple choice a pair for each choice.
        words: of token labels the place of each word's first token in the text, as far as words are read.
        num_tokens: the most that a model reads for one of the pairs.
        was_cut: whether a text lost tokens.
    """

    pairs: tuple[tuple[Ids, Ids], ...]
    words: tuple[int, ...]
    num_tokens: int
    was_cut: bool


class TextReader:
    """Encodes texts, cuts those that are too long, and gives what a model reads.

    Encoders read texts between their tokens of beginning and end. Others read them as their usual task has them asked
    (`Framing.ask`), with the token that ends a part, or a text, between two. Two texts in front of choices are one,
    with that token between. Where words are labelled, the decoder of an encoder-decoder reads the text, too.

    Args:
        rows: what rows hold.
        pool: one of `POOLS`; None: the first token where it sees the whole text, else the last.
        seq_length: the most tokens that the model may read for a text or two.

    Raises:
        UserError: a special token is missing; the model cannot be asked, or has no such place.
    """

    def __init__(
        self, rows: LabelledConfig, tokenizer: Tokenizer, model_config: Any, pool: str | None, seq_length: int
    ) -> None:
        self.rows, self.tokenizer, self.seq_length = rows, tokenizer, seq_length
        self._read = _reading_of(tokenizer, model_config, rows.kind == TOKEN_LABELS)
        special = {*tokenizer.special.roles.values()}
        word = next(token for token in itertools.count() if token not in special)
        alone, both = self._read([word], []), self._read([word], [word])
        self._added = len(alone.arrays["tokens"]) - 1, len(both.arrays["tokens"]) - 2
        self.pool = pool or next(iter(alone.places))
        if self.pool not in alone.places:
            name = MODELS.of_config(model_config).name
            raise UserError(f"`pool` {pool}: the model {name} has {' or '.join(alone.places)}; choose one")

    def encode(self, texts: Sequence[LabelledText]) -> list[EncodedRow]:
        """Texts in tokens.

        Raises:
            UserError: a text has no token, or `seq_length` leaves no room for any.
        """
        unique = [*dict.fromkeys(part for text in texts for part in _parts(text, self.rows.kind))]
        rows = self.tokenizer.encode_batch(unique)
        begins = [*self.tokenizer.prompt_prefix]  # which the framing adds, too
        known = {
            text: row[len(begins) :] if begins and row[: len(begins)] == begins else row
            for text, row in zip(unique, rows, strict=True)
        }
        for labelled in texts:
            for part in _parts(labelled, self.rows.kind):
                if not known[part]:
                    raise UserError(f"{labelled.place}: {part!r:.40} has no token; write a text, or remove the row")
        return [self._encoded(labelled, known) for labelled in texts]

    def read(self, text: EncodedRow) -> tuple[list[dict[str, NDArray[Any]]], list[tuple[int, int]]]:
        """What the model reads: arrays of each pair, and (pair, place) of each hidden state that is scored."""
        found = [self._read(*pair) for pair in text.pairs]
        if self.rows.kind == TOKEN_LABELS:
            places = [(0, found[0].words + word) for word in text.words]
        else:
            places = [(number, pair.places[self.pool]) for number, pair in enumerate(found)]
        for number, place in places:
            if self.rows.kind != TOKEN_LABELS and "global_mask" in found[number].arrays:
                found[number].arrays["global_mask"][place] = 1
        return [pair.arrays for pair in found], places

    def _encoded(self, text: LabelledText, known: dict[str, list[int]]) -> EncodedRow:
        parts = [known[part] for part in _parts(text, self.rows.kind)]
        if self.rows.kind == TOKEN_LABELS:
            starts = [*itertools.accumulate((len(part) for part in parts), initial=0)][:-1]
            (pair,), num_tokens, was_cut = self._cut([([*itertools.chain(*parts)], [])], text.place)
            return EncodedRow((pair,), tuple(start for start in starts if start < len(pair[0])), num_tokens, was_cut)
        if self.rows.kind == MULTIPLE_CHOICE:
            count = len(parts) - len(text.choices)
            asked = [*parts[0], *itertools.chain(*([*_between(self.tokenizer), *part] for part in parts[1:count]))]
            pairs, num_tokens, was_cut = self._cut([(asked, choice) for choice in parts[count:]], text.place)
        else:
            pairs, num_tokens, was_cut = self._cut([(parts[0], [] if len(parts) == 1 else parts[1])], text.place)
        return EncodedRow(tuple(pairs), (), num_tokens, was_cut)

    def _cut(self, pairs: Sequence[tuple[Ids, Ids]], place: str) -> tuple[list[tuple[Ids, Ids]], int, bool]:
        """Pairs that are not too long, the longer text of each cut at its end first; tokens of the longest; whether any
        was cut."""
        found, sizes, was_cut = [], [], False
        for first, second in pairs:
            lengths, added = [len(first), len(second)], self._added[bool(second)]
            kept = shortened(_HALVES, lengths, self.seq_length - added)
            if kept is None or not kept[0]:
                raise UserError(
                    f"{place}: `seq_length` {self.seq_length} leaves no room for a text beside the {added} tokens "
                    f"that the model wants around it; raise it"
                )
            found.append((first[: kept[0]], second[: kept[1]]))
            sizes.append(sum(kept) + added)
            was_cut |= kept != lengths
        return found, max(sizes), was_cut


_HALVES = (Part("", shorten=True), Part("", shorten=True, second=True))


def _parts(text: LabelledText, kind: str) -> list[str]:
    """The texts of a row that are encoded by themselves; words behind the first with the space in front of them."""
    if kind == TOKEN_LABELS:
        return [word if number == 0 else f" {word}" for number, word in enumerate(text.texts)]
    return [*text.texts, *text.choices]


def _between(tokenizer: Tokenizer) -> list[int]:
    """What stands between two texts."""
    end = tokenizer.special.text_end if tokenizer.special.sep is None else tokenizer.special.sep
    return [] if end is None else [end]


def _reading_of(tokenizer: Tokenizer, model_config: Any, reads_words: bool) -> Callable[[Ids, Ids], Read]:
    """What a model reads for the ids of a text, and of a second one or none."""
    framing = usual_task(model_config).framing(tokenizer, model_config)
    if framing is None:
        return _OfEncoder(tokenizer, model_config)
    if not hasattr(framing, "ask"):
        raise UserError(
            f"the model {MODELS.of_config(model_config).name} has no form of prompts ('framing'); choose another"
        )
    return _Framed(framing, tokenizer, reads_words)


class _OfEncoder:
    """As BERT reads them (Devlin et al. 2019), told apart by their types; without types by two separators, as RoBERTa
    (Liu et al. 2019)."""

    def __init__(self, tokenizer: Tokenizer, model_config: Any) -> None:
        self._first, self._last, *_ = special_ids(tokenizer, "classification")
        self._has_types = getattr(model_config, "type_vocab_size", 1) > 1
        self._has_global = getattr(model_config, "has_global_tokens", False)

    def __call__(self, first: Ids, second: Ids) -> Read:
        between = [] if self._has_types or not second else [self._last]
        behind = [*between, *second, self._last] if second else []
        tokens = np.array([self._first, *first, self._last, *behind], dtype=np.int64)
        arrays = {"tokens": tokens, "lengths": np.array(len(tokens))}
        if self._has_types:
            arrays["token_types"] = np.repeat(np.arange(2), (len(tokens) - len(behind), len(behind)))
        if self._has_global:
            arrays["global_mask"] = np.zeros_like(tokens)
        return Read(arrays, {FIRST: 0, LAST: len(tokens) - 1}, 1)


class _Framed:
    """As the model is asked for an answer behind them."""

    def __init__(self, framing: Framing, tokenizer: Tokenizer, reads_words: bool) -> None:
        self._framing, self._reads_words, self._between = framing, reads_words, _between(tokenizer)

    def __call__(self, first: Ids, second: Ids) -> Read:
        from ftk.generation.engine.request import Request

        ids = [*first, *(self._between if second else ()), *second]
        frame = self._framing.first(Request(self._framing.ask(ids)))
        if frame.own:
            raise UserError("models with prompt tokens of their own are not trained for classification; choose another")
        tokens = np.array([*frame.tokens, *(ids if frame.source and self._reads_words else ())], dtype=np.int64)
        if frame.source:
            source = np.array(frame.source, dtype=np.int64)
            arrays = {"tokens": source, "lengths": np.array(len(source)), "decoder_tokens": tokens}
            return Read(arrays, {LAST: len(frame.tokens) - 1, FIRST: 0}, len(frame.tokens))
        arrays = {"tokens": tokens, **frame.inputs}
        words = self._place_of(ids, frame.tokens) if self._reads_words else 0
        if not frame.prefix:  # a token sees those before it
            return Read(arrays, {LAST: len(tokens) - 1}, words)
        arrays["context_length"] = np.array(frame.prefix)
        behind = {BEHIND: len(tokens) - 1} if len(tokens) > frame.prefix else {}
        return Read(arrays, {FIRST: 0, LAST: frame.prefix - 1, **behind}, words)

    @staticmethod
    def _place_of(ids: Ids, tokens: Ids) -> int:
        found = (place for place in range(len(tokens)) if [*tokens[place : place + len(ids)]] == ids)
        place = next(found, None)
        if place is None:
            raise UserError("`kind` token_labels: the model reads other tokens than those of the words; choose another")
        return place
