"""In which batch does a row live, and when does it move?

Rows that decode or verify live together on the stage. Rows still being prefilled share batches of their own; each moves to the
stage, copied once, with the first step after the one that drew its first token. A model that may not batch has a batch for
every row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from runtime.engine.batch import Batch, RaggedBatch
from runtime.engine.forward import Group
from runtime.engine.layers import Kind
from runtime.engine.own_batch import OwnBatch
from runtime.engine.rows import Row


class Places:
    """moves: counts every change of a batch's rows or their order, so that what was worked out before can be told stale."""

    def __init__(self, model: Any, kinds: Sequence[Kind], *, is_batched: bool) -> None:
        self._model = model
        self._kinds = kinds
        self._stage = RaggedBatch(kinds) if is_batched else None
        self.moves = 0

    def place(self, feeds: dict[Row, list[int] | None]) -> list[tuple[Batch, list[Row]]]:
        """Put every row into the batch it runs in. feeds: ids a row feeds, None for the token it drew last."""
        if self._stage is None:
            return [(row.batch or OwnBatch(self._model, row), [row]) for row in feeds]
        stage = self._stage
        performing = [row for row in feeds if row.draws or row.batch is stage]
        preparing = [row for row in feeds if not row.draws and row.batch is not stage]
        placed: list[tuple[Batch, list[Row]]] = []
        if performing:
            self._gather(stage, performing)
            placed.append((stage, performing))
        if preparing:
            homes = [row.batch for row in preparing if isinstance(row.batch, RaggedBatch)]
            home = max(homes, key=homes.count) if homes else RaggedBatch(self._kinds)
            self._gather(home, preparing)
            placed.append((home, preparing))
        return placed

    def _gather(self, batch: RaggedBatch, rows: Sequence[Row]) -> None:
        """Move these rows into `batch`, wherever they are."""
        fresh = [row for row in rows if row.batch is None]
        elsewhere: dict[RaggedBatch, list[Row]] = {}
        for row in rows:
            if isinstance(row.batch, RaggedBatch) and row.batch is not batch:
                elsewhere.setdefault(row.batch, []).append(row)
        for source, movers in elsewhere.items():
            batch.take(movers, source)
        if fresh:
            batch.add_fresh(fresh)
        if fresh or elsewhere:
            self.moves += 1

    def arrange(self, group: Group) -> None:
        """Bring the group's rows to the front of their batch and take over the batch's order."""
        if group.batch.bring_forward(group.rows):
            self.moves += 1
        order = group.batch.rows[: len(group.rows)]
        if order != group.rows:
            group.reorder(order)

    def leave(self, rows: Iterable[Row]) -> None:
        """These rows are gone; what only they needed is given back."""
        self.moves += 1
        left: dict[Batch, list[Row]] = {}
        for row in rows:
            if row.batch is not None:
                left.setdefault(row.batch, []).append(row)
        for batch, leaving in left.items():
            batch.remove(leaving)
            if batch is self._stage and not batch.rows:
                self._stage = RaggedBatch(self._kinds)  # the old one's memory goes with it
            else:
                batch.give_back()
