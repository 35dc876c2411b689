"""A task: predict the next token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ftk.batch import Batch
from ftk.data.batches.collate import Collater
from ftk.data.corpora.documents import Documents
from ftk.registry import register_task
from ftk.tasks.base import Task


@dataclass(kw_only=True)
class NextTokenConfig:
    window: int = field(default=64, metadata={"help": "length of a sample", "unit": "tokens"})

    def validate(self) -> Iterator[str]:
        if self.window < 1:
            yield f"window is {self.window}; it must be at least 1"


class Windows:
    """All documents in a row, cut into windows; the order is shuffled by the iterator."""

    def __init__(self, documents: Documents, window: int, eos: int) -> None:
        pieces = [part for i in range(len(documents)) for part in (documents[i], np.array([eos]))]
        self.stream = np.concatenate(pieces).astype(np.int64)  # [N]
        self.window = window

    def __len__(self) -> int:
        return max(1, (len(self.stream) - 1) // self.window)

    def sample(self, epoch: int, index: int) -> dict[str, Any]:
        piece = self.stream[index * self.window : (index + 1) * self.window + 1]
        return {"tokens": piece[:-1], "targets": piece[1:], "loss_mask": np.ones(len(piece) - 1, dtype=bool)}

    def sizes(self, epoch: int) -> np.ndarray:
        return np.full(len(self), self.window, dtype=np.int32)


@register_task("next_token", config=NextTokenConfig, criterion="cross_entropy")
class NextTokenTask(Task):
    """Left-to-right language modeling."""

    config: NextTokenConfig

    def make_samples(self, documents: Documents, seed: int) -> Windows:
        return Windows(documents, self.config.window, self.tokenizer.special.eos)

    def collater(self) -> Callable[[Sequence[dict[str, Any]]], Batch]:
        return Collater(self.tokenizer.special)

    def complete_model_config(self, config: Any) -> Any:
        config.vocab_size = self.tokenizer.padded_vocab_size(8)
        return config
