"""What do the actors need of each other and of the house? The protocols between them, so that each can be played in a test."""

from __future__ import annotations

from typing import Literal, Protocol

from runtime.actors.lifecycle import WorkerState
from runtime.actors.reports import Stall
from runtime.config import ModelSpec
from runtime.errors import ExitReport, TroupeError
from runtime.protocol.commands import Load
from runtime.protocol.events import AnyEvent, Heartbeat, Loading, ModelFacts, Ready
from runtime.protocol.ids import Holder, Incarnation, ModelName


class Listener(Protocol):
    """Who hears what becomes of the models: `host.py` makes stimuli and events for watchers of it.

    Called on the event loop's thread; never blocks and never raises.
    """

    def model_added(self, model: ModelName, spec: ModelSpec, group: ModelName) -> None:
        """A worker of it is being loaded; requests for `group` may wait."""
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

    def health_changed(
        self, model: ModelName, incarnation: Incarnation, health: Literal["gone", "asleep"], detail: str
    ) -> None: ...

    async def stalled(self, stall: Stall) -> str:
        """A worker is about to be ended because it got stuck. Where its report lies, in words, or nothing. Takes bounded time."""
        ...


class MemoryPort(Protocol):
    """Who owns the machine's bytes. Called on the event loop's thread."""

    async def admit(self, holder: Holder, spec: ModelSpec, load: Load) -> TroupeError | None:
        """Room for it, or why there is none. Being cancelled leaves nothing reserved that `released` does not give back."""
        ...

    def loaded(self, holder: Holder, spec: ModelSpec, facts: ModelFacts) -> None: ...

    def beat(self, holder: Holder, beat: Heartbeat) -> None: ...

    def released(self, holder: Holder) -> None:
        """Nothing of its process is left."""
        ...

    def reserved(self, holder: Holder) -> int: ...


class Process(Protocol):
    """What an incarnation needs of its process; see `runtime.actors.process`."""

    @property
    def pid(self) -> int: ...

    @property
    def exit_code(self) -> int | None:
        """None while it runs, and when a signal ended it."""
        ...

    async def wait(self) -> object:
        """Until it has exited."""
        ...

    def kill(self) -> None:
        """SIGKILL; harmless when it has exited."""
        ...

    def end_softly(self) -> None:
        """Ask it to write down its stacks and to end by itself; harmless when it has exited."""
        ...

    async def shut_down(self, grace_seconds: float) -> None:
        """The ladder, from waiting for what `Shutdown` asked for to SIGKILL; it has ended when this is left."""
        ...

    async def close(self) -> None:
        """Make sure that nothing of it is left, bounded; called shielded, exactly once."""
        ...

    def report(self, phase: str) -> ExitReport: ...


class Owner(Protocol):
    """Who started the incarnation and hears of it. Called on the loop's thread; never blocks."""

    @property
    def name(self) -> ModelName: ...

    def load_command(self) -> Load: ...
    def connected(self) -> None: ...
    def loading(self) -> None: ...
    def progressed(self, progress: Loading) -> None: ...
    def ready(self, event: Ready) -> None: ...
    def said(self, event: AnyEvent) -> None: ...
    def beat(self, event: Heartbeat) -> None: ...
    def slept(self, seconds: float) -> None: ...

    async def stalled(self, stall: Stall) -> str:
        """See `Listener.stalled`."""
        ...
