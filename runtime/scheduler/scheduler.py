"""The Scheduler: carries stimuli to `SchedulerState` and its instructions to workers and streams.

Everything happens at once, on the event loop's thread, inside `offer`; the only task is the timer in `run`.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable
from math import inf
from typing import assert_never

import anyio
from anyio.abc import TaskStatus

from runtime.config import Settings
from runtime.errors import RuntimeClosed, TroupeError
from runtime.protocol.ids import RequestId
from runtime.protocol.tokens import TokenIds
from runtime.scheduler.ports import FilesPort, WorkerPort
from runtime.scheduler.request import Outcome, Request, Timings
from runtime.scheduler.state import SchedulerState
from runtime.scheduler.stats import SchedulerStats, snapshot
from runtime.scheduler.stimuli import (
    Accept,
    Breach,
    DeleteFiles,
    Deliver,
    End,
    Instruction,
    MarkUsed,
    Reject,
    Send,
    Stimulus,
    Submit,
    Tick,
    WakeAt,
)
from runtime.scheduler.stream import TokenStream


class Scheduler:
    """Implements `SchedulerPort`. `state` may be looked at and validated, never changed, from outside.

    `on_end` may be set: it is called once for each accepted request, after its stream has its outcome.
    """

    def __init__(
        self,
        workers: WorkerPort,
        settings: Settings,
        *,
        files: FilesPort | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """files: may be left out where `settings` allow no prefix files (prefix_disk_bytes is 0 or None)."""
        self.state = SchedulerState(settings)
        self.on_end: Callable[[Request, Outcome], None] = lambda request, outcome: None
        self._workers = workers
        self._files = files
        self._window_tokens = settings.stream_window_tokens
        self._clock = clock
        self._request_ids = itertools.count(1)
        self._streams: dict[RequestId, TokenStream] = {}
        self._rejections: dict[RequestId, TroupeError] = {}
        self._stimuli: deque[Stimulus] = deque()
        self._is_handling = False
        self._defect: Exception | None = None
        self._wake_at = inf
        self._wake_changed: anyio.Event | None = None

    def new_request_id(self) -> RequestId:
        return RequestId(next(self._request_ids))

    def submit(self, request: Request) -> TokenStream:
        """Start a request; leave its stream by its outcome or by `cancel`.

        :raises AdmissionError: the tenant's or the model's queue is full.
        :raises ModelError: no such model, or it will not come back.
        :raises RuntimeClosed: a defect has ended this scheduler.
        """
        if self._defect is not None:
            raise RuntimeClosed from self._defect
        assert not self._is_handling, "submit comes from clients, never from a port"
        assert request.id not in self._streams, f"request id {request.id} is taken; ids come from new_request_id"
        stream = self._streams[request.id] = TokenStream(request, self.offer, self._window_tokens)
        self.offer(Submit(request))
        if request.id in self._rejections:
            del self._streams[request.id]
            raise self._rejections.pop(request.id)
        return stream

    def offer(self, stimulus: Stimulus) -> None:
        """Handle it and carry the instructions out before returning; one that comes meanwhile (from a port) is handled after it.

        An exception is a defect of ours. Nobody may wait on tables that are half changed, so it ends every stream with
        `RuntimeClosed`, comes out of this one call, and nothing is handled any more.
        """
        if self._defect is not None:
            return
        self._stimuli.append(stimulus)
        if self._is_handling:
            return
        self._is_handling = True
        try:
            while self._stimuli:
                for instruction in self.state.handle(self._stimuli.popleft(), self._clock()):
                    self._carry_out(instruction)
        except Exception as error:
            self._give_up(error)
            raise
        finally:
            self._is_handling = False

    def _give_up(self, defect: Exception) -> None:
        self._defect = defect
        self._stimuli.clear()
        streams, self._streams = list(self._streams.values()), {}
        for stream in streams:
            closed = RuntimeClosed()
            closed.__cause__ = defect
            stream.end(Outcome("failed", TokenIds(), Timings(None, None, None, 0.0), "", error=closed))
        for stream in streams:
            assert stream.outcome is not None
            self.on_end(stream.request, stream.outcome)

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Offer a Tick whenever one is due. Ends only by being cancelled."""
        task_status.started()
        while True:
            self._wake_changed = anyio.Event()
            with anyio.move_on_after(self._wake_at - self._clock()):
                await self._wake_changed.wait()
            if self._clock() >= self._wake_at:
                self._wake_at = inf
                self.offer(Tick())

    def stats(self) -> SchedulerStats:
        return snapshot(self.state.book)

    def _carry_out(self, instruction: Instruction) -> None:
        if isinstance(instruction, Deliver):  # first, being by far the most frequent
            self._streams[instruction.request].deliver(instruction.piece)
            return
        match instruction:
            case Send(model=model, incarnation=incarnation, command=command):
                self._workers.send(model, incarnation, command)
            case End(request=request, outcome=outcome):
                stream = self._streams.pop(request)
                stream.end(outcome)
                self.on_end(stream.request, outcome)
            case Reject(request=request, error=error):
                self._rejections[request] = error
            case Accept():
                pass
            case WakeAt(when=when):
                self._wake_at = when
                if self._wake_changed is not None:
                    self._wake_changed.set()
            case DeleteFiles(entries=entries):
                if self._files is not None:
                    self._files.delete(entries)
            case MarkUsed(entries=entries):
                if self._files is not None:
                    self._files.mark_used(entries)
            case Breach(model=model, incarnation=incarnation, what=what):
                self._workers.breach(model, incarnation, what)
            case _:
                assert_never(instruction)
