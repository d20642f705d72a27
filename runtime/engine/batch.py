"""How do rows share a forward? A batch is some rows, their caches, and the one call of the model.

`RaggedBatch` holds many rows of different lengths in stand-in caches; the other kind is `own_batch`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import mlx.core as mx

from runtime.engine.layers import Kind, Layers
from runtime.engine.ragged_cache import RaggedKV
from runtime.engine.recurrent import RaggedState, Snapshot
from runtime.engine.rows import Row


class Batch(Protocol):
    rows: list[Row]

    def begin_step(self, rows: Sequence[Row]) -> None:
        """A new step of `rows` begins: of them, `rewind` can undo only what comes after this."""
        ...

    def forward(self, model: Any, num_rows: int, tokens: mx.array, widths: Sequence[int] | None) -> mx.array:
        """Feed tokens [num_rows, width] to the first `num_rows` rows; gives logits [num_rows, width, vocabulary], lazy.

        widths: how many of each row's tokens are real, the rest is padding on the right; None when all are.
        After an exception the rows are as they were before.
        """
        ...

    def bring_forward(self, rows: Sequence[Row]) -> bool:
        """Make exactly these rows the first ones, in whatever order. True when the order changed."""
        ...

    def remove(self, rows: Sequence[Row]) -> None: ...

    def give_back(self) -> None:
        """Return memory that rows which left no longer need."""
        ...

    def rewind(self, row: Row, length: int) -> list[int] | None:
        """Go back so that at most `length` tokens are cached. Gives the tokens owed to reach `length`, None if impossible."""
        ...

    def arrays(self) -> list[mx.array]:
        """Everything the caches hold, to be evaluated."""
        ...

    def fence(self) -> mx.array:
        """Something small that is computed only after the caches are: waiting for it holds no cache back from reuse."""
        ...

    def nbytes(self) -> int: ...


class _Stood(NamedTuple):
    """Where a row's recurrent layers stood before its last forward: their states of that moment, its place in them, its length."""

    snapshots: list[Snapshot]
    place: int
    length: int

    def alone(self) -> _Stood:
        """A copy of the one row's part, so that a row at rest does not keep everybody's state."""
        if all(array is None or array.shape[0] == 1 for snapshot in self.snapshots for array in snapshot):
            return self
        place = mx.array([self.place])
        copies: list[Snapshot] = [tuple(None if array is None else array[place] for array in one) for one in self.snapshots]
        mx.async_eval([array for one in copies for array in one if array is not None])
        return _Stood(copies, 0, self.length)


class RaggedBatch:
    def __init__(self, kinds: Sequence[Kind]) -> None:
        self.rows: list[Row] = []
        self._layers = Layers(kinds)
        self._families = list(self._layers.families.values())
        self._attention = self._layers.attention
        self._recurrent = self._layers.recurrent
        self._stood: dict[Row, _Stood] = {}

    # -- forward ------------------------------------------------------------------------------------------------------

    def begin_step(self, rows: Sequence[Row]) -> None:
        if self._stood:
            # A row at rest may have a verify block under way, of which it has yet to be told how much stands.
            feeding = set(rows)
            self._stood = {row: stood.alone() for row, stood in self._stood.items() if row not in feeding}

    def forward(self, model: Any, num_rows: int, tokens: mx.array, widths: Sequence[int] | None) -> mx.array:
        rows = self.rows[:num_rows]
        lengths = [row.num_cached for row in rows]
        width = tokens.shape[1]
        for family in self._families:
            family.begin(lengths, width)
        first = lengths[0]
        offset: int | mx.array = first if lengths.count(first) == num_rows else mx.array(lengths)
        after = offset + width
        for layer in self._attention:
            layer.offset, layer.offset_after = offset, after
        if self._recurrent:
            logits = self._recurrent_forward(model, rows, tokens, widths)
        else:
            logits = model(tokens, cache=self._layers.caches)
        if widths is None:
            for row in rows:
                row.num_cached += width
        else:
            for row, real in zip(rows, widths, strict=True):
                row.num_cached += real
        return logits

    def _recurrent_forward(self, model: Any, rows: list[Row], tokens: mx.array, widths: Sequence[int] | None) -> mx.array:
        total = len(self.rows)
        before = [state.snapshot() for state in self._recurrent]
        for state in self._recurrent:
            state.begin(len(rows), total, widths)
        try:
            logits: mx.array = model(tokens, cache=self._layers.caches)
        except BaseException:
            for state, snapshot in zip(self._recurrent, before, strict=True):
                state.cache, state.lengths = list(snapshot), None
            raise
        for state in self._recurrent:
            state.finish(len(rows), total)
        for index, row in enumerate(rows):
            self._stood[row] = _Stood(before, index, row.num_cached)
        return logits

    # -- rows ---------------------------------------------------------------------------------------------------------

    def add_fresh(self, rows: Sequence[Row]) -> None:
        for family in self._families:
            family.append_empty(len(rows))
        for state in self._recurrent:
            state.append_empty(len(rows), len(self.rows))
        self._append(rows)

    @property
    def layers(self) -> list[RaggedKV | RaggedState]:
        """The stand-in caches, in the order of the model's own."""
        return self._layers.flat

    def states_at(self, row: Row, length: int) -> dict[RaggedState, Snapshot]:
        """The row's arrays [1, ...] when `length` tokens were cached: now, or before the last forward; else empty."""
        if row.num_cached == length:
            place = self.rows.index(row)
            return {state: state.of_row(place) for state in self._recurrent}
        before, index, stood_at = self._stood.get(row, _Stood([], 0, -1))
        known = zip(self._recurrent, before, strict=True) if stood_at == length else ()
        return {state: state.of_row(index, snapshot) for state, snapshot in known}

    def add_restored(self, row: Row, length: int) -> None:
        """To a new batch: a row of `length` tokens, whose contents are then put into `layers`."""
        for family in self._families:
            family.open_restored(length)
        row.num_cached = length
        self._append([row])

    def take(self, rows: Sequence[Row], other: RaggedBatch) -> None:
        """Move rows here from another batch: each is copied once, or not at all when all of it moves into an empty batch."""
        if not self.rows and len(rows) == len(other.rows):
            self._adopt(other)
            return
        places = [other.rows.index(row) for row in rows]
        lengths = [row.num_cached for row in rows]
        for family, source in zip(self._families, other._families, strict=True):
            family.append_from(source, places, lengths)
        for state, state_source in zip(self._recurrent, other._recurrent, strict=True):
            state.append_from(state_source, places, len(self.rows))
        other.remove(rows)
        self._append(rows)

    def _adopt(self, other: RaggedBatch) -> None:
        self._layers, self._families = other._layers, other._families
        self._attention, self._recurrent = other._attention, other._recurrent
        self._stood = other._stood
        rows, other.rows = other.rows, []
        self._append(rows)

    def _append(self, rows: Sequence[Row]) -> None:
        self.rows += rows
        for row in rows:
            row.batch = self

    def remove(self, rows: Sequence[Row]) -> None:
        """The last rows move into the holes."""
        leaving = {self.rows.index(row) for row in rows}
        num_left = len(self.rows) - len(leaving)
        holes = sorted(place for place in leaving if place < num_left)
        movers = [place for place in range(num_left, len(self.rows)) if place not in leaving]
        self._relocate(movers, holes, num_left)
        for row in rows:
            self._stood.pop(row, None)
            row.batch = None

    def _relocate(self, sources: Sequence[int], targets: Sequence[int], num_left: int) -> None:
        """Row sources[i] moves to targets[i]; the first `num_left` rows remain."""
        if sources:
            contents = [layer.gathered_rows(sources) for layer in self._attention]
            mx.eval(contents)
            for layer, content in zip(self._attention, contents, strict=True):
                layer.overwrite_rows(targets, content)
        for family in self._families:
            family.relocate(sources, targets, num_left)
        order = list(range(len(self.rows)))
        for source, target in zip(sources, targets, strict=True):
            order[target] = source
        order = order[:num_left]
        if sources or num_left < len(self.rows):
            for state in self._recurrent:
                state.permute(order)
        self.rows = [self.rows[place] for place in order]

    def give_back(self) -> None:
        if self.rows:
            lengths = [row.num_cached for row in self.rows]
            for family in self._families:
                family.give_back(lengths)

    def bring_forward(self, rows: Sequence[Row]) -> bool:
        wanted = set(rows)
        num_rows = len(rows)
        strangers = [place for place in range(num_rows) if self.rows[place] not in wanted]
        if not strangers:
            return False
        members = [place for place in range(num_rows, len(self.rows)) if self.rows[place] in wanted]
        self._relocate([*members, *strangers], [*strangers, *members], len(self.rows))
        return True

    def rewind(self, row: Row, length: int) -> list[int] | None:
        place = self.rows.index(row)
        before, index, target = self._stood.get(row, _Stood([], 0, length + 1)) if self._recurrent else _Stood([], 0, length)
        if target > length or not all(family.can_truncate(place, target) for family in self._families):
            return None
        for state, snapshot in zip(self._recurrent, before, strict=True):
            state.restore(place, snapshot, index)
        row.num_cached = target
        return row.known[target:length]

    # -- memory -------------------------------------------------------------------------------------------------------

    def forget_unseen(self) -> None:
        """Let sliding layers drop at once, and wholly, what no later query can see: else that comes with want of room."""
        lengths = [row.num_cached for row in self.rows]
        for family in self._families:
            family.compact(lengths, slack=0, least=1)

    def arrays(self) -> list[mx.array]:
        held = [array for layer in self._attention for array in (layer.keys, layer.values)]
        held += [array for state in self._recurrent for array in state.cache]
        return [array for array in held if array is not None]

    def fence(self) -> mx.array:
        return fence_of(self.arrays())

    def nbytes(self) -> int:
        return self._layers.nbytes()


def fence_of(arrays: Sequence[mx.array]) -> mx.array:
    """One number out of the last array, in a buffer of its own."""
    if not arrays:
        return mx.zeros(1)
    last = arrays[-1]
    return last[tuple(slice(0, 1) for _ in last.shape)] * 1
