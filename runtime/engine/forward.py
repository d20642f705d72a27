"""What goes into one forward, and which of its logits come out?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import mlx.core as mx

from runtime.engine.batch import Batch
from runtime.engine.grouping import width_groups
from runtime.engine.rows import Row


class Group:
    """The rows of one forward, in the order of their batch.

    places: their indices in the step. feeds: ids a row feeds, None for the token it drew last (then all rows do so and
    `widths` is None). nums_samples: at how many of its last positions each row samples. samplers: one a sample, so that a row's
    stands there as often as the row samples.
    """

    __slots__ = ("batch", "feeds", "nums_samples", "places", "real_widths", "rows", "sampled_rows", "samplers", "widths")

    def __init__(
        self, batch: Batch, rows: list[Row], places: list[int], feeds: Sequence[list[int] | None], nums_samples: list[int]
    ) -> None:
        self.batch, self.rows, self.places, self.nums_samples = batch, rows, places, nums_samples
        self.feeds = list(feeds)
        self.widths: list[int] | None = None
        self.real_widths: list[int] | None = None
        if any(feed is not None for feed in feeds):
            self._spell_out()
        self.sampled_rows = [row for row, num in zip(rows, nums_samples, strict=True) if num]
        self.samplers = [row.sampler for row, num in zip(rows, nums_samples, strict=True) for _ in range(num)]

    @property
    def has_blocks(self) -> bool:
        """Whether a row samples at more than one position."""
        return len(self.samplers) > len(self.sampled_rows)

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
            [self.nums_samples[place] for place in chosen],
        )

    def singles(self) -> Iterator[Group]:
        for index, row in enumerate(self.rows):
            yield Group(self.batch, [row], [self.places[index]], [self.feeds[index]], [self.nums_samples[index]])

    def sampled_positions(self) -> tuple[list[int], list[int]]:
        """Of every sample: its row, and the column of the real token after which it is drawn."""
        widths = self.widths or [1] * len(self.rows)
        rows: list[int] = []
        columns: list[int] = []
        for index, num in enumerate(self.nums_samples):
            rows += [index] * num
            columns += range(widths[index] - num, widths[index])
        return rows, columns

    def padded(self) -> list[list[int]]:
        """Ids [rows, widest]. A row is padded with its own last token, so that no foreign value enters its forward."""
        assert self.widths is not None
        widest = max(self.widths)
        ids = [row.owed + (feed or []) for row, feed in zip(self.rows, self.feeds, strict=True)]
        return [row + row[-1:] * (widest - len(row)) for row in ids]


def split(
    batch: Batch,
    places: Mapping[Row, int],
    feeds: Mapping[Row, list[int] | None],
    nums_samples: Mapping[Row, int],
    forward_tokens: int,
) -> Iterator[Group]:
    """The forwards in which these rows of a batch run; see `width_groups` for `forward_tokens`."""
    members = list(feeds)
    widths = [len(row.owed) + (1 if (feed := feeds[row]) is None else len(feed)) for row in members]
    for indices in width_groups(widths, forward_tokens):
        rows = [members[index] for index in indices]
        yield Group(batch, rows, [places[row] for row in rows], [feeds[row] for row in rows], [nums_samples[row] for row in rows])


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
    """Logits [samples, vocabulary] at the last real positions of every row that samples."""
    if len(group.sampled_rows) == len(group.rows) and group.real_widths is None and not group.has_blocks:
        return mx.squeeze(logits, 1) if logits.shape[1] == 1 else logits[:, -1]
    if not group.samplers:
        return logits[:0, 0]
    rows, columns = group.sampled_positions()
    return logits[mx.array(rows), mx.array(columns)]
