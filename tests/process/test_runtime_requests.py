"""Requests through a whole Runtime: read, left, cancelled, slow, too many, too late. Real processes, the fake engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

import runtime
from runtime.options import RANGES, validate
from runtime.scheduler.request import sequence_seed
from runtime.testing import chat_tokens, expected_text, expected_tokens, fake_model, text_tokens
from tests.property.workload import make_workload, run_together
from tests.support.waiting import until, until_async

pytestmark = pytest.mark.anyio

FAR = 1000.0


@asynccontextmanager
async def chat(settings: runtime.Settings | None = None, **script: Any) -> AsyncIterator[runtime.Runtime]:
    """A Runtime with the model "chat", which at its end must hold nothing any more."""
    async with runtime.Runtime(settings) as rt:
        await rt.load(fake_model("chat", **script))
        yield rt
        if rt.models() and rt.models()[0].state == "ready":
            await assert_at_rest(rt)


async def assert_at_rest(rt: runtime.Runtime) -> None:
    """Host and worker agree that nothing is left of any request."""
    report = await rt.inspect("chat")
    assert (report.running, report.parked, report.prefilling, report.preparing) == ((), (), (), ())
    await until(lambda: not rt._scheduler.state.book.requests)
    rt._scheduler.state.validate()
    stats = rt.stats().scheduler.models["chat"]
    assert (stats.queued, stats.preparing, stats.prefilling, stats.running, stats.used_slots) == (0, 0, 0, 0, 0)


async def test_every_kind_of_prompt_is_answered() -> None:
    messages = [{"role": "user", "content": "Hi"}]
    async with chat() as rt:
        tenant = rt.tenant("a")
        by_text = await tenant.generate("chat", prompt="Hi", max_tokens=9)
        by_tokens = await tenant.generate("chat", tokens=text_tokens("Hi"), max_tokens=9)
        by_messages = await tenant.generate("chat", messages=messages, max_tokens=9, primer="Well, ")
        assert list(by_text.token_ids) == expected_tokens(text_tokens("Hi"), max_tokens=9)
        assert by_tokens.token_ids == by_text.token_ids
        assert list(by_messages.token_ids) == expected_tokens(chat_tokens(messages, primer="Well, "), max_tokens=9)
        assert by_text.usage.prompt_tokens == len(text_tokens("Hi"))
        assert by_text.usage.total_tokens == by_text.usage.prompt_tokens + 9
        assert by_text.finish_reason == "length"
        assert by_text.fingerprint == rt.models()[0].fingerprint


async def test_what_the_host_allows_is_not_refused_by_the_worker() -> None:
    async with chat() as rt:
        for option, allowed in RANGES.items():
            for edge in (allowed.high,) if allowed.above else (allowed.low, allowed.high):
                asked: Any = {"max_tokens": 2, "temperature": 1.0, option: edge}
                await rt.tenant("a").generate("chat", prompt="hi", **asked)


async def test_control_characters_arrive_intact() -> None:
    said = "a\x00b\x1e\x1f\x7f\u2028c\r\n\t😀"
    async with chat(reply=said) as rt:
        answer = await rt.tenant("a").generate("chat", prompt="\x00\x01\x1f")
        assert (answer.text, answer.finish_reason) == (said, "stop")


async def test_stop_strings_end_the_text_and_are_named() -> None:
    async with chat(reply="one END two") as rt:
        answer = await rt.tenant("a").generate("chat", prompt="hi", stop=["END", "ENDING", "  "])
        assert (answer.text, answer.finish_reason, answer.matched_stop) == ("one ", "stop", "END")
        assert "spaces only" in answer.warnings[0]


async def test_a_request_the_worker_refuses_is_a_typed_error_and_the_worker_lives_on() -> None:
    async with chat(context_length=64) as rt:
        tenant = rt.tenant("a")
        with pytest.raises(runtime.ContextTooLong) as caught:
            await tenant.generate("chat", prompt="x" * 100)
        assert caught.value.context_length == 64
        with pytest.raises(runtime.InvalidRequest):
            await tenant.generate("chat", tokens=[1 << 20])
        assert (await tenant.generate("chat", prompt="hi", max_tokens=3)).token_ids
        assert rt.models()[0].restarts == 0


async def test_several_sequences_each_draw_with_their_own_seed() -> None:
    options: dict[str, Any] = {"prompt": "hi", "max_tokens": 12, "temperature": 1.0, "seed": 7}
    async with chat() as rt:
        answer = await rt.tenant("a").generate("chat", n=4, **options)
        sampling = validate(options).sampling
        for number, sequence in enumerate((answer, *answer.alternatives)):
            own = type(sampling)(temperature=1.0, seed=sequence_seed(7, number))
            assert list(sequence.token_ids) == expected_tokens(text_tokens("hi"), max_tokens=12, sampling=own)
        assert len({sequence.token_ids for sequence in (answer, *answer.alternatives)}) == 4


async def test_a_drawn_seed_repeats_the_answer() -> None:
    async with chat() as rt:
        tenant = rt.tenant("a")
        first = await tenant.generate("chat", prompt="hi", temperature=1.0, max_tokens=20)
        again = await tenant.generate("chat", prompt="hi", temperature=1.0, max_tokens=20, seed=first.seed)
        other = await tenant.generate("chat", prompt="hi", temperature=1.0, max_tokens=20)
        assert first.token_ids == again.token_ids
        assert first.token_ids != other.token_ids


async def test_leaving_after_the_first_delta_stops_the_computing_within_two_steps() -> None:
    async with chat(decode_seconds_per_step=0.01) as rt:
        tenant = rt.tenant("a")
        async with tenant.stream("chat", prompt="hi", max_tokens=10_000) as stream:
            async for _ in stream:
                break
            before = (await rt.inspect("chat")).steps
        after = (await rt.inspect("chat")).steps
        assert after - before <= 2
        await anyio.sleep(0.1)
        assert (await rt.inspect("chat")).steps == after
        assert (await tenant.generate("chat", prompt="next", max_tokens=3)).token_ids


async def test_after_a_break_the_completion_comes_whole() -> None:
    async with chat(decode_seconds_per_step=0.001) as rt:
        async with rt.tenant("a").stream("chat", prompt="hi", max_tokens=600) as stream:
            async for _ in stream:
                break
            completion = await stream.completion()
        assert list(completion.token_ids) == expected_tokens(text_tokens("hi"), max_tokens=600)


async def test_a_slow_client_parks_a_bounded_number_of_tokens_ahead_and_holds_up_nobody() -> None:
    async with chat(runtime.Settings(stream_window_tokens=8)) as rt:
        async with rt.tenant("slow").stream("chat", prompt="slow", max_tokens=200) as slow:
            events = [await anext(slow)]
            await until_async(lambda: parked(rt))
            quick = await rt.tenant("quick").generate("chat", prompt="quick", max_tokens=500)
            assert list(quick.token_ids) == expected_tokens(text_tokens("quick"), max_tokens=500)
            steps = (await rt.inspect("chat")).steps
            await anyio.sleep(0.05)
            assert (await rt.inspect("chat")).steps == steps, "a parked sequence costs nothing"
            assert len(slow._source.sequences[0].token_ids) <= 2 * 8
            events.extend([event async for event in slow])
        tokens = [token for event in events if isinstance(event, runtime.TextDelta) for token in event.token_ids]
        assert tokens == expected_tokens(text_tokens("slow"), max_tokens=200)


async def parked(rt: runtime.Runtime) -> bool:
    return bool((await rt.inspect("chat")).parked)


STATES = ["queued", "preparing", "prefilling", "decoding", "parked"]


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("way", ["leave", "cancel scope", "by hand"])
async def test_a_request_can_be_left_in_every_state_and_nothing_stays(state: str, way: str) -> None:
    settings = runtime.Settings(stream_window_tokens=4 if state == "parked" else 256, prefill_chunk_tokens=16)
    slow = {"decode_seconds_per_step": 0.005, "prefill_seconds_per_token": 0.002 if state == "prefilling" else 0.0}
    async with chat(settings, **slow) as rt:
        tenant = rt.tenant("a", runtime.TenantSpec(max_running=1))
        async with anyio.create_task_group() as group:
            if state == "queued":
                group.start_soon(lambda: tenant.generate("chat", prompt="ahead", max_tokens=30))
                await anyio.wait_all_tasks_blocked()
            with anyio.CancelScope() as scope:
                async with tenant.stream("chat", prompt="x" * 400, max_tokens=10_000) as stream:
                    if state == "queued":
                        pass
                    elif state == "prefilling":
                        await until_async(lambda: prefilling(rt))
                    elif state != "preparing":
                        await anext(stream)
                    if state == "parked":
                        await until_async(lambda: parked(rt))
                    if way == "by hand":
                        stream.cancel()
                        assert (await stream.completion()).finish_reason == "cancelled"
                    elif way == "cancel scope":
                        scope.cancel()
                        await anyio.sleep_forever()
        assert rt.stats().scheduler.cancelled == 1
        answer = await tenant.generate("chat", prompt="after", max_tokens=5)
        assert list(answer.token_ids) == expected_tokens(text_tokens("after"), max_tokens=5)


async def prefilling(rt: runtime.Runtime) -> bool:
    return bool((await rt.inspect("chat")).prefilling)


async def test_a_request_may_wait_for_a_loading_model_and_be_left_meanwhile() -> None:
    async with runtime.Runtime() as rt:
        tenant = rt.tenant("a")
        answers: list[runtime.Completion] = []

        async def ask() -> None:
            answers.append(await tenant.generate("chat", prompt="hi", max_tokens=5))

        async with anyio.create_task_group() as group:
            group.start_soon(rt.load, fake_model("chat", load_seconds=0.3))
            await until(lambda: rt.models() and rt.models()[0].state == "loading")
            group.start_soon(ask)
            async with tenant.stream("chat", prompt="left", max_tokens=10_000):
                pass
            with anyio.move_on_after(0.01):
                await tenant.generate("chat", prompt="cancelled")
        assert list(answers[0].token_ids) == expected_tokens(text_tokens("hi"), max_tokens=5)
        stats = rt.stats().scheduler
        assert (stats.finished, stats.cancelled) == (1, 2)
        await assert_at_rest(rt)


async def test_cancelling_a_queued_request_leaves_the_running_one_whole() -> None:
    async with chat(decode_seconds_per_step=0.002) as rt:
        tenant = rt.tenant("a", runtime.TenantSpec(max_running=1))
        async with tenant.stream("chat", prompt="first", max_tokens=60) as running:
            events = [await anext(running)]
            async with tenant.stream("chat", prompt="second", max_tokens=60) as queued:
                queued.cancel()
                assert (await queued.completion()).finish_reason == "cancelled"
            events.extend([event async for event in running])
        tokens = [token for event in events if isinstance(event, runtime.TextDelta) for token in event.token_ids]
        assert tokens == expected_tokens(text_tokens("first"), max_tokens=60)


async def test_a_deadline_ends_the_request_with_its_text_and_the_worker_goes_on() -> None:
    async with chat(decode_seconds_per_step=0.01) as rt:
        tenant = rt.tenant("a")
        with pytest.raises(runtime.DeadlineExceeded) as caught:
            await tenant.generate("chat", prompt="hi", max_tokens=10_000, deadline_seconds=0.2)
        assert caught.value.partial_text
        assert expected_text(text_tokens("hi"), max_tokens=1000).startswith(caught.value.partial_text)
        assert (await tenant.generate("chat", prompt="hi", max_tokens=3)).token_ids


async def test_a_tenants_full_queue_refuses_with_depth_and_limit_and_takes_again_later() -> None:
    async with chat(decode_seconds_per_step=0.01) as rt:
        tenant = rt.tenant("a", runtime.TenantSpec(max_running=1, max_queued=1))
        async with tenant.stream("chat", prompt="runs", max_tokens=10_000) as running:
            await anext(running)
            async with tenant.stream("chat", prompt="waits", max_tokens=1):
                with pytest.raises(runtime.TenantLimitReached) as caught:
                    await tenant.generate("chat", prompt="one too many")
                assert (caught.value.depth, caught.value.limit) == (1, 1)
                assert caught.value.retry_after_seconds > 0
                assert (await rt.tenant("other").generate("chat", prompt="hi", max_tokens=2)).token_ids
        assert (await tenant.generate("chat", prompt="hi", max_tokens=2)).token_ids


async def test_a_models_full_queue_refuses_everybody() -> None:
    async with runtime.Runtime(runtime.Settings(max_queued=1)) as rt:
        await rt.load(fake_model("chat", max_slots=1, decode_seconds_per_step=0.01))
        async with rt.tenant("a").stream("chat", prompt="runs", max_tokens=10_000) as running:
            await anext(running)
            async with rt.tenant("b").stream("chat", prompt="waits", max_tokens=1):
                with pytest.raises(runtime.Overloaded) as caught:
                    await rt.tenant("c").generate("chat", prompt="one too many")
                assert (caught.value.depth, caught.value.limit) == (1, 1)


async def test_a_flood_from_one_tenant_does_not_keep_another_waiting() -> None:
    ended: list[str] = []

    async def ask(tenant: runtime.Tenant, prompt: str) -> None:
        try:
            await tenant.generate("chat", prompt=prompt, max_tokens=20)
        except runtime.TenantLimitReached:
            ended.append("refused")
        else:
            ended.append(tenant.name)

    async with runtime.Runtime() as rt:
        await rt.load(fake_model("chat", max_slots=4, decode_seconds_per_step=0.001))
        flood, calm = rt.tenant("flood", runtime.TenantSpec(max_queued=64)), rt.tenant("calm")
        async with anyio.create_task_group() as group:
            for number in range(100):
                group.start_soon(ask, flood, f"flood {number}")
            await until(lambda: len(ended) > 30)
            group.start_soon(ask, calm, "calm")
        assert ended.count("refused") == 100 - ended.count("flood")
        assert ended.count("flood") >= 64
        served = [name for name in ended if name != "refused"]
        assert served.index("calm") < len(served) - 30
        await assert_at_rest(rt)


async def test_many_ragged_requests_that_join_leave_and_dawdle_get_exactly_their_own_tokens() -> None:
    script = {"eos_one_in": 60, "decode_seconds_per_step": 0.001, "prefill_seconds_per_token": 0.0001}
    asks = make_workload(11, num_requests=32, longest_prompt=200, greedy_only=False, spread_seconds=0.3)
    async with chat(runtime.Settings(stream_window_tokens=4, prefill_chunk_tokens=32), **script) as rt:
        tenants = [
            rt.tenant("a"),
            rt.tenant("b", runtime.TenantSpec(weight=5.0)),
            rt.tenant("c", runtime.TenantSpec(max_running=1)),
        ]
        answers = await run_together(tenants, "chat", asks)
        assert rt.models()[0].restarts == 0
    model = fake_model("chat", **script)
    assert model.fake is not None
    for ask, answer in zip(asks, answers, strict=True):
        sampling = validate({"tokens": ask.tokens, **ask.options}).sampling
        expected = expected_tokens(ask.tokens, max_tokens=ask.options["max_tokens"], sampling=sampling, script=model.fake)
        if ask.leave_after_tokens is None:
            assert answer.token_ids == expected, ask
            assert answer.finish_reason == ("length" if len(expected) == ask.options["max_tokens"] else "stop"), ask
        else:
            assert answer.token_ids == expected[: len(answer.token_ids)], ask
