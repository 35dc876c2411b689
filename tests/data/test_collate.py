"""Collating samples of different lengths."""

from __future__ import annotations

import numpy as np
import torch
from number_corpus import NumberTokenizer, random_documents

from ftk.data.batches.collate import Collater, PaddedCollater
from ftk.tasks.glm_blank.config import BlankInfillingConfig
from ftk.tasks.glm_blank.samples.dataset import GLMBlankDataset
from ftk.tasks.glm_blank.samples.infilling import OBJECTIVES


def test_a_batch_holds_its_samples_and_padding_only():
    tokenizer = NumberTokenizer(pad=599)
    config = BlankInfillingConfig(seq_length=64, sample_one_document=True)
    dataset = GLMBlankDataset(random_documents([5, 20, 100, 9] * 20), tokenizer, config, 1)
    samples = [dataset.sample(1, index) for index in range(10)]
    lengths = [len(sample["tokens"]) for sample in samples]
    collater = Collater(tokenizer.special, groups={"objective": OBJECTIVES})
    arrays, made = collater.arrays(samples), collater(samples)
    mask = arrays["loss_mask"]
    batch = {**arrays, **made.inputs}
    longest = max(lengths)
    assert len(set(lengths)) > 1
    assert {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in made.inputs.items()} == {
        "tokens": ((10, longest), torch.int64),
        "position_ids": ((10, 2, longest), torch.int64),
        "context_length": ((10,), torch.int64),
    }
    scored = [(row, place) for row in range(10) for place in range(longest) if mask[row, place]]
    assert made.places.tolist() == [row * longest + place for row, place in scored]
    assert made.targets.tolist() == [arrays["targets"][row, place] for row, place in scored]
    assert made.groups["objective"].names == OBJECTIVES
    assert made.groups["objective"].index.tolist() == [arrays["objective"][row] for row, _ in scored]
    assert made.sample_ids is None
    assert made.num_tokens == 10 * longest
    for row, (sample, length) in enumerate(zip(samples, lengths, strict=True)):
        for name, fill in (("tokens", 599), ("targets", 599), ("loss_mask", 0), ("position_ids", 0)):
            assert np.array_equal(batch[name][row, ..., :length], sample[name])
            assert (batch[name][row, ..., length:] == fill).all()
        assert batch["context_length"][row] == sample["context_length"]
        assert batch["objective"][row] == sample["objective"]


def test_documents_are_counted_for_a_model_that_asks():
    tokenizer = NumberTokenizer(pad=599)
    config = BlankInfillingConfig(seq_length=64, document_mask=True)
    dataset = GLMBlankDataset(random_documents([5, 20, 100, 9] * 20), tokenizer, config, 1)
    samples = [dataset.sample(1, index) for index in range(4)]
    collater = Collater(tokenizer.special, groups={"objective": OBJECTIVES})
    axes = {"tokens": "B T", "position_ids": "B 2 T", "context_length": "B", "document_ids": "B T"}
    plain = PaddedCollater(collater, 32, axes)(samples)
    assert "num_documents" not in plain.inputs
    counted = PaddedCollater(collater, 32, {**axes, "num_documents": ""})(samples)
    most = int(plain.inputs["document_ids"].max())
    assert 0 < most < counted.inputs["num_documents"] <= most + 8
    assert counted.inputs["num_documents"] % 8 == 0
    assert counted.inputs["tokens"].size(1) % 32 == 0
    assert torch.equal(counted.inputs["document_ids"], plain.inputs["document_ids"])
    for sample in samples:
        sample["document_ids"][0] = 10**6  # not a count
    assert "num_documents" not in PaddedCollater(collater, 32, {**axes, "num_documents": ""})(samples).inputs
