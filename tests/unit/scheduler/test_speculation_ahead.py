"""Drafting while the target verifies: the next round has its draft at once when the guess was right, and a new one otherwise."""

from __future__ import annotations

import pytest

from tests.unit.scheduler.pair import OTHER, Pair


def test_a_draft_made_while_the_target_verifies_is_the_next_rounds_when_all_was_right() -> None:
    house = Pair()
    house.pair(ahead=True)
    house.verifying()
    (order,) = house.drafts()[1]
    assert (order.base + len(order.commit), order.count) == (8, 5)  # from behind the draft, with the target's own token
    house.drafted()
    house.verified()
    assert house.verifies()[1].rows[0].proposed == (9, 10, 11, 12)
    assert (house.stats.ahead, house.stats.ahead_hits) == (2, 1)


def test_a_draft_ahead_that_comes_after_the_answer_is_waited_for_and_not_ordered_again() -> None:
    house = Pair()
    house.pair(ahead=True)
    house.verifying()
    house.verified()
    assert (len(house.drafts()), len(house.verifies())) == (2, 1)
    house.drafted()
    assert house.verifies()[1].rows[0].proposed == (9, 10, 11, 12)


@pytest.mark.parametrize("comes_first", ["draft", "answer"])
def test_a_draft_ahead_of_a_wrong_guess_is_ordered_anew(comes_first: str) -> None:
    house = Pair()
    house.pair(ahead=True)
    house.verifying()
    if comes_first == "draft":
        house.drafted()
    house.verified(num_matched=2)
    (order,) = house.drafts()[2]
    assert (order.base, order.commit.tolist(), order.count) == (6, [OTHER], 4)
    if comes_first == "answer":
        house.drafted(1)  # of no use now
        assert len(house.verifies()) == 1
    house.drafted(2)
    assert house.verifies()[1].rows[0].proposed == (7, 8, 9, 10)
    assert house.stats.ahead_hits == 0


def test_a_draft_ahead_that_misses_the_targets_own_token_is_ordered_anew() -> None:
    house = Pair()
    house.pair(ahead=True)
    house.verifying()
    house.drafted(wrong=True)
    house.verified()
    (order,) = house.drafts()[2]
    assert (order.base + len(order.commit), order.count) == (9, 4)
    house.drafted()
    assert house.verifies()[1].rows[0].proposed == (9, 10, 11, 12)
