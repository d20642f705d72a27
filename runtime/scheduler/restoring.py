"""What can a row restore instead of computing it, whom does it wait for meanwhile, and what did its worker find?

Files are planned by the index and leased; memory is known by hints only. Both are expectations: `Restored` tells the truth, and
charges are corrected by it. Everything here is of one scope secret: no row's plan, wait or count depends on another scope's.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Sized
from dataclasses import dataclass
from math import inf

from runtime.prefix.hashing import BlockHash, Secret, block_hashes
from runtime.prefix.layout import Style
from runtime.prefix.plans import Plan
from runtime.protocol.commands import PrefixUse, SegmentRange
from runtime.protocol.events import PrefixFacts, Restored
from runtime.protocol.tokens import TokenIds
from runtime.scheduler.book import Book
from runtime.scheduler.following import FOLLOW_TOKENS, Leaders, usable_length
from runtime.scheduler.model import Model
from runtime.scheduler.request import Following, RequestRecord, Sequence, known_tokens
from runtime.scheduler.stimuli import MarkUsed

CHECKPOINT_SPACING_TOKENS = 512
"""Where a model needs checkpoints, memory has them so far apart: finding that much less than expected says nothing."""

MEASURED_TOKENS = 64
"""A prefill of fewer says more of a step's fixed cost than of a token's."""


def prepare(book: Book, model: Model, record: RequestRecord) -> None:
    """Work out the names of its prompt's blocks, if its prefixes are to be used at all."""
    facts, prefixes = _facts(model), book.prefixes
    if facts is None or record.scope is None or record.prompt_tokens is None or not (prefixes.has_memory or prefixes.has_files):
        return
    record.secret = record.scope.secret(facts.fingerprint)
    if prefixes.has_files:
        record.chain = block_hashes(record.secret, record.prompt_tokens)


def _style(model: Model) -> Style:
    facts = _facts(model)
    return "dense" if facts is None else facts.style


# -- following ----------------------------------------------------------------------------------------------


class Flights:
    """Who computes what in one model, during one round of placing. A row follows leaders that hold a slot, or were chosen for one
    earlier in the round; it is looked at again whenever memory holds more or a leader ends, so nobody waits for nothing."""

    def __init__(self, book: Book, model: Model) -> None:
        self._book = book
        self._model = model
        self._style = _style(model)
        self._chosen: set[Sequence] = set()
        self._leaders: Leaders[Sequence] | None = None

    def choose(self, sequence: Sequence) -> None:
        """It gets a slot in this round."""
        if self._book.prefixes.has_memory and sequence.record.request.keeps_prefix:
            self._chosen.add(sequence)
            if self._leaders is not None:
                _add(self._leaders, sequence)

    def is_held(self, sequence: Sequence) -> bool:
        """Whether this waiting row should follow another rather than start."""
        record = sequence.record
        if record.secret is None or not self._book.prefixes.has_memory:
            return False
        following = record.following
        if following is None or not self._is_leading(following.leader) or not self._is_short(record, following):
            following = record.following = self._follow(record)  # perhaps another computes still more of it
            if following is None or not self._is_short(record, following):
                record.following = None
                return False
        sequence.awaited_length = following.length
        return True

    def _follow(self, record: RequestRecord) -> Following | None:
        assert record.secret is not None
        assert record.prompt_tokens is not None
        if self._leaders is None:
            self._leaders = Leaders()
            for leader in self._model.sequences.values():
                if leader.leads:
                    _add(self._leaders, leader)
            for leader in self._chosen:
                _add(self._leaders, leader)
        found = self._leaders.best(record.secret, record.prompt_tokens, self._style)
        if found is None:
            return None
        return Following(*found, available=_file_reach(self._book, self._model, record))

    def _is_leading(self, leader: Sequence) -> bool:
        return leader.leads or leader in self._chosen

    def _is_short(self, record: RequestRecord, following: Following) -> bool:
        """Whether the leader spares it enough beyond what it can have now."""
        reach = _memory_reach(self._model, record, since=following.num_hints)
        following.available = max(following.available, reach)
        following.num_hints = self._model.hints.number
        return following.length - following.available >= FOLLOW_TOKENS


def _add(leaders: Leaders[Sequence], sequence: Sequence) -> None:
    record = sequence.record
    if record.secret is not None and record.prompt_tokens is not None:
        leaders.add(record.secret, record.prompt_tokens, sequence)


def _memory_reach(model: Model, record: RequestRecord, since: int = 0) -> int:
    assert record.secret is not None
    assert record.prompt_tokens is not None
    return _reach(model, record.secret, record.prompt_tokens, since)


def _reach(model: Model, secret: Secret, tokens: TokenIds, since: int = 0) -> int:
    return usable_length(model.hints.reach(secret, tokens, since), len(tokens), _style(model))


def _file_reach(book: Book, model: Model, record: RequestRecord) -> int:
    """How much files would give, unless restoring them is known to be dearer than computing."""
    savings = ((model.benefit.saved_seconds(plan), plan.end) for plan in _plans(book, record))
    return max((end for saved, end in savings if saved is None or saved > 0), default=0)


def _plans(book: Book, record: RequestRecord) -> list[Plan]:
    return book.prefixes.index.plans(record.chain, len(record.prompt_tokens or ())) if record.chain else []


# -- starting -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Start:
    """A row about to get its slot. `expected`: how much of it will probably be restored, from files or memory."""

    sequence: Sequence
    plan: Plan | None
    expected: int

    @property
    def num_left(self) -> int:
        """Tokens to compute."""
        return self.sequence.length - self.expected


def find(book: Book, model: Model, sequence: Sequence) -> Start:
    record = sequence.record
    if record.secret is None:
        return Start(sequence, None, 0)
    tokens = known_tokens(sequence)
    if sequence.committed and book.prefixes.has_files:  # what it generated before may be there, too
        plan = model.benefit.choose(book.prefixes.index.plans(block_hashes(record.secret, tokens), len(tokens)))
    else:
        plan = model.benefit.choose(_plans(book, record))
    in_memory = _reach(model, record.secret, tokens) if book.prefixes.has_memory else 0
    return Start(sequence, plan, max(in_memory, 0 if plan is None else plan.end))


def lease(book: Book, start: Start) -> PrefixUse | None:
    """The row goes: its files stay until it has read them. What the worker is to be told of its prefix."""
    sequence, record, request = start.sequence, start.sequence.record, start.sequence.record.request
    if record.secret is None:
        return None
    sequence.plan, sequence.expected_length, sequence.awaits_restored = start.plan, start.expected, True
    sequence.keeps = request.keeps_prefix and book.prefixes.has_memory
    if start.plan is not None:
        book.prefixes.index.lease(sequence.id, start.plan)
    return PrefixUse(
        scope=record.secret,
        segments=tuple(_segments(start.plan)),
        keep=sequence.keeps,
        boundaries=tuple(place for place in request.boundaries if 0 < place <= sequence.prompt_length),
        pin=request.prefill_only,
    )


def _segments(plan: Plan | None) -> Iterator[SegmentRange]:
    for piece in plan.pieces if plan is not None else ():
        yield SegmentRange(piece.entry.name, piece.start, piece.end, piece.with_checkpoint)


# -- the truth ----------------------------------------------------------------------------------------------


def restored(book: Book, model: Model, sequence: Sequence, event: Restored) -> None:
    """Once per row with a PrefixUse; said again, or when the row is over, it changes nothing."""
    if sequence.is_going:
        return
    if (fault := _fault(sequence, event)) is not None:
        book.breach(model, f"restored sequence {sequence.id}: {fault}")
        return
    if not sequence.awaits_restored:
        return
    record, prefixes = sequence.record, book.prefixes
    sequence.awaits_restored = False
    sequence.restored_length = event.length
    prefixes.index.release(sequence.id)
    if sequence.cached_length is None:  # of a replay its client is told nothing, and its tenant pays nothing for it
        sequence.cached_length = event.length
        record.flow.charge(sequence.expected_length - event.length)
    if sequence.batch is not None:  # it may be longer than it was expected to be
        padded = (sequence.length - event.length) * sequence.batch.num_rows_left
        sequence.batch.padded_tokens = max(sequence.batch.padded_tokens, padded)
    _take_in_files(book, model, sequence, event)
    _count(book, sequence, event)
    if record.secret is not None and record.prompt_tokens is not None:
        slack = FOLLOW_TOKENS if _style(model) == "dense" else CHECKPOINT_SPACING_TOKENS
        tokens = known_tokens(sequence)
        if event.length + slack < _reach(model, record.secret, tokens):
            model.hints.correct(record.secret, tokens, event.length + slack)


def computed(model: Model, rows: Sized[Sequence], seconds: float) -> None:
    """These rows were prefilled in so many seconds; learned from when they were a whole batch, and enough to tell."""
    batches = {id(row.batch): row.batch for row in rows}
    num_tokens = sum(row.length - row.restored_length for row in rows)
    if len(batches) == 1 and num_tokens >= MEASURED_TOKENS:
        (batch,) = batches.values()
        if batch is not None and batch.num_rows == len(rows):
            model.benefit.prefilled(num_tokens, seconds)


def _fault(sequence: Sequence, event: Restored) -> str | None:
    if sequence.keeps is sequence.awaits_restored is False and sequence.record.request.scope is None:
        return "it was given no prefix"
    if not 0 <= event.length < sequence.length:
        return f"{event.length} of its {sequence.length} tokens"
    if (event.source == "none") != (event.length == 0):
        return f"{event.length} tokens from {event.source!r}"
    if event.num_files < 0 or event.num_bytes < 0 or not 0 <= event.seconds < inf:
        return f"{event.num_files} files, {event.num_bytes} bytes, {event.seconds} seconds"
    return None


def _take_in_files(book: Book, model: Model, sequence: Sequence, event: Restored) -> None:
    """What was seen of the files named to it."""
    index, record = book.prefixes.index, sequence.record
    pieces = sequence.plan.pieces if sequence.plan is not None else ()
    named = {piece.entry.name: piece.entry for piece in pieces}
    missed = {miss.name for miss in event.misses}
    for miss in event.misses:
        entry = named.get(BlockHash(miss.name))
        if entry is not None and (miss.is_removed or miss.reason == "absent"):
            index.drop(entry.name)
    if event.num_files:
        model.benefit.restored(event.num_files, event.num_bytes, event.seconds)
        record.restore_seconds = max(record.restore_seconds or 0.0, event.seconds)
    if event.source == "file":
        used = [piece.entry for piece in pieces if piece.start < event.length and piece.entry.name not in missed]
        if used:
            book.out.append(MarkUsed(tuple(used)))
    sequence.plan = None


def _count(book: Book, sequence: Sequence, event: Restored) -> None:
    counts = book.prefixes.counts[sequence.record.request.tenant]
    counts.hits_memory += event.source == "memory"
    counts.hits_file += event.source == "file"
    counts.misses.update(miss.reason for miss in event.misses)
    if event.length == 0 and not event.misses:
        counts.misses["none"] += 1
    counts.cached_tokens += event.length
    counts.computed_tokens += sequence.length - event.length
    if sequence.awaited_length and event.length:
        counts.followed += 1
        counts.followed_tokens += min(event.length, sequence.awaited_length)


def _facts(model: Model) -> PrefixFacts | None:
    return model.facts.prefix if model.facts is not None else None
