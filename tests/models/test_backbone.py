"""The contract of every model family, on the smallest one: what it declares is checked, split and drawn."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import ftk
from ftk.checkpoint.export import export_program
from ftk.errors import UserError
from ftk.generation.config import GenerationConfig
from ftk.generation.engine.continuation import Continuation
from ftk.generation.engine.making import engine_for
from ftk.generation.engine.request import Request
from ftk.models import build_model
from ftk.models.base import Backbone
from ftk.models.gpt2 import GPT2Config
from ftk.models.gpt2.model import GPT2
from ftk.modules.attention import Attend
from ftk.modules.embeddings import TiedEmbedding
from ftk.modules.few_rows_layer import prepare
from ftk.modules.heads import TiedVocabulary
from ftk.modules.initialization import Normal, declare
from tests.records import assert_same_tensors


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = declare(nn.Linear(8, 8), weight=Normal(0.5))

    def forward(self, hidden, attend):
        return hidden + attend(self.inner(hidden))


class Small(Backbone):
    """`shift` [B, 2, T] is for the embedding, `scale` [B] for both: neither changes what a token sees."""

    INPUTS: ClassVar[dict[str, str]] = {"tokens": "B T", "shift": "B 2 T", "scale": "B", "document_ids": "B T"}

    def __init__(self, head: nn.Module | None = None, seed: int | None = 1) -> None:
        super().__init__(SimpleNamespace(vocab_size=11, hidden_size=8))
        self.token_embedding = declare(TiedEmbedding(11, 8), weight=Normal(1.0))
        self.layers = nn.ModuleList([Layer()])
        if head is not None:
            self.head = head
        self.init_weights(seed)

    def embed(self, tokens: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        return self.token_embedding(tokens) * scale[:, None, None] + shift.sum(dim=1)[..., None]

    def attend(self, tokens: Tensor, scale: Tensor, document_ids: Tensor | None = None):
        return lambda values: values * scale[:, None, None]

    def finish(self, hidden: Tensor) -> Tensor:
        return hidden.tanh()


def inputs(rows: int, tokens: int) -> dict[str, Tensor]:
    return {
        "tokens": torch.arange(rows * tokens).reshape(rows, tokens) % 11,
        "shift": torch.arange(rows * 2 * tokens).reshape(rows, 2, tokens) % 3,
        "scale": torch.arange(1, rows + 1),
    }


class Rotated(NamedTuple):
    """An attend whose queries and keys are turned by their positions; int64 [B, T]."""

    attend: Attend
    positions: Tensor

    def __call__(self, query, key, value, *, bias=None, scale=None):
        turned = (self.turn(query), self.turn(key))
        return self.attend(*turned, value, bias=bias, scale=scale)

    def turn(self, heads: Tensor) -> Tensor:
        left, right = heads.chunk(2, dim=-1)  # [B, A, T, D / 2] each
        angle = 0.7 * self.positions[:, None, :, None]
        return torch.cat([left * angle.cos() - right * angle.sin(), left * angle.sin() + right * angle.cos()], dim=-1)


class Turning(GPT2):
    """A family that gives `around` and nothing else."""

    INPUTS = GPT2.INPUTS

    def around(self, position_ids=None, key_positions=None):
        return lambda attend: Rotated(attend, position_ids)


@torch.no_grad()
def test_what_a_family_puts_around_its_attention_is_there_in_training_as_in_generation():
    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "max_positions": 32, "vocab_size": 31}
    config = GPT2Config(**sizes, init_std=0.4)
    model, plain = (kind(config, seed=1).eval() for kind in (Turning, GPT2))
    prompt = [3, 17, 9, 22]
    request = Request(prompt, GenerationConfig(max_len=12))
    ((answer,),) = engine_for(model, Continuation([0], 32), [request], batch_size=1).answers([request])
    tokens = torch.tensor([[*prompt, *answer.tokens]])
    positions = torch.arange(tokens.size(1))[None]
    places = torch.arange(len(prompt) - 1, tokens.size(1) - 1)

    def logprobs(which: Backbone) -> Tensor:
        scores = which(tokens, position_ids=positions).log_softmax(-1)
        return scores[0, places, tokens[0, places + 1]]

    torch.testing.assert_close(torch.tensor(answer.token_logprobs[: len(answer.tokens)]), logprobs(model))
    assert (logprobs(model) - logprobs(plain)).abs().max() > 0.1


def test_each_part_gets_the_inputs_that_its_signature_names():
    assert Small().split_inputs({"shift": 1, "scale": 2, "document_ids": 3}) == (
        {"shift": 1, "scale": 2},
        {"scale": 2, "document_ids": 3},
    )


def test_an_input_that_the_model_does_not_take_is_refused():
    with pytest.raises(UserError, match=r"^Small takes no pixels; its inputs are tokens, shift, scale, document_ids$"):
        Small()(**inputs(1, 2), pixels=torch.zeros(1))


def test_inputs_that_are_not_those_of_the_signatures_are_refused_where_the_class_is_made():
    with pytest.raises(
        UserError, match=r"Wrong .*: INPUTS names tokens, shift, but .* take tokens, document_ids, scale, shift;"
    ):
        type("Wrong", (Small,), {"INPUTS": {"tokens": "B T", "shift": "B 2 T"}})


def test_a_parameter_without_a_declared_initial_value_is_refused():
    with pytest.raises(UserError, match=r"Small: head.weight has no initial value; .*declare\(module, weight=Normal"):
        Small(nn.Linear(8, 3))
    with torch.device("meta"):  # where nothing is drawn yet
        Small(nn.Linear(8, 3))


def test_initial_values_depend_on_name_and_seed_alone():
    model, again, other = Small(seed=1), Small(declare(nn.Linear(8, 3), weight=Normal(1.0)), seed=1), Small(seed=2)
    name = "layers.0.inner.weight"
    assert torch.equal(model.get_parameter(name), again.get_parameter(name))
    assert torch.equal(model.get_parameter(name), model.initial_value(name, (8, 8), seed=1))
    assert not torch.equal(model.get_parameter(name), other.get_parameter(name))


def test_the_head_is_the_registered_module_or_else_the_token_embedding():
    own = declare(nn.Linear(8, 3), weight=Normal(1.0))
    model = Small(own)
    assert model.head is own
    assert torch.equal(model(**inputs(2, 4)), own(model.hidden_states(**inputs(2, 4))))
    tied = Small()
    assert isinstance(tied.head, TiedVocabulary)
    assert "head.weight" not in tied.state_dict()
    tied.token_embedding = TiedEmbedding(11, 8)  # as quantisation does
    assert tied.head.weight is tied.token_embedding.weight


def test_few_rows_are_prepared_twice_as_once_and_scores_stay():
    model = Small()
    names, parameters = list(model.state_dict()), [id(parameter) for parameter in model.parameters()]
    with torch.no_grad():
        expected = model(**inputs(2, 3))
        prepare(model)
        kinds = [type(part) for part in model.modules()]
        prepare(model)
        torch.testing.assert_close(model(**inputs(2, 3)), expected)
    assert [type(part) for part in model.modules()] == kinds
    assert {kind.__name__ for kind in kinds} >= {"FewRowsLinear", "FewRowsEmbedding"}
    assert (list(model.state_dict()), [id(parameter) for parameter in model.parameters()]) == (names, parameters)
    prepare(model)
    model(**inputs(2, 3)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_an_export_takes_the_inputs_by_their_axes_but_for_those_of_packed_rows(tmp_path):
    model = Small().eval()
    export_program(model, tmp_path / "model.pt2")
    program = torch.export.load(tmp_path / "model.pt2")
    assert program.graph_signature.user_inputs == ("tokens", "shift", "scale")
    for size in ((1, 1), (3, 7)):
        torch.testing.assert_close(program.module()(*inputs(*size).values()), model(**inputs(*size)))


def test_a_model_whose_weights_are_read_draws_none(monkeypatch) -> None:
    folder = Path(__file__).resolve().parents[1] / "frozen" / "run"
    expected = ftk.load_model(folder, "cpu").state_dict()

    def refuse(*_: object) -> None:
        raise AssertionError("drawn")

    monkeypatch.setattr(Normal, "__call__", refuse)
    with pytest.raises(AssertionError, match="drawn"):
        build_model("gpt2_tiny", vocab_size=16)
    before = torch.get_rng_state()
    found = ftk.load_model(folder, "cpu").state_dict()
    assert torch.equal(torch.get_rng_state(), before)  # nor do the modules of torch draw
    assert_same_tensors(found, expected)
