"""May this worker compute now? The device lease: at most so many workers of one Runtime are inside a step at once.

The truth is a lock of the kernel on one of n files, so whoever dies holds nothing. Order and fairness are hints beside it
(`device_queue.py`). A worker that nobody waits for keeps its slot from step to step; one that does not compute holds none.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import Final, Protocol

from runtime.protocol.commands import DeviceLease
from runtime.worker.device_queue import DeviceQueue
from runtime.worker.status import Status

SLICE_SECONDS: Final = 0.02
"""After so long a waiting worker looks after its commands, and at the slots themselves: a dead holder rings no bell."""


class DeviceTimeout(RuntimeError):
    """No slot became free within the lease's patience."""


class Device(Protocol):
    """Used by the step thread alone."""

    @property
    def is_waiting(self) -> bool:
        """`take` was refused, and nobody has given up since."""
        ...

    def take(self, *, is_background: bool) -> bool:
        """Begin a step. False: not yet, after at most `SLICE_SECONDS`; ask again soon, or `withdraw`.

        :raises DeviceTimeout: it has waited for the whole patience.
        """
        ...

    def is_wanted(self) -> bool:
        """This worker computes, and somebody else should have the next turn."""
        ...

    def give_back(self) -> None:
        """Nothing of this worker is under way any more. Idempotent."""
        ...

    def withdraw(self) -> None:
        """There is nothing to wait for any more. Idempotent."""
        ...

    def close(self) -> None: ...


class FreeDevice:
    """No lease: everybody computes at any time."""

    is_waiting = False

    def take(self, *, is_background: bool) -> bool:
        return True

    def is_wanted(self) -> bool:
        return False

    def give_back(self) -> None: ...

    def withdraw(self) -> None: ...

    def close(self) -> None: ...


class LeasedDevice:
    """`status` hears of waits. A fork that does not exec shares its parent's locks; workers make none."""

    def __init__(self, lease: DeviceLease, status: Status) -> None:
        """:raises NoSeat: :raises OSError: the lease's directory cannot be made or used."""
        directory = Path(lease.directory)
        directory.mkdir(mode=0o700, exist_ok=True)
        self._patience_seconds = lease.patience_seconds
        self._status = status
        self._queue = DeviceQueue(directory)
        self._slots = [os.open(directory / f"slot.{slot}", os.O_RDWR | os.O_CREAT, 0o600) for slot in range(lease.num_slots)]
        self._held: int | None = None
        self._is_background = False
        self._waiting_since: float | None = None

    @property
    def is_waiting(self) -> bool:
        return self._waiting_since is not None

    def take(self, *, is_background: bool) -> bool:
        self._is_background = is_background
        if self._held is None and (self.is_waiting or not self._queue.is_empty or not self._try_slots()):
            return self._wait()
        if not self._queue.is_empty:
            self._queue.note_turn(is_background=is_background)
        return True

    def _wait(self) -> bool:
        """One slice of it."""
        queue = self._queue
        now = time.monotonic()
        if self._waiting_since is None:
            self._waiting_since = now
            self._status.num_device_waits += 1
        elif now - self._waiting_since > self._patience_seconds:
            raise DeviceTimeout(
                f"the device was not free within {self._patience_seconds:g} s, although a holder that hangs is ended long before; "
                "Settings(device_lease=...) says how many workers may compute at once"
            )
        self._status.phase = "waiting"
        queue.enter(is_background=self._is_background)
        until = now + SLICE_SECONDS
        while not (queue.is_my_turn() and self._try_slots()):
            if not queue.sleep(until - time.monotonic()):
                if not queue.has_been_free_for_long() or not self._try_slots():
                    return False
                queue.pass_over_sleepers()
                break
            queue.enter(is_background=self._is_background)
        queue.note_turn(is_background=self._is_background)
        self._stop_waiting()
        if len(self._slots) > 1:  # two slots that became free at once may have rung for one worker
            queue.wake_next()
        return True

    def _stop_waiting(self) -> None:
        assert self._waiting_since is not None
        self._status.device_wait_seconds += time.monotonic() - self._waiting_since
        self._waiting_since = None
        self._queue.leave()

    def _try_slots(self) -> bool:
        for slot in self._slots:
            try:
                fcntl.flock(slot, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            self._held = slot
            return True
        return False

    def is_wanted(self) -> bool:
        return self._held is not None and self._queue.must_yield(is_background=self._is_background)

    def give_back(self) -> None:
        if self._held is None:
            return
        self._queue.note_freed()
        fcntl.flock(self._held, fcntl.LOCK_UN)
        self._held = None
        self._queue.wake_next()

    def withdraw(self) -> None:
        """Its place may have been the first: the next one is told."""
        if self.is_waiting:
            self._stop_waiting()
            self._queue.wake_next()

    def close(self) -> None:
        self.give_back()
        self.withdraw()
        self._queue.close()
        for slot in self._slots:
            os.close(slot)
        self._slots.clear()


def device_of(lease: DeviceLease | None, status: Status) -> Device:
    """:raises NoSeat: :raises OSError: see `LeasedDevice`."""
    return FreeDevice() if lease is None else LeasedDevice(lease, status)
