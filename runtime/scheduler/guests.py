"""How does a drafter come to hold a target's sequence? As a guest: prefilled in the background while the target decodes.

A guest is not in the drafter's own tables: it takes none of its clients' slots, and there are at most as many guests as slots.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from runtime.protocol.commands import Prefill, PrefillRow, PrefixUse
from runtime.protocol.ids import SequenceId
from runtime.protocol.tokens import TokenIds
from runtime.scheduler.book import Book
from runtime.scheduler.model import Model
from runtime.scheduler.pairing import Member, Pairing
from runtime.scheduler.placement import sampling_of
from runtime.scheduler.request import Sequence
from runtime.scheduler.rounds import Follower

MARGIN_TOKENS = 32
"""Beyond the target's own end, for drafts that reach past it."""


def invite(book: Book, pairing: Pairing, drafter: Model, members: Iterable[Member]) -> None:
    """Have the drafter prefill those it does not hold yet, as far as there is room."""
    assert drafter.facts is not None
    room = drafter.max_slots - num_guests(book, drafter)
    rows: list[PrefillRow] = []
    for member in members:
        if member.guest_state != "none" or len(rows) >= room:
            continue
        if member.sequence.length >= drafter.facts.context_length:
            member.guest_state = "refused"
            continue
        member.guest, member.guest_state = book.new_sequence_id(), "prefilling"
        pairing.guests[member.guest] = member
        rows.append(_row(book, drafter, member.guest, member.sequence))
    if rows:
        book.send(drafter, Prefill(tuple(rows)))


def num_guests(book: Book, drafter: Model) -> int:
    """Of all targets."""
    pairings = (model.pairing for model in book.models.values() if model.pairing is not None)
    return sum(len(pairing.guests) for pairing in pairings if pairing.drafts_with(drafter.name))


def _row(book: Book, drafter: Model, guest: SequenceId, sequence: Sequence) -> PrefillRow:
    """All but the last token, which is fed with the first draft."""
    record, facts = sequence.record, drafter.facts
    assert record.prompt_tokens is not None
    assert facts is not None
    tokens = [*record.prompt_tokens, *sequence.committed]
    known = TokenIds(tokens[:-1] or tokens)
    max_length = min(sequence.max_length + MARGIN_TOKENS, facts.context_length)
    prefix = None
    if record.scope is not None and facts.prefix is not None and book.prefixes.has_memory:
        prefix = PrefixUse(record.scope.secret(facts.prefix.fingerprint), keep=record.request.keeps_prefix)
    return PrefillRow(
        sequence=guest,
        tokens=known,
        prompt_length=min(sequence.prompt_length, len(known)),
        max_length=max_length,
        limit=max_length,
        sampling=msgspec.structs.replace(sampling_of(sequence), logprobs=-1),
        ignore_eos=True,
        prefix=prefix,
        hold=True,
        background=record.request.priority == "background",
    )


def prefilled(book: Book, pairing: Pairing, guest: SequenceId, length: int) -> None:
    """The drafter holds so much of it now."""
    member = pairing.guests.get(guest)
    if member is None or member.guest_state != "prefilling":
        return
    record = member.sequence.record
    assert record.prompt_tokens is not None
    committed = [*record.prompt_tokens, *member.sequence.committed]
    member.follower = Follower(committed, min(length, len(committed)), pairing.next_number - 1)
    member.guest_state = "ready"
    book.disturb(pairing)


def refused(book: Book, pairing: Pairing, guest: SequenceId) -> None:
    """The drafter cannot have it, and has forgotten it."""
    member = pairing.guests.get(guest)
    if member is not None:
        pairing.forget_guest(member)
        member.guest_state = "refused"
        book.disturb(pairing)
