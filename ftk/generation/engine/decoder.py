"""Drives a model's layers with caches as their `attend`: tokens in, logits of the next token out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ftk.errors import UserError
from ftk.generation.engine.around import adds_bias, wraps_of
from ftk.generation.engine.prefix_cache import CachedText, Copy, PrefixCache
from ftk.generation.engine.reading import Flash, Where, flash_for, read_packed, to_device
from ftk.generation.engine.recorded import RecordedSteps
from ftk.generation.engine.sources import Sources
from ftk.generation.engine.stepping import Pointers
from ftk.models.base import windows_of
from ftk.modules.attention import Attend, by_window, identity
from ftk.modules.cuda_graphs import Recorder
from ftk.modules.kv_cache import KeyValueCache, Places, new_caches
from ftk.registry import named

if TYPE_CHECKING:
    from ftk.generation.engine.request import Frame, Request
    from ftk.generation.search.answer import Answer
    from ftk.generation.search.base import Fusion

RequestSoFar = tuple["Request", Sequence["Answer"]]
"""What a frame is read for: a request, and its answers so far."""


class Observer(Protocol):
    """Looks at the final hidden states of what a decoder reads, for searches that compare tokens by them."""

    def clear(self, rows: Sequence[int]) -> None:
        """What was read in these rows is forgotten."""

    def settle(self, hidden: Tensor, places: Places) -> None:
        """A frame was read: [B, T, H], and where its real tokens are there and in the cache."""

    def look(self, hidden: Tensor) -> None:
        """A step was made: [R, W, H], the newest token of each hypothesis."""

    def of(self, rows: Tensor) -> Any:
        """What a search gets as `task.states`: that of some rows, int64 [N]."""


class Decoder(Protocol):
    """What the engine drives: rows, each for one request at a time, with W hypotheses.

    Attributes:
        models: what is decoded; the first one's vocabulary and tokens are the requests'.
        num_rows: requests at once.
        width: W.
        prefix_capacity: most tokens that a row can have settled: frames, and answers before the present one.
        branch_capacity: most tokens of an answer that are read while it is written.
        source_capacity: most tokens of a source, of models with an encoder; else 0.
        device: where tokens go.
        observer: of hidden states; None where no search wants them.
        fusion: how the second half of the logits counts, see `FusedDecoder`; None where there is none.
        reused: int64 [num_rows], leading tokens of the newest frame that a row took over and did not read.
    """

    models: tuple[Any, ...]
    num_rows: int
    width: int
    prefix_capacity: int
    branch_capacity: int
    source_capacity: int
    device: torch.device
    observer: Observer | None
    fusion: Fusion | None
    reused: np.ndarray

    def read(
        self, rows: Sequence[int], frames: Sequence[Frame], asked: Sequence[RequestSoFar], spare: Sequence[int] = ()
    ) -> Tensor:
        """Settles a frame in each of n different rows; an answer begins behind it: logits [n, V] of its first token.

        Where it raises the rows are as they were, but for frames that restart; it may be called again.

        Args:
            spare: rows without a request, where what `rows` hold of earlier ones may be kept.
        """

    def step(self, tokens: Tensor) -> Tensor:
        """Reads one more token of each hypothesis of the first R rows: int64 [R, W] -> logits [R, W, V]."""

    def reorder(self, sources: Tensor) -> None:
        """In the first R rows hypothesis w of row r continues what was sources[r, w]: int64 [R, W]."""

    def move(self, source: int, target: int) -> None:
        """The request in row `source` continues in row `target`."""

    def keep(self, row: int, tokens: Sequence[int]) -> None:
        """The answer that a row is writing is complete, and so is its request; a text to come may begin with both.

        Args:
            tokens: of the answer, as many as it has or fewer.
        """

    def leave(self, rows: Sequence[int]) -> None:
        """The answers that these rows are writing are complete."""

    def abandon(self, rows: Sequence[int]) -> None:
        """The requests in these rows are dropped, perhaps before it is known that all that they have read is finite."""

    def wipe(self, rows: Sequence[int]) -> None:
        """Overwrites keys and values that are not finite, which would spoil what is read there later."""


class CachedDecoder:
    """Decodes requests, W hypotheses of each, without ever reading a token twice.

    It has rows, each for one request at a time, with its own write position: requests come (`read`) and go
    (`leave`) while others go on. A row's slots hold first what is settled, its frames and the answers between them: the
    one copy that all its hypotheses see. Behind it stand the tokens of the present answer, those of all hypotheses
    side by side, W a step; a mask says which of them a hypothesis descends from. Reordering hypotheses changes
    the mask alone: no key and no value is ever moved. Memory in bytes, for values of b bytes:

        2 b L H rows (prefix_capacity + W branch_capacity + source_capacity)

    The source of an encoder-decoder is encoded when its row is entered, see `Sources`.

    A frame without a prefix that begins as what was read in some row, with its answer, is read from there on: keys and
    values are copied, so the model's weights must not change (`PrefixCache`).

    With a recorder a step's tensors lie where they lay in the step before, and its numbers of rows and slots are
    rounded up, so that it can be replayed (`RecordedSteps`). An observer wants hidden states, which are not kept there.

    Args:
        model: a `Backbone`, or what has its `embed`, `around`, `layers`, `finish` and `head`; each layer gets a cache
            as its `attend`.
        num_rows, width, prefix_capacity, branch_capacity, source_capacity: see `Decoder`.
        observer: of hidden states.
        record: records steps; None: each is taken operator by operator.

    Raises:
        UserError: the caches do not fit into the device's memory; at the first `read`: a layer never calls `attend`.
    """

    fusion: Fusion | None = None

    def __init__(
        self,
        model: Any,
        num_rows: int,
        width: int,
        prefix_capacity: int,
        branch_capacity: int,
        observer: Observer | None = None,
        source_capacity: int = 0,
        record: Recorder | None = None,
    ) -> None:
        self.model, self.models = model, (model,)
        self.num_rows = num_rows
        self.width = width
        self.prefix_capacity, self.branch_capacity = prefix_capacity, branch_capacity
        self.source_capacity = source_capacity
        self.capacity = prefix_capacity + width * branch_capacity
        self.device: torch.device = next(model.parameters()).device
        if self.device.type != "cpu" or record is not None:
            self.capacity = -(-self.capacity // 8) * 8  # else the fused kernels copy a mask of rows that lie so
        self.observer = observer
        self.windows = windows_of(getattr(model, "config", None))
        self.has_window = self.windows != (None,)
        self.has_bias = False
        self.flash: Flash | None = None
        self.caches = self._new_caches()
        self.sources = Sources(model, num_rows, source_capacity) if hasattr(model, "encode") else None
        # Of each row, on the host: nothing here waits for the device.
        self.prefixes = np.zeros(num_rows, dtype=np.int64)  # leading tokens that all its tokens see
        self.prefix_lengths = np.zeros(num_rows, dtype=np.int64)  # what is settled
        self.reused = np.zeros(num_rows, dtype=np.int64)
        self.branch_lengths = np.zeros(num_rows, dtype=np.int64)  # tokens of the present answer
        self.live = np.zeros(num_rows, dtype=np.int64)  # 1 where an answer is being written
        self.last_inputs: dict[str, np.ndarray] = {}  # name -> [rows, ..]: of the last settled token
        self.strides: dict[str, np.ndarray] = {}  # name -> [rows, ..]
        self.reader = 0  # number of the adapter that reads
        self.prefix_cache = PrefixCache(num_rows)
        self._mask: Tensor | None = None  # [rows, W, capacity]: 0 for what a hypothesis sees, -inf elsewhere
        self._pointers: Pointers | None = None
        self._steps: RecordedSteps | None = None
        self._recorded_pointers: dict[int, Pointers] = {}  # by R
        if record is not None and observer is None and self.caches:
            self._steps = RecordedSteps(record, num_rows, self.capacity, width, self.device)

    def read(
        self,
        rows: Sequence[int],
        frames: Sequence[Frame],
        asked: Sequence[RequestSoFar] = (),
        spare: Sequence[int] = (),
    ) -> Tensor:
        """See `Decoder.read`.

        Args:
            rows: n different ones.
            frames: n, of any lengths. One that is no restart stands behind what its row has already.
            asked: not looked at.
            spare: other rows are left alone.
        """
        with self._undone(rows):
            texts = self._texts(rows, frames)
            turns = self._turns(rows, frames, texts)
            if len(turns) > 1:
                found: dict[int, Tensor] = {}
                for turn in turns:
                    some = [rows[number] for number in turn]
                    found |= zip(some, self.read(some, [frames[number] for number in turn], (), spare), strict=True)
                return torch.stack([found[row] for row in rows])
            index = np.asarray(rows)
            new = [row for row, frame in zip(rows, frames, strict=True) if frame.restart]
            self.prefixes[new] = [frame.prefix for frame in frames if frame.restart]
            self.prefix_lengths[new] = 0
            frames = self._rests(new, rows, frames, texts, spare)
            if self.observer is not None and new:
                self.observer.clear(new)
            where = Where(index, self.prefix_lengths[index], self.prefixes[index])
            reading = read_packed(frames, where, self.device, self.windows, self.flash)
            hidden = self.model.embed(reading.tokens, **reading.inputs)  # [1, T, H]
            around = wraps_of(self.model, reading.inputs, reading.key_positions if self.has_bias else None)
            crosses: Sequence[Callable[[Attend], Any]] = [identity] * len(self.caches)
            if self.sources is not None:
                crosses = self.sources.read(index, [frame.source for frame in frames], reading.columns)
            for layer, cache, cross in zip(self.model.layers, self.caches, crosses, strict=True):
                hidden = layer(hidden, cross(around(reading.attend(cache))))
            if self._mask is None:
                self._check_written()
            if self.observer is not None:
                self.observer.settle(self.model.finish(hidden), reading.places)
            states = self.model.finish(hidden[reading.last])  # [n, H]
            logits = self.model.head(states)  # [n, V]

            self._remember(index, frames)
        # From here on nothing fails.
        self.prefix_lengths[index] += [len(frame.tokens) for frame in frames]
        self.branch_lengths[index] = 0
        self.live[index] = 1
        self._pointers = None
        if texts:
            self.prefix_cache.read(texts, rows, states.isfinite().flatten(1).all(1))
        self._see_settled(index)
        return logits

    def step(self, tokens: Tensor) -> Tensor:
        """See `Decoder.step`; logits of rows that write no answer mean nothing."""
        steps = self._steps
        num_rows = tokens.size(0) if steps is None else steps.rows(tokens.size(0))
        if self._pointers is None or self._pointers.num_rows != num_rows:
            self._pointers = self._point(num_rows)
        pointers = self._pointers
        lengths = self.prefix_lengths + self.width * (self.branch_lengths + 1)
        lengths = (lengths * self.live)[:num_rows]
        length = int(lengths.max())
        if steps is None:
            masked = self.width > 1 or self.has_window or bool((lengths < length).any())
            hidden = self._pass(tokens, pointers, length, masked)
            if self.observer is not None:
                self.observer.look(hidden)
            logits = self.model.head(hidden)
        else:
            steps.tokens[: tokens.size(0)].copy_(tokens)
            own, length = steps.tokens[:num_rows], steps.slots(length)
            logits = steps.take(
                num_rows,
                (length, pointers.source_length),
                lambda: self.model.head(self._pass(own, pointers, length, True)),
            )[: tokens.size(0)]
        self.branch_lengths += self.live
        return logits

    def _pass(self, tokens: Tensor, pointers: Pointers, length: int, masked: bool) -> Tensor:
        """The final hidden states of a step, which depend on nothing but the arguments and tensors on the device.

        Args:
            tokens: int64 [R, W].
            pointers: where they go; moved on to the next step.
            length: S.
            masked: whether some hypothesis does not see all of the first S slots.

        Returns:
            hidden [R, W, H]
        """
        num_rows = tokens.size(0)
        mask: Tensor | None = None
        if self._mask is not None:
            self._mask.view(-1).index_fill_(0, pointers.marks, 0.0)
            if masked:
                mask = self._mask[:num_rows, None, :, :length]  # [R, 1, W, S]
        masks = {window: pointers.within(window, mask, length) for window in self.windows}
        hidden = self.model.embed(tokens, **pointers.inputs)  # [R, W, H]
        key_positions = None
        if self.has_bias:
            assert pointers.key_positions is not None
            key_positions = pointers.key_positions[:, :length]
        around = wraps_of(self.model, pointers.inputs, key_positions)
        for layer, cache, cross in zip(self.model.layers, self.caches, pointers.crosses, strict=True):
            own = by_window(self.windows, partial(pointers.attend, cache, masks, length))
            hidden = layer(hidden, cross(around(own)))
        pointers.advance()
        return self.model.finish(hidden)  # type: ignore[no-any-return]

    def reorder(self, sources: Tensor) -> None:
        if self._mask is not None:
            num_rows = sources.size(0)
            rows = torch.arange(num_rows, device=self.device)[:, None]
            self._mask[:num_rows] = self._mask[rows, sources]

    def move(self, source: int, target: int) -> None:
        copies = [Copy(source, target, int(self.prefix_lengths[source] + self.width * self.branch_lengths[source]))]
        held = self.prefix_cache[target]
        copies += [] if held is None else [Copy(target, source, len(held.tokens))]
        self.prefix_cache.exchange(source, target)
        for cache in self.caches:
            cache.copy(copies)
        if self.sources is not None:
            self.sources.move(source, target)
        if self._mask is not None:
            self._mask[target] = self._mask[source]
        columns = (self.prefixes, self.prefix_lengths, self.branch_lengths, self.live)
        for column in (*columns, *self.last_inputs.values(), *self.strides.values()):
            column[[source, target]] = column[[target, source]]
        self.leave([source])

    def keep(self, row: int, tokens: Sequence[int]) -> None:
        own = self.prefix_cache[row]
        # Hypotheses that stand side by side are no text.
        if own is None or self.width > 1 or len(own.tokens) < self.prefix_lengths[row]:
            return
        # While others write, a row without a request is written to, too: behind what it holds.
        room = max(0, self.capacity - len(own.tokens) - 1)
        read = tokens[: min(int(self.branch_lengths[row]), room)]
        self.prefix_cache.extend(row, read, {name: stride[row] for name, stride in self.strides.items()})
        self.prefix_lengths[row] += len(read)

    def leave(self, rows: Sequence[int]) -> None:
        self.live[list(rows)] = 0
        self.branch_lengths[list(rows)] = 0
        self._pointers = None

    def abandon(self, rows: Sequence[int]) -> None:
        self.wipe([row for row in rows if self.prefix_cache[row] is None])

    def wipe(self, rows: Sequence[int]) -> None:
        for cache in self._all_caches if rows else ():
            cache.wipe(rows)
        self.prefix_cache.forget(rows)

    @property
    def num_bytes(self) -> int:
        """Of all keys and values."""
        return sum(cache.num_bytes for cache in self._all_caches)

    @property
    def _all_caches(self) -> list[KeyValueCache]:
        return self.caches if self.sources is None else [*self.caches, *self.sources.caches]

    def _new_caches(self) -> list[KeyValueCache]:
        """Those of the layers: at their full size where their attention says what its keys are (`key_shape`)."""
        dtype = next(parameter.dtype for parameter in self.model.parameters() if parameter.is_floating_point())
        # An encoder keeps nothing.
        parts = self.model.layers if hasattr(self.model, "encode") else self.model
        shapes = [module.key_shape for module in parts.modules() if hasattr(module, "key_shape")]
        likes = [torch.empty(shape, dtype=dtype, device=self.device) for shape in shapes]
        if len(likes) != len(self.model.layers):
            return [KeyValueCache(self.num_rows, self.capacity) for _ in self.model.layers]
        members = getattr(self.model, "members", [self.model])
        self.has_bias = bool(likes) and any(adds_bias(model, likes[0]) for model in members)
        self.flash = flash_for(self.device, dtype, max((like.size(-1) for like in likes), default=0))
        return new_caches(
            likes,
            self.num_rows,
            self.capacity,
            f"keys and values of {self.num_rows} prompts with {self.capacity} places each take {{size}} GB, more than "
            f"{self.device} has; lower batch_size, max_len or the number of hypotheses",
        )

    def _turns(self, rows: Sequence[int], frames: Sequence[Frame], texts: Mapping[int, CachedText]) -> list[list[int]]:
        """Which frames are read at once, and which before others; numbers of their places in `frames`."""
        numbers = range(len(frames))
        if self.has_bias and len(frames) > 1 and any(len(frame.tokens) > 1 for frame in frames):
            return [[number] for number in numbers]  # at once they would need a bias of each token to all frames' keys
        postponed = self.prefix_cache.postponed(texts)  # these begin as others do, which are read first
        first, later = ([number for number in numbers if (rows[number] in postponed) == late] for late in (False, True))
        return [first, later] if later else [first]

    def _texts(self, rows: Sequence[int], frames: Sequence[Frame]) -> dict[int, CachedText]:
        """Row -> the frame, of those that another may begin as, or go on from."""
        if self.sources is not None or self.observer is not None:  # more than its tokens belongs to what a row reads
            return {}
        return {
            row: CachedText.of(frame, self.reader)
            for row, frame in zip(rows, frames, strict=True)
            if frame.restart and frame.prefix == 0
        }

    def _rests(
        self,
        new: Sequence[int],
        rows: Sequence[int],
        frames: Sequence[Frame],
        texts: Mapping[int, CachedText],
        spare: Sequence[int],
    ) -> list[Frame]:
        """What is left to read of frames, in rows that now hold the rest; `new` are those that restart."""
        copies = self.prefix_cache.plan(new, texts, spare)
        moved = [copy for copy in copies if copy.source != copy.target]
        for cache in self.caches if moved else ():
            cache.copy(moved)
        for copy in copies:
            self.prefix_lengths[copy.target] = copy.length
        self.reused[new] = self.prefix_lengths[new]
        return [
            frame.part(int(self.prefix_lengths[row])) if row in texts else frame
            for row, frame in zip(rows, frames, strict=True)
        ]

    @contextmanager
    def _undone(self, rows: Sequence[int]) -> Iterator[None]:
        """What is settled in these rows inside, if it raises: it may have been a part of the frames."""
        before = self.prefix_lengths[list(rows)]
        try:
            yield
        except Exception:
            self.prefix_lengths[list(rows)] = before
            raise

    def _check_written(self) -> None:
        if missing := [number for number, cache in enumerate(self.caches) if not cache.num_bytes]:
            raise UserError(
                f"{named(self.model)} cannot generate: its layer {missing[0]} never calls 'attend', in which "
                f"generation keeps the tokens before; ftk-validate can score it"
            )

    def _remember(self, rows: np.ndarray, frames: Sequence[Frame]) -> None:
        """The inputs of the tokens to come follow from these."""
        for name, first in frames[0].stride.items():
            if name not in self.strides:
                shape = (self.num_rows, *first.shape)
                self.last_inputs[name], self.strides[name] = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
            self.last_inputs[name][rows] = [frame.inputs[name][..., -1] for frame in frames]
            self.strides[name][rows] = [frame.stride[name] for frame in frames]

    def _see_settled(self, rows: np.ndarray) -> None:
        """From now on the hypotheses of these rows see what is settled there, and nothing else."""
        if not self.caches:
            return
        if self._mask is None:
            shape = (self.num_rows, self.width, self.capacity)
            self._mask = torch.full(shape, float("-inf"), dtype=self.caches[0].dtype, device=self.device)
            self._mask[:, :, 0] = 0.0  # rows that were never entered must see something, or they hold NaN
        unseen = np.arange(self.capacity) >= self.prefix_lengths[rows][:, None]  # [n, capacity]
        lines = torch.zeros(unseen.shape, dtype=self._mask.dtype, device=self.device)
        self._mask[self._to_device(rows)] = lines.masked_fill_(self._to_device(unseen), float("-inf"))[:, None]

    def _point(self, num_rows: int) -> Pointers:
        """Where the next step reads and writes; it is kept up on the device until rows come or go."""
        width, hypotheses = self.width, np.arange(self.width)
        branch, live = self.branch_lengths[:num_rows], self.live[:num_rows]
        slots = (self.prefix_lengths[:num_rows] + width * branch)[:, None] + hypotheses  # [R, W]
        marks = (np.arange(num_rows)[:, None] * width + hypotheses) * self.capacity + slots
        places = self.caches[0].step_index(self._to_device(slots)) if self.caches else None
        steps = np.repeat(live[:, None], width, axis=1)  # [R, W]
        num_heads = 1 if places is None else places.numel() // slots.size
        key_positions = None
        if self.has_window or self.has_bias:
            settled, all_slots = self.prefix_lengths[:num_rows, None], np.arange(self.capacity)
            behind = settled + (all_slots - settled) // width  # [R, capacity]
            key_positions = self._to_device(np.where(all_slots < settled, all_slots, behind))
        inputs, strides = {}, {}
        for name, stride in self.strides.items():
            shape = (num_rows, *[1] * (stride.ndim - 1))
            own = stride[:num_rows] * live.reshape(shape)
            first = self.last_inputs[name][:num_rows] * live.reshape(shape) + own * (branch + 1).reshape(shape)
            inputs[name], strides[name] = (
                self._to_device(np.repeat(array[..., None], width, axis=-1)) for array in (first, own)
            )
        crosses, source_length = self._crosses(num_rows, live)
        made = Pointers(
            num_rows,
            places,
            self._to_device(marks.flatten()),
            inputs,
            self._to_device(np.repeat(steps[:, None] * width, num_heads, axis=1).flatten()),
            self._to_device(steps.flatten() * width),
            strides,
            key_positions,
            crosses,
            source_length,
        )
        if self._steps is None:
            return made
        kept = self._recorded_pointers.setdefault(num_rows, made)
        if kept is not made:
            kept.take(made)
        return kept

    def _crosses(self, num_rows: int, live: np.ndarray) -> tuple[Sequence[Callable[[Attend], Any]], int]:
        """For each layer what puts the attention to the source next to its own, in steps of the first rows; S of it."""
        if self.sources is None:
            return [identity] * len(self.caches), 0
        return self.sources.step(num_rows, live, in_place=self._steps is not None)

    def _to_device(self, array: np.ndarray) -> Tensor:
        return to_device(array, self.device)
