"""Pairs of answers: forms of rows, what is refused, and the samples, each answer of which is that of an sft row."""

from __future__ import annotations

import json
import logging
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ftk.data.supervised.corpus import RowsConfig, RowsCorpus
from ftk.data.supervised.row import Row
from ftk.errors import UserError
from ftk.models.gpt2 import GPT2Config
from ftk.tasks.preference.pairs import pair_of
from ftk.tasks.preference.task import PreferenceTask
from ftk.tasks.sft.messages import ASSISTANT, INPUT, SYSTEM, USER
from ftk.tasks.sft.task import SFTConfig, SFTTask, TemplateConfig
from tests.byte_tokenizer import byte_tokenizer

ROLES = {"u": "user", "a": "assistant", "s": "system"}


def said(text: str) -> list[dict[str, str]]:
    """Messages: "u:hi a:hello" -> one of the user, one of the assistant."""
    return [{"role": ROLES[part[0]], "content": part[2:]} for part in text.split()]


def told(text: str) -> list[dict[str, str]]:
    """The same in the other form."""
    return [{"from": {"u": "human", "a": "gpt"}.get(part[0], "system"), "value": part[2:]} for part in text.split()]


ANSWERS = {"chosen": "b", "rejected": "w"}
FORMS: dict[str, tuple[dict[str, Any], list[tuple[str, str]]]] = {
    "texts": ({"prompt": "q"}, [(USER, "q")]),
    "orca": ({"system": "s", "question": "q"}, [(SYSTEM, "s"), (USER, "q")]),
    "empty system": ({"system": "", "question": "q"}, [(USER, "q")]),
    "distilabel": ({"system": "s", "input": "q", "instruction": None}, [(SYSTEM, "s"), (USER, "q")]),
    "alpaca": ({"instruction": "q", "input": "i"}, [(USER, "q"), (INPUT, "i")]),
    "history": ({"instruction": "q", "history": [["x", "y"]]}, [(USER, "x"), (ASSISTANT, "y"), (USER, "q")]),
    "sharegpt": (
        {"conversations": told("s:s u:q"), "chosen": told("a:b")[0], "rejected": told("a:w")[0]},
        [(SYSTEM, "s"), (USER, "q")],
    ),
    "messages": ({"messages": said("u:x a:y u:q")}, [(USER, "x"), (ASSISTANT, "y"), (USER, "q")]),
    "conversational": (
        {"prompt": said("s:s u:q"), "chosen": said("a:b"), "rejected": said("a:w")},
        [(SYSTEM, "s"), (USER, "q")],
    ),
    "whole": ({"chosen": said("u:q a:b"), "rejected": said("u:q a:w")}, [(USER, "q")]),
    "whole beside a prompt": (
        {"prompt": "x", "chosen": said("u:x a:y u:q a:b"), "rejected": said("u:x a:y u:q a:w")},
        [(USER, "x"), (ASSISTANT, "y"), (USER, "q")],
    ),
    "whole beside messages": (
        {"prompt": said("u:q"), "chosen": said("u:q a:b"), "rejected": said("u:q a:w")},
        [(USER, "q")],
    ),
    "messages that repeat the chosen conversation": (
        {"prompt": "q", "messages": said("u:q a:b"), "chosen": said("u:q a:b"), "rejected": said("u:q a:w")},
        [(USER, "q")],
    ),
    "continued": (
        {"prompt": said("u:x"), "chosen": said("a:y u:q a:b"), "rejected": said("a:y u:q a:w")},
        [(USER, "x"), (ASSISTANT, "y"), (USER, "q")],
    ),
    "whole with a system": (
        {"system": "s", "chosen": said("u:q a:b"), "rejected": said("u:q a:w")},
        [(SYSTEM, "s"), (USER, "q")],
    ),
    "system twice": ({"system": "s", "prompt": said("s:s u:q")}, [(SYSTEM, "s"), (USER, "q")]),
    "whole in the other form": ({"chosen": told("u:q a:b"), "rejected": told("u:q a:w")}, [(USER, "q")]),
}


@pytest.mark.parametrize("name", FORMS)
def test_pairs_are_read_in_the_forms_that_data_sets_have(name: str) -> None:
    values, asked = FORMS[name]
    pair = pair_of(Row(ANSWERS | values, "f", 1))
    assert [(role, text) for role, text, _ in pair.messages] == asked
    assert (pair.chosen, pair.rejected, pair.place) == ("b", "w", "f:1")


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        (ANSWERS, "field 'prompt' is missing; a row has chosen and rejected with prompt, question, instr"),
        ({"prompt": "q", "chosen": "b"}, "field 'rejected' is missing; there are: prompt, chosen"),
        ({"prompt": "q", "chosen": " ", "rejected": "w"}, "field 'chosen' is empty; write a text, or remove the row"),
        ({"prompt": "q", "chosen": 3, "rejected": "w"}, "field 'chosen' is 3; it must be a text"),
        ({"prompt": "", **ANSWERS}, "field 'prompt' is empty"),
        ({"prompt": said("u:q a:b"), **ANSWERS}, "field 'chosen' answers nothing: a message of the user must stand in"),
        ({"chosen": said("a:b"), "rejected": said("a:w")}, "field 'prompt' is missing"),
        (
            {"chosen": said("u:q a:b"), "rejected": said("u:other a:w")},
            "field 'rejected' has other messages in front of its answer than 'chosen'; they must be the same",
        ),
        ({"chosen": said("u:q"), "rejected": said("u:q")}, "field 'chosen' does not end with a message of the"),
        ({"system": "t", "prompt": said("s:s u:q"), **ANSWERS}, "field 'system' differs from the system"),
        ({"prompt": "q", "chosen": [], "rejected": []}, "field 'chosen' does not end with a message of the assistant"),
        ({"prompt": "q", "chosen": [3], "rejected": [3]}, r"field 'chosen\[0\].role' is missing"),
        (
            {"prompt": "q", "chosen": [said("a:b")[0] | {"tool_calls": [{}]}], "rejected": said("a:w")},
            r"field 'chosen\[0\].tool_calls' would not be learned",
        ),
        ({"messages": said("u:q"), "tools": [{}], **ANSWERS}, "field 'tools' would not be learned"),
        ({"prompt": "q", "tools": [{}], **ANSWERS}, "field 'tools' would not be learned"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_row_is_named_with_its_place(values: dict, problem: str) -> None:
    with pytest.raises(UserError, match=f"f:3: {problem}"):
        pair_of(Row(values, "f", 3))


TALK = [("user", "Say one thing about the sun."), ("assistant", "Warm."), ("user", "And the moon?")]
LONG = [{"role": role, "content": text} for role, text in TALK]
ROWS: list[dict[str, Any]] = [
    {"prompt": "sun?", "chosen": "It is warm.", "rejected": "No."},
    {"prompt": LONG, "chosen": "Pale.", "rejected": "A much longer answer about it."},
    {"prompt": "sun? " * 20, "chosen": "A", "rejected": "B"},
]


def make_task(folder: Path, rows: list[dict[str, Any]], kind: Any = PreferenceTask, **options: Any) -> Any:
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    corpus = RowsCorpus(RowsConfig(data=str(folder)), byte_tokenizer(folder / "tokenizer"))
    options = {"template": "chatml", "seq_length": 80, "target_length": 16, **options}
    task = kind((TemplateConfig if kind is PreferenceTask else SFTConfig)(**options), corpus=corpus, seed=1)
    task.for_model(GPT2Config(vocab_size=320, max_positions=128))
    return task


def test_each_answer_is_the_sample_of_an_sft_row_and_both_read_the_same_question(tmp_path, caplog) -> None:
    with caplog.at_level(logging.INFO):
        task = make_task(tmp_path, ROWS)
        pairs = task.load_split("train")
    assert "train.jsonl, chosen: 2 of 3 questions are longer than `seq_length` 80: cut" in caplog.text
    assert "train.jsonl, rejected: 1 of 3 answers are longer than `target_length` 16: cut" in caplog.text
    assert "train.jsonl, chosen: 1 of 3 answers" not in caplog.text
    for place, side in enumerate(("chosen", "rejected")):
        (tmp_path / side).mkdir()
        asked = [{"role": "user", "content": ROWS[0]["prompt"]}], LONG
        answers = [{"role": "assistant", "content": row[side]} for row in ROWS[:2]]
        rows = [{"messages": [*before, answer]} for before, answer in zip(asked, answers, strict=True)]
        learned = make_task(tmp_path / side, rows, SFTTask, turns="last").load_split("train")
        for number in range(len(rows)):
            found, expected = pairs.sample(1, number)["rows"][place], learned.sample(1, number)
            assert found.keys() == expected.keys()
            for name in expected:
                np.testing.assert_array_equal(found[name], expected[name])
    for number in range(3):
        chosen, rejected = pairs.sample(1, number)["rows"]
        start = int(chosen["loss_mask"].argmax())
        assert start == int(rejected["loss_mask"].argmax())
        np.testing.assert_array_equal(chosen["tokens"][: start + 1], rejected["tokens"][: start + 1])
        longest = max(len(chosen["tokens"]), len(rejected["tokens"]))
        assert pairs.sizes(1)[number] == 2 * longest


def test_a_batch_has_the_answers_of_a_pair_beside_each_other(tmp_path) -> None:
    task = make_task(tmp_path, ROWS)
    pairs, collater = task.load_split("train"), task.collater()
    samples = [pairs.sample(1, number) for number in (2, 0)]
    before = pickle.dumps(samples)
    batch = collater(samples)
    assert pickle.dumps(samples) == before
    again = pickle.loads(pickle.dumps(collater))(pickle.loads(before))
    torch.testing.assert_close(
        [*again.inputs.values(), *again.extras.values()], [*batch.inputs.values(), *batch.extras.values()]
    )
    rows = [row for sample in samples for row in sample["rows"]]
    assert batch.extras["lengths"].tolist() == [[2, 2], [12, 4]]  # with the end
    for number, row in enumerate(rows):
        own = batch.extras["answer"] == number
        assert batch.targets[own].tolist() == row["targets"][row["loss_mask"]].tolist()
        width = batch.inputs["tokens"].size(1)
        assert (batch.places[own] - number * width).tolist() == row["loss_mask"].nonzero()[0].tolist()
        assert batch.weights[own].unique().tolist() == [1.0 - number % 2]
        np.testing.assert_array_equal(batch.inputs["tokens"][number, : len(row["tokens"])], row["tokens"])
    without = batch.without_loss()
    assert [len(value) for value in (*without.extras.values(), without.targets)] == [0, 0, 0]


def test_pairs_of_equal_answers_are_left_out_aloud(tmp_path, caplog) -> None:
    equal = {"prompt": "q", "chosen": "as long as this one", "rejected": "as long as this other"}
    task = make_task(tmp_path, [ROWS[0], equal, ROWS[2]], target_length=12)
    assert len(task.load_split("train")) == 2
    reach = "as far as `target_length` 12 reaches"
    text = f"train.jsonl: 1 of 3 pairs are left out, whose answers are the same, {reach}; the first is"
    assert f"{text} {tmp_path}/train.jsonl:2" in caplog.text
    task = make_task(tmp_path, [equal], target_length=12)
    with pytest.raises(UserError, match=r"train.jsonl:1: both answers are the same, as far as `target_length` 12"):
        task.load_split("train")


def test_both_answers_are_shown(tmp_path) -> None:
    task = make_task(tmp_path, ROWS)
    shown = task.show("train", page=None, width=100, num_samples=1, index=0, draw=0)
    assert "sample 0 of 3, chosen: " in shown
    assert "sample 0 of 3, rejected: " in shown
    assert shown.count("reads") == shown.count("learns") == 2
    assert "<pad>" not in shown
