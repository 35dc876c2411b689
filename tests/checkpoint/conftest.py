"""A small model with everything that is hard to keep: ties, bf16, int64, 0-d and empty tensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ftk.checkpoint import save_checkpoint
from ftk.checkpoint.manifest import FileRecord, write_manifest
from ftk.files import sha256_of
from ftk.models.glm import GLMConfig
from ftk.models.glm.model import GLM


class Awkward(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.embedding = nn.Embedding(11, 6)
        self.inner = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.coarse = nn.Parameter(torch.zeros(5, 3, dtype=torch.bfloat16))
        self.scale = nn.Parameter(torch.tensor(0.0))
        self.register_buffer("counts", torch.zeros(4, dtype=torch.int64))
        self.register_buffer("flag", torch.tensor(False))
        self.register_buffer("nothing", torch.zeros(0, 3))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
            self.counts.copy_(torch.randint(-(2**62), 2**62, (4,), generator=generator))
            self.flag.fill_(seed % 2 == 0)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(self.embedding(tokens)) * self.scale
        return self.head(hidden).float().square().mean() + self.coarse.float().square().sum()


def make_optimizer(model: nn.Module) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.98), eps=1e-6, fused=True)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.arange(8) % 11 + step % 3).backward()
        optimizer.step()


def forge_manifest(folder: Path) -> None:
    """Make the manifest anew from what is there now, as one can who wants to be believed: its digest is no secret."""
    (folder / "manifest.json").unlink(missing_ok=True)
    there = [path for path in folder.rglob("*") if path.is_file()]
    records = {str(path.relative_to(folder)): FileRecord(path.stat().st_size, sha256_of(path)) for path in there}
    write_manifest(folder, records)


def forge_json(folder: Path, name: str, edit: Callable[[Any], Any]) -> None:
    """Edit a JSON file of a checkpoint, and make the manifest anew."""
    content = json.loads((folder / name).read_text())
    edit(content)
    (folder / name).write_text(json.dumps(content))
    forge_manifest(folder)


@pytest.fixture
def tokenizer_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "a_tokenizer"
    (folder / "deeper").mkdir(parents=True)
    (folder / "ftk_tokenizer.json").write_text(json.dumps({"name": "test"}))
    (folder / "deeper" / "vocabulary.bin").write_bytes(bytes(range(256)) * 9)
    return folder


@pytest.fixture
def saved(tmp_path: Path, tokenizer_folder: Path) -> Path:
    """A checkpoint of a model trained for three steps, under RUN/checkpoint_3."""
    model = Awkward()
    optimizer = make_optimizer(model)
    train(model, optimizer, 3)
    return save_checkpoint(
        tmp_path / "run" / "checkpoint_3",
        model=model,
        optimizer=optimizer,
        trainer_state={"num_updates": 3, "best": {"metric": "loss", "value": 1.5}},
        config={"model": {"_name": "awkward", "hidden_size": 6}, "note": "注"},
        tokenizer_folder=tokenizer_folder,
    )


SMALL_GLM = {"vocab_size": 256, "num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "max_positions": 64}


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A checkpoint of a GLM with a moving average, which is half of the weights."""
    model = GLM(GLMConfig(**SMALL_GLM), seed=1)
    with torch.no_grad():  # away from the initial values, at which a lost bias would not be seen
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)) * 0.05)
    return save_checkpoint(
        tmp_path_factory.mktemp("run") / "checkpoint_3",
        model=model,
        trainer_state={"num_updates": 3},
        config={"model": {"_name": "glm", **SMALL_GLM}},
        extra_tensors={"ema": {name: parameter.detach() * 0.5 for name, parameter in model.named_parameters()}},
    )


@pytest.fixture(scope="module")
def publish(tmp_path_factory) -> Callable[[str], Path]:
    """The folder of a family, as `transformers` writes it."""
    from tests.checkpoint.hf_models import drawn  # which needs transformers

    @cache
    def folder_of(family: str) -> Path:
        folder = tmp_path_factory.mktemp("published") / "whole"
        drawn(family).save_pretrained(folder)
        return folder

    return folder_of
