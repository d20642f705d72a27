"""Who waits for the device, and how is the next one woken? Hints in a shared file, and a bell for each worker.

Nothing here decides who may compute: that is a lock's business (`device.py`). So whatever a dead or stopped worker left behind
costs the others a few hundredths of a second once, and who was passed over wrongly enters himself again.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import select
import time
from pathlib import Path
from typing import Final

from runtime.worker.turns import Waiter, must_yield, next_waiter

MAX_SEATS: Final = 64
"""Workers of one Runtime that can share a lease."""
PATIENCE_SECONDS: Final = 0.01
"""So long a free slot waits for the one whose turn it is."""

_NONE, _INTERACTIVE, _BACKGROUND = 0, 1, 2
_QUIET: Final = bytes(MAX_SEATS)
# 64-bit words of the file: the classes of the waiting, a byte for each seat; three numbers; since when each seat waits.
_OVERTAKES: Final = MAX_SEATS // 8
_FREED_AT: Final = _OVERTAKES + 1
_SINCE: Final = _FREED_AT + 1
_FILE_BYTES: Final = 8 * (_SINCE + MAX_SEATS)


class NoSeat(RuntimeError):
    """All seats are taken."""


class DeviceQueue:
    """One worker's place in the queue of a Runtime's workers. Times are nanoseconds of the monotonic clock, which is the same in
    all of them."""

    def __init__(self, directory: Path) -> None:
        """:raises NoSeat: :raises OSError: its files cannot be made in `directory`, which exists."""
        self._directory = directory
        with contextlib.ExitStack() as files:
            self.seat, seat_file = _claim_seat(directory)
            files.callback(os.close, seat_file)
            self._memory = _shared_memory(directory / "queue")
            files.callback(self._memory.close)
            self._bell = _open_bell(directory / f"bell.{self.seat}", files)
            self._poll = select.poll()
            self._poll.register(self._bell, select.POLLIN)
            self._words = memoryview(self._memory).cast("Q")
            files.callback(self._words.release)
            self._files = files.pop_all()
        self._bells: dict[int, int] = {}
        self._since = 0
        self._is_open = True
        self.leave()

    # -- looking ----------------------------------------------------------------------------------------------

    @property
    def is_empty(self) -> bool:
        return self._memory[:MAX_SEATS] == _QUIET

    def is_my_turn(self) -> bool:
        following = self._next()
        return following is not None and following.seat == self.seat

    def must_yield(self, *, is_background: bool) -> bool:
        """Of a holder, who is not in the queue himself."""
        return not self.is_empty and must_yield(self._waiters(), self._words[_OVERTAKES], is_background=is_background)

    def has_been_free_for_long(self) -> bool:
        """Nobody who lives has let go of a slot just now, so the one whose turn it is had time enough to take it."""
        return time.monotonic_ns() - self._words[_FREED_AT] > 1e9 * PATIENCE_SECONDS

    def _next(self) -> Waiter | None:
        return next_waiter(self._waiters(), self._words[_OVERTAKES])

    def _waiters(self) -> list[Waiter]:
        classes = self._memory[:MAX_SEATS]
        words = self._words
        return [Waiter(words[_SINCE + seat], seat, kind == _BACKGROUND) for seat, kind in enumerate(classes) if kind != _NONE]

    # -- waiting ----------------------------------------------------------------------------------------------

    def enter(self, *, is_background: bool) -> None:
        """Wait in that class. Entering again keeps the place."""
        if not self._since:
            self._since = time.monotonic_ns()
        self._words[_SINCE + self.seat] = self._since
        self._memory[self.seat] = _BACKGROUND if is_background else _INTERACTIVE

    def leave(self) -> None:
        self._since = 0
        self._memory[self.seat] = _NONE

    def sleep(self, seconds: float) -> bool:
        """Until the bell rings, at most so long. False: it did not."""
        if not self._poll.poll(max(0.0, 1000 * seconds)):
            return False
        with contextlib.suppress(BlockingIOError):
            os.read(self._bell, 4096)
        return True

    def pass_over_sleepers(self) -> None:
        """Strike those out who were before this worker and did not take their turn: they are dead, or stopped."""
        for _ in range(MAX_SEATS):
            following = self._next()
            if following is None or following.seat == self.seat:
                return
            self._memory[following.seat] = _NONE

    # -- turns ------------------------------------------------------------------------------------------------

    def note_turn(self, *, is_background: bool) -> None:
        """This worker begins a turn."""
        if is_background:
            self._words[_OVERTAKES] = 0
        elif _BACKGROUND in self._memory[:MAX_SEATS]:
            self._words[_OVERTAKES] = min(self._words[_OVERTAKES] + 1, 1 << 32)

    def note_freed(self) -> None:
        """A slot becomes free now."""
        self._words[_FREED_AT] = time.monotonic_ns()

    def wake_next(self) -> None:
        if self.is_empty:
            return
        following = self._next()
        if following is not None and following.seat != self.seat:
            with contextlib.suppress(OSError):  # full, or nobody's any more: who waits looks for himself now and then
                os.write(self._bell_of(following.seat), b"\0")

    def _bell_of(self, seat: int) -> int:
        if seat not in self._bells:
            self._bells[seat] = os.open(self._directory / f"bell.{seat}", os.O_WRONLY | os.O_NONBLOCK)
        return self._bells[seat]

    def close(self) -> None:
        """Idempotent."""
        if not self._is_open:
            return
        self._is_open = False
        self.leave()
        for bell in self._bells.values():
            os.close(bell)
        self._bells.clear()
        self._files.close()


def _claim_seat(directory: Path) -> tuple[int, int]:
    """The first that no living process has: a number and the locked file."""
    for seat in range(MAX_SEATS):
        file = os.open(directory / f"seat.{seat}", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
        else:
            return seat, file
    raise NoSeat(f"{MAX_SEATS} workers share this device already; unload a model, or set Settings(device_lease=None)")


def _shared_memory(path: Path) -> mmap.mmap:
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.ftruncate(file, _FILE_BYTES)
        return mmap.mmap(file, _FILE_BYTES)
    finally:
        os.close(file)


def _open_bell(path: Path, files: contextlib.ExitStack) -> int:
    """Its reading end. The writing end stays open too: a pipe without one is ready to be read all the time."""
    with contextlib.suppress(FileExistsError):
        os.mkfifo(path, 0o600)
    reading = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    files.callback(os.close, reading)
    files.callback(os.close, os.open(path, os.O_WRONLY | os.O_NONBLOCK))
    return reading
