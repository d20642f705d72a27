"""Shares between tenants, order within a tenant."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.config import Settings
from runtime.protocol.ids import ModelName, RequestId, SequenceId
from runtime.scheduler.fairness import MAX_OVERTAKES
from runtime.scheduler.request import RequestState, SequenceState
from tests.unit.scheduler.house import MODEL, House

OTHER = ModelName("other")


class Server:
    """A worker that answers at once and gives every row of a full house one token per step; counts who got what."""

    def __init__(self, house: House) -> None:
        self.house = house
        self.started: list[RequestId] = []
        self.served: Counter[str] = Counter()
        self._num_prepared = 0
        self._lengths: dict[SequenceId, int] = {}

    def catch_up(self) -> None:
        """Answer every Prepare and Prefill there is."""
        house = self.house
        while True:
            asked = house.asked_to_prepare()
            if self._num_prepared < len(asked):
                request = asked[self._num_prepared]
                self._num_prepared += 1
                if request not in house.outcomes:
                    house.prepared(request)
                continue
            waiting = [s for s in house.state.book.models[MODEL].sequences.values() if s.state is SequenceState.PREFILLING]
            if not waiting:
                return
            for sequence in waiting:
                if sequence.number == 0:
                    self.started.append(sequence.record.request.id)
                self.served[sequence.record.request.tenant] += sequence.prompt_length
                house.prefilled(sequence.id)

    def run(self, num_steps: int, output_tokens: int | None = None) -> None:
        """Every sequence ends by itself after `output_tokens`, or else at its max_tokens."""
        for _ in range(num_steps):
            self.catch_up()
            rows = list(self.house.state.book.models[MODEL].sequences.values())
            self.house.step(*(sequence.id for sequence in rows))
            for sequence in rows:
                self.served[sequence.record.request.tenant] += 1
                if len(sequence.committed) >= min(output_tokens or 1 << 30, sequence.record.request.max_tokens):
                    self.house.end(sequence.id)


def full_house(slots: int, **weights: float) -> House:
    house = House(Settings(max_queued=100_000), recount_every=100)
    for name, weight in weights.items():
        house.tenant(name, weight=weight, max_queued=100_000, max_running=4096)
    house.up(slots=slots)
    return house


@given(
    weights=st.tuples(*[st.sampled_from([0.5, 1.0, 2.0, 3.0])] * 3),
    sizes=st.tuples(*[st.tuples(st.integers(1, 60), st.integers(1, 30))] * 3),
    slots=st.integers(1, 4),
    output_tokens=st.none() | st.integers(1, 20),
)
@settings(max_examples=50)
def test_tenants_that_all_want_more_get_tokens_by_their_weights(
    weights: tuple[float, ...], sizes: tuple[tuple[int, int], ...], slots: int, output_tokens: int | None
) -> None:
    names = ("a", "b", "c")
    house = full_house(slots, **dict(zip(names, weights, strict=True)))
    for name, (prompt_length, max_tokens) in zip(names, sizes, strict=True):
        for _ in range(120):
            house.submit(name, prompt_length=prompt_length, max_tokens=max_tokens)
    server = Server(house)
    server.run(150, output_tokens)
    waiting = {record.request.tenant for record in house.state.book.requests.values() if not record.has_started}
    for one, (weight, size) in zip(names, zip(weights, sizes, strict=True), strict=True):
        for other, (other_weight, other_size) in zip(names, zip(weights, sizes, strict=True), strict=True):
            if one < other and waiting >= {one, other}:
                difference = abs(server.served[one] / weight - server.served[other] / other_weight)
                # Goyal's bound for one server, once for each slot whose row is charged before it is served.
                bound = (slots + 1) * (sum(size) / weight + sum(other_size) / other_weight)
                assert difference <= bound, f"{one} and {other} are {difference} apart, allowed {bound}"


def test_over_a_long_time_the_shares_are_the_weights() -> None:
    house = full_house(4, light=1.0, heavy=3.0)
    for _ in range(400):
        house.submit("light", prompt_length=10, max_tokens=20)
        house.submit("heavy", prompt_length=5, max_tokens=9)
    server = Server(house)
    server.run(800)
    assert server.served["heavy"] / server.served["light"] == pytest.approx(3.0, rel=0.1)


def test_requests_that_turn_out_longer_than_expected_are_charged_for_it() -> None:
    house = full_house(2, brief=1.0, endless=1.0)
    for _ in range(200):
        house.submit("brief", prompt_length=4, max_tokens=16)
        house.submit("endless", prompt_length=4, max_tokens=2000)
    server = Server(house)
    house.state.book.models[MODEL].output_tokens = 10.0
    server.run(3000)
    assert server.served["brief"] == pytest.approx(server.served["endless"], rel=0.5)


def test_a_flood_of_a_thousand_does_not_delay_anothers_first_beyond_the_next_free_slot() -> None:
    house = full_house(2, flood=1.0, calm=1.0)
    for _ in range(1000):
        house.submit("flood", max_tokens=20)
    server = Server(house)
    server.run(105)  # in the middle of two sequences
    num_before = len(server.started)
    first = house.submit("calm", max_tokens=20)
    server.run(21)
    assert server.started[num_before] == first


def test_being_idle_gains_no_credit() -> None:
    house = full_house(1, steady=1.0, late=1.0)
    for _ in range(100):
        house.submit("steady", max_tokens=10)
    server = Server(house)
    server.run(300)
    before = Counter(server.served)
    for _ in range(100):
        house.submit("late", max_tokens=10)
    server.run(200)
    got = server.served - before
    assert got["late"] == pytest.approx(got["steady"], abs=40)


def test_using_an_idle_machine_costs_nothing_later() -> None:
    house = full_house(1, early=1.0, late=1.0)
    server = Server(house)
    for _ in range(20):
        house.submit("early", max_tokens=10)
        server.run(11)
    before = Counter(server.served)
    for _ in range(60):
        house.submit("early", max_tokens=10)
        house.submit("late", max_tokens=10)
    server.run(200)
    got = server.served - before
    assert got["late"] == pytest.approx(got["early"], abs=40)


def test_a_long_answer_while_nobody_else_wanted_anything_costs_nothing_later() -> None:
    house = full_house(1, early=1.0, late=1.0)
    server = Server(house)
    house.submit("late", max_tokens=1)
    server.run(2)
    house.submit("early", max_tokens=1000)  # far more than expected, so charged on the way
    server.run(900)
    for _ in range(60):
        house.submit("early", max_tokens=10)
        house.submit("late", max_tokens=10)
    server.run(101)
    before = Counter(server.served)
    server.run(400)
    got = server.served - before
    assert got["late"] == pytest.approx(got["early"], abs=200), "only its last hundred tokens were taken from somebody"


def test_what_was_charged_too_much_is_given_back() -> None:
    house = full_house(1, honest=1.0, modest=1.0)
    for _ in range(100):
        house.submit("honest", max_tokens=10)
        house.submit("modest", max_tokens=200)
    server = Server(house)
    server.run(600, output_tokens=10)
    assert server.served["modest"] == pytest.approx(server.served["honest"], abs=220)


def test_a_tenant_runs_no_more_requests_than_it_may_over_all_models_and_goes_on_when_one_ends() -> None:
    house = House()
    house.tenant("t", max_running=2)
    house.up(slots=4)
    house.up(OTHER, slots=4)
    first, sequence = house.start()
    second = house.submit(model=OTHER)
    house.prepared(second, model=OTHER)
    house.prefilled(house.sequence(second), model=OTHER)
    third = house.submit(model=OTHER)
    house.prepared(third, model=OTHER)
    assert house.state_of(third) is RequestState.PREPARING
    house.finish(sequence)
    assert first in house.outcomes
    assert house.state_of(third) is RequestState.PREFILLING


def test_a_tenant_at_its_quota_does_not_keep_others_from_the_slots() -> None:
    house = House(Settings(max_queued=1000))
    house.tenant("capped", max_running=1, max_queued=500)
    house.up(slots=3)
    for _ in range(200):
        house.submit("capped")
    assert len(house.asked_to_prepare()) == 1, "what its quota holds back takes no room from others"
    for _ in range(2):
        house.submit("other")
    assert len(house.asked_to_prepare()) == 3
    Server(house).catch_up()
    held = Counter(s.record.request.tenant for s in house.state.book.models[MODEL].sequences.values())
    assert held == {"capped": 1, "other": 2}


def test_a_raised_quota_or_weight_counts_at_once() -> None:
    house = House()
    house.tenant("t", max_running=1)
    house.up(slots=2)
    house.start()
    second = house.submit()
    house.prepared(second)
    assert house.state_of(second) is RequestState.PREPARING
    house.tenant("t", max_running=2)
    assert house.state_of(second) is RequestState.PREFILLING


def test_requests_are_prepared_a_bounded_number_ahead_of_the_slots() -> None:
    house = full_house(2, a=1.0, b=1.0)
    for _ in range(50):
        house.submit("a")
    assert len(house.asked_to_prepare()) == 4
    late = [house.submit("b") for _ in range(3)]
    assert house.asked_to_prepare()[4:] == late[:1], "the room is full, but nobody is left without any"
    for request in house.asked_to_prepare()[:2]:
        house.cancel(request)
        house.released(requests=(request,))
    assert house.asked_to_prepare()[5:] == late[1:2], "who has less ahead is next"


# -- within a tenant --------------------------------------------------------------------------------------------------


def served_order(house: House) -> list[RequestId]:
    server = Server(house)
    server.run(400)
    return server.started


def test_a_tenants_requests_are_served_in_their_order_and_interactive_ones_before_background_ones() -> None:
    house = full_house(1, t=1.0)
    runner = house.submit("t", max_tokens=2)
    background = [house.submit("t", max_tokens=2, priority="background") for _ in range(2)]
    interactive = [house.submit("t", max_tokens=2) for _ in range(3)]
    order = served_order(house)
    assert order[0] == runner
    assert [request for request in order if request in interactive] == interactive
    assert order[-2:] == background


def test_a_background_request_is_overtaken_a_bounded_number_of_times() -> None:
    house = full_house(1, t=1.0)
    house.submit("t", max_tokens=2)
    background = house.submit("t", max_tokens=2, priority="background")
    for _ in range(60):
        house.submit("t", max_tokens=2)
    assert served_order(house).index(background) <= 2 * MAX_OVERTAKES + 2
