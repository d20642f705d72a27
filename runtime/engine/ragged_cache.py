"""Where do the keys and values of many rows of different lengths lie, and which of them may a query see?

Layout: one rectangle [row capacity, heads, slot capacity, dim] a layer. The rows of a batch are its first `num_rows`; row r
holds the key of absolute position p in slot p - base[r]. Invariants, from which everything else follows:

- A query at position p sees the slots of its own row up to p (and, in a sliding layer, none further back than the window).
  What lies behind a row's length is never seen, so forgetting tokens is setting the length back: no copy.
- A row is only ever overwritten as a whole (when another moves in). Nothing of one row can reach another, not even as a
  NaN multiplied by a zero weight.
- Sliding layers forget: slots nobody can see any more are compacted away, so that memory is bounded by the window.

Slots, masks and room are worked out by `slots`, once for all layers that see equally far.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from runtime.engine.slots import Family


class RaggedKV:
    """One attention layer's keys and values: stands in for mlx-lm's KVCache and RotatingKVCache in unmodified models."""

    def __init__(self, family: Family) -> None:
        self.family = family
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self.offset: int | mx.array = 0
        """Absolute position of what is fed next: an int when equal for all rows, else an array [rows]. Set by the batch."""
        self.offset_after: int | mx.array = 0
        family.join(self)

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
        self.keys = family.write(self.keys, keys)
        self.values = family.write(self.values, values)
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

    def positions(self, row: int, name: str, first: int, end: int) -> mx.array | None:
        """Keys or values [heads, end - first, dim] of a row's absolute positions, lazy; None when some are no longer kept."""
        held = self.keys if name == "keys" else self.values
        base = self.family.bases[row]
        return None if held is None or first < base else held[row, :, first - base : end - base]

    def fill(self, keys: Sequence[mx.array], values: Sequence[mx.array]) -> None:
        """The first and only row, of pieces [heads, positions, dim]. Its other slots are zeros."""
        self.keys, self.values = self._filled(keys), self._filled(values)

    def _filled(self, pieces: Sequence[mx.array]) -> mx.array:
        heads, _, dim = pieces[0].shape
        num_free = self.family.capacity - sum(piece.shape[1] for piece in pieces)
        return mx.concatenate([*pieces, mx.zeros((heads, num_free, dim), pieces[0].dtype)], axis=1)[None]

    def gathered_rows(self, rows: Sequence[int]) -> list[mx.array]:
        """Copies of these rows, lazy."""
        index = mx.array(list(rows))
        return [] if self.keys is None or self.values is None else [self.keys[index], self.values[index]]

    def overwrite_rows(self, rows: Sequence[int], contents: Sequence[mx.array]) -> None:
        """`contents`: what `gathered_rows` gave, evaluated: while the gather is under way, a write would copy the whole cache."""
        if self.keys is not None and self.values is not None:
            index = mx.array(list(rows))
            self.keys[index], self.values[index] = contents

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
