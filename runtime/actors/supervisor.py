"""Which models have workers? Loads each name once however many ask, unloads, shares the machine, and routes commands.

Implements the scheduler's `WorkerPort` without knowing the scheduler.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable

import anyio
from anyio.abc import TaskGroup

from runtime.actors.lifecycle import WorkerState
from runtime.actors.roles import Listener, MemoryPort
from runtime.actors.worker_actor import Launch, Share, WorkerActor
from runtime.config import ModelSpec, Settings
from runtime.errors import ModelLoadFailed, ModelNotLoaded, RuntimeClosed, TroupeError
from runtime.protocol.commands import AnyCommand, Load
from runtime.protocol.events import ModelFacts, WorkerReport
from runtime.protocol.ids import Incarnation, ModelName, public_name, worker_name


def usable_cores() -> int:
    """Cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def replica_names(spec: ModelSpec, generation: int = 1) -> list[ModelName]:
    """Of all workers of one generation. The first of the first has the model's own name."""
    return [worker_name(spec.name, number, generation) for number in range(1, spec.replicas + 1)]


class Supervisor:
    """One WorkerActor per model and replica. Everything on one event loop's thread; the actors' tasks live in `group`."""

    def __init__(
        self,
        group: TaskGroup,
        launch: Launch,
        listener: Listener,
        settings: Settings,
        memory: MemoryPort,
        *,
        clock: Callable[[], float] = time.monotonic,
        num_cores: int | None = None,
    ) -> None:
        self._group = group
        self._launch = launch
        self._listener = listener
        self._settings = settings
        self._memory = memory
        self._clock = clock
        self._num_cores = num_cores or usable_cores()
        self._actors: dict[ModelName, WorkerActor] = {}
        self._ending: set[WorkerActor] = set()
        self._waiting: dict[WorkerActor, int] = {}
        self._unloaded: set[ModelName] = set()
        self._serials = itertools.count(1)
        self._closing = False

    # -- loading --------------------------------------------------------------------------------------------

    def start(self, spec: ModelSpec, load: Load, *, generation: int = 1, group: ModelName | None = None) -> list[WorkerActor]:
        """All workers of the model, started unless they are there. From now on the scheduler takes requests for `group`, which is
        the model's own name if it is None. `load` waits for them; who starts them sees to it that somebody does.

        :raises ModelLoadFailed: another spec holds the name. :raises RuntimeClosed:
        """
        group = group or ModelName(spec.name)
        return [self._find_or_start(name, spec, load, group) for name in replica_names(spec, generation)]

    async def load(self, spec: ModelSpec, load: Load, *, generation: int = 1, group: ModelName | None = None) -> WorkerActor:
        """Give the ready worker of the model's first replica, starting all of them unless they are there. All who ask for one load
        share its processes and its end.

        Cancelling one of several callers leaves the load to the others; when the last is cancelled the processes are killed.

        :raises ModelLoadFailed: also when another spec holds the name. :raises ProtocolMismatch: :raises RuntimeClosed:
        """
        return await self.ready(self.start(spec, load, generation=generation, group=group))

    async def ready(self, actors: list[WorkerActor]) -> WorkerActor:
        """As `load`, of those that were started."""
        new = [actor for actor in actors if not actor.settled.is_set()]
        failed: list[WorkerActor] = []
        async with anyio.create_task_group() as waiting:
            for actor in actors:
                waiting.start_soon(self._await_ready, actor, new, failed)
        if failed:
            error = failed[0].error
            assert error is not None
            raise error.fresh() from error.__cause__
        return actors[0]

    def _find_or_start(self, name: ModelName, spec: ModelSpec, load: Load, group: ModelName) -> WorkerActor:
        if self._closing:
            raise RuntimeClosed
        actor = self._actors.get(name)
        if actor is not None and actor.state is WorkerState.FAILED:
            self._forget(actor, ModelNotLoaded(name, "is being loaded anew"))
            actor = None
        if actor is not None and actor.spec != spec:
            raise ModelLoadFailed(spec.name, "is loaded with another spec; swap it, or unload it first", reason="conflict")
        return actor or self._start(name, spec, load, group)

    async def _await_ready(self, actor: WorkerActor, new: list[WorkerActor], failed: list[WorkerActor]) -> None:
        if not actor.settled.is_set():
            await self._await_first_load(actor)
        if actor.facts is None:
            failed.append(actor)
            assert actor.error is not None
            for other in new:  # of no use without it
                if other is not actor:
                    self.end(other, actor.error)

    def _start(self, name: ModelName, spec: ModelSpec, load: Load, group: ModelName) -> WorkerActor:
        actor = WorkerActor(
            spec,
            name,
            load,
            next(self._serials),
            launch=self._launch,
            listener=self._listener,
            settings=self._settings,
            share=self._share,
            memory=self._memory,
            clock=self._clock,
        )
        self._actors[actor.name] = actor
        self._waiting[actor] = 0
        self._listener.model_added(actor.name, spec, group)
        self._group.start_soon(self._look_after, actor, name=f"worker of {name}")
        self._share_anew()
        return actor

    async def _look_after(self, actor: WorkerActor) -> None:
        try:
            await actor.run()
        finally:
            self._ending.discard(actor)
            self._waiting.pop(actor, None)
            if self._actors.get(actor.name) is actor and actor.facts is None:
                del self._actors[actor.name]  # its first load failed: the name is free
            self._share_anew()

    async def _await_first_load(self, actor: WorkerActor) -> None:
        self._waiting[actor] += 1
        try:
            await actor.settled.wait()
        finally:
            if actor in self._waiting:
                self._waiting[actor] -= 1
                if not self._waiting[actor] and not actor.settled.is_set():
                    await self._abandon(actor)

    async def _abandon(self, actor: WorkerActor) -> None:
        """Nobody waits for this load any more."""
        self._forget(actor, ModelNotLoaded(public_name(actor.name), "its load was cancelled"))
        actor.stop(at_once=True)
        with anyio.CancelScope(shield=True):
            await actor.over.wait()

    def _forget(self, actor: WorkerActor, error: TroupeError) -> None:
        if self._actors.get(actor.name) is actor:
            del self._actors[actor.name]
            self._unloaded.add(ModelName(actor.spec.name))
            if not actor.over.is_set():
                self._ending.add(actor)
                actor.error = error
            self._listener.model_removed(actor.name, error)

    # -- ending ---------------------------------------------------------------------------------------------

    async def unload(self, name: ModelName) -> None:
        """End the model's requests and its worker, also while it loads; returns when the process is gone.

        Unloading again is harmless. The end goes on when the call is cancelled.

        :raises ModelNotLoaded: there never was a model of that name.
        """
        replicas = [actor for actor in self._actors.values() if actor.spec.name == name]
        for actor in replicas:
            if actor.facts is None:
                error: TroupeError = ModelLoadFailed(name, "was unloaded while it was loading", reason="unloaded")
            else:
                error = ModelNotLoaded(name, "was unloaded")
            self.end(actor, error)
        if not replicas and name not in self._unloaded:
            raise ModelNotLoaded(name, "is not loaded")
        for ending in [ending for ending in self._ending if ending.spec.name == name]:
            await ending.over.wait()

    def end(self, actor: WorkerActor, error: TroupeError) -> None:
        """Begin to end one worker; its requests get `error`. `actor.over` is set when nothing of it is left. Idempotent."""
        self._forget(actor, error)
        actor.stop()

    async def close(self) -> None:
        """End all workers side by side; bounded by the ladder. From the first moment on nothing new is loaded."""
        self._closing = True
        for actor in list(self._actors.values()):
            self._forget(actor, RuntimeClosed())
            actor.stop()
        for ending in list(self._ending):
            await ending.over.wait()

    # -- sharing the machine ----------------------------------------------------------------------------------

    def _share(self, spec: ModelSpec) -> Share:
        """What one worker may take: all loaded models may be busy at once, and one core is left for everything else.

        BLAS threads wait for each other by spinning: one core short, and each step takes ten times as long (ADR 7).
        """
        num_live = max(1, sum(actor.state is not WorkerState.FAILED for actor in self._actors.values()))
        threads = spec.compute_threads or self._settings.compute_threads or max(1, (self._num_cores - 1) // num_live)
        return Share(threads, (self._settings.prefix_memory_bytes or 0) // num_live)

    def _share_anew(self) -> None:
        for actor in self._actors.values():
            actor.configure()

    # -- routing (the scheduler's WorkerPort) ---------------------------------------------------------------

    def send(self, model: ModelName, incarnation: Incarnation, command: AnyCommand) -> None:
        actor = self._actors.get(model)
        if actor is not None:
            actor.send(incarnation, command)

    def breach(self, model: ModelName, incarnation: Incarnation, what: str) -> None:
        actor = self._actors.get(model)
        if actor is not None:
            actor.breach(incarnation, what)

    # -- facts ----------------------------------------------------------------------------------------------

    def actors(self) -> list[WorkerActor]:
        """In the order of their loads."""
        return list(self._actors.values())

    def find(self, name: ModelName) -> WorkerActor:
        """:raises ModelNotLoaded:"""
        actor = self._actors.get(name)
        if actor is None:
            known = ", ".join(dict.fromkeys(repr(str(public_name(other))) for other in self._actors)) or "none"
            raise ModelNotLoaded(public_name(name), f"is not loaded (loaded: {known})")
        return actor

    def facts(self, name: ModelName) -> ModelFacts:
        """:raises ModelNotLoaded: also while it is loading for the first time."""
        facts = self.find(name).facts
        if facts is None:
            raise ModelNotLoaded(public_name(name), "is still loading")
        return facts

    async def inspect(self, name: ModelName) -> WorkerReport:
        return await self.find(name).inspect()
