"""What does an app open? The `Runtime`: it ties scheduler and actors together and owns their lifetime."""

from __future__ import annotations

import logging
from functools import cache
from types import TracebackType
from typing import Any, Literal, Self, Unpack

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from runtime import store
from runtime.actors.launch import Launcher
from runtime.actors.lifecycle import WorkerState
from runtime.actors.rundir import RunDirectory
from runtime.actors.supervisor import Supervisor
from runtime.actors.worker_actor import WorkerActor
from runtime.client import Tenant
from runtime.config import ModelSpec, Settings, TenantSpec
from runtime.desk import RequestDesk
from runtime.errors import ExitReport, InvalidRequest, RuntimeClosed, TroupeError, shown
from runtime.info import ModelInfo, ModelState, RuntimeStats, WorkerStats
from runtime.locate import Location, locate
from runtime.options import PromptOptions, validate_prompt
from runtime.protocol.commands import Load
from runtime.protocol.events import AnyEvent, Capabilities, Loading, ModelFacts, Refused, WorkerReport
from runtime.protocol.ids import Incarnation, ModelName, TenantId
from runtime.scheduler.scheduler import Scheduler
from runtime.scheduler.stimuli import ModelAdded, ModelRemoved, TenantSet, WorkerLost, WorkerSaid, WorkerUp
from runtime.watch import LoadProgress, ModelStateChanged, Watch, WatchHub, WorkerDied

MAX_TENANT_NAME_CHARACTERS = 128


@cache
def _log() -> Any:
    """structlog, imported at the first line logged: a healthy run logs nothing, and an app opens a tenth of a second sooner.

    By way of the standard library: an app that configured nothing sees warnings on stderr and nothing on stdout.
    """
    import structlog

    return structlog.wrap_logger(
        logging.getLogger("runtime"),
        processors=[structlog.stdlib.filter_by_level, structlog.processors.KeyValueRenderer(key_order=["event"])],
        wrapper_class=structlog.stdlib.BoundLogger,
    )


class Runtime:
    """Models side by side, each in a process of its own. `async with Runtime() as rt:`, on asyncio or trio.

    Enter and leave it in one task; in between use it from any task of the same event loop. Several may be open at once.
    Leaving, also by an exception or a cancellation, ends all requests with `RuntimeClosed`, all workers within the shutdown
    ladder's bound, and removes every file it made. It installs no signal handler and changes no limit of the host.
    """

    def __init__(self, settings: Settings | None = None) -> None:
        self.settings = settings or Settings()
        if not isinstance(self.settings, Settings):
            raise InvalidRequest("settings", f"got {shown(settings)}; allowed: a Settings")
        self._phase: Literal["new", "open", "closed"] = "new"
        self._watchers = WatchHub()
        self._tenants: dict[TenantId, Tenant] = {}
        self._group: TaskGroup
        self._directory: RunDirectory
        self._scheduler: Scheduler
        self._supervisor: Supervisor
        self._desk: RequestDesk

    # -- lifetime -------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        """:raises RuntimeClosed: it was open before; make a new one. :raises RunDirectoryError: no place for its sockets."""
        if self._phase != "new":
            raise RuntimeClosed
        self._phase = "closed"  # until all is there
        self._directory = await RunDirectory.make()
        self._group = anyio.create_task_group()
        await self._group.__aenter__()
        ports = _Ports(self._watchers)
        launch = Launcher(self._group, self._directory.path, self.settings)
        self._supervisor = ports.supervisor = Supervisor(self._group, launch, ports, self.settings)
        self._scheduler = ports.scheduler = Scheduler(self._supervisor, self.settings)
        self._desk = RequestDesk(self._scheduler, self._watchers)
        self._timer_stopped = anyio.Event()
        self._group.start_soon(self._run_timer, name="scheduler timer")
        self._phase = "open"
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # The body's exception is not given to the task group, which would wrap it; a crash of ours has cancelled it already.
        has_crashed = self._group.cancel_scope.cancel_called
        with anyio.CancelScope(shield=True):
            await self._close()
        if has_crashed:
            await self._group.__aexit__(kind, error, trace)
        else:
            await self._group.__aexit__(None, None, None)

    async def _close(self) -> None:
        self._phase = "closed"
        self._desk.is_open = False
        await self._supervisor.close()
        self._watchers.close()
        self._group.cancel_scope.cancel()
        await self._timer_stopped.wait()
        await self._directory.close()
        await anyio.lowlevel.checkpoint()

    async def _run_timer(self) -> None:
        try:
            await self._scheduler.run()
        finally:
            self._timer_stopped.set()

    def _require_open(self) -> None:
        if self._phase != "open":
            raise RuntimeClosed

    # -- models ---------------------------------------------------------------------------------------------

    async def load(self, spec: ModelSpec) -> ModelInfo:
        """Load a model under its name; returns when it is ready. Asking again for the same spec gives the model there is at once.

        Cancelling the call ends the load, unless others wait for it too.

        :raises ModelLoadFailed: `reason` says whose fault it is. :raises ProtocolMismatch: :raises RuntimeClosed:
        """
        self._require_open()
        if not isinstance(spec, ModelSpec):
            raise InvalidRequest("spec", f"got {shown(spec)}; allowed: a ModelSpec")
        if spec.kind == "fake":
            location = Location(str(spec.path), is_hub_id=False)
        else:
            location = locate(spec.name, str(spec.path), self.settings.home_directory(), store.resolve)
        load = Load(
            name=spec.name,
            path=location.path,
            is_hub_id=location.is_hub_id,
            revision=spec.revision,
            kind=spec.kind,
            max_slots=spec.max_slots,
            max_context_tokens=spec.max_context_tokens,
            prefill_chunk_tokens=self.settings.prefill_chunk_tokens,
            trust_remote_code=spec.trust_remote_code,
            fake=spec.fake,
        )
        return _model_info(await self._supervisor.load(spec, load))

    async def unload(self, name: str, *, drain_seconds: float = 0.0) -> None:
        """End a model, also while it loads; returns when its process is gone. Unloading again is harmless.

        Its requests get `ModelNotLoaded`. With `drain_seconds`, new ones are refused at once and those there may take that long.

        :raises ModelNotLoaded: there never was a model of that name. :raises InvalidRequest: of `drain_seconds`.
        """
        self._require_open()
        if isinstance(drain_seconds, bool) or not isinstance(drain_seconds, int | float) or not drain_seconds >= 0:
            raise InvalidRequest("drain_seconds", f"got {shown(drain_seconds)}; allowed: a number from 0")
        model = ModelName(name)
        if drain_seconds > 0:
            with self._desk.refusing(model), anyio.move_on_after(drain_seconds):
                await self._desk.drained(model)
        await self._supervisor.unload(model)

    def models(self) -> list[ModelInfo]:
        """In the order of their loads; also those still loading, restarting or failed."""
        self._require_open()
        return [_model_info(actor) for actor in self._supervisor.actors()]

    def capabilities(self, name: str) -> Capabilities:
        """What the load-time self-test proved for this model. :raises ModelNotLoaded: also while it is loading."""
        self._require_open()
        return self._supervisor.facts(ModelName(name)).capabilities

    async def inspect(self, name: str) -> WorkerReport:
        """A worker's own count of itself. :raises ModelNotLoaded: :raises ModelUnavailable: no worker serves now."""
        self._require_open()
        return await self._supervisor.inspect(ModelName(name))

    async def tokenize(self, name: str, **options: Unpack[PromptOptions]) -> list[int]:
        """The token ids that a request with this prompt would feed.

        :raises InvalidRequest: also when the model's template cannot render it. :raises ModelNotLoaded: :raises ModelUnavailable:
        """
        self._require_open()
        prompt = validate_prompt(options)
        answer = await self._supervisor.find(ModelName(name)).prepare(self._scheduler.new_request_id(), prompt)
        if isinstance(answer, Refused):
            raise InvalidRequest("prompt", answer.message)
        return answer.tokens.tolist()

    # -- clients and watchers -------------------------------------------------------------------------------

    def tenant(self, name: str, spec: TenantSpec | None = None) -> Tenant:
        """The tenant of that name, made at its first use. A given spec replaces the one before.

        :raises InvalidRequest: the name is not a string of 1 to 128 characters, or the spec none.
        """
        self._require_open()
        if not isinstance(name, str) or not 1 <= len(name) <= MAX_TENANT_NAME_CHARACTERS:
            raise InvalidRequest("tenant", f"got {shown(name)}; allowed: a string of 1 to {MAX_TENANT_NAME_CHARACTERS} characters")
        if spec is not None and not isinstance(spec, TenantSpec):
            raise InvalidRequest("spec", f"got {shown(spec)}; allowed: a TenantSpec")
        key = TenantId(name)
        if spec is not None or key not in self._tenants:
            self._scheduler.offer(TenantSet(key, spec or TenantSpec()))
        if key not in self._tenants:
            self._tenants[key] = Tenant(key, self._desk)
        return self._tenants[key]

    def stats(self) -> RuntimeStats:
        self._require_open()
        return RuntimeStats(self._scheduler.stats(), tuple(_worker_stats(actor) for actor in self._supervisor.actors()))

    def watch(self) -> Watch:
        """`async with rt.watch() as events: async for event in events: …`; ends when the Runtime closes."""
        self._require_open()
        return Watch(self._watchers)


class _Ports:
    """The actors' `Listener`: turns what they tell into the scheduler's stimuli and the watchers' events."""

    scheduler: Scheduler
    supervisor: Supervisor

    def __init__(self, watchers: WatchHub) -> None:
        self._watchers = watchers

    def model_added(self, model: ModelName, max_slots: int) -> None:
        self.scheduler.offer(ModelAdded(model, max_slots))

    def worker_up(self, model: ModelName, incarnation: Incarnation, facts: ModelFacts) -> None:
        for note in facts.capabilities.notes:
            _log().warning("model runs without a capability", model=model, note=note)
        self.scheduler.offer(WorkerUp(model, incarnation, facts))

    def worker_said(self, model: ModelName, incarnation: Incarnation, event: AnyEvent) -> None:
        self.scheduler.offer(WorkerSaid(model, incarnation, event))

    def worker_lost(
        self, model: ModelName, incarnation: Incarnation, error: TroupeError, report: ExitReport, restarting: bool
    ) -> None:
        _log().warning("worker lost", model=model, incarnation=incarnation, error=str(error), restarting=restarting)
        self.scheduler.offer(WorkerLost(model, incarnation, error, report, restarting))
        self._watchers.publish(WorkerDied(model, report, restarting))

    def model_removed(self, model: ModelName, error: TroupeError) -> None:
        self.scheduler.offer(ModelRemoved(model, error))

    def worker_moved(
        self, model: ModelName, left: WorkerState | None, now: WorkerState, incarnation: Incarnation, pid: int | None
    ) -> None:
        previous = _state(left) if left is not None else None
        self._watchers.publish(ModelStateChanged(model, _state(now), previous, incarnation, pid))

    def load_progress(self, model: ModelName, progress: Loading) -> None:
        self._watchers.publish(LoadProgress(model, progress.stage, progress.done, progress.total))


def _state(state: WorkerState) -> ModelState:
    return state.value


def _model_info(actor: WorkerActor) -> ModelInfo:
    facts, beat = actor.facts, actor.last_beat
    return ModelInfo(
        name=actor.spec.name,
        state=_state(actor.state),
        pid=actor.pid,
        incarnation=actor.incarnation,
        restarts=actor.num_restarts,
        path=actor.load.path,
        memory_bytes=beat.resident_bytes if beat is not None else 0,
        kind=facts.kind if facts is not None else None,
        model_type=facts.model_type if facts is not None else None,
        fingerprint=facts.fingerprint if facts is not None else None,
        context_length=facts.context_length if facts is not None else None,
        vocabulary_size=facts.vocabulary_size if facts is not None else None,
        weights_bytes=facts.weights_bytes if facts is not None else None,
        load_seconds=facts.load_seconds if facts is not None else None,
        blas=facts.blas if facts is not None else None,
        facts=facts,
    )


def _worker_stats(actor: WorkerActor) -> WorkerStats:
    beat = actor.last_beat
    return WorkerStats(
        model=actor.spec.name,
        state=_state(actor.state),
        phase=beat.phase if beat is not None else None,
        steps=beat.step if beat is not None else 0,
        active_bytes=beat.active_bytes if beat is not None else 0,
        resident_bytes=beat.resident_bytes if beat is not None else 0,
        restarts=actor.num_restarts,
        malformed_frames=actor.num_malformed,
    )
