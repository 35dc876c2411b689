"""Tokens and text as they come: joined they are the answers, and no character comes in halves."""

from __future__ import annotations

import functools
import itertools
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ftk.errors import UserError
from ftk.generation import Answer
from ftk.generation.engine.decoder import CachedDecoder
from ftk.generation.engine.request import Event
from ftk.generation.processors import Processor, Processors
from ftk.generation.processors.stop_strings import StopStrings
from ftk.generation.search.independent import IndependentSearch
from ftk.generation.streaming import AnswerText, whole_characters
from ftk.models import build_model
from ftk.tasks.glm_blank import BlankFiller, BlankGenerator
from ftk.tokenizers import build_tokenizer, train_sentencepiece
from tests.generation.slow import SPECIAL, small_model
from tests.generation.test_in_flight import STRATEGIES
from tests.paths import TEST_DATA
from tests.tasks.glm_blank.infill.test_fill import TOKENIZERS, FixedGenerator, published
from tests.tasks.glm_blank.infill.test_generator import random_contexts

ORDERS = [
    {"blank_order": "2"},
    {"reencode": True},
    {"blank_order": "confident"},
    {"blank_order": "confident", "reencode": True},
]
ODD = "中文,日本語 ไทย 👩‍👩‍👧 é e\u0301 \ufffd ẞ 𝔘 \x00 \u3000 – naïve"


@pytest.fixture(scope="module")
def model():
    return small_model()


@pytest.fixture
def steps(monkeypatch):
    """A list that gets "step" for each step of a decoder."""
    taken, step = [], CachedDecoder.step

    def recorded(self, tokens):
        taken.append("step")
        return step(self, tokens)

    monkeypatch.setattr(CachedDecoder, "step", recorded)
    return taken


def joined(parts):
    """Per prompt and blank: its tokens, log-probabilities, and the answer of its last part."""
    found = {}
    for part in parts:
        if part.kind != "done":
            tokens, logprobs, answer = found.setdefault((part.request, part.number), ([], [], None))
            assert answer is None, "nothing comes behind the last part"
            found[part.request, part.number] = tokens + part.tokens, logprobs + part.logprobs, part.answer
    return found


@pytest.mark.parametrize("options", [*STRATEGIES, *ORDERS])
def test_parts_are_the_answers(model, options):
    contexts = random_contexts(21, 14)
    generator = BlankGenerator(model, SPECIAL, max_len=6, batch_size=4, **options)
    expected = generator.fill_ids(contexts)
    assert joined(generator.stream_ids(contexts)) == {
        (prompt, blank): (answer.tokens, answer.token_logprobs, answer)
        for prompt, answers in enumerate(expected)
        for blank, answer in enumerate(answers)
    }


@pytest.mark.parametrize(
    ("options", "one_by_one"),
    [({}, True), ({"sampling": True}, True), ({"beam": 2}, False), ({"sampling": True, "nbest": 2}, False)],
)
def test_tokens_come_one_by_one_where_they_are_settled_one_by_one(model, options, one_by_one):
    generator = BlankGenerator(model, SPECIAL, max_len=5, min_len=5, **options)
    parts = [len(part.tokens) for part in generator.stream_ids([[7, 3, 8]]) if part.kind != "done"]
    assert parts == ([1, 1, 1, 1, 1, 0] if one_by_one else [5])


def test_a_token_comes_before_the_next_one_is_computed(model, steps):
    for part in BlankGenerator(model, SPECIAL, max_len=4, min_len=4).stream_ids([[7, 3, 8]]):
        steps.append(part.kind)
    assert steps == ["token", *["step", "token"] * 3, "answer", "done"]


def test_closing_the_iterator_ends_the_work(model, steps):
    contexts = random_contexts(23, 8)
    generator = BlankGenerator(model, SPECIAL, max_len=6, batch_size=2)
    expected = generator.fill_ids(contexts)
    model.train()
    steps.clear()
    parts = generator.stream_ids(contexts)
    next(parts)
    assert not model.training
    assert not steps
    parts.close()
    assert model.training
    assert not steps
    model.eval()
    assert generator.fill_ids(contexts) == expected


def test_grad_mode_is_the_callers_own_between_parts(model):
    for _ in BlankGenerator(model, SPECIAL, max_len=3).stream_ids([[7, 3, 8]]):
        assert torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()


def test_nobody_is_asked_for_tokens_without_a_stream(model, monkeypatch):
    monkeypatch.setattr(IndependentSearch, "newest", lambda self: pytest.fail("tokens were fetched"))
    generator = BlankGenerator(model, SPECIAL, max_len=4)
    generator.fill_ids([[7, 3, 8]])
    with pytest.raises(pytest.fail.Exception):
        next(generator.stream_ids([[7, 3, 8]]))


def test_only_a_stream_asks_a_device_that_is_no_cpu_at_every_step(model, monkeypatch):
    generator = BlankGenerator(model, SPECIAL, max_len=4, min_len=4)
    asked, finished = [], IndependentSearch.finished
    monkeypatch.setattr(IndependentSearch, "finished", lambda self: asked.append(1) or finished(self))
    for stream, count in ((False, 1), (True, 3)):  # once at the start, and then in each of two steps, but the last
        asked.clear()
        requests = generator.requests([[7, 3, 8]])
        engine = generator.engine(requests)
        engine.check_every = 8  # as on a GPU
        assert list(engine.events(requests, stream=stream))
        assert len(asked) == count


def test_mistakes_are_said_before_the_first_part(model):
    generator = BlankGenerator(model, SPECIAL, max_len=4)
    with pytest.raises(UserError, match="3 seeds for 1 contexts"):
        generator.stream_ids([[7, 3]], seeds=[1, 2, 3])
    with pytest.raises(UserError, match=r"shorten the prompt, or cut it with `truncate`"):
        next(generator.stream_ids([[7] * 70 + [3]]))


class FixedStream(FixedGenerator):
    """Answers one context with given ids, token by token, the blanks in any order."""

    def __init__(self, tokenizer, answers, processors=(), order=None):
        super().__init__(tokenizer, [])
        self.processors = Processors(processors)
        self.answers = [self.to_the_stop(ids, tokenizer) for ids in answers]
        self.order = order or range(len(answers))

    def to_the_stop(self, ids, tokenizer):
        """As a search writes them: it ends when a stop string is there."""
        texts = (tokenizer.decode(ids[:count]) for count in range(len(ids)))
        return ids[: next((count for count, text in enumerate(texts) if self.processors.cut(text) != text), None)]

    def answer(self, blank):
        ids = self.answers[blank]
        length = self.processors.length(blank, ids)
        logprobs = [-0.25 * (1 + place) for place in range(len(ids) + 1)]
        return Answer(ids[:length], logprobs[: length if length < len(ids) else None], -1.0)

    def events(self, requests, *, stream=False):
        for blank in self.order:
            for place, token in enumerate(self.answers[blank]):
                yield Event(0, "token", blank, [token], [-0.25 * (1 + place)])
            answer = self.answer(blank)
            told = len(self.answers[blank])
            yield Event(0, "answer", blank, answer.tokens[told:], answer.token_logprobs[told:], answer)


def check(filler, prompt, pieces):
    """That the pieces of one prompt, joined, are what `fill` finds; returns that."""
    (expected,) = filler.fill([prompt])
    for number, answer in enumerate(expected.answers):
        own = [piece for piece in pieces if piece.number == number]
        assert "".join(piece.text for piece in own) == answer.text
        assert sum((piece.tokens for piece in own), []) == answer.tokens
        assert sum((piece.token_logprobs for piece in own), []) == answer.token_logprobs
        assert [piece.answer for piece in own] == [*[None] * (len(own) - 1), answer]
        assert all(piece.text and piece.tokens for piece in own[:-1])
    assert "".join(piece.filled for piece in pieces) == expected.text
    answered, start = set(), 0
    for piece in pieces:
        answered |= {(start + at, span.number) for span in piece.filled_spans for at in range(span.start, span.end)}
        start += len(piece.filled)
    assert answered == {(at, blank) for blank, span in enumerate(expected.spans) for at in range(*span)}
    assert [piece.result for piece in pieces] == [*[None] * (len(pieces) - 1), expected]
    return expected


@pytest.fixture(scope="module")
def bytes_tokenizer(tmp_path_factory):
    """SentencePiece with byte fallback."""
    folder = tmp_path_factory.mktemp("bytes")
    train_sentencepiece(["the quick brown fox jumps over the lazy dog"] * 20, folder, vocab_size=284)
    return build_tokenizer("sentencepiece", path=str(folder), special_tokens="glm")


NAMES = [*TOKENIZERS, "bytes"]


@pytest.fixture(scope="module")
def tokenizers(bytes_tokenizer):
    cache = {"bytes": bytes_tokenizer}

    def get(name):
        if name not in cache:
            cache[name] = published(name)
        return cache[name]

    return get


def real_lines():
    """English and Chinese lines, and one of odd characters."""
    lines = [ODD]
    for file in ("english/valid.txt", "chinese/valid.jsonl"):
        if (TEST_DATA / file).exists():
            with open(TEST_DATA / file, encoding="utf-8") as stream:
                texts = [json.loads(line)["text"] if line[0] == "{" else line for line in itertools.islice(stream, 6)]
            lines += [text.strip()[:200] for text in texts]
    return lines


@pytest.mark.parametrize("name", NAMES)
def test_real_text_comes_in_whole_characters(tokenizers, name):
    tokenizer = tokenizers(name)
    for line in real_lines():
        ids = tokenizer.encode(line)
        filler = BlankFiller(tokenizer, FixedStream(tokenizer, [ids]))
        pieces = list(filler.stream("a [MASK] ."))
        check(filler, "a [MASK] .", pieces)
        if "\ufffd" not in tokenizer.decode(ids):
            assert not any("\ufffd" in piece.text + piece.filled for piece in pieces)


@pytest.mark.parametrize("name", ["gpt2", "bytes"])
def test_a_character_comes_when_its_last_byte_has_come(tokenizers, name):
    tokenizer = tokenizers(name)
    ids = tokenizer.encode("龘")
    ids = ids[[tokenizer.decode(ids[start:]) for start in range(len(ids))].index("龘") :]
    assert len(ids) > 1
    line = AnswerText(tokenizer.decode, whole_characters)
    assert [line.add([token], [0.0]).text for token in ids] == [*[""] * (len(ids) - 1), "龘"]


@functools.cache
def rows(tokenizer):
    """A strategy: ids of text, any, and those whose text is a byte or a few."""
    commands = {token.id for token in tokenizer.command_tokens}
    texts = {token: tokenizer.token_text(token) for token in range(tokenizer.vocab_size) if token not in commands}
    short = [token for token, text in texts.items() if len(text) < 2 or text.startswith("<0x")]
    return st.lists(st.sampled_from(short) | st.sampled_from(list(texts)), max_size=14)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_any_tokens_come_as_they_stand_in_the_end(tokenizers, name, data):
    tokenizer = tokenizers(name)
    answers = [data.draw(rows(tokenizer)) for _ in range(2)]
    prompt = data.draw(st.sampled_from(["a [MASK] b [MASK] .", "[MASK][MASK]", "x[MASK] , (y [MASK]"]))
    order = data.draw(st.permutations(range(2)))
    stops = data.draw(st.lists(st.sampled_from(["\ufffd", "a", " b", "!!", "ab", "e", "é"]), max_size=2))
    processors = [StopStrings(stops, tokenizer.decode)] if stops else []
    filler = BlankFiller(tokenizer, FixedStream(tokenizer, answers, processors, order))
    check(filler, prompt, list(filler.stream(prompt)))


@settings(max_examples=300, deadline=None)
@given(
    words=st.lists(st.sampled_from(["a", "b", " a", " b", "ab", " ", ".", "!", "aa", " \n", "ba"]), max_size=12),
    stops=st.lists(st.text("ab .!", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_nothing_of_a_stop_string_is_given(words, stops):
    stop, vocab = StopStrings(stops, "".join), ["", *words]
    line = AnswerText(lambda ids: "".join(vocab[one] for one in ids), stop.settled)
    given = [line.add([token], [0.0]) for token in range(1, len(vocab))]
    told, count = "".join(new.text for new in given), sum(len(new.tokens) for new in given)
    whole, ids = "".join(words), list(range(1, len(vocab)))
    answer = StopStrings(stops, line.decode)
    assert answer.cut(whole).strip() == told + line.rest(answer.cut(whole).strip(), Answer(ids, [], 0.0)).text
    assert count <= answer.length(0, ids)
    assert not any(one in told for one in stops)
    together = AnswerText(line.decode, stop.settled)
    assert not ids or together.add(ids, [0.0] * len(ids)).text == told


def test_a_token_of_white_space_comes_with_its_text():
    line = AnswerText("".join, StopStrings(["ab"], "".join).settled)  # tokens are texts here
    pieces = [line.add([token], [0.0]) for token in ("a", " ", "\n", "c", " ")]
    assert [(one.text, list(one.tokens)) for one in pieces if one.text] == [
        ("a", ["a"]),
        (" \nc", [" ", "\n", "c"]),
    ]


def test_of_tokens_that_come_together_not_every_beginning_is_decoded():
    decoded = []
    line = AnswerText(lambda ids: decoded.append(ids) or "".join("abcdefgh"[one] for one in ids), whole_characters)
    assert line.add(range(8), [0.0] * 8).text == "abcdefgh"
    assert len(decoded) == 4  # all, and all but the last, each with what is in front


class CutsAtTwo(Processor):
    """A plugin's, which cuts answers but does not say what is settled."""

    def length(self, blank, tokens):
        return min(2, len(tokens))

    def cut(self, text):
        return text[:4]


def test_a_processor_that_cuts_and_does_not_say_when_holds_everything_back(tokenizers):
    tokenizer = tokenizers("gpt2")
    filler = BlankFiller(tokenizer, FixedStream(tokenizer, [tokenizer.encode("one two three")], [CutsAtTwo()]))
    (piece,) = filler.stream("a [MASK] .")
    assert piece.text == piece.answer.text == "one"


def test_a_tokenizer_that_takes_text_back_is_named(tokenizers):
    class Reversed:
        def decode(self, ids):
            return "".join(map(str, reversed(list(ids))))

    line = AnswerText(Reversed().decode, lambda text: text)
    line.add([1], [0.0])
    with pytest.raises(UserError, match="the tokenizer wrote '1' first and '21' in the end"):
        line.rest(Reversed().decode([1, 2]), Answer([1, 2], [], 0.0))


@pytest.fixture(scope="module")
def filler_of(tokenizers):
    """filler_of(name, **options): a filler of a small random model with this tokenizer."""
    models = {}

    def get(name, **options):
        tokenizer = tokenizers(name)
        if name not in models:
            shape = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "max_positions": 64}
            torch.manual_seed(3)
            models[name] = build_model("glm", vocab_size=tokenizer.padded_vocab_size(), **shape).eval()
        return BlankFiller(tokenizer, BlankGenerator(models[name], tokenizer.special, **options))

    return get


PROMPTS = ["a [MASK] of [MASK] .", "(see [MASK])", "no blank"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "options",
    [
        {"sampling": True, "temperature": 3.0, "alternatives": 2},
        {"sampling": True, "nbest": 2},
        {"beam": 2, "blank_order": "2"},
        {"blank_order": "confident", "reencode": True},
    ],
)
def test_pieces_of_prompts_together_are_their_results(filler_of, name, options):
    filler = filler_of(name, max_len=8, **options)
    together = list(filler.stream(PROMPTS, seeds=[4, 5, 6]))
    called = []
    assert filler.fill(PROMPTS, [4, 5, 6], on_piece=called.append) == filler.fill(PROMPTS, [4, 5, 6])
    assert called == together
    for number, result in enumerate(filler.fill(PROMPTS, [4, 5, 6])):
        own = [piece for piece in together if piece.prompt == number]
        assert own[-1].result == result
        assert "".join(piece.filled for piece in own) == result.text
        for blank, answer in enumerate(result.answers):
            assert "".join(piece.text for piece in own if piece.number == blank) == answer.text
            likeliest = [top for piece in own if piece.number == blank for top in piece.alternatives]
            assert [[token for token, _ in top] for top in likeliest] == [
                [token for token, _ in top] for top in answer.alternatives
            ]
    (alone,) = {piece.prompt for piece in filler.stream(PROMPTS[0])}
    assert alone == 0


def test_what_a_callback_raises_ends_the_work(filler_of, steps):
    filler = filler_of("bytes", max_len=8, min_len=8)

    def fails(piece):
        raise RuntimeError("the listener has gone")

    with pytest.raises(RuntimeError, match="the listener has gone"):
        filler.fill(PROMPTS, on_piece=fails)
    assert len(steps) < 8
    assert filler.fill(PROMPTS) == filler.fill(PROMPTS)


def test_a_bad_prompt_is_said_at_once(filler_of):
    with pytest.raises(UserError, match="prompt 2: the prompt is empty"):
        filler_of("bytes").stream(["a [MASK]", ""])
