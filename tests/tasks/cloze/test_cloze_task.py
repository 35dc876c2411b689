"""The task cloze: samples by hand, batches, and what does not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ftk.criterions.choice_cross_entropy import ChoiceCrossEntropy, ChoiceCrossEntropyConfig
from ftk.data.batches.iterator import EpochBatchIterator
from ftk.data.supervised.corpus import RowsConfig, RowsCorpus
from ftk.errors import UserError
from ftk.modules.adapters import PromptIds
from ftk.tasks.cloze.task import ClozeConfig, ClozeTask
from tests.tasks.cloze.made import (
    BOOLQ,
    COPA,
    FAMILIES,
    LAYOUTS,
    boolq_rows,
    copa_rows,
    make_tokenizer,
    model_of,
    spelled,
    write_rows,
)  # fmt: skip


def task_of(folder: Path, name: str, family: str = "glm", **options: Any) -> ClozeTask:
    """The task on the rows of a folder, for a model of a family."""
    tokenizer = make_tokenizer(folder / f"tokenizer-{family}", LAYOUTS[family])
    config = ClozeConfig(cloze=name, **{"seq_length": 64, **options})
    task = ClozeTask(config, corpus=RowsCorpus(RowsConfig(data=str(folder)), tokenizer), seed=1)
    task.for_model(model_of(family, tokenizer).config)
    return task


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
