"""Compiled blocks, checkpointed or not, are shared out over processes, or copied, as eager ones are."""

from __future__ import annotations

import pytest

from ftk.model_parallel.config import EngineConfig, ParallelConfig
from ftk.model_parallel.world import World, make_world, resolve_sizes
from tests.distributed import run_ranks
from tests.model_parallel.small_steps import largest_difference, train, write_reference

pytestmark = pytest.mark.slow


def run_compiled(folder: str) -> list[tuple[list[float], float]]:
    from torch._dynamo.utils import counters

    results = []
    for options, checkpointing in (
        ({"data_parallel_shard_size": 2}, "none"),
        ({"data_parallel_shard_size": 2}, "full"),
        ({"data_parallel_replicate_size": 2}, "none"),
    ):
        config = ParallelConfig(**options)
        world = make_world(resolve_sizes(config, 2), "cpu")
        engine = EngineConfig(compile="block", activation_checkpointing=checkpointing)
        counters.clear()
        losses, gradients, _ = train(world, config, engine=engine, num_updates=2, on_meta=True)
        assert counters["stats"]["unique_graphs"] > 0
        results.append((losses, largest_difference(gradients, folder)))
    return results


def test_compiled_blocks_are_shared_out_and_copied(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")  # a pool of processes would only wait for the two cores
    expected = write_reference(tmp_path)["fp32"][:2]
    for ranks in zip(*run_ranks(run_compiled, 2, str(tmp_path), timeout=400), strict=True):
        for losses, difference in ranks:
            assert losses == pytest.approx(expected, rel=1e-5)
            assert difference < 1e-5


def test_the_same_seed_gives_the_same_updates_again():
    """What the comparisons of this room rest on."""
    first, again = (train(World.single(), ParallelConfig(), num_updates=2)[0] for _ in range(2))
    assert first == again
