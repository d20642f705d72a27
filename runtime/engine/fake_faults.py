"""When does the fake engine misbehave, and how? Counts the scripted faults of one worker's life and carries them out."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Sequence
from typing import Literal, NamedTuple

from runtime.protocol.commands import Fault

FaultStep = Literal["import", "load", "prepare", "prefill", "decode", "release", "shutdown"]
_SLICE_SECONDS = 0.05


class ScriptedFault(RuntimeError):
    """What the action "raise" raises."""


def print_garbage() -> None:
    """Bytes that are no text, on stderr."""
    sys.stderr.buffer.write(b"\xff\xfe scripted garbage \x00\xc1\n")
    sys.stderr.buffer.flush()


class Participant(NamedTuple):
    """A sequence in a step: the how manieth that was ever added, and its prompt."""

    number: int
    prompt: Sequence[int]


class Faults:
    """The script's faults of one incarnation, each with a count of its own.

    send_garbage: what the action "garbage" does.
    """

    def __init__(self, faults: Sequence[Fault], incarnation: int, send_garbage: Callable[[], None]) -> None:
        self._faults = [fault for fault in faults if incarnation in fault.incarnations]
        self._counts = [0] * len(self._faults)
        self._send_garbage = send_garbage

    def due(self, at: FaultStep, participants: Collection[Participant] = ()) -> list[Fault]:
        """Count this step and give the faults that happen in it."""
        due = []
        for number, fault in enumerate(self._faults):
            if _concerns(fault, at, participants):
                self._counts[number] += 1
                if _happens(fault, self._counts[number]):
                    due.append(fault)
        return due

    def sleep_seconds_ahead(self, at: FaultStep, participants: Collection[Participant]) -> float:
        """How long the faults of the next such step will sleep. Counts nothing."""
        return sum(
            fault.seconds
            for fault, count in zip(self._faults, self._counts, strict=True)
            if fault.action == "sleep" and _concerns(fault, at, participants) and _happens(fault, count + 1)
        )

    def reach(self, at: FaultStep) -> None:
        """Count this step and let happen what is due, for steps without rows."""
        for fault in self.due(at):
            self.happen(fault)

    def happen(self, fault: Fault) -> None:
        """:raises ScriptedFault: for "raise" and "nonfinite" (which only a step can do to a single row)."""
        match fault.action:
            case "raise" | "nonfinite":
                raise ScriptedFault(f"scripted fault {fault.action!r} at {fault.at!r}")
            case "exit":
                os._exit(fault.exit_code)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "sleep":
                time.sleep(fault.seconds)
            case "hang":
                while True:
                    time.sleep(_SLICE_SECONDS)  # in slices, so that an exception sent to a thread can end it
            case "garbage":
                self._send_garbage()


def _concerns(fault: Fault, at: FaultStep, participants: Collection[Participant]) -> bool:
    if fault.at != at:
        return False
    is_there = fault.sequence_number is None or any(fault.sequence_number == each.number for each in participants)
    return is_there and (fault.token is None or any(fault.token in each.prompt for each in participants))


def _happens(fault: Fault, count: int) -> bool:
    return count == fault.number or (fault.every_time and count > fault.number)
