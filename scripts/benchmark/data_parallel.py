"""Data parallel on the cores of this machine: an update on several processes against the same update on one.

    python scripts/benchmark/data_parallel.py --json out.json
    python scripts/benchmark/data_parallel.py --ways "FSDP2 ZeRO-1" --micro-batches 8 --batch-size 4
    python scripts/benchmark/data_parallel.py --quick

The work: one update (forward and backward of --micro-batches micro-batches, clipping, fused AdamW) of a GLM on
batches of blank infilling as in train_step.py, which have loss at about 18 % of their places. The global batch is the
same in every way: one process takes all micro-batches, each of several takes its share. Every process has one thread.
Models are built on the meta device, shared out and filled as under ftk-train (`ftk.model_parallel.parallelize`).

Every way starts from the same weights; its losses of the first --check-updates updates must be those of one process to
1e-5 of the loss in fp32, 1e-2 in bf16. Then all ways take turns, --rounds times --updates updates each, the others
asleep; a way's figure is its best round, a ratio the median over the rounds of the quotient within a round. Processor
time is that of the busiest process: what remains of the ratio where processes never wait for each other.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from step_ways import make_batches, model_config
from train_step import SIZES, describe_machine, show_failures, show_table

from ftk.criterions.cross_entropy import CrossEntropy, CrossEntropyConfig
from ftk.model_parallel.config import EngineConfig, ParallelConfig
from ftk.model_parallel.engine import prepare_process
from ftk.model_parallel.gradients import gradient_sync
from ftk.model_parallel.parallelize import parallelize_training
from ftk.model_parallel.step_module import StepModule
from ftk.model_parallel.world import World, make_world, resolve_sizes
from ftk.models.glm.model import GLM
from ftk_cli.launch import free_port

SEED = 1
TOLERANCE = {"fp32": 1e-5, "bf16": 1e-2}  # of the loss
ANSWER_SECONDS = 600


@dataclass(frozen=True)
class Way:
    """A number of processes, with these options of ftk."""

    name: str
    processes: int
    parallel: dict[str, Any] = field(default_factory=dict)


def all_ways(processes: int) -> list[Way]:
    """One process, copies of the model, and every stage of sharding."""
    stages = {f"FSDP2 ZeRO-{stage}": {"zero_stage": stage} for stage in (1, 2, 3)}
    sharded = [Way(name, processes, {"data_parallel_shard_size": processes, **stages[name]}) for name in stages]
    return [Way("one process", 1), Way("DDP", processes), *sharded]


# -- in each process ------------------------------------------------------------------------------------------------


class Updates:
    """Updates of one process, alone or with others.

    Args:
        way: how.
        options: of the command.
    """

    def __init__(self, way: Way, options: argparse.Namespace) -> None:
        parallel = ParallelConfig(**{"prefetch_blocks": options.prefetch_blocks, **way.parallel})
        engine = EngineConfig(activation_checkpointing=options.checkpointing)
        prepare_process(engine)
        self.world = World.single() if way.processes == 1 else make_world(resolve_sizes(parallel, way.processes), "cpu")
        shape, _, num_tokens = SIZES[options.size]
        config = model_config(shape, num_tokens, dropout=0.0)
        self.batches = make_batches(config, options.batch_size, num_tokens, options.micro_batches)
        with torch.device("meta"):
            model = GLM(config)
        module = StepModule(model, CrossEntropy(CrossEntropyConfig()))
        step = parallelize_training(module, self.world, parallel, engine, precision=options.precision, seed=SEED)
        self.called = step.module
        self.parameters = list(model.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, lr=2e-4, weight_decay=0.1, fused=True)
        self.precision = options.precision

    def update(self) -> torch.Tensor:
        """Take one; returns this process's share of the mean loss, 0-d."""
        num_targets = sum(len(batch.targets) for batch in self.batches)
        own = self.batches[self.world.data_rank :: self.world.sizes.data]
        total = torch.zeros(())
        self.optimizer.zero_grad(set_to_none=True)
        for place, batch in enumerate(own, start=1):
            with gradient_sync(self.called, enabled=place == len(own)):
                with torch.autocast("cpu", torch.bfloat16, enabled=self.precision == "bf16"):
                    loss = self.called(batch).loss / num_targets
                loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        return total

    def loss(self) -> float:
        """Take one; returns the mean loss over all processes."""
        return self.world.sum_host([self.update().item()])[0]


def serve(way: Way, options: argparse.Namespace, rank: int, port: int, pipe: Connection) -> None:
    """One process: sends its losses, then seconds and processor seconds for each count that it receives."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(way.processes))
    torch.set_num_threads(1)
    if way.processes > 1:
        torch.distributed.init_process_group("gloo")
    updates = Updates(way, options)
    pipe.send([updates.loss() for _ in range(options.check_updates)])
    while count := pipe.recv():
        updates.world.barrier()
        began, processor = time.perf_counter(), time.process_time()
        for _ in range(count):
            updates.update()
        pipe.send(((time.perf_counter() - began) / count, (time.process_time() - processor) / count))
    if way.processes > 1:
        updates.world.barrier()
        torch.distributed.destroy_process_group()


# -- in the command's own process -----------------------------------------------------------------------------------


class Runner:
    """The processes of a way, which wait while the others take their turns."""

    def __init__(self, way: Way, options: argparse.Namespace) -> None:
        context, port = multiprocessing.get_context("spawn"), free_port()
        pairs = [context.Pipe() for _ in range(way.processes)]
        self.pipes = [ours for ours, _ in pairs]
        self.processes = [
            context.Process(target=serve, args=(way, options, rank, port, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pairs)
        ]
        for process in self.processes:
            process.start()
        for _, theirs in pairs:
            theirs.close()  # so that a process that ends is noticed
        self.losses: list[float] = self._answers()[0]

    def seconds(self, count: int) -> tuple[float, float]:
        """Seconds and processor seconds per update, of the slowest process."""
        for pipe in self.pipes:
            pipe.send(count)
        answers = self._answers()
        return max(answer[0] for answer in answers), max(answer[1] for answer in answers)

    def close(self) -> None:
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            if process.is_alive():
                pipe.send(0)
        for process in self.processes:
            process.join(10)
            process.kill()

    def _answers(self) -> list[Any]:
        answers = []
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            if not pipe.poll(ANSWER_SECONDS):
                raise RuntimeError(f"process {process.pid} does not answer")
            answers.append(pipe.recv())
        return answers


def main() -> int:
    options = parse()
    machine = describe_machine(torch.device("cpu")) | {"threads": 1, "cores": os.cpu_count()}
    print("; ".join(f"{name} {value}" for name, value in machine.items()))
    rows = measure(
        [way for way in all_ways(options.processes) if way.processes == 1 or way.name in options.ways], options
    )
    show(rows, options)
    machine["load_after"] = os.getloadavg()[0]
    if options.json:
        result = {"machine": machine, "options": vars(options), "ways": rows}
        options.json.write_text(json.dumps(result, indent=1, default=str) + "\n", encoding="utf-8")
    return int(any("error" in row for row in rows))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    names = [way.name for way in all_ways(2)[1:]]
    add("--size", choices=SIZES, default="small", help="of the model, as in train_step.py: small is 4 layers of 512")
    add("--processes", type=int, default=2, help="of the ways that have several (default 2)")
    add("--ways", nargs="+", choices=names, default=names, help="in addition to one process; default: all")
    add("--micro-batches", type=int, help="of an update, over all processes; default: one per process")
    add("--batch-size", type=int, help="samples of a micro-batch; default: 4 times train_step.py's (small 16)")
    add("--precision", choices=TOLERANCE, default="fp32")
    add("--checkpointing", choices=("none", "selective", "full"), default="none", help="activation checkpointing")
    add("--prefetch-blocks", type=int, default=ParallelConfig().prefetch_blocks, help="as in ftk-train")
    add("--rounds", type=int, default=5)
    add("--updates", type=int, default=1, help="of a way's turn")
    add("--check-updates", type=int, default=3, help="updates whose losses are compared")
    add("--quick", action="store_true", help="a tiny model, one round: shows that all parts run")
    add("--json", type=Path, help="write all figures to this file")
    options = parser.parse_args()
    if options.quick:
        options.size, options.rounds, options.updates = "tiny", 1, 1
    options.batch_size = options.batch_size or 4 * SIZES[options.size][1]
    options.micro_batches = options.micro_batches or options.processes
    if options.micro_batches % options.processes:
        parser.error(
            f"--micro-batches {options.micro_batches} are not the same number for {options.processes} processes"
        )
    return options


def measure(ways: list[Way], options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each way, that of one process first."""
    rows: list[dict[str, Any]] = []
    runners: list[Runner] = []
    try:
        for way in ways:
            runners.append(Runner(way, options))
            rows.append({"way": way.name, **asdict(way), "losses": runners[-1].losses})
            check_losses(rows[-1], rows[0]["losses"], options.precision)
        rounds: list[list[tuple[float, float]]] = [[] for _ in ways]
        for _ in range(options.rounds):
            for runner, own in zip(runners, rounds, strict=True):
                own.append(runner.seconds(options.updates))
    finally:
        for runner in runners:
            runner.close()
    places = options.micro_batches * options.batch_size * SIZES[options.size][2]
    for row, own in zip(rows, rounds, strict=True):
        row["rounds"] = own
        row["seconds"], row["processor_seconds"] = min(turn[0] for turn in own), min(turn[1] for turn in own)
        row["tokens_per_second"] = places / row["seconds"]
        for key, kind in (("ratio", 0), ("processor_ratio", 1)):
            row[key] = statistics.median(one[kind] / mine[kind] for one, mine in zip(rounds[0], own, strict=True))
    return rows


def check_losses(row: dict[str, Any], expected: list[float], precision: str) -> None:
    """Put into the row how far its losses are from the expected ones, and an error if that is too far."""
    distance = max(abs(loss / other - 1.0) for loss, other in zip(row["losses"], expected, strict=True))
    row["loss_distance"] = distance
    if not distance <= TOLERANCE[precision]:  # not a number is too far as well
        row["error"] = f"losses differ from one process's by {distance:.1e} of the loss"


COLUMNS = (
    ("way", "{}", "way"),
    ("processes", "{}", "processes"),
    ("s an update", "{:.3f}", "seconds"),
    ("tok/s", "{:.0f}", "tokens_per_second"),
    ("x one process", "{:.2f}", "ratio"),
    ("processor s", "{:.3f}", "processor_seconds"),
    ("x one process's", "{:.2f}", "processor_ratio"),
    ("loss off by", "{:.0e}", "loss_distance"),
)


def show(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """A table in Markdown."""
    print(
        f"\n{options.size}, {options.precision}, updates of {options.micro_batches} micro-batches of "
        f"{options.batch_size} x {SIZES[options.size][2]}\n"
    )
    show_table(COLUMNS, rows)
    show_failures(rows)


if __name__ == "__main__":
    sys.exit(main())
