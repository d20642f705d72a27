"""Where do the tenants' requests come in? Makes the scheduler's request of the options, and counts what is under way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import anyio

from runtime.errors import InvalidRequest, ModelNotLoaded, RuntimeClosed
from runtime.options import ValidOptions
from runtime.prefix.hashing import Scope, shared_scope
from runtime.prefix.keys import Keyring
from runtime.protocol.ids import ModelName, RequestId, TenantId
from runtime.scheduler.request import Outcome, Request
from runtime.scheduler.scheduler import Scheduler
from runtime.scheduler.stimuli import ReleasePrefix
from runtime.scheduler.stream import TokenStream
from runtime.watch import RequestEnded, RequestQueued, WatchHub


class Leases(Protocol):
    """Who keeps a model there while a request needs it; `residency.py`."""

    def lease(self, name: ModelName) -> object:
        """Loads it if need be. :raises ModelError: no lease is held."""
        ...

    def give_back(self, name: ModelName) -> None: ...


class RequestDesk:
    """The `Desk` of a Runtime's own tenants. `is_open` turns False when the Runtime closes."""

    def __init__(self, scheduler: Scheduler, watchers: WatchHub, keyring: Keyring, leases: Leases) -> None:
        self.is_open = True
        self._scheduler = scheduler
        self._keyring = keyring
        self._sharing: set[TenantId] = set()
        self._watchers = watchers
        self._num_refusing: Counter[ModelName] = Counter()
        self._leases = leases
        self._open: dict[ModelName, set[RequestId]] = {}
        self._waiting: list[tuple[set[RequestId], anyio.Event]] = []
        scheduler.on_end = self._ended

    def submit(self, tenant: TenantId, model: str, options: ValidOptions, *, windowed: bool) -> TokenStream:
        if not self.is_open:
            raise RuntimeClosed
        name = ModelName(model)
        if self._num_refusing[name]:
            raise ModelNotLoaded(model, "is being unloaded")
        request = Request(
            id=self._scheduler.new_request_id(),
            tenant=tenant,
            model=name,
            prompt=options.prompt,
            sampling=options.sampling,
            max_tokens=options.max_tokens,
            stop=options.stop,
            ignore_eos=options.ignore_eos,
            num_sequences=options.num_sequences,
            priority=options.priority,
            deadline_seconds=options.deadline_seconds,
            windowed=windowed,
            scope=self._scope(tenant, options),
            keeps_prefix=options.cache == "on",
            prefill_only=options.prefill_only,
            boundaries=options.boundaries,
            speculate=options.speculate,
        )
        self._leases.lease(name)
        try:
            stream = self._scheduler.submit(request)
        except BaseException:
            self._leases.give_back(name)
            raise
        self._open.setdefault(name, set()).add(request.id)
        self._watchers.publish(RequestQueued(model, tenant, request.id))
        return stream

    def set_may_share(self, tenant: TenantId, may_share: bool) -> None:
        (self._sharing.add if may_share else self._sharing.discard)(tenant)

    def release_prefix(self, request: RequestId) -> None:
        self._scheduler.offer(ReleasePrefix(request))

    def _scope(self, tenant: TenantId, options: ValidOptions) -> Scope | None:
        """:raises InvalidRequest: the tenant may not share."""
        if options.cache_scope == "shared":
            if tenant not in self._sharing:
                raise InvalidRequest(
                    "cache_scope",
                    f"got 'shared', which tenant {tenant!r} may not use; allowed: 'tenant', or 'shared' once the app has set "
                    f"rt.tenant({tenant!r}, TenantSpec(may_share=True))",
                )
            return None if options.cache == "off" else shared_scope()
        match options.cache:
            case "on":
                return self._keyring.scope(tenant)
            case "read-only":
                return self._keyring.find(tenant)
            case "off":
                return None

    def _ended(self, request: Request, outcome: Outcome) -> None:
        still_open = self._open[request.model]
        still_open.remove(request.id)
        if not still_open:
            del self._open[request.model]
        for awaited, ended in self._waiting:
            awaited.discard(request.id)
            if not awaited:
                ended.set()
        self._waiting = [(awaited, ended) for awaited, ended in self._waiting if awaited]
        self._leases.give_back(request.model)
        self._watchers.publish(RequestEnded(request.model, request.tenant, request.id, outcome.state))

    @contextmanager
    def refusing(self, model: ModelName) -> Iterator[None]:
        """New requests for the model are refused as long as anybody is inside."""
        self._num_refusing[model] += 1
        try:
            yield
        finally:
            self._num_refusing[model] -= 1

    def all_ended(self, model: ModelName) -> anyio.Event:
        """Set once the requests that the model has now have ended, whatever comes after them."""
        ended = anyio.Event()
        awaited = set(self._open.get(model, ()))
        if awaited:
            self._waiting.append((awaited, ended))
        else:
            ended.set()
        return ended
