"""Rounds of speculation: hold, draft, verify, again; drafting ahead; who joins when; what the stats say."""

from __future__ import annotations

import pytest

from runtime.config import Settings
from runtime.errors import InvalidRequest
from runtime.protocol.commands import Grant
from runtime.protocol.events import StepRow, Verified, VerifiedRow
from runtime.scheduler.request import SequenceState
from tests.unit.scheduler.house import MODEL
from tests.unit.scheduler.pair import OTHER, SMALL, Pair


def test_a_round_is_hold_then_draft_then_verify_and_the_next_begins_with_its_answer() -> None:
    house = Pair()
    house.pair()
    request, sequence = house.begin()
    (guest,) = house.invited()
    assert (guest.tokens.tolist(), guest.hold, guest.sampling.seed, guest.ignore_eos) == ([1, 2, 3], True, 7, True)
    assert house.holds() == []  # it decodes freely while the drafter reads the prompt
    house.greet()
    assert (house.holds(), house.drafts()) == ([(sequence,)], [])
    house.free_step(sequence)  # was under way
    house.held()
    ((order,),) = house.drafts()
    assert (order.sequence, order.base, order.commit.tolist(), order.count) == (guest.sequence, 3, [3, 4], 4)
    assert house.verifies() == []
    house.drafted()
    (asked,) = house.verifies()
    (row,) = asked.rows
    assert (row.sequence, row.base, row.proposed, asked.lookup) == (sequence, 5, (5, 6, 7, 8), 0)
    house.verified()
    assert house.tokens(request) == [3, 4, 5, 6, 7, 8, 9]
    ((second,),) = house.drafts()[1:]
    assert (second.base, second.commit.tolist(), second.count) == (8, [8, 9], 4)  # the last proposal was never fed
    assert second.number > row.number > order.number
    assert (house.holds(), house.resumes()) == ([(sequence,)], [])


@pytest.mark.parametrize(("priority", "is_background"), [("interactive", False), ("background", True)])
def test_a_guest_is_of_its_requests_class(priority: str, is_background: bool) -> None:
    house = Pair()
    house.pair()
    house.begin(priority=priority)
    assert [guest.background for guest in house.invited()] == [is_background]


def test_after_a_wrong_proposal_the_drafter_goes_back_to_what_stands() -> None:
    house = Pair()
    house.pair()
    request, _ = house.verifying()
    house.verified(num_matched=1)
    (order,) = house.drafts()[1]
    assert (order.base, order.commit.tolist()) == (5, [OTHER])
    assert house.tokens(request) == [3, 4, OTHER]


def test_a_draft_of_nothing_still_gives_a_round() -> None:
    house = Pair()
    house.pair()
    house.drafting()
    house.drafted(num_tokens=0)
    (asked,) = house.verifies()
    assert asked.rows[0].proposed == ()
    house.verified()
    assert len(house.drafts()) == 2


def test_no_more_is_drafted_than_may_be_committed() -> None:
    house = Pair()
    house.pair()
    house.drafting(max_tokens=4)
    assert house.drafts()[0][0].count == 2  # one is said, one will be the target's own
    house.drafted()
    house.verified()
    assert house.breaches == []


def test_the_last_token_of_a_sequence_is_verified_without_a_draft() -> None:
    house = Pair()
    house.pair()
    request, _ = house.verifying(max_tokens=7)
    house.verified()  # 1 + 5 tokens
    assert len(house.drafts()) == 1
    assert house.verifies()[1].rows[0].proposed == ()
    house.verified()
    assert house.outcomes[request].state == "finished"
    assert (house.outcomes[request].proposed_tokens, house.outcomes[request].accepted_tokens) == ((4,), (4,))
    assert house.dismissed() == [house.invited()[0].sequence]


# -- who takes part ---------------------------------------------------------------------------------------------


def test_one_that_comes_during_a_round_is_held_for_the_next() -> None:
    house = Pair()
    house.pair()
    _, first = house.verifying()
    _, second = house.begin()
    house.verified()  # the first's guest was there, the second's is invited now
    house.greet()
    house.drafted()
    house.free_step(second)
    assert house.holds()[1:] == [(second,)]
    house.held()
    assert [row.sequence for row in house.verifies()[1].rows] == [first]
    house.verified()
    assert len(house.drafts()[-1]) == 2
    house.drafted()
    assert [row.sequence for row in house.verifies()[-1].rows] == [first, second]


def test_a_round_ends_when_the_last_of_its_rows_is_answered() -> None:
    house = Pair()
    house.pair()
    sequences = [house.start(max_tokens=200)[1] for _ in range(2)]
    house.free_step(*sequences)
    house.greet()
    house.held()
    house.drafted()
    rows = house.verifies()[0].rows
    for place, row in enumerate(rows):
        assert len(house.drafts()) == 1
        house.say(Verified(1, (VerifiedRow(row.number, 4, 0, StepRow(row.sequence, row.base, (OTHER,))),), 0.01))
        assert house.stats.rounds == (place == len(rows) - 1)
    assert len(house.drafts()) == 2


def test_a_request_that_wants_no_speculation_never_takes_part() -> None:
    house = Pair()
    house.pair()
    _, sequence = house.start(max_tokens=200, speculate=False)
    for _ in range(5):
        house.free_step(sequence)
    assert (house.invited(), house.holds(), house.pairing.members) == ([], [], {})
    assert house.stats.rounds == 0


def test_a_parked_sequence_is_let_go_and_taken_in_again() -> None:
    house = Pair(Settings(stream_window_tokens=4))
    house.pair()
    request, sequence = house.verifying(windowed=True)
    house.verified()
    record = house.record(request).sequences[0]
    assert record.state is SequenceState.PARKED
    assert house.resumes() == [(sequence,)]
    assert len(house.drafts()) == 1
    house.read(request, 4)
    assert house.commands(Grant)
    assert house.holds() == [(sequence,)] * 2
    house.held()
    assert house.drafts()[1][0].count == 3  # and one token of the target's own


def test_a_drafter_has_no_more_guests_than_slots_and_the_next_comes_when_one_leaves() -> None:
    house = Pair()
    house.pair(drafter_slots=1)
    first, _ = house.drafting()
    _, second = house.begin()
    assert len(house.invited()) == house.stats.guests == 1
    house.cancel(first)
    assert house.dismissed() == [house.invited()[0].sequence]
    house.free_step(second)
    assert len(house.invited()) == 2
    house.greet()
    house.held()
    assert house.drafts()[-1][0].sequence == house.invited()[1].sequence


def test_a_drafter_far_behind_is_fed_before_the_round_and_one_further_still_begins_anew() -> None:
    house = Pair()
    house.pair()
    _, sequence = house.start(max_tokens=2000)
    for _ in range(100):
        house.free_step(sequence)
    house.greet()
    ((order,),) = house.drafts()
    assert (order.count, len(order.commit)) == (0, 100)
    assert house.holds() == []
    house.drafted()
    assert house.holds() == [(sequence,)]
    far = Pair()
    far.pair()
    _, sequence = far.begin(max_tokens=2000)
    for _ in range(600):
        far.free_step(sequence)
    far.greet()
    assert far.drafts() == []
    assert far.dismissed() == [far.invited()[0].sequence]
    assert len(far.invited()[1].tokens) == 603


# -- lookup, controller, stats ----------------------------------------------------------------------------------


def test_lookup_needs_no_drafter_the_target_proposes_for_itself() -> None:
    house = Pair()
    house.pair("lookup")
    _, sequence = house.begin()
    assert house.holds() == [(sequence,)]
    house.held()
    (asked,) = house.verifies()
    assert (asked.lookup, asked.rows[0].proposed) == (4, ())
    house.verified(num_own=3, num_matched=2)
    assert len(house.verifies()) == 2
    assert (house.stats.proposed, house.stats.accepted, house.stats.state) == (3, 2, "paired")


def test_where_drafting_does_not_pay_all_decode_freely() -> None:
    house = Pair()
    house.pair(draft_tokens=None)
    _, sequence = house.start(max_tokens=2000)
    num_steps = 0
    while not house.invited():
        house.free_step(sequence, seconds=0.01)
        num_steps += 1
        assert num_steps < 10
    house.greet()
    house.held()
    while not house.resumes():
        house.drafted(wrong=True)
        house.now += 0.5
        house.verified(num_matched=0, seconds=0.5)
    assert house.stats.controller[0].state == "off"
    num_rounds = house.stats.rounds
    for _ in range(5):
        house.free_step(sequence)
    assert (len(house.holds()), house.stats.rounds) == (1, num_rounds)


def test_what_was_said_before_changes_nothing() -> None:
    house = Pair()
    house.pair()
    request, _ = house.drafting()
    draft = house.drafted()
    house.say(draft, SMALL)
    answer = house.verified()
    house.drafted()
    before = (len(house.sent), house.stats, [round.members for round in house.pairing.rounds])
    house.say(draft, SMALL)
    house.say(answer)
    assert (len(house.sent), house.stats, [round.members for round in house.pairing.rounds]) == before
    assert house.record(request).sequences[0].num_proposed == 4
    assert house.breaches == []


def test_stats_say_where_the_time_of_rounds_went() -> None:
    house = Pair()
    house.pair()
    house.drafting()
    house.now += 0.03
    house.drafted()  # of which 0.01 inside the drafter's steps
    house.now += 0.05
    house.verified(num_matched=3, seconds=0.04)
    stats = house.stats
    assert (stats.rounds, stats.proposed, stats.accepted, stats.late) == (1, 4, 3, 0)
    assert (stats.draft_seconds, stats.verify_seconds) == pytest.approx((0.01, 0.04))
    assert stats.wire_seconds == pytest.approx(0.02 + 0.01)
    assert (stats.target, stats.drafter, stats.state, stats.guests) == (MODEL, SMALL, "paired", 1)


def test_speculation_cannot_be_asked_of_a_model_without_a_drafter() -> None:
    house = Pair()
    house.up()
    with pytest.raises(InvalidRequest, match="no drafter"):
        house.submit(speculate=True)


@pytest.mark.parametrize(("matched", "proposed"), [(5, 4), (-1, 4)])
def test_more_right_than_proposed_is_a_breach(matched: int, proposed: int) -> None:
    house = Pair()
    house.pair()
    _, sequence = house.verifying()
    house.say(Verified(1, (VerifiedRow(2, proposed, matched, StepRow(sequence, 4, (4,))),), 0.01))
    assert len(house.breaches) == 1
