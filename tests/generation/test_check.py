"""Models and attention of plugins that would write otherwise than they were trained are refused at the start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import ftk
from ftk.errors import UserError
from ftk.generation.engine.check import check_decoding
from ftk.generation.engine.decoder import CachedDecoder
from ftk.generation.engine.request import Frame
from ftk.models.glm import GLMConfig
from ftk.models.glm.model import GLM
from ftk.models.gpt2 import GPT2Config
from ftk.models.gpt2.model import GPT2
from ftk.modules.masked_attention import MaskedAttention
from ftk.registry import ATTENTIONS, MODELS, register_attention, register_model
from ftk.tokenizers import load_tokenizer
from tests.small_run import SHAPE, save_model

SMALL: dict[str, Any] = {**SHAPE, "vocab_size": 64, "init_std": 0.3}
TEXT = Frame([7, 8, 9, 10, 11], {"position_ids": np.arange(5)}, {"position_ids": np.array(1)})
BLANK = Frame(
    [7, 3, 9, 10, 1],
    {"position_ids": np.array([[0, 1, 2, 3, 1], [0, 0, 0, 0, 1]])},
    {"position_ids": np.array([0, 1])},
    prefix=4,
)


@dataclass(kw_only=True)
class MixingConfig(GPT2Config):
    """Of a plugin's model."""


class Mixing(GPT2):
    """Adds to each token something of the one before it."""

    INPUTS = GPT2.INPUTS

    def embed_tokens(self, tokens):
        hidden = super().embed_tokens(tokens)
        return hidden + 0.5 * torch.nn.functional.pad(hidden, (0, 0, 1, 0))[:, :-1]


class Biased(NamedTuple):
    attend: Any
    bias: Any

    def __call__(self, query, key, value, *, bias=None, scale=None):
        return self.attend(query, key, value, bias=self.bias.expand(-1, query.size(1), -1, -1), scale=scale)


class Far(GPT2):
    """Sees what is far away less (Press et al. 2022)."""

    INPUTS = GPT2.INPUTS
    ADDS_BIAS = True

    def around(self, position_ids, key_positions=None):
        keys = position_ids if key_positions is None else key_positions
        return lambda attend: Biased(attend, (keys[:, None, None, :] - position_ids[:, None, :, None]).abs() * -0.5)


class Near(Far):
    """The same, wrong where the keys are more than the queries."""

    INPUTS = GPT2.INPUTS

    def around(self, position_ids, key_positions=None):
        return super().around(position_ids)


class Blanks(GLM):
    INPUTS = GLM.INPUTS


class BiasedBlanks(GLM):
    INPUTS = GLM.INPUTS

    def around(self, position_ids, key_positions=None):
        return lambda attend: Biased(attend, torch.zeros(1, 1, 1, 1))


@pytest.mark.parametrize("kind", [Far, Blanks])
def test_a_model_that_decodes_as_it_was_trained_passes(kind):
    config = (GPT2Config if kind is Far else GLMConfig)(**SMALL)
    model = kind(config, seed=1)
    check_decoding(model, TEXT if kind is Far else BLANK)
    assert model.config is config


@pytest.mark.parametrize("kind", [Mixing, Near])
def test_one_that_does_not_is_refused_with_what_is_asked_of_it(kind):
    with pytest.raises(
        UserError, match=r"test_check.py:\d+\) would not write as it was trained: .* key_positions where"
    ):
        check_decoding(kind(GPT2Config(**SMALL), seed=1), TEXT)


def test_a_bias_for_positions_of_two_rows_is_refused():
    with pytest.raises(UserError, match=r"adds a bias to the scores, and position_ids are \[B, 2, T\]; generation has"):
        CachedDecoder(BiasedBlanks(GLMConfig(**SMALL), seed=1), 1, 1, 8, 8)


@pytest.mark.parametrize("share", [1.0, 0.2])
def test_a_form_of_attention_that_generation_does_not_have_is_refused(share):
    class Scaled(MaskedAttention):
        def __call__(self, query, key, value, *, bias=None, scale=None):
            return super().__call__(share * query, key, value, bias=bias, scale=scale)

    @register_attention("scaled")
    def scaled(visibility, num_tokens, device, dropout, dtype):
        places = torch.arange(num_tokens, device=device)
        return Scaled(visibility.additive(places, places, dtype))

    try:
        model = GPT2(GPT2Config(**SMALL, attention="scaled"), seed=1)
        if share == 1.0:
            check_decoding(model, TEXT)
            return
        with pytest.raises(UserError, match="has an attention of its own, which is not that of `attention` scaled"):
            check_decoding(model, TEXT)
    finally:
        del ATTENTIONS._entries["scaled"]


def test_it_is_asked_when_a_generator_is_loaded(place, tmp_path):
    register_model("mixing", config=MixingConfig, task="causal_lm")(Mixing)
    try:
        tokenizer = place / "run" / "checkpoint_1" / "tokenizer"
        size = load_tokenizer(tokenizer).padded_vocab_size()
        model = Mixing(MixingConfig(**{**SMALL, "vocab_size": size}), seed=1)
        save_model(tmp_path / "run" / "checkpoint_1", model, tokenizer, task={"_name": "causal_lm"})
        assert ftk.load_model(tmp_path / "run") is not None
        with pytest.raises(UserError, match="Mixing .* would not write as it was trained"):
            ftk.load_generator(tmp_path / "run")
    finally:
        del MODELS._entries["mixing"]
