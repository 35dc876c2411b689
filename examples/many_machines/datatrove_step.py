"""The last step of a datatrove pipeline: what its filters and deduplication have left, as a data folder for ftk-train.

    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.filters import GopherQualityFilter
    from datatrove.pipeline.readers import JsonlReader
    from datatrove_step import ToDataFolder

    step = ToDataFolder("data-bin.shards", tokenizer="tokenizer")
    LocalPipelineExecutor([JsonlReader("corpus"), GopherQualityFilter(), step], tasks=8, workers=2).run()

Each task writes a shard; then `ftk-data merge --shards data-bin.shards/* --destdir data-bin`. On a cluster the same
pipeline goes into SlurmPipelineExecutor. `pip install datatrove`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from datatrove.pipeline.base import PipelineStep


class ToDataFolder(PipelineStep):
    """Encodes the documents of a task, and ends the pipeline.

    Args:
        folder: where the shards go, one a task, on a disk that all machines have.
        tokenizer: folder that ftk wrote one to (a data folder, a checkpoint).
        split: of the documents.
    """

    name = "ftk data folder"
    type = "💽 - WRITER"

    def __init__(self, folder: str, tokenizer: str, split: str = "train") -> None:
        super().__init__()
        self.folder, self.tokenizer, self.split = folder, tokenizer, split

    def run(self, data: Iterable[Any], rank: int = 0, world_size: int = 1) -> Iterator[Any]:
        from ftk.data import from_dataset

        shard = f"{rank + 1}/{world_size}"
        rows = ({"text": self._counted(document).text} for document in data)
        destdir = f"{self.folder}/{rank + 1}"
        from_dataset({self.split: rows}, self.tokenizer, destdir=destdir, shard=shard, overwrite=True)
        yield from ()  # documents end here: a step is a generator

    def _counted(self, document: Any) -> Any:
        self.stat_update("documents")
        return document
