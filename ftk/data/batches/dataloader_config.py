"""Options of batching and loading."""

from __future__ import annotations

from dataclasses import dataclass

from ftk.config.options import option

INT32_MAX = 2**31 - 1


@dataclass(kw_only=True)
class DataloaderConfig:
    batch_size: int | None = option(
        None,
        "samples in a batch; without it and `max_tokens` the architecture's default, else 8",
        daily=True,
        unit="samples",
        min=1,
        max=INT32_MAX,
    )
    max_tokens: int | None = option(None, "tokens in a batch, padding counted", unit="tokens", min=1, max=INT32_MAX)
    required_batch_size_multiple: int = option(
        1,
        "with `max_tokens`, make the number of samples a multiple of this where possible",
        needs={"max_tokens": True},
        unit="samples",
        min=1,
        max=INT32_MAX,
    )
    long_samples: str = option(
        "refuse",
        "samples that can be longer than `max_tokens`: refuse to start, or drop (and count) them",
        needs={"max_tokens": True},
        choices=("refuse", "drop"),
    )
    pad_to_multiple: int | None = option(
        None,
        "pad batches to a multiple of N tokens, which changes no loss: compiled programs and kernels then meet few "
        "lengths; default: 128 on CUDA, 1 elsewhere",
        resume="free",
        unit="tokens",
        min=1,
        max=INT32_MAX,
    )
    bucket_window: int = option(
        0,
        "batches of similar length: N training samples at a time are sorted by length and cut into batches, whose "
        "order is random; 0: no sorting",
        unit="samples",
        min=0,
        max=INT32_MAX,
    )
    curriculum_updates: int = option(
        0,
        "short samples first: those of about the first N updates of the first epoch are sorted by length; packed "
        "texts grow instead, from an eighth of `seq_length`; -1: all of the first epoch; 0: no curriculum",
        unit="updates",
        min=-1,
        max=INT32_MAX,
    )
    num_workers: int = option(
        0,
        "processes that prepare batches; 0: the training process itself",
        max=1024,
        resume="free",
        unit="processes",
        min=0,
    )
    train_subset: str = option("train", "split to train on")
    valid_subset: str | None = option(
        "valid", "split or splits, comma-separated, to validate on; none: no validation", resume="meters"
    )
    max_valid_samples: int | None = option(
        None,
        "validate on at most this many samples of each split, the first ones; of several corpora each gives its share",
        needs={"valid_subset": True},
        resume="meters",
        unit="samples",
        min=1,
        max=INT32_MAX,
    )

    def multiple_on(self, device_type: str) -> int:
        """`pad_to_multiple` on a device: "cuda", "cpu"."""
        return self.pad_to_multiple or (128 if device_type == "cuda" else 1)
