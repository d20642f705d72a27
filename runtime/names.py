"""What does the app know by which name, and which workers has it now? Names outlive their workers; `residency.py` changes both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import anyio

from runtime.actors.eviction import Resident
from runtime.actors.lifecycle import WorkerState
from runtime.actors.supervisor import Supervisor, replica_names
from runtime.actors.worker_actor import WorkerActor
from runtime.config import ModelSpec
from runtime.errors import ModelLoadFailed, ModelNotLoaded
from runtime.protocol.ids import ModelName


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


class Names:
    """All names of one Runtime, in the order in which they became known."""

    def __init__(self, supervisor: Supervisor, clock: Callable[[], float]) -> None:
        self._supervisor = supervisor
        self._clock = clock
        self._known: dict[ModelName, Known] = {}

    def get(self, name: str | None) -> Known | None:
        return None if name is None else self._known.get(ModelName(name))

    def know(self, spec: ModelSpec) -> Known:
        """Known from now on, by this spec. :raises ModelLoadFailed: it has workers with another."""
        name = ModelName(spec.name)
        known = self._known.get(name)
        if known is None:
            known = self._known[name] = Known(spec, False, self._clock())
        elif known.spec != spec:
            if self.has_workers(known):
                raise ModelLoadFailed(spec.name, "is loaded with another spec; swap it, or unload it first", reason="conflict")
            known.spec = spec
        return known

    def find(self, name: ModelName) -> Known:
        """:raises ModelNotLoaded: no such name."""
        known = self._known.get(name)
        if known is None:
            names = ", ".join(repr(str(other)) for other in self._known) or "none"
            raise ModelNotLoaded(name, f"is not loaded; loaded or registered: {names}")
        return known

    def forget(self, known: Known) -> None:
        if self._known.get(known.name) is known:
            del self._known[known.name]

    def absent(self) -> list[Known]:
        """Names that no worker runs for."""
        return [known for known in self._known.values() if not self.actors(known)]

    def worker(self, name: ModelName) -> ModelName:
        """The name of the worker that is a model's first replica now. :raises ModelNotLoaded: no such model."""
        return replica_names(self.find(name).spec, self.find(name).generation)[0]

    # -- its workers ----------------------------------------------------------------------------------------

    def actors(self, known: Known) -> list[WorkerActor]:
        names = set(replica_names(known.spec, known.generation))
        return [actor for actor in self._supervisor.actors() if actor.name in names]

    def has_workers(self, known: Known) -> bool:
        """Loading, ready, or to be restarted."""
        return any(actor.state is not WorkerState.FAILED for actor in self.actors(known))

    def needs_load(self, known: Known) -> bool:
        """Also after a first load that failed. One whose restarts are spent stays so until the app loads it anew."""
        actors = self.actors(known)
        return not actors or any(actor.state is WorkerState.FAILED and actor.facts is None for actor in actors)

    def targets(self, known: Known) -> list[Known]:
        """Models with workers that draft with it."""
        return [one for one in self._known.values() if one.spec.drafter == known.name and self.has_workers(one)]

    def is_busy(self, known: Known) -> bool:
        """Somebody needs it, or a model that drafts with it."""
        return any(one.num_leases for one in (known, *self.targets(known)))

    def residents(self) -> list[Resident]:
        """All models that have nothing but ready workers."""
        return [self._resident(known) for known in self._known.values() if self._is_resident(known)]

    def _is_resident(self, known: Known) -> bool:
        actors = self.actors(known)
        return bool(actors) and all(actor.state is WorkerState.READY for actor in actors)

    def _resident(self, known: Known) -> Resident:
        targets = self.targets(known)
        return Resident(
            known.name,
            sum(actor.reserved_bytes for actor in self.actors(known)),
            max(one.rested_at for one in (known, *targets)),
            is_busy=self.is_busy(known),
            is_pinned=known.spec.pin,
            is_drafter=bool(targets),
            idle_unload_seconds=known.spec.idle_unload_seconds,
        )
