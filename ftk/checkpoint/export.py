"""Models for use without ftk: a single safetensors file, a torch.export program, an AOTInductor package, ONNX."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import json
import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from ftk.checkpoint import layout
from ftk.checkpoint.adapter import refuse_adapted
from ftk.checkpoint.index import read_index, safetensors_pieces
from ftk.checkpoint.load import lazy_model_tensors
from ftk.checkpoint.manifest import write_file
from ftk.checkpoint.naming import model_tensors
from ftk.errors import UserError
from ftk.files import naming, new_file_for_torch, sync_folder, sync_tree, temporary_folder
from ftk.models.renames import LazyTensors
from ftk.registry import is_plugin, named

OUTPUT = "logits"

_OF_PACKED_ROWS = ("document_ids", "num_documents")
"""Inputs without use in an export: in training several texts may share a row, in an export a row is one text."""

_ONNX_MAX_BYTES = 1_900_000_000  # of weights in one file: a protobuf ends at 2 GiB
_ONNX_PACKAGES = ("onnx", "onnxscript")
_NOISY = ("torch.onnx", "onnxscript", "onnx_ir", "torch._inductor", "torch._dynamo")


class Step(nn.Module):
    """The exported module: the whole forward pass, int64 inputs -> [B, T, V], with arguments in the order of `inputs`.

    Args:
        model: a `ftk.models.base.Backbone`, or a model whose only input is `tokens`.

    Attributes:
        inputs: names and axes, as the model's `INPUTS`.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        declared: Mapping[str, str] = getattr(model, "INPUTS", {"tokens": "B T"})
        self.inputs = {name: axes for name, axes in declared.items() if name not in _OF_PACKED_ROWS}

        def forward(*given: Tensor) -> Tensor:
            return model(**dict(zip(self.inputs, given, strict=True)))

        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        # The arguments of an exported program are named by this signature.
        forward.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in self.inputs])  # type: ignore[attr-defined]
        self.forward = forward


def write_safetensors(
    output: str | Path, tensors: Mapping[str, Tensor], *, metadata: Mapping[str, str] | None = None, overwrite: bool
) -> Path:
    """Write tensors in memory as one safetensors file; for a checkpoint, see `stream_safetensors`.

    Args:
        tensors: by name; tied ones are written once, with their other names in `aliases` of the metadata.
        metadata: stored in the file's header.
    """
    once, aliases = model_tensors(tensors)
    return _write_safetensors(output, LazyTensors.of(once), aliases, metadata, overwrite)


def stream_safetensors(
    source: str | Path,
    output: str | Path,
    *,
    ema: bool = False,
    metadata: Mapping[str, str] | None = None,
    overwrite: bool = False,
) -> Path:
    """Write the weights of a checkpoint as one safetensors file, with one tensor in memory at a time.

    Args:
        source: a checkpoint, or a run's folder.
        ema: use the moving average of a tensor, if it has one.
        metadata: stored in the file's header.

    Raises:
        UserError: `output` exists, there is no moving average, or weights are not finite.
        BrokenCheckpoint: the checkpoint is not whole.
    """
    folder = layout.resolve_checkpoint(source)
    refuse_adapted(folder, "`format` safetensors")
    tensors = lazy_model_tensors(folder, ema=ema)
    return _write_safetensors(output, tensors, read_index(folder / layout.MODEL).aliases, metadata, overwrite)


def export_program(model: nn.Module, output: str | Path, *, overwrite: bool = False) -> Path:
    """Write the step as a torch.export program, for `torch.export.load`; batch size and length are dynamic.

    Args:
        model: in evaluation mode, on the CPU; its attention is switched to torch's fused kernels.
        output: the file, *.pt2.

    Raises:
        UserError: `output` exists or has another ending.
    """
    with _new_file(output, overwrite, ".pt2") as temporary, new_file_for_torch(temporary) as file:
        torch.export.save(_program(model), file)
    return Path(output)


def export_aoti(model: nn.Module, output: str | Path, *, overwrite: bool = False) -> Path:
    """Write the step compiled to machine code for this processor type, for `aoti_load_package`.

    Args and raises: as `export_program`; needs a C++ compiler.
    """
    with _new_file(output, overwrite, ".pt2") as temporary, new_file_for_torch(temporary) as file, _quiet():
        torch._inductor.aoti_compile_and_package(_program(model), package_path=file)
    return Path(output)


def export_onnx(model: nn.Module, output: str | Path, *, overwrite: bool = False) -> Path:
    """Write the step as ONNX; weights of more than 1.9 GB go into OUTPUT.data next to it.

    Args and raises: as `export_program`, *.onnx; needs `pip install 'ftk[export]'`.
    """
    missing = [name for name in _ONNX_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"`format` onnx needs {' and '.join(missing)}: pip install 'ftk[export]'")
    program = _program(model)
    size = sum(tensor.numel() * tensor.element_size() for tensor in program.state_dict.values())
    external = size > _ONNX_MAX_BYTES
    with _new_file(output, overwrite, ".onnx") as temporary, _quiet():
        names = list(program.graph_signature.user_inputs)
        written = torch.onnx.export(
            program, dynamo=True, input_names=names, output_names=[OUTPUT], verbose=False, optimize=True
        )
        assert written is not None
        written.save(str(temporary), external_data=external)
    return Path(output)


def _program(model: nn.Module) -> torch.export.ExportedProgram:
    config = getattr(model, "config", None)
    if dataclasses.is_dataclass(config) and not isinstance(config, type) and hasattr(config, "attention"):
        model.config = dataclasses.replace(config, attention="sdpa")  # type: ignore[assignment,type-var]
    step = Step(model).eval()
    # Lengths may exceed max_positions where positions are given: those of answers behind a context repeat.
    # Encoder-decoders have a `position_limit`, which is None where positions are no rows of a table.
    limit = getattr(config, "position_limit", getattr(config, "max_positions", None))
    most = None if "position_ids" in step.inputs else limit
    sizes = {
        "B": (2, torch.export.Dim("batch", min=1)),
        "T": (8, torch.export.Dim("length", min=1, max=most)),
        "S": (6, torch.export.Dim("source_length", min=1, max=most)),
    }
    example, shapes = [], []
    for axes in map(str.split, step.inputs.values()):
        example.append(
            torch.zeros([sizes[axis][0] if axis in sizes else int(axis) for axis in axes], dtype=torch.int64)
        )
        shapes.append({place: sizes[axis][1] for place, axis in enumerate(axes) if axis in sizes})
    try:
        with torch.no_grad(), _quiet():
            return torch.export.export(step, tuple(example), dynamic_shapes=tuple(shapes))
    except Exception as error:
        if not is_plugin(model):
            raise
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"torch.export cannot export {named(model)}: {why}\n"
            f"its forward must take any batch size and length; `format` safetensors writes its weights alone"
        ) from error


def _write_safetensors(
    output: str | Path,
    tensors: LazyTensors,
    aliases: Mapping[str, str],
    metadata: Mapping[str, str] | None,
    overwrite: bool,
) -> Path:
    described = {"format": "pt", **(metadata or {})}
    if aliases:
        described["aliases"] = json.dumps(dict(aliases))
    with _new_file(output, overwrite, ".safetensors") as temporary:
        write_file(temporary, safetensors_pieces(tensors, described))
    return Path(output)


@contextmanager
def _new_file(output: str | Path, overwrite: bool, ending: str) -> Iterator[Path]:
    """A temporary path that is renamed to `output` when the block ends; files written next to it are moved too."""
    output = Path(output)
    refuse_file(output, overwrite, ending)
    output.parent.mkdir(parents=True, exist_ok=True)
    # In a temporary folder, with the final name: an ONNX file contains the name of its file of weights.
    with naming(output), temporary_folder(output) as folder:
        temporary = folder / output.name
        yield temporary
        sync_tree(folder)
        for written in sorted(folder.iterdir(), key=lambda path: path == temporary):  # the files that it names go first
            os.replace(written, output.with_name(written.name))
    sync_folder(output.parent)


def refuse_file(output: str | Path, overwrite: bool, ending: str) -> None:
    """Raise a UserError if a file must not be written to `output`."""
    output = Path(output)
    if output.suffix != ending:
        raise UserError(f"{output}: must be a file whose name ends in {ending}")
    if output.is_dir():
        raise UserError(f"{output}: is a folder; it is not replaced")
    if output.exists() and not overwrite:
        raise UserError(f"{output}: exists; replace it with `overwrite` or choose another name")


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence warnings and logs of the exporters, but not their errors."""
    loggers = [logging.getLogger(name) for name in _NOISY]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
