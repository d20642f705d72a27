"""Whose turn is it on the device? Pure: who waits as facts, who goes next and whether a holder makes room as decisions.

Interactive workers go before background ones, but only so often in a row; within a class the longest wait goes first.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, NamedTuple

MAX_OVERTAKES: Final = 4
"""Interactive turns in a row while background work waits. One of its steps follows then, whatever else wants the device."""


class Waiter(NamedTuple):
    """One worker in the queue. since: an instant; only the order of instants counts."""

    since: int
    seat: int
    is_background: bool


def next_waiter(waiters: Collection[Waiter], num_overtakes: int) -> Waiter | None:
    """Who gets the next free slot. num_overtakes: interactive turns taken while background work waited, since its last turn."""
    background = [waiter for waiter in waiters if waiter.is_background]
    interactive = [waiter for waiter in waiters if not waiter.is_background]
    if background and (num_overtakes >= MAX_OVERTAKES or not interactive):
        return min(background)
    return min(interactive, default=None)


def must_yield(waiters: Collection[Waiter], num_overtakes: int, *, is_background: bool) -> bool:
    """Whether a holder of that class takes no further step before somebody else had a turn."""
    if is_background:
        return bool(waiters)
    return any(not waiter.is_background or num_overtakes >= MAX_OVERTAKES for waiter in waiters)
