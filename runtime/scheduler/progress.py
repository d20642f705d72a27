"""What each event of a worker changes: prepared, prefilled, stepped, verified, released, refused.

Positions are absolute. What was said before is ignored, as is anything about a sequence that was let go (it may have crossed
our Release on the way); a gap, a contradiction or an id that was never given is a breach, and the worker is replaced.
"""

from __future__ import annotations

from runtime.errors import ContextTooLong, GenerationFailed, InvalidRequest, ModelNotLoaded, TroupeError
from runtime.protocol.events import (
    AnyEvent,
    Drafted,
    FinishReason,
    Held,
    Kept,
    Prefilled,
    Prepared,
    Refused,
    Released,
    Restored,
    SegmentPublished,
    SegmentRejected,
    StepDone,
    StepRow,
    Verified,
)
from runtime.protocol.ids import SequenceId
from runtime.scheduler import drafted, guests, keeping, replaying, restoring, room, speculation
from runtime.scheduler.book import Book, smoothed
from runtime.scheduler.model import Model
from runtime.scheduler.request import (
    Piece,
    RequestRecord,
    RequestState,
    Sequence,
    SequenceState,
    move_request,
    move_sequence,
)
from runtime.scheduler.stimuli import Deliver

OVERRUN_CHARGE_TOKENS = 64
"""A sequence that outgrows its expected length is charged so many tokens more at a time."""


def hear(book: Book, model: Model, event: AnyEvent, now: float) -> None:
    """Take in one event of the model's current incarnation. Events about its load and health are not the scheduler's."""
    if isinstance(event, StepDone):
        _stepped(book, model, event, now)
    elif isinstance(event, Verified):
        _verified(book, model, event, now)
    elif isinstance(event, Drafted):
        for pairing in speculation.pairings_of(book, model.name):
            drafted.drafted(book, pairing, event)
    elif isinstance(event, Held):
        if model.pairing is not None:
            drafted.held(model.pairing, event)
            book.disturb(model.pairing)
    elif isinstance(event, Prepared):
        _prepared(book, model, event, now)
    elif isinstance(event, Prefilled):
        _prefilled(book, model, event)
    elif isinstance(event, Restored | Kept):
        _found_or_kept(book, model, event)
    elif isinstance(event, SegmentPublished):
        keeping.published(book, model, event)
    elif isinstance(event, SegmentRejected):
        keeping.rejected(book, model, event)
    elif isinstance(event, Released):
        _released(book, model, event, now)
    elif isinstance(event, Refused):
        _refused(book, model, event, now)
    if model.grants:
        book.touch(model)


# -- preparing --------------------------------------------------------------------------------------------


def _prepared(book: Book, model: Model, event: Prepared, now: float) -> None:
    record = model.preparing.get(event.request)
    if record is None or record.has_ended:
        return  # an ended one stays in `preparing` until its Released
    assert model.facts is not None
    num_prompt, context = len(event.tokens), model.facts.context_length
    if num_prompt == 0 or num_prompt >= context:
        fault = InvalidRequest("prompt", "is empty") if num_prompt == 0 else ContextTooLong(num_prompt, context)
        del model.preparing[event.request]
        book.end(record, RequestState.FAILED, fault, now)
        return
    del model.preparing[event.request]
    del record.flow.preparing[event.request]
    record.prompt_tokens, record.warnings, record.fingerprint = event.tokens, event.warnings, model.facts.fingerprint
    max_length = min(num_prompt + record.request.max_tokens, context)
    for number in range(record.request.num_sequences):
        record.sequences.append(Sequence(book.new_sequence_id(), number, record, num_prompt, max_length))
    record.num_unfinished = len(record.sequences)
    restoring.prepare(book, model, record)
    record.flow.ready.add(record)
    book.look_again(model)


# -- prefilling and decoding --------------------------------------------------------------------------------


def _prefilled(book: Book, model: Model, event: Prefilled) -> None:
    news: dict[int, RequestRecord] = {}
    known = [sequence for sequence_id, _ in event.rows if (sequence := model.sequences.get(sequence_id)) is not None]
    restoring.computed(model, known, event.seconds)
    for sequence_id, length in event.rows:
        sequence = model.sequences.get(sequence_id)
        if sequence is None:
            if _never_given(book, model, sequence_id):
                return
            for pairing in speculation.pairings_of(book, model.name):
                guests.prefilled(book, pairing, sequence_id, length)
            continue
        if sequence.is_going:
            continue
        news[sequence.record.request.id] = sequence.record
        if length >= sequence.prompt_length and sequence.state is SequenceState.PREFILLING:
            _start_decoding(book, model, sequence)
    for record in news.values():
        if record.first_token_at is not None:
            continue  # a replay's: its client's prefill is long over
        record.prefill_seconds = max(record.prefill_seconds or 0.0, event.seconds)


def _found_or_kept(book: Book, model: Model, event: Restored | Kept) -> None:
    sequence = model.sequences.get(event.sequence)
    if sequence is None:
        _never_given(book, model, event.sequence)
    elif isinstance(event, Restored):
        restoring.restored(book, model, sequence, event)
    else:
        keeping.kept(book, model, sequence, event)


def _start_decoding(book: Book, model: Model, sequence: Sequence) -> None:
    book.leave_batch(model, sequence)
    move_sequence(sequence, SequenceState.DECODING)
    if sequence.record.state is RequestState.PREFILLING:
        move_request(sequence.record, RequestState.RUNNING)
    request = sequence.record.request
    if model.pairing is not None and request.speculate is not False and not request.prefill_only:
        model.pairing.join(sequence)


def _stepped(book: Book, model: Model, event: StepDone, now: float) -> None:
    if model.pairing is not None:
        drafted.plain_step(model.pairing, event.seconds)
        book.disturb(model.pairing)
    for row in event.rows:
        if not _take_row(book, model, event.step, row, now):
            return
    room.enforce(book, model)


def _verified(book: Book, model: Model, event: Verified, now: float) -> None:
    if model.pairing is None:
        book.breach(model, f"step {event.step}: verified for a model without a drafter")
        return
    members = []
    for row in event.rows:
        sequence = model.sequences.get(row.step.sequence)
        is_new = sequence is not None and row.step.index == sequence.length  # else it was said before
        members.append(sequence.member if sequence is not None and is_new else None)
        if not 0 <= row.num_matched <= row.num_proposed:
            book.breach(model, f"step {event.step}: {row.num_matched} of {row.num_proposed} proposals right")
            return
        if sequence is not None and is_new:
            sequence.num_proposed += row.num_proposed
            sequence.num_accepted += min(row.num_matched, len(row.step.tokens))
        if not _take_row(book, model, event.step, row.step, now):
            return
    drafted.verified(model.pairing, event, members, now)
    book.disturb(model.pairing)
    room.enforce(book, model)


def _take_row(book: Book, model: Model, step: int, row: StepRow, now: float) -> bool:
    """What a step added to one sequence. False after a breach."""
    sequence = model.sequences.get(row.sequence)
    if sequence is None:
        return not _never_given(book, model, row.sequence)
    state = sequence.state
    if sequence.is_going:
        return True
    tokens, committed, record = row.tokens, sequence.committed, sequence.record
    length = sequence.prompt_length + len(committed)
    if row.index != length:
        if _was_said(sequence, row):
            return True
        book.breach(model, f"step {step}: sequence {row.sequence} has {length} tokens, but the row begins at {row.index}")
        return False
    length += len(tokens)
    if length > sequence.max_length:
        book.breach(model, f"step {step}: sequence {row.sequence} ran to {length}, past its end at {sequence.max_length}")
        return False
    if state is SequenceState.PREFILLING:
        _start_decoding(book, model, sequence)
    if tokens:
        committed.extend(tokens)
        record.flow.tenant.num_tokens_served += len(tokens)
        if record.first_token_at is None:
            record.first_token_at = now
        if length > sequence.charged_length:
            record.flow.charge(OVERRUN_CHARGE_TOKENS)
            sequence.charged_length += OVERRUN_CHARGE_TOKENS
        if sequence.member is not None and sequence.member.follower is not None:
            sequence.member.follower.commit(row.index, tokens)
    book.out.append(
        Deliver(record.request.id, Piece(sequence.number, tokens, row.text, row.logprobs, row.finish, row.matched_stop))
    )
    if row.finish is not None:
        _finish(book, model, sequence, row.finish, now)
    elif length >= sequence.limit and length < sequence.max_length and sequence.state is SequenceState.DECODING:
        move_sequence(sequence, SequenceState.PARKED)
    if record.num_crashes and not record.has_ended:
        replaying.acquit(book, model, record)
    return True


def _was_said(sequence: Sequence, row: StepRow) -> bool:
    """Whether this row repeats tokens that are committed already. (An end cannot have been said: we would have let it go.)"""
    start = row.index - sequence.prompt_length
    end = start + len(row.tokens)
    is_inside = 0 <= start <= end <= len(sequence.committed)
    return row.finish is None and is_inside and tuple(sequence.committed[start:end]) == row.tokens


def _finish(book: Book, model: Model, sequence: Sequence, reason: FinishReason, now: float) -> None:
    record = sequence.record
    sequence.finish = reason
    if not record.request.prefill_only:
        model.output_tokens = smoothed(model.output_tokens, len(sequence.committed))
    book.let_go(model, sequence)
    record.num_unfinished -= 1
    if record.num_unfinished == 0:
        book.end(record, RequestState.FINISHED, None, now)


# -- releasing and refusing -----------------------------------------------------------------------------------


def _released(book: Book, model: Model, event: Released, now: float) -> None:
    for request_id in event.requests:
        record = model.preparing.get(request_id)
        if record is None:
            continue
        if not record.has_ended:
            book.breach(model, f"released request {request_id} without being told to")
            return
        del model.preparing[request_id]
        book.forget_if_free(model, record)
        book.look_again(model)
    for sequence_id in event.sequences:
        sequence = model.sequences.get(sequence_id)
        if sequence is None:
            continue
        if sequence.state is SequenceState.LEAVING:
            del model.sequences[sequence_id]
            sequence.id = book.new_sequence_id()  # a late word about the old one is not about its second stay
            replaying.come_back_later(book, model, sequence)
        elif sequence.state is SequenceState.RELEASING:
            book.free_slot(model, sequence, now)
        else:
            book.breach(model, f"released sequence {sequence_id} without being told to")
            return


def _refused(book: Book, model: Model, event: Refused, now: float) -> None:
    """Ends the requests concerned, whole, with an error of their own; the others are untouched."""
    records = {request_id: model.preparing[request_id] for request_id in event.requests if request_id in model.preparing}
    for sequence_id in event.sequences:
        sequence = model.sequences.get(sequence_id)
        if sequence is None:
            for pairing in speculation.pairings_of(book, model.name):
                guests.refused(book, pairing, sequence_id)
        elif not sequence.is_going:
            records[sequence.record.request.id] = sequence.record
    for record in records.values():
        if not record.has_ended:
            book.end(record, RequestState.FAILED, _fault(model, record, event), now)


def _fault(model: Model, record: RequestRecord, event: Refused) -> TroupeError:
    match event.code:
        case "context_length_exceeded":
            assert model.facts is not None
            return ContextTooLong(len(record.prompt_tokens or ()), model.facts.context_length)
        case "template_error":
            return InvalidRequest("messages", event.message)
        case "invalid_request" | "malformed":
            option, colon, rest = event.message.partition(": ")
            if colon and option.isidentifier():
                return InvalidRequest(option, rest)
            return InvalidRequest("prompt" if event.command == "prepare" else "options", event.message)
        case "not_ready":
            return ModelNotLoaded(model.name, f"its worker takes no more requests ({event.message})")
        case "generation_failed" | "conflict":
            return GenerationFailed(event.message)


def _never_given(book: Book, model: Model, sequence_id: SequenceId) -> bool:
    """A breach when no sequence ever had this id; otherwise it was released and the event is only late."""
    if 0 < sequence_id < book.next_sequence:
        return False
    book.breach(model, f"spoke of sequence {sequence_id}, which was never given to it")
    return True
