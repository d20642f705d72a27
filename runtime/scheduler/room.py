"""How many tokens may a worker hold, and who makes room when it holds more? Preemption: parked ones, then the lowest priority, the
newest first.

A preempted sequence gives its slot back and comes back like one whose worker died (replaying.py): with the same tokens, from memory
or files as far as it was kept there. Whoever owns the bytes says how many tokens fit (`MemorySet`); here nobody knows bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Sized
from typing import Final

from runtime.scheduler.book import Book
from runtime.scheduler.model import Model
from runtime.scheduler.request import Sequence, SequenceState

HEADROOM_TOKENS: Final = 64
"""Room that a row should find beyond what it is now, or it would make others leave, or leave itself, at once."""

_RUNNING = (SequenceState.PREFILLING, SequenceState.DECODING, SequenceState.PARKED)


def num_held(model: Model) -> int:
    """Tokens of all sequences with a slot, also of those on their way out."""
    return sum(sequence.length for sequence in model.sequences.values())


def startable(model: Model, rows: Iterable[Sequence]) -> list[Sequence]:
    """Of these rows, in this order, those that fit beside what the worker holds. One always does, when it holds nothing."""
    if model.max_tokens is None:
        return list(rows)
    used, is_empty = num_held(model), not model.sequences
    chosen: list[Sequence] = []
    for row in rows:
        if used + _wanted(row) > model.max_tokens and not (is_empty and not chosen):
            break  # whoever is next would otherwise wait for ever behind smaller ones
        used += _wanted(row)
        chosen.append(row)
    return chosen


def _wanted(row: Sequence) -> int:
    return row.length + min(HEADROOM_TOKENS, row.max_length - row.length)


def victims(running: Sized[Sequence], excess: int) -> list[Sequence]:
    """Who leaves so that `excess` tokens fewer are held; never all of them, or nobody would get anywhere."""
    chosen: list[Sequence] = []
    for sequence in sorted(running, key=_is_dearer):
        if excess <= 0 or len(chosen) + 1 >= len(running):
            break
        chosen.append(sequence)
        excess -= sequence.length
    return chosen


def _is_dearer(sequence: Sequence) -> tuple[bool, bool, float, int]:
    """The first in this order goes first: whoever waits for its client anyway, then background, then the newest."""
    is_wanted = sequence.state is not SequenceState.PARKED
    return (is_wanted, sequence.record.request.priority == "interactive", -sequence.placed_at, -sequence.id)


def make_way(book: Book, model: Model, row: Sequence) -> None:
    """Sequences that wait for their clients leave as far as this row lacks room: a slow client must not keep others waiting."""
    if model.max_tokens is None:
        return
    staying = [sequence for sequence in model.sequences.values() if sequence.state in _RUNNING]
    excess = sum(sequence.length for sequence in staying) + _wanted(row) - model.max_tokens
    for sequence in sorted((one for one in staying if one.state is SequenceState.PARKED), key=_is_dearer):
        if excess <= 0:
            return
        book.preempt(model, sequence)
        excess -= sequence.length


def enforce(book: Book, model: Model) -> None:
    """Have those leave that there is no room for any more."""
    if model.max_tokens is None or not model.can_work:
        return
    staying = [sequence for sequence in model.sequences.values() if sequence.state in _RUNNING]
    for sequence in victims(staying, sum(sequence.length for sequence in staying) - model.max_tokens):
        book.preempt(model, sequence)
