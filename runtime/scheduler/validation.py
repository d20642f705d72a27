"""Recounting the scheduler's tables: every count, queue, slot and limit derived a second time and compared.

For tests after every stimulus and for idle moments; costs time in proportion to all records.
"""

from __future__ import annotations

from collections import Counter

from runtime.scheduler.admission import num_unstarted
from runtime.scheduler.book import Book
from runtime.scheduler.grants import limit_of
from runtime.scheduler.model import Model
from runtime.scheduler.pairing_validation import validate_pairings
from runtime.scheduler.request import RequestRecord, RequestState, Sequence, SequenceState

_STARTED = frozenset({RequestState.PREFILLING, RequestState.RUNNING, RequestState.REPLAYING})
_LIVE = frozenset({SequenceState.PREFILLING, SequenceState.DECODING, SequenceState.PARKED})
_IN_SLOT = _LIVE | {SequenceState.LEAVING, SequenceState.RELEASING}


def validate(book: Book) -> None:
    """Call between stimuli. :raises AssertionError: naming what does not add up."""
    assert not book.touched, f"models {list(book.touched)} were not flushed"
    for request_id, record in book.requests.items():
        assert record.request.id == request_id
        assert record.replica in book.models, f"request {request_id} is of a model that is gone"
        _validate_record(book, book.models[record.replica], record)
    assert sorted(name for names in book.groups.values() for name in names) == sorted(book.models), "groups and models differ"
    for name, model in book.models.items():
        assert model.name == name
        assert name in book.groups[model.group], f"model {name} is not in its group"
        _validate_model(book, model)
    for tenant in book.tenants.values():
        running = sum(_runs(record) for record in book.requests.values() if record.request.tenant == tenant.id)
        assert tenant.num_running == running, f"tenant {tenant.id}: {tenant.num_running} running, counted {running}"
        assert all(book.models[name].fair.flows[tenant.id] is flow for name, flow in tenant.flows.items())
    _validate_prefixes(book)
    validate_pairings(book)
    timed = {request_id for _, request_id in book.deadlines}
    for record in book.requests.values():
        if record.request.deadline_seconds is not None and not record.has_ended:
            assert record.request.id in timed, f"request {record.request.id}: its deadline is forgotten"
            assert book.wake_at is not None, "a deadline without a wake-up"
    for model in book.models.values():
        assert model.collect_until is None or book.wake_at is not None, f"model {model.name}: rows collect without a wake-up"


def _validate_prefixes(book: Book) -> None:
    prefixes = book.prefixes
    prefixes.index.validate()
    awaiting = {
        sequence.id
        for model in book.models.values()
        for sequence in model.sequences.values()
        if sequence.awaits_restored and not sequence.is_going
    }
    promises = [promise for model in book.models.values() for promise in model.promises.values() if not promise.is_erased]
    assert {promise.entry.name for promise in promises} == prefixes.promised, "promised files are miscounted"
    allowed = awaiting | {pin.holder for pin in prefixes.pins.values()} | {promise.holder for promise in promises}
    assert prefixes.index.holders() <= allowed, f"leases of nobody: {prefixes.index.holders() - allowed}"


def _runs(record: RequestRecord) -> bool:
    return record.has_started and not record.has_ended


def _validate_record(book: Book, model: Model, record: RequestRecord) -> None:
    what, flow, state = f"request {record.request.id} ({record.state.value})", record.flow, record.state
    is_waiting = any(sequence.state is SequenceState.WAITING for sequence in record.sequences)
    assert (record in flow.queued) == (state is RequestState.QUEUED), f"{what}: queued or not?"
    in_worker = state is RequestState.PREPARING and record.prompt_tokens is None
    assert (record.request.id in flow.preparing) == in_worker, f"{what}: preparing or not?"
    assert not in_worker or model.preparing.get(record.request.id) is record, f"{what}: the worker does not prepare it"
    assert (record in flow.ready) == (is_waiting and not record.has_ended), f"{what}: ready or not?"
    assert _runs(record) == (state in _STARTED), f"{what}: started or not?"
    if record.has_ended:
        held = record.request.id in model.preparing or any(model.sequences.get(s.id) is s for s in record.sequences)
        assert held, f"{what}: kept although the worker holds nothing of it"
    elif record.sequences:
        assert len(record.sequences) == record.request.num_sequences
        unfinished = sum(sequence.finish is None for sequence in record.sequences)
        assert record.num_unfinished == unfinished > 0, f"{what}: {record.num_unfinished} unfinished, counted {unfinished}"
    for sequence in record.sequences:
        _validate_sequence(book, model, record, sequence)


def _validate_sequence(book: Book, model: Model, record: RequestRecord, sequence: Sequence) -> None:
    what = f"sequence {sequence.id} ({sequence.state.value})"
    assert sequence.record is record
    assert 0 < sequence.id < book.next_sequence
    assert (model.sequences.get(sequence.id) is sequence) == (sequence.state in _IN_SLOT), f"{what}: has a slot or not?"
    assert sequence.prompt_length + len(sequence.committed) <= sequence.max_length, f"{what}: too long"
    assert sequence.num_read <= len(sequence.committed), f"{what}: read more than there is"
    live = sequence.state in _LIVE
    is_expected = sequence.state in _IN_SLOT and sequence.state is not SequenceState.LEAVING
    assert live == (is_expected and sequence.finish is None and not record.has_ended), f"{what}: live or not?"
    if sequence.state is SequenceState.WAITING:
        assert (sequence.num_starts > 0) == sequence.is_returning, f"{what}: had a slot and does not come back"
    if live:
        assert sequence.limit <= limit_of(sequence, book.settings.stream_window_tokens), f"{what}: granted too much"
        is_at_limit = sequence.limit <= sequence.length < sequence.max_length
        assert sequence.state is not SequenceState.PARKED or is_at_limit, f"{what}: below its limit"
        assert sequence.state is not SequenceState.DECODING or not is_at_limit, f"{what}: beyond its limit"
        assert (sequence.batch is not None) == (sequence.state is SequenceState.PREFILLING), f"{what}: in a batch or not?"


def _validate_model(book: Book, model: Model) -> None:
    what = f"model {model.name}"
    assert not model.grants or model.can_work, f"{what}: grants for nobody"
    assert not model.requests_to_release, f"{what}: releases were not sent"
    assert not model.sequences_to_release, f"{what}: releases were not sent"
    assert not model.needs_placing, f"{what}: free slots were not looked at"
    assert len(model.sequences) <= model.max_slots, f"{what}: {len(model.sequences)} sequences in {model.max_slots} slots"
    returning = [s for r in book.requests.values() if r.replica == model.name for s in r.sequences if s.is_returning]
    assert set(returning) == set(model.returning.values()), f"{what}: who comes back is miscounted"
    assert all(s.state is SequenceState.WAITING and s.num_starts for s in returning), f"{what}: comes back without having been"
    assert all(book.requests.get(request) is record for request, record in model.suspects.items()), f"{what}: suspects nobody"
    assert all(not r.has_ended and r.num_crashes for r in model.suspects.values()), f"{what}: suspects an innocent"
    if model.incarnation is None:
        assert not model.sequences, f"{what}: no worker, but sequences in it"
        assert not model.preparing, f"{what}: no worker, but requests in it"
    for sequence in model.sequences.values():
        assert sequence.state in _IN_SLOT
        assert book.requests.get(sequence.record.request.id) is sequence.record, f"{what}: sequence {sequence.id} without a request"
    for record in model.preparing.values():
        assert book.requests.get(record.request.id) is record, f"{what}: prepares an unknown request"
    records = [record for record in book.requests.values() if record.replica == model.name]
    live = [record for record in records if not record.has_ended]
    unstarted = sum(not record.has_started for record in live)
    assert model.num_unstarted == unstarted, f"{what}: {model.num_unstarted} unstarted, counted {unstarted}"
    assert sum(num_unstarted(flow) for flow in model.fair.flows.values()) == unstarted, f"{what}: queues and records differ"
    waiting = sum(flow.num_waiting for flow in model.fair.flows.values())
    states = Counter(record.state for record in live)
    partly = sum(_runs(record) and any(s.state is SequenceState.WAITING for s in record.sequences) for record in live)
    assert waiting == states[RequestState.QUEUED] + states[RequestState.PREPARING] + partly, f"{what}: its lines hold others"
    rows = Counter(sequence.batch for sequence in model.sequences.values() if sequence.batch is not None)
    assert len(rows) == len(model.batches), f"{what}: batches without rows"
    assert all(rows[batch] == batch.num_rows_left for batch in model.batches), f"{what}: a batch's rows are miscounted"
