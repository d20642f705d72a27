"""How far a sequence may run: grants from what its client has read, so that a slow client costs a bounded amount of memory.

A sequence of a windowed request may be at most `stream_window_tokens` ahead of its client. Limits are absolute and only
rise. Grants are collected per model and travel with the next step's answer, or at once when a sequence is parked.
"""

from __future__ import annotations

from runtime.scheduler.book import Book
from runtime.scheduler.model import Model
from runtime.scheduler.request import RequestRecord, Sequence, SequenceState, move_sequence


def limit_of(sequence: Sequence, window_tokens: int) -> int:
    """Absolute length up to which this sequence may run now."""
    if not sequence.record.windowed:
        return sequence.max_length
    return min(sequence.max_length, sequence.prompt_length + sequence.num_read + window_tokens)


def can_go_on(sequence: Sequence, window_tokens: int) -> bool:
    """Whether a slot would be of use to it now: whoever is as far ahead of its client as it may be waits without one."""
    return limit_of(sequence, window_tokens) > sequence.length or sequence.record.request.prefill_only


def read(book: Book, model: Model, record: RequestRecord, number: int, num_tokens: int) -> None:
    """The client has read so far. Repeated and late words change nothing."""
    if number >= len(record.sequences):
        return
    sequence = record.sequences[number]
    sequence.num_read = max(sequence.num_read, min(num_tokens, len(sequence.committed)))
    _raise_limit(book, model, sequence)


def unwindow(book: Book, model: Model, record: RequestRecord) -> None:
    """The client awaits the end only: all sequences may run to theirs."""
    record.windowed = False
    for sequence in record.sequences:
        _raise_limit(book, model, sequence)
    book.touch(model)


def _raise_limit(book: Book, model: Model, sequence: Sequence) -> None:
    if sequence.state not in (SequenceState.PREFILLING, SequenceState.DECODING, SequenceState.PARKED):
        if sequence.is_returning:
            book.look_again(model)  # it may have waited for this
        return  # without a slot: gets its limit with the slot
    window = book.settings.stream_window_tokens
    limit = limit_of(sequence, window)
    gain, is_parked = limit - sequence.limit, sequence.state is SequenceState.PARKED
    if gain <= 0 or not (is_parked or limit == sequence.max_length or gain >= window // 4):
        return
    sequence.limit = limit
    model.grants[sequence.id] = limit
    if is_parked:
        move_sequence(sequence, SequenceState.DECODING)
        book.touch(model)
        if sequence.member is not None and model.pairing is not None:
            book.disturb(model.pairing)
