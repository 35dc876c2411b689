"""The task classification: what rows hold, what models of each family read, losses, runs and their checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import ftk
from ftk.checkpoint.load import load_model_tensors, read_config
from ftk.config.options import mistakes
from ftk.data.supervised.corpus import RowsConfig, RowsCorpus
from ftk.errors import UserError
from ftk.modules.classifier import replace_head
from ftk.tasks.classification.criterion import Classification, ClassificationLossConfig
from ftk.tasks.classification.reading import _Framed
from ftk.tasks.classification.task import ClassificationConfig, ClassificationTask
from ftk_cli import checkpoint, evaluate, generate, train, validate
from ftk_cli import data as data_command
from tests.records import assert_same_weights, records_of
from tests.tasks.cloze.made import LAYOUTS, WORDS, make_tokenizer, model_of, spelled, write_rows
from tests.tasks.runs import PARALLEL, assert_ranks_agree, learning
from tests.tiers import slow_but

KINDS = ("single_label", "regression", "multiple_choice", "token_labels")


def rows_of(kind: str, count: int, seed: int = 7) -> list[dict[str, Any]]:
    """Rows whose label is drawn: to be learned by heart."""
    draw = torch.Generator().manual_seed(seed)

    def words(size: int) -> list[str]:
        return [WORDS[place] for place in torch.randint(8, 24, (size,), generator=draw).tolist()]

    rows: list[dict[str, Any]] = []
    for _ in range(count):
        number = int(torch.randint(3, (1,), generator=draw))
        text = words(3 + number % 3)
        if kind == "single_label":
            rows.append({"text": " ".join(text), "label": ("bad", "good", "so")[number]})
        elif kind == "regression":
            rows.append({"text": " ".join(text), "label": number / 2 - 0.5})
        elif kind == "multiple_choice":
            rows.append({"text": " ".join(text), "choices": [" ".join(words(2)) for _ in range(3)], "label": number})
        else:
            # To the left a model may see no more.
            rows.append({"text": text, "label": [("O", "B-X", "I-X")[WORDS.index(word) % 3] for word in text]})
    return rows


def task_of(folder: Path, family: str, data: str | None = None, **options: Any) -> tuple[ClassificationTask, Any]:
    """The task on the rows of a folder, or of other data, and a model of a family with its head."""
    tokenizer = make_tokenizer(folder / f"tokenizer-{family}", LAYOUTS[family])
    config = ClassificationConfig(**{"seq_length": 32, "head_dropout": 0.0, **options})
    task = ClassificationTask(config, corpus=RowsCorpus(RowsConfig(data=data or str(folder)), tokenizer), seed=1)
    model = model_of(family, tokenizer)
    replace_head(model, task.shape, seed=1)
    task.for_model(model.config)
    return task, model


# -- what is read ----------------------------------------------------------------------------------------------

PAIR = {"a": "the sun", "b": "is it red", "label": "yes"}
READ = {  # family, pool -> tokens (of a decoder behind |), and the token that stands for them
    ("bert", None): ("[CLS] the sun [SEP] is it red [SEP]", 0),
    ("bert", "last"): ("[CLS] the sun [SEP] is it red [SEP]", 7),
    ("gpt2", None): ("the sun [SEP] is it red", 5),
    ("t5", None): ("the sun [SEP] is it red </s> | [PAD]", 0),
    ("glm", None): ("[CLS] the sun [SEP] is it red [MASK] [PAD] <|startofpiece|>", 0),
    ("glm", "last"): ("[CLS] the sun [SEP] is it red [MASK] [PAD] <|startofpiece|>", 8),
    ("glm", "behind"): ("[CLS] the sun [SEP] is it red [MASK] [PAD] <|startofpiece|>", 9),
}


@pytest.mark.parametrize(("family", "pool"), READ)
def test_a_family_reads_two_texts_in_its_own_way_and_one_token_stands_for_them(family, pool, tmp_path) -> None:
    write_rows(tmp_path, train=[PAIR, {**PAIR, "label": "no"}])
    task, _ = task_of(tmp_path, family, text_fields=["a", "b"], pool=pool)
    assert task.config.labels == ["no", "yes"]
    batch = task.collater()([task.load_split("train").sample(1, 0)])
    expected, place = READ[family, pool]
    found = spelled(task, batch.inputs["tokens"][0])
    if "decoder_tokens" in batch.inputs:
        found += " | " + spelled(task, batch.inputs["decoder_tokens"][0])
    assert found == expected
    assert (batch.places.tolist(), batch.targets.tolist()) == ([place], [1])
    if family == "bert":
        assert batch.inputs["token_types"].tolist() == [[0] * 4 + [1] * 4]
    if family == "glm":
        assert batch.inputs["context_length"].tolist() == [9]


@pytest.mark.parametrize(
    ("family", "expected"),
    [("bert", "[CLS] the sun [SEP] is it [SEP] red [SEP]"), ("gpt2", "the sun [SEP] is it [SEP] red")],
)
def test_two_texts_in_front_of_choices_stay_apart(family, expected, tmp_path) -> None:
    write_rows(tmp_path, train=[{"a": "the sun", "b": "is it", "choices": ["red", "blue"], "label": 0}])
    task, _ = task_of(tmp_path, family, kind="multiple_choice", text_fields=["a", "b"])
    assert spelled(task, task.load_split("train").sample(1, 0)["rows"][0]["tokens"]) == expected
    write_rows(tmp_path, train=[{"a": "the sun", "b": "is it", "one": "red", "two": "blue", "label": 0}])
    fields = {"text_fields": ["a", "b"], "choice_fields": ["one", "two"]}
    task, _ = task_of(tmp_path, family, kind="multiple_choice", **fields)
    first, second = task.load_split("train").sample(1, 0)["rows"]
    assert spelled(task, first["tokens"]) == expected
    assert spelled(task, second["tokens"]) == expected.replace("red", "blue")


@pytest.mark.parametrize("family", LAYOUTS)
def test_words_are_labelled_at_their_first_tokens(family, tmp_path) -> None:
    write_rows(tmp_path, train=[{"text": ["the", "catsun", "is"], "label": ["O", "B-X", "O"]}])
    task, _ = task_of(tmp_path, family, kind="token_labels")
    batch = task.collater()([task.load_split("train").sample(1, 0)])
    tokens = batch.placed_tokens[0][batch.places]
    assert spelled(task, tokens) == "the cat is"
    assert batch.targets.tolist() == [1, 0, 1]
    assert batch.extras["begins"].tolist() == [True, False, False]


class OtherTokens:
    """A framing whose model reads other tokens than it is given."""

    def ask(self, ids: Any) -> Any:
        return ids

    def first(self, request: Any) -> Any:
        return SimpleNamespace(own=(), source=(), tokens=[1, 2], inputs={}, prefix=0)


def test_words_are_found_where_they_are_labelled_alone(tmp_path) -> None:
    tokenizer = make_tokenizer(tmp_path / "tokenizer", "with_end")
    assert _Framed(OtherTokens(), tokenizer, reads_words=False)([5], []).places == {"last": 1}
    with pytest.raises(UserError, match="`kind` token_labels: the model reads other tokens than those of the words"):
        _Framed(OtherTokens(), tokenizer, reads_words=True)([5], [])


@pytest.mark.parametrize("family", slow_but(["bert", "t5"], list(LAYOUTS)))
@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_of_a_batch_is_that_of_its_rows_and_padding_changes_nothing(kind, family, tmp_path) -> None:
    write_rows(tmp_path, train=rows_of(kind, 5))
    task, model = task_of(tmp_path, family, kind=kind)
    criterion, dataset = Classification(ClassificationLossConfig()), task.load_split("train")
    samples = [dataset.sample(1, index) for index in range(5)]
    with torch.no_grad():
        whole = criterion(model, task.collater()(samples))
        alone = [criterion(model, task.collater()([sample])) for sample in samples]
        empty = criterion(model, task.collater()(samples).without_loss())
    assert float(whole.loss) == pytest.approx(sum(float(one.loss) for one in alone), rel=1e-5)
    assert float(whole.num_targets) == criterion.count(task.collater()(samples))
    assert (float(empty.loss), float(empty.num_targets)) == (0.0, 0.0)


def test_losses_are_those_of_their_formulas(tmp_path) -> None:
    """Cross entropy, weighted; squared error; softmax over choices: from the head's scores, one row at a time."""
    for kind in KINDS[:3]:
        folder = write_rows(tmp_path / kind, train=rows_of(kind, 6))
        weighted = {"class_weights": ["auto"]} if kind == "single_label" else {}
        task, model = task_of(folder, "bert", kind=kind, **weighted)
        dataset, collater, expected = task.load_split("train"), task.collater(), 0.0
        with torch.no_grad():
            whole = collater([dataset.sample(1, number) for number in range(6)])
            found = Classification(ClassificationLossConfig())(model, whole)
            for number, row in enumerate(rows_of(kind, 6)):
                batch = collater([dataset.sample(1, number)])
                scores = model(**batch.inputs)[:, 0]  # [B, K]
                if kind == "regression":
                    expected += float((scores[0, 0] - row["label"]) ** 2)
                elif kind == "multiple_choice":
                    expected -= float(scores[:, 0].log_softmax(0)[row["label"]])
                else:
                    names = [one["label"] for one in rows_of(kind, 6)]
                    weight = 6 / 3 / names.count(row["label"])
                    expected += weight * float(F.cross_entropy(scores[0], batch.targets[0]))
        assert float(found.loss) == pytest.approx(expected, rel=1e-5), kind


# -- what does not fit -----------------------------------------------------------------------------------------

GOOD = [{"text": "the sun", "label": "a"}, {"text": "the cat", "label": "b"}]
WORDY = {"text": ["the", "sun"], "label": ["O", "B-X"]}
CHOICE = {"text": "it", "choices": ["red", "blue"], "label": 0}
BAD: list[tuple[dict[str, Any], list[Any], str]] = [
    ({}, [GOOD[0]], r"train.jsonl: every row has the label 'a'; rows to learn from need two, or name both by `labels`"),
    ({}, [{"text": "it", "label": one} for one in (0, 1, -1)], r"train.jsonl:3: .* is -1, which means"),
    ({"labels": ["0", "1"]}, [{"text": "it", "label": -1}], r"train.jsonl:1: field 'label' is missing"),
    ({}, [*GOOD, {"text": "it"}], r"train.jsonl:3: field 'label' is missing"),
    ({}, [*GOOD, {"label": "a"}], r"train.jsonl:3: field 'text' is missing"),
    ({}, [*GOOD, {"text": " ", "label": "a"}], r"train.jsonl:3: field 'text' is empty"),
    ({}, [*GOOD, {"text": "it", "label": ""}], r"train.jsonl:3: field 'label' is empty"),
    ({}, [*GOOD, {"text": "it", "label": 0.5}], r"train.jsonl:3: field 'label' is 0.5; it must be a text or a whole"),
    ({"labels": ["a", "c"]}, GOOD, r"train.jsonl:2: field 'label' is 'b'; it must be one of 'a', 'c' \(`labels`\)"),
    ({"class_weights": ["c=2"]}, GOOD, r"`class_weights` c=2: 'c' is none of the labels a, b"),
    ({"class_weights": ["auto"], "labels": ["a", "b", "c"]}, GOOD, r"no row of train has the label 'c'"),
    ({"kind": "regression"}, GOOD, r"train.jsonl:1: field 'label' is 'a'; it must be a number"),
    ({"kind": "regression"}, [{"text": "it", "label": float("nan")}], r"train.jsonl:1: .* is nan; it must be a finite"),
    ({"kind": "multiple_choice"}, [CHOICE | {"label": 2}], r"train.jsonl:1: field 'label' is 2; it must be one of 0"),
    ({"kind": "multiple_choice"}, [CHOICE | {"choices": ["red"]}], r"train.jsonl:1: field 'choices' has one choice"),
    ({"kind": "token_labels"}, [WORDY, WORDY | {"label": ["O"]}], r"train.jsonl:2: .* has 1 labels for 2 words"),
    ({"kind": "token_labels"}, [WORDY, WORDY | {"text": ["a", 1]}], r"train.jsonl:2: field 'text' has 1 at place 1"),
    ({"kind": "token_labels"}, [WORDY | {"text": []}], r"train.jsonl:1: field 'text' is empty"),
    ({"pool": "behind"}, GOOD, r"`pool` behind: the model bert has first or last; choose one"),
]


@pytest.mark.parametrize(("options", "rows", "message"), BAD)
def test_what_does_not_fit_is_said_with_its_place(options, rows, message, tmp_path) -> None:
    write_rows(tmp_path, train=rows)
    with pytest.raises(UserError, match=message):
        task_of(tmp_path, "bert", **options)[0].load_split("train")


def test_a_text_needs_room_and_is_cut_at_its_end(tmp_path, caplog) -> None:
    caplog.set_level("INFO")
    write_rows(tmp_path, train=[{"a": "the sun is", "b": "red", "label": "x"}, {"a": "it", "b": "is", "label": "y"}])
    task, _ = task_of(tmp_path, "bert", text_fields=["a", "b"], seq_length=5)
    assert spelled(task, task.load_split("train").sample(1, 0)["rows"][0]["tokens"]) == "[CLS] the [SEP] red [SEP]"
    assert "train.jsonl: 1 of 2 rows are cut to `seq_length` 5" in caplog.text
    task, _ = task_of(tmp_path, "glm", text_fields=["a", "b"], seq_length=4)
    with pytest.raises(UserError, match=r"train.jsonl:1: `seq_length` 4 leaves no room for a text beside the 5 tokens"):
        task.load_split("train")


def test_labels_and_the_most_choices_are_those_of_all_data_sets(tmp_path) -> None:
    for name, labels, choices in (("a", "xy", ["is", "it"]), ("b", "yz", ["sun", "red", "is", "it"])):
        rows = [{"text": "the sun", "label": label, "choices": choices, "right": 1} for label in labels]
        write_rows(tmp_path / name, train=rows)
    data = f"{tmp_path}/a,{tmp_path}/b"
    with pytest.raises(UserError, match="^[^ ]*a/train.jsonl, [^ ]*b/train.jsonl: every row has the label '1';"):
        task_of(tmp_path, "bert", data, label_field="right")
    task, _ = task_of(tmp_path, "bert", data, class_weights=["auto"])
    assert task.config.labels == ["x", "y", "z"]
    assert task.config.class_weights == ["x=1.33333", "y=0.666667", "z=1.33333"]
    dataset = task.load_split("train")
    assert [dataset.sample(1, index)["targets"].tolist() for index in range(4)] == [[0], [1], [1], [2]]
    task, _ = task_of(tmp_path, "bert", data, kind="multiple_choice", label_field="right")
    dataset = task.load_split("train")
    indices, sizes = dataset.epoch_order(1)
    batch = task.collater()([dataset.sample(1, index) for index in indices])
    assert sorted(indices - len(dataset)) == [0, 1, 2, 3]
    assert batch.inputs["tokens"].numel() <= len(indices) * max(sizes)
    assert set(sizes) == {4 * batch.inputs["tokens"].shape[1]}


def test_options_that_do_not_fit_are_said() -> None:
    def problems(**options: Any) -> str:
        return " ".join(mistakes(ClassificationConfig(**options)))

    assert "class_weights has 'a'; give auto alone, or NAME=W" in problems(class_weights=["a"])
    assert "class_weights has 'a=-1'" in problems(class_weights=["b=1", "a=-1"])
    assert "labels has 'a' twice" in problems(labels=["a", "b", "a"])
    assert "text_fields has 3 fields; single_label needs 1 or 2" in problems(text_fields=["a", "b", "c"])
    assert "head_dropout is 1.0; it must be at least 0 and below 1" in problems(head_dropout=1.0)
    assert problems(class_weights=["auto"]) == problems(class_weights=["a=b=2.5"]) == ""


def test_a_bad_row_ends_the_command_before_it_writes(tmp_path, here, bases) -> None:
    data = write_rows(tmp_path / "rows", train=GOOD, valid=[{"text": "it", "label": "c"}])
    given = [*learning("classification", bases("bert")), "--save-dir", tmp_path / "run", "--max-update", 1]
    *_, said = here(train.main, data, *given, code=2)
    assert "valid.jsonl:1: field 'label' is 'c'; it must be one of 'a', 'b' (--labels)" in said
    assert not (tmp_path / "run").exists()


# -- runs ------------------------------------------------------------------------------------------------------

METRICS = dict(zip(KINDS, ("accuracy", "pearson", "accuracy", "entity_f1"), strict=True))
# Numbers and choices take six times the updates, so two families each learn them; losses and ranks have all pairs.
LEARNED = [(kind, name) for kind in ("single_label", "token_labels") for name in LAYOUTS]
LEARNED += [("regression", "gpt2"), ("regression", "t5"), ("multiple_choice", "bert"), ("multiple_choice", "glm")]


def evaluated(here, run: Path, data: Path, out: Path) -> tuple[dict[str, Any], list[Any]]:
    """Metrics of a model on the split valid, and what it chooses of each row."""
    given = ["--path", run, "--evaluation", "classification", "--data", data / "valid.jsonl", "--output", out]
    here(evaluate.main, *given, "--device", "cpu", code=0)
    (result,) = json.loads((out / "results.json").read_text())["results"]
    lines = (out / "predictions.jsonl").read_text().splitlines()
    return result["metrics"], [json.loads(line)["chosen"] for line in lines]


@pytest.mark.parametrize(
    ("kind", "family"),
    slow_but([("single_label", "bert")], LEARNED),
)
def test_rows_are_learned_by_heart_and_their_checkpoint_is_opened_by_all_commands(
    kind, family, tmp_path, here, learn, bases
) -> None:
    rows = rows_of(kind, 24)
    data = write_rows(tmp_path / "rows", train=rows, valid=rows)
    run, metric = tmp_path / "run", METRICS[kind]
    rarely = ["--validate-interval", 0, "--validate-interval-updates", 30, "--save-interval", 0]
    best = ["--best-metric", metric]
    updates = {"single_label": 120, "token_labels": 180}.get(kind, 720)
    learn("classification", data, bases(family), run, "--kind", kind, "--max-update", updates, *rarely, *best)
    valid = records_of(run, "valid")
    least = 0.99 if kind == "regression" else 1.0
    assert max(record[metric] for record in valid) >= least
    assert "ppl" not in valid[-1]
    section = read_config(run / "checkpoint_best")
    names = ["bad", "good", "so"] if kind == "single_label" else ["B-X", "I-X", "O"] if kind == "token_labels" else []
    assert section["task"]["labels"] == names
    assert section["head"] == {"num_outputs": len(names) or 1, "head_layer": True, "head_dropout": 0.1}
    model = ftk.load_model(run, "cpu")
    assert model.head(torch.zeros(2, model.config.hidden_size)).shape == (2, len(names) or 1)
    (tmp_path / "rows" / "train.jsonl").unlink()  # the labels are those of the checkpoint
    _, out, _ = here(validate.main, data, "--path", run / "checkpoint_best", code=0)
    figures = dict(line.split(maxsplit=1) for line in out.splitlines() if line.strip())
    assert float(figures[metric]) >= least
    metrics, chosen = evaluated(here, run, data, tmp_path / "out")
    assert metrics[metric]["value"] >= (least if kind == "regression" else 100.0)  # of the others percent
    if kind == "regression":
        assert np.corrcoef(chosen, [row["label"] for row in rows])[0, 1] > least
    else:
        assert chosen == [row["label"] for row in rows]
    lines = ["\t".join([row["text"], *row.get("choices", ())]) if kind != "token_labels" else " ".join(row["text"])
             for row in rows]  # fmt: skip
    asked = "".join(f"{line}\n" for line in lines).encode()
    _, out, _ = here(generate.main, "--path", run, "--input", "-", "--device", "cpu", stdin=asked, code=0)
    for row, line in zip(rows, out.splitlines(), strict=True):
        if kind == "single_label":
            label, probability = line.split()
            assert label == row["label"]
            assert 0.5 < float(probability) <= 1.0
        elif kind == "token_labels":
            assert line == " ".join(f"{word}/{label}" for word, label in zip(row["text"], row["label"], strict=True))
        elif kind == "multiple_choice":
            assert line.startswith(row["choices"][row["label"]])
        else:
            assert abs(float(line) - row["label"]) < 0.25


def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(tmp_path, learn, bases) -> None:
    data = write_rows(tmp_path / "rows", train=rows_of("single_label", 12), valid=rows_of("single_label", 4))
    options = ["--class-weights", "auto", "--dropout", 0.1, "--batch-size", 5, "--label-smoothing", 0.1]
    for name, updates in (("whole", 8), ("parts", 3), ("parts", 8)):
        learn("classification", data, bases("bert"), tmp_path / name, *options, "--max-update", updates)
    whole = tmp_path / "whole" / "checkpoint_last"
    assert {"classifier.dense.weight", "classifier.output.bias"} < load_model_tensors(whole).keys()
    assert_same_weights(tmp_path / "parts" / "checkpoint_last", whole)


def test_the_head_is_trained_alone_or_beside_an_adapter_which_merges(tmp_path, bases, here, learn) -> None:
    data = write_rows(tmp_path / "rows", train=rows_of("single_label", 12), valid=rows_of("single_label", 4))
    before = load_model_tensors(bases("gpt2") / "checkpoint_1")
    for name, options in (("alone", ["--freeze", "[!c]*"]), ("lora", ["--adapter", "lora"])):
        learn("classification", data, bases("gpt2"), tmp_path / name, *options, "--max-update", 2)
        after = load_model_tensors(tmp_path / name / "checkpoint_last")
        assert all(torch.equal(after[key], before[key]) for key in before.keys() & after.keys())
        assert after["classifier.output.bias"].abs().max() > 0
    adapter = tmp_path / "lora" / "checkpoint_last" / "adapter" / "adapter_config.json"
    assert json.loads(adapter.read_text())["modules_to_save"] == ["classifier.dense", "classifier.output"]
    here(checkpoint.main, "merge", tmp_path / "lora", tmp_path / "merged", code=0)
    tokens = torch.arange(3, 9)[None]
    with torch.no_grad():
        found, expected = (ftk.load_model(tmp_path / name, "cpu")(tokens) for name in ("merged", "lora"))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    *_, error = here(checkpoint.main, "convert", "--to", "hf", tmp_path / "merged", tmp_path / "hf", code=2)
    assert "classifiers of one label or number from the first token of an encoder" in error


@pytest.mark.parametrize(
    ("kind", "family"), slow_but([("single_label", "bert")], [(kind, name) for kind in KINDS for name in LAYOUTS])
)
def test_ranks_find_what_one_process_finds(kind, family, tmp_path, bases) -> None:
    rows = rows_of(kind, 26)
    data = write_rows(tmp_path / "rows", train=rows, valid=rows[:7])
    flags = [*learning("classification", bases(family)), "--kind", kind, "--max-epoch", 1, "--no-save"]
    flags += ["--head-dropout", 0, "--lr", 3e-4]
    flags += ["--activation-dropout", 0, "--embedding-dropout", 0] if family == "t5" else []
    figures = ("loss", "accuracy", "macro_f1", "entity_f1", "pearson", "spearman", "num_targets", "gnorm")
    layouts = {name: one for name, one in PARALLEL.items() if family != "t5" or name != "P2"}
    assert_ranks_agree(data, tmp_path, flags, figures, layouts, least=3, rel=1e-3 if kind == "regression" else 1e-4)


def test_words_that_were_cut_count_neither_in_a_validation_nor_in_an_evaluation(tmp_path, here, learn, bases) -> None:
    rows = rows_of("token_labels", 6)
    data, run = write_rows(tmp_path / "rows", train=rows, valid=rows), tmp_path / "run"
    flags = ["--kind", "token_labels", "--seq-length", 5, "--max-update", 1]
    *_, valid = learn("classification", data, bases("bert"), run, *flags)
    metrics, chosen = evaluated(here, run, data, tmp_path / "out")
    assert metrics["accuracy"]["value"] / 100 == pytest.approx(valid["accuracy"])
    assert {*map(len, chosen)} == {3}


def test_a_teacher_scores_the_same_labels_or_is_refused(tmp_path, bases, here, learn) -> None:
    data = write_rows(tmp_path / "rows", train=GOOD, valid=GOOD)
    numbers = write_rows(tmp_path / "numbers", train=rows_of("regression", 2), valid=rows_of("regression", 2))
    task, base, taught = "classification", bases("bert"), ["--max-update", 1, "--teacher", tmp_path / "run"]
    learn(task, data, base, tmp_path / "run", "--max-update", 1)
    learn(task, numbers, base, tmp_path / "number", "--kind", "regression", "--max-update", 1)
    learn(task, data, base, tmp_path / "small", *taught)
    (valid,) = records_of(tmp_path / "small", "valid")
    assert {"accuracy", "macro_f1", "mcc", "teacher_kl"} <= valid.keys()
    refused: list[tuple[Path, list[object], str]] = [
        (data, ["--teacher", base], "has the output layer of its family, and the run a head of 2 scores"),
        (data, ["--labels", "a", "b", "c"], "has a head of 2 scores, and the run a head of 3 scores"),
        (data, ["--labels", "b", "a"], "was trained with `labels` a, b, and the run has b, a"),
        (numbers, ["--kind", "regression", "--teacher", tmp_path / "number"], "predicts one number for each text"),
    ]
    for rows, options, message in refused:
        given = [*learning(task, base), *taught, *options, "--save-dir", tmp_path / "none"]
        assert message.replace("`labels`", "--labels") in here(train.main, rows, *given, code=2)[2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--kind regression --label-smoothing 0.1", "--label-smoothing has no effect without --kind"),
        ("--kind token_labels --pool last", "--pool has no effect without --kind"),
        ("--evaluate-with classification", "its metrics stand in each validation already; leave it out"),
    ],
)
def test_options_without_effect_are_refused(options, message, tmp_path, bases, here) -> None:
    data = write_rows(tmp_path / "rows", train=GOOD, valid=GOOD)
    given = [*learning("classification", bases("bert")), "--max-update", 1, "--save-dir", tmp_path / "run"]
    assert message in here(train.main, data, *given, *options.split(), code=2)[2]


def test_rows_are_shown(tmp_path, here, bases) -> None:
    data = write_rows(tmp_path / "rows", train=[PAIR, {**PAIR, "label": "no"}])
    given = ["--task", "classification", "--tokenizer-folder", bases("bert") / "checkpoint_1"]
    _, out, _ = here(data_command.main, "show", data, *given, "--text-fields", "a", "b", code=0)
    assert out.splitlines() == [
        f"row 0 of 2: {data}/train.jsonl:1",
        "  the sun",
        "  is it red",
        "  = yes",
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("the sun", "the model is asked with a, b, with tabs between; this line has 1 texts"),
        ("\tit", "a text is empty"),
    ],
)
def test_a_line_that_cannot_be_classified_is_said(line, message, tmp_path) -> None:
    write_rows(tmp_path, train=[PAIR, {**PAIR, "label": "no"}])
    task, _ = task_of(tmp_path, "bert", text_fields=["a", "b"])
    with pytest.raises(UserError, match=message):
        task.config.of_prompt(line)
