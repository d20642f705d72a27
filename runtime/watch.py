"""What may a user interface show? Typed events of a Runtime, to watchers that may be slow.

Each watcher has a queue of its own; a full one drops its oldest event and counts it, so that watching never holds anything up.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self

import anyio

from runtime.errors import ExitReport
from runtime.info import ModelState
from runtime.protocol.ids import RequestId

WATCH_QUEUE_EVENTS = 1024


@dataclass(frozen=True, slots=True)
class ModelStateChanged:
    """`pid` is None while no process runs. `previous` is None for a model just added."""

    model: str
    state: ModelState
    previous: ModelState | None
    incarnation: int
    pid: int | None


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """`total` is 0 while unknown."""

    model: str
    stage: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class WorkerDied:
    model: str
    report: ExitReport
    restarting: bool


@dataclass(frozen=True, slots=True)
class RequestQueued:
    model: str
    tenant: str
    request: RequestId


@dataclass(frozen=True, slots=True)
class RequestEnded:
    model: str
    tenant: str
    request: RequestId
    state: Literal["finished", "cancelled", "failed"]


@dataclass(frozen=True, slots=True)
class ModelEnded:
    """Its workers end though the app did not unload it: nobody had used it for `ModelSpec.idle_unload_seconds` ("idle"), its memory
    was needed ("evicted"), or other weights have its name and its last request is over ("swapped")."""

    model: str
    reason: Literal["idle", "evicted", "swapped"]


@dataclass(frozen=True, slots=True)
class ModelSwapped:
    """From now on new requests go to other weights. Fingerprints as in `Completion.fingerprint`; `previous` None: never ready."""

    model: str
    previous: str | None
    fingerprint: str


@dataclass(frozen=True, slots=True)
class WorkerHealthChanged:
    """stuck: past what it promised, it is being ended, and its requests go on in the next one. gone: its process was seen to exit.
    asleep: the machine slept, which nobody is blamed for. Otherwise a worker is well; `WorkerStats.health` says whether it is busy.

    report: the directory in which what is known of a stall was left, None if there is none.
    """

    model: str
    incarnation: int
    health: Literal["stuck", "gone", "asleep"]
    detail: str
    report: str | None = None


WatchEvent = (
    ModelStateChanged | WorkerHealthChanged | ModelEnded | ModelSwapped | LoadProgress | WorkerDied | RequestQueued | RequestEnded
)


class Watch:
    """`async with rt.watch() as events: async for event in events: …`. Ends when the Runtime closes.

    `dropped` counts the events this watcher was too slow for. One reader.
    """

    def __init__(self, hub: WatchHub) -> None:
        self._hub = hub
        self._queue: deque[WatchEvent] = deque()
        self._changed = anyio.Event()
        self._ended = False
        self.dropped = 0

    async def __aenter__(self) -> Self:
        self._hub._join(self)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._hub._leave(self)
        self._end()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> WatchEvent:
        await anyio.lowlevel.checkpoint()
        while not self._queue:
            if self._ended:
                raise StopAsyncIteration
            self._changed = anyio.Event()
            await self._changed.wait()
        return self._queue.popleft()

    def _put(self, event: WatchEvent) -> None:
        if len(self._queue) >= WATCH_QUEUE_EVENTS:
            self._queue.popleft()
            self.dropped += 1
        self._queue.append(event)
        self._changed.set()

    def _end(self) -> None:
        self._ended = True
        self._changed.set()


class WatchHub:
    """Gives every event to every watcher; never blocks."""

    def __init__(self) -> None:
        self._watchers: list[Watch] = []
        self._closed = False

    def publish(self, event: WatchEvent) -> None:
        for watcher in self._watchers:
            watcher._put(event)

    def close(self) -> None:
        """Let the watchers read what is queued, then end."""
        self._closed = True
        for watcher in self._watchers:
            watcher._end()

    def _join(self, watcher: Watch) -> None:
        if self._closed:
            watcher._end()
        self._watchers.append(watcher)

    def _leave(self, watcher: Watch) -> None:
        if watcher in self._watchers:
            self._watchers.remove(watcher)
