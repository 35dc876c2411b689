"""Which layers go on which stage, and what is refused before anything starts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftk.config.options import mistakes
from ftk.errors import UserError
from ftk.model_parallel.config import EngineConfig, ParallelConfig
from ftk.model_parallel.pipeline.layout import (
    PipelineLayout,
    check_micro_batches,
    check_pipeline,
    even_layers,
    pipeline_layout,
)


@given(num_stages=st.integers(1, 20), more=st.integers(0, 60))
def test_even_layers_differ_by_one_at_most_and_the_last_stage_has_the_fewest(num_stages, more):
    counts = even_layers(num_stages + more, num_stages)
    assert sum(counts) == num_stages + more
    assert max(counts) - min(counts) <= 1
    assert list(counts) == sorted(counts, reverse=True)
    assert min(counts) >= 1


def test_stages_lie_on_ranks_in_a_loop():
    config = ParallelConfig(pipeline_parallel_size=2, pipeline_schedule="interleaved")
    layout = pipeline_layout(10, config)
    assert layout == PipelineLayout((3, 3, 2, 2), 2)
    assert [list(layout.layers_of(stage)) for stage in range(4)] == [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]
    assert list(layout.stages_of(0)) == [0, 2]
    assert list(layout.stages_of(1)) == [1, 3]
    assert layout.last_rank == 1


def test_explicit_layers_may_be_uneven():
    config = ParallelConfig(pipeline_parallel_size=4, pipeline_layers=[6, 6, 5, 7])
    assert pipeline_layout(24, config).layers_per_stage == (6, 6, 5, 7)


@pytest.mark.parametrize(
    ("options", "num_layers", "message"),
    [
        ({"pipeline_layers": [3, 2, 1]}, 6, "`pipeline_layers` 3,2,1 has 3 stages, `pipeline_parallel_size` 2 needs 2"),
        ({}, 0, "`pipeline_parallel_size` 2: the model has no list of layers to be cut"),
        ({"pipeline_layers": [3, 2]}, 6, "`pipeline_layers` 3,2 is 5 layers, the model has 6"),
        (
            {"pipeline_schedule": "interleaved", "pipeline_stages_per_rank": 3},
            5,
            "`pipeline_parallel_size` 2 with 3 stages a process cuts the model into 6 stages, and it has 5 layers",
        ),
    ],
)
def test_layouts_that_cannot_be_are_refused_with_the_numbers(options, num_layers, message):
    with pytest.raises(UserError) as refused:
        pipeline_layout(num_layers, ParallelConfig(pipeline_parallel_size=2, **options))
    assert message in str(refused.value)


def test_no_rank_has_more_stages_than_another():
    """Else the first and the last stage, which share tied parameters, could be on one rank."""
    with pytest.raises(ValueError, match="3 stages on 2 ranks"):
        PipelineLayout((1, 1, 1), 2)


@pytest.mark.parametrize(
    ("schedule", "num_stages", "count", "message"),
    [
        ("1f1b", 4, 3, "1f1b over 4 stages needs 4 micro-batches per update or more, `update_freq` is 3"),
        ("interleaved", 4, 1, "in rounds of 2, `update_freq` is 1; use 2"),
        ("interleaved", 4, 5, "in rounds of 2, `update_freq` is 5; use 4 or 6"),
        ("zero-bubble", 2, 1, "zero-bubble over 2 stages on 2 processes"),
    ],
)
def test_too_few_micro_batches_are_refused_with_the_number_that_is_needed(schedule, num_stages, count, message):
    ranks = 4 if schedule == "1f1b" else 2
    with pytest.raises(UserError, match=r"`update_freq`") as refused:
        check_micro_batches(schedule, PipelineLayout((1,) * num_stages, ranks), count)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("schedule", "count"), [("1f1b", 4), ("gpipe", 1), ("interleaved", 4), ("interleaved", 8), ("zero-bubble", 6)]
)
def test_enough_micro_batches_are_taken(schedule, count):
    ranks = 2 if schedule in ("interleaved", "zero-bubble") else 4
    check_micro_batches(schedule, PipelineLayout((1,) * 4, ranks), count)


@pytest.mark.parametrize(
    ("schedule", "parallel", "engine", "message"),
    [
        ("1f1b", {}, {"compile": "model"}, "use `compile` block"),
        ("zero-bubble", {}, {"compile": "block"}, "`compile` block computes"),
        ("zero-bubble", {}, {"activation_checkpointing": "selective"}, "(use full or none); leave it out"),
        (
            "zero-bubble",
            {},
            {"activation_checkpointing": "selective", "compile": "block"},
            "with the others, and `activ",
        ),
        ("zero-bubble", {"weights": "bf16"}, {}, "zero-bubble has gradients in fp32 only"),
        ("zero-bubble", {"reduce_dtype": "bf16"}, {}, "zero-bubble has gradients in fp32 only"),
    ],
)
def test_what_a_schedule_cannot_go_with_is_refused(schedule, parallel, engine, message):
    config = ParallelConfig(pipeline_parallel_size=2, pipeline_schedule=schedule, **parallel)
    with pytest.raises(UserError) as refused:
        check_pipeline(config, EngineConfig(**engine), 4, 4)
    assert message in str(refused.value)


def test_zero_bubble_does_not_go_with_a_bias_that_layers_share():
    config = ParallelConfig(pipeline_parallel_size=2, pipeline_schedule="zero-bubble")
    with pytest.raises(UserError, match=r"share one position bias; use `pipeline_schedule` 1f1b"):
        check_pipeline(config, EngineConfig(), 4, 4, shares_bias=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pipeline_parallel_size": 2, "pipeline_layers": [4, 0]}, "pipeline_layers holds 0; it must be at least 1"),
        ({"pipeline_parallel_size": 2, "pipeline_stages_per_rank": 0}, "pipeline_stages_per_rank is 0"),
        ({"pipeline_parallel_size": 2, "pipeline_stages_per_rank": 2}, "1f1b has one stage per process"),
        (
            {"pipeline_parallel_size": 2, "pipeline_schedule": "interleaved", "pipeline_stages_per_rank": 1},
            "interleaved needs pipeline_stages_per_rank 2 or more",
        ),
    ],
)
def test_options_that_contradict_each_other_are_refused(options, message):
    assert any(message in line for line in mistakes(ParallelConfig(**options)))
