"""How a decoder reads frames: one behind the other, without padding, each attended to by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ftk.batch import sent
from ftk.modules.attention import Attend, Front, by_window, fused_attention
from ftk.modules.kv_cache import KeyValueCache, Places
from ftk.modules.masks import Visibility

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
    frames: Sequence[Frame], where: Where, device: torch.device, windows: Sequence[int | None] = (None,)
) -> Reading:
    """Frames one behind the other; `windows` are those of the layers, each once."""
    rows, starts, prefixes = where
    lengths = np.array([len(frame.tokens) for frame in frames], dtype=np.int64)
    ends = np.cumsum(lengths)
    members = np.repeat(np.arange(len(frames)), lengths)  # [T]
    columns = np.arange(ends[-1])
    slots = (starts - ends + lengths)[members] + columns
    lines = np.zeros_like(columns)
    places = Places(*(to_device(part, device) for part in (rows[members], slots, lines, columns)))
    spans: dict[int | None, list[_Span]] = {window: [] for window in windows}
    seen: list[Tensor] = []
    own_prefixes = to_device(prefixes, device)[:, None]  # [n, 1]
    before = 0
    for number, (row, start, length, end) in enumerate(zip(rows, starts, lengths, ends, strict=True)):
        keys = torch.arange(int(start + length), device=device)  # [S]
        own, own_keys = slice(int(end - length), int(end)), slice(before, before + keys.numel())
        for window in windows:
            visibility = Visibility(prefix=own_prefixes[number], window=window)
            mask = visibility.boolean(keys[int(start) :], keys)  # [1, 1, length, S]
            spans[window].append(_Span(int(row), own, own_keys, mask))
        seen.append(keys)
        before = own_keys.stop
    inputs = {name: np.concatenate([frame.inputs[name] for frame in frames], axis=-1) for name in frames[0].inputs}
    return Reading(
        to_device(np.concatenate([np.asarray(frame.tokens, np.int64) for frame in frames])[None], device),
        {name: to_device(array[None], device) for name, array in inputs.items()},
        places,
        [span.columns for span in spans[windows[0]]],
        torch.cat(seen)[None],
        (torch.zeros(len(frames), dtype=torch.int64, device=device), to_device(ends - 1, device)),
        lambda cache: by_window(windows, lambda window: PackedAttention(cache, places, spans[window])),
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
    """`attend` for packed frames: writes them behind what their rows hold, then each by itself looks at its row."""

    cache: KeyValueCache
    places: Places
    spans: list[_Span]
    front: Front | None = None

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *, bias: Tensor | None = None, scale: float | None = None
    ) -> Tensor:
        """query, key, value [1, A, T, D] -> [1, A, T, D]"""
        self.cache.write(key, value, self.places)
        attended = []
        for row, columns, seen, mask in self.spans:
            keys, values = self.cache.row(row, mask.size(-1))  # [1, A, S, D]
            own = None if bias is None else bias[:, :, columns, seen]
            mixed = fused_attention(query[:, :, columns], keys, values, mask, bias=own, scale=scale, front=self.front)
            attended.append(mixed)
        return torch.cat(attended, dim=2)
