"""A checkpoint made of another one, with more tokens or more positions; answers that need neither stay the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ftk.checkpoint import layout
from ftk.checkpoint.adapter import refuse_adapted
from ftk.checkpoint.convert import read_checkpoint, write_contents
from ftk.checkpoint.load import check_ema, read_config
from ftk.checkpoint.quantize import refuse_quantized
from ftk.checkpoint.save import refuse_to_replace
from ftk.checkpoint.weights import check_tensors, foreign_contents, has_tokenizer, tokenizer_of
from ftk.config.build import build_options
from ftk.errors import UserError, counted
from ftk.files import temporary_folder
from ftk.models.conversion import Contents
from ftk.models.renames import LazyTensors
from ftk.registry import MODELS
from ftk.tokenizers import Tokenizer
from ftk.tokenizers.grow import Growth, grow_tokenizer

_DIVISOR = "make_vocab_size_divisible_by"
_KEPT_FILES = ("generation_config.json",)  # of another program's folder; the others tell the old sizes
_MEASURED_BY_POSITIONS = ("llama3", "yarn")  # rotary scalings whose `rope_original_positions` is max_positions if None


class Grown(NamedTuple):
    """What `grow_checkpoint` did.

    Attributes:
        output: the new checkpoint.
        tokens: the new tokens, and those that were known; None: none were asked for.
        tokenizer: the one of the checkpoint, by its registered name; None: it has none.
        rows: of the vocabulary, before and after.
        positions: before and after.
        tables: the tables of positions that grew, "repeat" or "interpolate"; none with rotary or computed positions.
    """

    output: Path
    tokens: Growth | None
    tokenizer: str | None
    rows: tuple[int, int]
    positions: tuple[int, int]
    tables: dict[str, str]


def grow_checkpoint(
    source: str | Path,
    output: str | Path,
    *,
    tokens: Sequence[str] = (),
    new_rows: str = "pieces",
    divisor: int | None = None,
    max_positions: int | None = None,
    new_positions: str = "repeat",
    ema: bool = False,
    overwrite: bool = False,
) -> Grown:
    """Write a checkpoint with weights, configuration and tokenizer of another one, grown.

    Args:
        source: a checkpoint, a run's folder, or another program's folder that is opened as it is.
        tokens: to add to the vocabulary. The model's rows of them are means, of every matrix and bias that has a row
            for each token; rows of padding are used up first.
        new_rows: pieces: the mean of the rows of the tokens that spelt the new one before; mean: of all tokens' rows.
        divisor: where rows are added, their number is a multiple of this; None: as in the model's task.
        max_positions: longer texts; None: as they are.
        new_positions: repeat: tables of positions go on with a copy of their rows (Beltagy et al. 2020); interpolate:
            they are stretched, so that old positions change as well. Positions within an answer are always
            repeated, and their row 0, of tokens in no answer, stays as it is.
        ema: the moving average of the weights becomes the weights.

    Raises:
        UserError: there is nothing to grow, or the model cannot grow so; no file is written.
    """
    output = Path(output)
    refuse_to_replace(output, overwrite=overwrite)
    folder = layout.resolve_model(source)
    is_ftks = layout.is_checkpoint(folder)
    if is_ftks:
        refuse_quantized(folder, "growing")
        refuse_adapted(folder, "growing")
    elif ema:
        check_ema(folder)
    contents = read_checkpoint(folder, ema) if is_ftks else foreign_contents(folder)
    tokenizer = tokenizer_of(folder) if has_tokenizer(folder) else None
    check_tensors(contents, folder)
    if not tokens and max_positions is None:
        raise UserError("nothing to grow: give tokens to add, or `max_positions`")
    if tokens and tokenizer is None:
        raise UserError(f"{folder}: has no tokenizer that could learn tokens")
    output.parent.mkdir(parents=True, exist_ok=True)
    with temporary_folder(output.with_name(f"{output.name}.grown")) as scratch:
        growth = None
        grown, before = contents, contents.config
        if tokens and tokenizer is not None:
            growth = grow_tokenizer(tokenizer, tokens, scratch)
            if not growth.new:
                raise UserError(f"{folder}: has {counted(len(tokens), 'such token')} already, and learns no other")
            grown = _with_rows(grown, tokenizer, growth, new_rows, divisor, folder)
        tables: dict[str, str] = {}
        if max_positions is not None:
            grown, tables = _with_positions(grown, max_positions, new_positions, folder)
        kept = {name: content for name, content in contents.source_files.items() if name in _KEPT_FILES}
        grown = dataclasses.replace(grown, source_files=kept, adam=None)
        final = tokenizer if growth is None else growth.tokenizer
        state = {"num_updates": contents.num_updates, "grown_from": str(folder)}
        if final is not None:
            state["tokenizer"] = final.fingerprint  # data of another one is refused
        config = read_config(folder) if is_ftks else None
        write_contents(output, grown, final, state, config=config, overwrite=overwrite)
    return Grown(
        output,
        growth,
        None if final is None else final.name,
        tuple(getattr(config, "vocab_size", 0) for config in (before, grown.config)),  # type: ignore[arg-type]
        tuple(getattr(config, "max_positions", 0) for config in (before, grown.config)),  # type: ignore[arg-type]
        tables,
    )


def _with_rows(
    contents: Contents, tokenizer: Tokenizer, growth: Growth, new_rows: str, divisor: int | None, folder: Path
) -> Contents:
    """With rows for the tokens of a grown tokenizer."""
    rows, usual = contents.config.vocab_size, contents.task.get(_DIVISOR, 1)
    divisor = divisor or (usual if usual < rows else 1)  # of a padding that no multiple gives, the rows themselves
    needed = growth.tokenizer.padded_vocab_size(divisor)
    after = rows if growth.tokenizer.vocab_size <= rows else needed
    used = min(tokenizer.vocab_size, rows)
    unknown = tokenizer.special.unk
    pieces = {
        id_: [piece for piece in tokenizer.encode(text) if piece != unknown and piece < used]
        if new_rows == "pieces"
        else []
        for text, id_ in growth.new.items()
    }

    def grow(name: str, tensor: Tensor) -> Tensor:
        mean = tensor[:used].float().mean(dim=0)
        fresh = mean.to(tensor.dtype).expand(after - rows, *tensor.shape[1:])
        grown = torch.cat((tensor[:rows], fresh, tensor[rows:]))  # CPM-Ant's prompts stand behind the vocabulary
        for id_, ids in pieces.items():
            grown[id_] = tensor[ids].float().mean(dim=0) if ids else mean
        return grown

    names = _growing(contents, "vocab_size", folder)
    task = dict(contents.task) | ({_DIVISOR: divisor} if _DIVISOR in contents.task and after > rows else {})
    changed = _changed(contents, names, grow, after - rows, vocab_size=after)
    return dataclasses.replace(changed, task=task)


def _with_positions(
    contents: Contents, max_positions: int, new_positions: str, folder: Path
) -> tuple[Contents, dict[str, str]]:
    """With more positions; and the tables that grew, with how."""
    config = contents.config
    before = getattr(config, "max_positions", None)
    if before is None or max_positions <= before:
        raise UserError(f"{folder}: has {before} positions; `max_positions` {max_positions} must be more")
    inner = getattr(config, "INNER_POSITION_TABLES", ())

    def grow(name: str, table: Tensor) -> Tensor:
        first = 1 if name in inner else getattr(config, "first_position_row", 0)
        old, more = table[first : first + before], max_positions - before
        others = table[first + before :]  # a row at the end is no position in a text
        if new_positions == "interpolate" and name not in inner:  # the text grows, the answers need not
            stretched = torch.nn.functional.interpolate(
                old.float().t()[None], len(old) + more, mode="linear", align_corners=True
            )[0].t()
            return torch.cat((table[:first], stretched.to(table.dtype), others))
        copies = old.repeat(-(-more // len(old)), *[1] * (table.dim() - 1))
        return torch.cat((table[:first], old, copies[:more], others))

    names = _growing(contents, "max_positions", folder)
    options = {"max_positions": max_positions}
    if getattr(config, "rope_scaling", "none") in _MEASURED_BY_POSITIONS and config.rope_original_positions is None:
        options["rope_original_positions"] = before
    how = {name: "repeat" if name in inner else new_positions for name in names}
    return _changed(contents, names, grow, max_positions - before, **options), how


def _growing(contents: Contents, option: str, folder: Path) -> list[str]:
    """The tensors that have a row for each of what an option counts.

    Raises:
        UserError: one has a column for each.
    """
    probe = dataclasses.replace(contents.config, **{option: getattr(contents.config, option) + 1})
    now, then = _shapes(contents.model, contents.config), _shapes(contents.model, probe)
    names = [name for name in contents.tensors.described if now[name] != then[name]]
    for name in names:
        if then[name] != (now[name][0] + 1, *now[name][1:]):
            raise UserError(
                f"{folder}: {name} changes from {list(now[name])} to {list(then[name])} with one more; "
                f"`{option}` of such a model cannot grow"
            )
    return names


def _shapes(model: str, config: Any) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        state: dict[str, Tensor] = MODELS.get(model).target(config).state_dict()
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


def _changed(contents: Contents, names: Sequence[str], grow: Any, more: int, **options: int) -> Contents:
    """With other options, and the named tensors grown by `more` rows when they are read, by `grow`."""
    config = build_options("model", type(contents.config), {**dataclasses.asdict(contents.config), **options})
    described = dict(contents.tensors.described)
    for name in names:
        shape = described[name].shape
        described[name] = torch.empty((shape[0] + more, *shape[1:]), dtype=described[name].dtype, device="meta")

    def read(name: str) -> Tensor:
        tensor = contents.tensors.read(name)
        return grow(name, tensor) if name in names else tensor

    return dataclasses.replace(contents, config=config, tensors=LazyTensors(described, read))
