"""Whatever becomes of the drafter, or of a request in the middle of a round, the target goes on and nothing is left over."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from runtime.errors import InvalidRequest, ModelNotLoaded
from runtime.protocol.events import Drafted, Refused
from runtime.protocol.ids import Incarnation, ModelName, RequestId, SequenceId
from runtime.scheduler.stimuli import ModelAdded, ModelRemoved, Tick, WorkerUp
from tests.unit.scheduler.house import MODEL, facts
from tests.unit.scheduler.pair import SMALL, Pair

Phase = Callable[[Pair], tuple[RequestId, SequenceId]]


def invited(house: Pair) -> tuple[RequestId, SequenceId]:
    return house.begin()


def holding(house: Pair) -> tuple[RequestId, SequenceId]:
    made = house.begin()
    house.greet()
    return made


def drafting(house: Pair) -> tuple[RequestId, SequenceId]:
    return house.drafting()


def verifying(house: Pair) -> tuple[RequestId, SequenceId]:
    return house.verifying()


def second_round(house: Pair) -> tuple[RequestId, SequenceId]:
    made = house.verifying()
    house.verified(num_matched=2)
    return made


PHASES = [invited, holding, drafting, verifying, second_round]


# -- a request that ends ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("phase", PHASES)
def test_a_cancelled_request_leaves_nothing_in_either_worker(phase: Phase, ahead: bool) -> None:
    house = Pair()
    house.pair(ahead=ahead)
    request, sequence = phase(house)
    num_commands = len(house.drafts()) + len(house.verifies())
    house.cancel(request)
    assert set(house.told_to_release()[1]) == {sequence, house.invited()[0].sequence}
    assert (house.pairing.members, house.pairing.guests, house.pairing.rounds) == ({}, {}, [])
    if house.drafts():
        house.drafted()  # both may have crossed the release
    if house.verifies():
        house.say(Drafted((), (house.invited()[0].sequence,)), SMALL)
    house.released(sequence)
    house.released(house.invited()[0].sequence, model=SMALL)
    assert len(house.drafts()) + len(house.verifies()) == num_commands
    assert house.breaches == []


@pytest.mark.parametrize("phase", [drafting, verifying])
def test_the_others_of_a_round_go_on_without_one_that_is_cancelled(phase: Phase) -> None:
    house = Pair()
    house.pair()
    first, second = house.start(max_tokens=200), house.start(max_tokens=200)
    house.free_step(first[1], second[1])
    house.greet()
    house.held()
    if phase is verifying:
        house.drafted()
    house.cancel(first[0])
    if phase is drafting:
        house.drafted()
        assert [row.sequence for row in house.verifies()[0].rows] == [second[1]]
    house.verified()
    assert [row.sequence for row in house.drafts()[1]] == [house.invited()[1].sequence]
    assert house.tokens(second[0]) == [3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("phase", PHASES)
def test_a_lost_target_dismisses_the_guests_and_pairs_anew_where_its_streams_go_on(phase: Phase) -> None:
    house = Pair()
    house.pair()
    request, sequence = phase(house)
    said = house.tokens(request)
    house.lose()
    assert house.dismissed() == [house.invited()[0].sequence]
    assert (house.pairing.members, house.pairing.rounds) == ({}, [])
    house.up(incarnation=2)
    num_before = len(house.holds())
    assert house.rows()[-1].tokens.tolist()[-len(said) :] == said
    house.prefilled(sequence, incarnation=2)
    house.step(sequence, incarnation=2)
    house.greet()
    assert house.holds()[num_before:] == [(sequence,)]


# -- a drafter that is gone -------------------------------------------------------------------------------------


def lose(house: Pair) -> None:
    house.lose(SMALL)


def remove(house: Pair) -> None:
    house.do(ModelRemoved(SMALL, ModelNotLoaded(SMALL, "was unloaded")))


@pytest.mark.parametrize("gone", [lose, remove])
@pytest.mark.parametrize("phase", PHASES)
def test_without_its_drafter_the_target_goes_on_alone_and_pairs_again_with_the_next(
    phase: Phase, gone: Callable[[Pair], None]
) -> None:
    house = Pair()
    house.pair()
    request, sequence = phase(house)
    num_drafts = len(house.drafts())
    gone(house)
    if phase is verifying:
        assert house.resumes() == []  # its answer comes from the target
        house.verified()
    assert house.resumes() == ([] if phase is invited else [(sequence,)])
    assert (house.stats.state, house.stats.guests) == ("waiting", 0)
    house.free_step(sequence)
    assert len(house.drafts()) == num_drafts
    house.do(ModelAdded(SMALL, 4))
    house.do(WorkerUp(SMALL, Incarnation(2), facts()))
    assert house.stats.state == "paired"
    assert [row.tokens.tolist()[:3] for row in house.invited()] == [[1, 2, 3]] * 2
    house.greet(incarnation=2)
    house.held()
    assert house.drafts()[-1][0].sequence == house.invited()[1].sequence
    house.drafted(incarnation=2)
    house.verified()
    assert house.stats.rounds >= 1
    assert house.tokens(request)[:2] == [3, 4]


def test_a_drafter_that_is_replaced_unannounced_holds_nothing_any_more() -> None:
    house = Pair()
    house.pair()
    house.drafting()
    house.do(WorkerUp(SMALL, Incarnation(2), facts()))
    house.drafted()  # by the one before
    assert house.verifies()[0].rows[0].proposed == ()
    house.verified()
    assert list(house.pairing.guests) == [house.invited()[1].sequence]


def test_a_row_that_the_drafter_lost_is_verified_without_and_invited_again_once() -> None:
    house = Pair()
    house.pair()
    _, sequence = house.drafting()
    house.say(Drafted((), (house.invited()[0].sequence,)), SMALL)
    assert house.verifies()[0].rows[0].proposed == ()
    house.verified()
    assert len(house.invited()) == 2
    assert house.dismissed() == []  # it has forgotten it by itself
    house.greet()
    house.held()
    house.say(Drafted((), (house.invited()[1].sequence,)), SMALL)
    house.verified()
    assert len(house.invited()) == 2
    assert house.resumes()[-1] == (sequence,)
    assert house.stats.guests == 0


def test_a_row_that_the_drafter_refuses_decodes_freely_to_its_end() -> None:
    house = Pair()
    house.pair()
    request, sequence = house.begin(max_tokens=4)
    house.say(Refused("prefill", "context_length_exceeded", "too long", sequences=(house.invited()[0].sequence,)), SMALL)
    for _ in range(2):
        house.free_step(sequence)
    assert (house.holds(), len(house.invited()), house.stats.guests) == ([], 1, 0)
    house.finish(sequence)
    assert house.outcomes[request].state == "finished"


def test_a_sequence_longer_than_the_drafters_context_is_not_given_to_it() -> None:
    house = Pair()
    house.pair(context_length=3)
    _, sequence = house.begin()
    house.free_step(sequence)
    assert (house.invited(), house.holds()) == ([], [])


def test_guests_are_fed_and_drafted_for_only_within_the_drafters_context() -> None:
    house = Pair()
    house.pair(context_length=8)
    house.drafting()
    assert house.drafts()[0][0].count == 3
    house.drafted()
    house.verified()
    assert len(house.drafts()) == 1
    assert house.verifies()[1].rows[0].proposed == ()


# -- who cannot be paired ---------------------------------------------------------------------------------------


def test_a_drafter_of_another_vocabulary_is_never_asked_and_asking_for_it_is_refused() -> None:
    house = Pair()
    house.do(ModelAdded(MODEL, 4, SMALL, 4, None))
    house.do(ModelAdded(SMALL, 4))
    house.do(WorkerUp(MODEL, Incarnation(1), facts()))
    assert house.stats.state == "waiting"
    house.do(WorkerUp(SMALL, Incarnation(1), msgspec.structs.replace(facts(), vocabulary_digest="other")))
    assert house.stats.state == "refused"
    assert "vocabulary" in (house.stats.reason or "")
    _, sequence = house.begin()
    house.free_step(sequence)
    assert (house.invited(), house.holds()) == ([], [])
    with pytest.raises(InvalidRequest, match="vocabulary"):
        house.submit(speculate=True)
    house.lose(SMALL)
    house.do(WorkerUp(SMALL, Incarnation(2), facts()))
    assert (house.stats.state, house.stats.reason) == ("paired", None)


def test_two_targets_share_a_drafter_and_its_slots() -> None:
    house = Pair()
    house.pair(drafter_slots=2)
    other = ModelName("other")
    house.do(ModelAdded(other, 4, SMALL, 4, False))
    house.do(WorkerUp(other, Incarnation(1), facts()))
    first, _ = house.drafting()
    request = house.submit(model=other, max_tokens=200)
    house.prepared(request, model=other)
    theirs = house.sequence(request)
    house.prefilled(theirs, model=other)
    house.step(theirs, model=other)
    _, third = house.begin()
    house.free_step(third)
    assert len(house.invited()) == 2
    house.lose(other)
    assert house.dismissed() == [house.invited()[1].sequence]
    house.drafted()
    house.verified()
    assert len(house.invited()) == 3
    house.do(Tick())
    assert house.breaches == []
    assert house.tokens(first) == [3, 4, 5, 6, 7, 8]
