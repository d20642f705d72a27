"""How rows are grouped for prefilling."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from runtime.config import Settings
from runtime.protocol.commands import Prefill
from runtime.scheduler.prefill import COLLECT_SECONDS, MAX_BATCHES, are_alike, is_room, plan_batches
from runtime.scheduler.stimuli import Tick
from tests.unit.scheduler.house import House


def test_rows_of_like_length_share_a_batch_and_others_do_not() -> None:
    assert plan_batches([100, 2000, 120, 1800], [], 8192) == [[0, 2], [1, 3]]


def test_short_rows_are_alike_whatever_their_ratio() -> None:
    assert plan_batches([1, 60, 30], [], 4096) == [[0, 1, 2]]


def test_a_batch_stays_within_the_budget_counting_its_padding() -> None:
    assert plan_batches([100, 100, 100, 100], [], 300) == [[0, 1, 2], [3]]
    assert plan_batches([100, 160, 100], [], 300) == [[0, 2], [1]]


def test_a_row_beyond_the_budget_goes_alone() -> None:
    assert plan_batches([500, 500, 90], [], 300) == [[0], [2]]


def test_a_second_oversize_row_waits_for_the_first_and_lets_others_pass() -> None:
    assert plan_batches([500, 90], [600], 300) == [[1]]
    assert plan_batches([500], [600], 300) == []
    assert plan_batches([500], [200], 300) == [[0]]


def test_no_more_batches_than_the_worker_may_have_under_way() -> None:
    lengths = [100, 1000, 3000]
    assert len(plan_batches(lengths, [], 4096)) == MAX_BATCHES
    assert len(plan_batches(lengths, [100], 4096)) == MAX_BATCHES - 1
    assert plan_batches(lengths, [100] * MAX_BATCHES, 4096) == []


@given(
    st.lists(st.integers(1, 5000), max_size=40),
    st.lists(st.integers(1, 6000), max_size=MAX_BATCHES),
    st.integers(1, 4096),
)
def test_whatever_the_lengths_each_batch_is_alike_and_within_budget(lengths: list[int], under_way: list[int], budget: int) -> None:
    batches = plan_batches(lengths, under_way, budget)
    rows = [row for batch in batches for row in batch]
    assert len(rows) == len(set(rows))
    assert len(batches) + len(under_way) <= MAX_BATCHES
    for batch in batches:
        longest, shortest = max(lengths[row] for row in batch), min(lengths[row] for row in batch)
        assert are_alike(shortest, longest)
        assert len(batch) == 1 or longest * len(batch) <= budget
    oversize = sum(padded > budget for padded in under_way) + sum(lengths[batch[0]] > budget for batch in batches)
    assert oversize <= max(1, sum(padded > budget for padded in under_way))
    if lengths and len(under_way) < MAX_BATCHES and not any(padded > budget for padded in under_way):
        assert batches[0][0] == 0, "who is first in order is never passed over"


def test_another_batch_goes_beside_a_long_one_but_waits_for_one_of_a_single_chunk() -> None:
    assert is_room([], 512)
    assert is_room([513], 512)
    assert not is_room([512], 512)
    assert not is_room([5000, 300], 512)
    assert not is_room([5000] * MAX_BATCHES, 512)


def test_requests_that_come_together_are_prefilled_together() -> None:
    house = House()
    house.up(slots=8)
    requests = [house.submit() for _ in range(6)]
    for request in requests[:-1]:
        house.prepared(request)
    assert house.commands(Prefill) == [], "the sixth is on its way"
    house.prepared(requests[-1])
    assert [len(command.rows) for command in house.commands(Prefill)] == [6]


def test_a_request_alone_is_prefilled_at_once() -> None:
    house = House()
    house.up(slots=8)
    house.prepared(house.submit())
    assert [len(command.rows) for command in house.commands(Prefill)] == [1]


def test_nobody_waits_longer_than_a_moment_for_a_request_that_is_hard_to_prepare() -> None:
    house = House()
    house.up(slots=8)
    house.submit()
    house.prepared(house.submit())
    assert house.wake_at == house.now + COLLECT_SECONDS
    house.now += COLLECT_SECONDS
    house.do(Tick())
    assert [len(command.rows) for command in house.commands(Prefill)] == [1]
    assert house.state.book.wake_at is None, "nothing is left to wake up for"


def test_nobody_waits_for_requests_that_no_slot_would_be_free_for() -> None:
    house = House()
    house.up(slots=1)
    house.submit()
    house.prepared(house.submit())
    assert [len(command.rows) for command in house.commands(Prefill)] == [1]


def test_waiting_rows_start_once_the_request_they_waited_for_is_cancelled() -> None:
    house = House()
    house.up(slots=8)
    slow = house.submit()
    house.prepared(house.submit())
    house.cancel(slow)
    assert [len(command.rows) for command in house.commands(Prefill)] == [1]


def test_a_worker_lost_while_rows_wait_for_others_leaves_no_wake_up_behind() -> None:
    house = House()
    house.up(slots=8)
    house.submit()
    house.prepared(house.submit())
    house.lose()
    house.now += COLLECT_SECONDS
    house.do(Tick())
    assert house.commands(Prefill) == []
    assert house.state.book.wake_at is None


def test_requests_that_come_during_a_short_prefill_join_each_other() -> None:
    house = House()
    house.up(slots=8)
    first = house.submit()
    house.prepared(first)
    for _ in range(3):
        house.prepared(house.submit())
    assert [len(command.rows) for command in house.commands(Prefill)] == [1]
    house.prefilled(house.sequence(first))
    assert [len(command.rows) for command in house.commands(Prefill)] == [1, 3]


def test_a_request_that_comes_during_a_long_prefill_is_not_kept_waiting_by_it() -> None:
    house = House(Settings(prefill_chunk_tokens=100))
    house.up(slots=8)
    house.prepared(house.submit(prompt_length=1000))
    house.prepared(house.submit(prompt_length=10))
    assert [len(command.rows) for command in house.commands(Prefill)] == [1, 1]


def test_a_batch_whose_rows_were_all_cancelled_makes_room_for_the_next() -> None:
    house = House()
    house.up(slots=8)
    first = house.submit()
    house.prepared(first)
    house.prepared(house.submit())
    assert len(house.commands(Prefill)) == 1
    house.cancel(first)
    assert len(house.commands(Prefill)) == 2
