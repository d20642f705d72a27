"""What does a worker do when its host loses patience? It writes down where all its threads are, and ends by itself if it can.

The stacks are written from within C, whatever the threads do; the exception reaches the main thread when it runs Python again.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from pathlib import Path
from types import FrameType
from typing import Final

SIGNAL: Final = signal.SIGUSR1


class EndedSoftly(RuntimeError):
    """The host asked this worker to end because a step took far longer than promised."""


def arm(path: Path) -> None:
    """Call on the main thread. The file at `path` stays empty as long as all is well."""
    signal.signal(SIGNAL, _end_softly)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    faulthandler.register(SIGNAL, file=file, all_threads=True, chain=True)


def _end_softly(number: int, frame: FrameType | None) -> None:
    raise EndedSoftly("the host asked this worker to end: it had been silent, or its step without an end, for too long")
