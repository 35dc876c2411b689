"""One corpus of several: blended with weights, in shards, divided into splits when it is read."""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
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

logger = logging.getLogger(__name__)

MakeSamples = Callable[[Any, int], SampleDataset]  # (documents, seed), or (rows, seed)
_SEED_STREAM = -4  # the epoch of the stream that gives each corpus of a blend its seed


@dataclass(kw_only=True)
class BlendConfig:
    """How much of each of several corpora is trained on."""

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

    def validate(self) -> Iterator[str]:
        if self.data_weights is not None and self.data_temperature != 1.0:
            yield "data_temperature and data_weights are both given; give one of them"
        if self.data_weights is not None and not _is_distribution(self.data_weights):
            yield f"data_weights is {_listed(self.data_weights)}; none may be below 0, and their sum must be above 0"


@dataclass(kw_only=True)
class CompositionConfig(BlendConfig):
    """How the corpora that DATA names become one."""

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
        yield from super().validate()
        if self.split_ratios is not None:
            if not 2 <= len(self.split_ratios) <= len(SPLITS):
                yield f"split_ratios is {_listed(self.split_ratios)}; give two or three: train, valid, test"
            if not _is_distribution(self.split_ratios):
                yield f"split_ratios is {_listed(self.split_ratios)}; none may be below 0, and one must be above"


class Blend(ABC):
    """Corpora whose samples are blended.

    Args:
        names: paths of each; of a corpus in shards several.

    Raises:
        UserError: there are not as many weights as corpora.
    """

    def __init__(self, names: list[list[str]], config: BlendConfig) -> None:
        self.names, self.weights, self.temperature = names, config.data_weights, config.data_temperature
        if self.weights is not None and not 1 < len(self.weights) == len(names):
            given, data = f"`data_weights` {_listed(self.weights)}", ",".join(map(":".join, names))
            if len(names) == 1:
                raise UserError(
                    f"{given} has no effect, as {data} is one corpus; leave it out, or name several corpora"
                )
            raise UserError(
                f"{given} are {len(self.weights)} weights, {data} names {len(names)} corpora; give one weight for each"
            )

    @property
    def is_composed(self) -> bool:
        """Whether there are several corpora or shards."""
        return sum(map(len, self.names)) > 1

    def samples(self, split: str, make_samples: MakeSamples, seed: int) -> SampleDataset:
        """The samples of a split: of one corpus, of its shards in turn, or of several corpora blended.

        Args:
            make_samples: of what one shard holds.

        Raises:
            UserError: a corpus lacks the split, or gives no sample.
        """
        made, weights = [], []
        for number, shards in self._parts(split).items():
            # A corpus that is named twice gives other samples the second time.
            own_seed = seed if number == 0 else SampleRandom(seed, _SEED_STREAM, number).word() >> 1
            datasets = [make_samples(held, own_seed) for held in shards]
            tokens = sum(map(_num_tokens, shards, datasets))
            dataset = datasets[0] if len(datasets) == 1 else ShardedDataset(datasets)
            made.append(Part(":".join(self.names[number]), tokens, dataset))
            weights.append(1.0 if self.weights is None else self.weights[number])
        if len(made) == 1:
            return made[0].dataset
        sizes = [int(lengths_of(part.dataset).sum()) for part in made]
        if 0 in sizes:
            raise UserError(f"{made[sizes.index(0)].name} gives no sample of split {split!r}; leave it out")
        if self.weights is None or not any(weights):
            weights = weights_by_size(sizes, self.temperature).tolist()
        return BlendedDataset(made, weights, seed)

    @abstractmethod
    def _parts(self, split: str) -> dict[int, list[Any]]:
        """What each shard holds of a split, by the number of its corpus; without corpora that are left out."""


class ComposedCorpus(Blend):
    """Corpora as one: `a,b` are blended, `a:b` are shards of one corpus, and `a:b,c` is both.

    Args:
        data: paths; one that exists is taken literally, commas and colons included.

    Raises:
        UserError: a path cannot be opened, there are not as many weights as corpora, the corpora were made by
            different tokenizers, or some lack a split.
    """

    def __init__(self, data: str, config: CompositionConfig, open_corpus: Callable[[str], Corpus]) -> None:
        super().__init__(parse_data(data), config)
        self.config = config
        self.corpora = [[open_corpus(path) for path in shards] for shards in self.names]
        if config.split_ratios is not None:
            splits = [shard.splits() for shards in self.corpora for shard in shards]
            if all(len(names) > 1 for names in splits):
                logger.warning(  # no error: a checkpoint's options are read with other data, too
                    "`split_ratios` %s has no effect, as %s has several splits (%s)",
                    *(_listed(config.split_ratios), data, ", ".join(splits[0])),
                )

    def splits(self) -> Sequence[str]:
        """Splits that every corpus has."""
        names = [{split for shard in shards for split in self._splits_of(shard)} for shards in self.corpora]
        return sorted(set.intersection(*names))

    def documents(self, split: str) -> Documents:
        """All documents of a split, of one corpus and shard after the other, whatever the weights."""
        sources = [documents for shards in self._parts(split).values() for documents in shards]
        return sources[0] if len(sources) == 1 else JoinedDocuments(sources)

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

    def _parts(self, split: str) -> dict[int, list[Documents]]:
        parts = {}
        for number, (shards, paths) in enumerate(zip(self.corpora, self.names, strict=True)):
            having = [shard for shard in shards if split in self._splits_of(shard)]
            if not having and len(self.names) > 1:
                raise UserError(f"{':'.join(paths)} has no split {split!r}; every corpus of a blend needs it")
            if having and len(having) < len(shards) and having != shards[:1]:
                missing = paths[next(n for n, shard in enumerate(shards) if shard not in having)]
                raise UserError(f"{missing} has no split {split!r}; either all shards have it, or the first one only")
            parts[number] = [self._documents(shard, split) for shard in having or shards[:1]]
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


def parse_data(data: str, *, has_shards: bool = True) -> list[list[str]]:
    """`a:b,c` -> [[a, b], [c]]; a path that exists is taken literally.

    Args:
        has_shards: whether colons divide a corpus into shards.
    """
    if os.path.exists(data):  # unlike Path.exists, not an error where the name is too long for a file
        return [[data]]
    corpora = []
    for corpus in data.split(","):
        if "，" in corpus and not os.path.exists(corpus):
            raise UserError(f"{data}: corpora are separated by ',', not by '，'")
        shards = [corpus] if os.path.exists(corpus) or not has_shards else corpus.split(":")
        if not all(path.strip() for path in shards):
            as_shards = " and shards of one as A:B" if has_shards else ""
            raise UserError(f"{data}: a name is empty; write corpora as A,B{as_shards}")
        corpora.append([path.strip() for path in shards])
    return corpora


def _num_tokens(held: Any, dataset: SampleDataset) -> int:
    """Of documents; of rows those of their samples."""
    known = getattr(held, "num_tokens", None)
    sizes = held.sizes if hasattr(held, "sizes") else dataset.sizes(1)
    return int(sizes.sum(dtype="int64")) if known is None else int(known)


def _is_distribution(weights: Sequence[float]) -> bool:
    return all(weight >= 0.0 for weight in weights) and 0.0 < sum(weights) < float("inf")


def _listed(numbers: Sequence[float]) -> str:
    return ",".join(f"{number:g}" for number in numbers)
