"""What do the actors tell the rest of the house? One protocol; `host.py` turns the calls into stimuli and events for watchers."""

from __future__ import annotations

from typing import Protocol

from runtime.actors.lifecycle import WorkerState
from runtime.errors import ExitReport, TroupeError
from runtime.protocol.events import AnyEvent, Loading, ModelFacts
from runtime.protocol.ids import Incarnation, ModelName


class Listener(Protocol):
    """Called on the event loop's thread; never blocks and never raises."""

    def model_added(self, model: ModelName, max_slots: int) -> None:
        """It is being loaded; requests for it may wait."""
        ...

    def worker_up(self, model: ModelName, incarnation: Incarnation, facts: ModelFacts) -> None: ...

    def worker_said(self, model: ModelName, incarnation: Incarnation, event: AnyEvent) -> None:
        """An event of a ready worker, in order."""
        ...

    def worker_lost(
        self, model: ModelName, incarnation: Incarnation, error: TroupeError, report: ExitReport, restarting: bool
    ) -> None:
        """A ready worker, or the start of its successor, is over; `error` is what its callers get."""
        ...

    def model_removed(self, model: ModelName, error: TroupeError) -> None:
        """Unloaded, or its first load failed; `error` is what its callers get."""
        ...

    def worker_moved(
        self, model: ModelName, left: WorkerState | None, now: WorkerState, incarnation: Incarnation, pid: int | None
    ) -> None: ...

    def load_progress(self, model: ModelName, progress: Loading) -> None: ...
