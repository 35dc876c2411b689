"""How a decoder reads frames: one behind the other, without padding, each attended to by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ftk.batch import sent
from ftk.modules.attention import Attend, Front, by_window
from ftk.modules.kv_cache import KeyValueCache, Places, packed_index
from ftk.modules.masked_attention import HALF, fused_attention
from ftk.modules.masks import Visibility
from ftk.modules.varlen_attention import Runs, flash_attention, has_flash

if TYPE_CHECKING:
    from ftk.generation.engine.request import Frame

Numbers = npt.NDArray[np.int64]


class Where(NamedTuple):
    """Where n frames go in a decoder's rows; three of int64 [n].

    Attributes:
        rows: of the decoder, n different ones.
        starts: the slot of each frame's first token; those before hold what was read earlier.
        prefixes: the leading slots of each row, which all its tokens see.
    """

    rows: Numbers
    starts: Numbers
    prefixes: Numbers


class Reading(NamedTuple):
    """Frames as the model reads them, T tokens in all.

    Attributes:
        tokens: int64 [1, T].
        inputs: int64 [1, .., T], by name.
        places: where the tokens are here and in the caches.
        columns: of each frame's tokens.
        key_positions: int64 [1, S]: of what each frame may see, one behind the other, for a bias of positions.
        last: line (0) and column of the last token of each frame, int64 [n] each.
        attend: makes the `attend` of a layer, given its cache.
    """

    tokens: Tensor
    inputs: dict[str, Tensor]
    places: Places
    columns: list[slice]
    key_positions: Tensor
    last: tuple[Tensor, Tensor]
    attend: Callable[[KeyValueCache], Attend]


def read_packed(
    frames: Sequence[Frame],
    where: Where,
    device: torch.device,
    windows: Sequence[int | None] = (None,),
    flash: Flash | None = None,
) -> Reading:
    """Frames one behind the other.

    Args:
        frames: n.
        where: they go.
        windows: those of the layers, each once.
        flash: the kernel that reads all of them at once; None: each is attended to by itself.
    """
    rows, starts, prefixes = where
    lengths = np.array([len(frame.tokens) for frame in frames], dtype=np.int64)
    ends, num_keys = np.cumsum(lengths), starts + lengths
    members = np.repeat(np.arange(len(frames)), lengths)  # [T]
    numbers = np.arange(ends[-1])
    slots = (starts - ends + lengths)[members] + numbers
    lines = np.zeros_like(numbers)
    places = Places(*(to_device(part, device) for part in (rows[members], slots, lines, numbers)))
    columns = [slice(int(end - length), int(end)) for length, end in zip(lengths, ends, strict=True)]
    key_positions = to_device(np.concatenate([np.arange(count) for count in num_keys]), device)
    own_prefixes = to_device(prefixes, device)[:, None]  # [n, 1]

    @cache
    def spans(window: int | None) -> list[_Span]:
        found, before = [], 0
        for number, (row, start, own) in enumerate(zip(rows, starts, columns, strict=True)):
            keys = torch.arange(int(num_keys[number]), device=device)  # [S]
            visibility = Visibility(prefix=own_prefixes[number], window=window)
            mask = visibility.boolean(keys[int(start) :], keys)  # [1, 1, length, S]
            found.append(_Span(int(row), own, slice(before, before + len(keys)), mask))
            before += len(keys)
        return found

    @cache
    def runs() -> PackedRuns:
        return packed_runs(where, lengths, device)

    @cache
    def goes_to(num_heads: int, capacity: int) -> Tensor:
        return packed_index(places.rows, places.slots, num_heads, capacity)

    def attend(kept: KeyValueCache, window: int | None) -> PackedAttention:
        own = None if flash is None or window is not None else partial(flash_packed, flash, runs)
        return PackedAttention(kept, goes_to, partial(spans, window), own)

    inputs = {name: np.concatenate([frame.inputs[name] for frame in frames], axis=-1) for name in frames[0].inputs}
    return Reading(
        to_device(np.concatenate([np.asarray(frame.tokens, np.int64) for frame in frames])[None], device),
        {name: to_device(array[None], device) for name, array in inputs.items()},
        places,
        columns,
        key_positions[None],
        (torch.zeros(len(frames), dtype=torch.int64, device=device), to_device(ends - 1, device)),
        lambda kept: by_window(windows, partial(attend, kept)),
    )


class _Span(NamedTuple):
    """A frame among packed ones."""

    row: int  # of the cache
    columns: slice
    keys: slice  # of a bias, in which the keys of all frames stand one behind the other
    mask: Tensor  # bool [1, 1, t, S], t its length and S that of its row: what each token sees


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """An array of the host's on a device, see `sent`."""
    return sent(torch.from_numpy(np.ascontiguousarray(array)), device)


class PackedAttention(NamedTuple):
    """`attend` for packed frames: writes them behind what their rows hold, then each by itself looks at its row.

    Attributes:
        goes_to: where the tokens go, given K and the capacity, see `KeyValueCache.write`.
        spans: the frames, by themselves.
        at_once: attends to all of them; None where there is no kernel that does.
        front: what all see besides.
    """

    cache: KeyValueCache
    goes_to: Callable[[int, int], Tensor]
    spans: Callable[[], list[_Span]]
    at_once: Callable[[KeyValueCache, Tensor, Tensor, Tensor, float | None], Tensor] | None
    front: Front | None = None

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *, bias: Tensor | None = None, scale: float | None = None
    ) -> Tensor:
        """query, key, value [1, A, T, D] -> [1, A, T, D]"""
        self.cache.write(key, value, self.goes_to(key.size(1), self.cache.capacity))
        if self.at_once is not None and bias is None and self.front is None:
            return self.at_once(self.cache, query, key, value, scale)
        attended = []
        for row, columns, seen, mask in self.spans():
            keys, values = self.cache.row(row, mask.size(-1))  # [1, A, S, D]
            own = None if bias is None else bias[:, :, columns, seen]
            mixed = fused_attention(query[:, :, columns], keys, values, mask, bias=own, scale=scale, front=self.front)
            attended.append(mixed)
        return torch.cat(attended, dim=2)


Flash = Callable[[Tensor, Tensor, Tensor, Runs, "float | None"], Tensor]
"""Queries [T, A, D], keys and values [S, K, D] each, runs and scale -> [T, A, D]."""


def flash_for(device: torch.device, dtype: torch.dtype, head_size: int) -> Flash | None:
    """`flash_attention` where it takes keys of this type and size, on a GPU of Ampere or newer; else None."""
    fits = dtype in HALF and head_size % 8 == 0 and head_size <= 256
    return flash_attention if fits and has_flash(device) else None


class PackedRuns(NamedTuple):
    """Packed frames for a kernel that takes runs.

    A token behind its row's prefix sees all before it: `behind`. One in the prefix sees all of that: `whole`, which
    takes the queries at `inside` alone.

    Attributes:
        behind: all tokens, causally; right for those behind their prefixes.
        whole, inside: int64 [T'], the others; None where there are none.
        rows, slots: int64 [S] of the keys, where rows hold what was read before; else None: the keys are the new ones.
    """

    behind: Runs
    whole: Runs | None
    inside: Tensor | None
    rows: Tensor | None
    slots: Tensor | None


def packed_runs(where: Where, lengths: Numbers, device: torch.device) -> PackedRuns:
    """The runs of frames of these lengths."""
    rows, starts, prefixes = where
    num_keys = starts + lengths

    def bounds(counts: Numbers) -> Tensor:
        return to_device(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32), device)

    behind = Runs(bounds(lengths), bounds(num_keys), int(lengths.max()), int(num_keys.max()), True)
    kept: tuple[Tensor | None, Tensor | None] = None, None
    if starts.any():
        slots = np.concatenate([np.arange(count) for count in num_keys])
        kept = to_device(np.repeat(rows, num_keys), device), to_device(slots, device)
    of_prefix = np.minimum(prefixes - starts, lengths).clip(min=0)  # [n]: leading tokens of each frame
    if not of_prefix.any():
        return PackedRuns(behind, None, None, *kept)
    # The keys behind the prefixes are runs that no query meets.
    seen = np.where(of_prefix > 0, np.minimum(prefixes, num_keys), 0)
    queries, keys = (
        np.stack(pair, axis=1).flatten() for pair in ((of_prefix, np.zeros_like(of_prefix)), (seen, num_keys - seen))
    )
    whole = Runs(bounds(queries), bounds(keys), int(of_prefix.max()), int(max(keys.max(), 1)), False)
    first = np.cumsum(lengths) - lengths
    inside = np.concatenate([np.arange(begin, begin + count) for begin, count in zip(first, of_prefix, strict=True)])
    return PackedRuns(behind, whole, to_device(inside, device), *kept)


def flash_packed(
    flash: Flash,
    runs: Callable[[], PackedRuns],
    cache: KeyValueCache,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None,
) -> Tensor:
    """What packed frames attend to, in one or two calls: query, key, value [1, A, T, D] -> [1, A, T, D]."""
    behind, whole, inside, rows, slots = runs()
    query, keys, values = (each[0].transpose(0, 1) for each in (query, key, value))  # [T, A, D]
    if rows is not None and slots is not None:
        keys, values = cache.packed(packed_index(rows, slots, key.size(1), cache.capacity))  # [S, K, D]
    attended = flash(query, keys, values, behind, scale)
    if whole is not None and inside is not None:
        attended = attended.index_copy(0, inside, flash(query[inside], keys, values, whole, scale))
    return attended.transpose(0, 1)[None]
