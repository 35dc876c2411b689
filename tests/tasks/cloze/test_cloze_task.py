"""The task cloze: samples by hand, batches, and runs of ftk-train on rows of JSON lines."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

import ftk
from ftk.checkpoint.adapter import FACTS
from ftk.checkpoint.load import load_model_tensors
from ftk.criterions.choice_cross_entropy import ChoiceCrossEntropy, ChoiceCrossEntropyConfig
from ftk.data.batches.iterator import EpochBatchIterator
from ftk.data.supervised.corpus import RowsConfig, RowsCorpus
from ftk.errors import UserError
from ftk.models import build_model
from ftk.modules.adapters import PromptIds
from ftk.tasks.cloze.task import ClozeConfig, ClozeTask
from ftk_cli.checkpoint import main as checkpoint_command
from ftk_cli.data import main as data_command
from ftk_cli.evaluate import main as evaluate_command
from ftk_cli.generate import main as generate_command
from ftk_cli.train import main as train_command
from ftk_cli.validate import main as validate_command
from tests.distributed import run_jobs
from tests.records import assert_same_weights, records_of
from tests.tasks.cloze.made import (
    LAYOUTS,
    SHAPES,
    SHARED,
    boolq_rows,
    copa_rows,
    make_model,
    make_tokenizer,
    write_rows,
)
from tests.tiers import slow_but
from tests.trainer.parallel_jobs import picked, run_all, run_records

FAMILIES = ("glm", "gpt2", "t5")
BOOLQ = {"passage": "The sun is red.", "question": "is it red", "label": True, "idx": 0}
COPA = {"premise": "It was wet.", "choice1": "The rain was old.", "choice2": "No cat.", "question": "cause"}
COPA |= {"label": 1, "idx": 0}


def task_of(folder: Path, name: str, family: str = "glm", **options: Any) -> ClozeTask:
    """The task on the rows of a folder, for a model of a family."""
    tokenizer = make_tokenizer(folder / f"tokenizer-{family}", LAYOUTS[family])
    config = ClozeConfig(cloze=name, **{"seq_length": 64, **options})
    task = ClozeTask(config, corpus=RowsCorpus(RowsConfig(data=str(folder)), tokenizer), seed=1)
    task.for_model(model_of(family, tokenizer).config)
    return task


def model_of(family: str, tokenizer: Any) -> Any:
    shape = {"vocab_size": tokenizer.padded_vocab_size(8), **SHARED, **SHAPES[family]}
    if family == "t5":
        del shape["embedding_dropout"]
    torch.manual_seed(1)
    return build_model(family, **shape).eval()


def spelled(task: ClozeTask, tokens: Any) -> str:
    return " ".join(task.tokenizer.token_text(token) for token in np.asarray(tokens).tolist())


# -- samples ---------------------------------------------------------------------------------------------------


def test_a_sample_of_words_is_one_row_with_one_target(tmp_path) -> None:
    task = task_of(write_rows(tmp_path, train=[BOOLQ]), "boolq")
    sample = task.load_training_split("train").sample(1, 0)
    (row,) = sample["rows"]
    text = "[CLS] based on the following passage is it red ? [MASK] . the sun is red . [PAD]"
    assert spelled(task, row["tokens"]) == f"{text} <|startofpiece|>"
    length = len(text.split())
    assert row["context_length"] == length
    assert row["position_ids"].tolist() == [[*range(length), text.split().index("[MASK]")], [*[0] * length, 1]]
    assert row["loss_mask"].tolist() == [*[False] * length, True]
    assert spelled(task, row["targets"][-1:]) == "yes"
    assert (spelled(task, sample["token"]), sample["right"].tolist()) == ("no yes", [False, True])


@pytest.mark.parametrize(
    ("family", "pattern", "prompts", "expected"),
    [  # as tasks/superglue/pvp.py of Du et al. 2022 deals them: the same number to each place, until none is left
        ("glm", 4, PromptIds(range(200, 200), range(200, 203)), "P200 is it red ? P201 [MASK] . P202 the"),
        (
            "glm",
            4,
            PromptIds(range(200, 202), range(202, 206)),
            "P200 P201 {} P202 P203 is it red ? P204 P205 [MASK] . the",
        ),
        (
            "gpt2",
            0,
            PromptIds(range(200, 200), range(200, 205)),
            "P200 P201 the sun is red . P202 P203 {} is it red ? {} P204",
        ),
    ],
)
def test_prompt_tokens_are_dealt_to_the_places_of_a_pattern(tmp_path, family, pattern, prompts, expected) -> None:
    task = task_of(write_rows(tmp_path, train=[BOOLQ]), "boolq", family, pattern=pattern)
    task.for_prompts(prompts)
    (row,) = task.load_training_split("train").sample(1, 0)["rows"]
    words = " ".join(
        f"P{token}" if token >= 200 else task.tokenizer.token_text(token) for token in row["tokens"].tolist()
    )
    plain = task_of(tmp_path, "boolq", family, pattern=pattern).load_training_split("train").sample(1, 0)["rows"][0]
    (before,) = [spelled(task, plain["tokens"])]
    assert [word for word in words.split() if word[:2] != "P2"] == before.split()
    for part in expected.split(" {} "):
        assert part in words
    if "position_ids" in row:
        assert row["position_ids"].reshape(-1)[: len(row["tokens"]) - 1].tolist() == [*range(len(row["tokens"]) - 1)]


def test_a_pattern_without_a_place_takes_no_prompt_tokens_but_in_front(tmp_path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text("like: boolq\npatterns: {7: '{passage:shorten} So{ question}?{gap}.'}\n")
    task = task_of(write_rows(tmp_path / "rows", train=[BOOLQ]), str(file), pattern=7)
    task.for_prompts(PromptIds(range(200, 202)))
    (row,) = task.load_training_split("train").sample(1, 0)["rows"]
    assert row["tokens"][1:3].tolist() == [200, 201]
    task.for_prompts(PromptIds(dealt=range(200, 202)))
    with pytest.raises(UserError, match=r"`num_prompt_tokens` 2: the pattern has no \{prompt\} that is read"):
        task.load_training_split("train")


def test_a_sample_of_texts_is_a_row_for_each_with_its_end(tmp_path) -> None:
    task = task_of(write_rows(tmp_path, train=[COPA]), "copa")
    dataset = task.load_training_split("train")
    sample = dataset.sample(1, 0)
    text = '[CLS] " the rain was old " or " no cat " ? it was wet because [MASK] . [PAD]'
    for row, answer in zip(sample["rows"], ("the rain was old", "no cat"), strict=True):
        assert spelled(task, row["tokens"]) == f"{text} <|startofpiece|> {answer}"
        assert spelled(task, row["targets"][row["loss_mask"]]) == f"{answer} <|endofpiece|>"
        place, size = text.split().index("[MASK]"), len(answer.split()) + 1
        assert row["position_ids"][:, -size:].tolist() == [[place] * size, [*range(1, size + 1)]]
    assert (sample["right"].tolist(), sample["divisor"].tolist()) == ([False, True], [1.0, 1.0])
    assert dataset.sample(1, 1)["right"].tolist() == [True, False]
    assert dataset.sizes(1).tolist() == [2 * (len(text.split()) + 5)] * 2
    assert [len(row["tokens"]) for row in dataset.sample(7, 0)["rows"]] == [
        len(row["tokens"]) for row in sample["rows"]
    ]


def test_a_batch_numbers_questions_and_candidates_and_loses_its_loss(tmp_path) -> None:
    others = {"candidates": [{"text": "Pete"}, {"text": "the old cat"}]}
    target = {"span1_text": "John", "span2_text": "he", "span2_index": 3, "span1_index": 0}
    rows = [{"text": "John told Pete he is new", "target": target, "label": True, **more} for more in (others, {})]
    task = task_of(write_rows(tmp_path, train=rows), "wsc")
    dataset, collater = task.load_training_split("train"), task.collater()
    batch = collater([dataset.sample(1, 0), dataset.sample(1, 1)])
    assert batch.extras["question"].tolist() == [0, 0, 0, 1]
    assert batch.extras["right"].tolist() == [True, False, False, True]
    assert batch.extras["candidate"].tolist() == [0, 0, 1, 1, 2, 2, 2, 2, 3, 3]
    assert batch.extras["divisor"].tolist() == [2.0, 2.0, 4.0, 2.0]
    assert batch.extras["answerable"].tolist() == [1.0, 1.0]
    assert batch.weights is not None
    assert batch.weights.tolist() == [1.0, 1.0, *[0.0] * 6, 1.0, 1.0]
    assert batch.inputs["tokens"].size(0) == 4
    empty = batch.without_loss()
    assert [len(part) for part in (empty.targets, empty.places, *empty.extras.values())] == [0] * 7
    assert ChoiceCrossEntropy(ChoiceCrossEntropyConfig()).count(batch) == 2


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["boolq", "copa"])
def test_the_loss_of_a_batch_is_that_of_its_questions_and_padding_changes_nothing(name, family, tmp_path) -> None:
    rows = (boolq_rows if name == "boolq" else copa_rows)(5)
    task = task_of(write_rows(tmp_path, train=rows), name, family, pattern=0)
    model, criterion = model_of(family, task.tokenizer), ChoiceCrossEntropy(ChoiceCrossEntropyConfig())
    dataset, collater = task.load_training_split("train"), task.collater()
    samples = [dataset.sample(1, index) for index in range(len(dataset))]
    with torch.no_grad():
        whole = criterion(model, collater(samples))
        alone = [criterion(model, collater([sample])) for sample in samples]
    assert float(whole.loss) == pytest.approx(sum(float(one.loss) for one in alone), rel=1e-5)
    assert float(whole.num_targets) == len(samples)
    assert float(whole.meters["accuracy"][0]) == sum(float(one.meters["accuracy"][0]) for one in alone)


def test_a_copa_row_and_its_mirror_have_the_same_loss_where_no_choice_is_named(tmp_path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text("like: copa\npatterns: [{text: '{premise:bare:shorten}{joiner}{gap}.', candidates: "
                    "['{ choice1:lower:bare}', '{ choice2:lower:bare}']}]")  # fmt: skip
    task = task_of(write_rows(tmp_path / "rows", train=copa_rows(4)), str(file))
    model, criterion = model_of("glm", task.tokenizer), ChoiceCrossEntropy(ChoiceCrossEntropyConfig())
    dataset, collater = task.load_training_split("train"), task.collater()
    with torch.no_grad():
        losses = [float(criterion(model, collater([dataset.sample(1, index)])).loss) for index in range(8)]
    assert losses[::2] == pytest.approx(losses[1::2], rel=1e-5)
    assert len(set(losses[::2])) == 4


def test_batches_stay_within_max_tokens_whatever_candidates_their_questions_have(tmp_path) -> None:
    target = {"span1_text": "John", "span2_text": "he", "span2_index": 3, "span1_index": 0}
    rows = []
    for number in range(12):
        candidates = [{"text": "cat " * size} for size in range(1, 2 + number % 5)]
        text = "John told Pete he" + " is" * (7 * number % 30)
        rows.append({"text": text, "target": target, "label": True, "candidates": candidates})
    task = task_of(write_rows(tmp_path, train=rows), "wsc")
    dataset = task.load_training_split("train")
    limit = 2 * int(dataset.sizes(1).max())
    batches = EpochBatchIterator(dataset, task.collater(), max_tokens=limit, seed=1).batches()
    sizes = [batch.inputs["tokens"].numel() for batch in batches]
    assert max(sizes) <= limit
    assert len(sizes) < 12


# -- what does not fit -----------------------------------------------------------------------------------------


def test_what_does_not_fit_is_said(tmp_path, caplog) -> None:
    folder = write_rows(tmp_path, train=[BOOLQ], valid=[{**BOOLQ, "label": False}], test=[{**COPA}])
    with pytest.raises(UserError, match="the model bert writes no answers"):
        task_of(folder, "boolq", "bert")
    with pytest.raises(UserError, match="pattern 4 of boolq has text after the gap, .* use `pattern` 0 or 1"):
        task_of(folder, "boolq", "gpt2", pattern=4)
    with pytest.raises(UserError, match="`score_end` has no effect with the scoring restricted_logits"):
        task_of(folder, "boolq", score_end=True)
    task = task_of(folder, "boolq", seq_length=600)
    model = model_of("glm", task.tokenizer)
    with pytest.raises(UserError, match="`seq_length` 600 is beyond the model's 96 positions"):
        task.complete_model_config(model.config)
    with pytest.raises(UserError, match="unknown cloze task 'bolq'; did you mean 'boolq'"):
        task_of(folder, "bolq")
    write_rows(folder, valid=[{key: value for key, value in BOOLQ.items() if key != "label"}])
    with pytest.raises(UserError, match=r"valid.jsonl:1: field 'label' is missing; without labels there is no loss"):
        task_of(folder, "boolq").load_split("valid")
    assert task_of(folder, "boolq").questions("valid")[0].right is None
    with pytest.raises(
        UserError, match=r"train.jsonl:1: the pattern and the candidate ' No' take .* raise `seq_length`"
    ):
        task_of(folder, "boolq", seq_length=9).load_training_split("train")
    target = {"span1_text": "John", "span2_text": "he", "span2_index": 3}
    row = {"text": "John told Pete he", "target": target, "label": True}
    write_rows(folder, train=[{**row, "label": False}])
    with pytest.raises(UserError, match="train.jsonl: wsc finds no question to learn from"):
        task_of(folder, "wsc").load_training_split("train")
    write_rows(folder, train=[row])
    task_of(folder, "wsc").load_training_split("train")
    assert "cross_entropy is always 0" in caplog.text


def test_a_vocabulary_that_holds_the_tokens_stays_as_it_is(tmp_path) -> None:
    task = task_of(write_rows(tmp_path, train=[BOOLQ]), "boolq")
    config = model_of("glm", task.tokenizer).config
    assert task.complete_model_config(config) is config
    smaller = type(config)(**{**vars(config), "vocab_size": 8})
    assert task.complete_model_config(smaller).vocab_size == task.tokenizer.padded_vocab_size()


# -- runs ------------------------------------------------------------------------------------------------------

LEARN = ["--lr", 3e-3, "--lr-scheduler", "constant", "--batch-size", 8, "--device", "cpu", "--clip-norm", 1]
LEARN += ["--log-interval", 1, "--seq-length", 64]


def train(data: Path, base: Path, run: Path, *options: object) -> list[dict[str, Any]]:
    """The records of a run."""
    given = ["--task", "cloze", "--finetune-from", base, *LEARN, "--save-dir", run, *options]
    assert train_command([*map(str, (data, *given))]) == 0
    return records_of(run)


@pytest.mark.parametrize(
    ("name", "family"),
    slow_but([("boolq", "glm")], [(n, f) for n in ("boolq", "copa") for f in FAMILIES]),
)
def test_rows_are_learned_by_heart_and_validated(name, family, tmp_path, capsys, bases) -> None:
    rows = boolq_rows(16) if name == "boolq" else copa_rows(8)
    data = write_rows(tmp_path / "rows", train=rows, val=rows)
    run = tmp_path / "run"
    rarely = ["--validate-interval", 0, "--validate-interval-updates", 40, "--save-interval", 0]
    given = ["--cloze", name, "--pattern", 0, "--max-update", 120, *rarely]
    records = train(data, bases(family), run, *given, "--best-metric", "accuracy")
    valid = [record for record in records if "valid_seconds" in record]
    assert max(record["accuracy"] for record in valid) == 1.0
    assert valid[-1]["num_targets"] == len(rows)
    assert "ppl" not in valid[-1]
    capsys.readouterr()
    assert validate_command([str(data), "--path", str(run / "checkpoint_best")]) == 0
    figures = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line.strip())
    assert (figures["accuracy"], figures["num_targets"]) == ("1.0000", str(len(rows)))
    if family == "glm":  # texts are asked for as of any model of the family; the samples are no prompts
        scored = ftk.load_generator(run, "cpu").score_candidates("is it [MASK] .", [["yes"], ["no"]])
        assert [[len(answer.token_logprobs) for answer in one] for one in scored] == [[2], [2]]
        assert generate_command([str(data), "--path", str(run), "--gen-subset", "val"]) == 2
        assert "whose samples are no prompts; give texts by --input" in capsys.readouterr().err


@pytest.mark.parametrize(("family", "number"), [("glm", 4), ("gpt2", 0), ("t5", 0)])
def test_a_model_that_does_not_read_behind_the_gap_is_asked_by_a_pattern_that_ends_in_it(
    family, number, tmp_path, caplog, bases
) -> None:
    caplog.set_level("INFO", "ftk")
    data, run = write_rows(tmp_path / "rows", train=boolq_rows(8), valid=boolq_rows(4)), tmp_path / "run"
    train(data, bases(family), run, "--cloze", "boolq", "--max-update", 1)
    said = "boolq: `pattern` 0, since the model does not read the text that the usual pattern 4 has after the gap"
    assert (said in caplog.messages) == (number == 0)
    kept = yaml.safe_load((run / "checkpoint_last" / "config.yaml").read_text())["task"]["pattern"]
    assert kept == (None if number == 4 else number)
    train(data, bases(family), run, "--cloze", "boolq", "--max-update", 2)
    asked = ["--evaluation", "boolq", "--data", str(data / "valid.jsonl"), "--bootstrap", "0"]
    assert evaluate_command([*asked, "--path", str(run), "--device", "cpu", "--output", str(tmp_path / "results")]) == 0
    settings = json.loads((tmp_path / "results" / "results.json").read_text())["results"][0]["settings"]
    assert settings["pattern"] == number


def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(tmp_path, bases) -> None:
    data = write_rows(tmp_path / "rows", train=copa_rows(12), valid=copa_rows(4))
    options = ["--cloze", "copa", "--choice-loss", "mix", "--dropout", 0.1, "--batch-size", 5]
    train(data, bases("glm"), tmp_path / "whole", *options, "--max-update", 8)
    train(data, bases("glm"), tmp_path / "parts", *options, "--max-update", 3)
    train(data, bases("glm"), tmp_path / "parts", *options, "--max-update", 8, "--num-workers", 1)
    assert_same_weights(tmp_path / "parts" / "checkpoint_last", tmp_path / "whole" / "checkpoint_last")


def test_an_adapter_alone_keeps_its_task(tmp_path, bases, capsys) -> None:
    data = write_rows(tmp_path / "rows", train=boolq_rows(16), valid=boolq_rows(8))
    base, run, alone = bases("glm"), tmp_path / "run", tmp_path / "alone"
    train(data, base, run, "--cloze", "boolq", "--pattern", 2, "--adapter", "ia3", "--max-update", 2)
    assert checkpoint_command(["adapter", str(run), str(alone)]) == 0
    assert str(data) not in (alone / FACTS).read_text()
    assert checkpoint_command(["merge", str(alone), str(tmp_path / "merged"), "--base", str(base)]) == 0
    found, asked = [], ["--evaluation", "boolq", "--data", str(data / "valid.jsonl"), "--bootstrap", "0"]
    for path in ([run], [alone, "--base", base], [tmp_path / "merged"]):
        given = ["--path", *map(str, path), "--device", "cpu"]
        results = tmp_path / f"results-{len(found)}"
        capsys.readouterr()
        assert validate_command([str(data), *given, "--output-format", "json"]) == 0
        loss = json.loads(capsys.readouterr().out)["loss"]
        assert evaluate_command([*given, *asked, "--output", str(results)]) == 0
        settings = json.loads((results / "results.json").read_text())["results"][0]["settings"]
        found.append((loss, settings))
    for loss, settings in found[1:]:
        assert loss == pytest.approx(found[0][0], rel=1e-5)
        assert settings == found[0][1]
    # As from a program that says no task: that of the base.
    facts = json.loads((alone / FACTS).read_text())
    (alone / FACTS).write_text(json.dumps({key: facts[key] for key in facts if key != "config"}))
    assert validate_command([str(data), "--path", str(alone), "--base", str(base), "--device", "cpu"]) == 2
    (alone / FACTS).write_text(json.dumps({**facts, "config": [1]}))
    assert validate_command([str(data), "--path", str(alone), "--base", str(base), "--device", "cpu"]) == 2
    assert "ftk_adapter.json" in capsys.readouterr().err


@pytest.mark.parametrize("more", [[], ["--train-also", "*"]], ids=["frozen", "all"])
def test_prompt_tokens_are_learned_resumed_validated_and_evaluated(more, tmp_path, bases, capsys) -> None:
    data = write_rows(tmp_path / "rows", train=boolq_rows(16), valid=boolq_rows(8))
    given = ["--cloze", "boolq", "--adapter", "p_tuning", "--num-prompt-tokens", 3, "--prefix-prompt", 2, *more]
    base = bases("glm")
    train(data, base, tmp_path / "whole", *given, "--max-update", 4)
    train(data, base, tmp_path / "parts", *given, "--max-update", 2)
    records = train(data, base, tmp_path / "parts", *given, "--max-update", 4)
    tensors, again = (load_model_tensors(tmp_path / name) for name in ("whole", "parts"))
    assert all(torch.equal(tensors[name], again[name]) for name in tensors)
    before = load_model_tensors(base)
    assert all(torch.equal(tensors[name], before[name]) for name in before) == (not more)
    capsys.readouterr()
    assert validate_command([str(data), "--path", str(tmp_path / "whole"), "--output-format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    valid = [record for record in records if "valid_seconds" in record][-1]
    assert found["loss"] == pytest.approx(valid["loss"], rel=1e-5)
    path = ["--path", str(tmp_path / "whole"), "--device", "cpu"]
    asked = ["--evaluation", "boolq", "--data", str(data / "valid.jsonl"), "--output", str(tmp_path / "results")]
    assert evaluate_command([*path, *asked]) == 0
    results = [json.loads(line) for line in (tmp_path / "results" / "predictions.jsonl").read_text().splitlines()]
    # The loss of a question is that of its candidates' log-probabilities, read by the engine with the same prompt.
    losses = [
        torch.tensor([one["score"] for one in row["candidates"]]).log_softmax(0)[int(row["label"])] for row in results
    ]
    assert -float(sum(losses)) / len(losses) == pytest.approx(valid["loss"], rel=1e-4)
    assert checkpoint_command(["adapter", str(tmp_path / "whole"), str(tmp_path / "alone")]) == 2
    assert "has an adapter that is not written alone, p_tuning; give" in capsys.readouterr().err
    taught = ["--task", "cloze", "--finetune-from", base, *LEARN, *given, "--teacher", base, "--max-update", 1]
    assert train_command([*map(str, (data, *taught)), "--save-dir", str(tmp_path / "taught")]) == 2
    assert "--adapter p_tuning has prompt tokens, which a --teacher does not know" in capsys.readouterr().err


def test_questions_are_shown_with_their_candidates(tmp_path, capsys, bases) -> None:
    data = write_rows(tmp_path / "rows", train=[BOOLQ])
    tokenizer = bases("glm") / "checkpoint_1"
    show = ["show", str(data), "--task", "cloze", "--tokenizer-folder", str(tokenizer), "--cloze", "boolq"]
    assert data_command(show) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"question 0 of 1: {data}/train.jsonl:1",
        "  Based on the following passage is it red?[ ... ]. The sun is red.",
        "    ' No': no",
        "  * ' Yes': yes",
    ]
    for options, message in ((["--index", "1"], "has 1 questions, from 0 on"), (["--html", "x"], "draws no page")):
        assert data_command([*show, *options]) == 2
        assert message in capsys.readouterr().err
    write_rows(data, train=[COPA])
    assert data_command(show) == 2
    assert f"{data}/train.jsonl:1: field 'label' is 1; it must be true or false" in capsys.readouterr().err


def test_the_split_that_is_learned_from_is_that_of_the_run_whatever_its_name(tmp_path, bases) -> None:
    data = write_rows(tmp_path / "rows", train_a=copa_rows(4), train=copa_rows(4))
    given = ["--cloze", "copa", "--train-subset", "train_a", "--valid-subset", "train_a,train", "--max-epoch", 1]
    records = train(data, bases("glm"), tmp_path / "run", *given, "--batch-size", 4)
    updates = sum(record["event"] == "train" for record in records)  # each row is learned twice
    validated = [record["num_targets"] for record in records if "valid_seconds" in record]
    assert (updates, validated) == (2, [4, 4])


def test_a_checkpoint_keeps_a_task_of_ones_own(tmp_path, capsys, bases) -> None:
    data = write_rows(tmp_path / "rows", train=boolq_rows(4), valid=boolq_rows(4))
    file = tmp_path / "own.yaml"
    file.write_text("like: boolq\npatterns: {7: '{passage:shorten} So{ question}?{gap}.'}\n")
    train(data, bases("glm"), tmp_path / "run", "--cloze", file, "--pattern", 7, "--max-update", 1)
    file.unlink()
    capsys.readouterr()
    assert validate_command([str(data), "--path", str(tmp_path / "run")]) == 0
    assert "accuracy" in capsys.readouterr().out


def test_a_language_models_loss_learns_from_right_candidates_alone(tmp_path, bases) -> None:
    data = write_rows(tmp_path / "rows", train=copa_rows(8), valid=copa_rows(4))
    options = ["--cloze", "copa", "--max-update", 2]
    records = train(data, bases("glm"), tmp_path / "run", *options, "--criterion", "cross_entropy")
    (valid, *_) = [record for record in records if "valid_seconds" in record]
    answers = [row["choice1"] if row["label"] == 0 else row["choice2"] for row in copa_rows(4)]
    assert valid["num_targets"] == sum(len(answer.split()) + 1 for answer in answers)


PARALLEL = {
    "one": (1, "--batch-size 6 --update-freq 2"),
    "R2": (2, "--batch-size 6"),
    "R2 rest": (2, "--batch-size 3 --update-freq 2"),
    "T2": (2, "--batch-size 6 --update-freq 2 --tensor-parallel-size 2"),
    "P2": (2, "--batch-size 6 --update-freq 2 --pipeline-parallel-size 2"),
    "S2": (2, "--batch-size 6 --data-parallel-shard-size 2"),
}


@pytest.mark.parametrize("name", slow_but(["boolq"], ["boolq", "copa"]))
def test_ranks_find_what_one_process_finds(name, tmp_path, bases) -> None:
    rows = boolq_rows(26) if name == "boolq" else copa_rows(13)
    data = write_rows(tmp_path / "rows", train=rows, valid=rows[:7])
    given = ["--task", "cloze", "--cloze", name, "--finetune-from", bases("glm"), *LEARN, "--log-format", "json"]
    given += ["--max-epoch", 2, "--no-save"]
    flags = shlex.join(map(str, given))
    records, _ = run_records(data, tmp_path, [(one, size, f"{flags} {own}") for one, (size, own) in PARALLEL.items()])
    found = {one: picked(own, ("loss", "accuracy", "num_targets", "gnorm")) for one, own in records.items()}
    assert len(found["one"]) > 6
    for other in PARALLEL:
        assert len(found[other]) == len(found["one"])
        for ours, theirs in zip(found[other], found["one"], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4), other


@pytest.mark.slow
def test_ranks_train_the_same_prompt_tokens(tmp_path, bases) -> None:
    data = write_rows(tmp_path / "rows", train=boolq_rows(24), valid=boolq_rows(6))
    given = ["--task", "cloze", "--cloze", "boolq", "--adapter", "p_tuning", "--finetune-from", bases("glm"), *LEARN]
    given += ["--dropout", 0, "--attention-dropout", 0, "--embedding-dropout", 0, "--max-update", 3]
    flags = shlex.join(map(str, given))
    run_records(
        data, tmp_path, [(one, PARALLEL[one][0], f"{flags} {PARALLEL[one][1]}") for one in ("one", "R2", "S2", "T2")]
    )
    expected = load_model_tensors(tmp_path / "one")
    for name in ("R2", "S2", "T2"):
        found = load_model_tensors(tmp_path / name)
        assert found.keys() == expected.keys()
        for key, tensor in expected.items():
            torch.testing.assert_close(found[key], tensor, rtol=1e-3, atol=2e-5)
    for flags, message in (
        (["--pipeline-parallel-size", "2"], "use --data-parallel-shard-size"),
        (["--tensor-parallel-size", "2", "--sequence-parallel"], "p_tuning stand in whole sequences; leave it out"),
    ):
        done = run_jobs(run_all, 2, [[*map(str, [data, *given]), "--save-dir", str(tmp_path / "refused"), *flags]])
        assert done.returncode == 2
        assert message in done.stderr


REAL = {"boolq": ("BoolQ", 64, ["--seq-length", "96"]), "copa": ("COPA", 32, [])}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["glm", "gpt2"])
@pytest.mark.parametrize("name", REAL)
def test_rows_of_superglue_are_learned_by_heart(name, family, tmp_path, test_data) -> None:
    folder, count, options = REAL[name]
    path = test_data / "superglue" / folder / "train.jsonl"
    if not path.exists():
        pytest.skip(f"{path} is missing")
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()[:count]]
    words = sorted({word.strip(".,!?").lower() for row in rows for text in row.values() for word in str(text).split()})
    words = ["yes", "no", *(word for word in words if word.isascii() and word.isalpha())]
    base = make_model(tmp_path / "base", family, words, hidden_size=64, num_attention_heads=4)
    data = write_rows(tmp_path / "rows", train=rows, valid=rows)
    more = ["--cloze", name, "--pattern", 0, "--max-epoch", 60, "--save-interval", 0, *options, "--lr", 2e-3]
    more += ["--validate-interval", 10, "--best-metric", "accuracy"]
    records = train(data, base, tmp_path / "run", *more)
    valid = [record for record in records if "valid_seconds" in record]
    assert max(record["accuracy"] for record in valid) == 1.0
