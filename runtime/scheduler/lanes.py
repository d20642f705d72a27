"""One cohort, or two that take turns, the one drafting while the other verifies? Whichever made more tokens a second. Pure.

Two cohorts keep both processes busy without a wasted draft, but halve the verify batch (compare MineDraft, arXiv 2603.18016). Which
wins depends on batch size and costs, so both are tried where two are reckoned to win.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

MIN_ROWS: Final = 4
PROMISE: Final = 0.05
"""Least gain, as reckoned, worth trying two for."""
TRIAL_ROUNDS: Final = 12
HOPELESS_ROUNDS: Final = 4
HOPELESS: Final = 0.85
"""A trial ends after so many rounds already when it makes less than this share."""
MARGIN: Final = 1.02
FIRST_DISTANCE: Final = 24
LAST_DISTANCE: Final = 768
"""Rounds until the other way is tried again: doubled each time it did not win, from the first to the last."""
_KEPT: Final = 0.9
"""Of what was measured, a round later."""


@dataclass(slots=True)
class _Rate:
    tokens: float = 0.0
    seconds: float = 0.0

    def note(self, num_tokens: int, seconds: float) -> None:
        self.tokens = self.tokens * _KEPT + num_tokens
        self.seconds = self.seconds * _KEPT + seconds

    @property
    def value(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass(slots=True)
class _BatchClass:
    num_lanes: int = 1
    is_trial: bool = False
    num_rounds: int = 0
    distance: int = FIRST_DISTANCE
    rates: dict[int, _Rate] = field(default_factory=lambda: {1: _Rate(), 2: _Rate()})


class Lanes:
    """Tell it of every round; ask it before each. By batch class: numbers of rows up to 4, 8, 16 ..."""

    def __init__(self) -> None:
        self._classes: dict[int, _BatchClass] = {}

    def choose(self, num_rows: int) -> int:
        """1 or 2."""
        known = self._classes.get((num_rows - 1).bit_length())
        return 1 if known is None or num_rows < MIN_ROWS else known.num_lanes

    def is_trial(self, num_rows: int) -> bool:
        """What is chosen now is only being tried."""
        known = self._classes.get((num_rows - 1).bit_length())
        return known is not None and known.is_trial

    def note(self, num_rows: int, num_lanes: int, num_tokens: int, seconds: float, promise: float) -> None:
        """A round, of `num_rows` rows in all lanes, made so many tokens since the round before. promise: what two lanes are
        reckoned to make more, as a share."""
        if num_rows < MIN_ROWS:
            return
        now = self._classes.setdefault((num_rows - 1).bit_length(), _BatchClass())
        now.rates[num_lanes].note(num_tokens, seconds)
        if num_lanes != now.num_lanes:
            return  # begun before the change
        now.num_rounds += 1
        other = now.rates[3 - num_lanes].value
        is_hopeless = now.num_rounds >= HOPELESS_ROUNDS and now.rates[num_lanes].value < HOPELESS * other
        if now.is_trial and (now.num_rounds >= TRIAL_ROUNDS or is_hopeless):
            self._judge(now)
        elif not now.is_trial and now.num_rounds >= now.distance and (num_lanes == 2 or promise >= PROMISE):
            now.is_trial, now.num_lanes, now.num_rounds = True, 3 - num_lanes, 0
            now.rates[now.num_lanes] = _Rate()

    def _judge(self, now: _BatchClass) -> None:
        """The one on trial stays if it is clearly better than the one before."""
        now.is_trial, now.num_rounds = False, 0
        if now.rates[now.num_lanes].value > MARGIN * now.rates[3 - now.num_lanes].value:
            now.distance = FIRST_DISTANCE * 4
        else:
            now.num_lanes = 3 - now.num_lanes
            now.distance = min(now.distance * 2, LAST_DISTANCE)
