"""Packed documents that do not see each other: a packed sample is its documents, one beside the other."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from ftk.criterions.cross_entropy import CrossEntropy, CrossEntropyConfig
from ftk.data.batches.collate import Collater
from ftk.models import build_model
from ftk.modules.masks import Visibility
from ftk.tasks.glm_blank.config import BlankInfillingConfig
from ftk.tasks.glm_blank.samples.dataset import GLMBlankDataset
from ftk.tasks.glm_blank.samples.infilling import OBJECTIVES
from tests.data.number_corpus import NumberTokenizer, random_documents

TOKENIZER = NumberTokenizer()


def packed_batch(probabilities, count=4, document_mask=True):
    config = BlankInfillingConfig(
        seq_length=96, bert_prob=probabilities[0], gap_sentence_prob=probabilities[1], document_mask=document_mask
    )
    documents = random_documents([20, 30, 9, 14] * 20, sentence_length=5)
    dataset = GLMBlankDataset(documents, TOKENIZER, config, 1)
    return Collater(TOKENIZER.special, {"objective": OBJECTIVES})(dataset.samples(1, np.arange(count)))


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(1)
    return build_model("glm_tiny", vocab_size=640, max_positions=128).eval()


@pytest.mark.parametrize("probabilities", [(1.0, 0.0), (0.0, 1.0), (0.0, 0.0)], ids=["token", "sentence", "document"])
def test_packed_documents_have_the_logits_that_each_has_alone(model, probabilities):
    batch = packed_batch(probabilities).inputs
    with torch.no_grad():
        packed = model(**batch)
        for row in range(len(packed)):
            numbers = batch["document_ids"][row]
            assert numbers.max() >= 2
            for number in range(int(numbers.max()) + 1):
                mine = numbers == number
                context = mine[: batch["context_length"][row]].sum()
                alone = model(
                    batch["tokens"][row, mine][None],
                    position_ids=batch["position_ids"][row][:, mine][None],
                    context_length=context[None],
                )
                torch.testing.assert_close(packed[row, mine], alone[0], atol=1e-5, rtol=0)


def test_the_criterion_passes_the_documents_on(model):
    batch = packed_batch((0.4, 0.3))
    criterion = CrossEntropy(CrossEntropyConfig())
    apart = criterion(model, batch).loss
    without = {name: value for name, value in batch.inputs.items() if name != "document_ids"}
    together = criterion(model, replace(batch, inputs=without)).loss
    assert not torch.allclose(apart, together)
    tokens, documents = batch.inputs["tokens"], batch.inputs["document_ids"]
    last = documents == documents.max(dim=1, keepdim=True).values
    changed = last.flatten().index_fill(0, batch.places, False).view_as(last)
    keep = ~last.flatten()[batch.places]
    kept = replace(batch, targets=batch.targets[keep], places=batch.places[keep], groups={})
    other = batch.inputs | {"tokens": tokens.masked_fill(changed, 30)}
    assert changed.any()
    losses = [criterion(model, replace(kept, inputs=inputs)).loss for inputs in (kept.inputs, other)]
    torch.testing.assert_close(losses[0], losses[1], atol=1e-4, rtol=0)


def test_samples_are_the_same_but_for_the_mask():
    apart, together = packed_batch((0.4, 0.3)), packed_batch((0.4, 0.3), document_mask=False)
    assert apart.targets.equal(together.targets)
    assert apart.places.equal(together.places)
    apart, together = apart.inputs, together.inputs
    assert "document_ids" not in together
    assert all(apart[name].equal(together[name]) for name in together)
    assert apart["document_ids"][~(apart["position_ids"][:, 1] > 0) & (apart["position_ids"][:, 0] == 0)].min() == -1


def test_every_token_of_a_real_batch_sees_itself():
    batch = packed_batch((0.4, 0.3)).inputs
    places = torch.arange(batch["tokens"].size(1))
    mask = Visibility(batch["context_length"], documents=batch["document_ids"]).boolean(places, places)
    assert mask.diagonal(dim1=2, dim2=3).all()
