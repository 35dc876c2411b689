"""A data set of one's own that gives rows, and neither documents nor samples."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from ftk.data.supervised.corpus import RowsConfig, RowsCorpus
from ftk.tasks.classification.task import ClassificationConfig, ClassificationTask
from ftk.tasks.cloze.task import ClozeConfig, ClozeTask
from ftk.tasks.seq2seq.task import Seq2SeqConfig, Seq2SeqTask
from tests.tasks.cloze.made import LAYOUTS, make_tokenizer, model_of, write_rows

ROWS = [
    {"passage": "the sun is red.", "question": "is it red", "label": number % 2 == 0, "source": "it", "target": "red"}
    for number in range(4)
]
TASKS = {
    "seq2seq": (Seq2SeqTask, Seq2SeqConfig(seq_length=48, target_length=8)),
    "cloze": (ClozeTask, ClozeConfig(cloze="boolq", seq_length=48)),
    "classification": (ClassificationTask, ClassificationConfig(text_fields=["passage"], seq_length=48)),
}


@pytest.mark.parametrize("name", TASKS)
def test_every_task_that_reads_rows_reads_those_of_a_plugin(name, tmp_path) -> None:
    tokenizer = make_tokenizer(tmp_path / "tokenizer", LAYOUTS["glm"])
    ours = RowsCorpus(RowsConfig(data=str(write_rows(tmp_path, train=ROWS))), tokenizer)
    theirs = SimpleNamespace(rows=ours.rows, tokenizer=ours.tokenizer, tokenizer_folder=ours.tokenizer_folder)
    kind, config = TASKS[name]
    found, expected = (kind(config, corpus=corpus, seed=1) for corpus in (theirs, ours))
    for task in (found, expected):
        task.for_model(model_of("glm", tokenizer).config)
    for load in ("load_split", "load_training_split"):
        own, other = (getattr(task, load)("train") for task in (found, expected))
        assert len(own) == len(other) == len(ROWS)
        for index in range(len(ROWS)):
            np.testing.assert_equal(own.sample(1, index), other.sample(1, index))
