"""Converts checkpoints of other programs to ftk's and back; forms and model families register their own part.

Tensors are converted one at a time, if the reader and writer of the other form allow it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftk.checkpoint import layout
from ftk.checkpoint.adam import checkpoint_part, read_checkpoint_part
from ftk.checkpoint.adapter import model_in, refuse_adapted
from ftk.checkpoint.checking import check_files
from ftk.checkpoint.head import head_in, refuse_head
from ftk.checkpoint.load import lazy_model_tensors, read_config, read_trainer_state
from ftk.checkpoint.quantize import refuse_quantized
from ftk.checkpoint.save import refuse_to_replace, write_snapshot
from ftk.checkpoint.snapshot import TensorPart, take_snapshot
from ftk.checkpoint.weights import check_tensors, finite, sections
from ftk.config.build import as_mapping
from ftk.errors import UserError
from ftk.files import put_in_place, sync_tree, temporary_folder
from ftk.models.conversion import Contents, FileFormat, WrittenFormat
from ftk.registry import MODELS, TASKS

if TYPE_CHECKING:
    from ftk.tokenizers.base import Tokenizer

logger = logging.getLogger(__name__)


def convert_from(
    form: FileFormat,
    source: str | Path,
    output: str | Path,
    *,
    tokenizer: Tokenizer | None = None,
    overwrite: bool = False,
) -> Path:
    """Write an ftk checkpoint with the weights of another one, in the dtype they are stored in.

    Args:
        form: of `source`.
        tokenizer: saved with it, with the special tokens of the model's task; without one that which lies in `source`,
            where ftk reads its form. A checkpoint without any cannot read text.

    Returns:
        `output`.

    Raises:
        UserError: `source` does not have this form, is damaged, or does not fit its configuration; nothing is written.
    """
    output = Path(output)
    refuse_to_replace(output, overwrite=overwrite)
    if layout.is_checkpoint(Path(source)) or layout.numbered_checkpoints(Path(source)):
        raise UserError(f"{source}: is ftk's own; `to` NAME writes it in another form, without `from`")
    contents = form.read(Path(source))
    source = contents.place or Path(source)
    check_tensors(contents, source)
    task = contents.task.get("_name") or MODELS.get(contents.model).task
    if tokenizer is not None:
        if task is not None:
            task_class: Any = TASKS.get(task).target
            tokenizer = task_class.add_special_tokens(tokenizer)
        _check_vocabulary(tokenizer, contents.config, source)
    elif contents.own_tokenizer is not None:
        tokenizer = contents.own_tokenizer()
    state = {"num_updates": contents.num_updates, "converted_from": str(source)}
    return write_contents(output, dataclasses.replace(contents, place=source), tokenizer, state, overwrite=overwrite)


def write_contents(
    output: Path,
    contents: Contents,
    tokenizer: Tokenizer | None,
    trainer_state: dict[str, Any],
    *,
    config: dict[str, Any] | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a checkpoint; tensors are read one at a time.

    Args:
        contents: its weights, options, moments and small files.
        trainer_state: where it comes from.
        config: further sections of its config.yaml; those that say what the model is are of `contents`.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    with temporary_folder(output.with_name(f"{output.name}.tokenizer")) as extra:
        folders = {}
        if tokenizer is not None:
            folders[layout.TOKENIZER] = extra / layout.TOKENIZER
            tokenizer.save(folders[layout.TOKENIZER])
        if contents.source_files:
            folders[layout.SOURCE] = extra / layout.SOURCE
            folders[layout.SOURCE].mkdir()
            for name, content in contents.source_files.items():
                (folders[layout.SOURCE] / name).write_bytes(content)
        snapshot = take_snapshot(model={}, trainer_state=trainer_state, config=(config or {}) | sections(contents))
        tensors = finite(contents.tensors, contents.place or output)
        parts = {layout.MODEL: TensorPart(tensors.described, {"aliases": {}}, tensors.read)}
        if contents.adam is not None:
            parts[layout.OPTIMIZER] = checkpoint_part(contents.adam)
        snapshot = dataclasses.replace(snapshot, parts=parts, folders=folders)
        return write_snapshot(output, snapshot, overwrite=overwrite)


def convert_to(
    form: WrittenFormat,
    name: str,
    source: str | Path,
    output: str | Path,
    *,
    ema: bool = False,
    overwrite: bool = False,
) -> Path:
    """Write a checkpoint's weights, and the moments of its Adam, in another form.

    Args:
        form: of `output`.
        source: an ftk checkpoint, or a run's folder.
        ema: write the moving average of the weights as the weights.

    Returns:
        `output`, or the subfolder of it that is a checkpoint in this form.

    Raises:
        UserError: the model has no such form, or its weights are not finite; nothing is written.
        BrokenCheckpoint: the checkpoint is not whole.
    """
    source, output = layout.resolve_checkpoint(source), Path(output)
    refuse_to_overwrite(form, name, output, overwrite=overwrite)
    refuse_quantized(source, f"`to` {name}")
    refuse_adapted(source, f"`to` {name}")
    if not getattr(form, "writes_heads", False):
        refuse_head(source, f"`to` {name}")
    contents = read_checkpoint(source, ema)
    check_tensors(contents, source)
    output.parent.mkdir(parents=True, exist_ok=True)
    with temporary_folder(output) as temporary, _errors_naming(output, temporary):
        written = form.write(temporary, contents)
        sync_tree(temporary)
        put_in_place(temporary, output)
    return output / written


def refuse_to_overwrite(form: WrittenFormat, name: str, output: Path, *, overwrite: bool) -> None:
    """Raise UserError if `convert_to` must not write there."""
    if output.exists():
        if not overwrite:
            raise UserError(f"{output}: exists; replace it with `overwrite` or choose another name")
        if not output.is_dir() or (any(output.iterdir()) and not form.recognises(output)):
            raise UserError(f"{output}: exists and is no checkpoint as `to` {name} writes it; it is not replaced")


def read_checkpoint(folder: Path, ema: bool) -> Contents:
    """The contents of an ftk checkpoint; its tensors are read later."""
    tree, state = read_config(folder), read_trainer_state(folder)
    name, config = model_in(tree)
    for part in (layout.SOURCE, layout.TOKENIZER):
        check_files(folder, prefix=f"{part}/")
    source_files, tokenizer = folder / layout.SOURCE, folder / layout.TOKENIZER
    return Contents(
        model=name,
        config=config,
        tensors=lazy_model_tensors(folder, ema=ema),
        task=tree.get("task") or {},
        arch=as_mapping("model", tree.get("model")).get("arch"),
        num_updates=int(state.get("num_updates") or 0),
        place=folder,
        adam=None if ema else read_checkpoint_part(folder),  # the moments belong to the trained weights
        source_files={path.name: path.read_bytes() for path in sorted(source_files.glob("*")) if path.is_file()},
        tokenizer=tokenizer if tokenizer.is_dir() else None,
        head=head_in(tree),
    )


def _check_vocabulary(tokenizer: Tokenizer, config: Any, source: Path) -> None:
    if tokenizer.vocab_size > config.vocab_size:
        raise UserError(
            f"{source}: the model has {config.vocab_size} tokens, the tokenizer {tokenizer.vocab_size};"
            " this is not the tokenizer it was trained with"
        )
    if tokenizer.padded_vocab_size() != config.vocab_size:
        logger.warning(
            "%s: the model has %d tokens, the tokenizer %d when padded; is it the one it was trained with?",
            source, config.vocab_size, tokenizer.padded_vocab_size(),
        )  # fmt: skip


@contextlib.contextmanager
def _errors_naming(output: Path, temporary: Path) -> Any:
    """Let errors name the final files, not the temporary ones."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            error.filename = str(error.filename).replace(str(temporary), str(output), 1)
        raise
