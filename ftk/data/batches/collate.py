"""Collating: pads samples of different lengths into one batch, and gathers what is scored in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ftk.batch import Batch, Group

if TYPE_CHECKING:
    from ftk.tokenizers import SpecialTokens


class Collater:
    """Makes a batch of samples.

    Args:
        special: its `pad` (0 if there is none) fills all tokens and targets; loss mask and positions are filled with
            zeros.
        groups: name of the array that gives each sample's group of losses -> names of the groups.
    """

    def __init__(self, special: SpecialTokens, groups: Mapping[str, tuple[str, ...]] | None = None) -> None:
        self.pad = 0 if special.pad is None else special.pad
        self.groups = dict(groups or {})

    def __call__(self, samples: Sequence[dict[str, NDArray]]) -> Batch:
        """One batch.

        Args:
            samples: at least one, each with `tokens` and `targets` int64 [T], `loss_mask` bool [T], perhaps
                `loss_weights` float32 [T], and other inputs of the model, [..., T] or a number; those of an encoder and
                a decoder have `tokens` [S] and `decoder_tokens` [T]; or a SampleBatch, which has the arrays ready.
        """
        return dense_batch(self.arrays(samples), self.groups)

    def arrays(self, samples: Sequence[dict[str, NDArray]]) -> dict[str, NDArray]:
        """The arrays of a batch, [B, ...]; each is as long as its longest sample. document_ids are -1 in padding."""
        return samples.arrays if isinstance(samples, SampleBatch) else padded(samples, self.pad)


@dataclass
class PaddedCollater:
    """Another collater's batches, made longer (`Batch.longer`); their documents are counted for a model that asks.

    Attributes:
        collater: makes them.
        multiple: of how many tokens they are to be.
        axes: `INPUTS` of the model that reads them.
        max_positions: a model without positions among a batch's inputs reads no more tokens; None: any number.
    """

    collater: Callable[[Sequence[dict[str, Any]]], Batch]
    multiple: int
    axes: Mapping[str, str]
    max_positions: int | None = None

    def __call__(self, samples: Sequence[dict[str, Any]]) -> Batch:
        batch = self.collater(samples)
        if "num_documents" in self.axes and (documents := batch.inputs.get("document_ids")) is not None:
            # Few different numbers, as each new one would be compiled for; none where they number more than documents.
            count = -(-(int(documents.max()) + 1) // 8) * 8
            if count <= documents.size(1):
                batch.inputs["num_documents"] = count
        return batch.longer(self.multiple, self.axes, None if "position_ids" in batch.inputs else self.max_positions)


def padded(samples: Sequence[dict[str, NDArray]], pad: int) -> dict[str, NDArray]:
    """The arrays of samples that were made one by one; see `Collater`.

    Args:
        samples: at least one, each with `tokens`.
        pad: fills tokens and targets.
    """
    fill = {"tokens": pad, "decoder_tokens": pad, "targets": pad, "document_ids": -1}
    arrays: dict[str, NDArray] = {}
    for name, first in samples[0].items():
        shape = np.shape(first)
        if not shape:
            arrays[name] = np.array([sample[name] for sample in samples])
            continue
        longest = max(sample[name].shape[-1] for sample in samples)
        arrays[name] = np.full((len(samples), *shape[:-1], longest), fill.get(name, 0), dtype=first.dtype)
        for row, sample in enumerate(samples):
            arrays[name][row, ..., : sample[name].shape[-1]] = sample[name]
    return arrays


def dense_batch(arrays: Mapping[str, NDArray], groups: Mapping[str, tuple[str, ...]] | None = None) -> Batch:
    """The batch of samples that have a target at every place, and a mask of those that count.

    The targets with loss are gathered here, on the host, so that nothing waits for a device to count them, and less is
    copied to it.

    Args:
        arrays: targets int64 [B, T], loss_mask bool [B, T], perhaps loss_weights float32 [B, T]; the others are inputs
            of the model: tokens int64 [B, T], or [B, S] for an encoder, decoder_tokens [B, T] with it, and more.
        groups: name of the array, int64 [B], that gives each sample's group of losses -> names of the groups.
    """
    import torch  # here, so that commands which only look at data start without it

    places = np.flatnonzero(arrays["loss_mask"])  # [N]
    scored = {"targets", "loss_mask", "loss_weights", *(groups or {})}
    weights = arrays.get("loss_weights")
    rows = places // arrays["loss_mask"].shape[1]
    return Batch(
        inputs={name: torch.from_numpy(array) for name, array in arrays.items() if name not in scored},
        targets=torch.from_numpy(arrays["targets"].ravel()[places]),
        places=torch.from_numpy(places),
        weights=None if weights is None else torch.from_numpy(weights.ravel()[places]),
        groups={
            name: Group(names, torch.from_numpy(arrays[name][rows]))
            for name, names in (groups or {}).items()
            if name in arrays
        },
    )


class SampleBatch(Sequence):
    """Samples that were made together: a sequence of samples, and their padded arrays.

    Args:
        arrays: of the batch, [B, ...]; the last of several axes is as long as the longest sample.
        lengths: int64 [B], tokens of each sample.
        own_lengths: by name, int64 [B], of arrays that are not as long as the tokens.
    """

    def __init__(
        self,
        arrays: dict[str, NDArray],
        lengths: NDArray[np.int64],
        own_lengths: Mapping[str, NDArray[np.int64]] | None = None,
    ) -> None:
        self.arrays = arrays
        self.lengths = lengths
        self.own_lengths = own_lengths or {}

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, row: Any) -> Any:
        """One sample, without padding."""
        if isinstance(row, slice):
            return [self[number] for number in range(*row.indices(len(self)))]
        return {
            name: array[row, ..., : self.own_lengths.get(name, self.lengths)[row]]
            if array.ndim > 1
            else np.asarray(array[row])
            for name, array in self.arrays.items()
        }
