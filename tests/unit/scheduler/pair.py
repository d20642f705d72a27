"""A target and its drafter as a test plays them. The token at an output position is that position, so right proposals are known."""

from __future__ import annotations

from typing import Any

from runtime.protocol.commands import AnyCommand, Draft, DraftRow, Hold, Prefill, PrefillRow, Release, Resume, Verify
from runtime.protocol.events import Drafted, DraftedRow, Held, Prefilled, StepDone, StepRow, Verified, VerifiedRow
from runtime.protocol.ids import Incarnation, ModelName, RequestId, SequenceId
from runtime.scheduler.pairing import Pairing
from runtime.scheduler.stats import PairingStats, snapshot
from runtime.scheduler.stimuli import ModelAdded, Tick, WorkerUp
from tests.unit.scheduler.house import MODEL, House, facts

SMALL = ModelName("small")
OTHER = 7000
"""What the target says where a proposal was wrong."""


class Pair(House):
    """`pair` first. A command counts as answered once `heard` has taken it."""

    def pair(
        self,
        drafter: str = SMALL,
        *,
        draft_tokens: int | None = 4,
        ahead: bool | None = False,
        slots: int = 4,
        drafter_slots: int = 4,
        context_length: int = 4096,
    ) -> None:
        self.do(ModelAdded(MODEL, slots, drafter, draft_tokens, ahead))
        if drafter == SMALL:
            self.do(ModelAdded(SMALL, drafter_slots))
            self.do(WorkerUp(SMALL, Incarnation(1), facts(context_length)))
        self.do(WorkerUp(MODEL, Incarnation(1), facts()))

    @property
    def pairing(self) -> Pairing:
        found = self.state.book.models[MODEL].pairing
        assert found is not None
        return found

    @property
    def stats(self) -> PairingStats:
        (found,) = snapshot(self.state.book).pairings
        return found

    # -- looking ----------------------------------------------------------------------------------------------------

    def to(self, model: ModelName, *kinds: type[AnyCommand]) -> list[Any]:
        return [command for name, _, command in self.sent if name == model and isinstance(command, kinds)]

    def holds(self) -> list[tuple[SequenceId, ...]]:
        return [command.sequences for command in self.to(MODEL, Hold)]

    def resumes(self) -> list[tuple[SequenceId, ...]]:
        return [command.sequences for command in self.to(MODEL, Resume)]

    def drafts(self) -> list[tuple[DraftRow, ...]]:
        return [command.rows for command in self.to(SMALL, Draft)]

    def verifies(self) -> list[Verify]:
        return self.to(MODEL, Verify)

    def invited(self) -> list[PrefillRow]:
        return [row for command in self.to(SMALL, Prefill) for row in command.rows]

    def dismissed(self) -> list[SequenceId]:
        return [sequence for command in self.to(SMALL, Release) for sequence in command.sequences]

    # -- answering --------------------------------------------------------------------------------------------------

    def greet(self, *, incarnation: int = 1) -> None:
        """The drafter has computed all guests that it was to."""
        lengths = {row.sequence: len(row.tokens) for row in self.invited()}
        new = [guest for guest, member in self.pairing.guests.items() if member.guest_state == "prefilling"]
        self.say(Prefilled(tuple((guest, lengths[guest]) for guest in new), 0.1), SMALL, incarnation)

    def held(self, *, incarnation: int = 1) -> None:
        """To the last Hold."""
        rows = self.state.book.models[MODEL].sequences
        self.say(Held(tuple((sequence, rows[sequence].length) for sequence in self.holds()[-1])), incarnation=incarnation)

    def drafted(self, number: int = -1, *, wrong: bool = False, num_tokens: int | None = None, incarnation: int = 1) -> Drafted:
        """To that Draft."""
        said = []
        for row in self.drafts()[number]:
            start = row.base + len(row.commit)
            count = row.count if num_tokens is None else num_tokens
            said.append(DraftedRow(row.sequence, row.number, tuple(0 if wrong else start + place for place in range(count))))
        event = Drafted(tuple(said), (), 0.01)
        self.say(event, SMALL, incarnation)
        return event

    def verified(self, number: int = -1, *, num_matched: int = 99, seconds: float = 0.02, num_own: int = 0) -> Verified:
        """To that Verify. `num_own`: proposals that each row makes for itself."""
        said = []
        for row in self.verifies()[number].rows:
            sequence = self.state.book.models[MODEL].sequences[row.sequence]
            num_proposed = len(row.proposed) or num_own
            matched = min(num_matched, num_proposed)
            end = min(sequence.length + matched + 1, sequence.limit, sequence.max_length)
            tokens = tuple(range(sequence.length, end))
            if matched < num_proposed:
                tokens = (*tokens[:matched], OTHER)
            finish: Any = "length" if end == sequence.max_length else None
            step = StepRow(row.sequence, sequence.length, tokens, "", finish)
            said.append(VerifiedRow(row.number, num_proposed, matched, step))
        event = Verified(1, tuple(said), seconds)
        self.say(event)
        return event

    def free_step(self, *sequences: SequenceId, seconds: float = 0.01) -> None:
        rows = self.state.book.models[MODEL].sequences
        self.say(StepDone(1, tuple(StepRow(s, rows[s].length, (rows[s].length,), "") for s in sequences), seconds))

    def pass_time(self, seconds: float) -> None:
        """With all the wake-ups that were asked for."""
        end = self.now + seconds
        while self.wake_at is not None and self.wake_at <= end:
            self.now, self.wake_at = max(self.now, self.wake_at), None
            self.do(Tick())
        self.now = end

    def begin(self, **options: Any) -> tuple[RequestId, SequenceId]:
        """A request with its first token."""
        request, sequence = self.start(**{"max_tokens": 200, **options})
        self.free_step(sequence)
        return request, sequence

    def drafting(self, **options: Any) -> tuple[RequestId, SequenceId]:
        """A request whose first round's Draft is sent."""
        request, sequence = self.begin(**options)
        self.greet()
        self.held()
        return request, sequence

    def verifying(self, **options: Any) -> tuple[RequestId, SequenceId]:
        request, sequence = self.drafting(**options)
        self.drafted()
        return request, sequence
