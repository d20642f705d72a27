"""How do rows share a forward? A batch is some rows, their caches, and the one call of the model.

Two kinds: `RaggedBatch` holds many rows of different lengths in stand-in caches; `OwnBatch` holds a single row in the model's
own cache, for models whose caches we do not know or whose batching failed its proof.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from runtime.engine.layers import Kind, Layers
from runtime.engine.ragged_cache import RaggedKV
from runtime.engine.recurrent import RaggedState, Snapshot
from runtime.engine.rows import Row


class Batch(Protocol):
    rows: list[Row]

    def begin_step(self) -> None:
        """A new step begins, perhaps of several forwards: `rewind` can undo only what comes after this."""
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


class RaggedBatch:
    def __init__(self, kinds: Sequence[Kind]) -> None:
        self.rows: list[Row] = []
        self._layers = Layers(kinds)
        self._families = list(self._layers.families.values())
        self._attention = self._layers.attention
        self._recurrent = self._layers.recurrent
        # Where recurrent rows stood before the last step: row → (states of that moment, index in them, tokens cached).
        self._stood: dict[Row, tuple[list[Snapshot], int, int]] = {}

    # -- forward ------------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        self._stood.clear()

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
            self._stood[row] = (before, index, row.num_cached)
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
        before, index, stood_at = self._stood.get(row, ([], 0, -1))
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
        before, index, target = self._stood.get(row, ([], 0, length + 1)) if self._recurrent else ([], 0, length)
        if target > length or not all(family.can_truncate(place, target) for family in self._families):
            return None
        for state, snapshot in zip(self._recurrent, before, strict=True):
            state.restore(place, snapshot, index)
        row.num_cached = target
        return row.known[target:length]

    # -- memory -------------------------------------------------------------------------------------------------------

    def arrays(self) -> list[mx.array]:
        held = [array for layer in self._attention for array in (layer.keys, layer.values)]
        held += [array for state in self._recurrent for array in state.cache]
        return [array for array in held if array is not None]

    def fence(self) -> mx.array:
        return _fence(self.arrays())

    def nbytes(self) -> int:
        return self._layers.nbytes()


class OwnBatch:
    """One row in the model's own cache. Cannot go back."""

    def __init__(self, model: Any, row: Row) -> None:
        self.rows = [row]
        row.batch = self
        self._caches = make_prompt_cache(model)

    def begin_step(self) -> None:
        pass

    def forward(self, model: Any, num_rows: int, tokens: mx.array, widths: Sequence[int] | None) -> mx.array:
        assert num_rows == 1
        assert widths is None
        logits: mx.array = model(tokens, cache=self._caches)
        self.rows[0].num_cached += tokens.shape[1]
        return logits

    def bring_forward(self, rows: Sequence[Row]) -> bool:
        return False

    def remove(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self.rows.remove(row)
            row.batch = None

    def give_back(self) -> None:
        pass

    def rewind(self, row: Row, length: int) -> list[int] | None:
        return [] if length == row.num_cached else None

    def arrays(self) -> list[mx.array]:
        return _arrays_in([cache.state for cache in self._caches])

    def fence(self) -> mx.array:
        return _fence(self.arrays())

    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays())


def _fence(arrays: Sequence[mx.array]) -> mx.array:
    """One number out of the last array, in a buffer of its own."""
    if not arrays:
        return mx.zeros(1)
    last = arrays[-1]
    return last[tuple(slice(0, 1) for _ in last.shape)] * 1


def _arrays_in(tree: Any) -> list[mx.array]:
    if isinstance(tree, mx.array):
        return [tree]
    if isinstance(tree, list | tuple):
        return [array for branch in tree for array in _arrays_in(branch)]
    if isinstance(tree, dict):
        return [array for branch in tree.values() for array in _arrays_in(branch)]
    return []
