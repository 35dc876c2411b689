"""Samples from an indexed dataset: the kernels against the plain Python and NumPy way, for each objective.

    python scripts/benchmark/samples.py --json out.json
    python scripts/benchmark/samples.py --quick

The work: texts of --seq-length tokens are packed from real documents (paragraphs of data/english as GPT-2 BPE,
articles of data/chinese as SentencePiece), blanked out for one objective, laid out, and padded in batches of
--batch-size: the arrays of a batch, before they become tensors. Both ways read the same `.bin/.idx`.

The naive way is `PlainDataset` of tests/tasks/glm_blank/reference_samples.py, which the tests compare the kernel
with, sample for sample: the steps of the original's BlockDataset and ConstructBlockStrategy, with slices and
concatenations in NumPy and lists in Python. Here it draws from Python's own generator, whose draws cost less than
those of the kernel's generator written in Python.

A batch is dropped before the next is made, as in training. Both run in turn, --rounds times; the figures are of
each way's best round. `batch` compares batches with batches; `single` compares single samples without padding, one
call each: `GLMBlankDataset.sample` with `PlainDataset.sample`.

Behind GLM's objectives stand those of the tasks masked_lm, span_corruption and denoising, against plain_samples.py. Its
text is cut out of one array in memory, its generator is NumPy's, of (seed, epoch, index).
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "tasks" / "glm_blank"))

import plain_samples  # noqa: E402
from common import TEST_DATA, best_of  # noqa: E402
from reference_samples import PlainDataset, PlainRandom, collate  # noqa: E402

from ftk.data.batches.collate import padded  # noqa: E402
from ftk.data.corpora.documents import sentence_end_ids  # noqa: E402
from ftk.data.indexed.dataset import IndexedDataset, IndexedDatasetWriter, optimal_dtype  # noqa: E402
from ftk.data.text.preprocess_config import TextConfig  # noqa: E402
from ftk.data.text.records import read_documents  # noqa: E402
from ftk.tasks.denoising.samples import DenoisingDataset  # noqa: E402
from ftk.tasks.denoising.task import DenoisingConfig  # noqa: E402
from ftk.tasks.glm_blank.config import BlankInfillingConfig  # noqa: E402
from ftk.tasks.glm_blank.samples.dataset import GLMBlankDataset  # noqa: E402
from ftk.tasks.glm_blank.samples.spans import poisson_weights  # noqa: E402
from ftk.tasks.masked_lm.samples import MaskedDataset  # noqa: E402
from ftk.tasks.masked_lm.task import MaskedLMConfig  # noqa: E402
from ftk.tasks.pieces import Tokens  # noqa: E402
from ftk.tasks.span_corruption.samples import SpanCorruptionDataset, sentinels_of  # noqa: E402
from ftk.tasks.span_corruption.task import SpanCorruptionConfig  # noqa: E402
from ftk.tokenizers import Tokenizer, build_tokenizer, with_special_tokens  # noqa: E402

CORPORA = (
    ("English", "english/train.txt", "gpt2_bpe", "gpt2-vocab.json"),
    ("Chinese", "chinese/train.jsonl", "sentencepiece", "cog-pretrain.model"),
)
OBJECTIVES = {
    "token": {"bert_prob": 1.0, "gap_sentence_prob": 0.0},
    "sentence": {"bert_prob": 0.0, "gap_sentence_prob": 1.0},
    "document": {"bert_prob": 0.0, "gap_sentence_prob": 0.0},
}
TASKS = ("masked_lm", "span_corruption", "denoising")
GOAL, TASK_GOAL = 20.0, 10.0
SEED, EPOCH = 1, 1


def encode(text: Path, tokenizer: Tokenizer, prefix: Path, limit: int | None) -> IndexedDataset:
    with IndexedDatasetWriter(prefix, optimal_dtype(tokenizer.vocab_size)) as writer:
        for number, document in enumerate(read_documents([str(text)], TextConfig())):
            if number == limit:
                break
            writer.add(tokenizer.encode(document.text))
    return IndexedDataset(prefix)


def measure(
    documents: IndexedDataset, tokenizer: Tokenizer, objective: str, ends: np.ndarray, options: argparse.Namespace
) -> dict[str, float]:
    config = BlankInfillingConfig(
        seq_length=options.seq_length, document_mask=options.document_mask, **OBJECTIVES[objective]
    )
    ours = GLMBlankDataset(documents, tokenizer, config, SEED)
    weights = poisson_weights(config.avg_block_length, config.max_block_length).tolist()
    naive = PlainDataset(documents, tokenizer.special, config, ends, weights)
    pad = tokenizer.special.pad or 0

    def naive_sample(index: int) -> Any:
        return naive.sample(PlainRandom(SEED, EPOCH, index))

    return compared(ours, naive_sample, lambda samples: collate(samples, pad), options)


def measure_task(
    task: str, documents: IndexedDataset, tokenizer: Tokenizer, options: argparse.Namespace
) -> dict[str, float]:
    """The figures of a task whose naive way is one of plain_samples.py."""
    tokenizer = with_special_tokens(tokenizer, "with_sentinels" if task == "span_corruption" else "with_mask")
    ours: Any
    if task == "span_corruption":
        special = tokenizer.special
        assert special.eos is not None
        assert special.pad is not None
        config: Any = SpanCorruptionConfig(seq_length=options.seq_length)
        shape = tokenizer.vocab_size, sentinels_of(tokenizer), special.pad, special.eos, special.pad
        ours = SpanCorruptionDataset(documents, *shape, config, SEED)
        ring, first, last, pad = ours.ring, [], [], special.pad
    else:
        tokens = Tokens.of(tokenizer, task, whole_words=task == "denoising")
        if task == "masked_lm":
            config = MaskedLMConfig(seq_length=options.seq_length)
            ours = MaskedDataset(documents, tokens, config, SEED)
        else:
            config = DenoisingConfig(seq_length=options.seq_length)
            ours = DenoisingDataset(documents, tokens, sentence_end_ids(tokenizer), tokens.last, config, SEED)
        ring, first, last, pad = ours.texts.ring, [tokens.first], [tokens.last], tokens.pad
    whole = np.concatenate([np.append(document, ring.end) for document in documents]).astype(np.int64)

    def naive_sample(index: int) -> Any:
        random = np.random.default_rng((SEED, EPOCH, index))
        text = np.concatenate((first, whole[index * ring.length :][: ring.length], last)).astype(np.int64)
        if task == "masked_lm":
            return plain_samples.masked(text, tokens, random, config)
        make = plain_samples.span_corrupted if task == "span_corruption" else plain_samples.noisy
        return make(text, ours, random, config)

    return compared(ours, naive_sample, lambda samples: padded(samples, pad), options)


def compared(
    ours: Any, naive_sample: Callable[[int], Any], collate: Callable[[Any], Any], options: argparse.Namespace
) -> dict[str, float]:
    """The figures of a dataset beside those of a function that makes one sample."""
    count = min(options.samples, len(ours) - 1) // options.batch_size * options.batch_size
    few = max(options.batch_size, count // 8 // options.batch_size * options.batch_size)  # the naive way's share
    batches = np.arange(count).reshape(-1, options.batch_size)

    def our_batches() -> None:
        for row in batches:
            ours.samples(EPOCH, row)

    def our_singles() -> None:
        for index in range(count):
            ours.sample(EPOCH, index)

    def naive_singles() -> None:
        for index in range(few):
            naive_sample(index)

    def naive_batches() -> None:
        for row in batches[: few // options.batch_size]:
            collate([naive_sample(index) for index in row.tolist()])

    ways = {
        "ours": our_batches,
        "naive": naive_batches,
        "ours_single": our_singles,
        "naive_single": naive_singles,
    }
    seconds = best_of(ways, options.rounds)
    tokens = sum(int(ours.samples(EPOCH, row).lengths.sum()) for row in batches) / count
    rates = {name: (few if "naive" in name else count) / taken for name, taken in seconds.items()}
    return {
        **{f"{name}_samples_per_second": rate for name, rate in rates.items()},
        "tokens_per_sample": tokens,
        "ours_tokens_per_second": rates["ours"] * tokens,
        "ratio": rates["ours"] / rates["naive"],
        "single_ratio": rates["ours_single"] / rates["naive_single"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small part of the text, one round")
    parser.add_argument("--seq-length", type=int, default=512, help="tokens of a text (default: 512)")
    parser.add_argument("--batch-size", type=int, default=32, help="samples in a batch (default: 32)")
    parser.add_argument("--samples", type=int, default=4096, help="samples in a round (default: 4096)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds (default: 5)")
    parser.add_argument("--document-mask", action="store_true", help="samples with document numbers")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    options = parser.parse_args()
    if options.quick:
        options.samples, options.rounds = min(options.samples, 512), min(options.rounds, 2)
    if not TEST_DATA.is_dir():
        parser.error(f"{TEST_DATA} is missing; set FTK_TEST_DATA to the folder that holds data/")

    print(f"{platform.processor() or platform.machine()}, one process; texts of {options.seq_length} tokens")
    print(f"{'text':<9}{'objective':<16}{'ours':>12}{'':>14}{'naive':>12}{'ratio':>8}   {'single':>20}{'ratio':>8}")
    print(
        f"{'':<25}{'samples/s':>12}{'Mtokens/s':>14}{'samples/s':>12}{'batch':>8}   {'ours / naive':>20}{'single':>8}"
    )
    figures: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for language, text, name, vocabulary in CORPORA:
            tokenizer = build_tokenizer(name, path=str(TEST_DATA / "tokenizers" / vocabulary), special_tokens="glm")
            limit = 3000 if options.quick else None
            documents = encode(TEST_DATA / text, tokenizer, Path(folder) / language, limit)
            ends = sentence_end_ids(tokenizer)
            plain = build_tokenizer(name, path=str(TEST_DATA / "tokenizers" / vocabulary))
            for objective in (*OBJECTIVES, *TASKS):
                if objective in OBJECTIVES:
                    goal, found = GOAL, measure(documents, tokenizer, objective, ends, options)
                else:
                    goal, found = TASK_GOAL, measure_task(objective, documents, plain, options)
                figures.append({"text": language, "objective": objective, "goal": goal, **found})
                single = (
                    f"{found['ours_single_samples_per_second']:,.0f} / {found['naive_single_samples_per_second']:,.0f}"
                )
                print(
                    f"{language:<9}{objective:<16}{found['ours_samples_per_second']:>12,.0f}"
                    f"{found['ours_tokens_per_second'] / 1e6:>14.1f}{found['naive_samples_per_second']:>12,.0f}"
                    f"{found['ratio']:>7.1f}x   {single:>20}{found['single_ratio']:>7.1f}x",
                    flush=True,
                )
    if options.json:
        machine = {"processor": platform.processor(), "python": platform.python_version(), "numpy": np.__version__}
        settings = {name: value for name, value in vars(options).items() if name != "json"}
        record = {"machine": machine, "settings": settings, "figures": figures}
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
