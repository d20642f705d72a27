"""Striking at a chosen message between the host and some workers: at the very moment it is said, or heard."""

from __future__ import annotations

from collections.abc import Callable, Collection

import pytest

from runtime.scheduler.state import SchedulerState
from runtime.scheduler.stimuli import Instruction, Send, Stimulus, WorkerSaid


class Trap:
    """Calls `strike`, once, when the `number`-th message (from 1) of the type named `message` passes to or from one of `models`."""

    def __init__(self, models: Collection[str], message: str, number: int, strike: Callable[[], None]) -> None:
        self._models = frozenset(models)
        self._message = message
        self._number = number
        self._strike = strike

    def see(self, model: str, message: object) -> None:
        if model in self._models and type(message).__name__ == self._message:
            self._number -= 1
            if self._number == 0:
                self._strike()


def lay(monkeypatch: pytest.MonkeyPatch) -> list[Trap]:
    """A list to put traps into; as long as the test lasts, the scheduler also recounts all it knows after every stimulus."""
    traps: list[Trap] = []
    handle: Callable[[SchedulerState, Stimulus, float], list[Instruction]] = SchedulerState.handle

    def watched(state: SchedulerState, stimulus: Stimulus, now: float) -> list[Instruction]:
        if isinstance(stimulus, WorkerSaid):
            for trap in list(traps):
                trap.see(stimulus.model, stimulus.event)
        out = handle(state, stimulus, now)
        state.validate()
        for instruction in out:
            if isinstance(instruction, Send):
                for trap in list(traps):
                    trap.see(instruction.model, instruction.command)
        return out

    monkeypatch.setattr(SchedulerState, "handle", watched)
    return traps
