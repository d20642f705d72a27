"""Where do the keys and values of many rows of different lengths lie, and which of them may a query see?

Layout: one rectangle [row capacity, heads, slot capacity, dim] a layer. The rows of a batch are its first `num_rows`; row r
holds the key of absolute position p in slot p - base[r]. Invariants, from which everything else follows:

- A query at position p sees the slots of its own row up to p (and, in a sliding layer, none further back than the window).
  What lies behind a row's length is never seen, so forgetting tokens is setting the length back: no copy.
- A row is only ever overwritten as a whole (when another moves in). Nothing of one row can reach another, not even as a
  NaN multiplied by a zero weight.
- Sliding layers forget: slots nobody can see any more are compacted away, so that memory is bounded by the window.

Layers that see equally far share one `Family`, which works out slots and masks once a forward instead of once a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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


class Family:
    """Positions, slots and masks of the layers of one batch that see equally far (`window` positions, None: all)."""

    def __init__(self, window: int | None) -> None:
        self.window = window
        self.layers: list[RaggedKV] = []
        self.bases: list[int] = []
        self.capacity = 0
        self.row_capacity = 0
        # The forward under way. `starts`: slot of each row's first fed token; `end`: behind the last slot in use.
        self.num_rows = 0
        self.width = 0
        self.end = 0
        self.starts: list[int] = []
        self.uniform_start: int | None = None
        self._slots: mx.array | None = None
        self._row_index: mx.array | None = None
        self._masks: dict[tuple[int | None, bool], Any] = {}

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
        if num_rows != self.num_rows:
            self._row_index = None
        self.num_rows, self.width, self.starts, self.end = num_rows, width, starts, end
        first = starts[0]
        self.uniform_start = first if starts.count(first) == num_rows else None
        self._slots = None
        self._masks.clear()

    def slot_index(self, num_heads: int) -> tuple[mx.array, mx.array, mx.array]:
        """Index arrays (row, head, slot) that address what this forward writes."""
        if self._slots is None:
            slots = mx.array(self.starts)[:, None]
            if self.width > 1:
                slots = slots + mx.arange(self.width)[None]
            self._slots = slots[:, None, :]
        if self._row_index is None:
            self._row_index = mx.arange(self.num_rows)[:, None, None]
        return self._row_index, mx.arange(num_heads)[None, :, None], self._slots

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
        if self.window is not None:
            self._compact(lengths)
        # Rows of the batch beyond those of this forward keep their bases: their slots only need to fit as they are.
        needed = max(length - base for length, base in zip(lengths, self.bases, strict=False)) + width
        if needed > self.capacity:
            self.set_capacity(round_up(needed))

    def _compact(self, lengths: Sequence[int]) -> None:
        assert self.window is not None
        drops = [
            max(0, length - self.window + 1 - ROLLBACK_SLACK - base) for length, base in zip(lengths, self.bases, strict=False)
        ]
        if max(drops) < SLOT_STEP // 2:
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

    def remove(self, row: int) -> None:
        """The last row moves into the hole."""
        last = len(self.bases) - 1
        if row != last:
            for layer in self.layers:
                layer.move_row(last, row)
            self.bases[row] = self.bases[last]
        self.bases.pop()

    def swap(self, one: int, other: int) -> None:
        for layer in self.layers:
            layer.swap_rows(one, other)
        self.bases[one], self.bases[other] = self.bases[other], self.bases[one]

    def can_truncate(self, row: int, length: int) -> bool:
        """Whether everything a query at `length` may see is still there."""
        base = self.bases[row]
        return base == 0 or (self.window is not None and length - self.window + 1 >= base)


class RaggedKV:
    """One attention layer's keys and values: stands in for mlx-lm's KVCache and RotatingKVCache in unmodified models."""

    def __init__(self, family: Family) -> None:
        self.family = family
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self.offset: int | mx.array = 0
        """Absolute position of what is fed next: an int when equal for all rows, else an array [rows]. Set by the batch."""
        self.offset_after: int | mx.array = 0
        family.layers.append(self)

    # -- what models call ---------------------------------------------------------------------------------------------

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        assert self.family.width == N
        return self.family.mask(window_size, return_array)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        family = self.family
        if self.keys is None or self.values is None:
            rows, heads = family.row_capacity, keys.shape[1]
            self.keys = mx.zeros((rows, heads, family.capacity, keys.shape[3]), keys.dtype)
            self.values = mx.zeros((rows, values.shape[1], family.capacity, values.shape[3]), values.dtype)
        start, end, num_rows = family.uniform_start, family.end, family.num_rows
        if start is not None:
            self.keys[:num_rows, :, start:end] = keys
            self.values[:num_rows, :, start:end] = values
        else:
            self.keys[family.slot_index(keys.shape[1])] = keys
            self.values[family.slot_index(values.shape[1])] = values
        self.offset = self.offset_after
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        assert self.keys is not None
        assert self.values is not None
        family = self.family
        return self.keys[: family.num_rows, :, : family.end], self.values[: family.num_rows, :, : family.end]

    @property
    def state(self) -> tuple[mx.array, mx.array]:
        return self.keys_and_values()

    def size(self) -> int:
        return self.family.end

    def empty(self) -> bool:
        return self.keys is None

    @property
    def nbytes(self) -> int:
        return 0 if self.keys is None or self.values is None else self.keys.nbytes + self.values.nbytes

    # -- memory and rows, called by the family ------------------------------------------------------------------------

    def resize_slots(self, capacity: int) -> None:
        if self.keys is not None and self.values is not None:
            self.keys, self.values = _resized(self.keys, 2, capacity), _resized(self.values, 2, capacity)

    def resize_rows(self, row_capacity: int) -> None:
        if self.keys is not None and self.values is not None:
            self.keys, self.values = _resized(self.keys, 0, row_capacity), _resized(self.values, 0, row_capacity)

    def clear_rows(self, first: int, num_rows: int) -> None:
        """New rows may not inherit what an earlier one left: a stale NaN would survive a zero attention weight."""
        if self.keys is not None and self.values is not None:
            self.keys[first : first + num_rows] = mx.zeros((), self.keys.dtype)
            self.values[first : first + num_rows] = mx.zeros((), self.values.dtype)

    def copy_rows(self, source: RaggedKV, rows: Sequence[int], first: int) -> None:
        if source.keys is None or source.values is None:
            self.clear_rows(first, len(rows))
            return
        if self.keys is None or self.values is None:
            self.keys = mx.zeros(self._shape_like(source.keys), source.keys.dtype)
            self.values = mx.zeros(self._shape_like(source.values), source.values.dtype)
        index = mx.array(list(rows))
        capacity = self.family.capacity
        self.keys[first : first + len(rows)] = _resized(source.keys[index], 2, capacity)
        self.values[first : first + len(rows)] = _resized(source.values[index], 2, capacity)

    def _shape_like(self, array: mx.array) -> tuple[int, int, int, int]:
        return (self.family.row_capacity, array.shape[1], self.family.capacity, array.shape[3])

    def move_row(self, source: int, target: int) -> None:
        if self.keys is not None and self.values is not None:
            index = mx.array([source])  # a gather, not a slice: a view of the same buffer would force a copy of it all
            self.keys[target : target + 1] = self.keys[index]
            self.values[target : target + 1] = self.values[index]

    def swap_rows(self, one: int, other: int) -> None:
        if self.keys is not None and self.values is not None:
            index, targets = mx.array([other, one]), mx.array([one, other])
            self.keys[targets] = self.keys[index]
            self.values[targets] = self.values[index]

    def drop_front(self, drops: Sequence[int], capacity: int) -> None:
        """Shift each row's slots towards the front by its drop. What comes in at the back is behind the row's length."""
        if self.keys is None or self.values is None or not any(drops):
            return
        slots = mx.minimum(mx.arange(capacity)[None] + mx.array(list(drops))[:, None], capacity - 1)[:, None, :, None]
        self.keys = mx.take_along_axis(self.keys, slots, axis=2)
        self.values = mx.take_along_axis(self.values, slots, axis=2)


def _resized(array: mx.array, axis: int, size: int) -> mx.array:
    present = array.shape[axis]
    if size == present:
        return array
    if size < present:
        # A real copy, so that the larger buffer is given back: a view of the first rows would keep it.
        return array[mx.arange(size)] if axis == 0 else mx.contiguous(array[:, :, :size])
    shape = list(array.shape)
    shape[axis] = size - present
    return mx.concatenate([array, mx.zeros(shape, array.dtype)], axis=axis)
