"""Models and attention of plugins that would write otherwise than they were trained are refused at the start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import ftk
from ftk.errors import UserError
from ftk.generation.engine.check import _is_comparable, check_decoding
from ftk.generation.engine.decoder import CachedDecoder
from ftk.generation.engine.request import Frame
from ftk.models.glm import GLMConfig
from ftk.models.glm.model import GLM
from ftk.models.gpt2 import GPT2Config
from ftk.models.gpt2.model import GPT2
from ftk.modules.masked_attention import MaskedAttention
from ftk.modules.quantization import Quantization, quantize_model
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


class Plain(GPT2):
    INPUTS = GPT2.INPUTS


class Summed(torch.nn.Module):
    def forward(self, hidden, attend):
        return hidden.cumsum(-2)


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


def test_one_with_a_layer_that_never_calls_attend_is_refused():
    model = Plain(GPT2Config(**{**SMALL, "num_layers": 2}), seed=1)
    model.layers[1].attention = Summed()
    with pytest.raises(UserError, match=r"test_check.py:\d+\) cannot generate: its layer 1 never calls 'attend'"):
        check_decoding(model, TEXT)


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


@pytest.fixture
def saved(place, tmp_path):
    """(class of a plugin's model, its options) -> the folder of a checkpoint."""
    tokenizer = place / "run" / "checkpoint_1" / "tokenizer"
    size = load_tokenizer(tokenizer).padded_vocab_size()

    def save(kind, **options):
        name = f"plugins_{kind.__name__.lower()}"
        if name not in MODELS:
            register_model(name, config=MixingConfig, task="causal_lm")(kind)
        model = kind(MixingConfig(**{**SMALL, "vocab_size": size, **options}), seed=1)
        folder = tmp_path / f"{name}{len(list(tmp_path.iterdir()))}"
        save_model(folder / "checkpoint_1", model, tokenizer, task={"_name": "causal_lm"})
        return folder

    yield save
    for name in [name for name in MODELS._entries if name.startswith("plugins_")]:
        del MODELS._entries[name]


def test_it_is_asked_when_a_generator_is_loaded_and_of_each_member(saved):
    folder = saved(Mixing)
    assert ftk.load_model(folder) is not None
    for path in (folder, f"{folder}:{folder}"):
        with pytest.raises(UserError, match="Mixing .* would not write as it was trained"):
            ftk.load_generator(path)


def test_right_models_pass_alone_together_and_without_room_for_the_example(saved):
    folder = saved(Plain)
    for path in (folder, f"{folder}:{folder}", saved(Plain, max_positions=18), saved(Plain, max_positions=12)):
        assert ftk.load_generator(path, max_len=2).generate("the").answers[0].tokens
    assert ftk.load_generator(saved(Mixing, max_positions=12), max_len=2) is not None  # too short to be asked


def test_rounded_weights_are_not_compared():
    models = [Mixing(MixingConfig(**SMALL), seed=1) for _ in range(3)]
    quantize_model(models[1], Quantization(weights="int8"))
    models[2].bfloat16()
    assert [_is_comparable(model) for model in models] == [True, False, False]


def test_of_weights_that_are_not_finite_nothing_is_said():
    model = Mixing(MixingConfig(**SMALL), seed=1)
    model.final_norm.weight.data[0] = torch.nan
    check_decoding(model, TEXT)
