"""The scheduler's tables of prefixes over all models: files, what is promised of them, pins, counts.

Plain bookkeeping. What a row may restore is decided in restoring.py; what is kept, written and erased in keeping.py. Leases on
files are held by sequences that wait for their Restored, by pins, and by promises (on what the new file is to continue).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from runtime.config import Settings
from runtime.prefix.hashing import BlockHash, Scope
from runtime.prefix.index import Index, Limits
from runtime.prefix.plans import Entry
from runtime.protocol.ids import ModelName, RequestId, SequenceId, TenantId


@dataclass(slots=True, eq=False)
class Counts:
    """One tenant's (or the shared scope's) numbers since the start; see `stats.PrefixStats`."""

    hits_memory: int = 0
    hits_file: int = 0
    misses: Counter[str] = field(default_factory=Counter)
    cached_tokens: int = 0
    computed_tokens: int = 0
    followed: int = 0
    followed_tokens: int = 0
    published: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    evictions: int = 0


@dataclass(slots=True, eq=False)
class Promise:
    """A file that a worker was told to write. `entry`: as it will be, but for its size. `request`, `tenant`: whose it is."""

    entry: Entry
    scope: Scope
    request: RequestId
    tenant: TenantId
    is_erased: bool = False

    @property
    def holder(self) -> tuple[str, BlockHash]:
        """Of the leases on what it continues."""
        return ("promise", self.entry.name)


@dataclass(slots=True, eq=False)
class Pin:
    """What a prefill_only request keeps in a worker's memory until it is released. `chain`: of its pinned blocks."""

    request: RequestId
    model: ModelName
    sequence: SequenceId
    scope: Scope
    chain: list[BlockHash]
    length: int

    @property
    def holder(self) -> tuple[str, RequestId]:
        return ("pin", self.request)


class Prefixes:
    """`free_bytes`: on the disk, as far as known. `promised`: names of all promises that are not erased, over all models."""

    def __init__(self, settings: Settings) -> None:
        self.has_memory = bool(settings.prefix_memory_bytes)
        self.has_files = bool(settings.prefix_disk_bytes)
        self.index = Index(Limits(settings.prefix_disk_bytes or 0, settings.prefix_free_bytes))
        self.free_bytes = 0
        self.promised: set[BlockHash] = set()
        self.pins: dict[RequestId, Pin] = {}
        self.counts: defaultdict[TenantId | None, Counts] = defaultdict(Counts)

    def set_cap(self, tenant: TenantId, num_bytes: int | None) -> None:
        """None: no cap of its own."""
        if num_bytes is None:
            self.index.limits.tenant_bytes.pop(tenant, None)
        else:
            self.index.limits.tenant_bytes[tenant] = num_bytes

    # -- promises -------------------------------------------------------------------------------------------

    def break_promise(self, promise: Promise) -> None:
        """The file will not come, or is not wanted any more."""
        self.index.cancel(promise.entry.name)
        self.settle_promise(promise)

    def settle_promise(self, promise: Promise) -> None:
        self.index.release(promise.holder)
        self.promised.discard(promise.entry.name)

    # -- pins -----------------------------------------------------------------------------------------------

    def pin(self, pin: Pin) -> None:
        """Also again, when it has grown or there are new files of it."""
        self.pins[pin.request] = pin
        self.index.release(pin.holder)
        if found := self.index.plans(pin.chain, pin.length + 1):
            self.index.lease(pin.holder, found[-1])

    def unpin(self, request: RequestId) -> Pin | None:
        """The pin that there was."""
        pin = self.pins.pop(request, None)
        if pin is not None:
            self.index.release(pin.holder)
        return pin

    # -- a worker's end ---------------------------------------------------------------------------------------

    def lose(self, model: ModelName, promises: Iterable[Promise]) -> None:
        """Nothing of what a worker held or was to write will come."""
        for promise in promises:
            self.break_promise(promise)
        for pin in [pin for pin in self.pins.values() if pin.model == model]:
            self.unpin(pin.request)
