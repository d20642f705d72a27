"""Replicas of one model: where a request waits, and when it changes to another."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.errors import ModelNotLoaded, ModelUnavailable
from runtime.protocol.ids import Incarnation, ModelName, RequestId
from runtime.scheduler.request import RequestState
from runtime.scheduler.stimuli import GroupsExchanged, ModelAdded, ModelRemoved, WorkerUp
from tests.unit.scheduler.house import MODEL, House, facts

TWO = ModelName("m#2")


def a_pair(*, slots: int = 2) -> House:
    house = House()
    for name in (MODEL, TWO):
        house.do(ModelAdded(name, slots, group=MODEL))
        house.do(WorkerUp(name, Incarnation(1), facts()))
    return house


def homes(house: House, requests: list[RequestId]) -> list[str]:
    return [house.record(request).replica for request in requests]


def run(house: House, request: RequestId) -> None:
    home = house.record(request).replica
    house.prepared(request, model=home)
    house.prefilled(house.sequence(request), model=home)


def test_a_tenants_requests_stay_together_while_there_is_room_and_then_spread() -> None:
    house = a_pair()
    requests = [house.submit() for _ in range(6)]
    assert homes(house, requests) == [MODEL, MODEL, TWO, TWO, TWO, MODEL]
    assert homes(house, [house.submit("u")]) == [MODEL]


def test_a_replica_without_a_worker_gets_nothing_while_another_has_one() -> None:
    house = a_pair()
    house.lose(TWO)
    assert homes(house, [house.submit(f"{number}") for number in range(6)]) == [MODEL] * 6


def test_running_requests_of_a_lost_replica_go_on_in_the_other() -> None:
    house = a_pair()
    request = house.submit()
    run(house, request)
    house.step(house.sequence(request), num_steps=2)
    house.lose()
    assert homes(house, [request]) == [TWO]
    row = house.rows()[-1]
    assert row.tokens.tolist() == [1, 2, 3, 3, 4]
    house.prefilled(row.sequence, model=TWO)
    house.step(row.sequence, model=TWO)
    assert house.tokens(request) == [3, 4, 5]


def test_with_all_replicas_lost_they_wait_for_the_first_that_comes_back() -> None:
    house = a_pair()
    request = house.submit()
    run(house, request)
    house.lose()
    house.prefilled(house.sequence(request), model=TWO)
    house.lose(TWO)
    assert house.state_of(request) is RequestState.REPLAYING
    house.up(incarnation=2)
    assert request not in house.outcomes


def test_one_lost_for_good_leaves_its_requests_to_the_other_and_the_last_one_ends_them() -> None:
    house = a_pair()
    request, queued = house.submit(), house.submit("u")
    run(house, request)
    house.lose(restarting=False)
    assert homes(house, [request, queued]) == [TWO, TWO]
    house.lose(TWO, restarting=False)
    assert {house.outcomes[each].state for each in (request, queued)} == {"failed"}


def test_other_weights_take_over_only_what_has_not_begun() -> None:
    house = a_pair()
    house.lose(TWO)
    house.do(WorkerUp(TWO, Incarnation(2), facts(fingerprint="other")))
    begun = house.submit()
    run(house, begun)
    house.step(house.sequence(begun))
    fresh = house.submit()
    house.lose()
    assert homes(house, [begun, fresh]) == [MODEL, TWO]
    house.do(ModelRemoved(MODEL, ModelNotLoaded(MODEL, "was unloaded")))
    assert isinstance(house.outcomes[begun].error, ModelNotLoaded)


def test_an_idle_replica_takes_what_waits_at_a_full_one() -> None:
    house = a_pair(slots=1)
    long, short, waiting = house.submit("a"), house.submit("b"), house.submit("c")
    run(house, long)
    run(house, short)
    assert house.record(waiting).replica == MODEL
    house.finish(house.sequence(short), model=TWO)
    assert house.record(waiting).replica == MODEL, "its slot is not free yet"
    house.prepared(waiting)
    house.released(house.sequence(short), model=TWO)
    assert house.record(waiting).replica == TWO
    assert house.state_of(waiting) is RequestState.PREFILLING


def test_a_suspect_stays_where_it_is() -> None:
    house = a_pair()
    request = house.submit()
    run(house, request)
    house.lose()
    house.prefilled(house.sequence(request), model=TWO)
    house.do(WorkerUp(MODEL, Incarnation(2), facts()))
    house.lose(TWO)
    assert house.record(request).replica == TWO
    assert house.state_of(request) is RequestState.REPLAYING


def test_a_suspect_whose_replica_gets_no_worker_any_more_is_told() -> None:
    """It may not end the other replica's worker, and must not wait for one that never comes."""
    house = a_pair()
    request = house.submit()
    run(house, request)
    house.lose()
    house.prefilled(house.sequence(request), model=TWO)
    house.do(WorkerUp(MODEL, Incarnation(2), facts()))
    house.lose(TWO, restarting=False)
    assert house.outcomes[request].state == "failed"
    assert house.state.book.requests == {}


def test_unloading_one_replica_keeps_the_others_name() -> None:
    house = a_pair()
    house.do(ModelRemoved(MODEL, ModelNotLoaded(MODEL, "was unloaded")))
    assert homes(house, [house.submit()]) == [TWO]
    house.do(ModelRemoved(TWO, ModelNotLoaded(TWO, "was unloaded")))
    with pytest.raises(ModelNotLoaded):
        house.submit()


def test_all_replicas_unavailable_is_told() -> None:
    house = a_pair()
    for name in (MODEL, TWO):
        house.lose(name, restarting=False)
    with pytest.raises(ModelUnavailable):
        house.submit()


@given(seed=st.integers(0, 2**32))
@settings(max_examples=60)
def test_however_replicas_come_and_go_no_request_is_lost(seed: int) -> None:
    chance = random.Random(seed)
    house = a_pair()
    incarnations = {MODEL: 1, TWO: 1}
    alive = {MODEL: True, TWO: True}
    requests: list[RequestId] = []
    for _ in range(60):
        name = chance.choice([MODEL, TWO])
        match chance.randrange(6):
            case 0 | 1:
                requests.append(house.submit(chance.choice("abc"), max_tokens=4000))
            case 2:
                if alive[name]:
                    house.lose(name, incarnation=incarnations[name])
                    alive[name] = False
            case 3:
                if not alive[name]:
                    incarnations[name] += 1
                    house.do(WorkerUp(name, Incarnation(incarnations[name]), facts()))
                    alive[name] = True
            case _:
                if alive[name]:
                    model = house.state.book.models[name]
                    for request in list(model.preparing):
                        house.prepared(request, model=name, incarnation=incarnations[name])
                    for sequence in list(model.sequences):
                        house.step(sequence, num_steps=20, model=name, incarnation=incarnations[name])
    for request in requests:
        if request not in house.outcomes:
            tokens = house.tokens(request)
            assert tokens == list(range(3, 3 + len(tokens)))


# -- other weights under the same name ----------------------------------------------------------------------

NEXT = ModelName("m#1.2")


def a_swap() -> House:
    house = House()
    for name in (MODEL, NEXT):
        house.do(ModelAdded(name, 2, group=name))
        house.do(WorkerUp(name, Incarnation(1), facts()))
    return house


def test_after_an_exchange_new_requests_go_to_the_other_and_old_ones_stay() -> None:
    house = a_swap()
    old = [house.submit(f"{number}") for number in range(4)]
    house.do(GroupsExchanged(MODEL, NEXT))
    new = [house.submit(f"{number}") for number in range(4)]
    assert homes(house, [*old, *new]) == [MODEL] * 4 + [NEXT] * 4
    house.state.validate()


def test_requests_of_the_old_weights_never_move_to_the_new() -> None:
    house = a_swap()
    old = house.submit()
    house.do(GroupsExchanged(MODEL, NEXT))
    house.lose(MODEL)
    assert homes(house, [old]) == [MODEL]
    house.do(ModelRemoved(MODEL, ModelNotLoaded(MODEL, "was swapped")))
    assert house.state.book.groups == {MODEL: [NEXT]}
    house.state.validate()


def test_exchanging_twice_changes_nothing() -> None:
    house = a_swap()
    for _ in range(2):
        house.do(GroupsExchanged(MODEL, NEXT))
    assert homes(house, [house.submit()]) == [MODEL]
    house.state.validate()


def test_an_exchange_with_nothing_leaves_no_empty_group() -> None:
    house = a_swap()
    house.do(ModelRemoved(NEXT, ModelNotLoaded(NEXT, "was unloaded")))
    house.do(GroupsExchanged(ModelName("else"), NEXT))
    assert house.state.book.groups == {MODEL: [MODEL]}
    house.state.validate()
