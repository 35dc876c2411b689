"""P-tuning: the encoder of prompt tokens by its formula, and where their embeddings stand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ftk.config.options import mistakes
from ftk.errors import UserError
from ftk.generation.engine.request import check_ids, prompt_ids_of
from ftk.models import build_model
from ftk.modules.adapters import PromptIds, PTuningConfig
from ftk.modules.adapters.adapt import adapt, is_part, precompute
from ftk.modules.adapters.p_tuning import PTuning, refuse_stages
from ftk.modules.quantization import Quantization, quantize_model

FORMS = ("lstm", "mlp", "none")


def small_model(form: str | None = "lstm", **options: Any) -> Any:
    torch.manual_seed(1)
    model = build_model("gpt2_tiny", vocab_size=96, num_layers=1, hidden_size=16, max_positions=32).eval()
    if form is not None:
        adapt(model, PTuning(PTuningConfig(prompt_encoder=form, **options)), seed=3)
    return model


def by_hand(model: Any, form: str) -> torch.Tensor:
    """Du et al. 2022, model/prompt.py: [n, H]"""
    encoder, size = model.token_embedding.prompt_encoder, 16
    rows = encoder.embedding.weight
    if form == "lstm":
        lstm = nn.LSTM(size, size, num_layers=2, bidirectional=True, batch_first=True)
        lstm.load_state_dict(encoder.lstm.state_dict())
        rows = lstm(rows[None])[0][0]
    if form == "none":
        return rows
    head = nn.Sequential(nn.Linear(rows.size(1), size), nn.ReLU(), nn.Linear(size, size))
    parts = {"0": encoder.into, "2": encoder.back}
    head.load_state_dict(
        {f"{key}.{name}": value for key, part in parts.items() for name, value in part.state_dict().items()}
    )
    return head(rows)


@pytest.mark.parametrize("form", FORMS)
def test_embeddings_of_prompt_tokens_are_those_of_the_encoder_wherever_they_stand(form) -> None:
    model = small_model(form, num_prompt_tokens=3, prefix_prompt=2)
    assert prompt_ids_of(model) == PromptIds(range(96, 98), range(98, 101))
    tokens = torch.tensor([[96, 97, 5, 98, 7], [3, 99, 100, 2, 95]])
    with torch.no_grad():
        found, prompts = model.token_embedding(tokens), by_hand(model, form)
    table = torch.cat((model.token_embedding.weight, prompts))
    torch.testing.assert_close(found, table[tokens])
    assert torch.equal(found[1, 0], model.token_embedding.weight[3])


def test_only_the_encoder_is_new_and_a_text_without_prompt_tokens_is_read_as_before() -> None:
    plain, model = small_model(None), small_model("lstm")
    names = {name for name in model.state_dict() if is_part(name, PTuning.PARTS)}
    assert model.state_dict().keys() == plain.state_dict().keys() | names
    tokens = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        assert torch.equal(model(tokens), plain(tokens))
    model(torch.tensor([[1, 96, 97, 98, 2]])).square().sum().backward()
    assert all(model.get_parameter(name).grad.abs().max() > 0 for name in names)


@pytest.mark.parametrize("form", FORMS)
def test_a_settled_encoder_gives_the_same_and_computes_nothing(form) -> None:
    model, tokens = small_model(form), torch.tensor([[1, 96, 97, 98, 2]])
    with torch.no_grad():
        expected = model(tokens)
        precompute(model)
        torch.testing.assert_close(model(tokens), expected)
    assert {name for name in model.state_dict() if "prompt" in name} == {
        "token_embedding.prompt_encoder.embedding.weight"
    }


def test_ids_are_known_as_far_as_there_are_prompt_tokens() -> None:
    check_ids(small_model(), [0, 95, 96, 98])
    with pytest.raises(UserError, match="99 is no id of the model's 96 tokens"):
        check_ids(small_model(), [99])
    with pytest.raises(UserError, match="96 is no id"):
        check_ids(small_model(None), [96])


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(UserError, match="`pipeline_parallel_size` 2: only one stage would have the prompt tokens"):
        refuse_stages(PTuning(PTuningConfig()), 2)
    with pytest.raises(UserError, match="has no 'token_embedding' for prompt tokens"):
        adapt(nn.Linear(2, 2), PTuning(PTuningConfig()))
    rounded = small_model(None)
    quantize_model(rounded, Quantization(weights="int8"))
    with pytest.raises(UserError, match="`adapter` p_tuning: the token embedding is quantised, .* before they were"):
        adapt(rounded, PTuning(PTuningConfig()))
    (first,) = mistakes(PTuningConfig(num_prompt_tokens=0))
    assert first.startswith("num_prompt_tokens is 0")
    (second,) = mistakes(PTuningConfig(adapter_targets=["layers.0"]))
    assert second.startswith("adapter_targets: P-tuning is for the token embedding alone")
