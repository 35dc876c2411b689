"""What train_step.py compares: batches of blank infilling, and the ways to take a step on them."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from original_way import OriginalGLM, OriginalWay
from torch import Tensor

from ftk.batch import Batch
from ftk.config.build import build
from ftk.data.batches.collate import Collater
from ftk.data.corpora.documents import DocumentList
from ftk.model_parallel.engine import prepare_model
from ftk.model_parallel.step_module import StepModule
from ftk.model_parallel.world import World
from ftk.models.glm import GLMConfig
from ftk.models.glm.convert import to_original
from ftk.models.glm.model import GLM
from ftk.modules.cuda_graphs import CudaGraphs
from ftk.optim.parameter_groups import parameter_groups
from ftk.tasks.glm_blank.config import BlankInfillingConfig
from ftk.tasks.glm_blank.samples.dataset import GLMBlankDataset
from ftk.tasks.glm_blank.samples.infilling import OBJECTIVES
from ftk.tokenizers import SpecialTokens
from ftk.trainer.config import TrainConfig
from ftk.trainer.log.metrics import Stopwatch
from ftk.trainer.recorded import RecordedRunner
from ftk.trainer.step import SequentialRunner, Update

LEARNING_RATE = 1e-4
BETAS = (0.9, 0.98)
EPS = 1e-6
WEIGHT_DECAY = 0.1
CLIP_NORM = 1.0
SEED = 1


@dataclass(frozen=True)
class Way:
    """One way to take a step: the original's, or ftk's with its options, named as those of ftk-train."""

    whose: str  # "original" or "ftk"
    precision: str = "fp32"
    tf32: bool = False
    attention: str = "auto"
    loss_form: str = "auto"
    checkpointing: str = "none"
    compile: str = "none"
    cuda_graphs: str = "off"
    residual: str = "fp32"

    @property
    def name(self) -> str:
        """Such as "ftk bf16" or "ftk fp32 tf32, compile block": what is not the default."""
        words = " ".join([self.whose, self.precision, *(["tf32"] if self.tf32 else [])])
        chosen = [
            ("attention", self.attention, "auto"),
            ("loss", self.loss_form, "auto"),
            ("checkpointing", self.checkpointing, "none"),
            ("compile", self.compile, "none"),
            ("CUDA graphs", self.cuda_graphs, "off"),
            ("residual", self.residual, "fp32"),
        ]
        return ", ".join([words, *(f"{what} {value}" for what, value, default in chosen if value != default)])


def all_ways(precisions: Sequence[str], tf32: Sequence[str], **choices: Sequence[str]) -> list[Way]:
    """The original's ways, of which that in fp32, the base of all ratios, comes first; then ftk's in all combinations.

    Args:
        precisions: of both.
        tf32: "off", "on" or both, for fp32.
        choices: values of ftk's further options, by their names in `Way`.
    """
    kinds = [(precision, False) for precision in precisions if precision != "fp32" or "off" in tf32]
    kinds += [("fp32", True)] if "on" in tf32 and "fp32" in precisions else []
    originals = [Way("original", *kind) for kind in dict.fromkeys([("fp32", False), *kinds])]
    combinations = [dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())]
    ways = [Way("ftk", *kind, **options) for kind in kinds for options in combinations]
    return originals + [way for way in ways if way.precision != "fp32" or way.residual == "fp32"]


class Step(Protocol):
    def step(self, batch: Mapping[str, Tensor]) -> Tensor:
        """One update on a CPU batch; returns the mean loss of its target tokens, 0-d on the device."""


def build_step(way: Way, config: GLMConfig, device: torch.device) -> Step:
    """The way, with weights that are a function of `config` and SEED."""
    # Drawing the weights of a large model takes seconds; on a CPU, where memory is measured, they must not stay.
    weights = (initial_weights if device.type == "cpu" else _kept_weights)(config)
    with torch.device("meta"):
        original = OriginalGLM(config)
        ours = GLM(dataclasses.replace(config, attention=way.attention))
    if way.whose == "original":
        original.to_empty(device=device).load_state_dict(to_original(weights, config))
        return TheirStep(original, way, device)
    ours.to_empty(device=device).load_state_dict(weights)
    return OurStep(ours, way, device)


def initial_weights(config: GLMConfig) -> dict[str, Tensor]:
    """The state dict of a new GLM, on the CPU."""
    return dict(GLM(config, seed=SEED).state_dict())


@functools.lru_cache(maxsize=1)
def _weights_of(described: str) -> dict[str, Tensor]:
    return initial_weights(GLMConfig(**json.loads(described)))


def _kept_weights(config: GLMConfig) -> dict[str, Tensor]:
    return _weights_of(json.dumps(dataclasses.asdict(config)))


class TheirStep:
    def __init__(self, model: OriginalGLM, way: Way, device: torch.device) -> None:
        self.device = device
        self.way = OriginalWay(
            model,
            way.precision,
            lr=LEARNING_RATE,
            betas=BETAS,
            eps=EPS,
            weight_decay=WEIGHT_DECAY,
            clip_norm=CLIP_NORM,
        )

    def step(self, batch: Batch) -> Tensor:
        return self.way.step({name: array.to(self.device) for name, array in dense(batch).items()})


class OurStep:
    """The update of ftk's trainer, with the parts that ftk-train would build."""

    def __init__(self, model: GLM, way: Way, device: torch.device) -> None:
        config = train_config(way)
        optimizer = config.optimizer.build(param_groups=parameter_groups(model, WEIGHT_DECAY))
        criterion = config.criterion.build()
        model.train()
        prepare_model(model, config.engine, device)
        step = StepModule(model, criterion)
        runner = SequentialRunner(step, device, way.precision)
        if way.cuda_graphs == "on" and device.type == "cuda":
            runner = RecordedRunner(CudaGraphs(device), step, device, way.precision, weighs=criterion.weighs)
        self.update = Update(config, model, criterion, optimizer, Stopwatch(), runner, World.single(device))
        self.num_updates = 0

    def step(self, batch: Batch) -> Tensor:
        with self.update.gradients(self.num_updates, self.update.count([batch])) as scale:
            sums = self.update.runner.forward_backward([batch], scale)
        self.update.apply(sums, LEARNING_RATE)
        self.num_updates += 1
        loss, count = sums["loss"]
        return loss / count


def dense(batch: Batch) -> dict[str, Tensor]:
    """The original's form of a batch: a target at every place, and loss_mask [B, T] bool where it counts."""
    tokens = batch.inputs["tokens"]
    flat = tokens.new_zeros(tokens.numel())
    return {
        **batch.inputs,
        "targets": flat.index_copy(0, batch.places, batch.targets).view_as(tokens),
        "loss_mask": flat.index_fill(0, batch.places, 1).view_as(tokens).bool(),
    }


def train_config(way: Way) -> TrainConfig:
    """The configuration of a run that trains in this way."""
    return build(
        TrainConfig,
        {
            "dataset": {"data": "none"},
            "model": {"arch": "glm_tiny"},
            "optimizer": {
                "_name": "adamw",
                "lr": LEARNING_RATE,
                "betas": list(BETAS),
                "eps": EPS,
                "weight_decay": WEIGHT_DECAY,
            },
            "criterion": {
                "_name": "cross_entropy",
                "loss_form": way.loss_form,
                # Whoever checkpoints all activations is short of memory.
                "loss_chunk_tokens": 64 if way.checkpointing == "full" else None,
            },
            "training": {"precision": way.precision, "clip_norm": CLIP_NORM, "max_update": 1},
            "engine": {
                "activation_checkpointing": way.checkpointing,
                "compile": way.compile,
                "tf32": way.tf32,
                "residual_precision": way.residual,
            },
        },
    )


# -- batches --------------------------------------------------------------------------------------------------------


class NumberTokenizer:
    """Command tokens and nothing else: documents are numbers already."""

    name = "numbers"
    special = SpecialTokens(pad=0, eos=1, cls=2, mask=3, sop=4, eop=5)

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def decode(self, ids: Sequence[int]) -> str:
        return ""


def make_batches(config: GLMConfig, batch_size: int, num_tokens: int, count: int) -> list[Batch]:
    """Batches [batch_size, num_tokens] as `GLMBlankDataset` and `Collater` make them, on the CPU.

    The documents are numbers, as frequent as words are (Zipf). The objective is the token objective with the
    published options; texts are so long that a sample has num_tokens places on average, and the batches are cut or
    padded to that.

    Args:
        config: its vocab_size bounds the numbers, its max_positions must hold num_tokens.
        batch_size, num_tokens, count: how large, how long, how many.
    """
    random = np.random.default_rng(SEED)
    tokenizer = NumberTokenizer(config.vocab_size)
    special = len(tokenizer.special.roles)
    frequency = 1.0 / np.arange(1, config.vocab_size - special + 1)
    numbers = random.choice(len(frequency), size=200_000, p=frequency / frequency.sum()) + special
    documents = DocumentList(np.array_split(numbers, 400))
    options = BlankInfillingConfig(seq_length=round(num_tokens / 1.1), bert_prob=1.0, gap_sentence_prob=0.0)
    dataset = GLMBlankDataset(documents, tokenizer, options, SEED)  # type: ignore[arg-type]
    collate = Collater(tokenizer.special, {"objective": OBJECTIVES})
    batches = []
    for first in range(count):
        indices = [(first * batch_size + row) % len(dataset) for row in range(batch_size)]
        samples = [cut(dataset.sample(1, index), num_tokens) for index in indices]
        batches.append(collate(samples))
    return batches


def cut(sample: dict[str, np.ndarray], num_tokens: int) -> dict[str, np.ndarray]:
    """The sample cut or padded to an exact length."""
    missing = max(0, num_tokens - len(sample["tokens"]))
    fitted = {}
    for name, array in sample.items():
        if array.ndim:
            array = np.pad(array[..., :num_tokens], [(0, 0)] * (array.ndim - 1) + [(0, missing)])
        fitted[name] = array
    return fitted


def model_config(shape: Mapping[str, int], num_tokens: int, dropout: float) -> GLMConfig:
    """The model of a size: all three dropouts at one probability, 512 positions or as many as samples need."""
    return GLMConfig(
        **shape,
        max_positions=max(512, num_tokens),
        embedding_dropout=dropout,
        attention_dropout=dropout,
        dropout=dropout,
    )
