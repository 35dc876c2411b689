"""Cutting models into stages, and batches of one shape."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.distributed.pipelining._backward import stage_backward

from ftk.batch import Batch
from ftk.criterions.base import Criterion, LossOutput
from ftk.criterions.cross_entropy import CrossEntropy, CrossEntropyConfig
from ftk.errors import UserError
from ftk.model_parallel.blocks import blocks_of
from ftk.model_parallel.materialize import materialize
from ftk.model_parallel.pipeline.layout import PipelineLayout
from ftk.model_parallel.pipeline.schedule import Schedule
from ftk.model_parallel.pipeline.stage_module import MicroBatch, Shape, Stage
from ftk.model_parallel.pipeline.stages import cut_model
from ftk.models import build_model
from ftk.models.base import Backbone
from tests.model_parallel.pipeline_steps import five_layers, varied_batches

LAYOUTS = [PipelineLayout((2, 1, 1, 1), 4), PipelineLayout((1, 4), 2), PipelineLayout((2, 1, 1, 1), 2)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_stages_hold_each_parameter_once_by_its_own_name_but_for_the_tied_one(layout):
    with torch.device("meta"):
        model = five_layers()
    parts = [cut_model(model, layout, rank) for rank in range(layout.num_ranks)]
    names = [name for part in parts for name, _ in part.model.named_parameters() if name not in part.copies]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    assert [sorted(part.copies) for part in parts] == [[]] * (layout.num_ranks - 1) + [["token_embedding.weight"]]
    for part in parts:
        in_stages = [name for stage in part.stages for name, _ in stage.named_parameters()]
        assert sorted(in_stages) == sorted(name for name, _ in part.model.named_parameters())
        assert part.names == tuple(name for name, _ in model.named_parameters())
        assert part.hidden_size == 32


def test_a_part_of_a_meta_model_holds_no_bytes_and_nothing_of_other_stages():
    with torch.device("meta"):
        model = five_layers()
    part = cut_model(model, PipelineLayout((2, 1, 1, 1), 4), 1)
    part.model.to_empty(device="cpu")
    held = sum(parameter.numel() for parameter in part.model.parameters())
    assert held == sum(parameter.numel() for parameter in model.layers[2].parameters())
    assert all(parameter.is_meta for name, parameter in model.named_parameters() if not name.startswith("layers.2."))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("loss_apart", [False, True])
@pytest.mark.parametrize("criterion", ["glm", "glm_smoothed", "plain"])
def test_stages_one_after_the_other_are_the_model(layout, loss_apart, criterion):
    """Without processes: each stage by hand, gradients of all."""
    model = five_layers()
    batch = varied_batches(0)[0]
    if criterion == "plain":
        batch = replace(batch, inputs={"tokens": batch.inputs["tokens"]})
        loss_of = CrossEntropy(CrossEntropyConfig())
    else:
        smoothing = 0.1 if criterion == "glm_smoothed" else 0.0
        loss_of = CrossEntropy(CrossEntropyConfig(label_smoothing=smoothing, loss_form="chunked"))
    expected = loss_of(model, batch)
    (expected.loss * 0.25).backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    shape = Shape(*batch.inputs["tokens"].shape)
    micro_batch = MicroBatch(batch, torch.tensor(0.25), (shape,), room=shape.rows * shape.tokens + 5)
    backward_of_stages(model, layout, loss_of, micro_batch, loss_apart=loss_apart)
    (output,) = micro_batch.outputs
    assert not output.loss.requires_grad
    torch.testing.assert_close(output.loss, expected.loss.detach())
    torch.testing.assert_close(output.meters, expected.meters)
    torch.testing.assert_close({name: one.grad for name, one in model.named_parameters()}, gradients)


def backward_of_stages(model, layout, loss_of, micro_batch, **options) -> torch.Tensor:
    """Stages by hand, one after the other; what the last one hands on."""
    parts = [cut_model(model, layout, rank) for rank in range(layout.num_ranks)]
    handed_on = torch.zeros(())
    for index in range(layout.num_stages):
        own = parts[layout.rank_of(index)].stages[index // layout.num_ranks]
        stage = Stage(own, loss_of, index, layout.num_stages, **options)
        stage.begin([micro_batch])
        handed_on = stage(handed_on)
    handed_on.backward()
    return handed_on


def two_stacks(arch: str, **options) -> nn.Module:
    """Three layers in the encoder and two in the decoder."""
    shape = {"vocab_size": 40, "num_layers": 3, "num_decoder_layers": 2, "hidden_size": 16, "num_attention_heads": 2}
    return build_model(arch, **shape, **options).eval()


@pytest.mark.parametrize("layout", LAYOUTS[:2], ids=str)
@pytest.mark.parametrize(
    ("arch", "options"),
    [
        ("t5_tiny", {"gated": True}),
        ("bart_tiny", {}),
        ("transformer_tiny", {"norm_first": True, "share_embeddings": "none"}),
    ],
)
def test_stages_of_two_stacks_are_the_model(layout, arch, options):
    """Also where one stage has layers of both, and tables of positions are of several stages."""
    model = two_stacks(arch, **options)
    source, target = torch.arange(14).view(2, 7), torch.arange(10).view(2, 5)
    inputs = {"tokens": source, "decoder_tokens": target, "lengths": torch.tensor([7, 4])}
    batch = Batch(inputs, torch.tensor([3, 4, 5]), torch.tensor([1, 4, 8]))
    loss_of = CrossEntropy(CrossEntropyConfig())
    expected = loss_of(model, batch).loss
    expected.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    micro_batch = MicroBatch(batch, torch.ones(()), (Shape(2, 7), Shape(2, 5)), room=30)
    torch.testing.assert_close(backward_of_stages(model, layout, loss_of, micro_batch), expected)
    torch.testing.assert_close({name: one.grad for name, one in model.named_parameters()}, gradients)


def test_a_table_of_several_layers_is_on_the_stages_that_have_them():
    with torch.device("meta"):
        model = two_stacks("t5_tiny")
    parts = [cut_model(model, LAYOUTS[0], rank) for rank in range(4)]
    tables = {f"stacks.{side}.position_bias.weight": side for side in ("encoder", "decoder")}
    tied = {"token_embedding.weight": (0, 3)} if model.config.tie_embeddings else {}
    assert parts[0].holders == {**tied, **dict(zip(tables, [(0, 1), (2, 3)], strict=True))}
    copies = [[side for name, side in tables.items() if name in part.copies] for part in parts]
    assert copies == [[], ["encoder"], [], ["decoder"]]
    norms = [[name for name, _ in part.model.named_parameters() if "encoder.final_norm" in name] for part in parts]
    assert norms == [[], ["stacks.encoder.final_norm.weight"], [], []]
    assert [[name.rsplit(".", 2)[0] for name, _ in blocks_of(part.model)] for part in parts] == [
        ["stacks.encoder"] * 2,
        ["stacks.encoder"],
        ["stacks.decoder"],
        ["stacks.decoder"],
    ]


def test_tables_of_positions_at_the_start_are_no_blocks():
    """Of the decoder, whose layers are on the other stage."""
    with torch.device("meta"):
        model = two_stacks("bart_tiny")
    part = cut_model(model, PipelineLayout((3, 2), 2), 0)
    assert "stacks.decoder.position_embedding.weight" in dict(part.model.named_parameters())
    assert [name for name, _ in blocks_of(part.model)] == [f"stacks.encoder.layers.{place}" for place in range(3)]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, hidden, attend):
        return hidden + attend(self.inner(hidden))


class TiedHead(nn.Module):
    """A tied matrix among parameters of its own, as the head of BERT."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.dense = nn.Linear(8, 8)
        self.weight = weight
        self.bias = nn.Parameter(torch.zeros(11))

    def forward(self, hidden):
        return nn.functional.linear(self.dense(hidden), self.weight, self.bias)


class OtherModel(Backbone):
    """Built unlike GLM: layers deep inside, the output layer tied under another name, a buffer, a frozen parameter."""

    INPUTS: ClassVar[dict[str, str]] = {"tokens": "B T"}

    def __init__(
        self, num_blocks=3, own_head=False, extra: bool = False, shared: bool = False, with_embedding: bool = False
    ) -> None:
        super().__init__(config=None)
        blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.trunk = nn.ModuleDict({"words": nn.Embedding(11, 8), "blocks": blocks})
        if shared:
            self.trunk["blocks"][2].inner = self.trunk["blocks"][0].inner
        if with_embedding:
            self.trunk["blocks"][2].words = self.trunk["words"]
        self.final_norm = nn.LayerNorm(8)
        weight = self.trunk["words"].weight
        self.head = TiedHead(weight) if own_head else nn.Linear(8, 11, bias=False)
        self.head.weight = weight
        self.output_scale = nn.Parameter(torch.ones(()))
        self.register_buffer("factor", torch.tensor(0.5))
        self.final_norm.bias.requires_grad_(False)
        if extra:
            self.pooler = nn.Linear(8, 8)

    @property
    def layers(self) -> nn.ModuleList:
        return self.trunk["blocks"]

    def embed(self, tokens):
        return self.trunk["words"](tokens)

    def attend(self, tokens):
        return lambda values: values * self.factor

    def finish(self, hidden):
        return self.final_norm(hidden) * self.output_scale


def test_a_foreign_model_is_cut_by_what_uses_its_parameters():
    model = OtherModel()
    first, second = (cut_model(model, PipelineLayout((1, 2), 2), rank) for rank in range(2))
    tied = {"trunk.words.weight"}
    assert {name for name, _ in first.model.named_parameters()} == tied | {
        "trunk.blocks.0.inner.weight",
        "trunk.blocks.0.inner.bias",
    }
    assert {name for name, _ in second.model.named_parameters()} == tied | {
        f"trunk.blocks.{place}.inner.{kind}" for place in (1, 2) for kind in ("weight", "bias")
    } | {"final_norm.weight", "final_norm.bias", "output_scale"}
    assert first.holders == second.holders == dict.fromkeys(tied, (0, 1))
    assert second.copies == tied
    assert not first.copies
    assert not model.final_norm.bias.requires_grad
    assert model.training
    tokens = torch.arange(6)[None]
    hidden = first.model.embed(tokens)
    for part in (first, second):
        for layer in part.model.layers:
            hidden = layer(hidden, part.model.attend(tokens))
    torch.testing.assert_close(second.model.finish(hidden), model.hidden_states(tokens))


@pytest.mark.parametrize("layout", [PipelineLayout((1, 2), 2), PipelineLayout((1, 1, 1, 1), 2)], ids=str)
@pytest.mark.parametrize("own_head", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_what_gets_memory_in_a_stage_is_what_the_process_trains(layout, own_head, rank):
    """Also where the model itself has a parameter, and where the output is a module of its own that is tied."""
    with torch.device("meta"):
        model = OtherModel(layout.num_layers, own_head)
    part = cut_model(model, layout, rank)
    for stage in part.stages:
        materialize(stage, stage, torch.device("cpu"), lambda name, shape: torch.full(shape, 2.0))
    of_stages = {name: parameter for stage in part.stages for name, parameter in stage.named_parameters()}
    assert dict(part.model.named_parameters()).keys() == of_stages.keys()
    assert ("head.bias" in of_stages) == (own_head and rank == 1)
    for name, parameter in part.model.named_parameters():
        assert parameter is of_stages[name]
        assert parameter.eq(2.0).all()
    end = part.stages[0 if rank == 0 else -1]
    assert end.head.weight is end.trunk["words"].weight is part.model.trunk["words"].weight


@pytest.mark.parametrize(
    ("model", "layout", "message"),
    [
        (nn.Linear(2, 2), PipelineLayout((1, 1), 2), "Linear is no ftk.models.base.Backbone; a pipeline cannot"),
        (OtherModel(), PipelineLayout((2, 2), 2), "OtherModel has 3 layers, the pipeline is laid out for 4"),
        (OtherModel(extra=True), PipelineLayout((1, 2), 2), "2 parameters outside of embed, layers, finish"),
        (OtherModel(shared=True), PipelineLayout((1, 2), 2), "different stages share the parameter 'trunk.blocks.0"),
        (OtherModel(with_embedding=True), PipelineLayout((1, 2), 2), "uses 'trunk.words.weight' in a layer and at"),
        (
            build_model("cpm1_tiny", num_layers=4),
            PipelineLayout((1, 1, 1, 1), 2),
            "`pipeline_stages_per_rank` 2: two stages of one rank share the parameter 'position_bias.weight' of CPM1",
        ),
    ],
    ids=["no model", "layers", "extra", "shared", "with embedding", "table of all layers"],
)
def test_models_that_cannot_be_cut_are_refused_with_the_reason(model, layout, message):
    with pytest.raises(UserError) as refused:
        cut_model(model, layout, 0)
    assert message in str(refused.value)


def stage_of_other(criterion, index: int = 0) -> Stage:
    part = cut_model(OtherModel(), PipelineLayout((1, 2), 2), index)
    return Stage(part.stages[0], criterion, index, 2)


class SumOfHidden(Criterion):
    def loss(self, head, hidden, batch):
        return LossOutput(hidden.sum(), torch.tensor(len(batch.targets)), {})


class TwoPasses(SumOfHidden):
    def __call__(self, model, batch):
        super().__call__(model, batch)
        return super().__call__(model, batch)


def test_a_criterion_of_several_passes_is_refused():
    with pytest.raises(UserError, match=r"^TwoPasses takes the model through more than one pass"):
        stage_of_other(TwoPasses())


def test_a_stage_of_frozen_parameters_has_an_end_for_the_backward_pass():
    stage = stage_of_other(SumOfHidden())
    stage.requires_grad_(False)
    batch = Batch({"tokens": torch.zeros(1, 4, dtype=torch.int64)}, torch.tensor([1]), torch.tensor([3]))
    stage.begin([MicroBatch(batch, torch.ones(()), (Shape(1, 4),), room=4)])
    hidden = stage(torch.zeros(()))
    hidden.sum().backward()
    assert all(parameter.grad is None for parameter in stage.parameters())


def test_longer_sequences_change_neither_loss_nor_meters():
    model = five_layers()
    loss_of = CrossEntropy(CrossEntropyConfig())
    for batch in varied_batches(1):
        longer = batch.longer(16, model.INPUTS)
        rows = len(batch.inputs["tokens"])
        assert longer.inputs["tokens"].shape == (rows, 32)
        assert longer.inputs["position_ids"].shape == (rows, 2, 32)
        one, other = loss_of(model, batch), loss_of(model, longer)
        torch.testing.assert_close(one.loss, other.loss)
        torch.testing.assert_close(one.meters, other.meters)


@pytest.mark.parametrize("count", [1, 2])
def test_what_fails_in_a_stage_comes_out_of_torchs_schedule_as_it_was(count):
    """Torch wraps it once or twice in a RuntimeError that lists the stage's tensors."""

    def refuse(gradient):
        raise UserError("use another form of the loss")

    hurt = nn.Linear(2, 1)
    hurt.weight.register_hook(refuse)

    class Failing:
        def _step_microbatches(self, *arguments):
            loss = hurt(torch.ones(1, 2)).sum()
            stage_backward(loss, None, ())

    class Runtime(Failing):
        def _step_microbatches(self, *arguments):
            try:
                super()._step_microbatches()
            except RuntimeError as error:
                raise RuntimeError("[Stage 1] failed to run forward: ") from error

    schedule = Schedule.__new__(Schedule)
    schedule._modules, schedule._stages = (), []
    schedule._schedule, schedule._nothing = (Failing() if count == 1 else Runtime()), torch.zeros(())
    with pytest.raises(UserError, match=r"^use another form of the loss$"):
        schedule.run([])


def test_a_failure_of_the_schedule_itself_stays_as_it_is():
    class Failing:
        def _step_microbatches(self, *arguments):
            try:
                raise ValueError("no such stage")
            except ValueError as error:
                raise RuntimeError("the schedule is broken") from error

    schedule = Schedule.__new__(Schedule)
    schedule._modules, schedule._stages = (), []
    schedule._schedule, schedule._nothing = Failing(), torch.zeros(())
    with pytest.raises(RuntimeError, match=r"^the schedule is broken$"):
        schedule.run([])
