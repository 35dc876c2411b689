"""Samples of masked language modeling against masks and pairs written out slowly, and shares against expectation."""

from __future__ import annotations

from math import ceil, floor

import numpy as np
import pytest

from ftk.config.options import mistakes
from ftk.data.corpora.documents import DocumentList
from ftk.data.random import SampleRandom
from ftk.errors import UserError
from ftk.tasks.masked_lm.samples import _MASKS, MaskedDataset
from ftk.tasks.masked_lm.task import MaskedCollater, MaskedLMConfig
from ftk.tasks.pieces import BEGINS, CONTINUES, Tokens
from ftk.tokenizers import SpecialTokens

FIRST, LAST, MASK, PAD, VOCAB_SIZE = 90, 91, 92, 93, 94
RANDOM = np.random.default_rng(1)
DOCUMENTS = [RANDOM.integers(0, 90, size).tolist() for size in (3, 1, 0, 200, 57, 12, 700, 2)]


def dataset(documents: list = DOCUMENTS, *, words: bool = False, seed: int = 5, **options: object) -> MaskedDataset:
    config = MaskedLMConfig(**{"seq_length": 32, "mask_whole_words": words, **options})  # type: ignore[arg-type]
    kind = np.full(VOCAB_SIZE, BEGINS, dtype=np.uint8)
    if words:
        kind[1:60:2] = CONTINUES  # odd tokens below 60
    if config.pairs:
        kind[[FIRST, LAST]] = 0
    others = np.arange(VOCAB_SIZE if config.pairs else 90)
    return MaskedDataset(DocumentList(documents), Tokens(FIRST, LAST, MASK, PAD, kind, others), config, seed)


def slowly_hidden(data: MaskedDataset, text: list[int], epoch: int, index: int) -> tuple[list[int], list[bool]]:
    """A text with some of its tokens hidden, and which."""
    config, tokens = data.config, data.tokens
    random = SampleRandom(data.seed + _MASKS, epoch, index)
    words: list[list[int]] = []
    joins = False
    for place, token in enumerate(text):
        if tokens.kind[token] == CONTINUES and joins:
            words[-1].append(place)
        elif tokens.kind[token]:
            words.append([place])
        joins = bool(tokens.kind[token])
    wanted = config.mask_prob * len(text)
    count = max(1, round(wanted)) if config.pairs else floor(wanted + random.uniform())
    count = min(count, ceil(config.mask_prob * config.seq_length))
    hidden = [False] * len(text)
    for number in random.permutation(len(words)):
        if len(words[number]) <= count - sum(hidden):
            for place in words[number]:
                hidden[place] = True
    found = list(text)
    for place in np.flatnonzero(hidden):
        draw = random.uniform()
        if draw >= config.leave_unmasked_prob + config.random_token_prob:
            found[place] = MASK
        elif draw >= config.leave_unmasked_prob:
            found[place] = int(tokens.others[random.below(len(tokens.others))])
    return found, hidden


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"words": True},
        {"pairs": True},
        {"pairs": True, "words": True},
        {"mask_prob": 0.5, "random_token_prob": 0.6},
    ],
)
def test_hidden_tokens_are_those_of_the_slow_way(options) -> None:
    data = dataset(**options)
    for epoch in (1, 2):
        many = data.samples(epoch, np.arange(len(data)))
        for index in range(len(data)):
            (text,) = data.texts.texts(epoch, np.array([index]))
            sample = many[index]
            tokens, hidden = slowly_hidden(data, text["tokens"].tolist(), epoch, index)
            assert sample["tokens"].tolist() == tokens
            assert sample["loss_mask"].tolist() == hidden
            assert sample["targets"].tolist() == text["tokens"].tolist()
            assert sample["lengths"] == len(tokens) <= data.sizes(epoch)[index]
            alone = data.sample(epoch, index)
            assert all(np.array_equal(alone[name], sample[name]) for name in sample)


@pytest.mark.parametrize("pairs", [False, True])
def test_shares_are_those_of_the_options(pairs: bool) -> None:
    data = dataset([RANDOM.integers(0, 90, 4000).tolist() for _ in range(5)], pairs=pairs)
    samples = [data.sample(epoch, index) for epoch in range(30) for index in range(len(data))]
    tokens, targets, hidden = (
        np.concatenate([sample[name] for sample in samples]) for name in ("tokens", "targets", "loss_mask")
    )
    assert hidden.mean() == pytest.approx(5 / 32 if pairs else 0.15, abs=0.005)
    if pairs:
        assert not hidden[np.isin(targets, [FIRST, LAST])].any()
    assert np.mean(tokens[hidden] == MASK) == pytest.approx(0.8 + 0.1 * pairs / VOCAB_SIZE, abs=0.01)
    same = 0.1 + 0.1 / (VOCAB_SIZE if pairs else 90)
    assert np.mean(tokens[hidden] == targets[hidden]) == pytest.approx(same, abs=0.01)
    assert np.array_equal(tokens[~hidden], targets[~hidden])
    if pairs:
        assert np.mean([sample["random_next"] for sample in samples]) == pytest.approx(0.5, abs=0.03)
        assert np.mean([len(sample["tokens"]) < 32 for sample in samples]) == pytest.approx(0.1, abs=0.03)


def test_pieces_go_round_the_corpus_once() -> None:
    data = dataset()
    ring = [token for document in DOCUMENTS for token in [*document, LAST]]
    for epoch in (1, 2):
        texts = [text["tokens"].tolist() for text in data.texts.texts(epoch, np.arange(len(data)))]
        assert all(text[0] == FIRST and text[-1] == LAST for text in texts)
        joined = [token for text in texts for token in text[1:-1]]
        assert any(ring[start:] + ring[:start] == joined for start in range(len(ring)))


def test_pairs_are_two_parts_of_a_document_or_of_two() -> None:
    data = dataset(pairs=True)
    spelled = [" ".join(map(str, document)) for document in DOCUMENTS]
    of_document = {}
    for index in range(len(data)):
        for epoch in range(20):
            sample = data.texts.text(epoch, index)
            first, second, rest = " ".join(map(str, sample["tokens"])).split(f" {LAST}")
            first = first.removeprefix(f"{FIRST} ")
            assert rest == ""
            assert sample["token_types"].tolist() == [0] * (len(first.split()) + 2) + [1] * (len(second.split()) + 1)
            follows = any(first + second in document for document in spelled)
            assert follows or sample["random_next"]
            of_document.setdefault(bool(sample["random_next"]), set()).add(follows)
    assert of_document[False] == {True}
    assert False in of_document[True]


def test_copies_come_again() -> None:
    data = dataset(mask_copies=3)
    first, again, other = (data.sample(epoch, 2) for epoch in (1, 4, 2))
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert not np.array_equal(first["tokens"], other["tokens"])


def test_batches_have_the_places_of_pairs_behind_those_of_tokens() -> None:
    data = dataset(pairs=True)
    batch = MaskedCollater(SpecialTokens(pad=PAD))(data.samples(1, np.arange(4)))
    rows, num_tokens = batch.inputs["tokens"].shape
    assert batch.inputs.keys() == {"tokens", "lengths", "token_types"}
    assert batch.places[len(batch.targets) :].tolist() == [row * num_tokens for row in range(rows)]
    assert batch.extras["pair_weights"].sum() == len(batch.targets)
    empty = batch.without_loss()
    assert len(empty.places) == len(empty.targets) == len(empty.extras["random_next"]) == 0


def test_wrong_data_and_options_are_refused() -> None:
    with pytest.raises(UserError, match="no document of two tokens"):
        dataset([[1], []], pairs=True)
    with pytest.raises(UserError, match="document 0 holds token 99, outside the vocabulary of 94"):
        dataset([[1, 99, 3]]).sample(1, 0)
    with pytest.raises(IndexError, match="sample 99 of"):
        dataset().sample(1, 99)
    for options, name in (
        ({"mask_prob": 0.0}, "mask_prob"),
        ({"leave_unmasked_prob": 0.7, "random_token_prob": 0.7}, "leave_unmasked_prob"),
    ):
        assert [line.split()[0] for line in mistakes(MaskedLMConfig(**options))] == [name]
