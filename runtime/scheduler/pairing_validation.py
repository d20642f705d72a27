"""Recounting what is known of speculation: members, guests and rounds against the tables they stand for.

For tests after every stimulus and for idle moments, like all of `validation.py`.
"""

from __future__ import annotations

from math import inf

from runtime.protocol.ids import SequenceId
from runtime.scheduler.book import Book
from runtime.scheduler.model import Model
from runtime.scheduler.pairing import Member, Pairing
from runtime.scheduler.request import SequenceState


def validate_pairings(book: Book) -> None:
    """Call between stimuli. :raises AssertionError: naming what does not add up."""
    assert not book.disturbed, f"pairings {list(book.disturbed)} were not advanced"
    seen: set[SequenceId] = set()
    for model in book.models.values():
        members = {} if model.pairing is None else model.pairing.members
        for sequence in model.sequences.values():
            assert sequence.member is members.get(sequence.id), f"sequence {sequence.id}: a member or not?"
        if model.pairing is not None:
            _validate_pairing(book, model, model.pairing)
            assert not seen & model.pairing.guests.keys(), f"guests of two targets: {seen & model.pairing.guests.keys()}"
            seen |= model.pairing.guests.keys()
    for drafter in book.models.values():
        pairings = [m.pairing for m in book.models.values() if m.pairing is not None and m.pairing.drafts_with(drafter.name)]
        num_guests = sum(len(pairing.guests) for pairing in pairings)
        assert num_guests <= drafter.max_slots, f"drafter {drafter.name}: {num_guests} guests of {drafter.max_slots}"
        assert not num_guests or drafter.incarnation is not None, f"drafter {drafter.name}: no worker, but guests in it"


def _validate_pairing(book: Book, model: Model, pairing: Pairing) -> None:
    what = f"pairing {pairing.target} with {pairing.drafter}"
    assert pairing.target == model.name
    assert not pairing.guests_to_release, f"{what}: guests were not released"
    assert not (pairing.is_attached and pairing.refused), f"{what}: attached or refused?"
    for sequence_id, member in pairing.members.items():
        assert model.sequences.get(sequence_id) is member.sequence, f"{what}: member {sequence_id} has no slot"
        _validate_member(pairing, member, f"{what}: member {sequence_id}")
    for guest, member in pairing.guests.items():
        assert member.guest == guest, f"{what}: guest {guest} is of nobody"
        assert pairing.members.get(member.sequence.id) is member, f"{what}: guest {guest} of one that is no member"
        assert 0 < guest < book.next_sequence
    if model.can_work:
        _validate_round(book, pairing, what)


def _validate_member(pairing: Pairing, member: Member, what: str) -> None:
    assert member.sequence.state in (SequenceState.DECODING, SequenceState.PARKED), f"{what} is {member.sequence.state.value}"
    assert not (member.is_held and member.is_holding), f"{what} is held and yet to be held"
    if pairing.is_lookup:
        assert (member.guest, member.follower, member.guest_state) == (None, None, "ready"), f"{what} has a guest"
        return
    has_guest = member.guest is not None
    assert has_guest == (member.guest_state in ("prefilling", "ready")), f"{what}: a guest while {member.guest_state}"
    assert member.guest is None or pairing.guests.get(member.guest) is member, f"{what}: its guest is not known"
    assert (member.follower is not None) == (member.guest_state == "ready"), f"{what}: followed while {member.guest_state}"
    if member.follower is not None:
        assert member.follower.length == member.sequence.length, f"{what}: followed to {member.follower.length}"


def _validate_round(book: Book, pairing: Pairing, what: str) -> None:
    if not pairing.rounds:
        held = any(member.is_held for member in pairing.members.values())
        assert not held or any(member.is_holding for member in pairing.members.values()), f"{what}: held for nothing"
    seen: set[SequenceId] = set()
    for round in pairing.rounds:
        assert round.members, f"{what}: a round of nobody"
        assert not seen & round.members.keys(), f"{what}: in two rounds: {seen & round.members.keys()}"
        seen |= round.members.keys()
        for sequence_id, member in round.members.items():
            assert pairing.members.get(sequence_id) is member, f"{what}: {sequence_id} takes part and is no member"
            assert member.is_held, f"{what}: {sequence_id} takes part and is not held"
    assert sum(round.verify_sent_at is not None for round in pairing.rounds) <= 1, f"{what}: two verify at once"
    assert not pairing.rounds or any(round.verify_sent_at is not None or round.drafted_at is None for round in pairing.rounds), (
        f"{what}: drafts are there, and nobody verifies"
    )
    deadlines = [round.deadline for round in pairing.rounds if round.drafted_at is None]
    for time in [*deadlines, *([] if pairing.away_until is None else [pairing.away_until])]:
        assert pairing.wake_at is not None, f"{what}: nobody looks when its drafter is late"
        assert time not in deadlines or pairing.wake_at <= time, f"{what}: somebody looks too late"
        assert (inf if book.wake_at is None else book.wake_at) <= pairing.wake_at, f"{what}: its wake-up is forgotten"
