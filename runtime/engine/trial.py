"""Does a model's logit for a token stay the same in other company? Feeds rows in any manner and compares."""

from __future__ import annotations

import time
from typing import Any

import mlx.core as mx

from runtime.engine.batch import Batch
from runtime.engine.costs import StepCosts
from runtime.engine.grouping import width_groups
from runtime.engine.rows import Row
from runtime.engine.sampling import RowSampler
from runtime.protocol.commands import Sampling
from runtime.protocol.ids import SequenceId


class Disproof(Exception):
    """What a proof saw that should not be."""


class Trial:
    """Feeds rows in whatever company and compares every logit with the expected one."""

    def __init__(self, model: Any, ids: list[list[int]], expected: list[mx.array], is_exact: bool, costs: StepCosts) -> None:
        self._model, self._ids, self._expected, self._is_exact, self._costs = model, ids, expected, is_exact, costs

    def row(self, number: int) -> Row:
        return Row(SequenceId(number), RowSampler(Sampling(), self._expected[0].shape[-1], prompt=(), output=()), 0)

    def feed(
        self, batch: Batch, widths: dict[Row, int], *, is_padded: bool = True, wrong_from: dict[Row, int] | None = None
    ) -> None:
        """Each row goes on by `widths[row]` of its own tokens; from `wrong_from[row]` on by others, whose logits do not count.

        :raises Disproof: a logit is not what it should be.
        """
        batch.begin_step(list(widths))
        feeds: dict[Row, list[int]] = {}
        for row, width in widths.items():
            num_right = width if wrong_from is None else wrong_from[row]
            ids = self._ids[row.sequence][row.length : row.length + num_right]
            ids += [self._ids[0][index % len(self._ids[0])] for index in range(num_right, width)]
            row.note_fed(ids)
            feeds[row] = row.owed + ids
        members = list(feeds)
        # Up to any waste: rows are to share a forward here, unless padding is already known to fail.
        waste = sum(map(len, feeds.values())) * len(members) if is_padded else 0
        for indices in width_groups([len(feeds[row]) for row in members], waste):
            self._forward(batch, {members[index]: feeds[members[index]] for index in indices}, wrong_from or {})

    def _forward(self, batch: Batch, feeds: dict[Row, list[int]], wrong_from: dict[Row, int]) -> None:
        batch.bring_forward(list(feeds))
        rows = batch.rows[: len(feeds)]
        widths = [len(feeds[row]) for row in rows]
        widest = max(widths)
        starts = {row: row.num_cached for row in rows}
        tokens = mx.array([feeds[row] + feeds[row][-1:] * (widest - len(feeds[row])) for row in rows])
        began = time.perf_counter()
        logits = batch.forward(self._model, len(rows), tokens, None if min(widths) == widest else widths)
        mx.eval(logits)
        self._costs.note(len(rows), widest * len(rows), time.perf_counter() - began)
        for index, row in enumerate(rows):
            row.owed = []
            num = wrong_from.get(row, widths[index])
            if num:
                expected = self._expected[row.sequence][starts[row] : starts[row] + num]
                self.compare(expected, logits[index, :num], f"{len(rows)} rows of {widths} tokens")

    def compare(self, expected: mx.array, got: mx.array, manner: str) -> None:
        expected, got = expected.astype(mx.float32), got.astype(mx.float32)
        if self._is_exact:
            if not mx.array_equal(expected, got).item():
                raise Disproof(f"logits differ by {_largest(expected - got):.3g} where they should be equal ({manner})")
            return
        tolerance = self._tolerance() * _largest(expected)
        difference = _largest(expected - got)
        if not difference <= tolerance:  # also when it is no number
            raise Disproof(f"logits differ by {difference:.3g}, more than {tolerance:.3g} ({manner})")

    def _tolerance(self) -> float:
        """Relative to the largest logit. A wrong mask or state shows as a tenth or more, rounding as far less."""
        return 1e-3 if self._expected[0].dtype == mx.float32 else 5e-2


def _largest(values: mx.array) -> float:
    largest: Any = mx.max(mx.abs(values)).item()
    return float(largest)
