"""Who is next: weighted fair queueing between the tenants of one model, by token cost.

Start-time fair queueing (Goyal, Vin, Cheng, 1996). Each tenant's flow has a start tag; serving a row of cost c moves it by
c / weight; the lowest tag is served next, and virtual time is the start tag last served. A flow that had nothing to serve
starts again at virtual time at the earliest: being idle gains no credit. Costs are corrected afterwards (`Flow.charge`).

Within a tenant: interactive before background, first come first served, and after MAX_OVERTAKES interactive ones have
passed a waiting background one, that goes next.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

from runtime.config import TenantSpec
from runtime.protocol.ids import ModelName, RequestId, TenantId
from runtime.scheduler.request import RequestRecord, Sequence, SequenceState

MAX_OVERTAKES = 8

T = TypeVar("T")


class Line:
    """Requests of one tenant in one model that wait for the same thing, in the order in which they get it."""

    def __init__(self) -> None:
        self._interactive: OrderedDict[RequestId, RequestRecord] = OrderedDict()
        self._background: OrderedDict[RequestId, RequestRecord] = OrderedDict()
        self._num_overtakes = 0

    def __len__(self) -> int:
        return len(self._interactive) + len(self._background)

    def __contains__(self, record: RequestRecord) -> bool:
        return record.request.id in self._interactive or record.request.id in self._background

    def add(self, record: RequestRecord) -> None:
        self._side(record)[record.request.id] = record

    def put_back(self, record: RequestRecord) -> None:
        """It had been taken, and is the first again."""
        side = self._side(record)
        side[record.request.id] = record
        side.move_to_end(record.request.id, last=False)

    def discard(self, record: RequestRecord) -> None:
        """It ended while waiting."""
        self._side(record).pop(record.request.id, None)

    def take(self, record: RequestRecord) -> None:
        """It got what it waited for."""
        del self._side(record)[record.request.id]
        if record.request.priority == "background":
            self._num_overtakes = 0
        elif self._background:
            self._num_overtakes += 1

    def in_order(self) -> Iterator[RequestRecord]:
        """All of them as successive `take`s should have them. The line must not change meanwhile."""
        interactive, background = iter(self._interactive.values()), iter(self._background.values())
        num_overtakes = self._num_overtakes
        urgent, patient = next(interactive, None), next(background, None)
        while urgent is not None or patient is not None:
            if urgent is None or (patient is not None and num_overtakes >= MAX_OVERTAKES):
                assert patient is not None
                yield patient
                num_overtakes, patient = 0, next(background, None)
            else:
                yield urgent
                num_overtakes, urgent = num_overtakes + (patient is not None), next(interactive, None)

    def _side(self, record: RequestRecord) -> OrderedDict[RequestId, RequestRecord]:
        return self._background if record.request.priority == "background" else self._interactive


@dataclass(slots=True, eq=False)
class Tenant:
    """`num_running`: its requests with a slot and without an end, over all models. `num_tokens_served`: generated for it, ever.
    `last_replicas`: by group, where its last request was sent."""

    id: TenantId
    spec: TenantSpec
    flows: dict[ModelName, Flow] = field(default_factory=dict, repr=False)
    last_replicas: dict[ModelName, ModelName] = field(default_factory=dict)
    num_running: int = 0
    num_tokens_served: int = 0


@dataclass(slots=True, eq=False)
class Flow:
    """One tenant's waiting requests in one model, and its start tag.

    A request waits in `queued`, then in `preparing` while the worker tokenizes it, then in `ready` until all its rows have
    slots. `is_idle`: had no row to serve when last looked at.
    """

    tenant: Tenant
    queued: Line = field(default_factory=Line)
    preparing: dict[RequestId, RequestRecord] = field(default_factory=dict)
    ready: Line = field(default_factory=Line)
    start_tag: float = 0.0
    is_idle: bool = True

    @property
    def num_waiting(self) -> int:
        return len(self.queued) + len(self.preparing) + len(self.ready)

    def charge(self, num_tokens: int) -> None:
        """Its tenant used so many tokens; negative gives back what was charged too much."""
        self.start_tag += num_tokens / self.tenant.spec.weight

    def startable_rows(self) -> Iterator[Sequence]:
        """Waiting rows of prepared requests that never had a slot, as far as its tenant's max_running allows."""
        room = self.tenant.spec.max_running - self.tenant.num_running
        for record in self.ready.in_order():
            if not record.has_started:
                if room <= 0:
                    continue
                room -= 1
            for sequence in record.sequences:
                if sequence.state is SequenceState.WAITING and not sequence.is_returning:
                    yield sequence


class FairQueue:
    """All tenants' flows in one model."""

    def __init__(self) -> None:
        self.flows: dict[TenantId, Flow] = {}
        self.virtual_time = 0.0

    def settle(self) -> None:
        """Nobody waits, so nothing was taken from anybody: all tenants start level again."""
        if all(flow.num_waiting == 0 for flow in self.flows.values()):
            self.virtual_time = max((flow.start_tag for flow in self.flows.values()), default=self.virtual_time)

    def serve(self, flow: Flow, cost: int) -> None:
        """A row of this flow gets its slot."""
        self.virtual_time = max(self.virtual_time, flow.start_tag)
        flow.charge(cost)

    def rows_in_order(self, cost: Callable[[RequestRecord], int]) -> Iterator[Sequence]:
        """Rows in the order in which they should get slots, if each is then served with `cost`. Take all before serving any."""
        lines = []
        for flow in self.flows.values():
            rows = flow.startable_rows() if flow.ready else iter(())
            first = next(rows, None)
            if first is None:
                flow.is_idle = True
                continue
            if flow.is_idle:
                flow.is_idle = False
                flow.start_tag = max(flow.start_tag, self.virtual_time)
            lines.append((flow.start_tag, flow.tenant.spec.weight, first, rows))
        return _by_tag(lines, lambda row: cost(row.record))

    def queued_in_order(self, cost: Callable[[RequestRecord], int]) -> Iterator[RequestRecord]:
        """Queued requests in the order in which they will want slots: behind what of their tenant is prepared already.

        No more of a tenant than it may run: what its quota holds back must not fill the room that others could use.
        """
        lines = []
        for flow in self.flows.values():
            room = flow.tenant.spec.max_running - len(flow.preparing) - len(flow.ready)
            records = islice(flow.queued.in_order(), max(0, room))
            first = next(records, None)
            if first is None:
                continue
            ahead = sum(cost(record) for record in flow.preparing.values()) + sum(cost(record) for record in flow.ready.in_order())
            tag = max(flow.start_tag, self.virtual_time) if flow.is_idle else flow.start_tag
            lines.append((tag + ahead / flow.tenant.spec.weight, flow.tenant.spec.weight, first, records))
        return _by_tag(lines, cost)


def _by_tag(lines: Iterable[tuple[float, float, T, Iterator[T]]], cost: Callable[[T], int]) -> Iterator[T]:
    """Merge (tag, weight, first, rest) lines: lowest tag first; each item moves its line's tag by its cost / weight."""
    heap = [(tag, number, weight, first, rest) for number, (tag, weight, first, rest) in enumerate(lines)]
    heapq.heapify(heap)
    while heap:
        tag, number, weight, item, rest = heap[0]
        yield item
        following = next(rest, None)
        if following is None:
            heapq.heappop(heap)
        else:
            heapq.heapreplace(heap, (tag + cost(item) / weight, number, weight, following, rest))
