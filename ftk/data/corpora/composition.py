"""One corpus of several: blended with weights, in shards, divided into splits when it is read."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftk.config.options import option
from ftk.data.corpora.blending import BlendedDataset, Part, ShardedDataset, weights_by_size
from ftk.data.corpora.split import JoinedDocuments, split_documents
from ftk.data.indexed.folder_layout import SPLITS
from ftk.data.random import SampleRandom
from ftk.data.sample_dataset import SampleDataset, lengths_of
from ftk.errors import UserError

if TYPE_CHECKING:
    from ftk.data.corpora.corpus import Corpus
    from ftk.data.corpora.documents import Documents
    from ftk.tokenizers.base import Tokenizer

MakeSamples = Callable[["Documents", int], SampleDataset]  # (documents, seed)
_SEED_STREAM = -4  # the epoch of the stream that gives each corpus of a blend its seed


@dataclass(kw_only=True)
class CompositionConfig:
    """How the corpora that DATA names become one."""

    data_weights: list[float] | None = option(
        None,
        "several corpora: share of each in the training samples, any scale, e.g. 3,1; default: as much as each holds",
    )
    data_temperature: float = option(
        1.0,
        "several corpora without `data_weights`: shares in proportion to size^(1/T); 1: as much as each holds, above "
        "1: more of the small ones",
        "(0, inf)",
    )
    split_ratios: list[float] | None = option(
        None, "divide a corpus that has one split only at random into train, valid and test, e.g. 949,50,1"
    )
    split_seed: int = option(
        1234,
        "of `split_ratios`; the run's own `seed` does not change the division",
        needs={"split_ratios": True},
        max=2**63 - 1,
    )

    def validate(self) -> Iterator[str]:
        if self.data_weights is not None and self.data_temperature != 1.0:
            yield "data_temperature and data_weights are both given; give one of them"
        if self.data_weights is not None and not _is_distribution(self.data_weights):
            yield f"data_weights is {_listed(self.data_weights)}; none may be below 0, and their sum must be above"
        if self.split_ratios is not None:
            if not 2 <= len(self.split_ratios) <= len(SPLITS):
                yield f"split_ratios is {_listed(self.split_ratios)}; give two or three: train, valid, test"
            if not _is_distribution(self.split_ratios):
                yield f"split_ratios is {_listed(self.split_ratios)}; none may be below 0, and one must be above"


class ComposedCorpus:
    """Corpora as one: `a,b` are blended, `a:b` are shards of one corpus, and `a:b,c` is both.

    Args:
        data: paths; one that exists is taken literally, commas and colons included.

    Raises:
        UserError: a path cannot be opened, there are not as many weights as corpora, the corpora were made by
            different tokenizers, or some lack a split.
    """

    def __init__(self, data: str, config: CompositionConfig, open_corpus: Callable[[str], Corpus]) -> None:
        self.config = config
        self.names = parse_data(data)
        weights = config.data_weights
        if weights is not None and len(weights) != len(self.names):
            raise UserError(
                f"`data_weights` {_listed(weights)} are {len(weights)} weights, {data} names {len(self.names)} "
                f"{'corpus' if len(self.names) == 1 else 'corpora'}; give one weight for each"
            )
        self.corpora = [[open_corpus(path) for path in shards] for shards in self.names]

    @property
    def is_composed(self) -> bool:
        """Whether there are several corpora or shards."""
        return sum(map(len, self.names)) > 1

    def splits(self) -> Sequence[str]:
        """Splits that every corpus has."""
        names = [{split for shard in shards for split in self._splits_of(shard)} for shards in self.corpora]
        return sorted(set.intersection(*names))

    def documents(self, split: str) -> Documents:
        """All documents of a split, of one corpus and shard after the other, whatever the weights."""
        sources = [documents for shards in self._parts(split) for documents in shards]
        return sources[0] if len(sources) == 1 else JoinedDocuments(sources)

    def samples(self, split: str, make_samples: MakeSamples, seed: int) -> SampleDataset:
        """The samples of a split: of one corpus, of its shards in turn, or of several corpora blended.

        Args:
            make_samples: of the documents of one shard.
        """
        parts = self._parts(split)
        if len(parts) == 1:
            return _sharded([make_samples(documents, seed) for documents in parts[0]])
        made = []
        for number, shards in enumerate(parts):
            # A corpus that is named twice gives other samples the second time.
            own_seed = seed if number == 0 else SampleRandom(seed, _SEED_STREAM, number).word() >> 1
            dataset = _sharded([make_samples(documents, own_seed) for documents in shards])
            tokens = sum(_num_tokens(documents) for documents in shards)
            made.append(Part(":".join(self.names[number]), tokens, dataset))
        weights = self.config.data_weights
        if weights is None:
            sizes = [int(lengths_of(part.dataset).sum()) for part in made]
            weights = weights_by_size(sizes, self.config.data_temperature).tolist()
        return BlendedDataset(made, weights, seed)

    def tokenizer(self) -> Tokenizer:
        (first, path), *others = [
            (corpus, path)
            for shards, paths in zip(self.corpora, self.names, strict=True)
            for corpus, path in zip(shards, paths, strict=True)
        ]
        tokenizer = first.tokenizer()
        for corpus, other_path in others:
            other = corpus.tokenizer()
            if other.fingerprint != tokenizer.fingerprint:
                raise UserError(
                    f"{path} and {other_path} were made by different tokenizers ({tokenizer.name} "
                    f"{tokenizer.fingerprint[:12]}, {other.name} {other.fingerprint[:12]}); preprocess one of them "
                    f"again with the other's: `tokenizer` {tokenizer.name} `tokenizer_path` {path}/tokenizer"
                )
        return tokenizer

    @property
    def tokenizer_folder(self) -> Path:
        return self.corpora[0][0].tokenizer_folder

    def _parts(self, split: str) -> list[list[Documents]]:
        """Documents of each shard of each corpus."""
        parts = []
        for shards, paths in zip(self.corpora, self.names, strict=True):
            having = [shard for shard in shards if split in self._splits_of(shard)]
            if not having and len(self.names) > 1:
                raise UserError(f"{':'.join(paths)} has no split {split!r}; every corpus of a blend needs it")
            if having and len(having) < len(shards) and having != shards[:1]:
                missing = paths[next(n for n, shard in enumerate(shards) if shard not in having)]
                raise UserError(f"{missing} has no split {split!r}; either all shards have it, or the first one only")
            parts.append([self._documents(shard, split) for shard in having or shards[:1]])
        return parts

    def _splits_of(self, corpus: Corpus) -> Sequence[str]:
        splits, ratios = corpus.splits(), self.config.split_ratios
        if ratios is None or len(splits) > 1:
            return splits
        return [name for name, ratio in zip(SPLITS, ratios, strict=False) if ratio > 0]

    def _documents(self, corpus: Corpus, split: str) -> Documents:
        splits, ratios = corpus.splits(), self.config.split_ratios
        if ratios is None or len(splits) > 1:
            return corpus.documents(split)
        made = split_documents(corpus.documents(splits[0]), ratios, self.config.split_seed)
        if split not in made:
            there = ", ".join(made)
            raise UserError(f"`split_ratios` {_listed(ratios)} leave no document for split {split!r} (there: {there})")
        return made[split]


def parse_data(data: str) -> list[list[str]]:
    """`a:b,c` -> [[a, b], [c]]; a path that exists is taken literally."""
    if os.path.exists(data):  # unlike Path.exists, not an error where the name is too long for a file
        return [[data]]
    corpora = []
    for corpus in data.split(","):
        shards = [corpus] if os.path.exists(corpus) else corpus.split(":")
        if not all(path.strip() for path in shards):
            raise UserError(f"{data}: a name is empty; write corpora as A,B and shards of one as A:B")
        corpora.append([path.strip() for path in shards])
    return corpora


def _sharded(shards: Sequence[Any]) -> SampleDataset:
    return shards[0] if len(shards) == 1 else ShardedDataset(shards)


def _num_tokens(documents: Documents) -> int:
    known = getattr(documents, "num_tokens", None)
    return int(documents.sizes.sum(dtype="int64")) if known is None else int(known)


def _is_distribution(weights: Sequence[float]) -> bool:
    return all(weight >= 0.0 for weight in weights) and 0.0 < sum(weights) < float("inf")


def _listed(numbers: Sequence[float]) -> str:
    return ",".join(f"{number:g}" for number in numbers)
