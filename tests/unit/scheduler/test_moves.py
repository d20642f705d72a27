"""The tables of allowed moves, walked: every state meets every stimulus, and no move outside the tables is possible."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest

from runtime.config import Settings, TenantSpec
from runtime.errors import ModelNotLoaded
from runtime.protocol.events import Prefilled, Prepared, Refused, Released, StepDone, StepRow
from runtime.protocol.ids import Incarnation, RequestId, SequenceId, TenantId
from runtime.protocol.tokens import TokenIds
from runtime.scheduler.request import (
    ENDED,
    REQUEST_MOVES,
    SEQUENCE_MOVES,
    IllegalMove,
    RequestRecord,
    RequestState,
    Sequence,
    SequenceState,
    move_request,
    move_sequence,
    sequence_seed,
)
from runtime.scheduler.stimuli import (
    Cancel,
    ModelAdded,
    ModelRemoved,
    Read,
    Stimulus,
    TenantSet,
    Tick,
    Unwindow,
    WorkerLost,
    WorkerSaid,
    WorkerUp,
)
from tests.unit.scheduler.house import MODEL, House, crash, facts

ME, MINE = RequestId(1), SequenceId(1)


def a_record() -> RequestRecord:
    house = House()
    house.up()
    return house.record(house.submit())


@pytest.mark.parametrize(("start", "to"), list(product(RequestState, RequestState)))
def test_a_request_moves_only_as_its_table_allows(start: RequestState, to: RequestState) -> None:
    record = a_record()
    record.state = start
    if to in REQUEST_MOVES[start]:
        move_request(record, to)
        assert record.state is to
    else:
        with pytest.raises(IllegalMove, match=f"{start.name} to {to.name}"):
            move_request(record, to)
        assert record.state is start


@pytest.mark.parametrize(("start", "to"), list(product(SequenceState, SequenceState)))
def test_a_sequence_moves_only_as_its_table_allows(start: SequenceState, to: SequenceState) -> None:
    sequence = Sequence(SequenceId(1), 0, a_record(), prompt_length=1, max_length=2, state=start)
    if to in SEQUENCE_MOVES[start]:
        move_sequence(sequence, to)
        assert sequence.state is to
    else:
        with pytest.raises(IllegalMove, match=f"{start.name} to {to.name}"):
            move_sequence(sequence, to)
        assert sequence.state is start


def test_both_tables_name_every_state_and_an_ended_one_has_no_way_out() -> None:
    assert set(REQUEST_MOVES) == set(RequestState)
    assert set(SEQUENCE_MOVES) == set(SequenceState)
    assert {state for state, moves in REQUEST_MOVES.items() if not moves} == ENDED
    assert SEQUENCE_MOVES[SequenceState.RELEASED] == frozenset()


# -- every state × every stimulus ---------------------------------------------------------------------------------------


def queued() -> House:
    house = House()
    house.add()
    house.submit(windowed=True, deadline_seconds=5.0)
    return house


def preparing() -> House:
    house = queued()
    house.up()
    return house


def prepared_without_a_slot() -> House:
    house = House()
    house.up(slots=1)
    mine = house.submit(windowed=True, deadline_seconds=5.0)
    house.prepared(house.submit("other"))
    house.prepared(mine)
    return house


def prefilling() -> House:
    house = preparing()
    house.prepared(ME)
    return house


def decoding() -> House:
    house = prefilling()
    house.step(MINE)
    return house


def parked() -> House:
    house = House(Settings(stream_window_tokens=1))
    house.up()
    house.submit(windowed=True, deadline_seconds=5.0)
    house.prepared(ME)
    house.step(MINE)
    return house


def finished() -> House:
    house = decoding()
    house.finish(MINE)
    return house


def cancelled_while_preparing() -> House:
    house = preparing()
    house.cancel(ME)
    return house


def cancelled_while_decoding() -> House:
    house = decoding()
    house.cancel(ME)
    return house


def breached() -> House:
    house = decoding()
    house.say(StepDone(1, (StepRow(MINE, 99, (1,), "x"),)))
    return house


def lost() -> House:
    house = decoding()
    house.lose()
    return house


def coming_back() -> House:
    house = lost()
    house.up(incarnation=2)
    return house


def suspected() -> House:
    house = coming_back()
    house.lose(incarnation=2)
    house.lose(incarnation=3)
    house.submit("other")
    return house


def unavailable() -> House:
    house = decoding()
    house.lose(restarting=False)
    return house


def removed() -> House:
    house = decoding()
    house.do(ModelRemoved(MODEL, ModelNotLoaded(MODEL, "was unloaded")))
    return house


STATES = [
    queued,
    preparing,
    prepared_without_a_slot,
    prefilling,
    decoding,
    parked,
    finished,
    cancelled_while_preparing,
    cancelled_while_decoding,
    breached,
    lost,
    coming_back,
    suspected,
    unavailable,
    removed,
]

FIRST, SECOND = Incarnation(1), Incarnation(2)

STIMULI: dict[str, Stimulus] = {
    "cancel": Cancel(ME),
    "read": Read(ME, 0, 1),
    "unwindow": Unwindow(ME),
    "tenant": TenantSet(TenantId("t"), TenantSpec(weight=2.0, max_running=1)),
    "added": ModelAdded(MODEL, 2),
    "up": WorkerUp(MODEL, FIRST, facts()),
    "up again": WorkerUp(MODEL, SECOND, facts()),
    "lost": WorkerLost(MODEL, FIRST, crash(), None, True),
    "lost for good": WorkerLost(MODEL, FIRST, crash(), None, False),
    "removed": ModelRemoved(MODEL, ModelNotLoaded(MODEL, "was unloaded")),
    "tick": Tick(),
    "prepared": WorkerSaid(MODEL, FIRST, Prepared(ME, TokenIds([1, 2, 3]))),
    "prefilled": WorkerSaid(MODEL, FIRST, Prefilled(((MINE, 3),), 0.1)),
    "stepped": WorkerSaid(MODEL, FIRST, StepDone(1, (StepRow(MINE, 3, (3,), "<3>"),))),
    "stepped on": WorkerSaid(MODEL, FIRST, StepDone(2, (StepRow(MINE, 4, (4,), "<4>"),))),
    "ended": WorkerSaid(MODEL, FIRST, StepDone(2, (StepRow(MINE, 4, (), "", "stop"),))),
    "released": WorkerSaid(MODEL, FIRST, Released((ME,), (MINE,), 1)),
    "refused": WorkerSaid(MODEL, FIRST, Refused("prefill", "generation_failed", "no", (ME,), (MINE,))),
}


@pytest.mark.parametrize("stimulus", list(STIMULI.values()), ids=list(STIMULI))
@pytest.mark.parametrize("make", STATES, ids=lambda make: make.__name__)
def test_every_stimulus_in_every_state_leaves_the_books_right(make: Callable[[], House], stimulus: Stimulus) -> None:
    house = make()
    house.now += 10.0
    for _ in range(2):
        house.do(stimulus)  # recounts everything
    # and however it stands now, the house can be emptied and used again
    house.cancel(ME)
    house.lose(incarnation=9, restarting=False)
    assert ME in house.outcomes
    assert house.state.book.requests == {}
    house.do(ModelAdded(MODEL, 4))
    house.up(incarnation=10)
    fresh = house.submit()
    assert house.asked_to_prepare()[-1] == fresh


def test_the_seeds_of_a_requests_sequences_are_its_own_and_64_bits_wide() -> None:
    seeds = [sequence_seed(2**64 - 1, number) for number in range(100)]
    assert seeds[0] == 2**64 - 1
    assert len(set(seeds)) == 100
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert sequence_seed(1, 1) != sequence_seed(2, 1)


def test_the_seeds_of_a_requests_sequences_never_change() -> None:
    assert [sequence_seed(7, number) for number in range(3)] == [7, 5708063901715498715, 9274303859626485010]
