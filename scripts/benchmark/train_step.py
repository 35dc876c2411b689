"""A training step of GLM: ftk's against the original's way, on the same weights and batches.

    python scripts/benchmark/train_step.py --json out.json
    python scripts/benchmark/train_step.py --size base --precision fp32 bf16
    python scripts/benchmark/train_step.py --quick

The work: one update (forward, backward, clipping, AdamW) on batches of blank infilling, token objective, which have
loss at about 18 % of their places. The original's way is `original_way.py`; ftk's is `ftk.trainer.step.Update` with
the parts that ftk-train would build. docs/performance.md says how the figures are made.

Every way starts from the same weights and takes the same batches; the losses of the first --check-steps updates must
be those of the original's way in fp32 (to 1e-4 of the loss in fp32, 1e-2 in lower precision). Then all ways take turns,
--rounds times --steps updates each; a way's figure is its best round, a ratio the median over the rounds of the
quotient within a round.

On a CPU each way has a process of its own, with the memory of which the original's way deals as Python does, ftk's as
ftk-train does; it sleeps while the others take their turns. Peak memory there is the process's over what it held after
a step of a tiny model; on a GPU, where all are in one process, the allocator's over what it held before the way was
built. With --checkpointing full freed memory goes back at once, as under ftk-train, and the loss goes in chunks of 64
tokens. With --dropout above 0 losses cannot agree and are not compared.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from matrix_rate import linear_products, matrix_rate
from step_runners import InItsOwnProcess, InThisProcess, Runner, serve
from step_ways import Way, all_ways, build_step, make_batches, model_config, train_config

from ftk.model_parallel.engine import prepare_process
from ftk.models.flops import training_flops
from ftk.trainer.watch.hardware import peak_flops

# name: (shape, batch size, places of a sample)
SIZES: dict[str, tuple[dict[str, int], int, int]] = {
    "tiny": ({"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 1024}, 2, 64),
    "small": ({"num_layers": 4, "hidden_size": 512, "num_attention_heads": 8, "vocab_size": 30592}, 4, 256),
    "base": ({"num_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "vocab_size": 30592}, 2, 512),
    "large": ({"num_layers": 24, "hidden_size": 1024, "num_attention_heads": 16, "vocab_size": 30592}, 8, 512),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# ftk's options, every combination of which is measured
CHOICES = {
    "attention": (("auto", "sdpa", "flex", "varlen", "eager"), "auto", "as in ftk-train; flex and varlen need a GPU"),
    "loss_form": (("auto", "plain", "chunked", "linear"), "auto", "as in ftk-train"),
    "checkpointing": (("none", "selective", "full"), "none", "activation checkpointing, as in ftk-train"),
    "compile": (("none", "block", "model"), "none", "as in ftk-train"),
    "cuda_graphs": (("off", "on"), "off", "as in ftk-train"),
    "residual": (("fp32", "same"), "fp32", "--residual-precision of ftk-train"),
}
TOLERANCE = {"fp32": 1e-4, "tf32": 5e-3, "bf16": 1e-2, "fp16": 1e-2}  # of the loss


def main() -> int:
    options = parse()
    if options.serve:
        serve(Way(**json.loads(options.serve)), lambda: work(options.size[0], options.batch_size[0], options), warm_up)
        return 0
    device = torch.device(options.device)
    machine = describe_machine(device)
    print("; ".join(f"{name} {value}" for name, value in machine.items()))
    result: dict[str, Any] = {"machine": machine, "options": vars(options), "sizes": []}

    def save() -> None:  # after each row, so that whoever stops this process loses nothing
        result["machine"]["load_after"] = os.getloadavg()[0]
        if options.json:
            options.json.write_text(json.dumps(result, indent=1, default=str) + "\n", encoding="utf-8")

    failed = False
    for size in options.size:
        for batch_size in options.batch_size or [SIZES[size][1]]:
            figures = describe_size(size, batch_size, options)
            result["sizes"].append(figures)
            measure(figures, options, device, save)
            show(figures)
            failed |= any("error" in row for row in figures["ways"])
    save()
    return int(failed)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--size", nargs="+", choices=SIZES, help="default: small and base; large on a GPU")
    add("--batch-size", nargs="+", type=int, help="default: the size's own (small 4, base 2, large 8)")
    add("--tokens", type=int, help="places of a sample; default: the size's own (small 256, base and large 512)")
    add("--precision", nargs="+", choices=DTYPES, help="default: fp32 bf16; on a GPU fp16 too")
    add("--tf32", nargs="+", choices=("off", "on"), default=["off"], help="for fp32 on a GPU")
    for name, (choices, default, text) in CHOICES.items():
        add(f"--{name.replace('_', '-')}", nargs="+", choices=choices, default=[default], help=text)
    add("--dropout", type=float, default=0.0, help="of all three kinds, in both ways (default 0)")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--threads", type=int, help="of torch on a CPU; default: torch's own")
    add("--rounds", type=int, default=5)
    add("--steps", type=int, help="updates a round; default 3, on a GPU 10")
    add("--no-original", action="store_true", help="ftk's ways alone; losses must be those of the first one")
    add("--check-steps", type=int, default=5, help="updates whose losses are compared")
    add("--quick", action="store_true", help="a tiny model, one round: shows that all parts run")
    add("--json", type=Path, help="write all figures to this file")
    add("--serve", help=argparse.SUPPRESS)  # what the parent asks its child processes
    options = parser.parse_args()
    on_gpu = torch.device(options.device).type == "cuda"
    if options.quick:
        options.size, options.rounds, options.steps, options.check_steps = options.size or ["tiny"], 1, 1, 3
    options.size = options.size or (["large"] if on_gpu else ["small", "base"])
    options.precision = options.precision or (["fp32", "bf16", "fp16"] if on_gpu else ["fp32", "bf16"])
    options.steps = options.steps or (10 if on_gpu else 3)
    if options.threads:
        torch.set_num_threads(options.threads)
    return options


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Notes for the reader of the figures."""
    machine: dict[str, Any] = {"host": platform.machine(), "threads": torch.get_num_threads()}
    if device.type == "cuda":
        machine["gpu"] = torch.cuda.get_device_name(device)
    else:
        machine["cpu"] = cpu_name()
    return machine | {"torch": torch.__version__, "python": platform.python_version(), "load": os.getloadavg()[0]}


def cpu_name() -> str:
    """As the kernel calls the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


# -- one size -------------------------------------------------------------------------------------------------------


def work(size: str, batch_size: int, options: argparse.Namespace) -> tuple[Any, list[dict[str, torch.Tensor]]]:
    """The model's config and the batches."""
    shape, num_tokens = SIZES[size][0], options.tokens or SIZES[size][2]
    config = model_config(shape, num_tokens, options.dropout)
    return config, make_batches(config, batch_size, num_tokens, options.check_steps)


def warm_up(way: Way) -> None:
    """Take a step of a tiny model on the CPU."""
    shape, batch_size, num_tokens = SIZES["tiny"]
    tiny = model_config(shape, num_tokens, 0.0)
    build_step(way, tiny, torch.device("cpu")).step(make_batches(tiny, batch_size, num_tokens, 1)[0])


def describe_size(size: str, batch_size: int, options: argparse.Namespace) -> dict[str, Any]:
    """What is measured: {"size", "batch_size", ..., "ways": [a row for each, to be filled in]}."""
    num_tokens = options.tokens or SIZES[size][2]
    config, batches = work(size, batch_size, options)
    share = sum(len(batch.targets) / batch.num_tokens for batch in batches) / len(batches)
    num_logits = round(share * batch_size * num_tokens)
    flops = training_flops(config, batch_size * num_tokens, num_logits, num_pairs=batch_size * num_tokens**2)
    figures = {"size": size, "batch_size": batch_size, "num_tokens": num_tokens, "loss_share": share, "flops": flops}
    return {**figures, "ways": []}


def measure(
    figures: dict[str, Any], options: argparse.Namespace, device: torch.device, save: Callable[[], None]
) -> None:
    """All ways on one size, into the rows of `figures["ways"]`; `save` is called whenever one has new figures."""
    size, batch_size, num_tokens = figures["size"], figures["batch_size"], figures["num_tokens"]
    config, batches = work(size, batch_size, options)
    num_logits = round(figures["loss_share"] * batch_size * num_tokens)
    products = linear_products(config, batch_size * num_tokens, num_logits)
    print(f"\n{size}, batch {batch_size} x {num_tokens}: building and checking", flush=True)

    choices = {name: getattr(options, name) for name in CHOICES}
    ways = all_ways(options.precision, options.tf32 if device.type == "cuda" else ["off"], **choices)
    ways = [way for way in ways if way.whose == "ftk" or not options.no_original]
    rows: list[dict[str, Any]] = figures["ways"]
    runners: dict[str, Runner] = {}

    def update() -> None:
        alive = [row for row in rows if row.get("rounds") and row["way"] in runners]
        for row in alive:
            finish_row(row, alive, rates[row["precision"], row["tf32"]], batch_size * num_tokens, figures, device)
        save()

    try:
        for way in ways:
            row: dict[str, Any] = {"way": way.name, **dataclasses.asdict(way)}
            rows.append(row)
            try:
                if device.type == "cuda":
                    runner: Runner = InThisProcess(way, config, batches, device)
                else:
                    runner = InItsOwnProcess(way, arguments(size, batch_size, options))
                runners[way.name], row["losses"], row["memory_mb"] = runner, runner.losses, runner.memory_mb
                row["first_seconds"] = runner.seconds(1)  # should there be no time for the rounds
            except Exception as error:  # the other ways are still worth measuring; the row says what happened
                row["error"] = f"{type(error).__name__}: {error}"
            else:
                if "losses" in rows[0] and not options.dropout:
                    check_losses(row, rows[0])
            print(f"  {row['way']}: {row.get('error') or 'built'}", flush=True)
            save()
        alive = [row for row in rows if row["way"] in runners]
        kinds = {(row["precision"], row["tf32"]) for row in alive}
        rates = {kind: row_rate(*kind, products, device) for kind in kinds}
        take_turns(alive, runners, options, update)
    finally:
        for runner in runners.values():
            runner.close()


def arguments(size: str, batch_size: int, options: argparse.Namespace) -> list[str]:
    """The arguments of a variant's own process."""
    sent = {"size": size, "batch-size": batch_size, "dropout": options.dropout, "check-steps": options.check_steps}
    sent |= {"device": "cpu", "threads": torch.get_num_threads(), "tokens": options.tokens or SIZES[size][2]}
    return [word for name, value in sent.items() for word in (f"--{name}", str(value))]


def check_losses(row: dict[str, Any], base: dict[str, Any]) -> None:
    """Put into the row how far its losses are from those of another, and an error if that is too far."""
    distance = max(abs(loss / other - 1.0) for loss, other in zip(row["losses"], base["losses"], strict=True))
    row["loss_distance"] = distance
    limit = max(TOLERANCE["tf32" if one["tf32"] else one["precision"]] for one in (row, base))
    if not distance <= limit:  # not a number is too far as well
        row["error"] = f"losses differ from {base['way']}'s by {distance:.1e} of the loss, more than {limit:.0e}"


def take_turns(
    rows: list[dict[str, Any]], runners: dict[str, Runner], options: argparse.Namespace, update: Callable[[], None]
) -> None:
    """Puts into "rounds" the seconds a step of each way in each round; `update` is called after each."""
    for _ in range(options.rounds):
        for row in rows:
            if (name := row["way"]) not in runners:
                continue
            try:
                row.setdefault("rounds", []).append(runners[name].seconds(options.steps))
            except Exception as error:  # such as memory that runs out; the other ways continue
                row["error"] = f"{type(error).__name__}: {error}"
                runners.pop(name).close()
            update()


def row_rate(precision: str, tf32: bool, products: Any, device: torch.device) -> float:
    prepare_process(train_config(Way("ftk", precision, tf32)).engine)
    return matrix_rate(products, DTYPES[precision], device)


def finish_row(
    row: dict[str, Any],
    rows: list[dict[str, Any]],
    rate: float,
    num_tokens: int,
    figures: Mapping[str, Any],
    device: torch.device,
) -> None:
    """Put the figures of the rounds so far into a row: rates, ratios, shares."""
    mine, flops = row["rounds"], figures["flops"]
    seconds = min(mine)
    row["seconds"], row["tokens_per_second"] = seconds, num_tokens / seconds
    row["matrix_gflops"] = rate / 1e9
    if row["whose"] == "ftk":  # the original's way multiplies more, at places without loss
        row["gflops"] = flops / seconds / 1e9
        row["matrix_share"] = flops / seconds / rate
        if peak := peak_flops("auto", device, row["precision"], tf32=row["tf32"]):
            row["mfu"], row["peak_source"] = flops / seconds / peak[0], peak[1]
    for key, precision, tf32 in (("fp32", "fp32", False), ("same", row["precision"], row["tf32"])):
        base = next((r for r in rows if (r["whose"], r["precision"], r["tf32"]) == ("original", precision, tf32)), None)
        if base is None:
            continue
        row[f"ratio_{key}"] = statistics.median(b / m for b, m in zip(base["rounds"], mine, strict=False))
        if "memory_mb" in row and "memory_mb" in base:
            row[f"memory_ratio_{key}"] = row["memory_mb"] / base["memory_mb"]


# -- output ---------------------------------------------------------------------------------------------------------

COLUMNS = (
    ("way", "{}", "way"),
    ("tok/s", "{:.0f}", "tokens_per_second"),
    ("x orig. fp32", "{:.2f}", "ratio_fp32"),
    ("x orig. same", "{:.2f}", "ratio_same"),
    ("GFLOP/s", "{:.0f}", "gflops"),
    ("of matrix rate", "{:.1%}", "matrix_share"),
    ("MFU", "{:.1%}", "mfu"),
    ("peak MB", "{:.0f}", "memory_mb"),
    ("of orig. fp32", "{:.1%}", "memory_ratio_fp32"),
    ("of orig. same", "{:.1%}", "memory_ratio_same"),
    ("loss off by", "{:.0e}", "loss_distance"),
)


def show(figures: dict[str, Any]) -> None:
    """A table in Markdown."""
    print(
        f"\n{figures['size']}, batch {figures['batch_size']} x {figures['num_tokens']}, loss at "
        f"{figures['loss_share']:.1%} of the places, {figures['flops'] / 1e9:.1f} GFLOP of matrix products a step\n"
    )
    show_table(COLUMNS, figures["ways"])
    rates = {f"{row['precision']}{' tf32' * row['tf32']}": row.get("matrix_gflops") for row in figures["ways"]}
    rated = [f"{name} {rate:.0f}" for name, rate in rates.items() if rate]
    print(f"\nmatrix rate of these shapes, GFLOP/s: {', '.join(rated)}")
    show_failures(figures["ways"])


def show_table(columns: Sequence[tuple[str, str, str]], rows: Sequence[Mapping[str, Any]]) -> None:
    """A row for each way; columns are (title, format, key), and those that no row has are left out."""
    columns = [column for column in columns if any(column[2] in row for row in rows)]
    lines = [[title for title, _, _ in columns], ["---" for _ in columns]]
    lines += [[form.format(row[key]) if key in row else "" for _, form, key in columns] for row in rows]
    print("\n".join(f"| {' | '.join(cells)} |" for cells in lines))


def show_failures(rows: Sequence[Mapping[str, Any]]) -> None:
    for row in rows:
        if "error" in row:
            print(f"FAILED {row['way']}: {row['error']}")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
