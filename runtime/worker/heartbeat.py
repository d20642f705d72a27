"""Is this process alive and what does it cost? One beat a second, from a thread of its own, also while the model loads."""

from __future__ import annotations

import os
import resource
import sys
import threading
from collections.abc import Callable
from typing import Final

from runtime.protocol.channel import ChannelClosed, EventSender
from runtime.protocol.events import Heartbeat
from runtime.worker.status import Status

BEAT_SECONDS: Final = 1.0


def resident_bytes() -> int:
    """Memory of this process that is in RAM; on macOS the most it has ever been."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


class HeartbeatThread:
    """`on_beat` is called after each beat, on this thread; it may be set later."""

    def __init__(self, sender: EventSender, status: Status) -> None:
        self._sender = sender
        self._status = status
        self._stop = threading.Event()
        self.on_beat: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        status = self._status
        try:
            while not self._stop.is_set():
                self._sender.send(
                    Heartbeat(
                        step=status.step,
                        phase=status.phase,
                        promised_seconds=status.promised_seconds,
                        active_bytes=status.active_bytes,
                        resident_bytes=resident_bytes(),
                        num_device_waits=status.num_device_waits,
                        device_wait_seconds=status.device_wait_seconds,
                    )
                )
                self.on_beat()
                self._stop.wait(BEAT_SECONDS)
        except ChannelClosed:
            pass
        finally:
            self._sender.close()

    def stop(self) -> None:
        """No beat is sent after this, unless the host takes nothing for a second."""
        self._stop.set()
        self._thread.join(BEAT_SECONDS)
