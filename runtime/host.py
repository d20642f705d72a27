"""What does an app open? The `Runtime`: it ties scheduler and actors together and owns their lifetime."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, Unpack

import anyio
import anyio.lowlevel
import anyio.to_thread
import msgspec
from anyio.abc import TaskGroup

from runtime import store
from runtime.actors.launch import Launcher
from runtime.actors.rundir import RunDirectory
from runtime.actors.supervisor import Supervisor
from runtime.allowance import prefix_root, settled
from runtime.client import Tenant
from runtime.config import ModelSpec, Settings, TenantSpec
from runtime.desk import RequestDesk
from runtime.errors import InvalidRequest, RuntimeClosed, shown
from runtime.info import Erasure, ModelInfo, RuntimeStats
from runtime.librarian import Librarian
from runtime.listening import Listening, log
from runtime.locate import Location, locate
from runtime.memory.keeper import Keeper
from runtime.memory.plan import Plan
from runtime.options import PromptOptions, validate_prompt
from runtime.prefix.keys import Keyring
from runtime.protocol.commands import DeviceLease, Load
from runtime.protocol.events import Capabilities, Refused, WorkerReport
from runtime.protocol.ids import ModelName, TenantId
from runtime.residency import Residency
from runtime.scheduler.scheduler import Scheduler
from runtime.scheduler.stimuli import MemorySet, Stimulus, TenantSet
from runtime.snapshots import absent_info, model_info, worker_stats
from runtime.watch import Watch, WatchHub

MAX_TENANT_NAME_CHARACTERS = 128
SILENCES_OF_PATIENCE = 10


class Runtime:
    """Models side by side, each in a process of its own. `async with Runtime() as rt:`, on asyncio or trio.

    Enter and leave it in one task; in between use it from any task of the same event loop. Several may be open at once.
    Leaving, also by an exception or a cancellation, ends all requests with `RuntimeClosed`, all workers within the shutdown
    ladder's bound, and removes every file it made but for prefixes under `Settings.home`. It installs no signal handler and changes
    no limit of the host. `settings`: as given; once it is open, with numbers for what was left to the machine.
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
        self._memory: Keeper
        self._supervisor: Supervisor
        self._librarian: Librarian
        self._residency: Residency
        self._desk: RequestDesk

    # -- lifetime -------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        """:raises RuntimeClosed: it was open before; make a new one. :raises RunDirectoryError: no place for its sockets."""
        if self._phase != "new":
            raise RuntimeClosed
        self._phase = "closed"  # until all is there
        root = prefix_root(self.settings)
        self.settings = await anyio.to_thread.run_sync(settled, self.settings, root)
        self._directory = await RunDirectory.make()
        self._group = anyio.create_task_group()
        await self._group.__aenter__()
        listening = Listening(self._watchers)
        listening.reports = None if root is None else root.with_name("reports")
        listening.house = self._house
        launch = Launcher(self._group, self._directory.path, self.settings)
        self._memory = Keeper(self.settings, self._set_tokens)
        self._supervisor = Supervisor(self._group, launch, listening, self.settings, self._memory)
        keyring = self._open_library(root)
        listening.tidy_up = self._librarian.worker_died
        self._scheduler = listening.scheduler = Scheduler(self._supervisor, self.settings, files=self._librarian)
        self._residency = Residency(self._group, self._supervisor, self._scheduler, self._watchers, self._load_command)
        self._desk = self._residency.open_requests = RequestDesk(self._scheduler, self._watchers, keyring, self._residency)
        self._timer_stopped = anyio.Event()
        self._group.start_soon(self._run_timer, name="scheduler timer")
        self._group.start_soon(self._librarian.run, name="librarian")
        self._memory.make_room = self._residency.make_room
        self._group.start_soon(self._residency.run, name="idle models")
        self._group.start_soon(self._memory.run, name="memory")
        self._phase = "open"
        return self

    def _open_library(self, root: Path | None) -> Keyring:
        """The librarian, and the keys that it and the desk use."""
        has_files = bool(self.settings.prefix_disk_bytes)
        self._prefix_root = str(root) if has_files else None
        keyring = Keyring(root if has_files else None)
        self._librarian = Librarian(
            root,
            keyring,
            is_active=has_files,
            offer=self._offer,
            has_models=lambda: bool(self._supervisor.actors()),
            report=lambda error: log().warning("prefix files: a defect", error=repr(error)),
        )
        return keyring

    def _device_lease(self) -> DeviceLease | None:
        num_slots = self.settings.device_lease
        if num_slots is None:
            return None
        assert isinstance(num_slots, int)  # since the Runtime is open
        # A holder that hangs is ended within its silence, and its slot is free: whoever waits longer waits for what should not be.
        return DeviceLease(str(self._directory.path / "device"), num_slots, SILENCES_OF_PATIENCE * self.settings.silence_seconds)

    def _house(self) -> dict[str, Any]:
        """What a report of a stall says of everything else: counts and states, nobody's words."""
        return {
            "workers": [asdict(worker_stats(actor)) for actor in self._supervisor.actors()],
            "queues": {name: asdict(model) for name, model in self._scheduler.stats().models.items()},
            "memory": asdict(self._memory.stats()),
        }

    def _set_tokens(self, worker: ModelName, max_tokens: int | None) -> None:
        self._scheduler.offer(MemorySet(worker, max_tokens))

    def _offer(self, stimulus: Stimulus) -> None:
        self._scheduler.offer(stimulus)

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
        await self._librarian.over.wait()
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
        self._require_spec(spec)
        actor = await self._residency.load(spec)
        await self._librarian.first_scan()
        return model_info(actor)

    def register(self, spec: ModelSpec) -> None:
        """Make a model known without loading it: its first request does, and the one after an unload or a failed load again.

        A request that waits for the load counts as queued; when the load fails it ends with `ModelLoadFailed`. When the last that
        waits is cancelled, so is the load. A registered drafter is loaded with its target.

        :raises ModelLoadFailed: the name is loaded with another spec. :raises InvalidRequest: no ModelSpec.
        """
        self._require_spec(spec)
        self._residency.register(spec)

    async def unregister(self, name: str) -> None:
        """Unload it, and forget the name. :raises ModelNotLoaded: no such model."""
        self._require_open()
        await self._residency.unload(ModelName(name), keep=False)

    async def swap(self, spec: ModelSpec) -> ModelInfo:
        """Give a model's name to other weights without a pause: they are loaded beside the old ones, and once they are ready all
        new requests go to them. Returns then. The old workers end when the requests they have are over; no request sees both.

        Both must fit into memory until then. If the load fails, or the call is cancelled, the old ones stay. What was computed
        ahead with `Tenant.prefill` ends with the old workers. A model that is not loaded now is loaded with the new spec.

        :raises ModelNotLoaded: no such model. :raises ModelLoadFailed: :raises ProtocolMismatch: :raises RuntimeClosed:
        """
        self._require_spec(spec)
        return model_info(await self._residency.swap(spec))

    def _require_spec(self, spec: object) -> None:
        self._require_open()
        if not isinstance(spec, ModelSpec):
            raise InvalidRequest("spec", f"got {shown(spec)}; allowed: a ModelSpec")

    def _load_command(self, spec: ModelSpec) -> Load:
        """:raises ModelLoadFailed: its path leads nowhere."""
        if spec.kind == "fake":
            location = Location(str(spec.path), is_hub_id=False)
        else:
            location = locate(spec.name, str(spec.path), self.settings.home_directory(), store.resolve)
        return Load(
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
            prefix_root=self._prefix_root,
            prefix_disk_bytes=self.settings.prefix_disk_bytes or 0,
            device_lease=self._device_lease(),
        )

    async def unload(self, name: str, *, drain_seconds: float = 0.0) -> None:
        """End a model, also while it loads; returns when its process is gone. Unloading again is harmless. One that was registered
        stays so, and its next request loads it again.

        Its requests get `ModelNotLoaded`. With `drain_seconds`, new ones are refused at once and those there may take that long.

        :raises ModelNotLoaded: there never was a model of that name. :raises InvalidRequest: of `drain_seconds`.
        """
        self._require_open()
        if isinstance(drain_seconds, bool) or not isinstance(drain_seconds, int | float) or not drain_seconds >= 0:
            raise InvalidRequest("drain_seconds", f"got {shown(drain_seconds)}; allowed: a number from 0")
        model = ModelName(name)
        if drain_seconds > 0:
            with self._desk.refusing(model), anyio.move_on_after(drain_seconds):
                await self._desk.all_ended(model).wait()
        await self._residency.unload(model)

    def models(self) -> list[ModelInfo]:
        """In the order of their loads, also those still loading, restarting or failed; after them known ones without a worker."""
        self._require_open()
        absent = (absent_info(known.spec, was_loaded=known.was_loaded) for known in self._residency.names.absent())
        return [*(model_info(actor) for actor in self._supervisor.actors()), *absent]

    def capabilities(self, name: str) -> Capabilities:
        """What the load-time self-test proved for this model, and why its drafter cannot be used if that is so.

        :raises ModelNotLoaded: also while it is loading.
        """
        self._require_open()
        proved = self._supervisor.facts(self._residency.names.worker(ModelName(name))).capabilities
        refused = [
            f"speculation: drafter {pairing.drafter!r} cannot be used: {pairing.reason}"
            for pairing in self._scheduler.stats().pairings
            if pairing.target == name and pairing.reason is not None
        ]
        return msgspec.structs.replace(proved, notes=(*proved.notes, *refused)) if refused else proved

    async def inspect(self, name: str) -> WorkerReport:
        """A worker's own count of itself. :raises ModelNotLoaded: :raises ModelUnavailable: no worker serves now."""
        self._require_open()
        return await self._supervisor.inspect(self._residency.names.worker(ModelName(name)))

    async def tokenize(self, name: str, **options: Unpack[PromptOptions]) -> list[int]:
        """The token ids that a request with this prompt would feed. Loads the model as a request does.

        :raises InvalidRequest: also when the model's template cannot render it. :raises ModelNotLoaded: :raises ModelUnavailable:
        """
        self._require_open()
        prompt = validate_prompt(options)
        answer = await self._residency.prepare(ModelName(name), self._scheduler.new_request_id(), prompt)
        if isinstance(answer, Refused):
            raise InvalidRequest("prompt", answer.message)
        return answer.tokens.tolist()

    # -- clients and watchers -------------------------------------------------------------------------------

    def tenant(self, name: str, spec: TenantSpec | None = None) -> Tenant:
        """The tenant of that name, made at its first use. A given spec replaces the one before.

        :raises InvalidRequest: the name is not a string of 1 to 128 characters, or the spec none.
        """
        self._require_open()
        key = _tenant_id(name)
        if spec is not None and not isinstance(spec, TenantSpec):
            raise InvalidRequest("spec", f"got {shown(spec)}; allowed: a TenantSpec")
        if spec is not None or key not in self._tenants:
            self._scheduler.offer(TenantSet(key, spec or TenantSpec()))
            self._desk.set_may_share(key, spec is not None and spec.may_share)
        if key not in self._tenants:
            self._tenants[key] = Tenant(key, self._desk)
        return self._tenants[key]

    async def erase_tenant(self, name: str) -> Erasure:
        """Destroy a tenant's prefixes in memory and files, whoever computed them, and the key without which nobody knows whose any
        were. Its running requests go on; it stays usable, with a new key. Also for a tenant that this process never saw.

        Prefixes in the scope "shared" are nobody's own and stay. Done whole once begun, also when the call is cancelled.

        :raises EraseFailed: its key cannot be removed; nothing has been erased. :raises InvalidRequest: no tenant's name.
        """
        self._require_open()
        return Erasure(await self._librarian.erase(_tenant_id(name)))

    def stats(self) -> RuntimeStats:
        self._require_open()
        workers = tuple(worker_stats(actor) for actor in self._supervisor.actors())
        return RuntimeStats(self._scheduler.stats(), workers, self._memory.stats())

    async def plan(self, specs: Sequence[ModelSpec]) -> Plan:
        """Will these models fit into the memory budget together? Answered by their files; nothing is loaded, and what is loaded now
        does not count.

        :raises InvalidRequest: no ModelSpecs. :raises ModelLoadFailed: a path leads nowhere.
        """
        for spec in specs:
            self._require_spec(spec)
        return await self._memory.plan([(spec, self._load_command(spec)) for spec in specs])

    def watch(self) -> Watch:
        """`async with rt.watch() as events: async for event in events: …`; ends when the Runtime closes."""
        self._require_open()
        return Watch(self._watchers)


def _tenant_id(name: object) -> TenantId:
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_TENANT_NAME_CHARACTERS:
        raise InvalidRequest("tenant", f"got {shown(name)}; allowed: a string of 1 to {MAX_TENANT_NAME_CHARACTERS} characters")
    return TenantId(name)
