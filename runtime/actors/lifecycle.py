"""Which states can a model's worker be in, and which moves are allowed?"""

from __future__ import annotations

from enum import Enum
from typing import Literal

Health = Literal["idle", "busy", "stuck", "gone"]
"""idle, busy: by its last beat. stuck: past what it promised, and being ended. gone: no process runs."""


class WorkerState(Enum):
    """SPAWNED: its process was started. CONNECTED: it said Hello. LOADING: it was told what to load. READY: it serves.

    DRAINING: it was told to shut down. STOPPED: ended as asked. DEAD: its process ended, or was ended, otherwise.
    BACKOFF: waiting for the next start. FAILED: nothing will start it again but a new load.
    """

    SPAWNED = "spawned"
    CONNECTED = "connected"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"
    DEAD = "dead"
    BACKOFF = "backoff"
    FAILED = "failed"


WORKER_MOVES: dict[WorkerState, frozenset[WorkerState]] = {
    WorkerState.SPAWNED: frozenset({WorkerState.CONNECTED, WorkerState.DEAD}),
    WorkerState.CONNECTED: frozenset({WorkerState.LOADING, WorkerState.DEAD}),
    WorkerState.LOADING: frozenset({WorkerState.READY, WorkerState.DEAD}),
    WorkerState.READY: frozenset({WorkerState.DRAINING, WorkerState.DEAD}),
    WorkerState.DRAINING: frozenset({WorkerState.STOPPED, WorkerState.DEAD}),
    # A worker that is unloaded while it starts is killed rather than drained: dead, then stopped.
    WorkerState.DEAD: frozenset({WorkerState.BACKOFF, WorkerState.FAILED, WorkerState.STOPPED}),
    WorkerState.BACKOFF: frozenset({WorkerState.SPAWNED, WorkerState.STOPPED}),
    WorkerState.STOPPED: frozenset(),
    WorkerState.FAILED: frozenset(),
}
"""A new load of a stopped or failed model starts a new table at SPAWNED."""


class IllegalMove(AssertionError):
    """The state table was violated: a defect of this package."""


class Lifecycle:
    """One worker's state. `move` is the only way to change it."""

    def __init__(self) -> None:
        self._state: WorkerState | None = None

    @property
    def state(self) -> WorkerState | None:
        """None before the first start."""
        return self._state

    def can_move(self, to: WorkerState) -> bool:
        if self._state is None:
            return to is WorkerState.SPAWNED
        return to in WORKER_MOVES[self._state]

    def move(self, to: WorkerState) -> WorkerState | None:
        """Returns the state left. :raises IllegalMove: the table has no such move; nothing has changed."""
        if not self.can_move(to):
            raise IllegalMove(f"a worker may not move from {self._state} to {to}")
        left, self._state = self._state, to
        return left
