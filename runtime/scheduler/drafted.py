"""What do a target's and a drafter's words change in a pairing? They are taken in here; speculation.py sends what follows."""

from __future__ import annotations

from collections.abc import Iterable

from runtime.protocol.events import Drafted, Held, Verified
from runtime.scheduler.book import Book
from runtime.scheduler.draft_worth import RowRound
from runtime.scheduler.pairing import Member, Pairing, Round, candidates_of


def plain_step(pairing: Pairing, seconds: float) -> None:
    """The target has decoded freely."""
    if seconds <= 0 or pairing.rounds or not pairing.is_attached or pairing.away_until is not None:
        return
    candidates = candidates_of(pairing)
    is_free = not any(member.is_held or member.is_holding for member in candidates)
    if candidates and is_free and pairing.controller.choose(len(candidates)) == 0:
        pairing.controller.note_plain(len(candidates), seconds)


def held(pairing: Pairing, event: Held) -> None:
    for sequence_id, _ in event.rows:
        member = pairing.members.get(sequence_id)
        if member is not None and member.is_holding:
            member.is_held, member.is_holding = True, False


def drafted(book: Book, pairing: Pairing, event: Drafted) -> None:
    """Rows of other pairings are ignored."""
    for row in event.rows:
        member = pairing.guests.get(row.sequence)
        if member is None or member.follower is None:
            continue
        book.disturb(pairing)
        was_asked = not member.is_ahead and member.follower.is_waiting
        if not member.follower.drafted(row.number, row.proposed) and was_asked and not member.follower.is_waiting:
            member.num_wanted = 0  # it said nothing of use: this round goes without
        for round in pairing.rounds:
            if member.sequence.id in round.members:
                round.drafter_seconds = max(round.drafter_seconds, event.seconds)
    for sequence_id in event.lost:
        if (member := pairing.guests.get(sequence_id)) is not None:
            book.disturb(pairing)
            pairing.forget_guest(member)
            member.num_lost += 1
            if member.num_lost > 1:
                member.guest_state = "refused"


def verified(pairing: Pairing, event: Verified, members: Iterable[Member | None], now: float) -> None:
    """`members`: by row, those that took part; their tokens are committed already."""
    counts = pairing.counts
    round = next((round for round in pairing.rounds if round.verify_sent_at is not None), None)
    for row, member in zip(event.rows, members, strict=True):
        if member is None:
            continue
        counts.proposed += row.num_proposed
        counts.accepted += min(row.num_matched, len(row.step.tokens))
        if round is not None:
            wanted = round.num_tokens if pairing.is_lookup else member.num_wanted
            round.rows.append((wanted, row.num_proposed, row.num_matched))
            round.num_made += len(row.step.tokens)
            round.members.pop(member.sequence.id, None)
    if round is None or round.verify_sent_at is None:
        return
    round.verify_seconds = max(round.verify_seconds, event.seconds)
    if not round.members:
        _end_round(pairing, round, now)


def _end_round(pairing: Pairing, round: Round, now: float) -> None:
    counts = pairing.counts
    pairing.rounds.remove(round)
    pairing.num_late_together = 0
    last_end, pairing.last_end = pairing.last_end, now
    if not round.rows or round.verify_sent_at is None or round.drafted_at is None:
        return
    draft_seconds = round.drafted_at - round.began_at
    wire_seconds = max(0.0, now - round.verify_sent_at - round.verify_seconds)
    pairing.usual_draft_seconds += (draft_seconds - pairing.usual_draft_seconds) / 4
    counts.rounds += 1
    counts.draft_seconds += min(draft_seconds, round.drafter_seconds)
    counts.verify_seconds += round.verify_seconds
    counts.wire_seconds += wire_seconds + max(0.0, draft_seconds - round.drafter_seconds)
    elapsed = now - max(round.began_at, round.began_at if last_end is None else last_end)  # lanes overlap
    is_trial = pairing.lanes.is_trial(round.num_all_rows)
    promise = pairing.controller.turns_gain(round.num_all_rows)
    pairing.lanes.note(round.num_all_rows, round.num_lanes, round.num_made, elapsed, promise)
    if round.num_lanes == 1:
        _tell(pairing, round, round.rows, draft_seconds, round.verify_seconds, wire_seconds)
        pairing.turn.clear()
        pairing.turn_seconds = 0.0
        return
    if is_trial:
        return  # what the controller knows of one cohort is not to be mixed with what may not stay
    # Of two lanes the controller is told what both did in a turn of each, and how long that took: nobody waited for a draft.
    pairing.turn += round.rows
    pairing.turn_seconds += elapsed
    if len(pairing.turn) >= round.num_all_rows:
        _tell(pairing, round, pairing.turn, 0.0, pairing.turn_seconds, 0.0)
        pairing.turn.clear()
        pairing.turn_seconds = 0.0


def _tell(pairing: Pairing, round: Round, rows: Iterable[tuple[int, int, int]], draft: float, verify: float, wire: float) -> None:
    """The controller. Seconds."""
    told = [RowRound(*row) for row in rows]
    pairing.controller.note_round(round.num_tokens, told, draft_seconds=draft, verify_seconds=verify, wire_seconds=wire)
