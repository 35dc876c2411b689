"""Questions with one answer, from words to samples: spaces, what is cut, lengths, packing, weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from ftk.criterions.cross_entropy import CrossEntropy, CrossEntropyConfig
from ftk.data.batches.collate import Collater
from ftk.data.supervised.row import Row
from ftk.errors import UserError
from ftk.generation.engine.continuation import Continuation
from ftk.generation.engine.source_to_target import SourceToTarget
from ftk.models import build_model
from ftk.tasks.answering.asking import Asking
from ftk.tasks.answering.questions import Question, QuestionEncoder, Windows, Words
from ftk.tasks.answering.samples import AnswerDataset, PackedAnswers, best_fit, joined
from ftk.tasks.glm_blank.infill.framing import BlankFraming
from ftk.tasks.seq2seq.task import Pattern, Seq2SeqConfig, Seq2SeqTask
from ftk.tokenizers import SpecialTokens
from ftk.tokenizers.base import Tokenizer
from tests.byte_tokenizer import byte_tokenizer

END, IM_START = 256, 257
SPECIAL = SpecialTokens(cls=301, eos=302, pad=300, mask=303, smask=304, gmask=305, sop=306, eop=307)
SHAPE = {"vocab_size": 320, "num_layers": 2, "hidden_size": 16, "num_attention_heads": 2}
FRAMINGS: dict[str, Any] = {
    "glm": lambda config: BlankFraming(SPECIAL, config),
    "gpt2": lambda config: Continuation([END], getattr(config, "max_positions", None)),
    "llama": lambda config: Continuation([END], getattr(config, "max_positions", None)),
    "t5": lambda config: SourceToTarget([END], [300], around=([], [END])),
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def asking(name: str, config: Any = None, expected: str = "sentence") -> Asking:
    return Asking(FRAMINGS[name](config), expected)


def encoder(tokenizer: Tokenizer, name: str) -> QuestionEncoder:
    return QuestionEncoder(tokenizer, asking(name))


def template(text: str) -> Words:
    return Words(text, is_text=False, stays=True)


@pytest.mark.parametrize(
    ("name", "pattern", "read", "learned"),
    [
        ("glm", "{source} {}", [301, "ab", 304, 302, 306, " xyz"], [" xyz", 307]),
        ("glm", "{source}{}", [301, "ab", 304, 302, 306, "xyz"], ["xyz", 307]),
        ("glm", " {} Content: {source}", [301, 304, " Content: ab", 302, 306, " xyz"], [" xyz", 307]),
        ("glm", "{source} ({})", [301, "ab (", 304, ")", 302, 306, "xyz"], ["xyz", 307]),
        ("gpt2", "Text: {source} Summary: {}", ["Text: ab Summary: xyz"], [" xyz", END]),
        ("gpt2", "<|im_start|>{source}\n{}", [IM_START, "ab\nxyz"], ["\nxyz", END]),
        ("gpt2", "{source}\nIt is:\n{}", ["ab\nIt is:\nxyz"], ["xyz", END]),
        ("t5", "{source} {}", ["ab", END], ["xyz", END]),
    ],
)
def test_a_pair_is_put_to_a_model_by_its_pattern(tokenizer, name, pattern, read, learned) -> None:
    def ids(parts: list[Any]) -> list[int]:
        return [id_ for part in parts for id_ in ([part] if isinstance(part, int) else tokenizer.encode(part))]

    row = Row({"source": "ab", "target": "xyz"}, "f", 1)
    (question,) = Seq2SeqTask.questions(Seq2SeqConfig(pattern=pattern), tokenizer).of_row(row)
    made = encoder(tokenizer, name)
    (one,) = made.within([question], 512, 128, "left")
    sample = made.asking.sample(one.before.tolist(), one.behind.tolist(), one.answer.tolist())
    assert sample["tokens"].tolist() == ids(read)
    assert sample["targets"][sample["loss_mask"]].tolist() == ids(learned)
    assert (one.shown, one.reference) == ("ab", "xyz")


@pytest.mark.parametrize(
    ("pattern", "problem"),
    [
        ("{source}", "it must hold {} once"),
        ("{} {source} {}", "it must hold {} once"),
        ("Summary: {}", "at least one {FIELD}"),
        ("{source:>3} {}", "a field is its name in braces alone, {source}"),
        ("{source!r} {}", "a field is its name in braces alone"),
        ("{source {}", "unexpected '{' in field name"),
    ],
)
def test_a_pattern_that_asks_nothing_is_refused(pattern: str, problem: str) -> None:
    (message,) = Seq2SeqConfig(pattern=pattern).validate()
    assert message.startswith(f"pattern is {pattern!r}; ")
    assert problem in message


def test_a_brace_is_written_twice() -> None:
    question = Pattern("{{{a}}} {}").question(lambda name: "x")
    assert "".join(part.text for part in question.before) == "{x} "


def test_what_a_text_spells_is_no_special_token(tokenizer) -> None:
    words = [template("<|im_start|>user\n"), Words("say <|im_start|>"), template("<|im_end|>\n<|im_start|>me\n")]
    one = encoder(tokenizer, "gpt2").whole(Question(words, "<|endoftext|>"))
    assert one.before.tolist().count(IM_START) == 2
    assert tokenizer.decode(one.before.tolist()) == "".join(part.text for part in words)
    assert one.answer.tolist().count(END) == 1
    assert tokenizer.decode(one.answer.tolist()[:-1]) == "<|endoftext|>"


@pytest.mark.parametrize(
    ("truncate", "kept"),
    [("left", ["Q:", "gh", " or ", "ijkl", "?"]), ("right", ["Q:", "efgh", " or ", "ij", "?"])],
)
def test_texts_of_a_long_question_lose_tokens_at_one_end(tokenizer, truncate: str, kept: list[str], caplog) -> None:
    words = [template("Q:"), Words("efgh"), template(" or "), Words("ijkl"), template("?")]
    made = encoder(tokenizer, "gpt2")
    whole = len(made.whole(Question(words)).before)
    with caplog.at_level("INFO"):
        found = made.within([Question(words, "abc"), Question(words[:2], "abcde")], whole - 2, 4, truncate)
    assert tokenizer.decode(found[0].before.tolist()) == "".join(kept)
    assert [one.answer.tolist() for one in found] == [[*tokenizer.encode("abc"), END], tokenizer.encode("abcd")]
    assert [one.is_whole for one in found] == [True, False]
    assert "1 of 2 questions are longer than `seq_length`" in caplog.text
    assert "1 of 2 answers are longer than `target_length` 4: cut, and not closed by the end token" in caplog.text


def test_what_went_before_is_left_out_before_a_text_is_cut(tokenizer) -> None:
    short = Question([Words("now?")], "x")
    long = Question([Words("long ago. "), Words("now?")], "x", shorter=[lambda: short])
    made = encoder(tokenizer, "gpt2")
    assert [len(made.within([long], length, 8, "left")[0].before) for length in (14, 13, 4, 3)] == [14, 4, 4, 3]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (
            [template("What is this: "), Words("ab")],
            r"f:3: what stays of a question that is cut takes 13 tokens; raise `seq_length`, which is 5; the tokenizer "
            r"has few tokens for words as in 'What is this:': a template in another language takes fewer",
        ),
        ([Words("a system", stays=True), Words("ab")], r"f:3: what stays .* raise `seq_length`, which is 5$"),
        ([template("请写出答案"), Words("ab")], r"f:3: what stays .* in '请写出答案': a template in another"),
        ([Words("")], r"f:3: what is asked has no token"),
    ],
)
def test_a_question_of_which_too_much_stays_or_nothing_is_named(tokenizer, words, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        encoder(tokenizer, "gpt2").within([Question(words, "x", place="f:3")], 5, 5, "left")


def windows_by_hand(text: str, answer: str, room: int, stride: int, no_answer: str | None) -> list[tuple[str, str]]:
    """Windows of a text with what is learned of each."""
    found, start = [], 0
    while True:
        window = text[start : start + room]
        learned = answer if answer in window else no_answer
        if learned is not None:
            found.append((window, learned))
        if start + room >= len(text):
            return found
        start += min(stride, room)


QUESTION, CONTEXT = "who came", "Ann met Bob at noon. Then Eve left, but Ann stayed on until Bob had gone, too."
PATTERNS = {
    "glm": ("{question} {} . {context}", "right", "who came{} . %s"),
    "gpt2": ("Text: {context} Question: {question} Answer:{}", "left", "Text: %s Question: who came Answer:"),
    "t5": ("{question} {context}{}", "right", "who came %s"),
}


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("answer", ["Ann", "Eve left", "had gone", "Zoe"])
@pytest.mark.parametrize(("length", "stride"), [(58, 7), (58, 28), (58, 57), (70, 1)])
@pytest.mark.parametrize("no_answer", ["N/A", None])
def test_a_long_text_is_read_in_windows_as_cut_by_hand(tokenizer, name, answer, length, stride, no_answer) -> None:
    pattern, truncate, around = PATTERNS[name]
    config = Seq2SeqConfig(pattern=pattern, truncate=truncate, window_stride=stride, no_answer=no_answer)
    made, asked = encoder(tokenizer, name), Seq2SeqTask.questions(config, tokenizer)
    values = {"question": QUESTION, "target": answer}
    rows = [
        Row(values | {"context": text}, "f", line) for line, text in enumerate((CONTEXT[:9], CONTEXT, CONTEXT[30:]))
    ]
    questions = [question for row in rows for question in asked.of_row(row)]
    found = made.within(questions, length, 20, truncate, windows=asked.windows)
    space = "" if around.endswith("\n%s") else " "  # it belongs to the text, whose first window begins with it
    room = length - made.asking.added(name == "glm")[0] - len(around.replace("{}", "")) + len("%s") + len(space)
    expected = []
    for number, row in enumerate(rows):
        text = space + row.values["context"]
        cut = [(text, answer)] if len(text) <= room else windows_by_hand(text, answer, room, stride, no_answer)
        expected += [(number, around.replace(" %s", window), learned) for window, learned in cut]
    between = "{}" if name == "glm" else ""
    assert [
        (
            one.number,
            tokenizer.decode(one.before.tolist()) + between + tokenizer.decode(one.behind.tolist()),
            tokenizer.decode(one.answer.tolist()[:-1]).strip(),
        )
        for one in found
    ] == expected
    assert [one.reference for one in found] == [learned for _, _, learned in expected]
    assert {one.was_cut for one in found} == {False}
    data = AnswerDataset(made.asking, found)
    assert len(data) == len(expected)
    assert data.sizes(1).tolist() == [
        max(len(sample["tokens"]), len(sample["targets"])) for sample in (data.sample(1, n) for n in range(len(data)))
    ]
    assert max(len(one.before) + len(one.behind) for one in found) + made.asking.added(name == "glm")[0] <= length


def test_an_answer_beyond_the_cut_is_in_a_window(tokenizer, caplog) -> None:
    question = Pattern("{question} {} . {context}").question(
        {"question": "who?", "context": CONTEXT}.__getitem__, "gone"
    )
    made = encoder(tokenizer, "glm")
    (one,) = made.within([question], 40, 20, "right")
    assert "gone" not in tokenizer.decode(one.behind.tolist())
    with caplog.at_level("INFO"):
        found = made.within([question], 40, 20, "right", windows=Windows(16, "N/A"))
    (holds,) = [one for one in found if one.reference == "gone"]
    assert "gone" in tokenizer.decode(holds.behind.tolist())
    assert {one.reference for one in found} == {"gone", "N/A"}
    assert "rows: 1 of 1 questions are longer than `seq_length` 40: read in windows" in caplog.text
    assert "stands in none" not in caplog.text


def test_what_no_window_holds_is_logged_but_no_question_without_an_answer(tokenizer, caplog) -> None:
    questions = [Question([Words(CONTEXT)], answer) for answer in ("Zoe", "N/A", "Eve", "")]
    with caplog.at_level("INFO"):
        found = encoder(tokenizer, "gpt2").within(questions, 40, 20, "right", windows=Windows(20, "N/A"))
    assert "rows: 1 of 4 of these have an answer that stands in none of their windows" in caplog.text
    assert [one.reference for one in found if one.number != 2] == [*["N/A"] * 6, *[""] * 3]


@pytest.mark.parametrize(("no_answer", "learned"), [("none given", "none given"), ("N/A", "N/A"), (None, "N/A")])
def test_questions_without_an_answer_learn_what_windows_without_it_learn(tokenizer, no_answer, learned, caplog) -> None:
    questions = [Question([Words("who?")], "N/A"), Question([Words(CONTEXT)], "N/A")]
    with caplog.at_level("INFO"):
        found = encoder(tokenizer, "gpt2").within(questions, 40, 20, "right", windows=Windows(20, no_answer))
    assert {one.reference for one in found} == {learned}
    assert {tokenizer.decode(one.answer.tolist()[:-1]) for one in found} == {learned}
    assert len(found) == (1 if no_answer is None else 4)
    assert ("stands in none" in caplog.text) == (no_answer is None)


def test_a_question_that_leaves_a_window_no_room_is_cut_as_without_windows(tokenizer, caplog) -> None:
    def question(words: str) -> Question:
        return Question([Words("Q:", is_text=False, stays=True), Words(words), Words(CONTEXT)], "Eve", place="f:3")

    made, windows = encoder(tokenizer, "gpt2"), Windows(2, "N/A")
    with caplog.at_level("INFO"):
        cut, *read = made.within([question("who came"), question("who")], 10, 20, "right", windows=windows)
    assert tokenizer.decode(cut.before.tolist()) == "Q:who came"
    assert (cut.was_cut, cut.reference) == (True, "Eve")
    assert len(read) > 1
    assert not any(one.was_cut for one in read)
    assert "rows: 1 of 2 questions are longer than `seq_length` 10: cut (`truncate` right)" in caplog.text
    assert "rows: 1 of 2 questions are longer than `seq_length` 10: read in windows" in caplog.text
    (same,) = made.within([question("who came")], 10, 20, "right")
    assert same.before.tolist() == cut.before.tolist()
    only_kept = Question([Words("Q: who came?", is_text=False, stays=True), Words(CONTEXT)], "Eve", place="f:3")
    with pytest.raises(UserError, match="^f:3: what stays of a question that is cut takes 12 tokens; raise"):
        made.within([only_kept], 10, 20, "right", windows=windows)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"window_stride": 512}, "window_stride is 512; it must be below `seq_length`, 512, so that windows"),
        ({"window_stride": 8, "no_answer": " "}, "no_answer is empty; it must be a text, or none"),
    ],
)
def test_options_of_windows_that_make_none_are_refused(options: dict[str, Any], problem: str) -> None:
    (message,) = Seq2SeqConfig(**options).validate()
    assert message.startswith(problem)


@pytest.mark.parametrize("name", FRAMINGS)
def test_the_sizes_are_the_lengths_of_the_samples_and_within_their_limits(tokenizer, name: str) -> None:
    made = encoder(tokenizer, name)
    texts = [("a" * asked, "b" * answered, behind) for asked in (1, 9, 30) for answered in (1, 5, 9) for behind in "-z"]
    questions = [
        Question([Words(asked)], answer, [Words(behind)] if behind == "z" and name == "glm" else [])
        for asked, answer, behind in texts
    ]
    encoded = made.within(questions, 20, 6, "left")
    data = AnswerDataset(made.asking, encoded)
    samples = [data.sample(1, index) for index in range(len(data))]
    longest = [max(len(sample["tokens"]), len(sample["targets"])) for sample in samples]
    assert data.sizes(1).tolist() == longest
    asked = [int(sample.get("context_length", len(sample["tokens"]))) for sample in samples]
    if name in ("glm", "t5"):
        assert max(asked) == 20
    assert {int(sample["loss_mask"].sum()) for sample in samples} == {2, 6}
    assert [one.is_whole for one in encoded] == [len(answer) < 6 for _, answer, _ in texts]


def test_what_the_positions_of_a_model_do_not_reach_is_refused(tokenizer) -> None:
    for name, most in (("gpt2", (40, 25)), ("glm", (65, 63))):  # answers of the latter have positions of their own
        config = build_model(name, **SHAPE, max_positions=64).config
        asking(name, config).check_room(*most)
        for change in ((1, 0), (0, 1)):
            with pytest.raises(UserError, match="`seq_length` .* with `target_length` .* is too long for the model: "):
                asking(name, config).check_room(most[0] + change[0], most[1] + change[1])
    asking("t5").check_room(10**4, 10**4)


def learned(model: Any, samples: list[dict[str, Any]]) -> tuple[list[float], list[torch.Tensor]]:
    """The losses of all targets, sorted, and the gradients of their sum."""
    batch = Collater(SPECIAL)(samples)
    hidden = model.hidden_states(**batch.inputs)
    losses = F.cross_entropy(model.head(hidden.flatten(0, 1)[batch.places]), batch.targets, reduction="none")
    model.zero_grad()
    losses.sum().backward()
    grads = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    return sorted(losses.tolist()), grads


@pytest.mark.parametrize("name", ["glm", "gpt2", "llama"])
def test_packed_samples_have_the_losses_and_gradients_that_they_have_alone(tokenizer, name: str) -> None:
    model = build_model(name, **SHAPE).eval()  # without dropout
    made = QuestionEncoder(tokenizer, asking(name, model.config))
    texts = [("who?", "I"), ("what is it", "a thing"), ("why", "because of it all"), ("how", "so")]
    questions = [Question([Words(asked)], answer) for asked, answer in texts]
    data = AnswerDataset(made.asking, made.within(questions, 64, 16, "left"))
    samples = [data.sample(1, index) for index in range(len(data))]
    losses, grads = learned(model, samples)
    for packed in ([joined(samples)], [joined(samples[::-1])], [joined(samples[:3]), joined(samples[3:])]):
        own_losses, own_grads = learned(model, packed)
        assert own_losses == pytest.approx(losses, abs=1e-5)
        for own, alone in zip(own_grads, grads, strict=True):
            torch.testing.assert_close(own, alone, atol=1e-5, rtol=1e-4)


def test_every_sample_is_packed_once_into_rows_that_are_not_too_long(tokenizer) -> None:
    draw = np.random.default_rng(1)
    sizes = draw.integers(1, 40, 200).tolist()
    rows = best_fit(sizes, 50)
    assert sorted(number for row in rows for number in row) == [*range(200)]
    assert max(sum(sizes[number] for number in row) for row in rows) <= 50
    assert len(rows) <= 1.02 * -(-sum(sizes) // 50)
    assert best_fit([30, 60, 20, 10], 50) == [[1], [0, 2], [3]]
    made = encoder(tokenizer, "gpt2")
    questions = [Question([Words("a" * (1 + number % 7))], "b" * (1 + number % 3)) for number in range(20)]
    data = AnswerDataset(made.asking, made.within(questions, 8, 4, "left"))
    packed = PackedAnswers(data, 12)
    lengths = [len(packed.sample(1, index)["tokens"]) for index in range(len(packed))]
    assert packed.sizes(1).tolist() == lengths
    assert max(lengths) <= 12 < 20 * 2 <= sum(lengths) == data.sizes(1).sum()


def test_each_answer_counts_alike_where_that_is_asked_for(tokenizer) -> None:
    model = build_model("gpt2", **SHAPE).eval()
    made = QuestionEncoder(tokenizer, asking("gpt2", model.config))
    encoded = made.within([Question([Words("a")], answer) for answer in ("b", "a long answer")], 64, 16, "left")
    means = []
    for one in encoded:
        losses, _ = learned(model, [AnswerDataset(made.asking, [one]).sample(1, 0)])
        means.append(sum(losses) / len(losses))
    data = AnswerDataset(made.asking, encoded, by_sample=True)
    criterion = CrossEntropy(CrossEntropyConfig())
    samples = [data.sample(1, 0), data.sample(1, 1)]
    for rows in (samples, [joined(samples)]):
        batch = Collater(SPECIAL)(rows)
        found = criterion(model, batch)
        assert float(found.num_targets) == pytest.approx(criterion.count(batch)) == pytest.approx(2)
        assert found.loss.item() == pytest.approx(sum(means), rel=1e-5)
