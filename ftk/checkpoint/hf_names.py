"""What reading and writing Hugging Face's folders share: their files, and the names of tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ftk.checkpoint.hf_weights import SAFE
from ftk.models.conversion import Converter
from ftk.registry import HF_MODELS

CONFIG, GENERATION = "config.json", "generation_config.json"
KEPT = (".jinja", ".json", ".model", ".txt")  # suffixes of the other files that are copied
NAMES = "ftk_names.json"  # of `source/`: weights' file -> {"metadata": of the file, "names": of its tensors}
UNREAD = f"ftk_unread{SAFE}"  # of `source/`: weights that no part of ours reads, to be written back
ENDS = "eos_token_id"


def converter_of(model: str) -> Converter:
    converter: Converter = HF_MODELS.get(model).target()
    return converter


def full_names(names: Collection[str], converter: Converter, tied: Mapping[str, str]) -> dict[str, str]:
    """Name in the files -> full name as it is spelt today; a model without head omits the prefix."""
    full: dict[str, str] = {}
    for name in names:
        start, _, last = name.rpartition(".")
        full[name] = f"{start}.{converter.older[last]}" if last in converter.older else name
    if any(name.startswith(converter.prefix) for name in names):
        return full
    known = {name for rename in converter.renames for name in rename.theirs}
    return {
        name: today if today in tied or today in known else converter.prefix + today for name, today in full.items()
    }
