"""Which slots of the ragged cache do rows use, which may a query see, and how much room is there?

The layers of one batch that see equally far share one `Family`, which works this out once a forward instead of once a layer.
The layout and its invariants stand in `ragged_cache`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

import mlx.core as mx

SLOT_STEP = 256
"""Slots are added in steps of this many: one copy every so many tokens, and few different shapes."""

ROLLBACK_SLACK = 64
"""Positions behind the window that a sliding layer keeps at compaction, so that truncation by up to as many stays possible."""


def round_up(slots: int) -> int:
    return -(-slots // SLOT_STEP) * SLOT_STEP


def grown_row_capacity(needed: int, present: int) -> int:
    """Half again as many rows, so that a stream of joining rows copies each old row a bounded number of times."""
    return max(needed, min(present + (present + 1) // 2, needed + 8))


def is_wasteful(needed: int, present: int) -> bool:
    """Whether giving memory back is worth a copy: more than half lies idle (and a little more, against flapping)."""
    return present >= 2 * needed + SLOT_STEP


class Layer(Protocol):
    """What a family asks of each of its layers."""

    def resize_slots(self, capacity: int) -> None: ...

    def resize_rows(self, row_capacity: int) -> None: ...

    def clear_rows(self, first: int, num_rows: int) -> None: ...

    def copy_rows(self, source: Any, rows: Sequence[int], first: int) -> None: ...

    def drop_front(self, drops: Sequence[int], capacity: int) -> None: ...


class Family:
    """Positions, slots and masks of the layers of one batch that see equally far (`window` positions, None: all)."""

    def __init__(self, window: int | None) -> None:
        self.window = window
        self._layers: list[weakref.ref[Layer]] = []
        self.bases: list[int] = []
        self.capacity = 0
        self.row_capacity = 0
        # The forward under way. `starts`: slot of each row's first fed token; `end`: behind the last slot in use.
        self.num_rows = 0
        self.width = 0
        self.end = 0
        self.starts: list[int] = []
        self.uniform_start: int | None = None
        self._indices: dict[Hashable, mx.array] = {}
        self._masks: dict[tuple[int | None, bool], Any] = {}

    def join(self, layer: Layer) -> None:
        """Weakly: a batch's memory must go with the batch, not wait for a garbage collection to find a cycle."""
        self._layers.append(weakref.ref(layer))

    @property
    def layers(self) -> list[Layer]:
        return [layer for reference in self._layers if (layer := reference()) is not None]

    # -- a forward ----------------------------------------------------------------------------------------------------

    def begin(self, lengths: Sequence[int], width: int) -> None:
        """The first len(lengths) rows will feed `width` tokens (some of them perhaps padding) at positions `lengths`."""
        num_rows = len(lengths)
        starts = (
            list(lengths) if self.window is None else [length - base for length, base in zip(lengths, self.bases, strict=False)]
        )
        end = max(starts) + width
        if end > self.capacity:
            self._make_room(lengths, width)
            starts = [length - base for length, base in zip(lengths, self.bases, strict=False)]
            end = max(starts) + width
        self.num_rows, self.width, self.starts, self.end = num_rows, width, starts, end
        first = starts[0]
        self.uniform_start = first if starts.count(first) == num_rows else None
        self._indices.clear()
        self._masks.clear()

    def write(self, held: mx.array, new: mx.array) -> mx.array:
        """`held` [row capacity, heads, slots, dim] with `new` [rows, heads, width, dim] in this forward's slots."""
        start = self.uniform_start
        if start is not None:
            held[: self.num_rows, :, start : self.end] = new
            return held
        heads, dim = new.shape[1], new.shape[3]
        if self.width == 1 and self.num_rows == self.row_capacity:
            slots = self._index(("slots", heads, dim), lambda: mx.broadcast_to(self._starts()[..., None], new.shape))
            return mx.put_along_axis(held, slots, new, axis=2)  # half the cost of the general form below
        rows = self._index("rows", lambda: mx.arange(self.num_rows)[:, None, None])
        head_index = self._index(("heads", heads), lambda: mx.arange(heads)[None, :, None])
        slots = self._index("slots", lambda: self._starts() + mx.arange(self.width))
        held[rows, head_index, slots] = new
        return held

    def _starts(self) -> mx.array:
        return mx.array(self.starts)[:, None, None]

    def _index(self, key: Hashable, make: Callable[[], mx.array]) -> mx.array:
        """Made at most once a forward, for all layers."""
        if key not in self._indices:
            self._indices[key] = make()
        return self._indices[key]

    def mask(self, window: int | None, return_array: bool) -> Any:
        """What the queries of this forward may see: None (all slots up to `end`), "causal", or a boolean array.

        `window` is what the model asks for; a layer never sees further than its family's own window.
        """
        if self.window is not None:
            window = self.window if window is None else min(window, self.window)
        key = (window, return_array)
        if key not in self._masks:
            self._masks[key] = self._make_mask(window, return_array)
        return self._masks[key]

    def _make_mask(self, window: int | None, return_array: bool) -> Any:
        if window is not None and window >= self.end:
            window = None
        if self.uniform_start is not None and window is None:
            if self.width == 1:
                return None
            if not return_array:
                return "causal"
        keys = mx.arange(self.end)
        if self.uniform_start is not None:
            queries = mx.arange(self.uniform_start, self.end)[:, None]
        else:
            queries = mx.array(self.starts)[:, None, None, None]
            if self.width > 1:
                queries = queries + mx.arange(self.width)[:, None]
        mask = keys <= queries
        if window is not None:
            mask = mask & (keys > queries - window)
        return mask

    # -- memory -------------------------------------------------------------------------------------------------------

    def _make_room(self, lengths: Sequence[int], width: int) -> None:
        """Room for a forward of `width` at `lengths`: by compaction where a window leaves dead slots, else by growing."""
        self.compact(lengths)
        # Rows of the batch beyond those of this forward keep their bases: their slots only need to fit as they are.
        needed = max(length - base for length, base in zip(lengths, self.bases, strict=False)) + width
        if needed > self.capacity:
            self.set_capacity(round_up(needed))

    def compact(self, lengths: Sequence[int], *, slack: int = ROLLBACK_SLACK, least: int = SLOT_STEP // 2) -> None:
        """Drop the slots that rows of these lengths see no more but for `slack`, if one row can drop `least`."""
        if self.window is None:
            return
        drops = [max(0, length - self.window + 1 - slack - base) for length, base in zip(lengths, self.bases, strict=False)]
        if max(drops) < least:
            return
        drops += [0] * (self.row_capacity - len(drops))
        for layer in self.layers:
            layer.drop_front(drops, self.capacity)
        for row in range(len(self.bases)):
            self.bases[row] += drops[row]

    def set_capacity(self, capacity: int) -> None:
        for layer in self.layers:
            layer.resize_slots(capacity)
        self.capacity = capacity

    def set_row_capacity(self, row_capacity: int) -> None:
        for layer in self.layers:
            layer.resize_rows(row_capacity)
        self.row_capacity = row_capacity

    def give_back(self, lengths: Sequence[int]) -> None:
        """Shrink to what `lengths` (all rows of the batch) need, if that is far less than what is held."""
        needed = round_up(max(length - base for length, base in zip(lengths, self.bases, strict=True)) + 1)
        if is_wasteful(needed, self.capacity):
            self.set_capacity(needed)
        if self.row_capacity > 4 and self.row_capacity >= 3 * len(lengths):
            self.set_row_capacity(len(lengths))

    # -- rows ---------------------------------------------------------------------------------------------------------

    def open_restored(self, length: int) -> None:
        """In a new family: a first row of `length` positions, of which those are held that a later one may see."""
        base = 0 if self.window is None else max(0, length - self.window + 1)
        self.append_empty(1)
        self.bases[0] = base
        self.set_capacity(round_up(length - base + 1))

    def append_empty(self, num_rows: int) -> None:
        present = len(self.bases)
        if present + num_rows > self.row_capacity:
            wanted = present + num_rows
            self.set_row_capacity(wanted if present == 0 else grown_row_capacity(wanted, self.row_capacity))
        for layer in self.layers:
            layer.clear_rows(present, num_rows)
        self.bases += [0] * num_rows

    def append_from(self, other: Family, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Move `rows` of another batch's family to the end of this one. `lengths`: their absolute lengths."""
        present = len(self.bases)
        needed = max(length - other.bases[row] for row, length in zip(rows, lengths, strict=True)) + 1
        if needed > self.capacity:
            self.set_capacity(round_up(needed))
        if present + len(rows) > self.row_capacity:
            self.set_row_capacity(grown_row_capacity(present + len(rows), self.row_capacity))
        for layer, source in zip(self.layers, other.layers, strict=True):
            layer.copy_rows(source, rows, present)
        self.bases += [other.bases[row] for row in rows]

    def relocate(self, sources: Sequence[int], targets: Sequence[int], num_left: int) -> None:
        """Row sources[i] has moved to targets[i]; `num_left` rows remain. (The layers' contents are moved by the batch.)"""
        moved = [self.bases[source] for source in sources]
        for target, base in zip(targets, moved, strict=True):
            self.bases[target] = base
        del self.bases[num_left:]

    def can_truncate(self, row: int, length: int) -> bool:
        """Whether everything a query at `length` may see is still there."""
        base = self.bases[row]
        return base == 0 or (self.window is not None and length - self.window + 1 >= base)
