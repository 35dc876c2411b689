"""Quantised weights: size, tokens per second and perplexity, before and after.

    python scripts/benchmark/quantization.py                          # speed and size: glm_base, random weights
    python scripts/benchmark/quantization.py --path RUN --text FILE   # and perplexity of a trained model on a text
    python scripts/benchmark/quantization.py --arch glm_large --context 512 --tokens 64 --json out.json

Speed: greedy decoding of one blank behind a context of --context tokens, one prompt, by the sequence generator; all
variants take turns, --rounds times, of which the best counts; the time of the prompt and of the first tokens is taken
off. A token reads all weights but the position tables: GB/s is their bytes by its time. Perplexity: of the second half
of each window of --window tokens, as the answer of a [gMASK] (or [MASK]) behind the first half.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import ftk
from ftk.models import build_model
from ftk.modules.few_rows_layer import prepare
from ftk.modules.quantization import Quantization, quantize_model
from ftk.tasks.glm_blank import BlankGenerator

VARIANTS: dict[str, Quantization | None] = {
    "fp32": None,
    "bf16": None,
    "int8, layers only": Quantization(weights="int8", embedding=False),
    "int8": Quantization(weights="int8"),
    "int4, groups of 64": Quantization(weights="int4", group_size=64),
    "int4, groups of 32": Quantization(weights="int4", group_size=32),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="glm_base")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--path", help="a run or checkpoint: its perplexity")
    parser.add_argument("--text", type=Path, help="with --path: a text, one document per line")
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--max-windows", type=int, default=200)
    parser.add_argument("--no-speed", action="store_true", help="perplexity only")
    parser.add_argument("--json", help="write the figures here")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    if not arguments.no_speed:
        rows += speed(arguments)
    if arguments.path:
        rows += perplexity(arguments)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(rows, indent=1), encoding="utf-8")


def variant(model: nn.Module, name: str) -> nn.Module:
    """A copy of the model with its weights rounded."""
    model = copy.deepcopy(model)
    how = VARIANTS[name]
    if how is not None:
        quantize_model(model, how)
    return model.to(torch.bfloat16) if name == "bf16" else model


def weight_bytes(model: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in model.state_dict().values())


@torch.inference_mode()
def speed(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    original = build_model(arguments.arch).eval()
    special = SimpleNamespace(cls=1, eos=2, eop=3, sop=4, mask=5, gmask=None, smask=None, pad=0)
    prompt = [1, *(10 + i % 1000 for i in range(arguments.context - 3)), 5, 2]
    models = {name: variant(original, name) for name in VARIANTS}
    for model in models.values():
        prepare(model)
    counts = (2, 2 + arguments.tokens)  # the difference is that of the tokens alone
    best = {name: [math.inf, math.inf] for name in models}
    for _ in range(arguments.rounds):
        for name, model in models.items():
            for i, count in enumerate(counts):
                generator = BlankGenerator(model, special, max_len=count, min_len=count)
                start = time.perf_counter()
                generator.fill_ids([prompt])
                best[name][i] = min(best[name][i], time.perf_counter() - start)
    rates = {name: arguments.tokens / (long - short) for name, (short, long) in best.items()}
    print(f"{arguments.arch}, context {arguments.context}, one prompt, {torch.get_num_threads()} threads")
    print(f"{'weights':<22}{'MB':>9}{'tokens/s':>10}{'of fp32':>9}{'GB/s':>7}")
    rows = []
    for name, model in models.items():
        tables = sum(t.nbytes for key, t in model.state_dict().items() if key.startswith("position_embedding"))
        size, rate = weight_bytes(model), rates[name]
        print(
            f"{name:<22}{size / 1e6:>9.1f}{rate:>10.1f}{rate / rates['fp32']:>9.2f}{(size - tables) * rate / 1e9:>7.1f}"
        )
        rows.append({"weights": name, "bytes": size, "tokens_per_second": rate})
    return rows


@torch.inference_mode()
def perplexity(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    model, tokenizer = ftk.load_model(arguments.path), ftk.load_tokenizer(arguments.path)
    ids = [
        token for line in arguments.text.read_text(encoding="utf-8").splitlines() for token in tokenizer.encode(line)
    ]
    size = arguments.window
    count = min(len(ids) // size, arguments.max_windows)
    windows = torch.tensor(ids[: count * size]).reshape(count, size)
    print(f"{arguments.path} on {arguments.text.name}: {count} windows of {size} tokens, left to right")
    print(f"{'weights':<22}{'MB':>9}{'nats':>9}{'perplexity':>12}{'worse by':>10}")
    rows, first = [], None
    for name in VARIANTS:
        rounded = variant(model, name)
        loss = window_loss(rounded, windows, tokenizer.special)
        first = loss if first is None else first
        worse = math.exp(loss - first) - 1
        mb = weight_bytes(rounded) / 1e6
        print(f"{name:<22}{mb:>9.1f}{loss:>9.4f}{math.exp(loss):>12.3f}{100 * worse:>9.2f}%", flush=True)
        rows.append({"weights": name, "loss": loss, "perplexity": math.exp(loss), "worse": worse})
    return rows


def window_loss(model: nn.Module, windows: torch.Tensor, special: Any) -> float:
    """Mean loss of the second half of each window as the answer of a [gMASK] behind the first, one pass a window."""
    total, num_targets = 0.0, 0
    for window in windows:
        middle = len(window) // 2
        gmask = special.gmask if special.gmask is not None else special.mask
        context = torch.cat((torch.tensor([special.cls]), window[:middle], torch.tensor([gmask])))
        answer = window[middle:]
        tokens = torch.cat((context, torch.tensor([special.sop]), answer))[None]  # [1, T]
        text = torch.cat((torch.arange(len(context)), torch.full((len(answer) + 1,), len(context) - 1)))
        block = torch.cat((torch.zeros(len(context), dtype=torch.int64), torch.arange(1, len(answer) + 2)))
        logits = model(
            tokens, position_ids=torch.stack((text, block))[None], context_length=torch.tensor([len(context)])
        )
        scores = logits[0, len(context) : -1].float()  # [A, V]
        total += F.cross_entropy(scores, answer, reduction="sum").item()
        num_targets += len(answer)
    return total / num_targets


if __name__ == "__main__":
    main()
