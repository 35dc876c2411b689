"""ftk beside `transformers`, on the same random weights: decoding, forward passes, training steps, loading.

    python scripts/benchmark/zoo.py                    # published sizes
    python scripts/benchmark/zoo.py --quick            # small shapes, seconds
    python scripts/benchmark/zoo.py --only decode --json out.json
    python scripts/benchmark/zoo.py --only decode --device cuda --dtype bfloat16 --tokens 128

`transformers` makes each model and saves it; ftk opens that folder. Both ways take turns, --rounds times; a row shows
the median of each way, and the median of the quotients of neighbours. Decoding is greedy, --tokens tokens an answer
without an end before, prompts of mixed lengths; the answers must be the same. "all" counts the reading of the prompts,
"steps" what comes behind the first token of each answer. A training step is forward, loss of all places that are
learned, backward and AdamW (fused in both). A checkpoint is opened, and opened and used for the logits of 8 tokens:
`transformers` maps its file and reads what is used. Memory is what a process of its own held at most (VmHWM of Linux),
less what it held before the model was opened.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

import ftk
from ftk.batch import Batch
from ftk.criterions.cross_entropy import CrossEntropy, CrossEntropyConfig
from ftk.generation.config import GenerationConfig
from ftk.generation.engine.continuation import Continuation
from ftk.generation.engine.making import engine_for
from ftk.generation.engine.request import Request
from ftk.trainer.watch.hardware import peak_resident_bytes

QWEN = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14}
SHAPES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # class's beginning, options, options of --quick
    "gpt2": ("GPT2", {}, {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 999}),
    "qwen2": (
        "Qwen2",
        QWEN | {"num_key_value_heads": 2, "tie_word_embeddings": True},
        {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 999}
        | {"num_attention_heads": 4, "num_key_value_heads": 2},
    ),
    "bert": ("Bert", {}, {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 999}),
    "t5": (
        "T5",
        {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12},  # T5-base
        {"d_model": 64, "d_ff": 96, "num_layers": 2, "num_heads": 4, "d_kv": 16, "vocab_size": 999},
    ),
}
CAUSAL = ("gpt2", "qwen2")
NO_END = 0  # token that is never the likeliest: its logit is the lowest, see `published`


def main() -> int:
    options = parse()
    if options.threads:
        torch.set_num_threads(options.threads)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as place:
        folders = {name: published(name, Path(place) / name, options.quick) for name in options.models}
        for part in options.only:
            for name, folder in folders.items():
                for row in PARTS[part](name, folder, options):
                    rows.append({"part": part, "model": name, **row})
                    print(line(rows[-1]), flush=True)
    if options.json:
        found = {"torch": torch.__version__, "options": vars(options), "rows": rows}
        Path(options.json).write_text(json.dumps(found, indent=1))
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small shapes and few tokens")
    parser.add_argument("--only", nargs="+", default=list(PARTS), choices=PARTS, help="parts to measure")
    parser.add_argument("--models", nargs="+", default=list(SHAPES), choices=SHAPES, help="models to measure")
    parser.add_argument("--prompts", nargs="+", type=int, default=[1, 8, 64], help="prompts side by side")
    parser.add_argument("--tokens", type=int, default=0, help="tokens of an answer; 0: 32, with --quick 6")
    parser.add_argument("--rounds", type=int, default=0, help="turns of each way; 0: 5, with --quick 2")
    parser.add_argument("--threads", type=int, default=0, help="of torch; 0: as torch chooses")
    parser.add_argument("--device", default="cpu", help="of decoding; other parts are for a CPU")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"), help="of decoding")
    parser.add_argument(
        "--cache",
        default="dynamic",
        choices=("dynamic", "static"),
        help="of transformers in decoding; static: its steps are compiled on a GPU, as gpt-fast's",
    )
    parser.add_argument("--json", help="file for the figures")
    options = parser.parse_args()
    if options.device != "cpu" and options.only != ["decode"]:
        parser.error("--device is of --only decode")
    options.tokens = options.tokens or (6 if options.quick else 32)
    options.rounds = options.rounds or (2 if options.quick else 5)
    return options


def published(name: str, folder: Path, quick: bool) -> Path:
    """A folder as `transformers` writes it, of random weights."""
    beginning, usual, small = SHAPES[name]
    config = getattr(transformers, f"{beginning}Config")(**(usual | small if quick else usual))
    torch.manual_seed(0)
    model = load_class(name)(config)
    with torch.no_grad():  # so that no answer ends early
        model.get_input_embeddings().weight[NO_END].zero_()
    model.save_pretrained(folder)
    return folder


def load_class(name: str) -> Any:
    beginning = SHAPES[name][0]
    last = {"gpt2": "LMHeadModel", "bert": "ForMaskedLM", "t5": "ForConditionalGeneration"}.get(name, "ForCausalLM")
    return getattr(transformers, beginning + last)


def opened(way: str, name: str, folder: Path) -> Any:
    """The model of a folder by one way, in evaluation mode."""
    if way == "ftk":
        return ftk.load_model(folder, "cpu")
    return load_class(name).from_pretrained(folder).eval()


def in_turn(ways: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median seconds of each way, and the median of theirs / ftk's as `ratio`."""
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(rounds + 1):
        for way, run in ways.items():
            start = time.perf_counter()
            run()
            if number:  # the first turn warms up
                seconds[way].append(time.perf_counter() - start)
    return compared(seconds)


def compared(seconds: dict[str, list[float]]) -> dict[str, float]:
    """See `in_turn`."""
    medians = {way: statistics.median(taken) for way, taken in seconds.items()}
    pairs = zip(seconds["transformers"], seconds["ftk"], strict=True)
    return {**medians, "ratio": statistics.median(theirs / ours for theirs, ours in pairs)}


def figures(found: dict[str, float], num_tokens: int) -> dict[str, Any]:
    """Tokens a second of both ways, and the quotient."""
    return {way: num_tokens / found[way] for way in ("ftk", "transformers")} | {"ratio": found["ratio"]}


@torch.no_grad()
def decode(name: str, folder: Path, options: argparse.Namespace) -> Any:
    if name not in CAUSAL:
        return
    about = options.device, getattr(torch, options.dtype)
    models = {way: opened(way, name, folder).to(*about) for way in ("ftk", "transformers")}
    vocab_size = models["ftk"].config.vocab_size
    for count in options.prompts:
        generator = torch.Generator().manual_seed(count)
        longest = 24 if options.quick else 256
        lengths = torch.linspace(longest, longest // 4, count).long().tolist()
        prompts = [torch.randint(1, vocab_size, (size,), generator=generator).tolist() for size in lengths]
        theirs = functools.partial(continued_by_transformers, cache=options.cache)
        ways = {"ftk": continued_by_ftk, "transformers": theirs}
        whole: dict[str, list[float]] = {way: [] for way in ways}
        steps: dict[str, list[float]] = {way: [] for way in ways}
        answers: dict[str, list[list[int]]] = {}
        for number in range(options.rounds + 1):
            for way, run in ways.items():
                times = [time.perf_counter()]
                for num_tokens in (1, options.tokens):
                    answers[way] = run(models[way], prompts, num_tokens)
                    times.append(time.perf_counter())
                if number:  # the first turn warms up
                    whole[way].append(times[2] - times[1])
                    steps[way].append(whole[way][-1] - (times[1] - times[0]))
        same = sum(one == other for one, other in zip(*answers.values(), strict=True))
        row = {"unit": "tokens/s", "same_answers": f"{same} of {count}"}
        yield {"case": f"{count} all", **row} | figures(compared(whole), count * options.tokens)
        yield {"case": f"{count} steps", **row} | figures(compared(steps), count * (options.tokens - 1))


def continued_by_ftk(model: Any, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """The greedy answers of `num_tokens` each."""
    requests = [Request(prompt, GenerationConfig(max_len=num_tokens)) for prompt in prompts]
    framing = Continuation([NO_END], model.config.max_positions)
    found = engine_for(model, framing, requests, batch_size=len(prompts)).answers(requests)
    return [list(best.tokens) for (best,) in found]


def continued_by_transformers(
    model: Any, prompts: list[list[int]], num_tokens: int, cache: str = "dynamic"
) -> list[list[int]]:
    """The same by `generate`, over prompts that are padded on the left."""
    width = max(map(len, prompts))
    padded = torch.tensor([[NO_END] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    padded, mask = padded.to(model.device), mask.to(model.device)
    flags = {"max_new_tokens": num_tokens, "do_sample": False, "pad_token_id": NO_END, "cache_implementation": cache}
    return model.generate(padded, attention_mask=mask, eos_token_id=NO_END, **flags)[:, width:].tolist()


@torch.no_grad()
def forward(name: str, folder: Path, options: argparse.Namespace) -> Any:
    if name in CAUSAL:
        return
    models = {way: opened(way, name, folder) for way in ("ftk", "transformers")}
    shape = (2, 16) if options.quick else (8, 128)
    tokens = torch.randint(1, models["ftk"].config.vocab_size, shape)
    ways = {way: lambda way=way: logits(way, name, models[way], tokens) for way in models}
    torch.testing.assert_close(ways["ftk"](), ways["transformers"](), rtol=1e-4, atol=1e-4)
    num_tokens = tokens.numel() * (2 if name == "t5" else 1)
    yield {"case": f"{shape[0]} x {shape[1]}", "unit": "tokens/s"} | figures(in_turn(ways, options.rounds), num_tokens)


def logits(way: str, name: str, model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Of all places; of T5 with the same tokens for its decoder."""
    if way == "ftk":
        return model(tokens, **({"decoder_tokens": tokens} if name == "t5" else {}))
    return model(tokens, **({"decoder_input_ids": tokens, "use_cache": False} if name == "t5" else {})).logits


def make_step(way: str, name: str, folder: Path, precision: str, quick: bool) -> tuple[Callable[[], None], int]:
    """A training step and its number of tokens."""
    model = opened(way, name, folder).train()
    rows, length = (2, 16) if quick else (8, 128) if name == "bert" else (2, 512)
    generator = torch.Generator().manual_seed(1)
    vocab_size = model.config.vocab_size
    tokens = torch.randint(1, vocab_size, (rows, length + 1), generator=generator)
    learned = torch.rand(rows, length, generator=generator) < (0.15 if name == "bert" else 2.0)  # [B, T]
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    criterion = CrossEntropy(CrossEntropyConfig())
    batch = Batch({"tokens": inputs}, targets[learned], learned.flatten().nonzero().squeeze(1))
    labels = targets.masked_fill(~learned, -100)

    def loss() -> torch.Tensor:
        if way == "ftk":
            output = criterion(model, batch)
            return output.loss / output.num_targets
        if name == "bert":
            return model(inputs, labels=labels).loss
        return model(tokens, labels=tokens).loss  # which shifts them itself

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            value = loss()
        value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step, inputs.numel()


def train(name: str, folder: Path, options: argparse.Namespace) -> Any:
    if name not in ("gpt2", "bert"):
        return
    for precision in ("fp32", "bf16"):
        made = {way: make_step(way, name, folder, precision, options.quick) for way in ("ftk", "transformers")}
        found = in_turn({way: step for way, (step, _) in made.items()}, options.rounds)
        num_tokens = made["ftk"][1]
        del made
        row = {"case": precision, "unit": "tokens/s"} | figures(found, num_tokens)
        if not options.quick:  # small shapes hold less than the import did
            memory = [peak_of_steps(way, name, folder, precision, False) for way in ("ftk", "transformers")]
            row["memory"] = memory[0] / memory[1]
        yield row


def peak_of_steps(*arguments: Any) -> int:
    """Bytes that a process of its own holds at most in three steps, above what it held before."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_peak, arguments)


def _peak(way: str, name: str, folder: Path, precision: str, quick: bool) -> int:
    transformers.utils.logging.disable_progress_bar()
    before = peak_resident_bytes()
    step, _ = make_step(way, name, folder, precision, quick)
    for _ in range(3):
        step()
    return peak_resident_bytes() - before


def load(name: str, folder: Path, options: argparse.Namespace) -> Any:
    tokens = torch.arange(1, 9)[None]
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    cases = {
        "opened": lambda way: opened(way, name, folder),
        "and used": lambda way: logits(way, name, opened(way, name, folder), tokens),
    }
    for case, run in cases.items():
        found = in_turn({way: partial(run, way) for way in ("ftk", "transformers")}, options.rounds)
        per_second = {way: size / 2**20 / found[way] for way in ("ftk", "transformers")}
        yield {"case": case, "unit": "MiB/s", **per_second, "ratio": found["ratio"]}


PARTS = {"decode": decode, "forward": forward, "train": train, "load": load}


def line(row: dict[str, Any]) -> str:
    more = "".join(f"  {name} {row[name]}" for name in ("same_answers",) if name in row)
    more += f"  memory {row['memory']:.2f} of theirs" if "memory" in row else ""
    return (
        f"{row['part']:<8}{row['model']:<7}{row['case']:<12}ftk {row['ftk']:10.1f}  transformers "
        f"{row['transformers']:10.1f} {row['unit']}  x {row['ratio']:.2f}{more}"
    )


if __name__ == "__main__":
    transformers.utils.logging.disable_progress_bar()
    raise SystemExit(main())
