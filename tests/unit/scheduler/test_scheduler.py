"""The actor around the rules: submitting, carrying out instructions, timers, and stimuli that come from within."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio
import pytest

from runtime.config import Settings
from runtime.errors import DeadlineExceeded, ModelNotLoaded, Overloaded, RuntimeClosed, WorkerCrashed
from runtime.protocol.commands import AnyCommand, Prefill, Prepare, Sampling, TextPrompt
from runtime.protocol.events import AnyEvent, Prefilled, Prepared, Released, StepDone, StepRow
from runtime.protocol.ids import Incarnation, ModelName, SequenceId, TenantId
from runtime.protocol.tokens import TokenIds
from runtime.scheduler.ports import SchedulerPort
from runtime.scheduler.request import Outcome, Piece, Request
from runtime.scheduler.scheduler import Scheduler
from runtime.scheduler.stimuli import ModelAdded, WorkerLost, WorkerSaid, WorkerUp
from runtime.scheduler.stream import TokenStream
from tests.unit.scheduler.house import MODEL, crash, facts

pytestmark = pytest.mark.anyio

FIRST = Incarnation(1)


class Port:
    """The workers as the scheduler sees them; `on_send` lets a test answer from within."""

    def __init__(self) -> None:
        self.sent: list[AnyCommand] = []
        self.breaches: list[str] = []
        self.on_send: Callable[[AnyCommand], None] = lambda command: None

    def send(self, model: ModelName, incarnation: Incarnation, command: AnyCommand) -> None:
        self.sent.append(command)
        self.on_send(command)

    def breach(self, model: ModelName, incarnation: Incarnation, what: str) -> None:
        self.breaches.append(what)


class Clock:
    """Stands where the test sets it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def a_scheduler(settings: Settings | None = None, **changes: Callable[[], float]) -> tuple[Scheduler, Port]:
    port = Port()
    scheduler = Scheduler(port, settings or Settings(), **changes)
    scheduler.offer(ModelAdded(MODEL, 2))
    scheduler.offer(WorkerUp(MODEL, FIRST, facts()))
    return scheduler, port


def submit(scheduler: Scheduler, *, max_tokens: int = 10, deadline_seconds: float | None = None) -> TokenStream:
    return scheduler.submit(
        Request(
            scheduler.new_request_id(),
            TenantId("t"),
            MODEL,
            TextPrompt("hello"),
            Sampling(),
            max_tokens,
            deadline_seconds=deadline_seconds,
        )
    )


def hear(scheduler: Scheduler, *events: AnyEvent) -> None:
    for event in events:
        scheduler.offer(WorkerSaid(MODEL, FIRST, event))
        scheduler.state.validate()


def first_row(port: Port) -> SequenceId:
    return next(row.sequence for command in port.sent if isinstance(command, Prefill) for row in command.rows)


@asynccontextmanager
async def running(scheduler: Scheduler) -> AsyncIterator[None]:
    async with anyio.create_task_group() as tasks:
        await tasks.start(lambda *, task_status: scheduler.run(task_status=task_status))
        yield
        tasks.cancel_scope.cancel()


async def test_it_is_the_port_that_the_actors_know() -> None:
    scheduler, _ = a_scheduler()
    port: SchedulerPort = scheduler
    port.offer(ModelAdded(ModelName("another"), 1))
    assert set(scheduler.stats().models) == {MODEL, "another"}


async def test_a_request_streams_from_submission_to_its_outcome() -> None:
    scheduler, port = a_scheduler()
    stream = submit(scheduler)
    hear(scheduler, Prepared(stream.request.id, TokenIds([1, 2])))
    sequence = first_row(port)
    hear(scheduler, Prefilled(((sequence, 2),), 0.1), StepDone(1, (StepRow(sequence, 2, (5,), "a"),)))
    first = await stream.receive()
    assert isinstance(first, Piece)
    assert (first.tokens, first.text) == ((5,), "a")
    hear(scheduler, StepDone(2, (StepRow(sequence, 3, (), "", "stop"),)), Released((), (sequence,), 2))
    last = await stream.receive()
    assert isinstance(last, Piece)
    assert last.finish == "stop"
    outcome = await stream.receive()
    assert isinstance(outcome, Outcome)
    assert outcome.state == "finished"
    assert scheduler.stats().finished == 1


async def test_a_refused_request_raises_its_error_and_leaves_nothing() -> None:
    scheduler, _ = a_scheduler(Settings(max_queued=1))
    for _ in range(3):
        submit(scheduler)
    with pytest.raises(Overloaded):
        submit(scheduler)
    assert scheduler.stats().rejected == 1
    with pytest.raises(ModelNotLoaded):
        submit(Scheduler(Port(), Settings()))


async def test_cancelling_a_stream_ends_it_before_the_call_returns() -> None:
    scheduler, _ = a_scheduler()
    stream = submit(scheduler)
    stream.cancel()
    assert stream.outcome is not None
    assert stream.outcome.state == "cancelled"
    assert (await stream.receive()) is stream.outcome


async def test_a_worker_lost_for_good_from_within_a_send_ends_its_requests_and_not_the_scheduler() -> None:
    scheduler, port = a_scheduler()
    earlier = submit(scheduler)

    def lose(command: AnyCommand) -> None:
        if isinstance(command, Prepare):
            scheduler.offer(WorkerLost(MODEL, FIRST, crash(), None, False))
            assert earlier.outcome is None, "one stimulus is carried out before the next is handled"

    port.on_send = lose
    for stream in (submit(scheduler), earlier):
        assert stream.outcome is not None
        assert isinstance(stream.outcome.error, WorkerCrashed)
    scheduler.state.validate()
    port.on_send = lambda command: None
    scheduler.offer(ModelAdded(MODEL, 4))
    scheduler.offer(WorkerUp(MODEL, Incarnation(2), facts()))
    assert submit(scheduler).outcome is None


@pytest.mark.parametrize("place", ["handle", "deliver"])
async def test_a_defect_of_the_scheduler_ends_every_stream_instead_of_leaving_its_readers_waiting(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler, port = a_scheduler()
    ended: list[Outcome] = []
    scheduler.on_end = lambda request, outcome: ended.append(outcome)
    streams = [submit(scheduler), submit(scheduler)]
    for stream in streams:
        hear(scheduler, Prepared(stream.request.id, TokenIds([1, 2])))
    step = WorkerSaid(MODEL, FIRST, StepDone(1, (StepRow(first_row(port), 2, (5,), "a"),)))

    def fail(*arguments: object) -> None:
        raise ZeroDivisionError

    async with anyio.create_task_group() as group:
        for stream in streams:
            group.start_soon(stream.wait)
            group.start_soon(stream.receive)
        await anyio.wait_all_tasks_blocked()
        monkeypatch.setattr(*((scheduler.state, "handle") if place == "handle" else (streams[0], "deliver")), fail)
        with pytest.raises(ZeroDivisionError):
            scheduler.offer(step)
    for stream in streams:
        assert stream.outcome is not None
        assert isinstance(stream.outcome.error, RuntimeClosed)
        assert isinstance(stream.outcome.error.__cause__, ZeroDivisionError)
        stream.cancel()
    assert ended == [stream.outcome for stream in streams]
    scheduler.offer(step)
    with pytest.raises(RuntimeClosed):
        submit(scheduler)


async def test_a_breach_is_passed_on() -> None:
    scheduler, port = a_scheduler()
    stream = submit(scheduler)
    hear(scheduler, Prepared(stream.request.id, TokenIds([1, 2])))
    hear(scheduler, StepDone(1, (StepRow(first_row(port), 99, (1,), "x"),)))
    assert len(port.breaches) == 1
    assert "99" in port.breaches[0]


async def test_a_deadline_passes_by_itself_also_one_that_comes_before_those_already_waited_for() -> None:
    scheduler, _ = a_scheduler()
    async with running(scheduler):
        far = submit(scheduler, deadline_seconds=3600.0)
        await anyio.wait_all_tasks_blocked()
        near = submit(scheduler, deadline_seconds=0.01)
        outcome = await near.wait()
        assert isinstance(outcome.error, DeadlineExceeded)
        assert far.outcome is None


async def test_deadlines_follow_the_given_clock() -> None:
    clock = Clock()
    scheduler, _ = a_scheduler(clock=clock)
    streams = [submit(scheduler, deadline_seconds=seconds) for seconds in (5.0, 50.0)]
    clock.now += 6.0
    async with running(scheduler):
        await streams[0].wait()
    assert [stream.outcome is None for stream in streams] == [False, True]


async def test_request_ids_are_never_given_twice() -> None:
    scheduler, _ = a_scheduler()
    assert len({scheduler.new_request_id() for _ in range(100)}) == 100
