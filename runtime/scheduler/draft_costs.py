"""What do drafting and verifying cost, and how often is the drafter right? Running measurements, the past fading.

Nothing is decided here: `drafting.py` asks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp
from statistics import median_low
from typing import Final

_NEWEST_WEIGHT: Final = 1 / 16
"""Of a measurement in a mean, once it has seen so many."""

_NUM_FIRST: Final = 5
"""Of the first measurements the median is taken, of two the lower: in a mean of so few, one held up by other work would weigh
too much."""

_OUTLIER_RATIO: Final = 1.5
"""Afterwards a measurement counts as at most so many times the mean."""

_LINE_WEIGHT: Final = 2.0
"""Measurements that the fitted line is worth beside a class's own."""

_MEMORY_NOTES: Final = 128
"""Measurements of a table after which an old one counts 1/e beside the line, so that a length once found bad is tried again."""

_MEMORY_TRIALS: Final = 64
"""Trials after which an old one counts 1/e. A mean of so many is right to about 0.06, and a change is seen within as many."""

_PRIOR_ACCEPTANCE: Final = 0.6
_PRIOR_TRIALS: Final = 2.0
"""Before anything is known a drafter is believed to be fair, so that it gets tried; two trials' worth."""


@dataclass(slots=True)
class Mean:
    """Of measured seconds; `value` is 0 before the first."""

    value: float = 0.0
    num: int = 0
    _first: list[float] = field(default_factory=list)

    def note(self, seconds: float) -> None:
        self.num += 1
        if self.num <= _NUM_FIRST:
            self._first.append(seconds)
            self.value = median_low(self._first)
            return
        self.value += (min(seconds, self.value * _OUTLIER_RATIO) - self.value) * max(1 / self.num, _NEWEST_WEIGHT)


@dataclass(slots=True)
class _Class:
    size: float
    seconds: Mean
    noted_at: int = 0


class CostTable:
    """Seconds by size (a number of tokens): the mean of the size's class, drawn towards a line through all classes.

    Classes are single sizes up to 16, then four to a power of two. A class last measured long ago still shapes the line (one
    through a single class could not tell fixed cost from growing cost), but is itself estimated by the line more and more.
    """

    __slots__ = ("_classes", "_num_notes")

    def __init__(self) -> None:
        self._num_notes = 0
        self._classes: dict[int, _Class] = {}

    def __len__(self) -> int:
        return len(self._classes)

    def note(self, size: int, seconds: float) -> None:
        self._num_notes += 1
        known = self._classes.get(_class_of(size))
        if known is None:
            known = self._classes[_class_of(size)] = _Class(size, Mean())
        known.size += (size - known.size) * _NEWEST_WEIGHT
        known.seconds.note(seconds)
        known.noted_at = self._num_notes

    def doubt(self) -> None:
        """What is known is old: let the next measurements outweigh it."""
        self._num_notes += _MEMORY_NOTES

    def estimates(self, sizes: Sequence[float], anchor: tuple[float, float] | None = None) -> list[float]:
        """Seconds for each of `sizes`. `anchor`: a (size, seconds) that is known from elsewhere, for the line.

        From one point alone cost is taken as growing with size: an error on the side of drafting less.

        :raises ValueError: nothing is known.
        """
        points = [(known.size, known.seconds.value, float(min(known.seconds.num, 16))) for known in self._classes.values()]
        if anchor is not None:
            points.append((*anchor, 4.0))
        if not points:
            raise ValueError("no cost was measured yet; measure one size first")
        fixed, slope = _line(points)
        found = []
        for size in sizes:
            on_line = fixed + slope * size
            known = self._classes.get(_class_of(round(size)))
            if known is not None:
                own = known.seconds.value + slope * (size - known.size)
                weight = min(known.seconds.num, 16) * exp((known.noted_at - self._num_notes) / _MEMORY_NOTES)
                on_line += (own - on_line) * weight / (weight + _LINE_WEIGHT)
            found.append(max(on_line, 0.0))
        return found


def _class_of(size: int) -> int:
    """Four classes to a power of two above 16."""
    if size <= 16:
        return size
    shift = size.bit_length() - 3
    return (shift << 8) + (size >> shift)


def _line(points: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """(fixed, per unit) of the weighted least-squares line; neither is negative."""
    total = sum(weight for _, _, weight in points)
    mean_size = sum(size * weight for size, _, weight in points) / total
    mean_seconds = sum(seconds * weight for _, seconds, weight in points) / total
    spread = sum(weight * (size - mean_size) ** 2 for size, _, weight in points)
    if spread < 1e-9 * total:
        return 0.0, mean_seconds / mean_size if mean_size else 0.0
    slope = sum(weight * (size - mean_size) * (seconds - mean_seconds) for size, seconds, weight in points) / spread
    slope = min(max(slope, 0.0), mean_seconds / mean_size)
    return mean_seconds - slope * mean_size, slope


class Acceptance:
    """By position in the block: how often a proposal is right, given that all before it were.

    Each position is drawn towards the one before it, so that positions never tried are believed to be like the last tried one.
    """

    __slots__ = ("_hits", "_trials")

    def __init__(self, num_positions: int) -> None:
        self._trials = [0.0] * num_positions
        self._hits = [0.0] * num_positions

    def note(self, num_asked: int, num_matched: int) -> None:
        """One row of one round. Asked for and not proposed counts as not right: it is the drafter that had nothing to say."""
        keep = 1 - 1 / _MEMORY_TRIALS
        for position in range(len(self._trials)):
            self._trials[position] *= keep
            self._hits[position] *= keep
            if position < num_asked and position <= num_matched:
                self._trials[position] += 1
                self._hits[position] += position < num_matched

    def doubt(self) -> None:
        """Let all that is known count as one trial: what it was long ago is a hint only."""
        most = max(self._trials, default=0.0)
        if most > 1:
            self._trials = [trials / most for trials in self._trials]
            self._hits = [hits / most for hits in self._hits]

    def by_position(self) -> list[float]:
        found = []
        before = _PRIOR_ACCEPTANCE
        for trials, hits in zip(self._trials, self._hits, strict=True):
            before = (hits + _PRIOR_TRIALS * before) / (trials + _PRIOR_TRIALS)
            found.append(before)
        return found


def expected_tokens(acceptance: Sequence[float]) -> list[float]:
    """Tokens a row gets of a round of k proposals, for k = 0..len(acceptance): see `drafting.py`."""
    found, chance, tokens = [1.0], 1.0, 1.0
    for rate in acceptance:
        chance *= rate
        tokens += chance
        found.append(tokens)
    return found
