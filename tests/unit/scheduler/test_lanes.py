"""Two cohorts that take turns: when they are tried, when they stay, and how they share the drafter and the target."""

from __future__ import annotations

import pytest

from runtime.scheduler.lanes import FIRST_DISTANCE, HOPELESS_ROUNDS, TRIAL_ROUNDS, Lanes
from tests.unit.scheduler.pair import Pair


def _play(lanes: Lanes, num_rounds: int, *, num_rows: int, seconds: dict[int, float], promise: float = 0.3) -> list[int]:
    chosen = []
    for _ in range(num_rounds):
        num_lanes = lanes.choose(num_rows)
        chosen.append(num_lanes)
        lanes.note(num_rows, num_lanes, num_rows // num_lanes, seconds[num_lanes] / num_lanes, promise)
    return chosen


def test_two_lanes_are_tried_after_a_while_and_stay_where_they_are_faster() -> None:
    chosen = _play(Lanes(), 200, num_rows=8, seconds={1: 1.0, 2: 0.8})
    assert chosen[:FIRST_DISTANCE] == [1] * FIRST_DISTANCE
    assert chosen[FIRST_DISTANCE : FIRST_DISTANCE + TRIAL_ROUNDS] == [2] * TRIAL_ROUNDS
    assert chosen.count(2) > 140
    assert 1 in chosen[FIRST_DISTANCE + TRIAL_ROUNDS :], "one lane is never tried again"


def test_they_are_tried_ever_more_rarely_where_they_are_slower() -> None:
    chosen = _play(Lanes(), 2000, num_rows=8, seconds={1: 0.8, 2: 1.0})
    assert 0 < chosen.count(2) <= 6 * TRIAL_ROUNDS


@pytest.mark.parametrize(("num_rows", "promise"), [(3, 0.4), (8, 0.02)])
def test_few_rows_and_small_promises_stay_in_one_lane(num_rows: int, promise: float) -> None:
    chosen = _play(Lanes(), 300, num_rows=num_rows, seconds={1: 1.0, 2: 0.1}, promise=promise)
    assert set(chosen) == {1}


def test_a_trial_that_is_far_slower_ends_early() -> None:
    chosen = _play(Lanes(), FIRST_DISTANCE + 10, num_rows=8, seconds={1: 0.5, 2: 1.0})
    assert chosen.count(2) == HOPELESS_ROUNDS


def test_in_two_lanes_one_half_verifies_while_the_other_drafts() -> None:
    house = Pair()
    house.pair(ahead=None)
    house.pairing.lanes.choose = lambda num_rows: 2  # type: ignore[method-assign]
    sequences = [house.start(max_tokens=200)[1] for _ in range(4)]
    house.free_step(*sequences)
    house.greet()
    house.held()
    assert [len(rows) for rows in house.drafts()] == [2, 2]
    house.drafted(0)
    house.drafted(1)
    assert [len(verify.rows) for verify in house.verifies()] == [2], "the second half waits for its turn"
    for turn in range(1, 7):
        house.verified()
        assert len(house.verifies()) == turn + 1, "whose draft is there goes next, at once"
        assert len(house.drafts()) == turn + 2, "and the other half is drafted for meanwhile"
        now, before = ({row.sequence for row in verify.rows} for verify in house.verifies()[-1:-3:-1])
        assert not now & before
        house.drafted()
    assert house.stats.rounds == 6
    assert house.stats.ahead == 0
    (controller,) = house.stats.controller
    assert controller.num_rounds == 3  # told once for each turn of both


def test_a_member_that_leaves_either_lane_is_missed_by_nobody() -> None:
    house = Pair()
    house.pair(ahead=None)
    house.pairing.lanes.choose = lambda num_rows: 2  # type: ignore[method-assign]
    started = [house.start(max_tokens=200) for _ in range(4)]
    house.free_step(*[sequence for _, sequence in started])
    house.greet()
    house.held()
    house.drafted(0)
    house.drafted(1)
    first = {row.sequence for row in house.verifies()[0].rows}
    for request, sequence in started:
        if sequence in first:
            house.cancel(request)  # the whole half that is being verified
    assert len(house.verifies()) == 2
    house.verified()
    assert house.stats.rounds == 1
