"""When did the fake engines of several processes compute? Lines in one file that they share, for tests of who computes beside whom.

A line is `NANOSECONDS PID begin` or `NANOSECONDS PID end`, by the monotonic clock, which is the same in all of them. A process that
is killed inside a step leaves a beginning without an end.
"""

from __future__ import annotations

import os
import time
from typing import Literal


class Trace:
    def __init__(self, path: str) -> None:
        """:raises OSError: it cannot be written."""
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def note(self, what: Literal["begin", "end"]) -> None:
        os.write(self._file, b"%d %d %s\n" % (time.monotonic_ns(), os.getpid(), what.encode()))
