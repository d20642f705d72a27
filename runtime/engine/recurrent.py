"""How do rows with recurrent or convolution state live in one batch?

Such a state is a few arrays of fixed size a row, replaced (never updated in place) by each forward. Rows join and leave by
concatenation and gather. There is no way back in time except to an earlier copy, so going back means restoring the state
from before the last step and feeding again what is to stay.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

Snapshot = tuple[mx.array | None, ...]
"""The state arrays of all rows of a batch at one moment. Holding one costs the memory of one more state, no copy."""


class RaggedState(ArraysCache):  # type: ignore[misc]
    """One layer's recurrent state: stands in for mlx-lm's ArraysCache (some models insist on the class)."""

    def __init__(self, num_arrays: int) -> None:
        super().__init__(num_arrays)
        self.cache: list[mx.array | None]
        self._resting: list[mx.array | None] = []

    def begin(self, num_rows: int, total_rows: int, widths: Sequence[int] | None) -> None:
        """The first `num_rows` of `total_rows` rows take part. `widths`: real tokens a row, None when there is no padding."""
        if num_rows < total_rows:
            self._resting = [None if array is None else array[num_rows:] for array in self.cache]
            self.cache = [None if array is None else array[:num_rows] for array in self.cache]
        self.lengths = None if widths is None else mx.array(list(widths))

    def finish(self, num_rows: int, total_rows: int) -> None:
        self.lengths = None
        if num_rows < total_rows:
            self.cache = [
                _joined(active, num_rows, resting, total_rows - num_rows)
                for active, resting in zip(self.cache, self._resting, strict=True)
            ]
            self._resting = []

    def append_empty(self, num_rows: int, present: int) -> None:
        self.cache = [_joined(array, present, None, num_rows) for array in self.cache]

    def append_from(self, other: RaggedState, rows: Sequence[int], present: int) -> None:
        index = mx.array(list(rows))
        moved = [None if array is None else array[index] for array in other.cache]
        self.cache = [_joined(array, present, more, len(rows)) for array, more in zip(self.cache, moved, strict=True)]

    def permute(self, order: Sequence[int]) -> None:
        """Row i becomes what row order[i] was; rows not in `order` are gone."""
        if not order:
            self.cache = [None] * len(self.cache)
            return
        index = mx.array(list(order))
        self.cache = [None if array is None else array[index] for array in self.cache]

    def snapshot(self) -> Snapshot:
        return tuple(self.cache)

    def of_row(self, row: int, snapshot: Snapshot | None = None) -> Snapshot:
        """The arrays [1, ...] of a row, now or in an earlier snapshot; lazy."""
        return tuple(None if array is None else array[row : row + 1] for array in snapshot or self.cache)

    def restore(self, row: int, snapshot: Snapshot, source: int) -> None:
        """Row `row` becomes what row `source` was when `snapshot` was taken. A missing array then meant all zeros."""
        restored = []
        for array, earlier in zip(self.cache, snapshot, strict=True):
            if array is not None:
                old = mx.zeros_like(array[:1]) if earlier is None else earlier[source : source + 1]
                array = mx.concatenate([array[:row], old, array[row + 1 :]])
            restored.append(array)
        self.cache = restored


def _joined(first: mx.array | None, num_first: int, second: mx.array | None, num_second: int) -> mx.array | None:
    """Rows one after the other. A state that does not exist yet is all zeros, as models themselves begin."""
    if num_second == 0:
        return first
    if num_first == 0:
        return second
    example = first if first is not None else second
    if example is None:
        return None
    shape = example.shape[1:]
    first = mx.zeros((num_first, *shape), example.dtype) if first is None else first
    second = mx.zeros((num_second, *shape), example.dtype) if second is None else second
    return mx.concatenate([first, second])
