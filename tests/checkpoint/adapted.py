"""Small models, and checkpoints of them with an adapter that has learned something."""

from __future__ import annotations

from dataclasses import asdict

import torch

from ftk.checkpoint import save_checkpoint
from ftk.checkpoint.adapter import adapter_files_of
from ftk.models import build_model
from ftk.modules.adapters.adapt import adapt, is_part
from ftk.name_patterns import matches
from ftk.registry import ADAPTERS

KINDS = {
    "biases": {"train_also": ["*.bias"], "adapter_targets": ["*.qkv"]},
    "ia3": {"kind": "ia3"},
    "prefix": {"kind": "prefix", "num_virtual_tokens": 3},
    "prefix of peft": {"kind": "prefix", "num_virtual_tokens": 3, "prefix_positions": True, "prefix_hidden_size": 5},
    "prefix of a layer": {"kind": "prefix", "adapter_targets": ["layers.1"]},
}
"""Options of `adapted_checkpoint`, by what the adapter is."""


def small_model(arch="gpt2", **shape):
    torch.manual_seed(1)
    return build_model(f"{arch}_tiny", vocab_size=96, num_layers=2, hidden_size=32, max_positions=32, **shape).eval()


def logits(model):
    tokens = torch.arange(40).reshape(2, 20)
    with torch.no_grad():
        return model(tokens, **({"decoder_tokens": tokens} if "decoder_tokens" in model.INPUTS else {}))


def adapted_checkpoint(place, kind="lora", arch="gpt2", shape=None, base=None, **options):
    """A checkpoint of the base with an adapter that has learned something, and its model."""
    model = small_model(arch, **(shape or {}))
    config = {"model": {"_name": arch, **asdict(model.config)}, "adapter": {"_name": kind, **options}}
    if base is not None:
        config["checkpoint"] = {"finetune_from": str(base)}
    entry = ADAPTERS.get(kind)
    adapter = entry.target(entry.config(**options))
    adapt(model, adapter, seed=1)
    for name, parameter in model.named_parameters():
        if is_part(name, adapter.PARTS) or any(matches(name, one) for one in adapter.config.train_also):
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
    files = adapter_files_of(config)
    return save_checkpoint(place, model=model, trainer_state={}, config=config, adapter_files=files), model
