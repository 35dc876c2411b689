"""Small models to start from, and rows for cloze tasks, as files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ftk.models import build_model
from ftk.tokenizers import build_tokenizer
from tests.small_run import save_model

TEXT = (
    "yes no because so is it the a red blue old new round cat dog sun car sky house question answer based on following "
    "passage previous was rising shadow grass wet rain or he what does pronoun refer to in above true false john mark "
    "told pete liked him entail"
)
WORDS = TEXT.split()
SIGNS = [*".,?!:'\"*-", *"abcdefghijklmnopqrstuvwxyz", *(f"##{letter}" for letter in "abcdefghijklmnopqrstuvwxyz")]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
SHAPES: dict[str, dict[str, Any]] = {
    "glm": {"max_positions": 96},
    "gpt2": {"max_positions": 96},
    "t5": {"head_dim": 16, "ffn_hidden_size": 64, "decoder_start_token": 0},
    "bert": {"max_positions": 96},
}
SHARED = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "dropout": 0.0, "attention_dropout": 0.0}
SHARED |= {"embedding_dropout": 0.0}
TASKS = {"glm": "glm_blank", "gpt2": "causal_lm", "t5": "span_corruption", "bert": "masked_lm"}
FAMILIES = ("glm", "gpt2", "t5")
BOOLQ = {"passage": "The sun is red.", "question": "is it red", "label": True, "idx": 0}
COPA = {"premise": "It was wet.", "choice1": "The rain was old.", "choice2": "No cat.", "question": "cause"}
COPA |= {"label": 1, "idx": 0}
LAYOUTS = {"glm": "glm", "gpt2": "with_end", "t5": "with_sentinels", "bert": "with_mask"}


def make_tokenizer(folder: Path, layout: str, words: Iterable[str] = WORDS) -> Any:
    """A tokenizer of words, letters and punctuation, saved in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tokens = [*SPECIAL, *dict.fromkeys([*SIGNS, *words])]
    (folder / "vocab.txt").write_text("".join(f"{token}\n" for token in tokens))
    tokenizer = build_tokenizer("bert_wordpiece", path=folder / "vocab.txt", special_tokens=layout)
    tokenizer.save(folder / "saved")
    return tokenizer


def model_of(name: str, tokenizer: Any, **options: Any) -> Any:
    """A model of a family with random weights."""
    shape = {"vocab_size": tokenizer.padded_vocab_size(8), **SHARED, **SHAPES[name], **options}
    if name == "t5":
        del shape["embedding_dropout"]
    torch.manual_seed(1)
    return build_model(name, **shape).eval()


def make_model(folder: Path, name: str, words: Iterable[str] = WORDS, **options: Any) -> Path:
    """A checkpoint of such a model."""
    model = model_of(name, make_tokenizer(folder / "tokenizer", LAYOUTS[name], words), **options)
    save_model(folder / "checkpoint_1", model, folder / "tokenizer" / "saved", task={"_name": TASKS[name]})
    return folder


def spelled(task: Any, tokens: Any) -> str:
    """Tokens in the words of a task's tokenizer."""
    return " ".join(task.tokenizer.token_text(token) for token in np.asarray(tokens).tolist())


def write_rows(folder: Path, **splits: Iterable[Mapping[str, Any]]) -> Path:
    """A folder with a file of JSON lines for each split."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, rows in splits.items():
        (folder / f"{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return folder


def boolq_rows(count: int) -> list[dict[str, Any]]:
    """Rows whose label is drawn: to be learned by heart."""
    draw = torch.Generator().manual_seed(5)
    rows = []
    for number in range(count):
        passage, question = (
            " ".join(WORDS[place] for place in torch.randint(8, 20, (size,), generator=draw).tolist())
            for size in (6, 3)
        )
        label = bool(torch.randint(2, (1,), generator=draw))
        rows.append({"passage": f"{passage}.", "question": question, "label": label, "idx": number})
    return rows


def copa_rows(count: int) -> list[dict[str, Any]]:
    """The same with two choices."""
    draw = torch.Generator().manual_seed(6)
    rows = []
    for number in range(count):
        premise, first, second = (
            " ".join(WORDS[place] for place in torch.randint(8, 20, (size,), generator=draw).tolist())
            for size in (4, 2, 3)
        )
        question = ("cause", "effect")[int(torch.randint(2, (1,), generator=draw))]
        row = {"premise": f"{premise}.", "choice1": f"{first}.", "choice2": f"{second}.", "question": question}
        rows.append({**row, "label": int(torch.randint(2, (1,), generator=draw)), "idx": number})
    return rows
