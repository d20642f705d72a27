"""The places where scheduler, actors and the keeper of prefix files meet; `host.py` ties them together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from runtime.prefix.plans import Entry
from runtime.protocol.commands import AnyCommand
from runtime.protocol.ids import Incarnation, ModelName
from runtime.scheduler.stimuli import Stimulus


class WorkerPort(Protocol):
    """What the scheduler needs of the actors."""

    def send(self, model: ModelName, incarnation: Incarnation, command: AnyCommand) -> None:
        """Never blocks, never raises: a command to a lost incarnation is dropped, a full channel ends that worker."""
        ...

    def breach(self, model: ModelName, incarnation: Incarnation, what: str) -> None:
        """End and replace this incarnation."""
        ...


class FilesPort(Protocol):
    """What the scheduler needs of whoever looks after the directory of prefix files. Neither blocks nor raises."""

    def delete(self, entries: Sequence[Entry]) -> None: ...

    def mark_used(self, entries: Sequence[Entry]) -> None: ...


class SchedulerPort(Protocol):
    """What the actors need of the scheduler. Called on the event loop's thread only; never blocks."""

    def offer(self, stimulus: Stimulus) -> None: ...
