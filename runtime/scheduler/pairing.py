"""What is known of one target's speculation: who drafts, which sequences take part, and the round under way.

Plain records and the few ways to change them; what is sent, and when, is decided in speculation.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import Final, Literal

from runtime.protocol.events import ModelFacts
from runtime.protocol.ids import ModelName, SequenceId
from runtime.scheduler.drafting import DraftLength
from runtime.scheduler.lanes import Lanes
from runtime.scheduler.request import Sequence, SequenceState
from runtime.scheduler.rounds import Follower

LOOKUP: Final = "lookup"
"""The drafter's name that stands for the target's own text."""

GuestState = Literal["none", "prefilling", "ready", "refused"]


@dataclass(slots=True, eq=False)
class Member:
    """One sequence of the target that may speculate.

    follower, guest: what the drafter holds of it, and as which sequence there; it is "refused" when the drafter cannot have it.
    num_lost: how often the drafter had lost it. is_held: the target told that it waits; is_holding: it was told to. num_wanted:
    proposals asked for in the round under way. is_ahead: the next ones are drafted, or being drafted, ahead.
    """

    sequence: Sequence
    follower: Follower | None = None
    guest: SequenceId | None = None
    guest_state: GuestState = "none"
    is_held: bool = False
    is_holding: bool = False
    num_wanted: int = 0
    num_lost: int = 0
    is_ahead: bool = False


@dataclass(slots=True, eq=False)
class Round:
    """members: those whose part is not done. began_at: when it could have been verified had there been a draft. verify_sent_at:
    None while drafting. drafted_at: when the last draft was there. num_tokens: drafted for each at most. num_rows: at its
    beginning; num_all_rows: of all lanes. drafter_seconds: inside the drafter's steps. rows: (wanted, proposed, matched) of the
    parts done; num_made: tokens of them.
    """

    members: dict[SequenceId, Member]
    num_tokens: int
    began_at: float
    deadline: float
    verify_sent_at: float | None = None
    drafted_at: float | None = None
    num_rows: int = 0
    num_all_rows: int = 0
    num_lanes: int = 1
    num_made: int = 0
    verify_seconds: float = 0.0
    drafter_seconds: float = 0.0
    rows: list[tuple[int, int, int]] = field(default_factory=list)


@dataclass(slots=True)
class Counts:
    """Since the start. late: rounds that the drafter did not answer in time. ahead: drafts made during a verify, and of them those
    that the round after could use. Seconds of all rounds, by what was waited for; wire is what neither worker's steps explain."""

    rounds: int = 0
    proposed: int = 0
    accepted: int = 0
    ahead: int = 0
    ahead_hits: int = 0
    late: int = 0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    wire_seconds: float = 0.0


@dataclass(slots=True, eq=False)
class Pairing:
    """drafter: a model's name, or `LOOKUP`. worker: its replica that drafts, None before there was one. refused: why these two can
    never be paired; None when they can, or one of them has not been loaded yet. ahead: whether to draft while the target verifies,
    None: where it promises a gain.

    members: by the target's sequence. guests: by the drafter's. rounds: under way, at most one of them verifying. last_end: of a
    round. turn, turn_seconds: what rounds of two lanes did since the controller was told. away_until: the drafter was late; it is
    left alone until it speaks again, and at least until then; num_late_together: rounds that were late since the last good one.
    wake_at: when somebody must look whether a round is late. usual_draft_seconds: that rounds waited for drafts lately.
    draft_context: the drafter's.
    """

    target: ModelName
    drafter: str
    controller: DraftLength
    ahead: bool | None = None
    refused: str | None = None
    is_attached: bool = False
    members: dict[SequenceId, Member] = field(default_factory=dict)
    guests: dict[SequenceId, Member] = field(default_factory=dict)
    guests_to_release: list[SequenceId] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    lanes: Lanes = field(default_factory=Lanes)
    last_end: float | None = None
    turn: list[tuple[int, int, int]] = field(default_factory=list)
    turn_seconds: float = 0.0
    next_number: int = 1
    away_until: float | None = None
    num_late_together: int = 0
    worker: ModelName | None = None
    usual_draft_seconds: float = 0.0
    wake_at: float | None = None
    draft_context: float = inf
    counts: Counts = field(default_factory=Counts)

    @property
    def in_rounds(self) -> set[SequenceId]:
        """Who takes part in one."""
        return {sequence for round in self.rounds for sequence in round.members}

    @property
    def is_lookup(self) -> bool:
        return self.drafter == LOOKUP

    def drafts_with(self, model: ModelName) -> bool:
        return self.worker == model and not self.is_lookup

    def number(self) -> int:
        """For the next order or round; they rise."""
        self.next_number += 1
        return self.next_number - 1

    def join(self, sequence: Sequence) -> None:
        member = Member(sequence, guest_state="ready" if self.is_lookup else "none")
        self.members[sequence.id] = sequence.member = member

    def leave(self, member: Member) -> None:
        """Its sequence is over."""
        member.sequence.member = None
        del self.members[member.sequence.id]
        for round in self.rounds:
            round.members.pop(member.sequence.id, None)
        self.drop_guest(member)

    def drop_guest(self, member: Member) -> None:
        """Whatever the drafter holds of it is not wanted any more."""
        if member.guest is not None:
            del self.guests[member.guest]
            self.guests_to_release.append(member.guest)
        self.forget_guest(member)

    def forget_guest(self, member: Member) -> None:
        """The drafter holds nothing of it."""
        if member.guest is not None:
            self.guests.pop(member.guest, None)
        member.guest = member.follower = None
        if not self.is_lookup:
            member.guest_state = "none"

    def detach(self) -> None:
        """The drafter is gone, with all it held."""
        self.is_attached, self.refused, self.away_until = False, None, None
        for member in self.members.values():
            self.forget_guest(member)
        self.guests.clear()
        self.guests_to_release.clear()

    def lose_target(self) -> None:
        """The target's worker is gone; its sequences have left or will."""
        for member in list(self.members.values()):
            self.leave(member)
        self.rounds.clear()


def objection(target: ModelFacts, drafter: ModelFacts | None) -> str | None:
    """Why these two cannot be paired; `drafter` None for lookup."""
    if not target.capabilities.verify:
        return "the target cannot verify several tokens at once: its self-test did not prove that its caches allow it"
    if drafter is None:
        return None
    if drafter.vocabulary_digest != target.vocabulary_digest:
        return "the drafter has another vocabulary than the target"
    if drafter.capabilities.rollback != "free":
        return f"the drafter's caches cannot go back over several steps (rollback is {drafter.capabilities.rollback!r})"
    return None


def candidates_of(pairing: Pairing) -> list[Member]:
    """Those that could speculate, were they ready."""
    return [
        member
        for member in pairing.members.values()
        if member.sequence.state is SequenceState.DECODING and member.guest_state != "refused"
    ]
