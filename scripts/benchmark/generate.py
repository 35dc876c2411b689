"""Generation: ftk against the original's way, many prompts against one, beams and greedy, in flight and in batches.

    python scripts/benchmark/generate.py                       # glm_base, a context of 256 tokens, real lines
    python scripts/benchmark/generate.py --quick               # glm_tiny, seconds
    python scripts/benchmark/generate.py --no-lines --no-original --precision fp32 bf16 int8 int4  # shares alone
    python scripts/benchmark/generate.py --arch glm_large --device cuda --precision bf16 --json out.json

All ways take turns, --rounds times, on the same random weights and prompts; greedy answers have --tokens tokens (no end
before). A step is what lies between two tokens, search included; a way's time is the median of its steps in its best
round; on a GPU, which works on while the host goes ahead, it is the mean of the steps of the last two thirds, behind
which the host waits once. Read rate: the memory that a sum over 512 MB reads in a second, measured in each round.
Share: bytes of the weights that a token needs (all but the position tables) by a step's time, as a share of the read
rate. Prefill: from the call to the first step, prompts read and first tokens chosen. Peak memory, on a GPU: the most
that the allocator handed out over the weights. With --json all figures are on disk after each row of each round.

Cold lengths (--cold-lengths N): prompts of N lengths that this process has not seen, each answered twice in a row; what
a new length costs is the first time by the second.

Lines: spans of real lines are masked as in training (half of the lines: some short spans, lengths Poisson(3); the other
half: one long span), and answers are made as long as what was masked. The same lines are answered batch after batch
(sorted by length, until the last answer of a batch ends) and in flight; time is that of all
lines, prompts included. Tokens must be the same.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from common import TEST_DATA
from matrix_rate import best_seconds, synchronize
from original_generation import original_fill
from torch import Tensor, nn

from ftk.errors import UserError
from ftk.generation import Answer
from ftk.generation.engine.decoder import CachedDecoder
from ftk.generation.processors import Processor, SearchState
from ftk.models import build_model
from ftk.modules.few_rows_layer import prepare
from ftk.modules.quantization import Quantization, quantize_model
from ftk.tasks.glm_blank import BlankGenerator
from ftk.tokenizers import build_tokenizer

SPECIAL = SimpleNamespace(sop=1, eop=2, mask=3)
READ_BYTES = 512 * 2**20


def main() -> int:
    options = parse()
    torch.manual_seed(0)
    if options.threads:
        torch.set_num_threads(options.threads)
    model = build_model(options.arch).eval().to(options.device)
    prepare(model)
    models = {name: variant(model, name) for name in options.precision}
    figures: dict[str, Any] = {"arch": options.arch, "context": options.context, "torch": torch.__version__}
    figures |= {"threads": torch.get_num_threads(), "device": options.device}

    def save() -> None:
        if options.json:
            Path(options.json).write_text(json.dumps(figures, indent=1), encoding="utf-8")

    if options.cold_lengths:  # first: a length that was seen is warm
        figures["cold"] = cold_lengths(models[options.precision[0]], options)
        save()
    figures["steps"] = {"ways": []}
    steps(models, options, figures["steps"], save)
    if not options.no_lines:
        figures["lines"] = lines(models[options.precision[0]], options)
        save()
    same = all(row["same_tokens"] for row in figures["steps"]["ways"] if row["exact"])
    return 0 if same and figures.get("lines", {}).get("same_tokens", True) else 1


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--arch", help="default: glm_base")
    add("--context", type=int, help="tokens of a prompt; default: 256")
    add("--tokens", type=int, help="tokens of an answer; default: 24")
    add("--precision", nargs="+", default=["fp32", "bf16", "int8"], choices=("fp32", "bf16", "int8", "int4"))
    add("--prompts", type=int, nargs="+", default=[1, 8], help="at once, a row for each number; default: 1 8")
    add("--cold-lengths", type=int, default=0, metavar="N", help="lengths of prompts that are new; default: 0")
    add("--rounds", type=int, help="default: 3")
    add("--num-lines", type=int, help="real lines; default: 200")
    add("--batch-size", type=int, default=16, help="of the real lines")
    add("--text", type=Path, default=TEST_DATA / "english" / "valid.txt", help="real lines")
    add("--vocab", type=Path, default=TEST_DATA / "tokenizers" / "bert-base-uncased-vocab.txt")
    add("--no-lines", action="store_true", help="leave the real lines out")
    add("--no-original", action="store_true", help="leave the original's way out")
    add("--device", default="cpu")
    add("--threads", type=int)
    add("--quick", action="store_true", help="a small model, few tokens: whether everything runs")
    add("--json", help="write the figures here")
    options = parser.parse_args()
    small, whole = ("glm_tiny", 48, 8, 1, 24), ("glm_base", 256, 24, 3, 200)
    for name, value in zip(
        ("arch", "context", "tokens", "rounds", "num_lines"), small if options.quick else whole, strict=True
    ):
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


def variant(model: nn.Module, precision: str) -> nn.Module:
    """A copy of the model in this precision."""
    if precision == "fp32":
        return model
    model = copy.deepcopy(model)
    if precision == "bf16":
        return model.to(torch.bfloat16)
    quantize_model(model, Quantization(weights=precision, group_size=32 if precision == "int4" else None))
    return model


def step_bytes(model: nn.Module) -> int:
    """Bytes of the weights that a step reads: all but the position tables."""
    return sum(tensor.nbytes for name, tensor in model.state_dict().items() if "position_embedding" not in name)


def steps(
    models: dict[str, nn.Module], options: argparse.Namespace, figures: dict[str, Any], save: Callable[[], None]
) -> None:
    """Times of single steps, all ways in turn, into `figures`; prints the table.

    `save` is called after each row of each round.
    """
    random = np.random.default_rng(0)
    first, *_ = models.values()
    vocab_size = first.config.vocab_size  # type: ignore[union-attr]
    prompts = random.integers(10, vocab_size, (max(8, *options.prompts), options.context)).tolist()
    for prompt in prompts:
        prompt[options.context // 2] = SPECIAL.mask
    ways: dict[str, Callable[[], Timed]] = {}
    rows: list[dict[str, Any]] = figures["ways"]

    def add(name: str, precision: str, batch: int, exact: bool, run: Callable[[], Any]) -> None:
        ways[name] = run
        rows.append({"way": name, "precision": precision, "prompts": batch, "exact": exact, "rounds": []})

    if not options.no_original and "fp32" in models:
        add("original fp32", "fp32", 1, True, lambda: original_steps(models["fp32"], prompts[0], options.tokens))
    for precision, model in models.items():
        searches: list[tuple[str, int, dict[str, Any]]] = [
            (f", {count} prompts" if count > 1 else "", count, {}) for count in options.prompts
        ]
        searches += [(", 8, top-p 0.9", 8, {"sampling": True, "top_p": 0.9}), (", beam 4", 1, {"beam": 4})]
        for name, batch, search in searches:
            add(
                f"ftk {precision}{name}",
                precision,
                batch,
                precision == "fp32" and not search,
                lambda model=model, batch=batch, search=search: ftk_steps(
                    model, prompts[:batch], options.tokens, search
                ),
            )
    expected: list[list[int]] | None = None
    rates: list[float] = []
    for number in range(options.rounds + 1):  # the first warms up
        rate = read_rate(options.device)
        for row in rows:
            held = reset_peak(options.device)
            timed = ways[row["way"]]()
            if row["way"] in ("original fp32", "ftk fp32") and expected is None:
                expected = timed.tokens
            row["same_tokens"] = expected is None or timed.tokens[0] == expected[0]
            if held is not None:
                row["peak_mb"] = (torch.cuda.max_memory_allocated() - held) / 1e6
            if number:
                row["rounds"].append(statistics.median(timed.seconds))
                row["prefill_ms"] = min(row.get("prefill_ms", float("inf")), 1e3 * timed.prefill)
                rated(row, models, max([*rates, rate]))
            save()
        if number:
            rates.append(rate)
    figures["read_rate"] = max(rates)
    print(f"{options.arch}, context {options.context}, {torch.get_num_threads()} threads, {options.device}")
    print(f"read rate {max(rates) / 1e9:.1f} GB/s (in the rounds: {', '.join(f'{rate / 1e9:.1f}' for rate in rates)})")
    ratios = _ratios(rows)
    memory = any("peak_mb" in row for row in rows)
    print(
        f"{'way':<24}{'ms/step':>9}{'tokens/s':>10}{'x ftk':>8}{'GB/s':>7}{'share':>7}{'prefill ms':>12}"
        f"{'peak MB' if memory else '':>9}  tokens"
    )
    for row in rows:
        ratio = ratios.get(row["way"])
        row["ratio_within_rounds"] = ratio
        same = "drawn" if "top-p" in row["way"] else "same" if row["same_tokens"] else "differ"
        print(
            f"{row['way']:<24}{row['ms_per_step']:>9.2f}{row['tokens_per_second']:>10.1f}"
            f"{'' if ratio is None else f'{ratio:.2f}':>8}{row['gb_per_second']:>7.1f}{row['share_of_read_rate']:>7.0%}"
            f"{row['prefill_ms']:>12.1f}{format(row['peak_mb'], '.0f') if memory else '':>9}  {same}"
        )
    print("x ftk: time of a step by that of one prompt, greedy, in the same precision; median over the rounds")
    save()


def rated(row: dict[str, Any], models: dict[str, nn.Module], rate: float) -> None:
    """Puts into a row what its rounds so far say."""
    seconds = min(row["rounds"])
    row |= {"ms_per_step": 1e3 * seconds, "tokens_per_second": row["prompts"] / seconds}
    row["weights_mb"] = step_bytes(models[row["precision"]]) / 1e6
    row["gb_per_second"] = row["weights_mb"] / 1e3 / seconds
    row["share_of_read_rate"] = row["gb_per_second"] * 1e9 / rate


def reset_peak(device: str) -> int | None:
    """Bytes that are held now, on a GPU, from which the peak is counted."""
    if torch.device(device).type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def cold_lengths(model: nn.Module, options: argparse.Namespace) -> dict[str, Any]:
    """What a length of prompts costs that was never seen; prints it."""
    random = np.random.default_rng(2)
    lengths = random.permutation(np.arange(9, options.context))[: options.cold_lengths].tolist()
    vocab_size = model.config.vocab_size  # type: ignore[union-attr]
    rows = []
    for length in [8, 8, *lengths]:  # the first two load libraries
        prompt = random.integers(10, vocab_size, length).tolist()
        prompt[length // 2] = SPECIAL.mask
        cold, warm = (_whole_seconds(model, prompt, options.tokens) for _ in range(2))
        rows.append({"length": length, "cold": cold, "warm": warm, "ratio": cold / warm})
    rows = rows[2:]
    ratios = sorted(row["ratio"] for row in rows)
    median, worst = statistics.median(ratios), ratios[-1]
    print(
        f"{len(rows)} new lengths of prompts: the first time by the second {median:.2f} (median), {worst:.2f} (worst)"
    )
    return {"rows": rows, "median": median, "worst": worst}


def _whole_seconds(model: nn.Module, prompt: list[int], num_tokens: int) -> float:
    """Of one answer, prompt included."""
    generator = BlankGenerator(model, SPECIAL, max_len=num_tokens, min_len=num_tokens)
    synchronize(next(model.parameters()).device)
    began = time.perf_counter()
    generator.fill_ids([prompt])
    return time.perf_counter() - began


def _ratios(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Time of each way by that of `ftk` with one prompt in its precision: median of the quotients within rounds."""
    plain = {row["precision"]: row["rounds"] for row in rows if row["way"] == f"ftk {row['precision']}"}
    return {
        row["way"]: statistics.median(
            one / base for one, base in zip(row["rounds"], plain[row["precision"]], strict=True)
        )
        for row in rows
        if row["precision"] in plain
    }


class Timed(NamedTuple):
    """Times in seconds, and each prompt's answer."""

    seconds: list[float]  # from token to token
    prefill: float  # from the call to the first step
    tokens: list[list[int]]


def ftk_steps(model: nn.Module, prompts: list[list[int]], num_tokens: int, search: dict[str, Any]) -> Timed:
    """Answers of an exact length to some prompts."""
    generator = BlankGenerator(model, SPECIAL, max_len=num_tokens, min_len=num_tokens, **search)
    device, began, step = next(model.parameters()).device, [], CachedDecoder.step

    waits = (0, num_tokens // 3) if device.type == "cuda" else range(num_tokens)

    def timed(self: CachedDecoder, tokens: Tensor) -> Tensor:
        if len(began) in waits:
            synchronize(device)
        began.append(time.perf_counter())
        return step(self, tokens)

    CachedDecoder.step = timed  # type: ignore[method-assign]
    try:
        synchronize(device)
        called = time.perf_counter()
        found = generator.fill_ids(prompts)
        ended = time.perf_counter()
    finally:
        CachedDecoder.step = step  # type: ignore[method-assign]
    seconds = np.diff(began).tolist()
    if device.type == "cuda":
        seconds = [(ended - began[waits[1]]) / (len(began) - waits[1])]
    return Timed(seconds, began[0] - called, [answers[0].tokens for answers in found])


def original_steps(model: nn.Module, prompt: list[int], num_tokens: int) -> Timed:
    """As `ftk_steps`, in the original's way, one prompt."""
    began: list[float] = []
    called = time.perf_counter()
    answer = original_fill(model, prompt, SPECIAL, num_tokens, lambda: began.append(time.perf_counter()))
    return Timed(np.diff(began)[1:].tolist(), began[1] - called, [answer])


def read_rate(device: str) -> float:
    """Bytes per second that a sum over more than the caches hold reads; the best of five."""
    block = torch.ones(READ_BYTES // 4, device=device)
    return READ_BYTES / best_seconds(block.sum, block.device, 5)


class GivenLengths(Processor):
    """Makes each answer as long as what was masked."""

    def __init__(self, lengths: dict[tuple[tuple[int, ...], int], int]) -> None:
        self.lengths = lengths

    def __call__(self, state: SearchState, scores: Tensor) -> Tensor:
        wanted = [
            self.lengths[tuple(context), blank] for context, blank in zip(state.contexts, state.numbers, strict=True)
        ]
        over = torch.tensor([length <= state.step for length in wanted], device=scores.device)[:, None, None]
        ends = torch.zeros(scores.size(-1), dtype=torch.bool, device=scores.device)
        ends[list(state.ends)] = True
        return scores.masked_fill_(ends != over, float("-inf"))


def lines(model: nn.Module, options: argparse.Namespace) -> dict[str, Any]:
    """Real lines with masked spans, batch after batch and in flight; prints the figures."""
    tokenizer = build_tokenizer("bert_wordpiece", path=str(options.vocab), special_tokens="glm")
    contexts, lengths = masked_lines(options.text, tokenizer, options.num_lines)
    longest = max(lengths.values())
    ways: dict[bool, list[float]] = {False: [], True: []}
    found: dict[bool, list[list[Answer]]] = {}
    for _ in range(max(1, options.rounds - 1)):
        for in_flight in ways:
            generator = BlankGenerator(
                model,
                tokenizer.special,
                processors=[GivenLengths(lengths)],
                max_len=longest,
                batch_size=options.batch_size,
            )
            size = len(contexts) if in_flight else options.batch_size
            order = sorted(range(len(contexts)), key=lambda index: len(contexts[index]), reverse=True)
            began = time.perf_counter()
            rows = {
                index: row
                for first in range(0, len(order), size)
                for index, row in zip(
                    order[first : first + size],
                    generator.fill_ids([contexts[index] for index in order[first : first + size]]),
                    strict=True,
                )
            }
            found[in_flight] = [rows[index] for index in range(len(contexts))]
            ways[in_flight].append(time.perf_counter() - began)
    ratio = statistics.median(batches / flight for batches, flight in zip(ways[False], ways[True], strict=True))
    num_tokens = sum(lengths.values())
    same = [[a.tokens for a in row] for row in found[False]] == [[a.tokens for a in row] for row in found[True]]
    print(
        f"{len(contexts)} lines of {min(map(len, contexts))} to {max(map(len, contexts))} tokens, {len(lengths)} blanks"
        f", {num_tokens} tokens of answers (at most {longest} each), batch size {options.batch_size}"
    )
    for in_flight, name in ((False, "batch after batch"), (True, "in flight")):
        print(f"{name:<24}{min(ways[in_flight]):>9.2f} s {num_tokens / min(ways[in_flight]):>8.1f} tokens/s")
    print(f"in flight is {ratio:.2f} times as fast (median within the rounds); tokens {'same' if same else 'differ'}")
    return {"seconds": {str(key): value for key, value in ways.items()}, "ratio": ratio, "same_tokens": same}


def masked_lines(
    path: Path, tokenizer: Any, count: int
) -> tuple[list[list[int]], dict[tuple[tuple[int, ...], int], int]]:
    """Contexts with blanks, and (context, number of the blank) -> tokens that were masked there."""
    random, special = np.random.default_rng(1), tokenizer.special
    if not path.exists():
        raise UserError(f"--text {path}: there is no such file; give a text of at least {count} lines, or --no-lines")
    contexts: list[list[int]] = []
    lengths: dict[tuple[tuple[int, ...], int], int] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        ids = tokenizer.encode(line)[: int(random.integers(32, 256))]
        if len(ids) < 16:
            continue
        masked = _spans(len(ids), random)
        context, at = [special.cls], 0
        for start, length in masked:
            context += [*ids[at:start], special.mask]
            at = start + length
        context += [*ids[at:], special.eos]
        if context in contexts:
            continue
        lengths |= {(tuple(context), number): length for number, (_, length) in enumerate(masked)}
        contexts.append(context)
        if len(contexts) == count:
            break
    return contexts, lengths


def _spans(num_tokens: int, random: np.random.Generator) -> Sequence[tuple[int, int]]:
    """Starts and lengths, from left to right: some short spans, or one of 20 to 60 % of the line, 64 at most."""
    if random.random() < 0.5:
        length = min(64, int(num_tokens * random.uniform(0.2, 0.6)))
        return [(int(random.integers(0, num_tokens - length + 1)), length)]
    count = int(random.integers(1, 4))
    part = num_tokens // count
    found = []
    for number in range(count):
        length = int(np.clip(random.poisson(3), 1, part - 1))
        found.append((number * part + int(random.integers(0, part - length)), length))
    return found


if __name__ == "__main__":
    raise SystemExit(main())
