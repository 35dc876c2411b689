"""Fine-tuning on real data: small models that are pretrained here learn tasks, and are measured beside floors.

    python scripts/benchmark/finetuning.py DATA OUT
    python scripts/benchmark/finetuning.py DATA OUT --only copa sft-64 --seeds 1

DATA holds, as far as the tasks of `--only` need them:

    english/train.txt, valid.txt      running text, a paragraph per line
    chinese/train.jsonl, valid.jsonl  a document per line, field `text`
    tokenizers/                       bert-base-uncased-vocab.txt; gpt2-vocab.json, gpt2-merges.txt; cog-pretrain.model
    superglue/BoolQ/, COPA/, WSC/     train.jsonl and val.jsonl of SuperGLUE
    seq2seq/scitldr_a/                SciTLDR's abstracts and summaries, a text per line: train.source, train.target ...
    seq2seq/cmrc2018_trial/           CMRC 2018's questions and passages, and answers, as such files
    lambada/                          lambada_test.jsonl with fields `text`, wikitext2_test.txt

Each step is a command of ftk, printed as a user would type it in OUT; what it prints goes to OUT/logs. A step that is
done is not done again, so that the same call continues what was stopped. Seconds are those of the call that has ended a
step. Figures: docs/performance.md.

`--only harness` needs lm_eval: name a Python that has it by --harness-python. It prints the numbers of ftk-evaluate
beside those of ftk and transformers in lm_eval.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ftk.files import write_whole

ROOT = Path(__file__).resolve().parents[2]
BOOLQ, COPA, WSC = "superglue/BoolQ", "superglue/COPA", "superglue/WSC"
SUMMARIES, CMRC = "seq2seq/scitldr_a", "seq2seq/cmrc2018_trial"
BERT, CHINESE_PIECES = "tokenizers/bert-base-uncased-vocab.txt", "tokenizers/cog-pretrain.model"

_SMALL = "--arch glm_tiny --hidden-size 256 --num-attention-heads 4 --init-std 0.06 --embedding-dropout 0 \
--attention-dropout 0 --dropout 0 --batch-size 8 --lr 1e-3 --precision bf16"
_HALF_DOCUMENTS = "--bert-prob 0.4 --gap-sentence-prob 0.2 --gpt-min-ratio 0.25"
_ONCE = "--validate-interval 0 --validate-interval-updates 0 --max-valid-samples 400 --keep-last 1"

PREPARED: dict[str, dict[str, str]] = {  # what rows start from: a name -> its steps
    "english": {
        "english-bin": f"ftk-preprocess --trainpref english/train.txt --validpref english/valid.txt "
        f"--tokenizer bert_wordpiece --tokenizer-path {BERT} --destdir english-bin",
        "glm-english": f"ftk-train english-bin {_SMALL} --num-layers 4 --seq-length 256 {_HALF_DOCUMENTS} "
        f"--max-update 700 {_ONCE} --save-dir glm-english",
    },
    "chinese": {
        "chinese-bin": f"ftk-preprocess --trainpref chinese/train.jsonl --validpref chinese/valid.jsonl "
        f"--text-key text --tokenizer sentencepiece --tokenizer-path {CHINESE_PIECES} --destdir chinese-bin",
        "glm-chinese": f"ftk-train chinese-bin {_SMALL} --num-layers 4 --seq-length 448 {_HALF_DOCUMENTS} "
        f"--max-update 150 {_ONCE} --save-dir glm-chinese",
    },
}

METHODS = {
    "full": "--lr 2e-4",
    "LoRA": "--adapter lora --lr 2e-3",
    "by-heart": "--lr 5e-4 --batch-size 8",  # of a few rows, which are asked about again
}


@dataclass(frozen=True)
class Task:
    """What is learned, and how it is measured.

    Attributes:
        base: of `PREPARED`.
        train: ftk-train's arguments, but for what a method gives.
        evaluate: ftk-evaluate's.
        metrics: of its results.
        methods: of `METHODS`.
        floor: of the folder DATA: the metrics of an answer without a model.
        measure: of the folder DATA and that of the results: metrics that ftk-evaluate does not compute.
        prepare: makes, of the folder DATA, the folder within OUT that `train` begins with.
    """

    base: str
    train: str
    evaluate: str
    metrics: tuple[str, ...]
    methods: tuple[str, ...] = ("full", "LoRA")
    floor: Callable[[Path], dict[str, float]] = lambda data: {}
    measure: Callable[[Path, Path], dict[str, float]] | None = None
    prepare: Callable[[Path, Path], None] | None = None


def _by_heart(rows: str, train: str, evaluate: str, metric: str, epochs: int = 40, base: str = "english") -> Task:
    """A task that is learned by heart from OUT/few/`rows`."""
    evaluate = f"{evaluate} --data few/{rows}/train.jsonl"
    train = f"few/{rows} {train} --max-epoch {epochs}"
    return Task(base, train, evaluate, (metric,), ("by-heart",), prepare=lambda data, folder: write_few(data, folder))


def majority(data: Path, rows: str) -> dict[str, float]:
    """The share of the most frequent label, in percent."""
    labels = Counter(json.loads(line)["label"] for line in (data / rows).read_text("utf-8").splitlines())
    return {"accuracy": 100 * max(labels.values()) / labels.total()}


def sentences(text: str) -> list[str]:
    """A text, cut behind its full stops."""
    return [part if part.endswith(".") else f"{part}." for part in text.split(". ")]


def rouge(pairs: Iterable[tuple[str, str]]) -> dict[str, float]:
    """ROUGE of summaries and their references."""
    from ftk.evaluation.base import build_scorer

    scorer = build_scorer("rouge")
    for summary, reference in pairs:
        scorer.add(summary, reference)
    return scorer.result()


def abstracts(data: Path, split: str) -> list[tuple[str, str]]:
    """SciTLDR's abstracts with their summaries."""
    source, target = ((data / SUMMARIES / f"{split}.{end}").read_text("utf-8") for end in ("source", "target"))
    return [*zip(source.splitlines(), target.splitlines(), strict=True)]


def first_sentence(data: Path) -> dict[str, float]:
    """ROUGE of the first sentence of each source, taken as its summary."""
    return rouge((sentences(source)[0], target) for source, target in abstracts(data, "test"))


def chosen_sentences(data: Path, results: Path) -> dict[str, float]:
    """ROUGE of the sentences that a model has chosen as summaries."""
    rows = map(json.loads, (results / "predictions.jsonl").read_text("utf-8").splitlines())
    chosen = (row["candidates"][row["chosen"]]["text"] for row in rows)
    pairs = []
    for source, target in abstracts(data, "test"):
        found = next(chosen, None) if len(sentences(source)) > 1 else source
        if found is None:  # of the first rows alone (--quick)
            break
        pairs.append((found, target))
    return rouge(pairs)


def write_sentences(data: Path, folder: Path) -> None:
    """The sentences of SciTLDR's abstracts as choices; right is the one that has most in common with the summary.
    Abstracts of one sentence have no choice and are left out."""
    folder.mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        lines = []
        for source, target in abstracts(data, split):
            choices = sentences(source)
            if len(choices) == 1:
                continue
            common = [rouge([(sentence, target)])["rouge1"] for sentence in choices]
            row = {"question": "Which sentence sums it up?", "choices": choices, "label": common.index(max(common))}
            lines.append(json.dumps(row) + "\n")
        write_whole(folder / f"{split}.jsonl", "".join(lines))


ANSWER = "--evaluation generation --scoring exact_match,token_f1 --max-len"
CMRC_ANSWER = "--evaluation generation --scoring cmrc_em,cmrc_f1 --max-len 64"
TASKS: dict[str, Task] = {
    "boolq": Task(
        "english",
        f"{BOOLQ} --config finetune/boolq_large --max-epoch 2",
        f"--evaluation boolq --data {BOOLQ}/val.jsonl",
        ("accuracy",),
        floor=lambda data: majority(data, f"{BOOLQ}/val.jsonl"),
    ),
    "copa": Task(
        "english",
        f"{COPA} --config finetune/copa_large --max-epoch 4",
        f"--evaluation copa --data {COPA}/val.jsonl",
        ("accuracy",),
        floor=lambda data: majority(data, f"{COPA}/val.jsonl"),
    ),
    "scitldr": Task(
        "english",
        f"{SUMMARIES} --task seq2seq --truncate right --seq-length 192 --target-length 40 --batch-size 8 "
        "--warmup-ratio 0.1 --max-epoch 1",
        f"--evaluation generation --scoring rouge --data {SUMMARIES}/test.source --max-len 40 --no-repeat-ngram-size 3 "
        "--batch-size 32",
        ("rouge1", "rouge2", "rougeLsum"),
        floor=first_sentence,
    ),
    "scitldr-choice": Task(
        "english",
        "sentences/scitldr --task classification --kind multiple_choice --text-fields question --seq-length 48 "
        "--batch-size 4 --warmup-ratio 0.1 --max-update 120",
        "--evaluation classification --data sentences/scitldr/test.jsonl --batch-size 32",
        ("rouge1", "rouge2", "rougeLsum"),
        floor=first_sentence,
        measure=chosen_sentences,
        prepare=write_sentences,
    ),
    "cmrc": Task(
        "chinese",
        f"{CMRC} --task seq2seq --expected word --truncate right --seq-length 384 --target-length 64 --batch-size 8 "
        "--warmup-ratio 0.1 --max-epoch 1",
        f"{CMRC_ANSWER} --data {CMRC}/test.source --batch-size 32",
        ("cmrc_em", "cmrc_f1"),
    ),
    "boolq-64": _by_heart("boolq", "--config finetune/boolq_large", "--evaluation boolq", "accuracy", epochs=20),
    "copa-32": _by_heart("copa", "--config finetune/copa_large", "--evaluation copa", "accuracy"),
    "wsc-64": _by_heart("wsc", "--config finetune/wsc_large --choice-loss generative", "--evaluation wsc", "accuracy"),
    "seq2seq-64": _by_heart(
        "pairs", "--task seq2seq --seq-length 128 --warmup-ratio 0.1", f"{ANSWER} 64", "exact_match"
    ),
    "sft-64": _by_heart("talks", "--task sft --seq-length 128 --warmup-ratio 0.1", f"{ANSWER} 64", "exact_match"),
    "cmrc-24": _by_heart(
        "cmrc",
        "--task seq2seq --expected word --truncate right --seq-length 128 --target-length 64 --warmup-ratio 0.1",
        CMRC_ANSWER,
        "cmrc_em",
        epochs=160,  # the body has read few updates of old poems
        base="chinese",
    ),
}
HARNESS = "harness"


class Run:
    """Steps in a folder, each done once.

    Args:
        data: the folder DATA.
        out: the folder OUT.
        quick: two updates and four rows in each step, to see that all commands work.
    """

    def __init__(self, data: Path, out: Path, quick: bool) -> None:
        self.data, self.out, self.quick = data, out, quick
        for folder in ("logs", "steps", "results"):
            (out / folder).mkdir(parents=True, exist_ok=True)
        for source in sorted(path for path in data.iterdir() if path.is_dir()):
            if not (out / source.name).is_symlink():
                (out / source.name).symlink_to(source)

    def step(self, name: str, command: str, python: str = sys.executable) -> float:
        """Runs a command within OUT unless it has ended there before.

        Returns:
            its seconds.

        Raises:
            SystemExit: it failed, or a step of this name was another command.
        """
        program, *arguments = shlex.split(command)
        if self.quick:
            arguments += {
                "ftk-train": shlex.split("--max-update 2 --batch-size 2"),
                "ftk-evaluate": ["--limit", "4"],
            }.get(program, [])
        record = self.out / "steps" / f"{name}.json"
        if record.exists():
            done = json.loads(record.read_text("utf-8"))
            if done["command"] != [program, *arguments]:
                raise SystemExit(
                    f"{record}: was made by another command; remove it and what it made, or take another OUT"
                )
            return float(done["seconds"])
        print(shlex.join([program, *arguments]), flush=True)
        module = program.replace("ftk-", "ftk_cli.") if program.startswith("ftk-") else program
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        started = time.monotonic()
        with open(self.out / "logs" / f"{name}.log", "a", encoding="utf-8") as log:
            line = [python, "-m", module, *arguments]
            code = subprocess.run(line, cwd=self.out, env=environment, stdout=log, stderr=log).returncode
        seconds = time.monotonic() - started
        if code:
            raise SystemExit(f"{name}: exit code {code}; see {self.out}/logs/{name}.log")
        write_whole(record, json.dumps({"command": [program, *arguments], "seconds": seconds}))
        return seconds

    def prepare(self, base: str) -> str:
        """Makes what rows start from; returns the folder of the model."""
        for name, command in PREPARED[base].items():
            self.step(name, command)
        return name

    def row(self, name: str, method: str, seed: int) -> None:
        """Trains and evaluates one row of the table."""
        task = TASKS[name]
        base = self.prepare(task.base)
        folder = self.out / task.train.split()[0]
        if task.prepare is not None and not (folder / "train.jsonl").exists():
            task.prepare(self.data, folder)
        made = f"{name}-{method}-{seed}"
        self.step(
            made,
            f"ftk-train {task.train} --finetune-from {base} {METHODS[method]} --seed {seed} --precision bf16 "
            f"--valid-subset none --save-interval-updates 0 --save-dir {made}",
        )
        self.step(f"{made}-evaluated", f"ftk-evaluate --path {made} {task.evaluate} --output results/{made}")

    def harness(self, python: str) -> None:
        """A GPT-2 of transformers, trained further, in ftk-evaluate and in lm-evaluation-harness."""
        write_gpt2(self.data, self.out / "gpt2")
        self.step(
            "gpt2-bin",
            "ftk-preprocess --trainpref english/train.txt --validpref english/valid.txt --tokenizer hf "
            "--tokenizer-path gpt2 --destdir gpt2-bin",
        )
        self.step(
            "gpt2-english",
            "ftk-train gpt2-bin --finetune-from gpt2 --config continue/causal --seq-length 256 --lr 1e-3 "
            f"--batch-size 8 --update-freq 1 --max-update 150 --precision bf16 {_ONCE} --save-dir gpt2-english",
        )
        self.step("gpt2-converted", "ftk-checkpoint convert --to hf gpt2-english gpt2-converted")
        few = "--limit 4" if self.quick else ""
        asked = f"--include_path {ROOT}/configs/harness --tasks ftk_lambada,ftk_wikitext2 --device cpu {few}"
        self.step(
            "gpt2-evaluated",
            "ftk-evaluate --path gpt2-english --evaluation 'lambada rule=harness' 'perplexity window=256 stride=255' "
            "--data lambada=lambada/lambada_test.jsonl perplexity=lambada/wikitext2_test.txt --output results/gpt2",
        )
        self.step(
            "gpt2-harness",
            f"ftk.evaluation.harness --model ftk --model_args path=gpt2-english,max_length=255 {asked} "
            "--output_path results/harness-ftk.json",
            python,
        )
        self.step(
            "gpt2-harness-transformers",
            "lm_eval --model hf --model_args pretrained=gpt2-converted,dtype=float32,max_length=255 "
            f"{asked} --output_path results/harness-transformers.json",
            python,
        )


FEW = {"boolq": (BOOLQ, 64), "copa": (COPA, 32), "wsc": (WSC, 64), "pairs": (COPA, 64), "talks": (COPA, 64)}


def few_rows(data: Path, name: str) -> list[dict[str, str]]:
    """The first rows of a data set (of WSC those that are learned from), or of COPA as pairs or as instructions."""
    if name == "cmrc":
        lines = [(data / CMRC / f"train.{end}").read_text("utf-8").splitlines() for end in ("source", "target")]
        pairs = [{"source": source, "target": target} for source, target in zip(*lines, strict=True)]
        return [row for row in pairs if "牠" not in row["target"]][:24]  # which the vocabulary cannot write
    source, count = FEW[name]
    rows = [json.loads(line) for line in (data / source / "train.jsonl").read_text("utf-8").splitlines()]
    rows = [row for row in rows if name != "wsc" or row["label"]][:count]
    if name not in ("pairs", "talks"):
        return rows
    asked = {"cause": "What was the cause?", "effect": "What happened then?"}
    pairs = [(row["premise"], asked[row["question"]], row[f"choice{1 + row['label']}"]) for row in rows]
    if name == "pairs":
        return [{"source": f"{premise} {question}", "target": right} for premise, question, right in pairs]
    return [{"instruction": question, "input": premise, "output": right} for premise, question, right in pairs]


def write_few(data: Path, folder: Path) -> None:
    """The rows of `few_rows` in the folder OUT/few/NAME."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in few_rows(data, folder.name))
    write_whole(folder / "train.jsonl", "".join(lines))


def write_gpt2(data: Path, folder: Path) -> None:
    """A GPT-2 of two layers with random weights, as transformers writes it."""
    if (folder / "model.safetensors").exists():
        return
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    vocabulary = (str(data / "tokenizers" / name) for name in ("gpt2-vocab.json", "gpt2-merges.txt"))
    tokenizer = Tokenizer(models.BPE.from_file(*vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    end = "<|endoftext|>"
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=end, eos_token=end, unk_token=end).save_pretrained(
        folder
    )
    torch.manual_seed(1)
    config = GPT2Config(n_layer=2, n_embd=128, n_head=4, n_positions=256)
    GPT2LMHeadModel(config).save_pretrained(folder)


def table(out: Path, data: Path, names: list[str]) -> list[str]:
    """Lines of the table, of what has been evaluated until now."""
    lines = [("task", "trained", "metric", "seeds", "mean", "deviation", "floor", "training s")]
    for name in names:
        task, floor = TASKS[name], {}
        for method in task.methods:
            found = [path for path in sorted((out / "results").glob(f"{name}-{method}-*")) if path.is_dir()]
            if not found:
                continue
            floor = floor or task.floor(data)
            results = [task.measure(data, path) if task.measure else written_metrics(path) for path in found]
            seconds = [
                json.loads((out / "steps" / f"{path.name}.json").read_text("utf-8"))["seconds"] for path in found
            ]
            first: tuple[str, ...] = (name, method)
            for metric in task.metrics:
                values = [one[metric] for one in results]
                deviation = f"{statistics.stdev(values):.2f}" if len(values) > 1 else "-"
                least = f"{floor[metric]:.2f}" if metric in floor else "-"
                mean = f"{statistics.mean(values):.2f}"
                lines.append(
                    (*first, metric, str(len(values)), mean, deviation, least, f"{statistics.mean(seconds):.0f}")
                )
                first = ("", "")
    return aligned(lines, 3)


def written_metrics(folder: Path) -> dict[str, float]:
    """The metrics in the results of ftk-evaluate."""
    (result,) = json.loads((folder / "results.json").read_text("utf-8"))["results"]
    return {name: one["value"] for name, one in result["metrics"].items()}


def harness_table(results: Path) -> list[str]:
    """Lines of the table of the three programs.

    Args:
        results: the folder OUT/results.
    """
    asked = [("lambada", "ftk_lambada", "perplexity")]
    asked += [("perplexity", "ftk_wikitext2", metric) for metric in ("bits_per_byte", "word_perplexity")]
    made = json.loads((results / "gpt2" / "results.json").read_text("utf-8"))["results"]
    own = {one["evaluation"]: one["metrics"] for one in made}
    found = {"ftk-evaluate": [own[name][metric]["value"] for name, _, metric in asked]}
    for program in ("ftk", "transformers"):
        newest = max(results.glob(f"harness-{program}_*.json"))  # lm_eval adds the time
        theirs = json.loads(newest.read_text("utf-8"))["results"]
        found[f"{program} in lm_eval"] = [theirs[task][f"{metric},none"] for _, task, metric in asked]
    head = ("program", *(f"{task.removeprefix('ftk_')} {metric}" for _, task, metric in asked))
    return aligned([head, *((program, *(f"{one:,.4f}" for one in values)) for program, values in found.items())], 1)


def aligned(lines: Sequence[Sequence[str]], num_left: int) -> list[str]:
    """Lines of cells in columns, the first `num_left` of them of texts."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(
            text.ljust(width) if place < num_left else text.rjust(width)
            for place, (text, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder DATA")
    parser.add_argument("out", type=Path, help="folder OUT")
    parser.add_argument("--only", nargs="+", choices=[*TASKS, HARNESS], help="these tasks; default: all but harness")
    parser.add_argument("--methods", nargs="+", choices=[*METHODS], default=[*METHODS], help="ways of training")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3], help="of all but what is learned by heart")
    parser.add_argument("--harness-python", default=sys.executable, help="a Python that has lm_eval")
    parser.add_argument("--quick", action="store_true", help="two updates and four rows in each step")
    options = parser.parse_args()
    if not options.data.is_dir():
        parser.error(f"{options.data}: no such folder")
    run = Run(options.data.absolute(), options.out.absolute(), options.quick)
    names = options.only or [*TASKS]
    if HARNESS in names:
        run.harness(options.harness_python)
        print("\n".join(harness_table(run.out / "results")), flush=True)
    tasks = [name for name in names if name != HARNESS]
    for seed in options.seeds if tasks else ():
        for name in tasks:
            task = TASKS[name]
            for method in task.methods:
                if method in options.methods and (method != "by-heart" or seed == options.seeds[0]):
                    run.row(name, method, seed)
        print("\n".join(table(run.out, run.data, tasks)), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
