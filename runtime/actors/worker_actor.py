"""Who keeps one model's worker alive? Starts incarnation after incarnation until it is stopped or its budget is spent.

A start that fails before the model was ever ready is told to those who asked for the load, and not repeated. Later deaths are
told to the scheduler through the listener and followed by a restart, with back-off.
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import anyio
import msgspec

from runtime.actors.endings import Ending, last_error, load_error, worker_error
from runtime.actors.health import RestartBudget
from runtime.actors.incarnation import Incarnation
from runtime.actors.lifecycle import Health, Lifecycle, WorkerState
from runtime.actors.reports import Stall
from runtime.actors.roles import Listener, MemoryPort, Process
from runtime.config import ModelSpec, Settings
from runtime.errors import (
    ExitReport,
    ModelNotLoaded,
    ModelUnavailable,
    TroupeError,
)
from runtime.protocol.channel import HostChannel
from runtime.protocol.commands import AnyCommand, Configure, Inspect, Load, Prepare, Prompt
from runtime.protocol.events import AnyEvent, Heartbeat, Inspected, Loading, ModelFacts, Prepared, Ready, Refused, WorkerReport
from runtime.protocol.ids import Holder, ModelName, RequestId, public_name
from runtime.protocol.ids import Incarnation as IncarnationNumber

Launch = Callable[[ModelSpec, str, IncarnationNumber], Awaitable[tuple[Process, HostChannel]]]
"""(spec, key, incarnation) → a started process and its open channel. :raises OSError: the process cannot be started."""


class Share(NamedTuple):
    """What a worker may take of the machine; see `Configure`."""

    compute_threads: int
    prefix_memory_bytes: int


class _Question:
    """One command that somebody awaits the answer of. `answer` stays None when the worker ends before."""

    def __init__(self) -> None:
        self.answered = anyio.Event()
        self.answer: AnyEvent | None = None


class WorkerActor:
    """One replica's worker over all its incarnations. `run` once, in a task of its own; everything else at any time."""

    def __init__(
        self,
        spec: ModelSpec,
        name: ModelName,
        load: Load,
        serial: int,
        *,
        launch: Launch,
        listener: Listener,
        settings: Settings,
        share: Callable[[ModelSpec], Share],
        memory: MemoryPort,
        clock: Callable[[], float],
    ) -> None:
        self.spec = spec
        self.load = load
        self.name = name
        self.public_name = public_name(name)
        self.facts: ModelFacts | None = None
        self.last_beat: Heartbeat | None = None
        self.is_stuck = False
        self.num_restarts = 0
        self.error: TroupeError | None = None
        self.settled = anyio.Event()
        """The first load succeeded (`facts`) or the actor is over (`error`)."""
        self.over = anyio.Event()
        self._serial = serial
        self._holder = Holder(name, serial)
        self._memory = memory
        self._launch = launch
        self._listener = listener
        self._settings = settings
        self._share = share
        self._sent: Share | None = None
        self._clock = clock
        self._budget = RestartBudget(settings.max_restarts)
        self._lifecycle = Lifecycle()
        self._number = IncarnationNumber(0)
        self._incarnation: Incarnation | None = None
        self._num_malformed_before = 0
        self._stopping = anyio.Event()
        self._launching = anyio.CancelScope()
        self._questions: dict[tuple[str, int], _Question] = {}
        self._inspection_numbers = itertools.count(1)

    # -- facts ----------------------------------------------------------------------------------------------

    @property
    def state(self) -> WorkerState:
        """A worker that is about to be started counts as SPAWNED."""
        return self._lifecycle.state or WorkerState.SPAWNED

    @property
    def pid(self) -> int | None:
        return self._incarnation.process.pid if self._incarnation is not None else None

    @property
    def reserved_bytes(self) -> int:
        """Of the machine's memory, for this worker."""
        return self._memory.reserved(self._holder)

    @property
    def incarnation(self) -> IncarnationNumber:
        return self._number

    @property
    def num_malformed(self) -> int:
        """Frames that were no events, over all incarnations."""
        return self._num_malformed_before + (self._incarnation.num_malformed if self._incarnation is not None else 0)

    @property
    def is_stopping(self) -> bool:
        return self._stopping.is_set()

    # -- commands -------------------------------------------------------------------------------------------

    def send(self, incarnation: IncarnationNumber, command: AnyCommand) -> None:
        """Dropped unless that incarnation is serving."""
        current = self._incarnation
        if current is not None and current.number == incarnation and current.is_ready:
            current.send(command)

    def breach(self, incarnation: IncarnationNumber, what: str) -> None:
        if self._incarnation is not None and self._incarnation.number == incarnation:
            self._incarnation.breach(what)

    def configure(self) -> None:
        """Tell the worker its share of the machine, when that has changed."""
        share = self._share(self.spec)
        if share != self._sent and self._incarnation is not None and self._incarnation.is_ready:
            self._sent = share
            self._incarnation.send(Configure(*share))

    async def inspect(self) -> WorkerReport:
        """:raises ModelUnavailable: no process serves now, or it ended before it answered."""
        number = next(self._inspection_numbers)
        answer = await self._ask(("inspect", number), Inspect(number))
        assert isinstance(answer, Inspected)
        return answer.report

    async def prepare(self, request: RequestId, prompt: Prompt) -> Prepared | Refused:
        """Render and tokenize a prompt under an id that nothing else has. :raises ModelUnavailable: as `inspect`."""
        answer = await self._ask(("prepare", request), Prepare(request, prompt))
        assert isinstance(answer, Prepared | Refused)
        return answer

    async def _ask(self, key: tuple[str, int], command: AnyCommand) -> AnyEvent:
        current = self._incarnation
        if current is None or not current.is_ready:
            raise ModelUnavailable(self.public_name, f"is {self.state.value}, so no worker can answer now; try again")
        question = self._questions[key] = _Question()
        current.send(command)
        await question.answered.wait()
        if question.answer is None:
            raise ModelUnavailable(self.public_name, "its worker ended before it answered; try again")
        return question.answer

    def stop(self, *, at_once: bool = False) -> None:
        """End it for good: in order when it is ready and not `at_once`. `over` is set when nothing of it is left. Idempotent."""
        self._stopping.set()
        self._launching.cancel()  # a stopped actor launches nothing any more
        if self._incarnation is None:
            return
        if at_once:
            self._incarnation.kill()
        else:
            if self._incarnation.is_ready:
                self._move(WorkerState.DRAINING)
            self._incarnation.stop()

    # -- the life -------------------------------------------------------------------------------------------

    async def run(self) -> None:
        try:
            if await self._is_admitted():
                while await self._live_once():
                    pass
        finally:
            self._memory.released(self._holder)
            self.error = self.error or ModelNotLoaded(self.public_name, "was unloaded")
            self.settled.set()
            self.over.set()

    async def _is_admitted(self) -> bool:
        """Whether there is memory for it; its bytes stay reserved over all its incarnations."""
        error = None
        with self._launching:
            error = await self._memory.admit(self._holder, self.spec, self.load)
        if error is None or self.is_stopping:
            return True
        self.error = error
        for state in (WorkerState.SPAWNED, WorkerState.DEAD, WorkerState.FAILED):
            self._move(state)
        self._listener.model_removed(self.name, error)
        return False

    async def _live_once(self) -> bool:
        """One incarnation, and the wait before the next. False: there is no next."""
        self._launching = anyio.CancelScope()
        if self.is_stopping:
            self._launching.cancel()
        self._number = IncarnationNumber(self._number + 1)
        born = None
        why_not = "its start was cancelled"
        with self._launching:
            try:
                born = await self._launch(self.spec, f"w{self._serial}.{self._number}", self._number)
            except OSError as error:
                why_not = f"its process cannot be started: {error}"
        if born is None:
            self._move(WorkerState.SPAWNED)
            report = ExitReport(self.public_name, 0, self._number, None, None, "unborn", 0.0, "")
            return await self._bury(Ending("unborn", why_not, report))
        process, channel = born
        stacks = channel.beside("stacks")
        self._incarnation = Incarnation(self._number, process, channel, self, self._settings, self._clock, stacks=stacks)
        self._move(WorkerState.SPAWNED)
        if self.is_stopping:
            self._incarnation.kill()
        try:
            ending = await self._incarnation.run()
        finally:
            self._num_malformed_before += self._incarnation.num_malformed
            self._incarnation = None
            self.last_beat = None
            self._end_questions()
        return await self._bury(ending)

    @property
    def health(self) -> Health:
        if self._incarnation is None:
            return "gone"
        if self.is_stuck:
            return "stuck"
        return "idle" if self.last_beat is None or self.last_beat.phase == "idle" else "busy"

    async def _bury(self, ending: Ending) -> bool:
        self.is_stuck = False
        if ending.cause == "exit":
            self._listener.health_changed(self.name, self._number, "gone", ending.report.describe())
        if self._lifecycle.state is WorkerState.DRAINING and ending.cause == "asked":
            self._move(WorkerState.STOPPED)
            return False
        self._move(WorkerState.DEAD)
        if self.is_stopping:
            self._move(WorkerState.STOPPED)
            return False
        if not self.settled.is_set():
            self.error = load_error(self.public_name, ending)
            self._move(WorkerState.FAILED)
            self._listener.model_removed(self.name, self.error)
            return False
        wait = self._budget.died(self._clock()) if ending.may_be_repeated else None
        if wait is None:
            self.error = last_error(self.public_name, ending)
            self._move(WorkerState.FAILED)
            self._listener.worker_lost(self.name, self._number, self.error, ending.report, False)
            return False
        self._move(WorkerState.BACKOFF)
        self._listener.worker_lost(self.name, self._number, worker_error(self.public_name, ending), ending.report, True)
        with anyio.move_on_after(wait):
            await self._stopping.wait()
            self._move(WorkerState.STOPPED)
            return False
        self.num_restarts += 1
        return True

    def _move(self, to: WorkerState) -> None:
        left = self._lifecycle.move(to)
        self._listener.worker_moved(self.name, left, to, self._number, self.pid)

    def _end_questions(self) -> None:
        for question in self._questions.values():
            question.answered.set()
        self._questions.clear()

    # -- what the incarnation tells (its `Owner`) -----------------------------------------------------------

    def load_command(self) -> Load:
        self._sent = self._share(self.spec)
        return msgspec.structs.replace(self.load, reserved_bytes=self.reserved_bytes, **self._sent._asdict())

    def connected(self) -> None:
        self._move(WorkerState.CONNECTED)

    def loading(self) -> None:
        self._move(WorkerState.LOADING)

    def progressed(self, progress: Loading) -> None:
        self._listener.load_progress(self.name, progress)

    def ready(self, event: Ready) -> None:
        self.facts = event.facts
        self._memory.loaded(self._holder, self.spec, event.facts)
        self._move(WorkerState.READY)
        self.configure()
        self._listener.worker_up(self.name, self._number, event.facts)
        self.settled.set()

    def said(self, event: AnyEvent) -> None:
        question = self._questions.pop(_question_key(event), None) if self._questions else None
        if question is not None:  # also of one who no longer waits: it is nobody else's business
            question.answer = event
            question.answered.set()
        elif not isinstance(event, Inspected):
            self._listener.worker_said(self.name, self._number, event)

    def slept(self, seconds: float) -> None:
        self._listener.health_changed(self.name, self._number, "asleep", f"the machine slept for {seconds:.0f} s")

    async def stalled(self, stall: Stall) -> str:
        self.is_stuck = True
        return await self._listener.stalled(stall)

    def beat(self, event: Heartbeat) -> None:
        self.last_beat = event
        self._memory.beat(self._holder, event)


def _question_key(event: AnyEvent) -> tuple[str, int]:
    match event:
        case Inspected(number=number):
            return ("inspect", number)
        case Prepared(request=request) | Refused(requests=(request,)):
            return ("prepare", request)
        case _:
            return ("", 0)
