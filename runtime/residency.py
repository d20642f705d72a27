"""Which of the models that the app named have workers now? Loads one when it is asked for, ends it when nobody needs it, swaps it.

A request holds a lease on its model from before its admission to its end. The supervisor knows only workers; what a name stands
for while none runs is known here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import Protocol

import anyio
from anyio.abc import TaskGroup

from runtime.actors.eviction import Resident, idle_until, victims
from runtime.actors.lifecycle import WorkerState
from runtime.actors.supervisor import Supervisor, replica_names
from runtime.actors.worker_actor import WorkerActor
from runtime.config import ModelSpec
from runtime.errors import ModelLoadFailed, ModelNotLoaded, ModelUnavailable, TroupeError
from runtime.protocol.commands import Load, Prompt
from runtime.protocol.events import Prepared, Refused
from runtime.protocol.ids import ModelName, RequestId
from runtime.scheduler.ports import SchedulerPort
from runtime.scheduler.stimuli import GroupsExchanged
from runtime.watch import ModelEnded, ModelSwapped, WatchHub


class OpenRequests(Protocol):
    """Who knows when the requests under way at this moment are over; `desk.py`."""

    def all_ended(self, model: ModelName) -> anyio.Event:
        """Set once those that the model has now have ended, whatever comes after them."""
        ...


@dataclass(slots=True, eq=False)
class Known:
    """One name. is_registered: it is kept when the app unloads it. generation: of its weights, from 1; last_generation: ever begun.

    num_leases: requests under way and calls that need it loaded. rested_at: when the last was given back. was_loaded: ever.
    on_demand: cancelled when nobody needs the load any more that a request began.
    """

    spec: ModelSpec
    is_registered: bool
    rested_at: float
    generation: int = 1
    last_generation: int = 1
    num_leases: int = 0
    was_loaded: bool = False
    on_demand: anyio.CancelScope | None = None
    swapping: anyio.Lock = field(default_factory=anyio.Lock)

    @property
    def name(self) -> ModelName:
        return ModelName(self.spec.name)


class Residency:
    """The names of one Runtime. All on its event loop's thread; `group` owns loads on demand and ends of what was swapped out."""

    open_requests: OpenRequests

    def __init__(
        self,
        group: TaskGroup,
        supervisor: Supervisor,
        scheduler: SchedulerPort,
        watchers: WatchHub,
        make_load: Callable[[ModelSpec], Load],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """make_load: what to tell the workers. :raises ModelLoadFailed: the spec's path leads nowhere."""
        self._group = group
        self._supervisor = supervisor
        self._scheduler = scheduler
        self._watchers = watchers
        self._make_load = make_load
        self._clock = clock
        self._known: dict[ModelName, Known] = {}
        self._changed = anyio.Event()

    # -- names ----------------------------------------------------------------------------------------------

    def register(self, spec: ModelSpec) -> None:
        """:raises ModelLoadFailed: it is loaded with another spec."""
        self._know(spec).is_registered = True

    def _know(self, spec: ModelSpec) -> Known:
        name = ModelName(spec.name)
        known = self._known.get(name)
        if known is None:
            known = self._known[name] = Known(spec, False, self._clock())
        elif known.spec != spec:
            if self._has_workers(known):
                raise ModelLoadFailed(spec.name, "is loaded with another spec; swap it, or unload it first", reason="conflict")
            known.spec = spec
        return known

    def _find(self, name: ModelName) -> Known:
        known = self._known.get(name)
        if known is None:
            names = ", ".join(repr(str(other)) for other in self._known) or "none"
            raise ModelNotLoaded(name, f"is not loaded; loaded or registered: {names}")
        return known

    def _forget(self, known: Known) -> None:
        if self._known.get(known.name) is known:
            del self._known[known.name]

    def absent(self) -> list[Known]:
        """Names that no worker runs for."""
        return [known for known in self._known.values() if not self._actors(known)]

    def worker(self, name: ModelName) -> ModelName:
        """The name of the worker that is a model's first replica now. :raises ModelNotLoaded: no such model."""
        return replica_names(self._find(name).spec, self._find(name).generation)[0]

    # -- its workers ----------------------------------------------------------------------------------------

    def _actors(self, known: Known) -> list[WorkerActor]:
        names = set(replica_names(known.spec, known.generation))
        return [actor for actor in self._supervisor.actors() if actor.name in names]

    def _has_workers(self, known: Known) -> bool:
        """Loading, ready, or to be restarted."""
        return any(actor.state is not WorkerState.FAILED for actor in self._actors(known))

    def _needs_load(self, known: Known) -> bool:
        """Also after a first load that failed. One whose restarts are spent stays so until the app loads it anew."""
        actors = self._actors(known)
        return not actors or any(actor.state is WorkerState.FAILED and actor.facts is None for actor in actors)

    # -- leases ---------------------------------------------------------------------------------------------

    def lease(self, name: ModelName) -> Known:
        """The model is needed until `give_back`: it is loaded unless it is there or loading, and its drafter with it.

        :raises ModelNotLoaded: no such model. :raises ModelLoadFailed: at once, when its path leads nowhere; no lease is held then.
        """
        known = self._find(name)
        if self._needs_load(known):
            self._load_on_demand(known)
            drafter = self._known.get(ModelName(known.spec.drafter or ""))
            if drafter is not None and self._needs_load(drafter):
                try:
                    self._load_on_demand(drafter)
                except ModelLoadFailed:
                    pass  # the target does without; `rt.stats()` says so
        known.num_leases += 1
        return known

    def give_back(self, name: ModelName) -> None:
        """Of a request. When the last lease is given back, a load that only requests wanted is ended."""
        known = self._known.get(name)
        if known is not None:  # else it was unloaded, and its requests ended with it
            self._give_back(known)

    def _give_back(self, known: Known) -> None:
        known.num_leases -= 1
        known.rested_at = self._clock()
        if not known.num_leases:
            for one in (known, self._known.get(ModelName(known.spec.drafter or ""))):
                if one is not None and one.on_demand is not None and not self._is_busy(one) and not self._targets(one):
                    self._end_load(one)
            self._changed.set()

    def _load_on_demand(self, known: Known) -> None:
        actors = self._supervisor.start(known.spec, self._make_load(known.spec), generation=known.generation, group=known.name)
        known.on_demand = anyio.CancelScope()
        self._group.start_soon(self._await_load, known, actors, known.on_demand, name=f"load of {known.name}")

    async def _await_load(self, known: Known, actors: list[WorkerActor], scope: anyio.CancelScope) -> None:
        """Somebody must wait for a load. What it fails with is told to the requests by the scheduler."""
        with scope:
            try:
                await self._supervisor.ready(actors)
                known.was_loaded = True
            except TroupeError:
                pass
        if known.on_demand is scope:
            known.on_demand = None
        self._changed.set()

    def _end_load(self, known: Known) -> None:
        """At once, so that a request that comes right after begins another."""
        assert known.on_demand is not None
        if any(not actor.settled.is_set() for actor in self._actors(known)):
            known.on_demand.cancel()
            for actor in self._actors(known):
                self._supervisor.end(actor, ModelNotLoaded(known.name, "its load was cancelled"))

    def _targets(self, known: Known) -> list[Known]:
        """Models with workers that draft with it."""
        return [one for one in self._known.values() if one.spec.drafter == known.name and self._has_workers(one)]

    def _is_busy(self, known: Known) -> bool:
        return any(one.num_leases for one in (known, *self._targets(known)))

    # -- loading, unloading ---------------------------------------------------------------------------------

    async def load(self, spec: ModelSpec) -> WorkerActor:
        """As `Supervisor.load`. The name is known from now on, but not after a load that failed, unless it was registered."""
        before = self._known.get(ModelName(spec.name))
        old_spec = before.spec if before is not None else spec
        known = self._know(spec)
        known.num_leases += 1
        try:
            load = self._make_load(spec)
            actor = await self._supervisor.load(spec, load, generation=known.generation, group=known.name)
            known.was_loaded = True
            return actor
        except BaseException:
            if not self._has_workers(known):
                known.spec = old_spec
                if not known.is_registered:
                    self._forget(known)
            raise
        finally:
            self._give_back(known)

    async def ready(self, name: ModelName) -> WorkerActor:
        """Its first replica, loaded if need be; the caller holds a lease. :raises TroupeError: the load's end."""
        known = self._find(name)
        if any(actor.facts is not None for actor in self._actors(known)):
            return self._supervisor.find(self.worker(name))
        load = self._make_load(known.spec)
        return await self._supervisor.load(known.spec, load, generation=known.generation, group=known.name)

    async def prepare(self, name: ModelName, request: RequestId, prompt: Prompt) -> Prepared | Refused:
        """Tokenize, loading the model if need be. :raises ModelError:"""
        known = self.lease(name)
        try:
            while True:
                actor = await self.ready(name)
                try:
                    return await actor.prepare(request, prompt)
                except ModelUnavailable:
                    if self._supervisor.find(self.worker(name)) is actor:
                        raise  # otherwise it was swapped meanwhile
        finally:
            self._give_back(known)

    async def unload(self, name: ModelName, *, keep: bool = True) -> None:
        """As `Supervisor.unload`, of all its workers, also of those swapped out or in. keep: a registered name stays known.

        :raises ModelNotLoaded: there never was a model of that name.
        """
        known = self._known.get(name)
        if known is not None and not (keep and known.is_registered):
            self._forget(known)
        try:
            await self._supervisor.unload(name)
        except ModelNotLoaded:
            if known is None:
                raise

    # -- ends that nobody asked for ---------------------------------------------------------------------------

    def residents(self) -> list[Resident]:
        """All models that have nothing but ready workers."""
        return [self._resident(known) for known in self._known.values() if self._is_resident(known)]

    def _is_resident(self, known: Known) -> bool:
        actors = self._actors(known)
        return bool(actors) and all(actor.state is WorkerState.READY for actor in actors)

    def _resident(self, known: Known) -> Resident:
        targets = self._targets(known)
        return Resident(
            known.name,
            sum(_footprint(actor) for actor in self._actors(known)),
            max(one.rested_at for one in (known, *targets)),
            is_busy=self._is_busy(known),
            is_pinned=known.spec.pin,
            is_drafter=bool(targets),
            idle_unload_seconds=known.spec.idle_unload_seconds,
        )

    async def make_room(self, needed_bytes: int) -> bool:
        """End idle models until so many bytes are given back; True when their processes have gone. False: nobody was ended."""
        chosen = victims(self.residents(), needed_bytes)
        if chosen is None:
            return False
        ending = [actor for name in chosen for actor in self._end(self._known[name], "evicted")]
        for actor in ending:
            await actor.over.wait()
        return True

    def _end(self, known: Known, reason: str) -> list[WorkerActor]:
        actors = self._actors(known)
        for actor in actors:
            self._supervisor.end(actor, ModelNotLoaded(known.name, f"was unloaded ({reason})"))
        self._watchers.publish(ModelEnded(known.name, "evicted" if reason == "evicted" else "idle"))
        return actors

    async def run(self) -> None:
        """End models whose idle time is over. Ends only by being cancelled."""
        while True:
            self._changed = anyio.Event()
            now = self._clock()
            for resident in self.residents():
                if idle_until(resident) <= now:
                    self._end(self._known[resident.name], "idle")
            due = min((idle_until(resident) for resident in self.residents()), default=inf)
            with anyio.move_on_after(due - now):
                await self._changed.wait()

    # -- other weights under the same name ------------------------------------------------------------------

    async def swap(self, spec: ModelSpec) -> WorkerActor:
        """Load beside what is there, then give the name to the new workers, all at once; the old ones end when their requests have.

        When it fails or is cancelled before, everything is as it was. One swap of a name at a time.

        :raises ModelNotLoaded: no such model. :raises ModelLoadFailed: :raises ProtocolMismatch: :raises RuntimeClosed:
        """
        known = self._find(ModelName(spec.name))
        async with known.swapping:
            if self._known.get(known.name) is not known:
                raise ModelNotLoaded(spec.name, "was unloaded")
            if not self._has_workers(known):
                return await self.load(spec)
            known.num_leases += 1  # else the old ones might end before the new are there
            try:
                return await self._swap(known, spec)
            finally:
                self._give_back(known)

    async def _swap(self, known: Known, spec: ModelSpec) -> WorkerActor:
        known.last_generation = generation = known.last_generation + 1
        other = replica_names(spec, generation)[0]
        actor = await self._supervisor.load(spec, self._make_load(spec), generation=generation, group=other)
        if self._known.get(known.name) is not known or self._supervisor.find(other) is not actor:
            raise ModelNotLoaded(spec.name, "was unloaded")
        old = self._actors(known)
        previous = next((one.facts.fingerprint for one in old if one.facts is not None), None)
        ended = self.open_requests.all_ended(known.name)
        known.spec, known.generation, known.was_loaded, known.on_demand = spec, generation, True, None
        self._scheduler.offer(GroupsExchanged(known.name, other))
        assert actor.facts is not None
        self._watchers.publish(ModelSwapped(known.name, previous, actor.facts.fingerprint))
        self._group.start_soon(self._end_swapped, known.name, old, ended, name=f"swapped out: {known.name}")
        return actor

    async def _end_swapped(self, name: ModelName, old: list[WorkerActor], ended: anyio.Event) -> None:
        await ended.wait()
        for actor in old:
            self._supervisor.end(actor, ModelNotLoaded(name, "was swapped for other weights"))
        for actor in old:
            await actor.over.wait()
        self._watchers.publish(ModelEnded(name, "swapped"))


def _footprint(actor: WorkerActor) -> int:
    """What its process takes: by its last heartbeat, or the weights alone before the first."""
    resident = actor.last_beat.resident_bytes if actor.last_beat is not None else 0
    return max(resident, actor.facts.weights_bytes if actor.facts is not None else 0)
