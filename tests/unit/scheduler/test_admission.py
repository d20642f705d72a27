"""Who may wait, who is refused, and with what word."""

from __future__ import annotations

import pytest

from runtime.config import Settings
from runtime.errors import ModelNotLoaded, ModelUnavailable, Overloaded, TenantLimitReached
from runtime.protocol.commands import ChatPrompt, TextPrompt, TokenPrompt
from runtime.protocol.ids import ModelName
from runtime.protocol.tokens import TokenIds
from runtime.scheduler.admission import estimate_prompt_tokens
from runtime.scheduler.request import RequestState
from runtime.scheduler.stimuli import ModelAdded, ModelRemoved, Reject, Submit
from tests.unit.scheduler.house import MODEL, House

OTHER = ModelName("other")


def test_with_a_queue_limit_of_one_a_runner_and_a_waiter_are_accepted_and_a_third_is_refused_until_the_queue_drains() -> None:
    house = House(Settings(max_queued=1))
    house.up(slots=1)
    _, running = house.start()
    waiter = house.submit()
    with pytest.raises(Overloaded) as caught:
        house.submit()
    assert (caught.value.depth, caught.value.limit) == (1, 1)
    house.prepared(waiter)
    house.end(running)
    assert house.state_of(waiter) is RequestState.PREFILLING
    house.submit()


def test_a_queue_that_one_tenant_has_filled_is_still_open_to_another_up_to_its_share() -> None:
    house = House(Settings(max_queued=10))
    house.tenant("flood", max_queued=1000)
    house.up(slots=1)
    house.start("flood")
    for _ in range(10):
        house.submit("flood")
    with pytest.raises(Overloaded):
        house.submit("flood")
    for _ in range(5):
        house.submit("other")
    with pytest.raises(Overloaded) as caught:
        house.submit("other")
    assert (caught.value.depth, caught.value.limit) == (15, 10)


def test_a_full_queue_is_closed_to_tenants_whose_share_is_less_than_one_place() -> None:
    house = House(Settings(max_queued=4))
    house.up(slots=1)
    house.start("first")
    for number in range(4):
        house.submit(f"tenant {number}")
    with pytest.raises(Overloaded) as caught:
        house.submit("one more")
    assert (caught.value.depth, caught.value.limit) == (4, 4)


def test_the_tenants_own_queue_limit_is_counted_likewise_and_leaves_other_tenants_alone() -> None:
    house = House()
    house.tenant("small", max_running=1, max_queued=1)
    house.up(slots=4)
    house.submit("small")
    house.submit("small")
    with pytest.raises(TenantLimitReached, match="small") as caught:
        house.submit("small")
    assert (caught.value.depth, caught.value.limit) == (1, 1)
    house.submit("large")


def test_a_tenant_that_may_not_queue_at_all_is_served_whenever_a_slot_is_free() -> None:
    house = House()
    house.tenant("now", max_queued=0)
    house.up(slots=1)
    request, sequence = house.start("now")
    with pytest.raises(TenantLimitReached):
        house.submit("now")
    house.finish(sequence)
    assert house.outcomes[request].state == "finished"
    house.submit("now")  # the slot is promised to be free, though the worker has not said Released yet


def test_the_models_queue_counts_a_slot_as_free_once_its_request_has_ended() -> None:
    house = House(Settings(max_queued=1))
    house.up(slots=1)
    _, sequence = house.start()
    house.submit()
    with pytest.raises(Overloaded):
        house.submit()
    house.finish(sequence)
    house.submit()


def test_a_tenants_queue_is_counted_over_all_models() -> None:
    house = House()
    house.tenant("t", max_running=100, max_queued=2)
    house.up(slots=1)
    house.up(OTHER, slots=1)
    for model in (MODEL, OTHER):
        house.submit(model=model)
        house.submit(model=model)
    with pytest.raises(TenantLimitReached):
        house.submit(model=MODEL)
    with pytest.raises(TenantLimitReached):
        house.submit(model=OTHER)


def test_requests_wait_while_their_model_loads_and_are_prepared_once_it_is_up() -> None:
    house = House()
    house.add()
    request = house.submit()
    assert house.sent == []
    house.up()
    assert house.asked_to_prepare() == [request]


def test_a_request_for_an_unknown_or_unloaded_model_is_refused_by_name() -> None:
    house = House()
    with pytest.raises(ModelNotLoaded, match="'m'"):
        house.submit()
    house.up()
    waiting = house.submit()
    gone = ModelNotLoaded(MODEL, "was unloaded")
    house.do(ModelRemoved(MODEL, gone))
    error = house.outcomes[waiting].error
    assert error is not None
    assert error.args == gone.args
    with pytest.raises(ModelNotLoaded):
        house.submit()


def test_a_model_between_two_lives_still_queues_and_one_that_will_not_return_refuses() -> None:
    house = House()
    house.up()
    house.lose(restarting=True)
    request = house.submit()
    house.up(incarnation=2)
    assert house.asked_to_prepare() == [request]
    house.lose(incarnation=2, restarting=False)
    with pytest.raises(ModelUnavailable, match="SIGKILL"):
        house.submit()
    house.do(ModelAdded(MODEL, 4))
    house.submit()


def test_the_same_request_twice_is_refused_and_the_first_lives() -> None:
    house = House()
    house.up()
    request = house.request()
    house.do(Submit(request))
    (answer,) = house.do(Submit(request))
    assert isinstance(answer, Reject)
    assert house.state_of(request.id) is RequestState.PREPARING


def test_the_time_to_retry_follows_the_measured_service_time() -> None:
    def retry_seconds(service_seconds: float) -> float:
        house = House(Settings(max_queued=1))
        house.up(slots=2)
        for _ in range(3):
            _, sequence = house.start()
            house.now += service_seconds
            house.end(sequence)
        for _ in range(3):
            house.submit()
        with pytest.raises(Overloaded) as caught:
            house.submit()
        return caught.value.retry_after_seconds

    assert retry_seconds(10.0) == pytest.approx(5.0)
    assert retry_seconds(40.0) == pytest.approx(20.0)


def test_before_anything_was_measured_the_time_to_retry_is_what_the_running_have_taken_so_far() -> None:
    house = House(Settings(max_queued=1))
    house.up(slots=1)
    house.start()
    house.now += 30.0
    house.submit()
    with pytest.raises(Overloaded) as caught:
        house.submit()
    assert caught.value.retry_after_seconds == pytest.approx(30.0)


def test_a_tenant_with_a_small_share_is_told_to_wait_longer() -> None:
    house = House()
    house.tenant("light", weight=1.0, max_queued=1)
    house.tenant("heavy", weight=3.0, max_queued=1)
    house.up(slots=4)
    runners = [house.start(tenant)[1] for tenant in ("light", "heavy", "heavy", "heavy")]
    house.now += 8.0
    house.end(runners[0])
    house.start("light")
    times = {}
    for tenant in ("light", "heavy"):
        house.submit(tenant)
        with pytest.raises(TenantLimitReached) as caught:
            house.submit(tenant)
        times[tenant] = caught.value.retry_after_seconds
    assert times["light"] == pytest.approx(8.0)
    assert times["heavy"] == pytest.approx(8.0 / 3)


def test_prompts_are_estimated_by_their_text_and_counted_when_they_are_tokens() -> None:
    assert estimate_prompt_tokens(TextPrompt("x" * 400)) == 101
    assert estimate_prompt_tokens(ChatPrompt("y" * 40, tools_json="z" * 40)) == 21
    assert estimate_prompt_tokens(TokenPrompt(TokenIds([1, 2, 3]))) == 3
