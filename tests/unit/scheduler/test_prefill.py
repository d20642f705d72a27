"""How rows are grouped for prefilling."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from runtime.config import Settings
from runtime.protocol.commands import Prefill
from runtime.scheduler.prefill import MAX_BATCHES, are_alike, plan_batches
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


def test_a_request_that_comes_during_a_prefill_waits_for_a_free_batch_and_joins_others_like_it() -> None:
    house = House(Settings(prefill_batch_tokens=1000))
    house.up(slots=8)
    requests = [house.submit() for _ in range(6)]
    for request in requests:
        house.prepared(request)
    assert [len(command.rows) for command in house.commands(Prefill)] == [1, 1]
    house.prefilled(house.sequence(requests[0]))
    assert [len(command.rows) for command in house.commands(Prefill)] == [1, 1, 4]


def test_a_batch_whose_rows_were_all_cancelled_makes_room_for_the_next() -> None:
    house = House()
    house.up(slots=8)
    requests = [house.submit() for _ in range(3)]
    for request in requests:
        house.prepared(request)
    house.cancel(requests[0])
    assert len(house.commands(Prefill)) == 3
