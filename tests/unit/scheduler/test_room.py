"""When a worker holds more tokens than there is memory for, the least urgent and newest leave, and come back later."""

from __future__ import annotations

from typing import Any

from runtime.config import Settings
from runtime.protocol.ids import RequestId, SequenceId
from runtime.scheduler.request import RequestState, SequenceState
from runtime.scheduler.room import HEADROOM_TOKENS, victims
from runtime.scheduler.stimuli import MemorySet
from tests.unit.scheduler.house import MODEL, House


def a_house(max_tokens: int | None, *, slots: int = 4, **settings: Any) -> House:
    house = House(Settings(**settings))
    house.up(slots=slots)
    house.do(MemorySet(MODEL, max_tokens))
    return house


def start(house: House, **options: Any) -> tuple[RequestId, SequenceId]:
    house.now += 1.0
    return house.start(max_tokens=200, **options)


def states(house: House, *requests: RequestId) -> list[SequenceState]:
    return [house.record(request).sequences[0].state for request in requests]


def test_who_does_not_fit_waits_for_room_and_whoever_is_alone_always_fits() -> None:
    house = a_house(100)
    first, sequence = start(house, prompt_length=300)
    second = house.submit(prompt_length=10)
    house.prepared(second)
    assert states(house, first, second) == [SequenceState.DECODING, SequenceState.WAITING]
    house.end(sequence)
    assert states(house, second) == [SequenceState.PREFILLING]


def test_a_row_starts_only_where_there_is_room_to_go_on_for_a_while() -> None:
    house = a_house(100)
    start(house, prompt_length=20)
    requests = [house.submit(prompt_length=100 - 20 - HEADROOM_TOKENS + beyond, max_tokens=200) for beyond in (1, 0)]
    house.prepared(requests[0])
    assert states(house, requests[0]) == [SequenceState.WAITING]
    house.cancel(requests[0])
    house.prepared(requests[1])
    assert states(house, requests[1]) == [SequenceState.PREFILLING]


def test_nobody_overtakes_the_next_in_the_line_by_being_small() -> None:
    house = a_house(100)
    start(house, prompt_length=30)
    big, small = house.submit(prompt_length=200), house.submit(prompt_length=3, max_tokens=1)
    house.prepared(big)
    house.prepared(small)
    assert states(house, big, small) == [SequenceState.WAITING, SequenceState.WAITING]


def test_background_leaves_before_interactive_and_the_newest_before_older_ones() -> None:
    house = a_house(None)
    made = [start(house, priority=priority) for priority in ("interactive", "background", "background", "interactive")]
    sequences = [house.record(request).sequences[0] for request, _ in made]
    order = [sequences.index(each) for each in victims(sequences, 10**6)]
    assert order == [2, 1, 3], "and never the last"


def test_whoever_waits_for_its_client_leaves_before_anybody_else() -> None:
    house = a_house(None, stream_window_tokens=2)
    slow, parked = start(house, prompt_length=10, windowed=True)
    house.step(parked, num_steps=2)
    urgent, _ = start(house, prompt_length=10)
    house.do(MemorySet(MODEL, 15))
    assert states(house, slow, urgent) == [SequenceState.LEAVING, SequenceState.DECODING]


def test_a_slow_client_keeps_nobody_waiting_for_its_memory() -> None:
    house = a_house(100, stream_window_tokens=2)
    slow, parked = start(house, prompt_length=60, windowed=True)
    house.step(parked, num_steps=2)
    waiting = house.submit("u", prompt_length=50, max_tokens=200)
    house.prepared(waiting)
    assert states(house, slow, waiting) == [SequenceState.LEAVING, SequenceState.WAITING]
    house.released(parked)
    assert states(house, slow, waiting) == [SequenceState.WAITING, SequenceState.PREFILLING]
    house.end(house.sequence(waiting))
    assert states(house, slow) == [SequenceState.WAITING], "until its client reads"
    house.read(slow, 2)
    assert states(house, slow) == [SequenceState.PREFILLING]


def test_no_more_leave_than_must() -> None:
    house = a_house(None)
    made = [start(house, prompt_length=10) for _ in range(4)]
    sequences = [house.record(request).sequences[0] for request, _ in made]
    assert victims(sequences, 0) == []
    assert len(victims(sequences, 10)) == 1
    assert len(victims(sequences, 11)) == 2


def test_the_preempted_comes_back_where_its_stream_stands_under_a_new_id() -> None:
    house = a_house(None)
    old, one = start(house, prompt_length=10)
    new, two = start(house, prompt_length=10)
    house.step(one, two, num_steps=3)
    house.do(MemorySet(MODEL, 20))
    assert house.told_to_release()[1] == [two]
    assert states(house, old, new) == [SequenceState.DECODING, SequenceState.LEAVING]
    house.step(one, two)  # of the second this comes too late, and is drawn again
    assert house.tokens(new) == [10, 11, 12]
    house.released(two)
    assert states(house, new) == [SequenceState.WAITING]
    house.do(MemorySet(MODEL, None))
    row = house.rows()[-1]
    assert row.sequence not in (one, two)
    assert row.tokens.tolist()[-3:] == [10, 11, 12]
    house.released(two)  # said again, about nobody
    house.prefilled(row.sequence)
    house.step(row.sequence)
    assert house.tokens(new) == [10, 11, 12, 13]
    assert house.state.book.num_preempted == 1


def test_growing_beyond_the_room_makes_one_leave_and_its_end_lets_it_come_back() -> None:
    house = a_house(200)
    old, one = start(house, prompt_length=30)
    new, two = start(house, prompt_length=30)
    house.step(one, two, num_steps=70)
    assert states(house, old, new) == [SequenceState.DECODING, SequenceState.DECODING]
    house.step(one, two)
    assert states(house, old, new) == [SequenceState.DECODING, SequenceState.LEAVING]
    house.released(two)
    assert states(house, new) == [SequenceState.WAITING]
    house.end(one)
    assert states(house, new) == [SequenceState.PREFILLING]


def test_one_cancelled_while_it_leaves_is_gone_when_the_worker_confirms() -> None:
    house = a_house(None)
    start(house)
    request, two = start(house)
    house.do(MemorySet(MODEL, 1))
    house.cancel(request)
    assert house.outcomes[request].state == "cancelled"
    assert house.told_to_release()[1] == [two]
    house.released(two)
    assert request not in house.state.book.requests


def test_one_whose_worker_dies_while_it_leaves_comes_back_in_the_next() -> None:
    house = a_house(None)
    start(house)
    request, _ = start(house)
    house.do(MemorySet(MODEL, 1))
    house.lose()
    assert house.state_of(request) is RequestState.REPLAYING
    house.do(MemorySet(MODEL, None))
    house.up(incarnation=2)
    assert states(house, request) == [SequenceState.PREFILLING]


def test_memory_said_of_an_unknown_model_changes_nothing() -> None:
    house = House()
    house.do(MemorySet(MODEL, 5))
    assert house.state.book.models == {}
