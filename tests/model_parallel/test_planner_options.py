"""Clusters by name, and the options of a plan."""

from __future__ import annotations

import math

import pytest

from ftk.config.options import mistakes
from ftk.planner.cluster import GIB, PRESETS, ClusterConfig
from ftk.planner.layout import Workload
from ftk.planner.plan_config import LimitsConfig, WorkConfig


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_a_faster_network_the_nearer_it_is(name):
    preset = PRESETS[name]
    assert preset.network_bandwidth < preset.node_bandwidth < preset.memory_bandwidth


def test_what_is_given_wins_over_the_preset():
    config = ClusterConfig(
        cluster="a100-40g",
        gpus=16,
        gpus_per_node=4,
        memory_gib=30,
        memory_reserve=0.5,
        peak_tflops=100,
        memory_bandwidth=1000,
        node_bandwidth=20,
        network_bandwidth=10,
    )
    assert not mistakes(config)
    built = config.build()
    assert built.memory_bytes == 15 * GIB
    assert built.flops("bf16") == built.flops("fp32") == 1e14
    assert (built.gpus_per_node, built.memory_bandwidth) == (4, 1e12)
    assert (built.node_bandwidth, built.network_bandwidth) == (2e10, 1e10)
    preset = ClusterConfig(cluster="a100-40g", gpus=16, memory_reserve=0.0).build()
    assert preset == PRESETS["a100-40g"]


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (ClusterConfig(gpus=12), "whole nodes of 8"),
        (ClusterConfig(memory_gib=0), "memory_gib is 0"),
        (ClusterConfig(memory_reserve=1), "memory_reserve is 1"),
        (WorkConfig(global_batch_size=1, loss_share=0), "loss_share is 0"),
        (WorkConfig(global_batch_size=1, matmul_efficiency=1.5), "matmul_efficiency is 1.5"),
        (LimitsConfig(pipeline_stages_per_rank=2), "has one stage per process, not 2"),
        (LimitsConfig(pipeline_schedule="interleaved", pipeline_stages_per_rank=1), "needs pipeline_stages_per_rank 2"),
    ],
)
def test_options_that_cannot_be_are_refused(config, text):
    assert text in "; ".join(mistakes(config))


def test_options_become_the_work():
    work = WorkConfig(global_batch_size=8, loss_share=0.5, precision="fp16", ema=True).build(30, 4.0, 0.2)
    assert work == Workload(8, 30, 0.5, "fp16", 4.0, average_bytes=4)
    assert work.num_targets(2) == math.ceil(0.5 * 2 * 30)
    assert WorkConfig(global_batch_size=8, seq_length=5).build(30, 4.0, 0.2).num_tokens == 5
    assert WorkConfig(global_batch_size=8).build(30, 4.0, 0.2).loss_share == 0.2
    assert LimitsConfig(pipeline_schedule="interleaved").stages_per_rank == 2
