"""Which of a model's replicas serves a request, and when does a request change to another?

A group is all replicas of one model under the name that apps use; each replica is a `Model` with a worker, queues and slots of its
own. A request waits at one of them, and moves only while no worker holds anything of it: when its replica's worker is lost, and
when another replica is idle. Swapping a model exchanges two groups.
"""

from __future__ import annotations

from collections.abc import Iterator

from runtime.protocol.ids import ModelName
from runtime.scheduler.book import Book
from runtime.scheduler.fairness import Tenant
from runtime.scheduler.model import Model
from runtime.scheduler.request import RequestRecord, RequestState, SequenceState


def replicas(book: Book, group: ModelName) -> list[Model]:
    return [book.models[name] for name in book.groups.get(group, ())]


def choose(book: Book, group: ModelName, tenant: Tenant) -> Model | None:
    """Where a new request of the tenant waits: where a slot is free, if it can be where its last was, and its prefix perhaps is."""
    candidates = replicas(book, group)
    last = tenant.last_replicas.get(group)
    return min(candidates, key=lambda model: _rank(model, is_last=model.name == last), default=None)


def _rank(model: Model, *, is_last: bool) -> tuple[bool, bool, float, bool, float]:
    load = (model.num_unstarted + len(model.returning) + len(model.sequences) + 1) / model.max_slots
    return (model.unavailable is not None, not model.can_work, max(0.0, load - 1.0), not is_last, load)


# -- other weights under the same name ----------------------------------------------------------------------


def exchange(book: Book, group: ModelName, other: ModelName) -> None:
    """Each group gets the other's replicas; their requests stay where they are, and those of one group never move to the other."""
    taken = {group: book.groups.pop(other, []), other: book.groups.pop(group, [])}
    for name, members in taken.items():
        if members:
            book.groups[name] = members
        for member in members:
            book.models[member].group = name


def choose_drafters(book: Book) -> list[ModelName]:
    """Pairings whose drafting worker is not there, or not yet known, get the first replica of their drafter; gives those chosen.

    A drafter that was swapped out drafts on until it is gone: what drafts can change no token.
    """
    chosen = []
    for model in book.models.values():
        pairing = model.pairing
        if pairing is not None and not pairing.is_lookup and pairing.worker not in book.models:
            candidates = book.groups.get(ModelName(pairing.drafter))
            if candidates:
                pairing.worker = candidates[0]
                chosen.append(pairing.worker)
    return chosen


# -- a replica without a worker -----------------------------------------------------------------------------


def scatter(book: Book, model: Model) -> None:
    """Its worker is lost: those that others can serve now go there."""
    for record in staying(book, model):
        target = _refuge(book, model, record)
        if target is not None:
            move(book, record, target)


def staying(book: Book, model: Model) -> list[RequestRecord]:
    """Live requests that wait at this replica or are served by it."""
    return [record for record in book.requests.values() if record.replica == model.name and not record.has_ended]


def has_refuge(book: Book, model: Model, record: RequestRecord) -> bool:
    """Whether another replica could take it over now, once nothing holds it."""
    return _refuge(book, model, record, is_free=True) is not None


def _refuge(book: Book, model: Model, record: RequestRecord, *, is_free: bool = False) -> Model | None:
    if record.num_crashes > 1 or not (is_free or can_move(record)):
        return None
    others = [other for other in replicas(book, model.group) if other is not model and other.can_work and _can_serve(other, record)]
    return min(others, key=lambda other: _rank(other, is_last=False), default=None)


def _can_serve(model: Model, record: RequestRecord) -> bool:
    """With the weights that it was prepared for."""
    return record.prompt_tokens is None or (model.facts is not None and model.facts.fingerprint == record.fingerprint)


def can_move(record: RequestRecord) -> bool:
    """Whether no worker holds anything of it. A suspect stays: it must not end the next worker, too."""
    if record.num_crashes > 1:
        return False
    if record.state is RequestState.PREPARING and record.prompt_tokens is None:
        return False
    return all(sequence.state in (SequenceState.WAITING, SequenceState.RELEASED) for sequence in record.sequences)


def move(book: Book, record: RequestRecord, target: Model) -> None:
    source, old = book.models[record.replica], record.flow
    new = book.flow(target, old.tenant)
    is_queued, is_ready = record in old.queued, record in old.ready
    old.queued.discard(record)
    old.ready.discard(record)
    record.flow, record.replica, record.following = new, target.name, None
    if is_queued:
        new.queued.add(record)
    if is_ready:
        new.ready.add(record)
    for sequence in record.sequences:
        if sequence.is_returning:
            del source.returning[sequence.id]
            target.returning[sequence.id] = sequence
    if not record.has_started:
        source.num_unstarted -= 1
        target.num_unstarted += 1
    book.look_again(target)


# -- an idle replica ----------------------------------------------------------------------------------------


def relieve(book: Book, model: Model) -> None:
    """It has free slots and nobody waits for them: those go to it that wait in vain at the others."""
    room = model.num_free_slots - sum(flow.num_waiting for flow in model.fair.flows.values())
    if len(book.groups.get(model.group, ())) < 2 or not model.can_work or model.suspects or room <= 0:
        return
    others = [other for other in replicas(book, model.group) if other is not model and _num_in_vain(other) > 0]
    for other in sorted(others, key=_num_in_vain, reverse=True):
        for record in list(_waiting(other))[: min(room, _num_in_vain(other))]:
            if _can_serve(model, record):
                move(book, record, model)
                room -= 1


def _num_in_vain(model: Model) -> int:
    """Requests that its own slots are not enough for."""
    return model.num_unstarted - max(0, model.num_soon_free_slots if model.can_work else 0)


def _waiting(model: Model) -> Iterator[RequestRecord]:
    """The last in its lines first: those before them will get a slot there sooner."""
    for flow in model.fair.flows.values():
        for line in (flow.queued, flow.ready):
            yield from (record for record in reversed(list(line.in_order())) if not record.has_started and can_move(record))
