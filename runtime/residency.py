"""Which of the models that the app named have workers now? Loads one when it is asked for, ends it when nobody needs it, swaps it.

A request holds a lease on its model from before its admission to its end. What a name stands for is in names.py; the supervisor
knows only workers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from math import inf
from typing import Literal, Protocol

import anyio
from anyio.abc import TaskGroup

from runtime.actors.eviction import idle_until, victims
from runtime.actors.supervisor import Supervisor, replica_names
from runtime.actors.worker_actor import WorkerActor
from runtime.config import ModelSpec
from runtime.errors import ModelLoadFailed, ModelNotLoaded, ModelUnavailable, TroupeError
from runtime.names import Known, Names
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


class Residency:
    """The models of one Runtime. All on its event loop's thread; `group` owns loads on demand and ends of what was swapped out."""

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
        self.names = Names(supervisor, clock)
        self._changed = anyio.Event()

    # -- names ----------------------------------------------------------------------------------------------

    def register(self, spec: ModelSpec) -> None:
        """:raises ModelLoadFailed: it is loaded with another spec."""
        self.names.know(spec).is_registered = True

    # -- leases ---------------------------------------------------------------------------------------------

    def lease(self, name: ModelName) -> Known:
        """The model is needed until `give_back`: it is loaded unless it is there or loading, and its drafter with it.

        :raises ModelNotLoaded: no such model. :raises ModelLoadFailed: at once, when its path leads nowhere; no lease is held then.
        """
        known = self.names.find(name)
        if self.names.needs_load(known):
            self._load_on_demand(known)
            drafter = self.names.get(known.spec.drafter)
            if drafter is not None and self.names.needs_load(drafter):
                try:
                    self._load_on_demand(drafter)
                except ModelLoadFailed:
                    pass  # the target does without; `rt.stats()` says so
        known.num_leases += 1
        return known

    def give_back(self, name: ModelName) -> None:
        """Of a request. When the last lease is given back, a load that only requests wanted is ended."""
        known = self.names.get(name)
        if known is not None:  # else it was unloaded, and its requests ended with it
            self._give_back(known)

    def _give_back(self, known: Known) -> None:
        known.num_leases -= 1
        known.rested_at = self._clock()
        if not known.num_leases:
            for one in (known, self.names.get(known.spec.drafter)):
                if one is not None and one.on_demand is not None and not self.names.is_busy(one) and not self.names.targets(one):
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
        if any(not actor.settled.is_set() for actor in self.names.actors(known)):
            known.on_demand.cancel()
            for actor in self.names.actors(known):
                self._supervisor.end(actor, ModelNotLoaded(known.name, "its load was cancelled"))

    # -- loading, unloading ---------------------------------------------------------------------------------

    async def load(self, spec: ModelSpec) -> WorkerActor:
        """As `Supervisor.load`. The name is known from now on, but not after a load that failed, unless it was registered."""
        before = self.names.get(ModelName(spec.name))
        old_spec = before.spec if before is not None else spec
        known = self.names.know(spec)
        known.num_leases += 1
        try:
            load = self._make_load(spec)
            actor = await self._supervisor.load(spec, load, generation=known.generation, group=known.name)
            known.was_loaded = True
            return actor
        except BaseException:
            if not self.names.has_workers(known):
                known.spec = old_spec
                if not known.is_registered:
                    self.names.forget(known)
            raise
        finally:
            self._give_back(known)

    async def ready(self, name: ModelName) -> WorkerActor:
        """Its first replica, loaded if need be; the caller holds a lease. :raises TroupeError: the load's end."""
        known = self.names.find(name)
        if any(actor.facts is not None for actor in self.names.actors(known)):
            return self._supervisor.find(self.names.worker(name))
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
                    if self._supervisor.find(self.names.worker(name)) is actor:
                        raise  # otherwise it was swapped meanwhile
        finally:
            self._give_back(known)

    async def unload(self, name: ModelName, *, keep: bool = True) -> None:
        """As `Supervisor.unload`, of all its workers, also of those swapped out or in. keep: a registered name stays known.

        :raises ModelNotLoaded: there never was a model of that name.
        """
        known = self.names.get(name)
        if known is not None and not (keep and known.is_registered):
            self.names.forget(known)
        try:
            await self._supervisor.unload(name)
        except ModelNotLoaded:
            if known is None:
                raise

    # -- ends that nobody asked for ---------------------------------------------------------------------------

    async def make_room(self, needed_bytes: int) -> bool:
        """End idle models until so many bytes are given back; True when their processes have gone. False: nobody was ended."""
        chosen = victims(self.names.residents(), needed_bytes)
        if chosen is None:
            return False
        ending = [actor for name in chosen for actor in self._end(self.names.find(name), "evicted")]
        for actor in ending:
            await actor.over.wait()
        return True

    def _end(self, known: Known, reason: Literal["idle", "evicted"]) -> list[WorkerActor]:
        actors = self.names.actors(known)
        for actor in actors:
            self._supervisor.end(actor, ModelNotLoaded(known.name, f"was unloaded ({reason})"))
        self._watchers.publish(ModelEnded(known.name, reason))
        return actors

    async def run(self) -> None:
        """End models whose idle time is over. Ends only by being cancelled."""
        while True:
            self._changed = anyio.Event()
            now = self._clock()
            for resident in self.names.residents():
                if idle_until(resident) <= now:
                    self._end(self.names.find(resident.name), "idle")
            due = min((idle_until(resident) for resident in self.names.residents()), default=inf)
            with anyio.move_on_after(due - now):
                await self._changed.wait()

    # -- other weights under the same name ------------------------------------------------------------------

    async def swap(self, spec: ModelSpec) -> WorkerActor:
        """Load beside what is there, then give the name to the new workers, all at once; the old ones end when their requests have.

        When it fails or is cancelled before, everything is as it was. One swap of a name at a time.

        :raises ModelNotLoaded: no such model. :raises ModelLoadFailed: :raises ProtocolMismatch: :raises RuntimeClosed:
        """
        known = self.names.find(ModelName(spec.name))
        async with known.swapping:
            if self.names.get(known.name) is not known:
                raise ModelNotLoaded(spec.name, "was unloaded")
            if not self.names.has_workers(known):
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
        if self.names.get(known.name) is not known or self._supervisor.find(other) is not actor:
            raise ModelNotLoaded(spec.name, "was unloaded")
        old = self.names.actors(known)
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
