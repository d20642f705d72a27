"""One request's way from its submission to its end, and what each of a worker's words does to it."""

from __future__ import annotations

from typing import Any

import pytest

from runtime.errors import ContextTooLong, DeadlineExceeded, GenerationFailed, InvalidRequest, ModelNotLoaded, TroupeError
from runtime.protocol.commands import Prepare, Release, Sampling
from runtime.protocol.events import Hello, Prefilled, Prepared, RefusalCode, Refused, StepDone, StepRow, Stopped
from runtime.protocol.ids import RequestId, SequenceId
from runtime.protocol.tokens import TokenIds
from runtime.scheduler.request import RequestState, SequenceState, sequence_seed
from runtime.scheduler.stats import snapshot
from runtime.scheduler.stimuli import Tick, WakeAt
from tests.unit.scheduler.house import House


def a_house(**changes: Any) -> House:
    house = House()
    house.up(**changes)
    return house


def test_a_request_is_prepared_prefilled_decoded_and_ended_with_its_counts() -> None:
    house = a_house()
    request = house.submit(prompt_length=3, max_tokens=8, stop=("END",), ignore_eos=True)
    assert [type(command) for _, _, command in house.sent] == [Prepare]
    house.now += 1.0
    house.say(Prepared(request, TokenIds([5, 6, 7]), warnings=("bad role",)))
    (row,) = house.rows()
    assert (row.tokens, row.prompt_length, row.max_length, row.first_index) == (TokenIds([5, 6, 7]), 3, 11, 0)
    assert (row.stop, row.ignore_eos, row.sampling) == (("END",), True, Sampling(seed=7))
    house.now += 2.0
    house.prefilled(row.sequence, seconds=1.5)
    house.step(row.sequence)
    house.now += 4.0
    house.finish(row.sequence)
    outcome = house.outcomes[request]
    assert (outcome.state, outcome.error, outcome.prompt_tokens) == ("finished", None, TokenIds([5, 6, 7]))
    assert (outcome.warnings, outcome.fingerprint) == (("bad role",), "print")
    timings = outcome.timings
    assert (timings.queue_seconds, timings.prefill_seconds, timings.first_token_seconds, timings.total_seconds) == (
        1.0,
        1.5,
        3.0,
        7.0,
    )
    assert house.tokens(request) == [3]
    assert house.pieces[request][-1].finish == "stop"


@pytest.mark.parametrize(("priority", "is_background"), [("interactive", False), ("background", True)])
def test_a_row_says_whether_anybody_reads_along(priority: str, is_background: bool) -> None:
    house = a_house()
    house.start(priority=priority)
    assert [row.background for row in house.rows()] == [is_background]


def test_a_slot_is_free_only_when_the_worker_has_confirmed_and_the_client_does_not_wait_for_that() -> None:
    house = a_house(slots=1)
    first, sequence = house.start()
    second = house.submit()
    house.prepared(second)
    house.finish(sequence)
    assert house.outcomes[first].state == "finished"
    assert house.told_to_release() == ([], [sequence])
    assert house.state_of(second) is RequestState.PREPARING
    house.released(sequence)
    assert house.state_of(second) is RequestState.PREFILLING
    assert first not in house.state.book.requests


def test_a_request_for_several_sequences_has_a_row_with_a_seed_of_its_own_for_each() -> None:
    house = a_house(slots=4)
    request = house.submit(num_sequences=3)
    house.prepared(request)
    seeds = [row.sampling.seed for row in house.rows()]
    assert seeds == [7, sequence_seed(7, 1), sequence_seed(7, 2)]
    assert len(set(seeds)) == 3
    rows = [house.sequence(request, number) for number in range(3)]
    house.prefilled(*rows)
    house.step(*rows)
    house.finish(rows[1])
    house.step(rows[0], rows[2])
    assert request not in house.outcomes
    house.finish(rows[0], rows[2])
    assert house.outcomes[request].state == "finished"
    assert [len(house.tokens(request, number)) for number in range(3)] == [2, 1, 2]


def test_more_sequences_than_slots_take_turns_in_them() -> None:
    house = a_house(slots=2)
    request = house.submit(num_sequences=5)
    house.prepared(request)
    served = 0
    while request not in house.outcomes:
        rows = [s for s in house.record(request).sequences if s.state is SequenceState.PREFILLING]
        assert 0 < len(rows) <= 2
        served += len(rows)
        house.prefilled(*(s.id for s in rows))
        for sequence in rows:
            house.end(sequence.id)
    assert served == 5


def test_a_sequence_ends_at_max_tokens_or_at_the_end_of_the_context_whichever_comes_first() -> None:
    house = a_house(context_length=10)
    for max_tokens, end in ((4, 7), (100, 10)):
        house.prepared(house.submit(prompt_length=3, max_tokens=max_tokens))
        assert house.rows()[-1].max_length == end
        house.prefilled(house.rows()[-1].sequence)


def test_a_prompt_that_fills_the_context_is_refused_with_both_numbers() -> None:
    house = a_house(context_length=10)
    request = house.submit(prompt_length=10)
    house.prepared(request)
    error = house.outcomes[request].error
    assert isinstance(error, ContextTooLong)
    assert (error.prompt_tokens, error.context_length) == (10, 10)
    assert house.rows() == []
    assert request not in house.state.book.requests


def test_a_prompt_without_any_token_is_refused() -> None:
    house = a_house()
    request = house.submit()
    house.say(Prepared(request, TokenIds()))
    assert isinstance(house.outcomes[request].error, InvalidRequest)


# -- what is said twice, late or wrongly ------------------------------------------------------------------------


def test_every_event_said_twice_counts_once() -> None:
    house = a_house()
    request = house.submit()
    for _ in range(2):
        house.prepared(request)
    (row,) = house.rows()
    for _ in range(2):
        house.say(Prefilled(((row.sequence, 3),), 0.5))
    for _ in range(2):
        house.say(StepDone(1, (StepRow(row.sequence, 3, (9, 8), "ab"),)))
    house.say(StepDone(1, (StepRow(row.sequence, 4, (8,), "b"),)))
    for _ in range(2):
        house.say(StepDone(2, (StepRow(row.sequence, 5, (7,), "c", "stop"),)))
    assert house.tokens(request) == [9, 8, 7]
    assert "".join(piece.text for piece in house.pieces[request]) == "abc"
    assert house.outcomes[request].timings.prefill_seconds == 0.5
    for _ in range(2):
        house.released(row.sequence)
    assert house.breaches == []


@pytest.mark.parametrize(
    "row",
    [
        StepRow(SequenceId(1), 5, (1,), "gap"),
        StepRow(SequenceId(1), 3, (99,), "other token"),
        StepRow(SequenceId(1), 3, (3, 4), "half known"),
        StepRow(SequenceId(1), 2, (2,), "inside the prompt"),
        StepRow(SequenceId(1), 3, (), "", "stop"),
        StepRow(SequenceId(1), 4, tuple(range(8)), "past its end"),
        StepRow(SequenceId(2), 3, (1,), "never given"),
    ],
    ids=lambda row: row.text or "an end in the past",
)
def test_a_row_that_cannot_be_is_a_breach_told_once_and_its_stream_goes_on_in_the_next_worker(row: StepRow) -> None:
    house = a_house()
    request, sequence = house.start(max_tokens=8)
    house.step(sequence)
    house.say(StepDone(2, (row,)))
    house.say(StepDone(2, (row,)))
    assert len(house.breaches) == 1
    assert house.tokens(request) == [3]
    house.step(sequence)  # nothing more is heard from it
    assert house.tokens(request) == [3]
    house.lose()
    house.up(incarnation=2)
    assert house.rows()[-1].tokens.tolist() == [1, 2, 3, 3]
    house.step(sequence, incarnation=2)
    assert house.tokens(request) == [3, 4]


def test_forgetting_what_it_was_not_told_to_forget_is_a_breach() -> None:
    for is_preparing in (True, False):
        house = a_house()
        request = house.submit()
        if is_preparing:
            house.released(requests=(request,))
        else:
            house.prepared(request)
            house.released(house.sequence(request))
        assert len(house.breaches) == 1


def test_late_events_about_released_sequences_and_other_incarnations_are_ignored() -> None:
    house = a_house()
    _, old = house.start()
    house.end(old)
    request, sequence = house.start()
    house.say(StepDone(9, (StepRow(old, 3, (1,), "x"),)))
    house.say(Prefilled(((old, 3),), 1.0))
    house.say(Refused("prefill", "generation_failed", "late", sequences=(old,)))
    house.say(StepDone(9, (StepRow(sequence, 3, (1,), "x"),)), incarnation=2)
    assert (house.tokens(request), house.breaches) == ([], [])


def test_events_that_are_not_the_schedulers_are_ignored() -> None:
    house = a_house()
    for event in (Hello(1, 2, 1), Stopped(3)):
        assert house.say(event) == []


# -- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "message", "error_type", "option"),
    [
        ("invalid_request", "top_k: got 300; allowed: 0 to 256", InvalidRequest, "top_k"),
        ("invalid_request", "the token 999 is outside", InvalidRequest, "prompt"),
        ("context_length_exceeded", "too long", ContextTooLong, None),
        ("template_error", "roles must alternate", InvalidRequest, "messages"),
        ("generation_failed", "non-finite logits", GenerationFailed, None),
        ("not_ready", "stopping", ModelNotLoaded, None),
        ("conflict", "runs already", GenerationFailed, None),
        ("malformed", "no command", InvalidRequest, "prompt"),
    ],
)
def test_a_refusal_ends_that_request_alone_with_a_typed_error(
    code: RefusalCode, message: str, error_type: type[TroupeError], option: str | None
) -> None:
    house = a_house()
    refused, other = house.submit(), house.submit()
    house.say(Refused("prepare", code, message, requests=(refused,)))
    error = house.outcomes[refused].error
    assert isinstance(error, error_type)
    assert getattr(error, "option", None) == option
    assert house.state_of(other) is RequestState.PREPARING


def test_when_one_of_several_sequences_fails_the_whole_request_fails_and_the_others_are_released() -> None:
    house = a_house()
    request = house.submit(num_sequences=3)
    house.prepared(request)
    rows = [house.sequence(request, number) for number in range(3)]
    house.prefilled(*rows)
    house.step(*rows)
    house.say(Refused("step", "generation_failed", "non-finite logits", sequences=(rows[1],)))
    assert isinstance(house.outcomes[request].error, GenerationFailed)
    assert house.told_to_release()[1] == rows
    house.step(rows[0], rows[2])
    house.released(*rows)
    assert house.state.book.requests == {}


def test_a_refusal_that_names_nobody_ends_nobody() -> None:
    house = a_house()
    request = house.submit()
    house.say(Refused("", "malformed", "frame is no command"))
    assert house.state_of(request) is RequestState.PREPARING


# -- leaving ------------------------------------------------------------------------------------------------------


def test_a_queued_request_that_is_cancelled_is_simply_gone() -> None:
    house = House()
    house.add()
    request = house.submit()
    house.cancel(request)
    assert house.outcomes[request].state == "cancelled"
    assert house.state.book.requests == {}
    house.up()
    assert house.sent == []


def test_a_prepared_request_that_is_cancelled_needs_no_word_to_the_worker() -> None:
    house = a_house(slots=1)
    house.start()
    waiting = house.submit()
    house.prepared(waiting)
    house.cancel(waiting)
    assert house.commands(Release) == []
    assert waiting not in house.state.book.requests


def test_a_request_cancelled_while_being_prepared_is_kept_until_the_worker_confirms() -> None:
    house = a_house()
    request = house.submit()
    house.cancel(request)
    assert house.outcomes[request].state == "cancelled"
    assert house.told_to_release() == ([request], [])
    house.prepared(request)  # crossed our Release on the way
    assert house.rows() == []
    assert request in house.state.book.requests
    house.released(requests=(request,))
    assert request not in house.state.book.requests


@pytest.mark.parametrize("has_token", [False, True], ids=["prefilling", "decoding"])
def test_a_cancelled_request_ends_at_once_and_its_slot_is_free_when_confirmed(has_token: bool) -> None:
    house = a_house(slots=1)
    request = house.submit()
    house.prepared(request)
    sequence = house.sequence(request)
    if has_token:
        house.step(sequence)
    house.cancel(request)
    house.cancel(request)
    assert house.outcomes[request].state == "cancelled"
    assert house.told_to_release() == ([], [sequence])
    following = house.submit()
    house.prepared(following)
    house.step(sequence)  # crossed our Release on the way
    house.finish(sequence)
    assert house.state_of(following) is RequestState.PREPARING
    house.released(sequence)
    assert house.state_of(following) is RequestState.PREFILLING


def test_a_deadline_ends_a_request_in_whatever_state_and_releases_what_it_holds() -> None:
    house = a_house(slots=1)
    _, sequence = house.start(deadline_seconds=5.0)
    waiting = house.submit(deadline_seconds=3.0)
    assert house.wake_at == house.now + 3.0
    house.now += 3.0
    house.do(Tick())
    assert isinstance(house.outcomes[waiting].error, DeadlineExceeded)
    house.now += 2.0
    assert house.wake_at == house.now
    house.do(Tick())
    assert house.told_to_release()[1] == [sequence]
    assert len(house.outcomes) == 2


def test_a_tick_that_comes_early_ends_nothing_and_asks_to_be_woken_again() -> None:
    house = a_house()
    request = house.submit(deadline_seconds=5.0)
    instructions = house.do(Tick())
    assert instructions == [WakeAt(house.now + 5.0)]
    assert request not in house.outcomes


def test_deadlines_of_requests_that_ended_in_time_are_forgotten() -> None:
    house = a_house(slots=1)
    for _ in range(500):
        house.cancel(house.submit(deadline_seconds=3600.0))
        house.released(requests=(RequestId(house.asked_to_prepare()[-1]),))
    assert len(house.state.book.deadlines) <= 70


# -- losing the worker ----------------------------------------------------------------------------------------------


def test_a_worker_lost_for_good_ends_every_request_of_its_model_in_any_state_with_an_error_of_its_own() -> None:
    house = a_house(slots=1)
    decoding, sequence = house.start()
    prepared = house.submit()
    house.prepared(prepared)
    others = [house.submit() for _ in range(8)]
    cancelled = house.submit()
    house.cancel(cancelled)
    error = house.lose(restarting=False)
    errors = [house.outcomes[request].error for request in (decoding, prepared, *others)]
    assert all(type(each) is type(error) and each.args == error.args for each in errors)
    assert len({id(each) for each in (error, *errors)}) == len(errors) + 1
    assert house.state.book.requests == {}
    house.add()
    house.up(incarnation=2)
    house.released(sequence, incarnation=1)
    fresh = house.submit()
    assert house.asked_to_prepare()[-1] == fresh
    house.prepared(fresh, incarnation=2)
    assert house.state_of(fresh) is RequestState.PREFILLING


def test_a_loss_of_an_earlier_incarnation_or_a_repeated_arrival_changes_nothing() -> None:
    house = a_house()
    house.lose(incarnation=1)
    house.up(incarnation=2)
    request = house.submit()
    house.lose(incarnation=1)
    house.up(incarnation=2)
    house.up(incarnation=1)
    assert house.state_of(request) is RequestState.PREPARING


def test_a_worker_that_replaces_another_unannounced_does_not_inherit_its_slots() -> None:
    house = a_house()
    request, sequence = house.start()
    house.step(sequence)
    house.up(incarnation=2)
    assert house.state_of(request) is RequestState.PREFILLING
    assert house.rows()[-1].tokens.tolist() == [1, 2, 3, 3]


def test_the_snapshot_counts_requests_by_state_and_tokens_by_tenant() -> None:
    house = a_house(slots=2)
    _, sequence = house.start("a")
    house.step(sequence, num_steps=3)
    house.prepared(house.submit("b"))
    for _ in range(6):
        house.submit("b")
    stats = snapshot(house.state.book)
    model = stats.models[next(iter(stats.models))]
    assert (model.running, model.prefilling, model.queued + model.preparing, model.used_slots) == (1, 1, 6, 2)
    by_name = {str(name): (each.queued, each.running, each.tokens_served) for name, each in stats.tenants.items()}
    assert by_name == {"a": (0, 1, 3), "b": (6, 1, 0)}
    house.end(sequence)
    assert snapshot(house.state.book).finished == 1
