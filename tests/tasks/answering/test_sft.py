"""Conversations: forms of rows, the templates that stand around texts, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ftk.data.supervised.row import Row
from ftk.errors import UserError
from ftk.tasks.answering.questions import QuestionEncoder
from ftk.tasks.sft.messages import ASSISTANT, INPUT, SYSTEM, USER, messages_of
from ftk.tasks.sft.task import SFTConfig
from ftk.tasks.sft.template import load_template, with_content
from ftk.tokenizers.base import Tokenizer
from tests.byte_tokenizer import byte_tokenizer
from tests.tasks.answering.conversations import ASKED, TALK, asking_of, questions, written


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


CONVERSATION = [("system", ""), ("human", "a"), ("gpt", "b")]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"prompt": "a", "completion": " b"}, [(USER, "a"), (ASSISTANT, " b")]),
        ({"source": "a", "target": "b"}, [(USER, "a"), (ASSISTANT, "b")]),
        ({"instruction": "a", "output": "b", "input": ""}, [(USER, "a"), (ASSISTANT, "b")]),
        (
            {"instruction": "a", "input": "i", "output": "b", "system": "s", "history": [["c", "d"]]},
            [(SYSTEM, "s"), (USER, "c"), (ASSISTANT, "d"), (USER, "a"), (INPUT, "i"), (ASSISTANT, "b")],
        ),
        ({"messages": [{"role": role, "content": text} for role, text in TALK]}, TALK),
        (
            {"messages": [{"role": role, "content": text} for role, text in TALK], "system": "s"},
            [(SYSTEM, "s"), *TALK],
        ),
        ({"prompt": "a", "completion": "b", "system": "s"}, [(SYSTEM, "s"), (USER, "a"), (ASSISTANT, "b")]),
        (
            {"conversations": [{"from": who, "value": text} for who, text in CONVERSATION]},
            [(USER, "a"), (ASSISTANT, "b")],
        ),
        (
            {"messages": [
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
                {"role": "assistant", "content": "c", "tool_calls": [], "reasoning_content": None, "weight": 1.0},
                {"role": "user", "content": "d", "weight": None},
                {"role": "assistant", "content": "e", "reasoning_content": "read only", "weight": 0},
                {"role": "system", "content": [{"type": "text", "text": ""}]},
            ], "tools": "[]"},
            [(USER, "ab"), (ASSISTANT, "c"), (USER, "d"), (ASSISTANT, "e")],
        ),
    ],
)  # fmt: skip
def test_conversations_are_read_in_the_forms_that_data_sets_have(values: dict, expected: list) -> None:
    found = messages_of(Row(values, "f", 1))
    assert [(role, text) for role, text, _ in found] == expected
    assert all(message.learned for message in found if message.text != "e")


def test_answers_of_weight_0_are_read_and_not_learned(tokenizer) -> None:
    messages = [{"role": role, "content": text} for role, text in TALK]
    messages[1]["weight"] = 0
    learned = questions(tokenizer, {"messages": messages})
    assert [question.answer for question in learned] == ["See you."]
    assert "Hello." in written(learned[0])
    messages[3]["weight"], messages[1]["weight"] = 0, 1
    last = questions(tokenizer, {"messages": messages}, turns="last")
    assert [question.answer for question in last] == ["Hello."]


def _asked(**of_answer: Any) -> dict[str, Any]:
    answer = {"role": "assistant", "content": "b", **of_answer}
    return {"messages": [{"role": "user", "content": "a"}, answer]}


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"text": "a"}, "field 'instruction' is missing; a row has instruction and output, prompt and completion"),
        ({"instruction": "a"}, "field 'output' is missing"),
        ({"instruction": "a", "output": ""}, "field 'output' is empty; write a text, or remove the row"),
        ({"instruction": "a", "output": 3}, "field 'output' is 3; it must be a text"),
        ({"instruction": "a", "output": "b", "history": [["c"]]}, r"field 'history\[0\]' is no pair"),
        ({"instruction": "a", "output": "b", "history": [["c", ""]]}, r"field 'history\[0\]\[1\]' is empty"),
        ({"prompt": "a", "completion": None}, "field 'completion' is None; it must be a text"),
        ({"messages": "a"}, "field 'messages' is 'a'; it must be a list"),
        ({"messages": ["a"]}, r"field 'messages\[0\].role' is missing"),
        (
            {"messages": [{"role": "tool", "content": "a"}]},
            r"field 'messages\[0\].role' is 'tool'; it must be one of 'system', 'user', 'human'",
        ),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": None}]},
            r"field 'messages\[1\].content' is None",
        ),
        ({"messages": [{"role": "user", "content": "a"}]}, "field 'messages' has no answer of the assistant to learn"),
        (
            _asked(weight=0),
            "field 'messages' has no answer of the assistant to learn: there is none, or all have weight 0",
        ),
        (_asked(weight=2), r"field 'messages\[1\].weight' is 2; it must be one of 0, 1"),
        (_asked(reasoning_content="c"), r"field 'messages\[1\].reasoning_content' would not be learned; write it into"),
        (_asked(tool_calls=[{}]), r"field 'messages\[1\].tool_calls' would not be learned"),
        (_asked(content=[{"type": "image"}]), r"field 'messages\[1\].content' has a part without text"),
        (_asked() | {"tools": [{}]}, "field 'tools' would not be learned"),
        ({"prompt": "a", "completion": "b", "tools": [{}]}, "field 'tools' would not be learned"),
        (
            {
                "system": "s",
                "conversations": [
                    {"from": "system", "value": "t"},
                    {"from": "human", "value": "a"},
                    {"from": "gpt", "value": "b"},
                ],
            },
            "field 'system' differs from the system message of the conversation; leave one of them out",
        ),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "field 'messages' begins with an answer"),
    ],
)
def test_what_is_wrong_with_a_row_is_named_with_its_place(values: dict, problem: str) -> None:
    with pytest.raises(UserError, match=f"f:3: {problem}"):
        messages_of(Row(values, "f", 3))


ALPACA = "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
ALPACA_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
)


@pytest.mark.parametrize(
    ("template", "values", "text"),
    [
        ("alpaca", ASKED, f"{ALPACA}### Instruction:\nAdd.\n\n### Response:"),
        (
            "alpaca",
            ASKED | {"input": "1, 2"},
            f"{ALPACA_WITH_INPUT}### Instruction:\nAdd.\n\n### Input:\n1, 2\n\n### Response:",
        ),
        ("alpaca", ASKED | {"system": "Be."}, "Be.\n\n### Instruction:\nAdd.\n\n### Response:"),
        ("plain", ASKED | {"input": "1, 2", "history": [["a", "b"]]}, "a b\nAdd.\n1, 2 "),
        (
            "chatml",
            ASKED | {"system": "Be."},
            "<|im_start|>system\nBe.<|im_end|>\n<|im_start|>user\nAdd.<|im_end|>\n<|im_start|>assistant\n",
        ),
    ],
)
def test_a_template_stands_around_the_texts(tokenizer, template: str, values: dict, text: str) -> None:
    question = questions(tokenizer, values, template=template)[-1]
    assert written(question) == text
    assert question.answer == "3"
    assert question.shown == ("Add.\n1, 2" if "input" in values else "Add.")


@pytest.mark.parametrize("turns", ["every", "last"])
def test_each_answer_is_a_sample_of_its_own_behind_all_before_it(tokenizer, turns: str) -> None:
    row = {"messages": [{"role": role, "content": text} for role, text in TALK]}
    found = questions(tokenizer, row, template="plain", turns=turns)
    both = [("Hi. ", "Hello.", "Hi."), ("Hi. Hello.\nBye. ", "See you.", "Bye.")]
    assert [(written(one), one.answer, one.shown) for one in found] == (both if turns == "every" else both[1:])
    last = found[-1]
    (without,) = last.shorter
    assert (written(without()), without().shorter) == ("Bye. ", [])


def test_a_system_message_is_never_left_out(tokenizer) -> None:
    row = {"messages": [{"role": "system", "content": "Be."}] + [{"role": r, "content": t} for r, t in TALK]}
    question = questions(tokenizer, row, template="plain", turns="last")[0]
    assert written(question.shorter[0]()) == "Be.\nBye. "
    assert [part.text for part in question.before if part.is_text and part.stays] == ["Be."]
    too_long = (
        r"^f:3: what stays of a question that is cut \(its system message\) takes \d+ tokens; shorten that, or raise"
    )
    with pytest.raises(UserError, match=too_long):
        QuestionEncoder(tokenizer, asking_of(tokenizer)).within([question], 2, 20, "left")


def test_a_file_is_a_template_whose_content_the_options_keep(tokenizer, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("roles: {user: {prefix: 'Q: '}, assistant: {prefix: \"\\nA: \", suffix: '#'}}\n")
    config = SFTConfig(template=str(file))
    file.unlink()
    assert json.loads(config.template)["roles"]["user"] == {"prefix": "Q: "}
    assert SFTConfig(template=config.template) == config
    assert written(questions(tokenizer, ASKED, template=config.template)[0]) == "Q: Add.\nA: "
    made = QuestionEncoder(tokenizer, asking_of(tokenizer))
    one = made.whole(questions(tokenizer, ASKED, template=config.template)[0])
    assert tokenizer.decode(one.before.tolist()) == "Q: Add.\nA:"  # the space belongs to the answer
    assert tokenizer.decode(one.answer.tolist()) == " 3<|endoftext|>"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("- a", "a template is a mapping with 'roles'"),
        ("roles: {user: {}}", "roles has no assistant"),
        ("roles: {user: {}, assistant: {prefx: a}}", "roles.assistant: unknown 'prefx'; did you mean 'prefix'"),
        ("roles: {user: {}, assistant: a}", "roles.assistant is 'a'; it must be a mapping of prefix and suffix"),
        ("roles: {user: {}, assistant: {prefix: 1}}", "roles.assistant.prefix is 1; it must be a text"),
        (
            "roles: {user: {}, assistant: {}, bot: {}}",
            "roles: unknown 'bot'; there are: system, user, input, assistant",
        ),
        ("roles: {user: {}, assistant: {}}\nend: a", "unknown 'end'; there are: system, system_with_input"),
        ("roles: [", "is not a YAML file"),
    ],
)
def test_a_file_that_is_no_template_is_refused(tmp_path: Path, content: str, problem: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(content)
    with pytest.raises(UserError, match="mine.yaml") as raised:
        with_content(str(file))
    assert problem in str(raised.value)


def test_a_template_that_is_not_there_is_refused(tokenizer) -> None:
    with pytest.raises(
        UserError, match="`template` alpacca is neither a YAML file nor a known name; did you mean 'alp"
    ):
        SFTConfig(template="alpacca")
    with pytest.raises(UserError, match="the tokenizer hf has no chat template; choose another `template`: alpaca, "):
        load_template("chat", tokenizer)
    with pytest.raises(UserError, match="f:3: the template has no role 'system'; it has user, assistant"):
        questions(tokenizer, ASKED | {"system": "a"}, template='{"roles": {"user": {}, "assistant": {}}}')
