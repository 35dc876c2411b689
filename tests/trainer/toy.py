"""The smallest task there is: copy a token, learned by an embedding and a linear layer with dropout."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch
from torch import nn

from ftk.config.build import build
from ftk.criterions.base import LossOutput
from ftk.criterions.cross_entropy import CrossEntropy, CrossEntropyConfig
from ftk.generation.text import TextGenerator
from ftk.model_parallel.shards import local
from ftk.trainer import Trainer, build_run
from ftk.trainer.config import TrainConfig
from tests.dense import batch_of
from tests.records import assert_same_tensors

VOCABULARY = 11


class ToyDataset:
    """Samples of 4 to 7 random tokens, each its own target but for the first."""

    def __init__(self, num_samples, seed):
        self.num_samples = num_samples
        self.seed = seed

    def __len__(self):
        return self.num_samples

    def sizes(self, epoch):
        return np.array([4 + index % 4 for index in range(self.num_samples)], dtype=np.int32)

    def sample(self, epoch, index):
        random = np.random.default_rng([self.seed, epoch, index])
        return {"tokens": random.integers(0, VOCABULARY, 4 + index % 4)}


def collate(samples):
    width = max(len(sample["tokens"]) for sample in samples)
    tokens = torch.zeros(len(samples), width, dtype=torch.int64)  # [B, T]
    loss_mask = torch.zeros(len(samples), width, dtype=torch.bool)
    for row, sample in enumerate(samples):
        tokens[row, : len(sample["tokens"])] = torch.from_numpy(sample["tokens"])
        loss_mask[row, 1 : len(sample["tokens"])] = True
    return batch_of({"tokens": tokens, "targets": tokens, "loss_mask": loss_mask})


class ToyTask:
    """What the trainer asks of a task."""

    def __init__(self, tmp_path, num_samples=24):
        folder = tmp_path / "toy_tokenizer"
        folder.mkdir(exist_ok=True)
        (folder / "vocabulary.txt").write_text("toy\n")
        self.corpus = None
        self.tokenizer_folder = folder
        self.tokenizer = SimpleNamespace(fingerprint="toy")
        self.num_samples = num_samples

    def load_split(self, split):
        return ToyDataset(self.num_samples if split == "train" else 9, seed=len(split))

    def load_training_split(self, split):
        return self.load_split(split)

    def collater(self):
        return collate

    def hooks(self):
        return ()

    def unigram(self, split):
        return None

    def figures(self, scored):
        return {}

    def framing(self, tokenizer, model_config):
        return None

    def text_generator(self):
        return TextGenerator


class ToyModel(nn.Module):
    def __init__(self, dropout=0.2):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.norm = nn.LayerNorm(8)
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(8, VOCABULARY)

    def forward(self, tokens):
        return self.output(self.dropout(self.norm(self.embedding(tokens))))  # [B, T, V]


class Scripted(CrossEntropy):
    """The losses of validations are given, or those of training."""

    def __init__(self, losses, training=False):
        super().__init__(CrossEntropyConfig())
        self.losses, self.training = iter(losses), training

    def __call__(self, model, batch):
        output = super().__call__(model, batch)
        if model.training != self.training:
            return output
        accuracy = {"accuracy": (output.num_targets * 0.5, output.num_targets)}
        return LossOutput(
            output.loss * 0.0 + next(self.losses) * output.num_targets.float(), output.num_targets, accuracy
        )


class Explode(torch.autograd.Function):
    """Gives what it gets; its gradient is infinite."""

    @staticmethod
    def forward(context, value):
        return value.clone()

    @staticmethod
    def backward(context, gradient):
        return gradient * float("inf")


def toy_config(save_dir, **options):
    """The configuration of a toy run; options by `section__name=value`."""
    tree = {
        "common": {"device": "cpu", "seed": 5},
        "logging": {"log_format": "json", "log_interval": 2},
        "dataset": {"data": "nowhere"},
        "model": {"arch": "glm_tiny"},
        # The recipe of the architecture has others.
        "optimizer": {"_name": "adamw", "lr": 0.01, "betas": [0.9, 0.98], "eps": 1e-6, "weight_decay": 0.1},
        "lr_scheduler": {"_name": "linear", "warmup_updates": 3, "min_lr_ratio": 0.0},
        "dataloader": {"batch_size": 4},
        "training": {"max_update": 10, "validate_interval": 0, "validate_interval_updates": 5},
        "ema": {},
        "checkpoint": {"save_dir": str(save_dir), "save_interval_updates": 0},
    }
    if (options.get("optimizer") or options.get("optimizer__") or "adamw") != "adamw":
        tree["optimizer"] = {"lr": 0.01}
    for key, value in options.items():
        section, _, name = key.partition("__")
        tree.setdefault(section, {})[name or "_name"] = value
    return build(TrainConfig, tree)


def toy_trainer(tmp_path, *, task=None, model=None, criterion=None, world=None, save_dir="run", **options):
    torch.manual_seed(0)
    return Trainer(
        build_run(
            toy_config(tmp_path / save_dir, **options),
            task=task or ToyTask(tmp_path),
            model=model or ToyModel(),
            criterion=criterion or CrossEntropy(CrossEntropyConfig()),
            world=world,
        )
    )


def everything(trainer):
    """Parameters and optimizer state of a trainer, by name."""
    tensors = {f"model.{name}": local(tensor).clone() for name, tensor in trainer.run.model.state_dict().items()}
    for name, parameter in trainer.run.model.named_parameters():
        for key, value in trainer.run.optimizer.state[parameter].items():
            tensors[f"optimizer.{name}.{key}"] = local(value).clone()
    return tensors


def assert_same(left, right):
    """Both trainers hold the same numbers, bit for bit."""
    left, right = everything(left), everything(right)
    assert len(left) > 4
    assert_same_tensors(left, right)
