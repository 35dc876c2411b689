"""The planner's formulae, against numbers worked out by hand, against torch, and against what a layer really keeps."""

from __future__ import annotations

import dataclasses
import gc
import itertools

import pytest
import torch

from ftk.config import compose
from ftk.errors import UserError
from ftk.model_parallel.activation_checkpointing import checkpoint_blocks
from ftk.model_parallel.config import EngineConfig, ParallelConfig
from ftk.model_parallel.pipeline.layout import check_pipeline
from ftk.model_parallel.world import resolve_sizes
from ftk.models.bart import BartConfig
from ftk.models.bart.model import BART
from ftk.models.cpmant import CPMAntConfig
from ftk.models.cpmant.model import CPMAnt
from ftk.models.flops import DecoderWork
from ftk.models.glm.model import GLM
from ftk.models.t5 import T5Config
from ftk.modules.masks import Visibility
from ftk.planner import memory as memory_of
from ftk.planner.cluster import PRESETS
from ftk.planner.communication import ddp_buckets, traffic
from ftk.planner.layout import FIRST_PLACE, Layout, MeshPlace, Workload, conflicts
from ftk.planner.model_shape import ParameterShape, chunk_size, model_shape
from ftk.planner.plan_config import LimitsConfig
from ftk.planner.search import best_of_each_mesh, layouts, search
from ftk.planner.step_time import bubble_micro_batches, message_seconds, micro_batch_flops, ring, step_time
from ftk.trainer.config import TrainConfig
from tests.model_parallel.planned_updates import batch_of, config_of, shape_of, two_stacks, work_of

H100 = dataclasses.replace(PRESETS["h100-80g"])


@pytest.fixture(scope="module")
def shape():
    """4 layers, hidden 32, inner 128, 4 heads, 131 rows, tables of 31 positions."""
    return shape_of(config_of())


ALL = memory_of.LayerGroup(4, 16)  # its layers, with texts of 16 tokens
LAYER = (
    4 * 32 + (32 * 96 + 96) + (32 * 32 + 32) + (32 * 128 + 128) + (128 * 32 + 32)
)  # norms, qkv, output, inner, output
ENDS = 131 * 32 + 2 * 31 * 32 + 2 * 32  # token embedding, two tables of positions, last norm


# -- shapes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 7, 8, 131])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_rows_are_dealt_out_as_torch_chunk_does(rows, ranks):
    parts = [len(part) for part in torch.arange(rows).chunk(ranks)]
    assert [chunk_size(rows, ranks, rank) for rank in range(ranks)] == parts + [0] * (ranks - len(parts))


def test_shards_cut_the_rows_of_a_tensor_rank_again():
    parameter = ParameterShape("a", (10, 6), None, tensor_dim=0)
    assert parameter.local_shape(2, 2, 1, 1) == (2, 6)
    assert parameter.local_shape(2, 2, 1, 0) == (3, 6)
    assert ParameterShape("a", (10, 6), None, tensor_dim=1).local_shape(2, 4, 1, 3) == (1, 3)
    assert ParameterShape("a", (10,), None).local_shape(2, 4, 1, 3) == (1,)


def test_plan_and_stages_are_those_of_the_model(shape):
    dims = {parameter.name: parameter.tensor_dim for parameter in shape.parameters}
    assert dims["token_embedding.weight"] == 0
    assert dims["layers.3.attention.qkv.weight"] == dims["layers.3.attention.qkv.bias"] == 0
    assert dims["layers.3.attention.output.weight"] == dims["layers.3.feed_forward.output.weight"] == 1
    assert dims["layers.3.attention.output.bias"] is dims["final_norm.weight"] is None
    assert shape.num_parameters == 4 * LAYER + ENDS
    assert [p.name for p in shape.parameters if p.is_tied] == ["token_embedding.weight"]
    last = [p.name for p in shape.of_stage(3, 4) if p.block is None]
    assert last == ["token_embedding.weight", "final_norm.weight", "final_norm.bias"]
    assert not [p.name for p in shape.of_stage(1, 3) if p.block is None]


# -- memory ---------------------------------------------------------------------------------------------------------


def test_memory_of_one_process_by_hand(shape):
    work = Workload(8, 16, precision="fp32", loss_share=0.25)
    found = memory_of.memory(Layout(batch_size=2), shape, work)
    numbers = 4 * LAYER + ENDS
    assert (found.parameters, found.gradients, found.optimizer_state) == (4 * numbers, 4 * numbers, 8 * numbers)
    per_token = 4 * (2 * 32 + 2 * 32 + 3 * 32 + 32 + 2 * 128) + 16 + 4 * 4  # see `layer_activations`; no dropout
    assert memory_of.layer_activations(Layout(batch_size=2), shape, work, ALL) == 2 * 16 * per_token
    assert found.activations == 4 * 2 * 16 * per_token + 2 * 16 * 32
    assert found.buffers == found.average == 0
    assert found.total == sum(found.parts().values())


def test_layer_with_two_byte_numbers_keeps_34_hidden_sizes_of_korthikanti(shape):
    """sbh (34 + 5 a s / h) less what fused attention does not keep; 10 of it not shared by tensor parallel."""
    with_dropout = dataclasses.replace(shape, has_dropout=True, attention="flex")
    work = Workload(8, 16, precision="bf16")
    norm_statistics, logsumexp = 16, 4 * 4
    whole = memory_of.layer_activations(Layout(shard=2), with_dropout, work, ALL)
    # The residual path is float32: 2 bytes more for the inputs of each of two norms.
    assert whole == 16 * (34 * 32 + 2 * 2 * 32 + norm_statistics + logsumexp)
    shared = memory_of.layer_activations(Layout(shard=2, tensor=2), with_dropout, work, ALL)
    assert shared == 16 * (10 * 32 + 2 * 2 * 32 + norm_statistics + (24 * 32 + logsumexp) / 2)


@pytest.mark.parametrize(
    ("layout", "ranks", "waits"),
    [
        (Layout(pipeline=4), [4, 3, 2, 1], 3),
        (Layout(pipeline=4, schedule="gpipe"), [8, 8, 8, 8], 3),
        (Layout(pipeline=4, schedule="interleaved", stages_per_rank=2), [11, 9, 7, 5], 1.5),
        (Layout(pipeline=4, schedule="zero-bubble"), [4, 4, 4, 4], 1),
        (Layout(), [1], 0),
    ],
)
def test_micro_batches_in_flight_and_in_the_bubble(layout, ranks, waits):
    work = Workload(8, 16)  # 8 micro-batches
    assert [memory_of.chunks_in_flight(layout, work, rank) for rank in range(layout.pipeline)] == ranks
    assert bubble_micro_batches(layout) == pytest.approx(waits)


def test_zero_stages_keep_what_the_paper_says(shape):
    work = Workload(64, 16, precision="fp32")
    one, two, three = (memory_of.memory(Layout(shard=4, zero_stage=stage), shape, work) for stage in (1, 2, 3))
    assert one.parameters == two.parameters == three.parameters
    assert one.optimizer_state == three.optimizer_state == 2 * three.parameters
    padded = shape.num_parameters + 32 + 2 * 32  # rows filled up to 132 and 32
    assert three.parameters == 4 * padded // 4  # bytes of one of four processes
    assert two.buffers - three.buffers == 4 * 2 * LAYER  # ZeRO-3 holds two blocks of four
    assert one.buffers - two.buffers == 4 * (4 * LAYER + 132 * 32 + 2 * 32 * 32 + 2 * 32)  # whole gradients


MODES = pytest.mark.parametrize("mode", ["none", "selective", "full"])
PRECISIONS = pytest.mark.parametrize("precision", ["fp32", "bf16"])


@MODES
@PRECISIONS
def test_activations_are_what_the_layers_of_a_model_keep(mode, precision):
    config = config_of(attention="sdpa", max_positions=64)
    work = Workload(3, 16, precision=precision)
    model = GLM(config, 1).train()
    checkpoint_blocks(model, mode)
    batch = batch_of(config, 3).inputs  # 48 tokens, which no weight has rows of
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        hidden = model.embed(batch["tokens"], batch["position_ids"])
        counted = kept_bytes(model, model.layers, hidden, model.attend(batch["tokens"], batch["context_length"]), mode)
    layout = Layout(batch_size=3, checkpointing=mode)
    assert counted == 4 * memory_of.layer_activations(layout, shape_of(config), work, ALL)


@MODES
@PRECISIONS
def test_activations_are_what_the_layers_of_two_stacks_keep(mode, precision):
    config = two_stacks(BartConfig, attention="sdpa", max_positions=64)
    layout = Layout(batch_size=3, checkpointing=mode)
    shape, work = shape_of(config), work_of(layout, 1, config, precision=precision)
    model = BART(config, 1).train()
    checkpoint_blocks(model, mode)
    inputs = batch_of(config, 3).inputs
    tokens, lengths = inputs["tokens"], inputs["lengths"]
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        states, hidden = model.enter(tokens, inputs)
        attend = model.sequence_attend(tokens, Visibility(causal=False, length=lengths))
        found = [kept_bytes(model, model.encoder.layers, states, attend, mode)]
        attend = model.attend(inputs["decoder_tokens"], states, tokens.size(1), lengths)
        found.append(kept_bytes(model, model.decoder.layers, hidden, attend, mode, beside=states))
    stages = (0, 2), (2, 5)
    of_decoder = memory_of.stage_activations(layout, shape, work, stages[1]) - states.nbytes
    assert found == [memory_of.stage_activations(layout, shape, work, stages[0]), of_decoder]


def kept_bytes(model, layers, hidden, attend, mode, beside=None):
    """What layers keep until their backward pass, but for what is the next one's and for `beside`."""
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    if mode == "selective":
        gc.collect()
        before = {id(found) for found in gc.get_objects() if type(found) is torch.Tensor}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        for layer in layers:
            hidden = layer(hidden, attend)
    if mode == "selective":  # these are kept by the mode, not by the graph
        for found in gc.get_objects():
            if type(found) is torch.Tensor and id(found) not in before:
                keep(found)
    for tensor in (hidden, beside):
        if tensor is not None:
            kept.pop(tensor.untyped_storage().data_ptr(), None)
    weights = {tuple(parameter.shape) for parameter in model.parameters()}
    weights |= {shape[::-1] for shape in weights}
    return sum(
        tensor.untyped_storage().nbytes()
        for tensor in kept.values()
        # Not weights and autocast's copies of them, not the state of the generator.
        if tuple(tensor.shape) not in weights and tensor.dtype not in (torch.uint8, torch.bool)
    )


# -- messages and time ------------------------------------------------------------------------------------------------


def test_tensor_parallel_sums_twice_in_each_pass_of_a_layer(shape):
    work = Workload(4, 16, precision="fp32")
    found = [
        t for t in traffic(Layout(tensor=2, batch_size=2), shape, work) if "matrices" in t.what or "inputs" in t.what
    ]
    assert [(t.collective, t.count, t.message_bytes) for t in found] == [("all-reduce", 2 * 2 * 4, 2 * 16 * 32 * 4)] * 2


def test_sequence_parallel_sends_as_much_as_tensor_parallel(shape):
    """Korthikanti et al. 2022, 4.2.2: an all-reduce is a reduce-scatter and an all-gather."""
    work = Workload(4, 16, precision="fp32")

    def sent(sequence: bool) -> float:
        layout = Layout(tensor=4, batch_size=2, sequence_parallel=sequence)
        found = traffic(layout, shape, work, MeshPlace())
        return sum(
            t.sent_bytes(4) for t in found if "matrices" in t.what or "of inputs" in t.what or "outputs" in t.what
        )

    assert sent(True) == sent(False) > 0


@pytest.mark.parametrize(("stage", "multiple"), [(1, 2), (2, 1 + 4), (3, 3 * 4)])
def test_zero_sends_multiples_of_the_parameters(shape, stage, multiple):
    """Rajbhandari et al. 2020, section 7, with 4 micro-batches; what is in no block is gathered once a micro-batch."""
    work = Workload(2 * 4, 16, precision="fp32")
    found = traffic(Layout(shard=2, zero_stage=stage), shape, work)
    blocks = sum(t.total_bytes for t in found if "blocks" in t.what)
    assert blocks == multiple * 4 * 4 * LAYER
    rest = sum(t.total_bytes for t in found if "rest" in t.what)
    assert rest == (2 * 4 if stage == 3 else multiple) * 4 * (132 * 32 + 2 * 32 * 32 + 2 * 32)


def test_ddp_fills_a_small_bucket_first():
    mib = 2**20
    assert ddp_buckets([mib // 2, mib, 20 * mib, 10 * mib, 3]) == [mib * 3 // 2, 30 * mib, 3]
    assert ddp_buckets([]) == []


def test_bandwidth_of_a_group_by_where_its_ranks_are():
    layout = Layout(tensor=4, shard=4, replicate=2, pipeline=2)
    assert [ring(name, layout) for name in ("tensor", "shard", "replicate", "pipeline")] == [
        (4, 1),
        (4, 4),
        (2, 16),
        (2, 32),
    ]
    node, network = H100.node_bandwidth, H100.network_bandwidth
    assert H100.bus_bandwidth(8, 1) == H100.bus_bandwidth(2, 4) == node
    assert H100.bus_bandwidth(2, 8) == network  # one rank a node
    assert H100.bus_bandwidth(4, 4) == 2 * network  # two ranks a node, each with its own card
    assert H100.bus_bandwidth(64, 1) == min(node, 8 * network)


def test_an_all_reduce_takes_its_bytes_by_the_bandwidth(shape):
    layout = Layout(tensor=2)
    [first, *_] = traffic(layout, shape, Workload(1, 16, precision="fp32"))
    seconds = first.count * (first.message_bytes / H100.node_bandwidth + 8e-6)
    assert message_seconds(first, layout, H100) == pytest.approx(seconds)


def test_parts_of_a_model_have_the_operations_of_the_whole(shape):
    work = Workload(8, 16)
    layout = Layout(tensor=2, pipeline=2, batch_size=2)
    pieces = sum(2 * micro_batch_flops(layout, shape, work, [stage]) for stage in ((0, 2), (2, 4)))
    tokens = 2 * 16
    assert pieces == pytest.approx(shape.training_flops(tokens, work.num_targets(2), tokens * 16))
    full = dataclasses.replace(layout, checkpointing="full")
    assert micro_batch_flops(full, shape, work, [(0, 2)]) == pytest.approx(
        micro_batch_flops(layout, shape, work, [(0, 2)]) * 4 / 3
    )


@pytest.mark.parametrize("kind", [BartConfig, T5Config])
def test_parts_of_an_encoder_decoder_have_the_operations_of_the_whole(kind):
    config = two_stacks(kind)
    layout, its = Layout(tensor=2, batch_size=2), shape_of(config)
    work = work_of(layout, 1, config)
    pieces = sum(2 * micro_batch_flops(layout, its, work, [stage]) for stage in ((0, 1), (1, 3), (3, 5)))
    decoder = DecoderWork(2 * 12, 2 * 12 * 12, 2 * 12 * 16)
    assert pieces == pytest.approx(its.training_flops(2 * 16, 2 * 4, 2 * 16 * 16, decoder))
    of_encoder = 2 * micro_batch_flops(layout, its, work, [(0, 2)])
    tokens, width = 2 * 16, its.attention_width
    assert of_encoder == 6 * 2 * (tokens * config.layer_multiplications + tokens * 16 * 2 * width)


def test_mfu_is_the_efficiency_less_what_is_waited_for(shape):
    work = Workload(64, 16)
    for layout in (Layout(), Layout(tensor=2), Layout(pipeline=2), Layout(shard=4), Layout(replicate=4)):
        found = step_time(layout, shape, work, H100, 0.5)
        assert found.mfu <= 0.5 * (found.compute / found.total) * 1.2  # the slowest stage has more than its share
        assert found.total == pytest.approx(sum(found.parts.values()))
        assert found.tokens_per_second == pytest.approx(64 * 16 / found.total)


# -- search -----------------------------------------------------------------------------------------------------------


def test_search_finds_every_mesh_and_ranks_by_time(shape):
    work = Workload(64, 16)
    found = search(shape, work, H100, 8, LimitsConfig(), 0.5)
    meshes = {(p.layout.tensor, p.layout.pipeline, p.layout.shard, p.layout.replicate) for p in found.plans}
    expected = {
        (t, p, s, 8 // (t * p * s)) for t in (1, 2, 4) for p in (1, 2, 4) for s in (1, 2, 4, 8) if 8 % (t * p * s) == 0
    }
    assert meshes == expected
    totals = [plan.time.total for plan in found.plans]
    assert totals == sorted(totals)
    assert len(best_of_each_mesh(found.plans)) == len(meshes)
    assert all(plan.layout.world == 8 for plan in found.plans)


def test_limits_are_kept(shape):
    limits = LimitsConfig(
        tensor_parallel_size=2,
        data_parallel_shard_size=2,
        sequence_parallel=True,
        zero_stage=2,
        activation_checkpointing="full",
        batch_size=4,
    )
    found = list(layouts(shape, Workload(64, 16), 8, limits))
    assert [(x.pipeline, x.replicate) for x in found] == [(1, 2), (2, 1)]
    assert {(x.tensor, x.shard, x.sequence_parallel, x.checkpointing, x.batch_size) for x in found} == {
        (2, 2, True, "full", 4)
    }
    refused = [[conflict.reason for conflict in conflicts(x, shape, Workload(64, 16))] for x in found]
    assert refused == [[], ["ZeRO-2 in a pipeline, which keeps whole gradients until an update ends"]]
    default = layouts(shape, Workload(64, 16), 4, LimitsConfig(pipeline_parallel_size=2, data_parallel_shard_size=2))
    assert {x.zero_stage for x in default} == {1}  # so are pipelines trained


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved", "zero-bubble"])
def test_flags_of_a_plan_are_those_of_training(shape, schedule):
    limits = LimitsConfig(pipeline_schedule=schedule)
    model = ("--num-layers", "4", "--hidden-size", "32", "--num-attention-heads", "4")
    found = best_of_each_mesh(search(shape, Workload(64, 16), H100, 4, limits, 0.5).plans)
    assert len(found) == (9 if schedule == "interleaved" else 10)  # of 4 layers no 8 stages
    for plan in found:
        layout, count = plan.layout, plan.layout.micro_batches(64)
        flags = [*layout.flags(Workload(64, 16, precision="fp32")).split(), "--max-update", "1"]
        config = compose(TrainConfig, "ftk-train", "", ["data", "--arch", "glm_tiny", *model, *flags])
        assert resolve_sizes(config.parallel, 4) == (layout.pipeline, layout.replicate, layout.shard, layout.tensor)
        assert (config.training.update_freq, config.training.precision, config.task.config.seq_length) == (
            count,
            "fp32",
            16,
        )
        assert config.parallel.sequence_parallel == layout.sequence_parallel
        assert config.engine.activation_checkpointing == layout.checkpointing
        if layout.pipeline > 1:
            cut = check_pipeline(config.parallel, config.engine, shape.num_layers, count)
            assert cut.layers_per_stage == layout.stage_layers(shape.num_layers)


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        (Layout(tensor=3), "T does not divide 4 attention heads: T 3"),
        (Layout(pipeline=5), "more pipeline stages than 4 layers: 5"),
        (Layout(replicate=3), "R x S does not divide the 64 samples of an update: 3"),
        (Layout(batch_size=3), "micro-batches do not divide the samples of a data rank: 3 of 64"),
        (Layout(pipeline=4, batch_size=32), "fewer micro-batches than pipeline stages: 2 for 4"),
        (
            Layout(pipeline=4, batch_size=32, schedule="zero-bubble"),
            "micro-batches in no whole rounds, which zero-bubble needs: 2 for P 4",
        ),
        (
            Layout(pipeline=2, schedule="zero-bubble", checkpointing="selective"),
            "zero-bubble with selective checkpointing: P 2",
        ),
        (Layout(sequence_parallel=True), "sequence parallel needs T above 1: T 1"),
    ],
)
def test_what_cannot_be_is_told_with_its_numbers(shape, layout, text):
    found = [f"{conflict.reason}: {conflict.numbers}" for conflict in conflicts(layout, shape, Workload(64, 16))]
    assert text in found


def test_what_is_no_misfit_is_what_training_takes(shape):
    """Of schedules, checkpointing and numbers of micro-batches."""
    for schedule, mode, size in itertools.product(
        ("1f1b", "gpipe", "interleaved", "zero-bubble"), ("none", "selective", "full"), (1, 2, 4, 8, 16, 32)
    ):
        chunks = 2 if schedule == "interleaved" else 1
        layout = Layout(pipeline=2, batch_size=size, schedule=schedule, stages_per_rank=chunks, checkpointing=mode)
        parallel = ParallelConfig(pipeline_parallel_size=2, pipeline_schedule=schedule)
        try:
            check_pipeline(parallel, EngineConfig(activation_checkpointing=mode), 4, layout.micro_batches(96))
            taken = True
        except UserError:
            taken = False
        assert taken == (not list(conflicts(layout, shape, Workload(96, 16)))), layout


def test_the_zero_bubble_gathers_in_float32(shape):
    work = Workload(64, 16, precision="bf16")
    sizes = {}
    for schedule in ("gpipe", "zero-bubble"):
        layout = Layout(pipeline=2, shard=2, zero_stage=1, schedule=schedule)
        found = [one for one in traffic(layout, shape, work, FIRST_PLACE) if one.what == "parameters of blocks"]
        sizes[schedule] = [one.message_bytes for one in found]
    assert sizes["zero-bubble"] == [2 * size for size in sizes["gpipe"]] != []


def test_a_model_whose_blocks_are_not_in_a_list_is_not_planned():
    config = config_of()
    with torch.device("meta"):
        model = GLM(config)
    model.layers = model.layers[:3]
    with pytest.raises(UserError, match=r"^GLM cannot be planned: its options have num_layers 4, but .* blocks has 3$"):
        model_shape(model, config)


def test_models_without_plan_or_stages_are_planned_without(shape):
    bare = dataclasses.replace(shape, has_tensor_plan=False, has_stages=False, has_sequence_parallel=False)
    layout = Layout(tensor=2, pipeline=2, sequence_parallel=True)
    assert [m.reason for m in conflicts(layout, bare, Workload(64, 16))] == [
        "the model has no plan for tensor parallel",
        "the model has no pipeline stages that can be planned",
        "the model cannot be trained by sequence parallel",
    ]


def test_a_model_that_adds_tokens_is_planned_without_sequence_parallel():
    config = CPMAntConfig(vocab_size=131, num_layers=4, hidden_size=32, num_attention_heads=4, head_dim=8)
    with torch.device("meta"):
        its = model_shape(CPMAnt(config), config)
    assert its.has_tensor_plan
    assert not its.has_sequence_parallel
    assert not its.has_stages


def test_lack_of_memory_is_counted_and_the_least_is_named(shape):
    tiny = dataclasses.replace(H100, memory_bytes=1000.0)
    found = search(shape, Workload(8, 16), tiny, 4, LimitsConfig(), 0.5)
    assert not found.plans
    assert found.smallest is not None
    needed = [
        memory_of.memory(x, shape, Workload(8, 16)).total for x in layouts(shape, Workload(8, 16), 4, LimitsConfig())
    ]
    assert found.smallest[1].total <= sorted(needed)[len(needed) // 2]
    assert sum(numbers.total() for numbers in found.refused.values()) == len(needed)


# -- clusters ---------------------------------------------------------------------------------------------------------
