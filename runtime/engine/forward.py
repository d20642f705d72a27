"""What goes into one forward, and which of its logits come out?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import mlx.core as mx

from runtime.engine.batch import Batch
from runtime.engine.rows import Row


class Group:
    """The rows of one forward, in the order of their batch.

    places: their indices in the step. feeds: ids a row feeds, None for the token it drew last (then all rows do so and
    `widths` is None). samples: whether a row samples at its last position.
    """

    __slots__ = ("batch", "feeds", "places", "real_widths", "rows", "sampled_rows", "samplers", "samples", "widths")

    def __init__(
        self, batch: Batch, rows: list[Row], places: list[int], feeds: Sequence[list[int] | None], samples: list[bool]
    ) -> None:
        self.batch, self.rows, self.places, self.samples = batch, rows, places, samples
        self.feeds = list(feeds)
        self.widths: list[int] | None = None
        self.real_widths: list[int] | None = None
        if any(feed is not None for feed in feeds):
            self._spell_out()
        self.sampled_rows = [row for row, sampled in zip(rows, samples, strict=True) if sampled]
        self.samplers = [row.sampler for row in self.sampled_rows]

    def _spell_out(self) -> None:
        """Once one row feeds ids, all do: owed tokens first, and drawn ones fetched."""
        for index, row in enumerate(self.rows):
            feed = self.feeds[index]
            if feed is None:
                row.settle()
                feed = [row.known[row.length]]
            self.feeds[index] = feed
        self.widths = [len(row.owed) + len(feed or ()) for row, feed in zip(self.rows, self.feeds, strict=True)]
        self.real_widths = None if len(set(self.widths)) == 1 else self.widths

    def reorder(self, order: Sequence[Row]) -> None:
        index = {row: place for place, row in enumerate(self.rows)}
        chosen = [index[row] for row in order]
        self.__init__(  # type: ignore[misc]
            self.batch,
            list(order),
            [self.places[place] for place in chosen],
            [self.feeds[place] for place in chosen],
            [self.samples[place] for place in chosen],
        )

    def singles(self) -> Iterator[Group]:
        for index, row in enumerate(self.rows):
            yield Group(self.batch, [row], [self.places[index]], [self.feeds[index]], [self.samples[index]])

    def sampled_positions(self) -> tuple[list[int], list[int]]:
        """Rows that sample and the column of each one's last real token."""
        rows = [index for index, sampled in enumerate(self.samples) if sampled]
        widths = self.widths or [1] * len(self.rows)
        return rows, [widths[index] - 1 for index in rows]

    def padded(self) -> list[list[int]]:
        """Ids [rows, widest]. A row is padded with its own last token, so that no foreign value enters its forward."""
        assert self.widths is not None
        widest = max(self.widths)
        ids = [row.owed + (feed or []) for row, feed in zip(self.rows, self.feeds, strict=True)]
        return [row + row[-1:] * (widest - len(row)) for row in ids]


def feed_array(rows: Sequence[Row]) -> mx.array:
    """The tokens [rows, 1] that these rows drew last, without waiting for them."""
    draws = [row.next_draw() for row in rows]
    first = draws[0]
    assert first is not None
    source = first[0]
    if all(draw is not None and draw[0] is source for draw in draws):
        indices = [draw[1] for draw in draws if draw is not None]
        if indices == list(range(source.shape[0])):
            return mx.expand_dims(source, 1)
        return source[mx.array(indices)][:, None]
    return mx.stack([draw[0][draw[1]] for draw in draws if draw is not None])[:, None]


def sampled_logits(logits: mx.array, group: Group) -> mx.array:
    """Logits [sampled rows, vocabulary] at the last real position of every row that samples."""
    if len(group.samplers) == len(group.rows) and group.real_widths is None:
        return mx.squeeze(logits, 1) if logits.shape[1] == 1 else logits[:, -1]
    if not group.samplers:
        return logits[:0, 0]
    rows, columns = group.sampled_positions()
    return logits[mx.array(rows), mx.array(columns)]
