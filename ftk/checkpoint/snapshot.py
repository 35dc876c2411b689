"""The contents of a checkpoint, copied from a running training at one moment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ftk.checkpoint import layout
from ftk.checkpoint.encoding import encode
from ftk.checkpoint.manifest import json_bytes
from ftk.checkpoint.naming import merged_groups, model_tensors, optimizer_state
from ftk.errors import naming_place
from ftk.model_parallel.shards import fused_of, is_distributed, with_fused
from ftk.model_parallel.world import World
from ftk.parsing import dump_yaml
from ftk.registry import named

if TYPE_CHECKING:
    from ftk.checkpoint.adapter import AdapterFiles

ExtraTensors = Mapping[str, Mapping[str, torch.Tensor]]

_TAKEN = (layout.MODEL, layout.OPTIMIZER, layout.TOKENIZER, layout.SOURCE, layout.ADAPTER)


@dataclass(frozen=True)
class TensorPart:
    """The tensors of one folder of a checkpoint, with the other entries of its index.

    If `read` is given, it returns each tensor when it is written, and those in `tensors` are on the meta device.
    """

    tensors: Mapping[str, torch.Tensor]
    extra: Mapping[str, Any]
    read: Callable[[str], torch.Tensor] | None = None


@dataclass(frozen=True)
class Snapshot:
    """The contents of a checkpoint, ready to be written; see `write_snapshot`."""

    config: bytes
    trainer_state: bytes
    folders: Mapping[str, Path]  # name in the checkpoint -> folder whose files are copied: the tokenizer
    parts: Mapping[str, TensorPart]  # name of a folder -> its tensors
    adapter_files: AdapterFiles | None = None  # makes those of `adapter/` from the tensors that are written

    @property
    def num_bytes(self) -> int:
        """Size of all tensors, nearly the size on disk."""
        return sum(t.numel() * t.element_size() for part in self.parts.values() for t in part.tensors.values())


class Buffers:
    """CPU memory for one snapshot, reused by the next one: a snapshot costs a copy and no allocation.

    Memory for tensors on a GPU is page-locked, which makes copies fast. Of a sharded tensor this rank's shard is
    copied.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, str], torch.Tensor] = {}

    def copy(self, parts: Mapping[str, TensorPart]) -> dict[str, TensorPart]:
        """Copies of all tensors; complete on return, so that the originals may change."""
        used: dict[tuple[str, str], torch.Tensor] = {}
        copies = {
            part: TensorPart(
                {name: self._copy_one((part, name), tensor, used) for name, tensor in content.tensors.items()},
                content.extra,
            )
            for part, content in parts.items()
        }
        self._buffers = used  # frees the memory of tensors that no longer exist
        devices = {t.device for content in parts.values() for t in content.tensors.values() if t.device.type == "cuda"}
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        return copies

    def _copy_one(self, key: tuple[str, str], tensor: Any, used: dict[tuple[str, str], torch.Tensor]) -> torch.Tensor:
        if is_distributed(tensor):
            from torch.distributed.tensor import DTensor

            shard = self._copy_one(key, tensor.to_local().detach(), used)
            # `from_local` would move the copy back to the mesh's device, the GPU; the constructor does not.
            return with_fused(DTensor(shard, tensor._spec, requires_grad=False), fused_of(tensor))
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            on_gpu = tensor.device.type == "cuda"
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=on_gpu)
        used[key] = buffer
        return buffer.copy_(tensor.detach(), non_blocking=True)


def described_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors of an optimizer's state by name, and the rest as JSON values.

    Raises:
        UserError: it keeps a value that cannot be saved; names its class.
    """
    tensors, scalars, groups = optimizer_state(model, optimizer)
    with naming_place(named(optimizer), TypeError):
        return tensors, {"scalars": encode(scalars), "param_groups": encode(groups)}


def take_snapshot(
    *,
    model: nn.Module | Mapping[str, torch.Tensor],
    optimizer: torch.optim.Optimizer | None = None,
    trainer_state: Mapping[str, Any],
    config: Mapping[str, Any],
    tokenizer_folder: str | Path | None = None,
    extra_tensors: ExtraTensors | None = None,
    buffers: Buffers | None = None,
    adapter_files: AdapterFiles | None = None,
    world: World | None = None,
) -> Snapshot:
    """Collect the contents of a checkpoint.

    Args:
        model: the module, or its state dict.
        optimizer: of this module; None: no `optimizer/` in the checkpoint.
        trainer_state: JSON values, and tensors, tuples, NaN (`ftk.checkpoint.encoding`).
        config: the resolved configuration as plain dicts, lists, numbers and strings.
        tokenizer_folder: copied to `tokenizer/`; None: the checkpoint has none and cannot read text.
        extra_tensors: further tensors by name, each set in a folder of its name: `{"ema": {...}}`.
        buffers: memory to which tensors are copied; None: they are not copied, and must not change until written.
        adapter_files: of a model with an adapter.
        world: ranks that each call this with their part of the model; None: this process alone.

    Raises:
        TypeError: a value that cannot be saved.
        ValueError: a name in `extra_tensors` that cannot name a folder.
    """
    world = world or World.single()
    tensors, aliases = model_tensors(model)
    for theirs in world.gather_json(aliases):
        aliases |= theirs
    parts = {layout.MODEL: TensorPart(tensors, {"aliases": aliases})}
    if optimizer is not None:
        if not isinstance(model, nn.Module):
            raise TypeError("an optimizer is saved with the module it belongs to")
        tensors, described = described_optimizer(model, optimizer)
        if world.size > 1:  # each stage of a pipeline has its own parameters only
            gathered = world.gather_json(described)
            described["scalars"] = {name: value for part in gathered for name, value in part["scalars"].items()}
            described["param_groups"] = merged_groups([part["param_groups"] for part in gathered])
        parts[layout.OPTIMIZER] = TensorPart(tensors, described)
    for name, extra in (extra_tensors or {}).items():
        if not name.isidentifier() or name in _TAKEN:
            raise ValueError(f"extra tensors {name!r}: expected a plain name, and none of {', '.join(_TAKEN)}")
        tensors = {key: with_fused(tensor.detach(), fused_of(tensor)) for key, tensor in extra.items()}
        parts[name] = TensorPart(tensors, {})
    return Snapshot(
        config=dump_yaml(dict(config)).encode(),
        trainer_state=json_bytes(encode(dict(trainer_state))),
        folders={layout.TOKENIZER: Path(tokenizer_folder)} if tokenizer_folder is not None else {},
        parts=parts if buffers is None else buffers.copy(parts),
        adapter_files=adapter_files,
    )
