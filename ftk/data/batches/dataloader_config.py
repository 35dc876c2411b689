"""Options of batching and loading."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

MOST = 2**31 - 1
MOST_WORKERS = 4096


@dataclass(kw_only=True)
class DataloaderConfig:
    batch_size: int | None = field(
        default=None,
        metadata={
            "daily": True,
            "help": "samples in a batch; default: 8 where `max_tokens` is not given either",
            "unit": "samples",
        },
    )
    max_tokens: int | None = field(
        default=None, metadata={"help": "tokens in a batch, padding counted", "unit": "tokens"}
    )
    required_batch_size_multiple: int = field(
        default=1,
        metadata={
            "needs": {"max_tokens": True},
            "help": "with `max_tokens`, make the number of samples a multiple of this where possible",
            "unit": "samples",
        },
    )
    pad_to_multiple: int | None = field(
        default=None,
        metadata={
            "resume": "free",
            "help": "pad batches to a multiple of N tokens, which changes no loss: compiled programs and kernels then "
            "meet few lengths; default: 128 on CUDA, 1 elsewhere",
            "unit": "tokens",
        },
    )
    long_samples: str = field(
        default="refuse",
        metadata={
            "needs": {"max_tokens": True},
            "help": "samples that can be longer than `max_tokens`: refuse to start, or drop (and count) them",
            "choices": ("refuse", "drop"),
        },
    )
    bucket_window: int = field(
        default=0,
        metadata={
            "help": "batches of similar length: N training samples at a time are sorted by length and cut into "
            "batches, whose order is random; 0: no sorting",
            "unit": "samples",
        },
    )
    curriculum_updates: int = field(
        default=0,
        metadata={
            "help": "short samples first: those of about the first N updates of the first epoch are sorted by length; "
            "packed texts grow instead, from an eighth of `seq_length`; -1: all of the first epoch; 0: no curriculum",
            "unit": "updates",
        },
    )
    num_workers: int = field(
        default=0,
        metadata={
            "max": 1024,
            "resume": "free",
            "help": "processes that prepare batches; 0: the training process itself",
            "unit": "processes",
        },
    )
    train_subset: str = field(default="train", metadata={"help": "split to train on"})
    valid_subset: str | None = field(
        default="valid",
        metadata={"resume": "meters", "help": "split or splits, comma-separated, to validate on; none: no validation"},
    )
    max_valid_samples: int | None = field(
        default=None,
        metadata={
            "needs": {"valid_subset": True},
            "resume": "meters",
            "help": "validate on at most this many samples of each split",
            "unit": "samples",
        },
    )

    def multiple_on(self, device_type: str) -> int:
        """`pad_to_multiple` on a device: "cuda", "cpu"."""
        return self.pad_to_multiple or (128 if device_type == "cuda" else 1)

    def validate(self) -> Iterator[str]:
        names = ("batch_size", "max_tokens", "required_batch_size_multiple", "pad_to_multiple", "max_valid_samples")
        for name in names:
            value = getattr(self, name)
            if value is not None and value < 1:
                yield f"{name} is {value}; it must be at least 1"
        for name in (*names, "bucket_window"):
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
