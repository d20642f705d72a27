"""A lost worker's requests go on in the next one; those that kill their workers do not take the others along."""

from __future__ import annotations

import pytest

from runtime.config import Settings
from runtime.errors import ModelUnavailable, WorkerCrashed
from runtime.protocol.events import Refused
from runtime.protocol.ids import Incarnation, RequestId, SequenceId
from runtime.scheduler.replaying import MAX_CRASHES, PROGRESS_TOKENS
from runtime.scheduler.request import RequestState
from runtime.scheduler.stimuli import Tick, WorkerUp
from tests.unit.scheduler.house import MODEL, House, facts


def a_house(slots: int = 4, **settings: int) -> House:
    house = House(Settings(**settings))  # type: ignore[arg-type]
    house.up(slots=slots)
    return house


def die(house: House, incarnation: int) -> None:
    """This incarnation is lost, and the next one is there at once."""
    house.lose(incarnation=incarnation)
    house.up(incarnation=incarnation + 1)


def last_start(house: House) -> list[SequenceId]:
    """Who was given slots since the last loss."""
    incarnation = house.state.book.models[MODEL].incarnation
    commands = [command for _, number, command in house.sent if number == incarnation and hasattr(command, "rows")]
    return [row.sequence for command in commands for row in command.rows]


# -- going on -----------------------------------------------------------------------------------------------


def test_a_stream_goes_on_at_its_next_token_with_all_that_was_committed_and_the_same_draws() -> None:
    house = a_house()
    request, sequence = house.start(max_tokens=20, stop=("never",), ignore_eos=True)
    house.step(sequence, num_steps=3)
    before = house.rows()[-1]
    house.lose()
    assert house.state_of(request) is RequestState.REPLAYING
    assert request not in house.outcomes
    house.up(incarnation=2)
    after = house.rows()[-1]
    assert after.tokens.tolist() == [1, 2, 3, 3, 4, 5]
    assert (after.prompt_length, after.max_length, after.sampling, after.stop, after.ignore_eos, after.sequence) == (
        before.prompt_length,
        before.max_length,
        before.sampling,
        before.stop,
        before.ignore_eos,
        before.sequence,
    )
    house.prefilled(sequence, incarnation=2)
    assert house.state_of(request) is RequestState.RUNNING
    house.step(sequence, num_steps=2, incarnation=2)
    house.finish(sequence, incarnation=2)
    assert house.tokens(request) == [3, 4, 5, 6, 7]
    outcome = house.outcomes[request]
    assert outcome.state == "finished"
    assert outcome.error is None
    house.released(sequence, incarnation=2)
    assert house.state.book.requests == {}


def test_a_request_in_the_tokenizer_is_tokenized_again_and_one_with_its_tokens_keeps_them() -> None:
    house = a_house(slots=1)
    running, _ = house.start()
    ready = house.submit()
    house.prepared(ready)
    preparing = house.submit()
    house.lose()
    assert [house.state_of(request) for request in (running, ready, preparing)] == [
        RequestState.REPLAYING,
        RequestState.PREPARING,
        RequestState.QUEUED,
    ]
    house.up(incarnation=2)
    assert house.asked_to_prepare() == [running, ready, preparing, preparing]


def test_those_that_come_back_go_before_those_that_never_started() -> None:
    house = a_house(slots=2)
    _, first = house.start()
    _, second = house.start("u")
    for _ in range(3):
        house.prepared(house.submit("v"))
    die(house, 1)
    assert last_start(house) == [first, second]


def test_a_sequence_that_is_over_is_not_replayed_though_its_sister_is() -> None:
    house = a_house()
    request = house.submit(num_sequences=2)
    house.prepared(request)
    one, two = house.sequence(request, 0), house.sequence(request, 1)
    house.prefilled(one, two)
    house.step(one, two)
    house.finish(one)
    die(house, 1)
    assert last_start(house) == [two]
    house.prefilled(two, incarnation=2)
    house.finish(two, incarnation=2)
    assert house.outcomes[request].state == "finished"
    house.released(two, incarnation=2)
    assert house.state.book.requests == {}


def test_one_cancelled_while_it_waits_for_the_next_worker_is_gone() -> None:
    house = a_house()
    request, _ = house.start()
    house.lose()
    house.cancel(request)
    assert house.outcomes[request].state == "cancelled"
    assert house.state.book.requests == {}
    house.up(incarnation=2)
    assert len(house.rows()) == 1


def test_a_deadline_runs_on_while_the_model_has_no_worker() -> None:
    house = a_house()
    request, _ = house.start(deadline_seconds=5.0)
    house.lose()
    house.now += 6.0
    house.do(Tick())
    assert house.outcomes[request].state == "failed"
    assert "replaying" in str(house.outcomes[request].error)


def test_one_as_far_ahead_of_its_client_as_it_may_be_waits_without_a_slot_until_that_reads() -> None:
    house = a_house(stream_window_tokens=2)
    request, sequence = house.start(windowed=True, max_tokens=50)
    house.step(sequence, num_steps=2)
    die(house, 1)
    assert last_start(house) == []
    house.read(request, 2)
    assert last_start(house) == [sequence]
    assert house.rows()[-1].limit == 3 + 2 + 2


def test_a_prompt_that_is_only_computed_is_computed_again() -> None:
    house = a_house()
    request = house.submit(prefill_only=True, max_tokens=0)
    house.prepared(request)
    die(house, 1)
    assert last_start(house) == [house.sequence(request)]


def test_its_tenant_does_not_pay_twice_and_its_usage_is_of_the_first_start() -> None:
    house = a_house()
    _, sequence = house.start("t", max_tokens=20)
    flow = house.state.book.models[MODEL].fair.flows[next(iter(house.state.book.tenants))]
    house.step(sequence)
    paid = flow.start_tag
    die(house, 1)
    assert flow.start_tag == paid


def test_a_worker_lost_again_before_it_took_anything_in_loses_nothing() -> None:
    house = a_house()
    request, _ = house.start()
    other, sequence = house.start(max_tokens=200)
    house.step(sequence)
    house.lose()
    for incarnation in range(2, 9):
        house.lose(incarnation=incarnation)
    house.up(incarnation=9)
    assert not {request, other} & house.outcomes.keys(), "they were aboard one worker only"
    house.step(sequence, incarnation=9)
    assert house.tokens(other) == [3, 4]


def test_whoever_makes_progress_outlives_any_number_of_workers() -> None:
    house = a_house()
    request, sequence = house.start(max_tokens=1000)
    for incarnation in range(1, 30):
        house.step(sequence, num_steps=PROGRESS_TOKENS, incarnation=incarnation)
        die(house, incarnation)
    assert house.tokens(request) == list(range(3, 3 + 29 * PROGRESS_TOKENS))


def test_a_replay_lost_for_good_ends_with_the_error() -> None:
    house = a_house()
    request, _ = house.start()
    house.lose()
    house.lose(incarnation=2, restarting=False)
    assert isinstance(house.outcomes[request].error, WorkerCrashed)
    assert house.state.book.requests == {}


def test_no_stream_goes_on_with_other_weights_than_it_began_with() -> None:
    house = a_house(slots=1)
    begun, sequence = house.start()
    house.step(sequence)
    ready = house.submit()
    house.prepared(ready)
    house.lose()
    house.do(WorkerUp(MODEL, Incarnation(2), facts(fingerprint="another")))
    error = house.outcomes[begun].error
    assert isinstance(error, ModelUnavailable)
    assert "changed on the disk" in str(error)
    assert house.state_of(ready) is RequestState.PREPARING
    assert house.asked_to_prepare()[-1] == ready
    house.prepared(ready, incarnation=2)
    assert house.record(ready).fingerprint == "another"


def test_one_that_had_a_slot_but_no_token_yet_begins_anew_with_other_weights() -> None:
    house = a_house()
    request = house.submit()
    house.prepared(request)
    house.lose()
    house.do(WorkerUp(MODEL, Incarnation(2), facts(fingerprint="another")))
    assert house.state_of(request) is RequestState.PREPARING
    house.prepared(request, incarnation=2)
    house.prefilled(house.sequence(request), incarnation=2)
    assert house.state_of(request) is RequestState.RUNNING


# -- suspects -----------------------------------------------------------------------------------------------


def test_who_gets_nowhere_in_three_workers_ends_with_their_report_and_the_others_go_on() -> None:
    house = a_house()
    poison, bad = house.start("p", max_tokens=50)
    innocents = [house.start(name, max_tokens=500) for name in ("a", "b")]
    house.step(bad, *(sequence for _, sequence in innocents))
    die(house, 1)
    assert set(last_start(house)) == {bad, *(sequence for _, sequence in innocents)}
    house.prefilled(bad, *(sequence for _, sequence in innocents), incarnation=2)
    house.step(*(sequence for _, sequence in innocents), num_steps=PROGRESS_TOKENS, incarnation=2)
    die(house, 2)
    assert last_start(house) == [bad], "alone"
    house.prefilled(bad, incarnation=3)
    die(house, 3)
    error = house.outcomes[poison].error
    assert isinstance(error, WorkerCrashed)
    assert error.report.incarnation == 3
    assert set(last_start(house)) == {sequence for _, sequence in innocents}
    for request, sequence in innocents:
        house.prefilled(sequence, incarnation=4)
        house.step(sequence, incarnation=4)
        assert request not in house.outcomes
        assert house.record(request).num_crashes == 1, "what they were aboard before they moved on is forgotten"


def test_suspects_are_tried_one_at_a_time_and_whoever_moves_on_is_one_no_more() -> None:
    house = a_house()
    requests = [house.start(name, max_tokens=50) for name in ("a", "b", "c")]
    one, two, three = (sequence for _, sequence in requests)
    die(house, 1)
    die(house, 2)
    assert last_start(house) == [one]
    house.prefilled(one, incarnation=3)
    house.step(one, num_steps=PROGRESS_TOKENS - 1, incarnation=3)
    assert last_start(house) == [one]
    house.step(one, incarnation=3)
    assert last_start(house) == [one, two]
    house.prefilled(two, incarnation=3)
    house.finish(two, incarnation=3)
    assert last_start(house) == [one, two, three]
    house.prefilled(three, incarnation=3)
    house.step(three, num_steps=PROGRESS_TOKENS, incarnation=3)
    assert house.state.book.models[MODEL].suspects == {}


def test_nobody_new_starts_beside_a_suspect() -> None:
    house = a_house()
    _, sequence = house.start(max_tokens=200)
    die(house, 1)
    die(house, 2)
    late = house.submit("late")
    assert house.asked_to_prepare()[-1] != late
    house.prefilled(sequence, incarnation=3)
    house.step(sequence, num_steps=PROGRESS_TOKENS, incarnation=3)
    assert house.asked_to_prepare()[-1] == late


def test_a_prompt_that_kills_the_tokenizers_worker_is_tried_alone_and_ends() -> None:
    house = a_house()
    poison = house.submit("p")
    innocent = house.submit("i", max_tokens=200)
    die(house, 1)
    assert house.asked_to_prepare()[-2:] == [poison, innocent]
    die(house, 2)
    assert house.asked_to_prepare()[4:] == [poison], "alone"
    die(house, 3)
    assert isinstance(house.outcomes[poison].error, WorkerCrashed)
    assert house.asked_to_prepare()[5:] == [innocent]
    house.prepared(innocent, incarnation=4)
    house.step(house.sequence(innocent), num_steps=PROGRESS_TOKENS, incarnation=4)
    assert house.record(innocent).num_crashes == 0


def test_a_suspect_beyond_its_tenants_quota_is_tried_all_the_same() -> None:
    """It waits for nobody: those that fill the quota wait for it."""
    house = a_house()
    house.tenant("t", max_running=1)
    house.start(max_tokens=200)
    poison = house.submit()
    die(house, 1)
    running, sequence = RequestId(1), house.sequence(RequestId(1))
    house.step(sequence, num_steps=PROGRESS_TOKENS, incarnation=2)
    die(house, 2)
    assert house.state_of(running) is RequestState.REPLAYING
    house.prepared(poison, incarnation=3)
    assert last_start(house) == [house.sequence(poison)]


def test_a_suspect_that_waits_for_its_client_keeps_nobody_waiting() -> None:
    house = a_house(stream_window_tokens=2)
    request, sequence = house.start(windowed=True, max_tokens=50)
    die(house, 1)
    die(house, 2)
    other = house.submit("u")
    house.prefilled(sequence, incarnation=3)
    house.step(sequence, num_steps=2, incarnation=3)
    assert house.tokens(request) == [3, 4]
    assert house.asked_to_prepare()[-1] == other
    assert house.state.book.models[MODEL].suspects == {}


@pytest.mark.parametrize("how", ["cancel", "refuse"])
def test_a_suspect_that_ends_makes_way(how: str) -> None:
    house = a_house()
    request, sequence = house.start()
    other = house.submit("u")
    for incarnation in range(1, MAX_CRASHES):
        die(house, incarnation)
    assert last_start(house) == [sequence]
    if how == "cancel":
        house.cancel(request)
    else:
        house.say(Refused("prefill", "generation_failed", "no", (), (sequence,)), incarnation=MAX_CRASHES)
    assert request in house.outcomes
    assert house.asked_to_prepare()[-1] == other
