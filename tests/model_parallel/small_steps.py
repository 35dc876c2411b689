"""Updates of a small GLM with an uneven vocabulary, on one process or as a process's part of several."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from ftk.batch import Batch
from ftk.criterions.cross_entropy import CrossEntropy, CrossEntropyConfig
from ftk.model_parallel.config import EngineConfig, ParallelConfig
from ftk.model_parallel.gradients import gradient_sync
from ftk.model_parallel.parallelize import parallelize_training
from ftk.model_parallel.step_module import StepModule
from ftk.model_parallel.world import World
from ftk.models.glm import GLMConfig
from ftk.models.glm.model import GLM
from tests.dense import batch_of

VOCAB = 131  # no multiple of any number of processes
PLACES = 24
MICRO_BATCHES = 8  # of the first update, over all processes; later ones have half as many
SEED = 3
CLIP_NORM = 0.5  # below every norm of these updates


def small_config(**changes: Any) -> GLMConfig:
    """Two layers and no dropout."""
    shape = {"vocab_size": VOCAB, "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "max_positions": 32}
    no_dropout = dict.fromkeys(("embedding_dropout", "attention_dropout", "dropout"), 0.0)
    return GLMConfig(**{**shape, **no_dropout, **changes})


def small_glm(**changes: Any) -> GLM:
    """31,776 parameters, on torch's present default device."""
    return GLM(small_config(**changes), SEED)


def small_gpt2(dropout: float = 0.0, seed: int = 0) -> nn.Module:
    """Hugging Face's, of two layers."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(seed)
    shape = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "use_cache": False}
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, **dropouts))


def micro_batches(update: int) -> list[Batch]:
    """All of an update's, with loss at 1 to 17 of the 24 places of each sample."""
    generator = torch.Generator().manual_seed(1000 + update)

    def numbers(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=generator)

    made = []
    for _ in range(MICRO_BATCHES if update == 0 else MICRO_BATCHES // 2):
        context = 7 + numbers(16, 2)
        places = torch.arange(PLACES)
        made.append(
            batch_of(
                {
                    "tokens": numbers(VOCAB, 2, PLACES),
                    "targets": numbers(VOCAB, 2, PLACES),
                    "loss_mask": places >= context[:, None],
                    "position_ids": torch.stack((places, places // 3)).expand(2, -1, -1).contiguous(),
                    "context_length": context,
                }
            )
        )
    return made


def train(
    world: World,
    parallel: ParallelConfig,
    *,
    num_updates: int = 10,
    engine: EngineConfig | None = None,
    precision: str = "fp32",
    on_meta: bool = False,
    clip_norm: float = CLIP_NORM,
    counter: TorchDispatchMode | None = None,
    plan: Any = None,
    loss_form: str = "auto",
) -> tuple[list[float], dict[str, Tensor], StepModule]:
    """Losses of some updates with AdamW, whole gradients of the first one by name, and the trained module.

    Args:
        counter: is on during the forward and backward passes of the first update.
    """
    with torch.device("meta" if on_meta else "cpu"):
        model = small_glm()
    module = StepModule(model, CrossEntropy(CrossEntropyConfig(loss_form=loss_form, loss_chunk_tokens=5)))
    called = parallelize_training(
        module, world, parallel, engine or EngineConfig(), precision=precision, plan=plan, seed=SEED
    ).module
    parameters = list(model.parameters())
    # An eps as large as that keeps gradients that are zero but for rounding (of key biases) from full steps.
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, eps=1e-6, weight_decay=0.1)
    losses, first = [], {}
    for update in range(num_updates):
        batches = micro_batches(update)
        num_targets = sum(len(batch.targets) for batch in batches)
        own = batches[world.data_rank :: world.sizes.data]
        total = torch.zeros(())
        optimizer.zero_grad()
        if counter is not None and update == 0:
            counter.__enter__()
        for place, batch in enumerate(own, start=1):
            with gradient_sync(called, enabled=place == len(own)):
                with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                    loss = called(batch).loss
                (loss / num_targets).backward()
            total += loss.detach()
        if counter is not None and update == 0:
            counter.__exit__(None, None, None)
        losses.append(world.sum_host([total.item() * world.counts_loss])[0] / num_targets)
        if update == 0:
            first = {name: whole(parameter.grad) for name, parameter in model.named_parameters()}
        if clip_norm:
            norm = whole(nn.utils.get_total_norm([parameter.grad for parameter in parameters]))
            nn.utils.clip_grads_with_norm_(parameters, clip_norm, norm)
        optimizer.step()
    return losses, first, module


def whole(tensor: Any) -> Tensor:
    """A copy of a tensor that may be shared out."""
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    if isinstance(tensor, AsyncCollectiveTensor):
        tensor = tensor.wait()
    return tensor.detach().clone()


def write_reference(folder: Path) -> dict[str, list[float]]:
    """What one process computes: the gradients of the first update go into a file, losses are returned."""
    world, config = World.single(), ParallelConfig()
    losses, gradients, _ = train(world, config)
    torch.save(gradients, folder / "gradients.pt")
    return {"fp32": losses, "bf16": train(world, config, precision="bf16")[0]}


def largest_difference(gradients: dict[str, Tensor], folder: str) -> float:
    """From the gradients of one process, see `relative_difference`."""
    return relative_difference(gradients, torch.load(Path(folder) / "gradients.pt", weights_only=True))


def relative_difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest difference of any number, relative to the largest number of its own tensor.

    A tensor that is zero but for rounding (the gradient of key biases) is held against a thousandth of the largest of
    all.
    """
    assert found.keys() == expected.keys()
    sizes = {name: value.abs().max().item() for name, value in expected.items()}
    least = 1e-3 * max(sizes.values())
    return max((found[name] - value).abs().max().item() / max(sizes[name], least) for name, value in expected.items())


if __name__ == "__main__":
    began = time.perf_counter()
    print(train(World.single(), ParallelConfig())[0], time.perf_counter() - began)
