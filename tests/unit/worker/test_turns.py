"""Who goes next on the device: classes before age, age within a class, and nobody starves."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from runtime.worker.turns import MAX_OVERTAKES, Waiter, must_yield, next_waiter

WAITERS = st.lists(st.builds(Waiter, st.integers(0, 9), st.integers(0, 63), st.booleans()), unique_by=lambda waiter: waiter.seat)


def interactive(since: int, seat: int = 0) -> Waiter:
    return Waiter(since, seat, is_background=False)


def background(since: int, seat: int = 1) -> Waiter:
    return Waiter(since, seat, is_background=True)


def test_an_interactive_worker_goes_before_a_background_one_that_has_waited_longer() -> None:
    assert next_waiter([background(1), interactive(2)], 0) == interactive(2)


def test_within_a_class_the_longest_wait_goes_first() -> None:
    assert next_waiter([interactive(3, 3), interactive(1, 1), interactive(2, 2)], 0) == interactive(1, 1)
    assert next_waiter([background(3, 3), background(2, 2)], 0) == background(2, 2)


def test_background_work_has_its_turn_after_so_many_overtakes() -> None:
    assert next_waiter([background(9), interactive(1)], MAX_OVERTAKES - 1) == interactive(1)
    assert next_waiter([background(9), interactive(1)], MAX_OVERTAKES) == background(9)


@given(WAITERS, st.integers(0, 2 * MAX_OVERTAKES))
def test_a_free_slot_is_somebodys_whenever_anybody_waits(waiters: list[Waiter], num_overtakes: int) -> None:
    following = next_waiter(waiters, num_overtakes)
    assert (following in waiters) if waiters else (following is None)


def test_an_interactive_holder_keeps_its_slot_while_only_background_work_waits_and_may_be_overtaken() -> None:
    assert not must_yield([background(1)], MAX_OVERTAKES - 1, is_background=False)
    assert must_yield([background(1)], MAX_OVERTAKES, is_background=False)
    assert must_yield([background(1), interactive(2)], 0, is_background=False)


def test_a_background_holder_yields_to_everybody() -> None:
    assert must_yield([background(1)], 0, is_background=True)
    assert must_yield([interactive(1)], 0, is_background=True)


@given(st.integers(0, 9), st.booleans())
def test_a_holder_whom_nobody_waits_for_goes_on(num_overtakes: int, is_background: bool) -> None:
    assert not must_yield([], num_overtakes, is_background=is_background)


@given(st.lists(st.booleans(), min_size=2, max_size=6))
def test_when_all_want_the_device_always_shares_follow_classes_and_nobody_starves(are_background: list[bool]) -> None:
    """Everybody comes back the moment his step is over."""
    num_turns = 400
    turns = [0] * len(are_background)
    since = {seat: seat for seat in range(len(are_background))}
    num_overtakes = 0
    last_background = clock = len(are_background)
    for _ in range(num_turns):
        clock += 1
        waiters = [Waiter(since[seat], seat, is_background) for seat, is_background in enumerate(are_background)]
        following = next_waiter(waiters, num_overtakes)
        assert following is not None
        num_overtakes = 0 if following.is_background else num_overtakes + 1
        last_background = clock if following.is_background else last_background
        assert not any(are_background) or clock - last_background <= MAX_OVERTAKES
        turns[following.seat] += 1
        since[following.seat] = clock
    for kind in (True, False):
        mine = [num for num, is_background in zip(turns, are_background, strict=True) if is_background is kind]
        assert not mine or max(mine) - min(mine) <= 1
        if mine and len(mine) < len(turns):
            share = sum(mine) / num_turns
            assert abs(share - (1 if kind else MAX_OVERTAKES) / (MAX_OVERTAKES + 1)) < 0.02
