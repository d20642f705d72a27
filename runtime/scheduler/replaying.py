"""What becomes of a lost worker's requests? They go on in its next incarnation, each from where its stream stands.

`Sequence.committed` is the replay log: the next worker is given prompt and committed tokens, computes them in one prefill (or
restores what was published of them), and goes on with the same draws, since these depend on seed and position alone. The stream
only pauses.

A request that kills its workers must not take the others along. A death is charged to whoever was aboard and has got nowhere since
the last one; after `SUSPECT_CRASHES` of them a request is a suspect, and suspects go first, one at a time, while nobody else
starts; `MAX_CRASHES` end it. Whoever makes progress is charged no more.
"""

from __future__ import annotations

from typing import Final

from runtime.errors import ModelUnavailable, TroupeError
from runtime.scheduler import groups
from runtime.scheduler.book import Book
from runtime.scheduler.model import Model
from runtime.scheduler.request import (
    RequestRecord,
    RequestState,
    Sequence,
    SequenceState,
    move_request,
    move_sequence,
)

SUSPECT_CRASHES: Final = 2
MAX_CRASHES: Final = 3
PROGRESS_TOKENS: Final = 16
"""Fewer new tokens are no progress: some kill their workers a few tokens later each time."""

_IN_STEPS = (SequenceState.PREFILLING, SequenceState.DECODING)


# -- a worker's death ---------------------------------------------------------------------------------------


def suspend(book: Book, model: Model, record: RequestRecord, error: TroupeError | None, now: float) -> None:
    """The model's worker is gone and will come back: this live request waits for it, unless it has ended too many.

    error: of the worker that died; None when it was ended on purpose.
    """
    if error is not None and _is_aboard(record):
        _charge(record)
        if record.num_crashes >= MAX_CRASHES:
            book.fail(record, error, now)
            return
    if record.num_crashes >= SUSPECT_CRASHES:
        model.suspects[record.request.id] = record
    if record.state is RequestState.PREPARING and record.prompt_tokens is None:
        _queue_again(record)
    elif record.has_started:
        _await_worker(book, model, record)


def _is_aboard(record: RequestRecord) -> bool:
    """Whether the worker may have died of it: it was being tokenized, or took part in steps."""
    is_preparing = record.state is RequestState.PREPARING and record.prompt_tokens is None
    return is_preparing or any(sequence.state in _IN_STEPS for sequence in record.sequences)


def _charge(record: RequestRecord) -> None:
    length = _num_committed(record)
    if record.num_crashes and length < record.crash_length + PROGRESS_TOKENS:
        record.num_crashes += 1
    else:
        record.num_crashes, record.crash_length = 1, length


def _num_committed(record: RequestRecord) -> int:
    return sum(len(sequence.committed) for sequence in record.sequences)


def _queue_again(record: RequestRecord) -> None:
    record.flow.preparing.pop(record.request.id, None)
    record.flow.queued.put_back(record)
    move_request(record, RequestState.QUEUED)


def _await_worker(book: Book, model: Model, record: RequestRecord) -> None:
    if record.state is not RequestState.REPLAYING:
        move_request(record, RequestState.REPLAYING)
        book.num_replayed += 1
    record.following = None
    for sequence in record.sequences:
        if sequence.state in (*_IN_STEPS, SequenceState.PARKED, SequenceState.LEAVING):
            come_back_later(book, model, sequence)
    if any(sequence.state is SequenceState.WAITING for sequence in record.sequences) and record not in record.flow.ready:
        record.flow.ready.put_back(record)


def come_back_later(book: Book, model: Model, sequence: Sequence) -> None:
    """Nothing of it is in the worker any more. It goes on, in whatever worker the model has then, before those that never began."""
    book.leave_batch(model, sequence)
    book.prefixes.index.release(sequence.id)
    move_sequence(sequence, SequenceState.WAITING)
    sequence.plan, sequence.awaits_restored, sequence.keeps = None, False, False
    sequence.is_returning = True
    model.returning[sequence.id] = sequence
    model.sequences.pop(sequence.id, None)
    model.grants.pop(sequence.id, None)
    if sequence.record not in sequence.record.flow.ready:
        sequence.record.flow.ready.put_back(sequence.record)
    book.look_again(model)


# -- the next worker ----------------------------------------------------------------------------------------


def check_weights(book: Book, model: Model, now: float) -> None:
    """The new worker's checkpoint may have been changed on the disk: no stream goes on with other weights than it began with."""
    assert model.facts is not None
    for record in groups.staying(book, model):
        if record.prompt_tokens is None or record.fingerprint == model.facts.fingerprint:
            continue
        if _num_committed(record):
            message = "its checkpoint was changed on the disk, so this answer cannot be finished; send the request again"
            book.end(record, RequestState.FAILED, ModelUnavailable(model.name, message), now)
        else:
            _prepare_again(model, record)


def _prepare_again(model: Model, record: RequestRecord) -> None:
    flow = record.flow
    flow.ready.discard(record)
    for sequence in record.sequences:
        model.returning.pop(sequence.id, None)
    record.sequences, record.chain, record.secret, record.following = [], [], None, None
    record.prompt_tokens, record.warnings, record.fingerprint, record.num_unfinished = None, (), "", 0
    if record.has_started:
        record.started_at = None
        flow.tenant.num_running -= 1
        model.num_unstarted += 1
    flow.queued.put_back(record)
    move_request(record, RequestState.QUEUED)


# -- suspects -----------------------------------------------------------------------------------------------


def suspect(model: Model) -> RequestRecord | None:
    """The one that must be found innocent, or guilty, before anybody else of this model may be tokenized or get a slot."""
    return next(iter(model.suspects.values()), None)


def acquit(book: Book, model: Model, record: RequestRecord) -> None:
    """If it has got further than where its workers died, or waits for its client. To be called when a charged one has news."""
    is_parked = any(sequence.state is SequenceState.PARKED for sequence in record.sequences)
    if is_parked or _num_committed(record) >= record.crash_length + PROGRESS_TOKENS:
        record.num_crashes = 0
        if model.suspects.pop(record.request.id, None) is not None:
            book.look_again(model)
