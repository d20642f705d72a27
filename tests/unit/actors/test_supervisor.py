"""The supervisor with scripted processes: every handshake that can go wrong, and who hears of it. No process is started."""

from __future__ import annotations

import math
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from runtime.actors.lifecycle import WorkerState
from runtime.actors.supervisor import Supervisor
from runtime.actors.worker_actor import WorkerActor
from runtime.config import ModelSpec, Settings
from runtime.errors import (
    ModelLoadFailed,
    ModelNotLoaded,
    ModelUnavailable,
    ProtocolMismatch,
    RuntimeClosed,
    TroupeError,
    WorkerCrashed,
    WorkerUnresponsive,
)
from runtime.protocol.commands import PROTOCOL_VERSION, Configure, FakeScript, Inspect, Load, Prepare, Release, TextPrompt
from runtime.protocol.events import Failed, Heartbeat, Hello, Inspected, Loading, Ready, Released, StepDone, WorkerReport
from runtime.protocol.ids import Incarnation, ModelName, RequestId, SequenceId
from tests.support.scripted import FACTS, PlentyOfMemory, RecordingListener, ScriptedLaunch, ScriptedProcess
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

CHAT = ModelName("chat")
SPEC = ModelSpec("chat", kind="fake", fake=FakeScript())
LOAD = Load("chat", "", kind="fake", fake=FakeScript())
FAR = 1000.0
"""A deadline that no test reaches."""


class House:
    """A supervisor with everything around it played."""

    def __init__(self, group: anyio.abc.TaskGroup, directory: Path, settings: Settings, num_cores: int) -> None:
        self.launch = ScriptedLaunch(directory)
        self.heard = RecordingListener()
        self.memory = PlentyOfMemory()
        self.group = group
        self.supervisor = Supervisor(group, self.launch, self.heard, settings, self.memory, num_cores=num_cores)
        self.results: list[WorkerActor | BaseException] = []

    def start_loading(self, spec: ModelSpec = SPEC) -> anyio.CancelScope:
        scope = anyio.CancelScope()
        self.group.start_soon(self._load, spec, scope)
        return scope

    async def _load(self, spec: ModelSpec, scope: anyio.CancelScope) -> None:
        with scope:
            try:
                self.results.append(await self.supervisor.load(spec, LOAD))
            except TroupeError as error:
                self.results.append(error)

    async def load_ready(self, spec: ModelSpec = SPEC) -> ScriptedProcess:
        number, num_results = len(self.launch.processes) + 1, len(self.results)
        self.start_loading(spec)
        process = await self.launch.process(number)
        process.become_ready()
        await until(lambda: len(self.results) > num_results)
        assert isinstance(self.results[-1], WorkerActor)
        return process

    async def failure(self) -> TroupeError:
        await until(lambda: bool(self.results))
        assert isinstance(self.results[0], TroupeError)
        return self.results[0]


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="t") as name:
        yield Path(name)


@asynccontextmanager
async def house(directory: Path, num_cores: int = 2, **settings: float) -> AsyncIterator[House]:
    every = {"connect_seconds": FAR, "load_seconds": FAR, "silence_seconds": FAR, "grace_seconds": 1.0}
    async with anyio.create_task_group() as group:
        made = House(group, directory, Settings(**{**every, **settings}), num_cores)  # type: ignore[arg-type]
        yield made
        await made.supervisor.close()


async def test_a_load_goes_through_its_states_and_reports_progress(directory: Path) -> None:
    async with house(directory) as it:
        process = await it.load_ready()
        command = await process.hear()
        assert isinstance(command, Load)
        assert command.name == "chat"
        assert it.heard.moves == [WorkerState.SPAWNED, WorkerState.CONNECTED, WorkerState.LOADING, WorkerState.READY]
        assert it.heard.progress == [Loading("weights", 1, 1)]
        assert it.heard.added == ["chat"]
        assert it.supervisor.facts(CHAT) == FACTS


async def test_sixteen_callers_share_one_process_and_one_result(directory: Path) -> None:
    async with house(directory) as it:
        for _ in range(16):
            it.start_loading()
        (await it.launch.process(1)).become_ready()
        await until(lambda: len(it.results) == 16)
        assert len({id(result) for result in it.results}) == 1
        assert len(it.launch.processes) == 1
        it.start_loading()
        await until(lambda: len(it.results) == 17)
        assert len(it.launch.processes) == 1


async def test_sixteen_callers_share_one_failure_each_with_an_error_of_its_own(directory: Path) -> None:
    async with house(directory) as it:
        for _ in range(16):
            it.start_loading()
        process = await it.launch.process(1)
        process.say_hello()
        process.say(Failed("missing_weights", "no *.safetensors in the directory"))
        process.exit(1)
        await until(lambda: len(it.results) == 16)
        assert {(type(error), str(error), getattr(error, "reason", "")) for error in it.results} == {
            (ModelLoadFailed, "model 'chat': no *.safetensors in the directory", "missing_weights")
        }
        assert len({id(error) for error in it.results}) == 16
        assert len(it.launch.processes) == 1


async def test_another_spec_under_the_same_name_is_refused(directory: Path) -> None:
    async with house(directory) as it:
        await it.load_ready()
        it.results.clear()
        it.start_loading(ModelSpec("chat", kind="fake", fake=FakeScript(), max_slots=3))
        error = await it.failure()
        assert isinstance(error, ModelLoadFailed)
        assert (error.reason, "unload it first" in str(error)) == ("conflict", True)


async def test_cancelling_one_caller_leaves_the_load_to_the_other(directory: Path) -> None:
    async with house(directory) as it:
        leaver = it.start_loading()
        it.start_loading()
        process = await it.launch.process(1)
        await anyio.wait_all_tasks_blocked()
        leaver.cancel()
        await anyio.wait_all_tasks_blocked()
        assert not process.was_killed
        process.become_ready()
        await until(lambda: bool(it.results))
        assert isinstance(it.results[0], WorkerActor)


async def test_when_the_last_caller_is_cancelled_the_process_is_killed_and_the_name_is_free(directory: Path) -> None:
    async with house(directory) as it:
        scopes = [it.start_loading() for _ in range(3)]
        process = await it.launch.process(1)
        await anyio.wait_all_tasks_blocked()
        for scope in scopes:
            scope.cancel()
        await until(lambda: process.was_killed)
        assert it.supervisor.actors() == []
        assert [name for name, _ in it.heard.removed] == ["chat"]
        (second := await it.load_ready())
        assert second is not process


async def test_a_worker_of_another_protocol_version_is_refused(directory: Path) -> None:
    async with house(directory) as it:
        it.start_loading()
        process = await it.launch.process(1)
        process.say(Hello(PROTOCOL_VERSION + 1, process.pid, 1))
        error = await it.failure()
        assert isinstance(error, ProtocolMismatch)
        assert f"version {PROTOCOL_VERSION + 1}" in str(error)
        assert process.was_killed
        assert error.report.stderr_tail == "last words"


async def test_a_worker_that_never_says_hello_is_ended_at_its_deadline(directory: Path) -> None:
    async with house(directory, connect_seconds=0.05) as it:
        it.start_loading()
        error = await it.failure()
        assert isinstance(error, ModelLoadFailed)
        assert (error.reason, "hello" in str(error), "last words" in str(error)) == ("timeout", True, True)
        assert it.launch.processes[0].was_killed


async def test_a_load_that_never_ends_is_ended_at_its_deadline(directory: Path) -> None:
    async with house(directory, load_seconds=0.05) as it:
        it.start_loading()
        (await it.launch.process(1)).say_hello()
        error = await it.failure()
        assert isinstance(error, ModelLoadFailed)
        assert (error.reason, "load_seconds" in str(error)) == ("timeout", True)


async def test_a_crash_during_the_first_load_is_told_with_its_report_and_not_repeated(directory: Path) -> None:
    async with house(directory) as it:
        it.start_loading()
        process = await it.launch.process(1)
        process.say_hello()
        await until(lambda: WorkerState.LOADING in it.heard.moves)
        process.exit(3)
        error = await it.failure()
        assert isinstance(error, ModelLoadFailed)
        assert error.reason == "crashed"
        assert isinstance(error.__cause__, WorkerCrashed)
        assert (error.__cause__.report.exit_code, error.__cause__.report.phase) == (3, "connected")
        assert it.heard.moves[-2:] == [WorkerState.DEAD, WorkerState.FAILED]
        assert len(it.launch.processes) == 1
        assert it.supervisor.actors() == []


async def test_a_process_that_cannot_be_started_is_a_failed_load(directory: Path) -> None:
    async with house(directory) as it:
        it.launch.failure = FileNotFoundError("no python here")
        it.start_loading()
        error = await it.failure()
        assert isinstance(error, ModelLoadFailed)
        assert "no python here" in str(error)


@pytest.mark.parametrize("way", ["cancel", "unload", "close"])
async def test_a_start_that_takes_for_ever_can_be_given_up(directory: Path, way: str) -> None:
    async with house(directory) as it:
        it.launch.is_stuck = True
        scope = it.start_loading()
        await until(lambda: it.launch.num_launches)
        if way == "cancel":
            scope.cancel()
        elif way == "unload":
            await it.supervisor.unload(CHAT)
        else:
            await it.supervisor.close()
        await until(lambda: it.heard.moves == [WorkerState.SPAWNED, WorkerState.DEAD, WorkerState.STOPPED])
        assert it.launch.processes == []
        assert it.supervisor.actors() == []


@pytest.mark.parametrize(
    "event", [Ready(FACTS), Loading("weights"), StepDone(1, ()), Released((), (), 0), Hello(PROTOCOL_VERSION, 1, 1)]
)
async def test_an_event_out_of_order_ends_the_worker(directory: Path, event: Any) -> None:
    async with house(directory) as it:
        it.start_loading()
        process = await it.launch.process(1)
        process.say(event)
        assert isinstance(await it.failure(), ModelLoadFailed)
        assert process.was_killed


async def test_a_ready_worker_that_dies_is_reported_and_started_again(directory: Path) -> None:
    async with house(directory) as it:
        process = await it.load_ready()
        process.say(StepDone(1, ()))
        process.exit(None)
        second = await it.launch.process(2)
        ((number, error, restarting),) = it.heard.lost
        assert (number, type(error), restarting) == (1, WorkerCrashed, True)
        assert it.heard.said == [StepDone(1, ())], "what it said before its end still counts"
        second.become_ready()
        await until(lambda: ("chat", 2) in it.heard.up)
        assert it.supervisor.find(CHAT).num_restarts == 1
        assert it.heard.moves[-6:] == [
            WorkerState.DEAD,
            WorkerState.BACKOFF,
            WorkerState.SPAWNED,
            WorkerState.CONNECTED,
            WorkerState.LOADING,
            WorkerState.READY,
        ]


async def test_a_load_that_fails_on_restart_ends_the_model_and_a_new_load_begins_anew(directory: Path) -> None:
    async with house(directory) as it:
        (await it.load_ready()).exit(None)
        second = await it.launch.process(2)
        second.say_hello()
        second.say(Failed("corrupt_weights", "truncated"))
        second.exit(1)
        await until(lambda: it.supervisor.find(CHAT).state is WorkerState.FAILED)
        assert isinstance(it.heard.lost[-1][1], ModelLoadFailed)
        assert it.heard.lost[-1][2] is False
        await it.load_ready()
        assert it.supervisor.find(CHAT).state is WorkerState.READY


async def test_the_fifth_death_is_the_last(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.actors.health.RESTART_FIRST_SECONDS", 0.001)
    async with house(directory) as it:
        await it.load_ready()
        for number in range(1, 6):
            process = await it.launch.process(number)
            if number > 1:
                process.become_ready()
            await until(lambda number=number: ("chat", number) in it.heard.up)
            process.exit(None)
        await until(lambda: it.supervisor.find(CHAT).state is WorkerState.FAILED)
        assert [restarting for _, _, restarting in it.heard.lost] == [True, True, True, True, False]
        assert isinstance(it.heard.lost[-1][1], ModelUnavailable)
        assert len(it.launch.processes) == 5


async def test_a_silent_worker_is_ended_and_replaced(directory: Path) -> None:
    async with house(directory, silence_seconds=0.05) as it:
        process = await it.load_ready()
        await until(lambda: bool(it.heard.lost))
        assert isinstance(it.heard.lost[0][1], WorkerUnresponsive)
        assert "no message" in str(it.heard.lost[0][1])
        assert process.was_killed


async def test_a_stuck_worker_is_asked_softly_first_and_its_report_is_named_to_whoever_asks_why(directory: Path) -> None:
    async with house(directory, silence_seconds=0.05) as it:
        process = await it.load_ready()
        process.ends_softly = True
        await until(lambda: bool(it.heard.lost))
        assert process.was_asked_softly
        assert not process.was_killed, "it ended by itself"
        assert isinstance(it.heard.lost[0][1], WorkerUnresponsive)
        assert "report: somewhere" in str(it.heard.lost[0][1])
        (stall,) = it.heard.stalls
        assert "no message" in stall.complaint
        assert ("from", "Ready") in [message[1:] for message in stall.messages]
        assert it.heard.health == [], "stuck is told with the report"


async def test_an_exit_is_called_gone_and_not_stuck(directory: Path) -> None:
    async with house(directory) as it:
        (await it.load_ready()).exit(None)
        await until(lambda: bool(it.heard.lost))
        assert [health for health, _ in it.heard.health] == ["gone"]
        assert it.heard.stalls == []


async def test_a_machine_that_slept_is_called_asleep_and_nobody_is_ended(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock that counts sleep jumps, and so, on some systems, does the other one."""
    slept = now = 0.0
    monkeypatch.setattr("runtime.actors.incarnation.asleep_seconds", lambda: slept)
    async with anyio.create_task_group() as group:
        launch, heard = ScriptedLaunch(directory), RecordingListener()
        settings = Settings(silence_seconds=5.0, connect_seconds=FAR, load_seconds=FAR, grace_seconds=1.0)
        supervisor = Supervisor(group, launch, heard, settings, PlentyOfMemory(), clock=lambda: now)
        group.start_soon(supervisor.load, SPEC, LOAD)
        process = await launch.process(1)
        process.become_ready()
        await until(lambda: bool(heard.up))
        slept += 3600.0
        now += 3600.0
        process.say(Released((), (), 0))  # something wakes the loop
        await until(lambda: bool(heard.health))
        assert heard.health == [("asleep", "the machine slept for 3600 s")]
        assert not heard.lost
        assert not process.was_asked_softly
        now += 4.9
        process.say(Released((), (), 0))
        await anyio.sleep(0.3)
        assert not heard.lost
        await supervisor.close()


async def test_what_came_while_the_hosts_own_loop_was_blocked_is_taken_in_before_the_worker_is_judged(directory: Path) -> None:
    now = 0.0

    def clock() -> float:
        return now

    async with anyio.create_task_group() as group:
        launch, heard = ScriptedLaunch(directory), RecordingListener()
        settings = Settings(silence_seconds=5.0, connect_seconds=FAR, load_seconds=FAR, grace_seconds=1.0)
        supervisor = Supervisor(group, launch, heard, settings, PlentyOfMemory(), clock=clock)
        group.start_soon(supervisor.load, SPEC, LOAD)
        process = await launch.process(1)
        process.become_ready()
        await until(lambda: bool(heard.up))
        now += 1000.0  # the loop stood still: its clock has moved, the worker's beats wait in the socket
        process.say(Heartbeat(0, "idle", 0.0, 0, 0))
        await anyio.sleep(0.5)
        assert not heard.lost
        assert not process.was_killed
        await supervisor.close()


async def test_a_breach_ends_and_replaces_the_worker(directory: Path) -> None:
    async with house(directory) as it:
        process = await it.load_ready()
        it.supervisor.breach(CHAT, Incarnation(7), "of another incarnation: ignored")
        it.supervisor.breach(CHAT, Incarnation(1), "tokens from nowhere")
        await until(lambda: bool(it.heard.lost))
        assert isinstance(it.heard.lost[0][1], WorkerUnresponsive)
        assert "tokens from nowhere" in str(it.heard.lost[0][1])
        assert process.was_killed
        await it.launch.process(2)


async def test_a_worker_that_takes_no_commands_is_ended_and_replaced(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.protocol.channel.COMMAND_SEND_MARK", 8)
    monkeypatch.setattr("runtime.protocol.channel.COMMAND_RECEIVE_MARK", 8)
    async with house(directory) as it:
        await it.load_ready()
        blob = "x" * 100_000
        for number in range(1000):
            it.supervisor.send(CHAT, Incarnation(1), Prepare(RequestId(number), TextPrompt(blob)))
            if it.heard.lost:
                break
            await anyio.lowlevel.checkpoint()
        await until(lambda: bool(it.heard.lost))
        assert isinstance(it.heard.lost[0][1], WorkerUnresponsive)


async def test_commands_to_a_lost_incarnation_or_an_unknown_model_are_dropped(directory: Path) -> None:
    async with house(directory) as it:
        process = await it.load_ready()
        assert isinstance(await process.hear(), Load)
        it.supervisor.send(CHAT, Incarnation(2), Release((RequestId(1),)))
        it.supervisor.send(ModelName("other"), Incarnation(1), Release((RequestId(2),)))
        it.supervisor.send(CHAT, Incarnation(1), Release((RequestId(3),)))
        assert await process.hear() == Release((RequestId(3),))


async def test_unloading_shuts_down_in_order_and_is_harmless_when_repeated(directory: Path) -> None:
    async with house(directory) as it:
        process = await it.load_ready()
        await it.supervisor.unload(CHAT)
        assert process.was_shut_down
        assert not process.was_killed
        assert it.heard.moves[-2:] == [WorkerState.DRAINING, WorkerState.STOPPED]
        assert isinstance(it.heard.removed[0][1], ModelNotLoaded)
        await it.supervisor.unload(CHAT)
        with pytest.raises(ModelNotLoaded):
            await it.supervisor.unload(ModelName("never"))


async def test_unloading_while_it_loads_ends_the_process_and_tells_the_callers(directory: Path) -> None:
    async with house(directory) as it:
        it.start_loading()
        process = await it.launch.process(1)
        process.say_hello()
        await until(lambda: WorkerState.LOADING in it.heard.moves)
        await it.supervisor.unload(CHAT)
        assert process.was_killed
        error = await it.failure()
        assert isinstance(error, ModelLoadFailed)
        assert error.reason == "unloaded"


async def test_unloading_during_the_back_off_ends_it_at_once(directory: Path) -> None:
    async with house(directory) as it:
        (await it.load_ready()).exit(None)
        (await it.launch.process(2)).exit(None)  # the first restart is at once
        await until(lambda: it.heard.moves.count(WorkerState.BACKOFF) == 2)
        await it.supervisor.unload(CHAT)
        assert it.heard.moves[-1] is WorkerState.STOPPED
        assert len(it.launch.processes) == 2


async def test_closing_ends_what_loads_and_what_runs_and_refuses_new_loads(directory: Path) -> None:
    async with house(directory) as it:
        running = await it.load_ready()
        it.results.clear()
        it.start_loading(ModelSpec("other", kind="fake", fake=FakeScript()))
        loading = await it.launch.process(2)
        await it.supervisor.close()
        assert running.was_shut_down
        assert loading.was_killed
        assert isinstance(await it.failure(), RuntimeClosed)
        assert [type(error) for _, error in it.heard.removed] == [RuntimeClosed, RuntimeClosed]
        with pytest.raises(RuntimeClosed):
            await it.supervisor.load(SPEC, LOAD)


async def test_inspecting_asks_the_worker_and_a_worker_that_ends_meanwhile_is_told(directory: Path) -> None:
    report = WorkerReport((SequenceId(1),), (), (), (), 5, 1, 4, 0, 0, 0, 0)
    async with house(directory) as it:
        process = await it.load_ready()
        assert isinstance(await process.hear(), Load)
        answers: list[WorkerReport | TroupeError] = []

        async def ask() -> None:
            try:
                answers.append(await it.supervisor.inspect(CHAT))
            except TroupeError as error:
                answers.append(error)

        it.group.start_soon(ask)
        question = await process.hear()
        assert isinstance(question, Inspect)
        process.say(Inspected(question.number, report))
        await until(lambda: answers == [report])
        it.group.start_soon(ask)
        await process.hear()
        process.exit(None)
        await until(lambda: len(answers) == 2)
        assert isinstance(answers[1], ModelUnavailable)


async def test_the_cores_are_shared_among_the_loaded_models_and_shared_anew_when_one_goes(directory: Path) -> None:
    async with house(directory, num_cores=9) as it:
        first = await it.load_ready()
        command = await first.hear()
        assert isinstance(command, Load)
        assert command.compute_threads == 8
        second = await it.load_ready(ModelSpec("other", kind="fake", fake=FakeScript()))
        command = await second.hear()
        assert isinstance(command, Load)
        assert command.compute_threads == 4
        assert await first.hear() == Configure(4, 0)
        await it.supervisor.unload(ModelName("other"))
        assert await first.hear() == Configure(8, 0)


async def test_the_memory_for_prefixes_is_divided_evenly_among_the_live_models(directory: Path) -> None:
    async with house(directory, num_cores=2, prefix_memory_bytes=1000) as it:
        first = await it.load_ready()
        command = await first.hear()
        assert isinstance(command, Load)
        assert (command.compute_threads, command.prefix_memory_bytes) == (1, 1000)
        second = await it.load_ready(ModelSpec("other", kind="fake", fake=FakeScript()))
        command = await second.hear()
        assert isinstance(command, Load)
        assert command.prefix_memory_bytes == 500
        assert await first.hear() == Configure(1, 500)
        await it.supervisor.unload(ModelName("other"))
        assert await first.hear() == Configure(1, 1000)


async def test_a_spec_fixes_its_own_number_of_threads(directory: Path) -> None:
    async with house(directory, num_cores=8, compute_threads=3) as it:
        first = await it.load_ready(ModelSpec("chat", kind="fake", fake=FakeScript(), compute_threads=5))
        second = await it.load_ready(ModelSpec("other", kind="fake", fake=FakeScript()))
        for process, threads in ((first, 5), (second, 3)):
            command = await process.hear()
            assert isinstance(command, Load)
            assert command.compute_threads == threads


async def test_garbage_from_a_worker_is_counted_and_the_next_good_event_works(directory: Path) -> None:
    async with house(directory) as it:
        process = await it.load_ready()
        process.channel._sender._socket.send_multipart([b"\xc1", b"garbage"])
        process.say(StepDone(1, ()))
        await until(lambda: it.heard.said == [StepDone(1, ())])
        assert it.supervisor.find(CHAT).num_malformed == 1
        assert not it.heard.lost
        assert math.isfinite(it.supervisor.find(CHAT).pid or math.inf)
