"""What happened to a scheduler, so that a failing run can be had again: every stimulus with its time, and what followed from it.

The file holds prompts and keys: it is for a test's own disk, readable by its owner alone. `python -m tests.chaos.replay FILE`
plays it.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, Final

from runtime.errors import TroupeError
from runtime.scheduler.state import SchedulerState
from runtime.scheduler.stimuli import Instruction, Stimulus

MAX_BYTES: Final = 1 << 30
"""Of a recording; what comes later is not in it."""


class Recording:
    """One scheduler's stimuli on the disk: its settings, then (stimulus and time, digest of the instructions) for each."""

    def __init__(self, path: Path) -> None:
        """A new file for its owner alone."""
        self._path = path
        self._file = open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb")  # noqa: SIM115 (see close)
        self._has_settings = False

    def pickle(self, state: SchedulerState, stimulus: Stimulus, now: float) -> bytes:
        """To be called before it is handled, for a stimulus may hold what changes then."""
        if not self._has_settings:
            self._has_settings = True
            pickle.dump(state.book.settings, self._file)
        buffer = io.BytesIO()
        _Pickler(buffer).dump((stimulus, now))
        return buffer.getvalue()

    def note(self, pickled: bytes, instructions: list[Instruction]) -> None:
        if self._file.tell() < MAX_BYTES:
            pickle.dump((pickled, digest(instructions)), self._file)

    def close(self) -> None:
        self._file.close()


def replay(path: Path, *, look: Callable[[SchedulerState], None] = SchedulerState.validate) -> tuple[int, int | None]:
    """Play a recording into a scheduler of its own. How many stimuli it has, and the number of the first whose instructions differ;
    None: all are the same.

    An exception of the scheduler, or of `look` after each stimulus, comes out here, as it did or would have.
    """
    with open(path, "rb") as file:
        state = SchedulerState(pickle.load(file))
        for number in count():
            try:
                pickled, expected = pickle.load(file)
            except EOFError:
                return number, None
            stimulus, now = pickle.loads(pickled)
            instructions = state.handle(stimulus, now)
            look(state)
            if digest(instructions) != expected:
                return number + 1, number
    raise AssertionError("a file ends")


def digest(instructions: list[Instruction]) -> bytes:
    """Of what they say, without the addresses of objects."""
    words = re.sub(r" at 0x[0-9a-f]+", "", repr(instructions))
    return hashlib.blake2b(words.encode(), digest_size=8).digest()


@contextmanager
def recorded(path: Path) -> Iterator[None]:
    """The first scheduler made inside is recorded in a file at `path`."""
    recording, handle = Recording(path), SchedulerState.handle
    mine: list[SchedulerState] = []

    def watched(state: SchedulerState, stimulus: Stimulus, now: float) -> list[Instruction]:
        if not mine:
            mine.append(state)
        if state is not mine[0]:
            return handle(state, stimulus, now)
        pickled = recording.pickle(state, stimulus, now)
        instructions = handle(state, stimulus, now)
        recording.note(pickled, instructions)
        return instructions

    SchedulerState.handle = watched  # type: ignore[method-assign]
    try:
        yield
    finally:
        SchedulerState.handle = handle  # type: ignore[method-assign]
        recording.close()


class _Pickler(pickle.Pickler):
    """Errors have signatures of their own, which the usual way of pickling an exception does not know."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, TroupeError):
            return (_error, (type(value), value.args, value.__dict__))
        return NotImplemented


def _error(kind: type[TroupeError], args: tuple[Any, ...], fields: dict[str, Any]) -> TroupeError:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(fields)
    return error
