"""Models in evaluation mode for a while, and attention kernels for shapes that change."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def evaluation_mode(*models: nn.Module) -> Iterator[None]:
    """Inside, all parts of the models are in evaluation mode; afterwards each is in the mode that it had before.

    `model.train(was_training)` would give all parts the mode of the outermost, which may be another. Batches have any
    shapes there, so cuDNN's attention is off, see `changing_shapes`.
    """
    modes = [(module, module.training) for model in models for module in model.modules()]
    for model in models:
        model.eval()
    try:
        with changing_shapes():
            yield
    finally:
        for module, was_training in modes:
            module.training = was_training


class _Inside:
    """How many are inside of `changing_shapes`, in all threads, and what was set before the first of them."""

    lock = threading.Lock()
    count = 0
    before = True


@contextmanager
def changing_shapes() -> Iterator[None]:
    """Inside, PyTorch does not choose cuDNN's attention, in the whole process; outside as it was.

    On an H100 or H200 it comes first in bf16 and fp16, and makes a plan for each shape that it has not seen: more
    than half a second, for each length of a prompt and each number of keys (https://github.com/modelscope/FunASR/issues/3704).
    """
    with _Inside.lock:
        _Inside.count += 1
        if _Inside.count == 1:
            _Inside.before = torch.backends.cuda.cudnn_sdp_enabled()
            torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        with _Inside.lock:
            _Inside.count -= 1
            if _Inside.count == 0:
                torch.backends.cuda.enable_cudnn_sdp(_Inside.before)
