"""How far a sequence may run ahead of its client."""

from __future__ import annotations

import pytest

from runtime.config import Settings
from runtime.protocol.commands import Grant
from runtime.protocol.ids import RequestId
from runtime.scheduler.request import SequenceState
from runtime.scheduler.stimuli import Read, Unwindow
from tests.unit.scheduler.house import House

WINDOW = 16


@pytest.fixture
def house() -> House:
    made = House(Settings(stream_window_tokens=WINDOW))
    made.up()
    return made


def test_a_windowed_sequence_starts_with_one_window_and_an_awaited_one_with_all(house: House) -> None:
    house.start(max_tokens=100, windowed=True)
    house.start(max_tokens=100, windowed=False)
    house.start(max_tokens=5, windowed=True)
    assert [row.limit for row in house.rows()] == [3 + WINDOW, 103, 8]


def test_an_unread_sequence_parks_at_its_limit_and_goes_on_when_read(house: House) -> None:
    request, sequence = house.start(max_tokens=100, windowed=True)
    house.step(sequence, num_steps=WINDOW)
    (state,) = (each.state for each in house.record(request).sequences)
    assert state is SequenceState.PARKED
    house.read(request, 1)
    assert house.limits() == [(sequence, 3 + 1 + WINDOW)]
    (state,) = (each.state for each in house.record(request).sequences)
    assert state is SequenceState.DECODING


def test_a_running_sequence_is_granted_more_only_once_a_quarter_of_the_window_is_read(house: House) -> None:
    request, sequence = house.start(max_tokens=100, windowed=True)
    house.step(sequence, num_steps=8)
    house.read(request, 3)
    house.step(sequence)
    assert house.limits() == []
    house.read(request, 4)
    house.step(sequence)
    assert house.limits() == [(sequence, 3 + 4 + WINDOW)]


def test_grants_for_many_sequences_travel_in_one_command(house: House) -> None:
    started = [house.start(max_tokens=100, windowed=True) for _ in range(3)]
    rows = [sequence for _, sequence in started]
    house.step(*rows, num_steps=8)
    for request, _ in started:
        house.read(request, 8)
    assert house.commands(Grant) == []  # the next step is on its way; they go with it
    house.step(*rows)
    (grant,) = house.commands(Grant)
    assert dict(grant.limits) == dict.fromkeys(rows, 3 + 8 + WINDOW)


def test_a_sequence_that_ends_is_granted_nothing_more(house: House) -> None:
    request, sequence = house.start(max_tokens=100, windowed=True)
    house.step(sequence, num_steps=8)
    house.read(request, 8)
    house.finish(sequence)
    assert house.limits() == []


def test_a_grant_never_goes_beyond_the_sequences_end_nor_back(house: House) -> None:
    request, sequence = house.start(max_tokens=20, windowed=True)
    house.step(sequence, num_steps=10)
    house.read(request, 10)
    house.step(sequence)
    assert house.limits() == [(sequence, 23)]
    house.read(request, 2)
    house.read(request, 10_000)
    house.step(sequence)
    assert house.limits() == [(sequence, 23)]


def test_awaiting_the_completion_frees_all_sequences_at_once_also_those_without_a_slot(house: House) -> None:
    request = house.submit(num_sequences=6, max_tokens=100, windowed=True)
    house.prepared(request)
    first = [house.sequence(request, number) for number in range(4)]
    house.prefilled(*first)
    house.do(Unwindow(request))
    assert house.limits() == [(sequence, 103) for sequence in first]
    house.end(first[0])
    assert house.rows()[-1].limit == 103


def test_words_about_unknown_or_ended_requests_and_numbers_are_ignored(house: House) -> None:
    request, sequence = house.start(max_tokens=100, windowed=True)
    assert house.do(Read(request, 5, 3)) == []
    assert house.do(Read(RequestId(99), 0, 3)) == []
    assert house.do(Unwindow(RequestId(99))) == []
    house.end(sequence)
    assert house.do(Read(request, 0, 3)) == []


def test_a_window_of_one_token_moves_with_every_token_read() -> None:
    house = House(Settings(stream_window_tokens=1))
    house.up()
    request, sequence = house.start(max_tokens=4, windowed=True)
    for count in range(1, 4):
        house.step(sequence)
        house.read(request, count)
    assert [limit for _, limit in house.limits()] == [5, 6, 7]
