"""How many tokens should be drafted? The number that gives most tokens a second, by what was measured; 0 is plain decoding.

What a round is worth is reckoned in `draft_worth.py`; here it is decided when to draft, to try, and to stop.

A loss is bounded by an account, in plain steps of the present batch. It begins with `_START_STEPS` and earns `_EARNED_SHARE` of
the run time; each round pays what it took longer than plain decoding of its tokens, or earns what it took less; it is never more
than at the beginning. A probe needs its expected loss in the account, and drafting stops when the account is empty. So over any
stretch of time no more can be lost against plain decoding than it begins with, the share, and one round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from runtime.config import MAX_DRAFT_TOKENS
from runtime.scheduler.draft_costs import CostTable, Mean
from runtime.scheduler.draft_worth import MARGIN, Measured, Outlook, RowRound

_CHANGE_MARGIN: Final = 0.01
"""Least gain over the present draft length worth another one: without it noise would keep it moving."""
_EARNED_SHARE: Final = 0.015
_START_STEPS: Final = 10
_FIRST_PLAIN_STEPS: Final = 3
"""Measured before the first round of a batch class: without them no gain could be told."""
_LEARNING: Final = (2, 4, 2, 4)
"""Draft lengths of the very first rounds: two, to tell fixed from growing cost, and twice, for one may be held up by other work.
Fewer when half of the account is spent before."""
_PROBE_TRIALS: Final = 2
_PROBE_ROUNDS: Final = 4
"""A probe lasts at least so many rows' rounds; after so many rounds, if it still promises a gain, it has succeeded."""
_FIRST_DISTANCE: Final = 8
_LAST_DISTANCE: Final = 256
"""Plain steps until the next probe: doubled each time drafting stops without having held, from the first to the last."""
_HOPELESS_DISTANCE: Final = 128
"""The least when by the measured costs even a perfect drafter would gain nothing: they may change, or be wrong."""
_CHECK_STEPS: Final = 2
_FIRST_CHECK: Final = 16
_LAST_CHECK: Final = 256
"""So many plain steps after so many rounds, doubled each time from the first to the last: or nobody would notice that plain
decoding was measured wrong, or has become cheaper."""

_LOOK_ROUNDS: Final = 16
"""Every so many rounds one with a token more or less, by turns: a length found bad by one slow step would never be tried again."""

State = Literal["fixed", "learning", "on", "checking", "off", "probing"]


@dataclass(frozen=True, slots=True)
class DraftStats:
    """One batch class of a pairing. num_rows: the most rows it stands for. Seconds are those of a round as expected now with
    `num_draft_tokens`, or, when that is 0, with the best other length. expected_gain: of that round over plain decoding (0.3: 30 %
    more tokens a second). acceptance: by position, given that the positions before were right. lost_seconds: in rounds that took
    longer than plain decoding of their tokens; what other rounds gained is not set off.
    """

    num_rows: int
    state: State
    num_draft_tokens: int
    acceptance: tuple[float, ...]
    plain_seconds: float
    draft_seconds: float
    verify_seconds: float
    wire_seconds: float
    expected_gain: float
    num_probes: int
    num_rounds: int
    num_plain_steps: int
    lost_seconds: float


@dataclass(slots=True)
class _BatchClass:
    """What is particular to numbers of rows in (num_rows / 2, num_rows]."""

    num_rows: int
    state: State
    length: int = 0
    plain: Mean = field(default_factory=Mean)
    draft: CostTable = field(default_factory=CostTable)
    distance: int = _FIRST_DISTANCE // 2
    check: int = _FIRST_CHECK
    looking_from: int | None = None
    """The length to compare with after a round that only looked around."""
    num_since: int = 0
    """Rounds or plain steps since the state was entered."""
    num_trials: int = 0
    num_probes: int = 0
    num_rounds: int = 0
    num_plain_steps: int = 0
    lost_seconds: float = 0.0

    def enter(self, state: State, length: int) -> None:
        self.state, self.length, self.looking_from, self.num_since, self.num_trials = state, length, None, 0, 0


class DraftLength:
    """The controller of one pairing. Tell it of every plain step and round of the pairing's cohort; ask it before each.

    Acceptance, verify and wire cost are shared by all batch sizes; plain and draft cost, and the decision, are kept by batch
    class (numbers of rows up to 1, 2, 4, 8 ...).
    """

    def __init__(self, fixed: int | None = None, max_tokens: int = MAX_DRAFT_TOKENS) -> None:
        """`fixed`: the user's own draft length, which is then always the answer; None: chosen from 0..`max_tokens`.

        :raises ValueError: one of them is less than 1.
        """
        for name, value in (("fixed", fixed), ("max_tokens", max_tokens)):
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: a draft has at least 1 token")
        self._fixed = fixed
        self._max_tokens = max_tokens if fixed is None else fixed
        self._measured = Measured(self._max_tokens)
        self._to_learn = [min(length, self._max_tokens) for length in _LEARNING]
        self._classes: dict[int, _BatchClass] = {}
        self._account_steps: float = _START_STEPS

    def choose(self, num_rows: int) -> int:
        """Tokens to draft for each of `num_rows` rows in the next round; 0: let them decode plainly. Changes nothing.

        :raises ValueError: no rows.
        """
        known = self._classes.get(_class_of(num_rows))
        if known is None:
            return self._fixed or 0
        return known.length

    def note_plain(self, num_rows: int, seconds: float) -> None:
        """A plain decode step of `num_rows` rows took so long. :raises ValueError: no rows."""
        now = self._class(num_rows)
        now.plain.note(max(seconds, 1e-9))
        now.num_plain_steps += 1
        now.num_since += 1
        self._earn(_EARNED_SHARE)
        if now.state == "learning":
            if now.num_since >= _FIRST_PLAIN_STEPS:
                self._start(now)
        elif now.state == "checking":
            if now.num_since >= _CHECK_STEPS:
                self._decide(now)
        elif now.state == "off" and now.num_since >= now.distance:
            self._probe(now)

    def note_round(
        self,
        num_draft_tokens: int,
        rows: Sequence[RowRound],
        *,
        draft_seconds: float,
        verify_seconds: float,
        wire_seconds: float,
    ) -> None:
        """A round of so many rows, each asked for at most `num_draft_tokens`, took so long. `draft_seconds`: what it waited for the
        drafter, so next to nothing when the draft was made ahead.

        :raises ValueError: no rows.
        """
        now = self._class(len(rows))
        now.draft.note(num_draft_tokens, draft_seconds)
        self._measured.note(rows, verify_seconds, wire_seconds)
        now.num_rounds += 1
        now.num_since += 1
        now.num_trials += len(rows)
        seconds = draft_seconds + verify_seconds + wire_seconds
        if now.plain.num:
            num_steps = seconds / now.plain.value
            num_gained = 1 + sum(row.num_matched for row in rows) / len(rows) - num_steps
            now.lost_seconds += max(0.0, -num_gained * now.plain.value)
            self._earn(num_gained + num_steps * _EARNED_SHARE)
        if now.state != "fixed":
            self._after_round(now)

    def note_late(self, num_rows: int, seconds: float) -> None:
        """The drafter kept so many rows waiting so long, for nothing. :raises ValueError: no rows."""
        now = self._class(num_rows)
        now.lost_seconds += seconds
        if now.plain.num:
            self._earn(-seconds / now.plain.value)
        if now.state != "fixed":
            self._turn_off(now)

    def turns_gain(self, num_rows: int) -> float:
        """See `Measured.turns_gain`; -1 as long as too little was measured. :raises ValueError: no rows."""
        now = self._class(num_rows)
        if not (self._measured.is_known and now.draft and now.plain.num and now.length):
            return -1.0
        return self._measured.turns_gain(num_rows, now.length, now.plain.value, now.draft)

    def chance(self, num_tokens: int) -> float:
        """That so many tokens guessed in a row are right: 1 as long as nothing was measured."""
        chance = 1.0
        by_position = self._measured.acceptance.by_position() if self._measured.is_known else ()
        for place in range(num_tokens if by_position else 0):
            chance *= by_position[min(place, len(by_position) - 1)]
        return chance

    def stats(self) -> tuple[DraftStats, ...]:
        """One entry for each batch class that was seen, small ones first."""
        return tuple(self._stats_of(known) for _, known in sorted(self._classes.items()))

    # -- the decision -------------------------------------------------------------------------------------

    def _start(self, now: _BatchClass) -> None:
        """Enough plain steps are measured."""
        if not self._measured.is_known:
            now.enter("probing", self._to_learn.pop(0) if self._to_learn else 1)
        else:
            self._decide(now)

    def _after_round(self, now: _BatchClass) -> None:
        if not now.plain.num:  # rounds of this size were run before the first plain step: by a cohort that has just shrunk
            return
        if self._account_steps < 0:
            self._turn_off(now)
            return
        if now.state == "probing":
            outlook = self._outlook(now)
            if self._to_learn and self._account_steps > _START_STEPS / 2:
                now.length = self._to_learn.pop(0)
            elif outlook.best_gain < MARGIN:
                if now.num_trials >= _PROBE_TRIALS or not outlook.has_potential:
                    self._turn_off(now)
            elif now.num_since >= _PROBE_ROUNDS:
                self._decide(now)
            else:
                now.length = outlook.best
        elif now.state == "on":
            if now.num_since >= now.check:
                now.check = min(now.check * 2, _LAST_CHECK)
                now.distance = _FIRST_DISTANCE // 2  # it has held for a while: no mere luck of a probe
                now.enter("checking", 0)
            else:
                self._decide(now)

    def _decide(self, now: _BatchClass) -> None:
        if now.looking_from is not None:
            now.length, now.looking_from = now.looking_from, None
        outlook = self._outlook(now)
        if outlook.best_gain < MARGIN:
            self._turn_off(now)
            return
        length = outlook.best
        if now.state == "on" and outlook.best_gain - outlook.gains[now.length] < _CHANGE_MARGIN:
            length = now.length
        if now.state == "on":
            now.length = length
            if now.num_since % _LOOK_ROUNDS == 0:
                step = 1 if now.num_since % (2 * _LOOK_ROUNDS) else -1
                now.looking_from, now.length = length, min(max(length + step, 1), self._max_tokens)
        else:
            if now.state != "checking":
                now.check = _FIRST_CHECK
            now.enter("on", length)

    def _turn_off(self, now: _BatchClass) -> None:
        now.distance = min(now.distance * 2, _LAST_DISTANCE)
        now.enter("off", 0)

    def _probe(self, now: _BatchClass) -> None:
        """Try again, unless it could only be lost or the account does not hold what it may cost."""
        if not self._measured.is_known:  # its first round ever was late
            if self._account_steps > 0:
                now.num_probes += 1
                now.enter("probing", 1)
            return
        if not self._outlook(now).has_potential and now.num_since < _HOPELESS_DISTANCE:
            return
        self._measured.doubt()
        self._draft_table(now).doubt()
        outlook = self._outlook(now)
        round_seconds = outlook.seconds[outlook.best]
        num_rounds = -(-_PROBE_TRIALS // now.num_rows)
        if num_rounds * (round_seconds / now.plain.value - 1) <= self._account_steps:
            now.num_probes += 1
            now.enter("probing", outlook.best)

    def _outlook(self, now: _BatchClass) -> Outlook:
        return self._measured.outlook(now.num_rows, now.plain.value, self._draft_table(now))

    # -- bookkeeping --------------------------------------------------------------------------------------

    def _earn(self, num_steps: float) -> None:
        self._account_steps = min(self._account_steps + num_steps, _START_STEPS)

    def _class(self, num_rows: int) -> _BatchClass:
        number = _class_of(num_rows)
        known = self._classes.get(number)
        if known is None:
            known = _BatchClass(1 << number, "learning" if self._fixed is None else "fixed", self._fixed or 0)
            self._classes[number] = known
        return known

    def _draft_table(self, now: _BatchClass) -> CostTable:
        """Its own, or that of the nearest class that has one."""
        if now.draft:
            return now.draft
        with_one = [known for known in self._classes.values() if known.draft]
        return min(with_one, key=lambda known: abs(known.num_rows - now.num_rows)).draft

    def _stats_of(self, now: _BatchClass) -> DraftStats:
        draft = verify = gain = 0.0
        if now.plain.num and self._measured.is_known:
            outlook = self._outlook(now)
            shown = now.length or outlook.best
            draft, verify, gain = outlook.draft[shown], outlook.verify[shown], outlook.gains[shown]
        return DraftStats(
            num_rows=now.num_rows,
            state=now.state,
            num_draft_tokens=now.length,
            acceptance=tuple(self._measured.acceptance.by_position()),
            plain_seconds=now.plain.value,
            draft_seconds=draft,
            verify_seconds=verify,
            wire_seconds=self._measured.wire.value,
            expected_gain=gain,
            num_probes=now.num_probes,
            num_rounds=now.num_rounds,
            num_plain_steps=now.num_plain_steps,
            lost_seconds=now.lost_seconds,
        )


def _class_of(num_rows: int) -> int:
    if num_rows < 1:
        raise ValueError(f"{num_rows} rows: a step has at least 1")
    return (num_rows - 1).bit_length()
