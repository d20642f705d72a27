"""Who may start a worker now, and how much may the models' sequences hold? Keeps one Runtime's ledger and acts on what it says.

A load that does not fit first has idle models evicted, then waits for busy ones, and is refused when its time is over.
Everything happens on the event loop's thread.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Final

import anyio
import anyio.to_thread

from runtime.config import ModelSpec, Settings
from runtime.errors import MemoryShort, TroupeError
from runtime.memory import estimate
from runtime.memory.ledger import Granted, Ledger, Need
from runtime.memory.plan import Plan, plan
from runtime.protocol.commands import Load
from runtime.protocol.events import Heartbeat, ModelFacts
from runtime.protocol.ids import Holder, ModelName

LOOK_SECONDS: Final = 0.25
"""A load that waits looks so often whether a model has become idle."""
RELIEF_SECONDS: Final = 5.0
"""Between two attempts to evict somebody because workers take more than they should."""


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """One worker's bytes. reserved: of the budget, with `kv_granted` more that its sequences may use now. footprint: by its last
    heartbeat, 0 before the first."""

    name: str
    is_loading: bool
    reserved_bytes: int
    weights_bytes: int
    prefill_bytes: int
    load_bytes: int
    kv_granted_bytes: int
    footprint_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """The budget and who has it. overcommitted: what workers say they take beyond it. prefixes: set aside for those in memory."""

    budget_bytes: int
    reserved_bytes: int
    free_bytes: int
    overcommitted_bytes: int
    prefix_bytes: int
    models: tuple[ModelMemory, ...]


class Keeper:
    """Implements the actors' `MemoryPort`. `make_room` ends idle models that have so many bytes; False if that is not possible."""

    def __init__(
        self,
        settings: Settings,
        set_tokens: Callable[[ModelName, int | None], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """settings: settled. set_tokens: told how many tokens a worker's sequences may hold together, whenever that changes."""
        budget = settings.memory_budget_bytes or 0
        self.ledger = Ledger(budget, min(settings.prefix_memory_bytes or 0, budget))
        self.make_room: Callable[[int], Awaitable[bool]] = _nobody
        self._settings = settings
        self._set_tokens = set_tokens
        self._clock = clock
        self._told: dict[Holder, int | None] = {}
        self._prefill: dict[Holder, int] = {}
        self._changed = anyio.Event()

    # -- for the actors -------------------------------------------------------------------------------------

    async def admit(self, holder: Holder, spec: ModelSpec, load: Load) -> TroupeError | None:
        """Reserve what it will need, waiting for it at most `memory_wait_seconds`. None: it may be started, now or again later."""
        need = await self._estimate(spec, load)
        deadline = self._clock() + self._settings.memory_wait_seconds
        while True:
            answer = self.ledger.ask(holder, need)
            if isinstance(answer, Granted):
                self._prefill[holder] = need.prefill_bytes
                self._tell()
                return None
            left = 0.0 if answer.is_hopeless else deadline - self._clock()
            if not answer.is_hopeless and await self.make_room(answer.missing_bytes):
                continue
            if left <= 0:
                return self._refusal(spec, need, is_hopeless=answer.is_hopeless)
            changed = self._changed
            with anyio.move_on_after(min(left, LOOK_SECONDS)):
                await changed.wait()

    def loaded(self, holder: Holder, spec: ModelSpec, facts: ModelFacts) -> None:
        """It is ready, and this is what it truly is."""
        self.ledger.loaded(holder, estimate.of_facts(spec, facts, self._prefill.get(holder, 0)))
        self._tell()

    def beat(self, holder: Holder, beat: Heartbeat) -> None:
        self.ledger.reconcile(holder, max(beat.active_bytes, beat.resident_bytes))
        self._tell()

    def released(self, holder: Holder) -> None:
        """Nothing of its process is left."""
        self.ledger.released(holder)
        self._told.pop(holder, None)
        self._prefill.pop(holder, None)
        self._tell()

    def reserved(self, holder: Holder) -> int:
        return self.ledger.reserved(holder)

    # -- for the host -----------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Evict idle models while workers take more than there is. Ends only by being cancelled."""
        tried_at = -inf
        while True:
            changed = self._changed
            excess = self.ledger.overcommitted_bytes
            if excess and self._clock() - tried_at >= RELIEF_SECONDS:
                tried_at = self._clock()
                await self.make_room(excess)
            with anyio.move_on_after(RELIEF_SECONDS if excess else inf):
                await changed.wait()

    async def plan(self, specs: list[tuple[ModelSpec, Load]]) -> Plan:
        needs = [(spec.name, spec.replicas, await self._estimate(spec, load), not load.is_hub_id) for spec, load in specs]
        return plan(needs, self.ledger.budget_bytes, self.ledger.shared_bytes)

    def stats(self) -> MemoryStats:
        ledger, grants = self.ledger, self.ledger.grants()
        models = tuple(
            ModelMemory(
                name=holder.model,
                is_loading=is_loading,
                reserved_bytes=reserved,
                weights_bytes=need.weights_bytes,
                prefill_bytes=need.prefill_bytes,
                load_bytes=need.load_bytes if is_loading else 0,
                kv_granted_bytes=grants.get(holder, 0),
                footprint_bytes=footprint,
            )
            for holder, (need, is_loading, reserved, footprint) in ledger.accounts().items()
        )
        return MemoryStats(
            ledger.budget_bytes, ledger.reserved_bytes, ledger.free_bytes, ledger.overcommitted_bytes, ledger.shared_bytes, models
        )

    # -- within -------------------------------------------------------------------------------------------------

    async def _estimate(self, spec: ModelSpec, load: Load) -> Need:
        directory = None if load.is_hub_id or spec.kind == "fake" else Path(load.path)
        return await anyio.to_thread.run_sync(estimate.of_files, spec, directory, self._settings.prefill_chunk_tokens)

    def _refusal(self, spec: ModelSpec, need: Need, *, is_hopeless: bool) -> MemoryShort:
        if is_hopeless:
            remedy = "a smaller model, one with fewer bits, or a larger Settings(memory_budget_bytes)"
        else:
            remedy = "unload a model, or wait until one is idle"
        return MemoryShort(
            spec.name,
            needed_bytes=need.peak_bytes,
            free_bytes=self.ledger.free_bytes,
            budget_bytes=self.ledger.budget_bytes,
            remedy=remedy,
            retry_after_seconds=self._settings.memory_wait_seconds,
        )

    def _tell(self) -> None:
        """What each worker's sequences may hold now, where that has changed."""
        accounts = self.ledger.accounts()
        for holder, granted in self.ledger.grants().items():
            max_tokens = estimate.max_tokens(accounts[holder][0], granted)
            if self._told.get(holder, _UNTOLD) != max_tokens:
                self._told[holder] = max_tokens
                self._set_tokens(holder.model, max_tokens)
        changed, self._changed = self._changed, anyio.Event()
        changed.set()


_UNTOLD: Final = -1


async def _nobody(_: int) -> bool:
    return False
