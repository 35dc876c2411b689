"""Plans as data: on an unmodified GPT-2 of Hugging Face, and the errors that name what is wrong with one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from ftk.errors import UserError
from ftk.model_parallel.shards import fused_parameters
from ftk.model_parallel.tensor_parallel.apply import apply_plan, sum_sequence_gradients, whole_state_dict
from ftk.model_parallel.tensor_parallel.plan import Plan, match_plan
from ftk.model_parallel.world import Sizes, make_world
from ftk.models import build_model
from ftk.models.glm import GLMConfig
from ftk.models.glm.model import GLM
from tests.distributed import run_ranks
from tests.model_parallel.small_steps import small_gpt2

HEADS = {"units": 4, "unit_name": "attention heads"}
GPT2: Plan = {
    "transformer.wte": {"style": "vocab_embedding", "whole_sequence": True},
    "transformer.wpe": "replicated",
    "transformer.drop": {"style": "sequence", "scatter_input": True},
    "transformer.h.*.ln_1": "sequence",
    "transformer.h.*.attn": {"style": "sharded", "divide": ["split_size", "num_heads"]},
    "transformer.h.*.attn.c_attn": {"style": "column", "transposed": True, "fused": 3, "divide": ["nf"], **HEADS},
    "transformer.h.*.attn.c_proj": {"style": "row", "transposed": True, **HEADS},
    "transformer.h.*.attn.attn_dropout": "sharded",
    "transformer.h.*.attn.resid_dropout": "sequence",
    "transformer.h.*.ln_2": "sequence",
    "transformer.h.*.mlp.c_fc": {"style": "column", "transposed": True, "divide": ["nf"]},
    "transformer.h.*.mlp.c_proj": {"style": "row", "transposed": True},
    "transformer.h.*.mlp.dropout": "sequence",
    "transformer.ln_f": {"style": "sequence", "gather_output": True},
    "lm_head": "vocab_output",
}


def compare() -> dict[str, Any]:
    mesh = make_world(Sizes(tensor=2), "cpu").mesh
    assert mesh is not None
    tokens = torch.randint(131, (2, 15), generator=torch.Generator().manual_seed(1))
    results: dict[str, Any] = {}
    for sequence in (False, True):
        one, model = small_gpt2(), small_gpt2()
        apply_plan(model, GPT2, mesh["tensor"], sequence)
        assert model.lm_head._parameters["weight"] is model.transformer.wte._parameters["weight"]  # tied as before
        weight = dict(model.named_parameters())["transformer.h.0.attn.c_attn.weight"]
        assert isinstance(weight, DTensor)
        assert (weight.shape, weight.placements) == ((32, 96), (Shard(1),))
        assert weight.to_local().shape == (32, 48)
        found = {}
        for name, each in ("one", one), ("parallel", model):
            output = each(tokens, labels=tokens)
            output.loss.backward()
            found[name] = output
        sum_sequence_gradients(model)
        with torch.no_grad():
            quiet = model(tokens).logits
        gradients = []
        expected, fused = dict(one.named_parameters()), fused_parameters(model)
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            grad = parameter.grad.full_tensor()
            grad = fused[id(parameter)].in_model_order(grad) if id(parameter) in fused else grad
            gradients.append((grad - expected[name].grad).abs().max().item())
        state = whole_state_dict(model)
        results[str(sequence)] = {
            "logits": (found["one"].logits - found["parallel"].logits).abs().max().item(),
            "without gradients": (found["one"].logits - quiet).abs().max().item(),
            "loss": abs(found["one"].loss.item() - found["parallel"].loss.item()),
            "gradients": max(gradients),
            "count": len(gradients),
            "state": [name for name, value in one.state_dict().items() if not torch.equal(value, state[name])],
            "names": list(state) == list(one.state_dict()),
            "dropout": dropouts(mesh, sequence, tokens),
        }
    return results


def dropouts(mesh: Any, sequence: bool, tokens: Tensor) -> list[list[float]]:
    """What GPT-2's four kinds of dropout do to ones, on this process."""
    model = small_gpt2(dropout=0.5)
    apply_plan(model, GPT2, mesh["tensor"], sequence)
    seen: list[list[float]] = []
    block = model.transformer.h[0]
    for module in (model.transformer.drop, block.attn.resid_dropout, block.mlp.dropout):
        module.register_forward_hook(lambda _, inputs, output: seen.append(output.eq(0).float().flatten().tolist()))
    block.attn.c_proj.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].flatten().tolist()))
    with torch.no_grad():  # equal inputs of the attention on both processes: what differs is drawn
        for name, parameter in block.attn.c_attn._parameters.items():
            parameter.to_local().fill_(float(name == "bias"))
    torch.manual_seed(9)
    model(tokens)
    return seen


def test_an_unmodified_gpt2_is_shared_by_a_plan() -> None:
    pytest.importorskip("transformers")
    one, other = run_ranks(compare, 2)
    for results in (one, other):
        for found in results.values():
            assert max(found[name] for name in ("logits", "loss", "gradients", "without gradients")) < 2e-6, found
            assert (found["count"], found["state"], found["names"]) == (28, [], True)
    for sequence in ("False", "True"):
        equal = [a == b for a, b in zip(one[sequence]["dropout"], other[sequence]["dropout"], strict=True)]
        # In order: embedding, attention (what c_proj reads), its output, feed-forward output.
        assert equal == ([True, False, True, True] if sequence == "False" else [False] * 4)


# -- mistakes -------------------------------------------------------------------------------------------------


def glm(**options: Any) -> GLM:
    shape = {"vocab_size": 128, "num_layers": 2, "hidden_size": 48, "num_attention_heads": 6, "max_positions": 16}
    with torch.device("meta"):
        return GLM(GLMConfig(**(shape | options)))


def test_glms_plan_fits_every_size_that_divides() -> None:
    model = glm()
    for size in (1, 2, 3, 6):
        for sequence in (False, True):
            match_plan(model, model.tensor_parallel_plan, size, sequence)
    one_dimension = glm(block_positions=False)
    match_plan(one_dimension, one_dimension.tensor_parallel_plan, 2, True)


def changed(**entries: Any) -> Plan:
    return {name: entry for name, entry in (glm().tensor_parallel_plan | entries).items() if entry is not None}


@pytest.mark.parametrize(
    ("plan", "size", "sequence", "message"),
    [
        (
            changed(),
            4,
            False,
            "layers.0.attention.qkv has 6 attention heads, which 4 tensor parallel processes do not divide (1, 2",
        ),
        (
            {"layers.*.feed_forward.inner": "column"},
            5,
            False,
            "layers.0.feed_forward.inner has 192 outputs, which 5 tensor parallel processes do not divide (1, 2, 3, 4,",
        ),
        ({"layers.*.attention.output": "row"}, 5, False, "layers.0.attention.output has 48 inputs, which 5 tensor par"),
        (
            {"layers.*.attention.qkv": {"style": "column", "units": 7, "unit_name": "heads"}},
            7,
            False,
            "layers.0.attention.qkv has 144 outputs, which are not 7 heads of one size",
        ),
        (
            {"layers.*.attention": {"style": "sharded", "divide": ["head_size", "num_heads"]}},
            3,
            False,
            "layers.0.attention head_size is 8, which 3 tensor parallel processes do not divide "
            "(1, 2, 4, 8 would); so with 1 more\n  layers.0.attention has no whole number 'num_heads' to divide",
        ),
        (
            changed(final_norm=None),
            2,
            True,
            "final_norm has parameters of its own and no style; with `sequence_parallel`",
        ),
        (changed(final_norm="sequence"), 2, True, "nothing gathers the sequence; give the last norm gather_output"),
        (
            changed(
                token_embedding={"style": "vocab_embedding", "whole_sequence": True},
                **{"position_embedding.*": "sequence"},
            ),
            2,
            True,
            'nothing shares the sequence; give a "sequence" style scatter_input',
        ),
    ],
)
def test_a_wrong_plan_is_refused_in_words(plan: Plan, size: int, sequence: bool, message: str) -> None:
    with pytest.raises(UserError) as raised:
        match_plan(glm(), plan, size, sequence)
    assert message in str(raised.value)
    assert str(raised.value).startswith("tensor parallel plan")


QKV = "layers.*.attention.qkv"


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (
            {"layers.*.atention.qkv": "column"},
            "the pattern 'layers.*.atention.qkv' matches no module; there are 'layers.*.attention.qkv'",
        ),
        ({"layers.*.attention.qkv": "colum"}, "has the style 'colum', which does not exist; did you mean 'col"),
        ({"final_norm": {"gather_output": True}}, "'final_norm' has the style None, which does not exist"),
        (
            {"final_norm": {"style": "sequence", "gather": True}},
            "gives 'sequence' the option 'gather', which does not exist; did you mean 'gather_output'? There are",
        ),
        (
            {"layers.*": "replicated", "layers.0": "sequence"},
            "layers.0 is named twice, by 'layers.*' and 'layers.0'; let one pattern match it",
        ),
        (
            {"layers.*.attention.qkv": {"style": "column", "fused": 5}},
            "layers.0.attention.qkv has 144 outputs, which are not 5 layers of one size",
        ),
        (
            {"layers.*.attention.qkv": {"style": "column", "fused": 3, "gather_output": True}},
            "layers.0.attention.qkv gathers its output, whose fused layers would be mixed",
        ),
        ({"layers.*.attention.output": {"style": "row", "fused": 2}}, "cannot be fused: only column layers are"),
        ({"final_norm": "column"}, "final_norm is a LayerNorm without a matrix weight"),
        ({"final_norm": "vocab_embedding"}, "final_norm is a LayerNorm; the style is for torch.nn.Embedding"),
        ({"final_norm": "vocab_output"}, "final_norm is a LayerNorm; the style is for torch.nn.Linear"),
        ("column", "'column' is no mapping from patterns of module names to styles"),
        ([QKV], f"['{QKV}'] is no mapping from patterns of module names to styles"),
        ({3: "column"}, "3 must be a pattern of module names, a string"),
        ({QKV: None}, f"'{QKV}' has None, which must be the name of a style, or {{\"style\": name, option: value}}"),
        ({QKV: ["column"]}, f"'{QKV}' has ['column'], which must be the name of a style"),
        ({QKV: {"style": ["column"]}}, f"'{QKV}' has the style ['column'], which does not exist"),
        ({QKV: {"style": None}}, f"'{QKV}' has the style None, which does not exist"),
        (
            {QKV: {"style": "column", "units": 0}},
            f"'{QKV}' gives 'column' the option 'units' as 0; it must be a whole number of 1 or more, or None",
        ),
        ({QKV: {"style": "column", "units": "4"}}, "the option 'units' as '4'; it must be a whole number of 1"),
        ({QKV: {"style": "column", "fused": 0}}, "the option 'fused' as 0; it must be a whole number of 1 or more"),
        ({QKV: {"style": "column", "fused": -1}}, "the option 'fused' as -1; it must be a whole number of 1 or more"),
        ({QKV: {"style": "column", "fused": True}}, "the option 'fused' as True; it must be a whole number"),
        ({QKV: {"style": "column", "gather_output": "no"}}, "'gather_output' as 'no'; it must be true or false"),
        ({QKV: {"style": "column", "unit_name": 3}}, "'unit_name' as 3; it must be text"),
        ({QKV: {"style": "column", "divide": "out_features"}}, "'divide' as 'out_features'; it must be a list of"),
        ({QKV: {"style": "column", "divide": 7}}, "'divide' as 7; it must be a list of names"),
        (
            {QKV: {"style": "column", "units": 0, "fused": 0}, "final_norm": 7},
            f"tensor parallel plan: '{QKV}' gives 'column' the option 'units' as 0; it must be a whole number of 1 or "
            "more, or None; it gives 'column' the option 'fused' as 0; it must be a whole number of 1 or more\n"
            "  'final_norm' has 7, which must be the name of a style",
        ),
    ],
)
def test_what_is_no_plan_is_refused_in_words(plan: Any, message: str) -> None:
    with pytest.raises(UserError) as raised:
        match_plan(glm(), plan, 2)
    assert message in str(raised.value)
    assert str(raised.value).startswith(("tensor parallel plan: ", "tensor parallel plan of "))


@pytest.mark.parametrize("option", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}])
def test_embeddings_that_need_all_rows_are_refused(option: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"0 has {next(iter(option))}, which needs all rows"):
        match_plan(nn.Sequential(nn.Embedding(8, 4, **option)), {"0": "vocab_embedding"}, 2)


def test_parameters_of_the_model_itself_are_named_by_an_empty_pattern() -> None:
    model = glm()
    model.scale = nn.Parameter(torch.ones(3))
    with pytest.raises(UserError, match=r'the model itself \(pattern ""\) has parameters of its own and no style'):
        match_plan(model, changed(), 2, True)
    match_plan(model, {"": "replicated", **changed()}, 2, True)
    match_plan(model, {"*": "replicated"}, 2)  # names what is in the model, and not the model


def test_dropout_inside_a_sharded_module_needs_a_word() -> None:
    """Behind the row layer values are whole, and must be dropped alike; nobody but the plan knows what lies where."""
    model = small_gpt2(dropout=0.1)
    match_plan(model, GPT2, 2)
    plan = {name: style for name, style in GPT2.items() if not name.endswith("resid_dropout")}
    with pytest.raises(
        UserError, match=r'h\.0\.attn\.resid_dropout is dropout inside a sharded module .* "replicated"'
    ):
        match_plan(model, plan, 2)
    match_plan(small_gpt2(), plan, 2)  # drops nothing


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_parameters_inside_a_sharded_module_need_a_word(sequence_parallel: bool) -> None:
    """Norms of heads, each rank of some: without the sum over the ranks their gradients would be parts."""
    model = build_model("qwen3_tiny", vocab_size=96)
    plan = dict(model.tensor_parallel_plan)
    match_plan(model, plan, 2, sequence_parallel)
    del plan["layers.*.attention.key_norm"]
    with pytest.raises(UserError, match=r"layers\.0\.attention\.key_norm has parameters .* inside a sharded") as raised:
        match_plan(model, plan, 2, sequence_parallel)
    assert str(raised.value).count("layers.0.attention.key_norm") == 1


def mistakes_in_a_group() -> list[str]:
    mesh = make_world(Sizes(tensor=2), "cpu").mesh
    assert mesh is not None
    messages = []
    torch.manual_seed(0)
    model = nn.ModuleDict({"embedding": nn.Embedding(8, 4), "output": nn.Linear(4, 8, bias=False)})
    model["output"].weight = model["embedding"].weight
    with pytest.raises(UserError) as raised:
        apply_plan(model, {"embedding": "vocab_embedding"}, mesh["tensor"])
    messages.append(str(raised.value))
    model = nn.ModuleDict({"one": nn.Linear(4, 8, bias=False), "other": nn.Linear(4, 8, bias=False)})
    model["other"].weight = model["one"].weight
    with pytest.raises(UserError, match=r"one\.weight and other\.weight are one parameter, but are not sharded"):
        apply_plan(model, {"one": {"style": "column", "fused": 2}, "other": "column"}, mesh["tensor"])
    # A stage of a pipeline holds a part of what the plan names.
    stage = glm().to_empty(device="cpu").layers
    for parameter in stage.parameters():
        nn.init.ones_(parameter)
    stage = nn.ModuleDict({"layers": stage})
    with pytest.raises(UserError, match="'token_embedding' matches no module"):
        apply_plan(stage, glm().tensor_parallel_plan, mesh["tensor"], True)
    apply_plan(stage, glm().tensor_parallel_plan, mesh["tensor"], True, partial=True)
    assert all(isinstance(parameter, DTensor) for parameter in stage.parameters())
    # On the meta device nothing is compared, and nothing is held.
    model = glm()
    apply_plan(model, model.tensor_parallel_plan, mesh["tensor"])
    assert all(parameter.is_meta and isinstance(parameter, DTensor) for parameter in model.parameters())
    assert model.token_embedding.weight.to_local().shape == (64, 48)
    return messages


def test_tied_parameters_that_are_cut_differently_and_stages() -> None:
    for messages in run_ranks(mistakes_in_a_group, 2):
        assert messages == [
            "tensor parallel plan: embedding.weight and output.weight are one parameter, but are not sharded "
            "the same way; give both modules matching styles, such as vocab_embedding and vocab_output"
        ]
