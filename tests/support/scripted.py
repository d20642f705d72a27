"""A worker process played by the test: a real channel, no process. What it says and when it ends is up to the test."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import anyio
import anyio.lowlevel

from runtime.actors.lifecycle import WorkerState
from runtime.actors.reports import Stall
from runtime.config import ModelSpec
from runtime.errors import ExitReport, TroupeError
from runtime.protocol.channel import HostChannel, WorkerChannel
from runtime.protocol.commands import PROTOCOL_VERSION, AnyCommand, Load, Shutdown
from runtime.protocol.events import AnyEvent, Capabilities, Heartbeat, Hello, Loading, ModelFacts, Ready
from runtime.protocol.ids import Holder, Incarnation, ModelName
from tests.support.waiting import until

FACTS = ModelFacts(
    kind="fake",
    model_type="fake",
    fingerprint="print",
    vocabulary_digest="digest",
    vocabulary_size=263,
    context_length=4096,
    bytes_per_token=1,
    weights_bytes=1,
    eos_ids=(0,),
    chat_template="checkpoint",
    chat_restrictions=(),
    capabilities=Capabilities(True, True, True, "free"),
    blas="none",
    load_seconds=0.0,
)


class ScriptedProcess:
    """Stands in for a `WorkerProcess`, with the worker's end of the channel."""

    def __init__(self, model: str, directory: Path, key: str, number: Incarnation) -> None:
        self.pid = 1000 + number
        self.exit_code: int | None = None
        self.was_killed = False
        self.was_shut_down = False
        self.was_asked_softly = False
        self.ends_softly = False
        self._model = model
        self._number = number
        self._exited = anyio.Event()
        self.channel = WorkerChannel(directory, key)

    # -- what the incarnation does with a process -----------------------------------------------------------

    async def wait(self) -> None:
        await self._exited.wait()

    def kill(self) -> None:
        if not self._exited.is_set():
            self.was_killed = True
            self.exit()

    def end_softly(self) -> None:
        self.was_asked_softly = True
        if self.ends_softly:
            self.exit(1)

    async def shut_down(self, grace_seconds: float) -> None:
        """Ends when it reads `Shutdown`, whatever came before."""
        while not isinstance(await self.hear(), Shutdown):
            pass
        self.was_shut_down = True
        self.exit(0)

    async def close(self) -> None:
        self.kill()
        self.channel.close(0.0)

    def report(self, phase: str) -> ExitReport:
        signal_name = "SIGKILL" if self.was_killed else None
        return ExitReport(self._model, self.pid, self._number, self.exit_code, signal_name, phase, 1.0, "last words")

    # -- what the test does ---------------------------------------------------------------------------------

    def exit(self, code: int | None = None) -> None:
        self.exit_code = code
        self._exited.set()

    def say(self, *events: AnyEvent) -> None:
        for event in events:
            self.channel.send(event)

    def say_hello(self) -> None:
        self.say(Hello(PROTOCOL_VERSION, self.pid, self._number))

    def become_ready(self) -> None:
        self.say_hello()
        self.say(Loading("weights", 1, 1), Ready(FACTS))

    async def hear(self) -> AnyCommand:
        """The next command; the test's own limit bounds the wait."""
        commands: list[AnyCommand] = []

        def came() -> bool:
            command = self.channel.receive(0)
            if command is not None:
                commands.append(command)
            return command is not None

        await until(came)
        return commands[0]


class ScriptedLaunch:
    """A `Launch` that hands its processes to the test, which waits for the n-th with `process(n)`."""

    def __init__(self, directory: Path) -> None:
        self.processes: list[ScriptedProcess] = []
        self.failure: OSError | None = None
        self.is_stuck = False
        self.num_launches = 0
        self._directory = directory

    async def __call__(self, spec: ModelSpec, key: str, incarnation: Incarnation) -> tuple[ScriptedProcess, HostChannel]:
        self.num_launches += 1
        if self.failure is not None:
            raise self.failure
        if self.is_stuck:
            await anyio.sleep_forever()
        channel = HostChannel(self._directory, key)
        process = ScriptedProcess(spec.name, self._directory, key, incarnation)
        self.processes.append(process)
        return process, channel

    async def process(self, number: int) -> ScriptedProcess:
        await until(lambda: len(self.processes) >= number)
        return self.processes[number - 1]


@dataclass
class RecordingListener:
    """Keeps what the actors tell."""

    added: list[str] = field(default_factory=list)
    up: list[tuple[str, int]] = field(default_factory=list)
    said: list[AnyEvent] = field(default_factory=list)
    lost: list[tuple[int, TroupeError, bool]] = field(default_factory=list)
    removed: list[tuple[str, TroupeError]] = field(default_factory=list)
    moves: list[WorkerState] = field(default_factory=list)
    progress: list[Loading] = field(default_factory=list)
    health: list[tuple[str, str]] = field(default_factory=list)
    stalls: list[Stall] = field(default_factory=list)

    def health_changed(self, model: ModelName, incarnation: Incarnation, health: str, detail: str) -> None:
        self.health.append((health, detail))

    async def stalled(self, stall: Stall) -> str:
        self.stalls.append(stall)
        return "report: somewhere"

    def model_added(self, model: ModelName, spec: ModelSpec, group: ModelName) -> None:
        self.added.append(model)

    def worker_up(self, model: ModelName, incarnation: Incarnation, facts: ModelFacts) -> None:
        self.up.append((model, incarnation))

    def worker_said(self, model: ModelName, incarnation: Incarnation, event: AnyEvent) -> None:
        self.said.append(event)

    def worker_lost(
        self, model: ModelName, incarnation: Incarnation, error: TroupeError, report: ExitReport, restarting: bool
    ) -> None:
        self.lost.append((incarnation, error, restarting))

    def model_removed(self, model: ModelName, error: TroupeError) -> None:
        self.removed.append((model, error))

    def worker_moved(
        self, model: ModelName, left: WorkerState | None, now: WorkerState, incarnation: Incarnation, pid: int | None
    ) -> None:
        self.moves.append(now)

    def load_progress(self, model: ModelName, progress: Loading) -> None:
        self.progress.append(progress)


class PlentyOfMemory:
    """A `MemoryPort` that has room for everybody, but for those in `refused`. `held`: who has not been given back."""

    def __init__(self) -> None:
        self.held: set[Holder] = set()
        self.refused: dict[ModelName, TroupeError] = {}
        self.footprints: dict[Holder, int] = {}

    async def admit(self, holder: Holder, spec: ModelSpec, load: Load) -> TroupeError | None:
        await anyio.lowlevel.checkpoint()
        if holder.model in self.refused:
            return self.refused[holder.model]
        self.held.add(holder)
        return None

    def loaded(self, holder: Holder, spec: ModelSpec, facts: ModelFacts) -> None:
        assert holder in self.held

    def beat(self, holder: Holder, beat: Heartbeat) -> None:
        self.footprints[holder] = beat.resident_bytes

    def released(self, holder: Holder) -> None:
        self.held.discard(holder)

    def reserved(self, holder: Holder) -> int:
        return 1 if holder in self.held else 0
