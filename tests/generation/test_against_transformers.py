"""Beam search against that of transformers, on the same table as a model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.generation.tables import TABLE_SPECIAL, assert_same, fill, random_table

transformers = pytest.importorskip("transformers", reason="needs transformers (pip install ftk[test])")

SIZE = 11


class Config(transformers.PretrainedConfig):
    model_type = "table"
    vocab_size = SIZE
    num_hidden_layers = 0


class TransformersTable(transformers.PreTrainedModel, transformers.GenerationMixin):
    """The same table, with the interface of transformers: without a cache, the whole sequence each time."""

    config_class = Config
    _supports_cache_class = False

    def __init__(self, config):
        super().__init__(config)
        self.table = nn.Parameter(torch.zeros(SIZE, SIZE))
        self.post_init()

    def prepare_inputs_for_generation(self, input_ids, **_):
        return {"input_ids": input_ids}

    def forward(self, input_ids, **_):
        return transformers.modeling_outputs.CausalLMOutput(logits=self.table[input_ids])


def their_answers(table, width, max_len, penalty, early_stopping):
    """[(tokens with their end, score)], best first."""
    model = TransformersTable(Config())
    model.eval()
    with torch.no_grad():
        model.table.copy_(torch.tensor(table, dtype=torch.float64).log().float())
    found = model.generate(
        torch.tensor([[TABLE_SPECIAL.sop]]),
        num_beams=width,
        num_return_sequences=width,
        max_new_tokens=max_len,
        length_penalty=penalty,
        early_stopping={"true": True, "false": False, "never": "never"}[early_stopping],
        eos_token_id=TABLE_SPECIAL.eop,
        pad_token_id=SIZE - 1,
        do_sample=False,
        use_cache=False,
        output_scores=True,
        return_dict_in_generate=True,
    )
    answers = []
    for row, score in zip(found.sequences[:, 1:].tolist(), found.sequences_scores.tolist(), strict=True):
        length = row.index(TABLE_SPECIAL.eop) + 1 if TABLE_SPECIAL.eop in row else len(row)
        answers.append((row[:length], score))
    return answers


@pytest.mark.parametrize("early_stopping", ["true", "false", "never"])
@pytest.mark.parametrize("penalty", [0.0, 0.6, 1.0, 2.0])
def test_the_n_best_answers_are_those_of_transformers(penalty, early_stopping):
    for seed in range(4):
        table = random_table(SIZE, seed)
        for width in (2, 3, 5):
            ours = fill(
                table, beam=width, nbest=width, max_len=7, length_penalty=penalty, early_stopping=early_stopping
            )
            theirs = their_answers(table, width, 7, penalty, early_stopping)
            assert_same(ours, theirs)
