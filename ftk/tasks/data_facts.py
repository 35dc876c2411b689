"""Fingerprints of data, wherever it is stored: ranks that train together compare them."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any

import numpy as np

from ftk.data.corpora.documents import Documents
from ftk.data.indexed.folder_layout import NoSplit
from ftk.model_parallel.collective import collective
from ftk.model_parallel.same_start import check_same_start
from ftk.model_parallel.world import World
from ftk.tasks.base import Task

_SIZES_READ = 1 << 20
_DOCUMENTS_READ = 1 << 10
_EDGE_TOKENS = 1 << 10


def check_same_data(task: Task, splits: Iterable[str], world: World) -> None:
    """Refuses to start with different data on different ranks. All of them call it.

    Args:
        task: as this rank has built it.
        splits: that are used.

    Raises:
        UserError: on all of them, with what differs and where.
    """
    if world.size > 1:
        check_same_start(collective(world, lambda: data_facts(task, splits)), world.gather_json)


def data_facts(task: Task, splits: Iterable[str]) -> dict[str, Any]:
    """The fingerprints of a task's tokenizer and of its splits; None for a split that does not exist."""
    facts: dict[str, Any] = {"the data's tokenizer": task.tokenizer.fingerprint}
    corpus: Any = task.corpus
    has_own = hasattr(corpus, "fingerprint")
    for split in splits if has_own or hasattr(corpus, "documents") else ():
        try:
            found = corpus.fingerprint(split) if has_own else fingerprint(corpus.documents(split))
            facts[f"the data of split {split!r}"] = found
        except NoSplit:
            facts[f"the data of split {split!r}"] = None
    return facts


def fingerprint(documents: Documents) -> str:
    """Number, sizes and tokens of documents; of many documents, and of long ones, only a part is read."""
    sizes = np.asarray(documents.sizes)
    some = np.ascontiguousarray(sizes[:: -(-len(sizes) // _SIZES_READ) or 1], dtype="<i8")
    found = zlib.crc32(some.tobytes())
    for index in np.unique(np.linspace(0, len(sizes) - 1, min(len(sizes), _DOCUMENTS_READ)).astype(np.int64)):
        tokens = np.asarray(documents[int(index)])
        for edge in (tokens[:_EDGE_TOKENS], tokens[-_EDGE_TOKENS:]):
            found = zlib.crc32(np.ascontiguousarray(edge, dtype="<i8").tobytes(), found)
    return f"{len(sizes)} documents, checksum {found:08x}"
