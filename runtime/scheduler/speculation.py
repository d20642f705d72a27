"""When do a target's sequences speculate, and what is sent for it? Rounds: draft, verify, and who takes part.

A cohort is all sequences of a pairing that are held; a round drafts for them in one exchange with the drafter and verifies in
one with the target. Whatever the drafter does costs time only: late, lost or wrong, the target goes on alone. While the
target verifies, the drafter may draft on from its guess (compare PEARL, Liu et al., arXiv 2408.11850).

`advance` looks at what is known and sends what is due; what was said is taken in by drafted.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import inf
from typing import Final

from runtime.protocol.acceptance import num_proposable
from runtime.protocol.commands import Draft, DraftRow, Hold, Release, Resume, Verify, VerifyRow
from runtime.protocol.ids import ModelName, SequenceId
from runtime.protocol.tokens import TokenIds
from runtime.scheduler.book import Book
from runtime.scheduler.guests import invite
from runtime.scheduler.model import Model
from runtime.scheduler.pairing import Member, Pairing, Round, candidates_of, objection

PATIENCE_SECONDS: Final = 0.5
"""A draft may take so long, or `PATIENCE_ROUNDS` times what drafts took lately; then the target goes on alone."""
PATIENCE_ROUNDS: Final = 3.0
MAX_AWAY_SECONDS: Final = 30.0
"""A late drafter is left alone for `PATIENCE_SECONDS`, doubled each time up to this, and until it answers or as long again."""
NEAR_TOKENS: Final = 32
"""A drafter that holds all but so many tokens of a sequence is fed them with the draft; more, before the round."""
CATCH_UP_TOKENS: Final = 512
"""More than this it prefills anew, in chunks and from its memory."""
AHEAD_CHANCE: Final = 0.3
"""Drafting ahead is worth its place on the machine when a whole draft and the bonus token are guessed right so often."""


def pairings_of(book: Book, name: ModelName) -> Iterator[Pairing]:
    """Those in which the model is the target or the drafter."""
    for model in book.models.values():
        if model.pairing is not None and (model.name == name or model.pairing.drafts_with(name)):
            yield model.pairing


def attach(book: Book, name: ModelName) -> None:
    """The model's worker is up: see whether its pairings can work now."""
    for pairing in pairings_of(book, name):
        book.disturb(pairing)
        target = book.models[pairing.target]
        drafter = _drafter(book, pairing)
        if not target.can_work or target.facts is None or not (pairing.is_lookup or drafter is not None):
            continue
        facts = None if drafter is None else drafter.facts
        pairing.refused = objection(target.facts, facts)
        pairing.is_attached = pairing.refused is None
        pairing.draft_context = inf if facts is None else facts.context_length


def hindrance(book: Book, pairing: Pairing) -> str | None:
    """Why these two cannot work together, as far as an app can mend it."""
    if not pairing.is_lookup and (pairing.worker is None or pairing.worker not in book.models):
        return f"its drafter {pairing.drafter!r} is not loaded"
    return pairing.refused


def _drafter(book: Book, pairing: Pairing) -> Model | None:
    """Its model, when a worker serves it."""
    model = None if pairing.is_lookup or pairing.worker is None else book.models.get(pairing.worker)
    return model if model is not None and model.can_work and model.facts is not None else None


# -- what is due --------------------------------------------------------------------------------------------


def advance(book: Book, pairing: Pairing, now: float) -> None:
    """Send what the pairing's state asks for."""
    target = book.models.get(pairing.target)
    drafter = _drafter(book, pairing)
    if pairing.guests_to_release:
        if drafter is not None:
            book.send(drafter, Release((), tuple(pairing.guests_to_release)))
        pairing.guests_to_release.clear()
    if target is None or target.pairing is not pairing or not target.can_work:
        return
    _come_back(pairing, now)
    pairing.rounds = [round for round in pairing.rounds if round.members]
    if drafter is None and not pairing.is_lookup:
        pairing.rounds = [round for round in pairing.rounds if round.verify_sent_at is not None]
    for round in list(pairing.rounds):
        if round.verify_sent_at is None and round in pairing.rounds:  # else it was given up with the one before
            _draft(book, pairing, round, target, drafter, now)
    while _begin(book, pairing, target, drafter, now):
        pass
    _plan_wake(book, pairing, now)


def _come_back(pairing: Pairing, now: float) -> None:
    """A late drafter has another chance once it has answered, or so long after that its answer must be lost."""
    if pairing.away_until is None or now < pairing.away_until:
        return
    is_owing = any(member.follower is not None and member.follower.is_waiting for member in pairing.members.values())
    if not is_owing or now >= pairing.away_until + MAX_AWAY_SECONDS:
        pairing.away_until = None


def _plan_wake(book: Book, pairing: Pairing, now: float) -> None:
    times = []
    if pairing.away_until is not None:
        times.append(pairing.away_until if now < pairing.away_until else pairing.away_until + MAX_AWAY_SECONDS)
    times += [round.deadline for round in pairing.rounds if round.drafted_at is None]
    if times and (pairing.wake_at is None or pairing.wake_at <= now or min(times) < pairing.wake_at):
        pairing.wake_at = min(times)  # an earlier one stays: it comes once and for nothing, instead of one for each round
        book.plan_wake()


def _ready(pairing: Pairing) -> list[Member]:
    """Those whose drafter holds them."""
    return [member for member in candidates_of(pairing) if member.guest_state == "ready" and _is_near(member)]


def _is_near(member: Member) -> bool:
    return member.follower is None or member.follower.length - member.follower.num_held <= NEAR_TOKENS


def _begin(book: Book, pairing: Pairing, target: Model, drafter: Model | None, now: float) -> bool:
    """The next round, if there is to be one now. True when another may be begun beside it."""
    candidates = candidates_of(pairing)
    num_tokens = pairing.controller.choose(len(candidates)) if candidates and pairing.is_attached else 0
    if num_tokens == 0 or pairing.away_until is not None:
        _resume(book, pairing, target)
        return False
    if drafter is not None:
        invite(book, pairing, drafter, candidates)
        _catch_up(book, pairing, drafter, candidates)
    ready = _ready(pairing)
    _resume(book, pairing, target, besides=ready)
    _hold(book, target, [member for member in ready if not member.is_held])  # during a round, for the next one
    in_rounds = pairing.in_rounds
    idle = [member for member in ready if member.is_held and member.sequence.id not in in_rounds]
    num_lanes = pairing.lanes.choose(len(ready)) if pairing.ahead is None and drafter is not None else 1
    if not idle or len(pairing.rounds) >= num_lanes:
        return False
    if not pairing.rounds and any(member.is_holding for member in ready):
        return False  # a step at most, and all begin together
    members = idle[: -(-len(ready) // num_lanes)]
    round = Round(
        {member.sequence.id: member for member in members},
        num_tokens,
        began_at=now,
        deadline=now + max(PATIENCE_SECONDS, PATIENCE_ROUNDS * pairing.usual_draft_seconds),
        num_rows=len(members),
        num_all_rows=len(ready),
        num_lanes=num_lanes,
    )
    pairing.rounds.append(round)
    for member in members:
        sequence = member.sequence
        room = num_proposable(sequence.length, max_length=sequence.max_length, limit=sequence.limit)
        member.num_wanted = int(min(num_tokens, room, max(0, pairing.draft_context - sequence.length - 1)))
    _draft(book, pairing, round, target, drafter, now)
    return len(pairing.rounds) < num_lanes


def _catch_up(book: Book, pairing: Pairing, drafter: Model, members: Iterable[Member]) -> None:
    """Feed the drafter what it lacks, without a draft."""
    rows: list[DraftRow] = []
    for member in members:
        follower = member.follower
        if follower is None or follower.is_waiting or _is_near(member):
            continue
        if follower.length - follower.num_held > CATCH_UP_TOKENS:
            pairing.drop_guest(member)
            book.disturb(pairing)
            continue
        rows.append(_order(pairing, member, 0))
    if rows:
        book.send(drafter, Draft(tuple(rows)))


def _order(pairing: Pairing, member: Member, count: int, *, ahead: bool = False) -> DraftRow:
    assert member.follower is not None
    assert member.guest is not None
    order = member.follower.order(pairing.number(), ahead=ahead)
    return DraftRow(member.guest, order.number, order.base, TokenIds(order.commit), count)


def _draft(book: Book, pairing: Pairing, round: Round, target: Model, drafter: Model | None, now: float) -> None:
    """Ask for the drafts that are missing; verify when none is."""
    rows: list[DraftRow] = []
    is_waiting = False
    for member in round.members.values():
        follower = member.follower
        if follower is None or member.num_wanted == 0 or follower.guess:
            continue
        is_waiting = True
        if not follower.is_hopeful:
            member.is_ahead = False
            rows.append(_order(pairing, member, member.num_wanted))
    if rows and drafter is not None:
        book.send(drafter, Draft(tuple(rows)))
    if not is_waiting:
        round.drafted_at = now if round.drafted_at is None else round.drafted_at
        if not any(other.verify_sent_at is not None for other in pairing.rounds):  # else its turn comes
            _verify(book, pairing, round, target, drafter, now)
    elif now >= round.deadline:
        _give_up(book, pairing, round, target, now)


def _give_up(book: Book, pairing: Pairing, round: Round, target: Model, now: float) -> None:
    """The drafter is late: the target goes on alone."""
    pairing.counts.late += 1
    pairing.controller.note_late(round.num_rows, now - round.began_at)
    pairing.away_until = now + min(PATIENCE_SECONDS * 2**pairing.num_late_together, MAX_AWAY_SECONDS)
    pairing.num_late_together += 1
    pairing.rounds = [other for other in pairing.rounds if other.verify_sent_at is not None]
    _resume(book, pairing, target)


def _verify(book: Book, pairing: Pairing, round: Round, target: Model, drafter: Model | None, now: float) -> None:
    rows: list[VerifyRow] = []
    for member in round.members.values():
        guess = member.follower.guess if member.follower is not None else ()
        pairing.counts.ahead_hits += member.is_ahead and bool(guess)
        member.is_ahead = False
        number, proposed = pairing.number(), guess[: member.num_wanted]
        rows.append(VerifyRow(member.sequence.id, number, member.sequence.length, proposed))
    book.send(target, Verify(tuple(rows), lookup=round.num_tokens if pairing.is_lookup else 0))
    round.verify_sent_at = now
    if drafter is not None and _is_ahead_worth(pairing, round):
        _draft_ahead(book, pairing, round, drafter)


def _is_ahead_worth(pairing: Pairing, round: Round) -> bool:
    if round.num_lanes > 1:
        return False
    if pairing.ahead is not None:
        return pairing.ahead
    return pairing.controller.chance(round.num_tokens + 1) >= AHEAD_CHANCE


def _draft_ahead(book: Book, pairing: Pairing, round: Round, drafter: Model) -> None:
    """The next round's drafts, from what each drafter's row guesses the target will say: the draft and one token more."""
    rows: list[DraftRow] = []
    for member in round.members.values():
        follower = member.follower
        if follower is None or not follower.guess or len(follower.guess) > member.num_wanted:
            continue  # what is left of an earlier guess will do
        count = round.num_tokens + 1
        sequence = member.sequence
        if sequence.length + member.num_wanted + count >= min(sequence.max_length, pairing.draft_context - 1):
            continue
        rows.append(_order(pairing, member, count, ahead=True))
        member.is_ahead = True
    if rows:
        pairing.counts.ahead += len(rows)
        book.send(drafter, Draft(tuple(rows)))


def _hold(book: Book, target: Model, members: Iterable[Member]) -> None:
    told: list[SequenceId] = []
    for member in members:
        if not member.is_holding:
            member.is_holding = True
            told.append(member.sequence.id)
    if told:
        book.send(target, Hold(tuple(told)))


def _resume(book: Book, pairing: Pairing, target: Model, besides: Iterable[Member] = ()) -> None:
    """Let all decode freely that do not, but for these and those that are being verified."""
    kept = {member.sequence.id for member in besides} | pairing.in_rounds
    told: list[SequenceId] = []
    for sequence_id, member in pairing.members.items():
        if (member.is_held or member.is_holding) and sequence_id not in kept:
            member.is_held = member.is_holding = False
            told.append(member.sequence.id)
    if told:
        book.send(target, Resume(tuple(told)))
