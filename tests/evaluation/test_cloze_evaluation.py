"""Cloze tasks as evaluations: the likeliest candidate of a row is chosen, and metrics are those of the task."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ftk.data.supervised.cloze_files import cloze_names
from ftk.errors import UserError
from ftk.evaluation.evaluation import build_evaluation
from ftk.evaluation.metrics import measure
from ftk.generation.engine.request import prompt_ids_of
from ftk.modules.adapters import PTuningConfig
from ftk.modules.adapters.adapt import adapt
from ftk.modules.adapters.p_tuning import PTuning
from ftk.registry import EVALUATIONS
from tests.evaluation.conftest import slow_logprobs

COPA = [
    {
        "premise": "the fox jumps.",
        "choice1": "The dog reads.",
        "choice2": "The dog is lazy.",
        "question": "cause",
        "label": 1,
    },
    {
        "premise": "she reads.",
        "choice1": "She is quick.",
        "choice2": "The rooms are silent.",
        "question": "effect",
        "label": 0,
    },
    {"premise": "she writes.", "choice1": "A letter.", "choice2": "A dog.", "question": "effect"},
]
MULTIRC = {
    "idx": 0,
    "passage": {
        "text": "the quick fox jumps over a lazy dog .",
        "questions": [
            {
                "idx": 0,
                "question": "who jumps?",
                "answers": [{"idx": 0, "text": "fox", "label": 1}, {"idx": 1, "text": "dog", "label": 0}],
            },
            {"idx": 1, "question": "who is lazy?", "answers": [{"idx": 2, "text": "dog", "label": 1}]},
        ],
    },
}


def written(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def evaluated(line: str, path: str, generator: Any) -> tuple[list[dict[str, Any]], dict[str, Any], Any]:
    evaluation = build_evaluation(line)
    records = evaluation.records(evaluation.questions(path, generator), generator)
    counted = [record for record in records if record["label"] is not None]
    return records, measure(evaluation.metrics(), counted, evaluation.group), evaluation


def test_every_cloze_task_is_an_evaluation_whose_metrics_are_those_of_its_records() -> None:
    assert {*cloze_names(), "cloze"} <= {*EVALUATIONS}
    for name in cloze_names():
        evaluation: Any = build_evaluation(name)
        labels = evaluation.cloze.pattern_of().words or evaluation.cloze.labels or [True]
        texts = {"squad_em": 1.0, "squad_f1": 1.0} if name == "record" else {}
        right = [
            {"place": number, "group": number, "label": label, "chosen": label, "correct": True, **texts}
            for number, label in enumerate(labels)
        ]
        measured = measure(evaluation.metrics(), right, evaluation.group, draws=0)
        assert [*measured] == [*evaluation.cloze.metrics]
        assert all(one.value == pytest.approx(100 if one.percent else 1) for one in measured.values())


def test_the_likeliest_candidate_is_chosen(families, tmp_path) -> None:
    generator, path = families["gpt2"], written(tmp_path / "copa.jsonl", COPA)
    records, measured, evaluation = evaluated("copa candidate_scoring=sum score_end=false", path, generator)
    encode = generator.tokenizer.encode
    for row, record in zip(COPA, records, strict=True):
        assert record["prompt"].endswith(" ____.")
        scores = [one["logprob"] for one in record["candidates"]]
        assert record["chosen"] == scores.index(max(scores))
        assert record["label"] == row.get("label")
        assert ("correct" in record) == ("label" in row)
        for candidate in record["candidates"]:
            joined, _ = slow_logprobs("gpt2", generator, ids_of(evaluation, record, encode), encode(candidate["text"]))
            assert candidate["logprob"] == pytest.approx(sum(joined), rel=1e-5)
    right = sum(record["correct"] for record in records[:2])
    assert measured["accuracy"].value == pytest.approx(100 * right / 2)


def ids_of(evaluation: Any, record: dict[str, Any], encode: Any) -> list[int]:
    """The ids of what stands before the gap, its parts one by one."""
    from ftk.data.supervised.rows import rows_of

    path, _, line = record["place"].rpartition(":")
    (question,) = evaluation.cloze.questions([rows_of(path)[int(line) - 1]], evaluation.config.pattern)
    return [token for part in question.texts[0].before for token in encode(part.text)]


def test_multirc_counts_answers_and_questions(families, tmp_path) -> None:
    path = written(tmp_path / "multirc.jsonl", [MULTIRC])
    records, measured, _ = evaluated("multirc candidate_scoring=mean", path, families["glm"])
    assert [record["label"] for record in records] == [1, 0, 1]
    tp = sum(record["chosen"] == record["label"] == 1 for record in records)
    f1a = 2 * tp / (sum(record["chosen"] for record in records) + 2)
    correct = [record["correct"] for record in records]
    assert measured["f1a"].value == pytest.approx(100 * f1a)
    assert measured["em"].value == pytest.approx(100 * ((correct[0] and correct[1]) + correct[2]) / 2)
    assert measured["accuracy"].value == pytest.approx(100 * sum(correct) / 3)


def test_settings_name_pattern_and_scoring(families) -> None:
    settings = build_evaluation("copa pattern=1").settings(families["gpt2"])
    assert settings == {"cloze": "copa", "pattern": 1, "candidate_scoring": "sum", "score_end": True, "seq_length": 128}
    usual = build_evaluation("boolq")  # the task's own, or one that a model can read
    assert [usual.settings(families[name])["pattern"] for name in ("glm", "gpt2")] == [4, 0]


def test_mistakes_name_options_as_they_are_written(families, tmp_path) -> None:
    path = written(tmp_path / "boolq.jsonl", [{"question": "q", "passage": "p", "label": True}])
    with pytest.raises(UserError, match=r"use candidate_scoring=sum|does not read; use pattern="):
        evaluated("boolq pattern=0", path, families["gpt2"])
    with pytest.raises(UserError, match=r"pattern 4 of boolq .*: `evaluation` 'boolq pattern=0 candidate_scoring=sum'"):
        evaluated("boolq pattern=4 candidate_scoring=sum", path, families["gpt2"])
    with pytest.raises(UserError, match=r"unknown cloze task 'mine'"):
        build_evaluation("cloze cloze=mine")


def test_a_hostile_row_is_refused_with_its_place(families, test_data) -> None:
    file = test_data / "hostile" / "70_copa_bad.jsonl"
    if not file.exists():
        pytest.skip(f"{file} is missing")
    with pytest.raises(UserError, match=r"70_copa_bad.jsonl:\d+: field '"):
        evaluated("copa", str(file), families["gpt2"])


def test_an_only_entity_that_the_model_would_not_write_is_an_empty_answer(families, tmp_path) -> None:
    passage = {"text": "the dog is lazy", "entities": [{"start": 4, "end": 6}]}
    row = {"passage": passage, "qas": [{"query": "the fox and the @placeholder read", "answers": [{"text": "dog"}]}]}
    records, measured, _ = evaluated("record", written(tmp_path / "record.jsonl", [row]), families["glm"])
    assert (records[0]["chosen"], records[0]["label"], records[0]["correct"]) == (None, ["dog"], False)
    assert {name: one.value for name, one in measured.items()} == {"em": 0.0, "f1": 0.0}


def test_a_label_may_be_called_answers(families, tmp_path) -> None:
    (tmp_path / "own.yaml").write_text(
        "label: answers\nscoring: sum\nmetrics: [accuracy, f1]\n"
        "patterns: [{text: '{text} is{gap}', words: {right: ' old', wrong: ' lazy'}},"
        " {text: '{text}-{gap}', words: {right: old, wrong: lazy}}]\n"
    )
    rows = [{"text": "the fox", "answers": "right"}, {"text": "the dog", "answers": "wrong"}]
    path = written(tmp_path / "rows.jsonl", rows)
    records, measured, _ = evaluated(f"cloze cloze={tmp_path}/own.yaml", path, families["gpt2"])
    assert [record["label"] for record in records] == ["right", "wrong"]
    joined, _, _ = evaluated(f"cloze cloze={tmp_path}/own.yaml pattern=1", path, families["gpt2"])
    assert [record["prompt"] for record in (records[0], joined[0])] == ["the fox is ____", "the fox-____"]
    assert measured["accuracy"].value == 50 * sum(record["correct"] for record in records)


def test_examples_stand_in_front_as_far_as_there_is_room_and_depend_on_seed_and_row(families, tmp_path) -> None:
    generator, path = families["gpt2"], written(tmp_path / "copa.jsonl", COPA)
    rows = [COPA[number % 2] | {"premise": f"the {word}."} for number, word in enumerate(("fox", "dog", "old", "she"))]
    shown = written(tmp_path / "train.jsonl", [*rows, COPA[2]])  # the last has no label
    options = f"candidate_scoring=sum score_end=false num_fewshot=2 fewshot_data={shown}"
    decode = generator.tokenizer.decode

    def texts(more: str = "", line: str = options) -> list[str]:
        asked = build_evaluation(f"copa {line} seq_length=600 {more}").questions(path, generator)
        return [decode(one.encoded.texts[0][0]) for one in asked]

    alone = texts(line="candidate_scoring=sum score_end=false")
    found = texts()
    answered = [
        f'"the dog reads" or "the dog is lazy"? the {word} because the dog is lazy.' for word in ("fox", "old")
    ] + [f'"she is quick" or "the rooms are silent"? the {word}, so she is quick.' for word in ("dog", "she")]
    for text, own in zip(found, alone, strict=True):
        before = text.removesuffix(own)
        assert len(before) == len(text) - len(own)
        assert sum(before.count(one) for one in answered) == 2
    assert texts() == found != texts("fewshot_seed=2")
    # The same rows for all questions, in the order in which they stand in the file.
    assert texts("fewshot_choice=first") == [f"{answered[0]}\n\n {answered[2]}\n\n {own}" for own in alone]
    num_tokens = [len(generator.tokenizer.encode(text)) for text in alone]
    asked = build_evaluation(f"copa {options} seq_length={max(num_tokens) + 12}").questions(path, generator)
    assert all(one.encoded.was_cut and one.encoded.num_tokens <= max(num_tokens) + 12 for one in asked)
    assert {len(one.examples) for one in asked} <= {0, 1}
    records, _, _ = evaluated(f"copa {options} fewshot_choice=first", path, generator)  # scored as any other text
    asked = build_evaluation(f"copa {options} fewshot_choice=first").questions(path, generator)
    assert [record["examples"] for record in records] == [one.examples for one in asked]
    asked = build_evaluation(f"copa {options} fewshot_choice=first seq_length=600").questions(path, generator)
    assert [one.examples for one in asked] == [[f"{shown}:1", f"{shown}:2"]] * len(alone)
    assert len(texts("num_fewshot=4")) == len(alone)
    with pytest.raises(UserError, match=r"num_fewshot=5: .*train.jsonl has 4 rows with an answer$"):
        texts("num_fewshot=5")
    with pytest.raises(UserError, match="num_fewshot and fewshot_data go together"):
        texts(line="num_fewshot=1")


def test_no_example_is_the_question_itself(families, tmp_path) -> None:
    path = written(tmp_path / "copa.jsonl", COPA[:2])
    (tmp_path / "other.jsonl").symlink_to(path)
    line = f"copa candidate_scoring=sum seq_length=600 num_fewshot=1 fewshot_data={tmp_path}/other.jsonl"
    asked = build_evaluation(line).questions(path, families["gpt2"])
    decode = families["gpt2"].tokenizer.decode
    texts = [decode(one.encoded.texts[0][0]) for one in asked]
    assert [text.count("she is quick") for text in texts] == [2, 1]
    assert [text.count("the dog reads") for text in texts] == [1, 1]
    with pytest.raises(
        UserError, match=r"num_fewshot=2: .*other.jsonl has 1 row with an answer besides that of .*copa.jsonl:1"
    ):
        build_evaluation(line.replace("num_fewshot=1", "num_fewshot=2")).questions(path, families["gpt2"])


def test_examples_stand_behind_the_prompt_tokens_in_front(families, tmp_path) -> None:
    own = vars(families["gpt2"])
    model = copy.deepcopy(own["model"])
    adapt(model, PTuning(PTuningConfig(num_prompt_tokens=0, prefix_prompt=2)))
    generator, path = SimpleNamespace(**{**own, "model": model}), written(tmp_path / "copa.jsonl", COPA[:2])
    line = f"copa candidate_scoring=sum seq_length=600 num_fewshot=1 fewshot_data={path}"
    front = [*prompt_ids_of(model).front]
    for one in build_evaluation(line).questions(path, generator):
        ids = one.encoded.texts[0][0]
        assert ([*ids[:2]], set(front).isdisjoint(ids[2:])) == (front, True)


@pytest.mark.parametrize(
    ("cloze", "made", "name", "lines"),
    [
        ("boolq", [(3, True), (4, False)], "BoolQ", [{"idx": 3, "label": "true"}, {"idx": 4, "label": "false"}]),
        ("wsc", [(0, True)], "WSC", [{"idx": 0, "label": "True"}]),
        ("cb", [(0, "neutral")], "CB", [{"idx": 0, "label": "neutral"}]),
        ("copa", [(0, 1)], "COPA", [{"idx": 0, "label": 1}]),
        ("record", [(5, "Rome"), (6, None)], "ReCoRD", [{"idx": 5, "label": "Rome"}, {"idx": 6, "label": ""}]),
        (
            "multirc",
            [([0, 0, 0], 1), ([0, 0, 1], 0), ([0, 1, 2], 1)],
            "MultiRC",
            [
                {
                    "idx": 0,
                    "passage": {
                        "questions": [
                            {"idx": 0, "answers": [{"idx": 0, "label": 1}, {"idx": 1, "label": 0}]},
                            {"idx": 1, "answers": [{"idx": 2, "label": 1}]},
                        ]
                    },
                }
            ],
        ),
        ("own like wsc", [(0, True)], "own", [{"idx": 0, "label": "True"}]),
    ],
)
def test_predictions_have_the_form_of_superglue(
    cloze: str, made: list[Any], name: str, lines: list[Any], tmp_path: Path
) -> None:
    records = [{"idx": idx, "chosen": chosen, "label": None} for idx, chosen in made]
    _, _, like = cloze.partition(" like ")
    if like:
        (tmp_path / "own.yaml").write_text(f"like: {like}\n")
    evaluation = build_evaluation(f"cloze cloze={tmp_path}/own.yaml" if like else cloze)
    file, text = evaluation.submission(records) or ("", "")
    assert (file, [json.loads(line) for line in text.splitlines()]) == (f"{name}.jsonl", lines)


def test_an_end_that_no_score_counts_is_refused() -> None:
    with pytest.raises(UserError, match="^score_end has no effect with the scoring restricted_logits; choose another"):
        build_evaluation("boolq score_end=true")
