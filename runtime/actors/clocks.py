"""How long has this machine been asleep? Deadlines run on a clock that stands still in sleep; this one tells that there was any."""

from __future__ import annotations

import sys
import time
from typing import Final

MIN_SLEEP_SECONDS: Final = 1.0
"""Less is the noise of reading two clocks."""


def asleep_seconds() -> float:
    """Seconds that the machine has slept since some fixed moment: what a clock that counts sleep is ahead of one that does not.

    0 where the system has no such pair.
    """
    counting, still = _CLOCKS.get(sys.platform, (None, None))
    return 0.0 if counting is None or still is None else time.clock_gettime(counting) - time.clock_gettime(still)


_CLOCKS: Final = {
    "linux": (getattr(time, "CLOCK_BOOTTIME", None), getattr(time, "CLOCK_MONOTONIC", None)),
    "darwin": (getattr(time, "CLOCK_MONOTONIC_RAW", None), getattr(time, "CLOCK_UPTIME_RAW", None)),
}
"""By system: a clock that goes on in sleep, and one that does not."""
