"""GLM's shape, defaults, initial values and independence of what it must not see."""

from __future__ import annotations

import math

import pytest
import torch

from ftk.config.options import mistakes
from ftk.errors import UserError
from ftk.models import build_model
from ftk.models.glm import GLMConfig
from ftk.models.glm.model import GLM


def small(**overrides: object) -> GLMConfig:
    shape: dict[str, object] = {
        "vocab_size": 40,
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "max_positions": 16,
    }
    return GLMConfig(**(shape | overrides))  # type: ignore[arg-type]


def same_weights(left: GLM, right: GLM) -> bool:
    return all(torch.equal(value, right.state_dict()[name]) for name, value in left.state_dict().items())


def test_defaults_are_plain_positions_and_causal_attention() -> None:
    model = GLM(small()).eval()
    tokens = torch.randint(40, (2, 10))
    position_ids = torch.zeros(2, 2, 10, dtype=torch.int64)
    position_ids[:, 0] = torch.arange(10)
    explicit = model(tokens, position_ids=position_ids, context_length=torch.zeros(2, dtype=torch.int64))
    assert torch.equal(model(tokens), explicit)


@pytest.mark.parametrize(("changed", "context", "first_affected"), [(7, 0, 7), (7, 4, 7), (3, 4, 0), (3, 3, 3)])
def test_a_token_reaches_all_of_the_context_and_nothing_before_itself(
    changed: int, context: int, first_affected: int
) -> None:
    model = GLM(small()).eval()
    tokens = torch.randint(39, (1, 10))
    other = tokens.clone()
    other[0, changed] += 1
    context_length = torch.tensor([context])
    with torch.no_grad():
        distance = model(tokens, context_length=context_length) - model(other, context_length=context_length)
    affected = distance.abs().amax(dim=(0, 2)) > 1e-6
    assert affected.tolist() == [place >= first_affected for place in range(10)]


def test_without_block_positions_there_is_one_table_and_the_second_row_is_left_unread() -> None:
    model = GLM(small(block_positions=False)).eval()
    assert model.position_embedding.position.weight.shape == (16, 32)
    tokens = torch.randint(40, (2, 10))
    both = torch.stack((torch.arange(10), torch.randint(5, (10,)))).expand(2, -1, -1)
    assert torch.equal(model(tokens, position_ids=both), model(tokens))
    assert torch.equal(model(tokens, position_ids=both[:, 0]), model(tokens))


def test_tables_have_one_row_more_than_positions_with_block_positions() -> None:
    model = GLM(small()).eval()
    assert model.position_embedding.position.weight.shape == (17, 32)
    assert model.position_embedding.block.weight.shape == (17, 32)
    model(torch.tensor([[1]]), position_ids=torch.tensor([[[16], [16]]]))


def test_sequence_beyond_the_positions_is_refused() -> None:
    model = GLM(small())
    model(torch.zeros(1, 16, dtype=torch.int64))
    with pytest.raises(UserError, match="sequence of 17 tokens, but max_positions is 16"):
        model(torch.zeros(1, 17, dtype=torch.int64))


def test_sequence_longer_than_the_positions_is_welcome_where_positions_repeat() -> None:
    model = GLM(small()).eval()
    position_ids = torch.stack((torch.arange(20) // 2, torch.arange(20) % 2))[None]
    assert model(torch.zeros(1, 20, dtype=torch.int64), position_ids=position_ids).shape == (1, 20, 40)


def test_dropout_acts_in_training_only() -> None:
    model = GLM(small(attention_dropout=0.5, embedding_dropout=0.0, dropout=0.0))
    tokens = torch.randint(40, (2, 10))
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def test_initial_weights_have_the_published_spread() -> None:
    config = small(hidden_size=128, num_layers=8, vocab_size=500)
    for name, value in GLM(config, seed=1).named_parameters():
        if name.endswith("bias"):
            assert value.abs().max() == 0, name
        elif "norm" in name:
            assert (value - 1).abs().max() == 0, name
        else:
            expected = 0.02 / math.sqrt(16) if ".output." in name else 0.02
            assert value.std().item() == pytest.approx(expected, rel=0.1), name


def test_torch_manual_seed_is_the_default_seed() -> None:
    torch.manual_seed(3)
    assert same_weights(GLM(small()), GLM(small(), seed=3))


def test_no_two_weights_start_alike() -> None:
    weights = [p for name, p in GLM(small(), seed=0).named_parameters() if p.ndim == 2]
    firsts = [weight.flatten()[0].item() for weight in weights]
    assert len(set(firsts)) == len(firsts)


def test_a_model_from_the_meta_device_starts_as_one_built_directly() -> None:
    with torch.device("meta"):
        model = GLM(small())
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not list(model.buffers())  # nothing that `to_empty` would lose
    model.to_empty(device="cpu")
    model.init_weights(seed=5)
    direct = GLM(small(), seed=5)
    assert same_weights(model, direct)
    tokens = torch.randint(40, (1, 6))
    assert torch.equal(model.eval()(tokens), direct.eval()(tokens))


def test_a_layer_compiles_to_one_graph_whatever_the_mask() -> None:
    """`attend` is an argument; were it not a plain structure of tensors, each new mask would compile anew."""
    from torch._dynamo.testing import CompileCounterWithBackend

    model = GLM(small()).eval()
    counter = CompileCounterWithBackend("eager")
    layer = torch.compile(model.layers[0], backend=counter, fullgraph=True)
    for context in range(4):
        tokens = torch.randint(40, (2, 10))
        attend = model.attend(tokens, torch.tensor([context, 9]))
        hidden = model.embed(tokens)
        torch.testing.assert_close(layer(hidden, attend), model.layers[0](hidden, attend))
    assert counter.frame_count == 1
    torch._dynamo.reset()


def test_build_model_takes_overrides_and_names_what_it_does_not_know() -> None:
    model = build_model("glm_tiny", vocab_size=64, num_layers=1)
    assert isinstance(model, GLM)
    assert (model.config.vocab_size, model.config.num_layers, model.config.hidden_size) == (64, 1, 64)
    assert isinstance(build_model("glm", num_layers=1, hidden_size=8, num_attention_heads=2, vocab_size=8), GLM)
    with pytest.raises(UserError, match=r"unknown architecture or model 'glm_huge'.*glm_tiny"):
        build_model("glm_huge")
    with pytest.raises(UserError, match=r"no field 'layers'.*num_layers"):
        build_model("glm_tiny", layers=3)
    with pytest.raises(UserError, match="num_attention_heads is 5; it must divide hidden_size 64"):
        build_model("glm_tiny", num_attention_heads=5)


def test_flex_with_dropout_of_attention_is_refused_before_anything_is_built() -> None:
    assert mistakes(small(attention="flex", attention_dropout=0.1)) == [
        "attention is flex, which has no dropout, and attention_dropout is 0.1; "
        "give `attention_dropout` 0 or `attention` auto"
    ]
    assert not mistakes(small(attention="flex", attention_dropout=0.0))


def test_a_model_trained_by_flex_is_scored_on_a_cpu() -> None:
    tokens = torch.randint(40, (2, 10))
    shape = {"hidden_size": 32, "num_attention_heads": 2, "num_layers": 1, "attention_dropout": 0.0}
    with torch.no_grad():
        computed, expected = (
            GLM(small(attention=form, **shape), seed=0).eval()(tokens, context_length=torch.tensor([3, 8]))
            for form in ("flex", "eager")
        )
    torch.testing.assert_close(computed, expected, rtol=1e-4, atol=1e-5)
