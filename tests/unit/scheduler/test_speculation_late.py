"""A late drafter costs its target half a second, and is left alone for a while."""

from __future__ import annotations

import pytest

from runtime.scheduler.speculation import MAX_AWAY_SECONDS, PATIENCE_SECONDS
from tests.unit.scheduler.pair import Pair


def test_a_late_drafter_is_left_alone_until_it_answers() -> None:
    house = Pair()
    house.pair()
    _, sequence = house.drafting()
    assert house.wake_at == house.now + PATIENCE_SECONDS
    house.pass_time(PATIENCE_SECONDS)
    assert house.resumes() == [(sequence,)]
    assert (house.stats.late, house.stats.state) == (1, "away")
    house.free_step(sequence)
    house.pass_time(PATIENCE_SECONDS)
    house.free_step(sequence)
    assert len(house.holds()) == 1  # it still owes an answer
    house.drafted()
    assert house.stats.state == "paired"
    assert house.holds() == [(sequence,)] * 2
    house.held()
    house.drafted()
    house.verified()
    assert house.stats.rounds == 1


def test_an_answer_that_comes_soon_after_the_deadline_brings_it_back_no_sooner_than_that() -> None:
    house = Pair()
    house.pair()
    _, sequence = house.drafting()
    house.pass_time(PATIENCE_SECONDS)
    house.drafted()
    house.free_step(sequence)
    assert (len(house.holds()), house.stats.state) == (1, "away")
    house.pass_time(PATIENCE_SECONDS)
    assert house.stats.state == "paired"
    assert len(house.holds()) == 2


def test_a_drafter_that_is_late_again_and_again_is_left_alone_ever_longer() -> None:
    house = Pair()
    house.pair()
    _, sequence = house.drafting()
    waits = []
    for _ in range(9):
        house.pass_time(PATIENCE_SECONDS)
        assert house.pairing.away_until is not None
        waits.append(house.pairing.away_until - house.now)
        house.drafted(num_tokens=0)  # of no use, and too late
        house.free_step(sequence)
        house.pass_time(waits[-1])
        house.held()
    assert waits == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    assert house.stats.late == 9


def test_a_drafter_that_is_back_and_hangs_at_once_is_late_after_half_a_second_too() -> None:
    house = Pair()
    house.pair()
    _, sequence = house.drafting()
    house.pass_time(PATIENCE_SECONDS)
    house.pass_time(2 * PATIENCE_SECONDS)  # somebody is to look again in half a minute, should no answer come
    house.drafted(num_tokens=0)
    house.held()
    assert len(house.drafts()) == 2
    house.pass_time(PATIENCE_SECONDS)
    assert house.resumes() == [(sequence,)] * 2
    assert house.stats.late == 2


def test_a_drafter_whose_answer_never_comes_is_tried_again_after_half_a_minute() -> None:
    house = Pair()
    house.pair()
    house.drafting()
    house.pass_time(PATIENCE_SECONDS)
    house.pass_time(MAX_AWAY_SECONDS)
    assert house.stats.state == "away"
    house.pass_time(1)
    assert len(house.holds()) == 2


def test_a_slow_drafter_is_given_three_times_what_it_took_lately() -> None:
    house = Pair()
    house.pair()
    house.drafting()
    for _ in range(40):
        house.now += 0.4
        house.drafted()
        house.verified(num_matched=0)
    assert house.stats.late == 0
    (round,) = house.pairing.rounds
    assert round.deadline - house.now == pytest.approx(1.2, abs=0.01)
