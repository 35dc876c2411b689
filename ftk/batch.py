"""One batch, from the collater to the criterion: what the model reads, and what is scored at which places."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from numbers import Number
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torch import Tensor


class Group(NamedTuple):
    """Targets whose losses are also logged apart, as `loss_<name>`.

    Attributes:
        names: of the groups.
        index: [N] int64, to which of them each target belongs.
    """

    names: tuple[str, ...]
    index: Tensor  # type: ignore[assignment]  # the method of tuples is not called


@dataclass(eq=False)
class Batch:
    """Samples as the model reads them, and N targets at places of theirs.

    Everything but `inputs` and `sample_ids` is counted by its first axis in things that carry loss, so that a batch
    loses its loss by cutting that axis to nothing (`without_loss`).

    Attributes:
        inputs: the arguments of `model.hidden_states`, by name: "tokens" int64 [B, T] among them; a number stays on the
            host. An encoder-decoder reads the source, "tokens" [B, S], and "decoder_tokens" [B, T].
        targets: [N] int64, or [N, ...] of another type.
        places: [N] int64, where in the flattened [B * T] hidden states each target is scored; places may repeat.
        sample_ids: int64 [B], which samples of the epoch these are; the iterator fills it in. Never on a device.
        weights: [N] float32, factors of the targets' losses; None: 1.
        groups: by name, partitions of the targets whose losses are logged separately.
        extras: what one criterion alone reads.
    """

    inputs: dict[str, Any]
    targets: Tensor
    places: Tensor
    sample_ids: NDArray[np.int64] | None = None
    weights: Tensor | None = None
    groups: dict[str, Group] = field(default_factory=dict)
    extras: dict[str, Tensor] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Tokens that the model reads, padding counted: the source's too, where there is one."""
        return sum(tokens.numel() for tokens in self.read_tokens)

    @property
    def read_tokens(self) -> list[Tensor]:
        """[B, T], or [B, S] and [B, T]: the tokens that the model reads; of a model of two stacks those of both."""
        return [self.inputs[name] for name in ("tokens", "decoder_tokens") if name in self.inputs]

    @property
    def placed_tokens(self) -> Tensor:
        """[B, T]: the tokens whose hidden states `places` counts."""
        return self.read_tokens[-1]

    def map(self, change: Callable[[Any], Any]) -> Batch:
        """The same batch with every tensor changed, but for the sample ids."""
        inputs = {name: value if isinstance(value, Number) else change(value) for name, value in self.inputs.items()}
        return replace(self._with_scored(change), inputs=inputs)

    def to(self, device: torch.device) -> Batch:
        """The batch with its tensors on a device, see `sent`."""
        return self.map(lambda tensor: sent(tensor, device))

    def without_loss(self) -> Batch:
        """The same inputs without a target: for a rank that has no batch left in the epoch's last round."""
        return self._with_scored(lambda tensor: tensor[:0])

    def longer(self, multiple: int, axes: Mapping[str, str], most: int | None = None) -> Batch:
        """The batch with tokens added that carry no loss, so that T, and S of a source, are multiples of `multiple`.

        They follow the others, which do not see them, and are 0 everywhere: a token, a position and a document that
        exist. Those of a source, or of any text whose model has `lengths`, lie behind these.

        Args:
            multiple: of how many tokens.
            axes: of each input, as a model's `INPUTS`: {"tokens": "B T", "position_ids": "B 2 T"}; what has neither T
                nor S stays as it is.
            most: T and S are not made longer than this, a multiple or not; None: as long as it takes.
        """
        from torch.nn import functional as F

        sizes = {axis: tokens.size(1) for axis, tokens in zip("TS", reversed(self.read_tokens), strict=False)}
        more = {axis: -size % multiple for axis, size in sizes.items()}
        if most is not None:
            more = {axis: min(added, max(0, most - sizes[axis])) for axis, added in more.items()}
        if not any(more.values()):
            return self
        inputs = dict(self.inputs)
        if more["S" if "S" in sizes else "T"] and "lengths" in axes:
            size = inputs["tokens"].size(1)
            inputs.setdefault("lengths", inputs["tokens"].new_full(inputs["tokens"].shape[:1], size))
        for name in inputs:
            names = axes.get(name, "").split()
            for axis in more.keys() & set(names):
                after = len(names) - 1 - names.index(axis)
                inputs[name] = F.pad(inputs[name], (0, 0) * after + (0, more[axis]))
        places = self.places + self.places // sizes["T"] * more["T"]
        return replace(self, inputs=inputs, places=places)

    def _with_scored(self, change: Callable[[Any], Any]) -> Batch:
        """The same inputs, and all that concerns the targets changed."""
        return replace(
            self,
            targets=change(self.targets),
            places=change(self.places),
            weights=None if self.weights is None else change(self.weights),
            groups={name: Group(group.names, change(group.index)) for name, group in self.groups.items()},
            extras={name: change(value) for name, value in self.extras.items()},
        )


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device, without waiting for it.

    From the host to a GPU it goes through page-locked memory, which PyTorch keeps for later copies: with other memory
    the host would wait until the GPU has made the copy.
    """
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()  # itself, if it is
    return tensor.to(device, non_blocking=True)
