"""Options of batching and loading."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ftk.config.options import option

MOST = 2**31 - 1
MOST_WORKERS = 4096


@dataclass(kw_only=True)
class DataloaderConfig:
    batch_size: int | None = option(
        None, "samples in a batch; default: 8 where `max_tokens` is not given either", daily=True, unit="samples"
    )
    max_tokens: int | None = option(None, "tokens in a batch, padding counted", unit="tokens")
    required_batch_size_multiple: int = option(
        1,
        "with `max_tokens`, make the number of samples a multiple of this where possible",
        needs={"max_tokens": True},
        unit="samples",
    )
    long_samples: str = option(
        "refuse",
        "samples that can be longer than `max_tokens`: refuse to start, or drop (and count) them",
        needs={"max_tokens": True},
        choices=("refuse", "drop"),
    )
    bucket_window: int = option(
        0,
        "batches of similar length: N training samples at a time are sorted by length and cut into batches, whose "
        "order is random; 0: no sorting",
        unit="samples",
    )
    curriculum_updates: int = option(
        0,
        "short samples first: those of about the first N updates of the first epoch are sorted by length; packed "
        "texts grow instead, from an eighth of `seq_length`; -1: all of the first epoch; 0: no curriculum",
        unit="updates",
    )
    num_workers: int = option(
        0, "processes that prepare batches; 0: the training process itself", max=1024, resume="free", unit="processes"
    )
    train_subset: str = option("train", "split to train on")
    valid_subset: str | None = option(
        "valid", "split or splits, comma-separated, to validate on; none: no validation", resume="meters"
    )
    max_valid_samples: int | None = option(
        None,
        "validate on at most this many samples of each split",
        needs={"valid_subset": True},
        resume="meters",
        unit="samples",
    )

    def validate(self) -> Iterator[str]:
        for name in ("batch_size", "max_tokens", "required_batch_size_multiple", "max_valid_samples"):
            value = getattr(self, name)
            if value is not None and value < 1:
                yield f"{name} is {value}; it must be at least 1"
        for name in ("batch_size", "max_tokens", "required_batch_size_multiple", "max_valid_samples", "bucket_window"):
            if (getattr(self, name) or 0) > MOST:
                yield f"{name} is {getattr(self, name)}; it must be at most {MOST}"
        if self.bucket_window < 0:
            yield f"bucket_window is {self.bucket_window}; it must be at least 0"
        if self.curriculum_updates > MOST:
            yield f"curriculum_updates is {self.curriculum_updates}; it must be at most {MOST}"
        if self.curriculum_updates < -1:
            yield f"curriculum_updates is {self.curriculum_updates}; it must be at least 0, or -1 for the first epoch"
        if not 0 <= self.num_workers <= MOST_WORKERS:
            yield f"num_workers is {self.num_workers}; it must be in 0 to {MOST_WORKERS}"
