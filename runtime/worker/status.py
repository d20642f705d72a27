"""What is the worker doing right now? Written by the step thread, read by the heartbeat thread; each value stands alone."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.protocol.events import Phase


@dataclass(slots=True)
class Status:
    """`promised_seconds`: expected cost of the steps under way, 0 when there is none."""

    step: int = 0
    phase: Phase = "import"
    promised_seconds: float = 0.0
    active_bytes: int = 0
    num_device_waits: int = 0
    device_wait_seconds: float = 0.0
