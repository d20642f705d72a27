"""Which requests are prepared and which rows get free slots: the one place where work is given to a worker.

Two stages, both in the order of the fair queue: queued requests go to the worker's tokenizer a bounded number ahead of the
slots; rows of prepared requests get slots, grouped into prefill batches.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, islice

import msgspec

from runtime.protocol.commands import Prefill, PrefillRow, PrefixUse, Prepare, Sampling
from runtime.scheduler import groups, prefill, replaying, restoring, room
from runtime.scheduler.admission import row_cost
from runtime.scheduler.book import Book
from runtime.scheduler.grants import can_go_on, limit_of
from runtime.scheduler.model import Model
from runtime.scheduler.request import (
    RequestRecord,
    RequestState,
    Sequence,
    SequenceState,
    known_tokens,
    move_request,
    move_sequence,
    sequence_seed,
)

PREPARED_PER_SLOT = 2
"""Requests prepared ahead for each slot. More would only hold prompts in memory: their order is decided at the slot."""


MAX_HELD = 256
"""Rows that follow others, passed over in one round before it ends: a bound on the work of a round, not on followers."""


def place(book: Book, model: Model, now: float) -> None:
    """Give the worker what it has room for."""
    model.needs_placing = False
    if model.can_work:
        _fill_slots(book, model, now)
        _prepare_ahead(book, model)
        groups.relieve(book, model)
    else:
        model.collect_until = None


def _fill_slots(book: Book, model: Model, now: float) -> None:
    outstanding = [batch.padded_tokens for batch in model.batches]
    num_free = model.num_free_slots if prefill.is_room(outstanding, book.settings.prefill_chunk_tokens) else 0
    candidates = _startable(book, model, num_free) if num_free > 0 else []
    rows = room.startable(model, candidates)
    if len(rows) < len(candidates):
        room.make_way(book, model, candidates[len(rows)])
    if 0 < len(rows) < num_free and _collects(book, model, now):
        return
    model.collect_until = None
    starts = [restoring.find(book, model, row) for row in rows]
    for chosen in prefill.plan_batches([start.num_left for start in starts], outstanding, book.settings.prefill_batch_tokens):
        members = [starts[index] for index in chosen]
        num_rows = len(members)
        padded_tokens = max(start.num_left for start in members) * num_rows
        batch = prefill.Batch(padded_tokens=padded_tokens, num_rows_left=num_rows, num_rows=num_rows)
        model.batches.append(batch)
        for start in members:
            _start(book, model, start, batch, now)
        book.send(model, Prefill(tuple(_prefill_row(start.sequence, restoring.lease(book, start)) for start in members)))


def _startable(book: Book, model: Model, num_free: int) -> list[Sequence]:
    """At most `num_free` rows: those that come back, then in the order of the fair queue, but for those that follow another."""
    flights = restoring.Flights(book, model)
    rows: list[Sequence] = []
    candidates: Iterable[Sequence]
    if (suspect := replaying.suspect(model)) is not None:
        candidates = [sequence for sequence in suspect.sequences if sequence.state is SequenceState.WAITING]
    else:
        window = book.settings.stream_window_tokens
        returning = [sequence for sequence in model.returning.values() if can_go_on(sequence, window)]
        candidates = chain(returning, model.fair.rows_in_order(lambda record: row_cost(model, record)))
    for sequence in islice(candidates, num_free + MAX_HELD):
        if len(rows) == num_free:
            break
        if not flights.is_held(sequence):
            flights.choose(sequence)
            rows.append(sequence)
    return rows


def _collects(book: Book, model: Model, now: float) -> bool:
    """Whether ready rows still wait, a moment at most, for requests on their way through the tokenizer."""
    if all(record.has_ended for record in model.preparing.values()):
        return False
    if model.collect_until is None:
        model.collect_until = now + prefill.COLLECT_SECONDS
        book.plan_wake()
    return now < model.collect_until


def _start(book: Book, model: Model, start: restoring.Start, batch: prefill.Batch, now: float) -> None:
    sequence = start.sequence
    record = sequence.record
    if sequence.is_returning:
        sequence.is_returning = False  # its tenant has paid for it
        del model.returning[sequence.id]
    else:
        cost = row_cost(model, record)
        model.fair.serve(record.flow, max(0, cost - start.expected))
        sequence.charged_length = cost
    sequence.num_starts += 1
    sequence.batch = batch
    sequence.placed_at = now
    sequence.limit = limit_of(sequence, book.settings.stream_window_tokens)
    model.sequences[sequence.id] = sequence
    move_sequence(sequence, SequenceState.PREFILLING)
    if not record.has_started:
        record.started_at = now
        record.flow.tenant.num_running += 1
        model.num_unstarted -= 1
        move_request(record, RequestState.PREFILLING)
    elif record.state is RequestState.REPLAYING:
        move_request(record, RequestState.PREFILLING)
    if all(other.state is not SequenceState.WAITING for other in record.sequences):
        record.flow.ready.take(record)


def sampling_of(sequence: Sequence) -> Sampling:
    """How it draws: as its request says, with a seed of its own."""
    sampling = sequence.record.request.sampling
    if sequence.number > 0:
        sampling = msgspec.structs.replace(sampling, seed=sequence_seed(sampling.seed, sequence.number))
    return sampling


def _prefill_row(sequence: Sequence, prefix: PrefixUse | None) -> PrefillRow:
    request = sequence.record.request
    return PrefillRow(
        sequence=sequence.id,
        tokens=known_tokens(sequence),
        prompt_length=sequence.prompt_length,
        max_length=sequence.max_length,
        limit=sequence.limit,
        sampling=sampling_of(sequence),
        stop=request.stop,
        ignore_eos=request.ignore_eos,
        prefix=prefix,
        prefill_only=request.prefill_only,
        background=request.priority == "background",
    )


def _prepare_ahead(book: Book, model: Model) -> None:
    if (suspect := replaying.suspect(model)) is not None:
        if suspect.state is RequestState.QUEUED:
            _prepare(book, model, suspect)
        return
    flows = model.fair.flows.values()
    num_ahead = len(model.preparing) + sum(len(flow.ready) for flow in flows)
    room = PREPARED_PER_SLOT * model.max_slots - num_ahead
    if room > 0:
        for record in list(islice(model.fair.queued_in_order(lambda record: row_cost(model, record)), room)):
            _prepare(book, model, record)
    # A tenant with nothing prepared could not compete for the next slot, however full the others keep the room ahead.
    for flow in flows:
        if flow.queued and not flow.preparing and not flow.ready:
            _prepare(book, model, next(flow.queued.in_order()))


def _prepare(book: Book, model: Model, record: RequestRecord) -> None:
    record.flow.queued.take(record)
    record.flow.preparing[record.request.id] = record
    model.preparing[record.request.id] = record
    move_request(record, RequestState.PREPARING)
    book.send(model, Prepare(record.request.id, record.request.prompt))
