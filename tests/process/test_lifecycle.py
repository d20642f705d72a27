"""Models that come when they are asked for and go when nobody needs them: loads on demand, idle ends, eviction. Fake engine."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

import runtime
from runtime.testing import Fault, expected_text, expected_tokens, fake_model, text_tokens
from tests.support import census
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

SLOW = {"decode_seconds_per_step": 0.01}
HUGE = 1 << 50


def make(
    name: str = "chat", *, pin: bool = False, idle: float | None = None, drafter: str | None = None, **script: Any
) -> runtime.ModelSpec:
    return msgspec.structs.replace(fake_model(name, **script), pin=pin, idle_unload_seconds=idle, drafter=drafter)


def states(rt: runtime.Runtime) -> dict[str, str]:
    return {info.name: info.state for info in rt.models()}


def pid(rt: runtime.Runtime, name: str) -> int | None:
    (info,) = [info for info in rt.models() if info.name == name]
    return info.pid


def workers() -> list[str]:
    return [command for command in census.processes().values() if "runtime.worker" in command]


async def check(rt: runtime.Runtime, model: str, prompt: str, num_tokens: int = 20) -> None:
    answer = await rt.tenant("a").generate(model, prompt=prompt, max_tokens=num_tokens)
    assert list(answer.token_ids) == expected_tokens(text_tokens(prompt), max_tokens=num_tokens)


async def outcome(call: Callable[[], Awaitable[object]], results: list[object]) -> None:
    try:
        results.append(await call())
    except runtime.TroupeError as error:
        results.append(error)


def before_launch(rt: runtime.Runtime, admit: Callable[[runtime.ModelSpec], Awaitable[None]]) -> None:
    """Have something happen before each process starts; an OSError from it fails the start."""
    launch = rt._supervisor._launch

    async def gated(spec: runtime.ModelSpec, key: str, incarnation: Any) -> Any:
        await admit(spec)
        return await launch(spec, key, incarnation)

    rt._supervisor._launch = gated


# -- on demand ------------------------------------------------------------------------------------------------


async def test_sixteen_first_requests_make_one_load_and_one_process() -> None:
    events: list[runtime.WatchEvent] = []

    async def watch(rt: runtime.Runtime, ready: anyio.Event) -> None:
        async with rt.watch() as watching:
            ready.set()
            async for event in watching:
                events.append(event)

    async with anyio.create_task_group() as outer, runtime.Runtime() as rt:
        watching = anyio.Event()
        outer.start_soon(watch, rt, watching)
        await watching.wait()
        rt.register(make(load_seconds=0.2))
        assert (states(rt), workers()) == ({"chat": "registered"}, [])
        async with anyio.create_task_group() as group:
            for number in range(16):
                group.start_soon(check, rt, "chat", f"{number}")
            group.start_soon(lambda: rt.tokenize("chat", prompt="x"))
        assert states(rt) == {"chat": "ready"}
        assert len(workers()) == 1
    pids = {event.pid for event in events if isinstance(event, runtime.ModelStateChanged) and event.state == "loading"}
    assert len(pids) == 1
    assert sum(isinstance(event, runtime.ModelStateChanged) and event.state == "spawned" for event in events) == 1


async def test_tokenizing_and_prefilling_load_too() -> None:
    async with runtime.Runtime() as rt:
        rt.register(make("one"))
        rt.register(make("two"))
        assert await rt.tokenize("one", prompt="hi") == text_tokens("hi")
        async with await rt.tenant("a").prefill("two", prompt="hi") as handle:
            assert list(handle.tokens) == text_tokens("hi")


async def test_a_failed_load_fails_those_that_waited_and_the_next_request_tries_again() -> None:
    tries: list[str] = []

    async def fail_first(spec: runtime.ModelSpec) -> None:
        tries.append(spec.name)
        if len(tries) == 1:
            raise OSError("no process left")

    results: list[object] = []
    async with runtime.Runtime() as rt:
        before_launch(rt, fail_first)
        rt.register(make())
        async with anyio.create_task_group() as group:
            for number in range(4):
                group.start_soon(outcome, lambda number=number: check(rt, "chat", f"{number}"), results)
        assert [type(result) for result in results] == [runtime.ModelLoadFailed] * 4
        assert states(rt) == {"chat": "registered"}
        await check(rt, "chat", "again")
        assert len(tries) == 2


async def test_a_request_right_behind_a_failure_is_answered() -> None:
    """It comes after the scheduler has told of the failure, and perhaps before the supervisor has cleared the name."""
    tries: list[str] = []

    async def fail_first(spec: runtime.ModelSpec) -> None:
        tries.append(spec.name)
        if len(tries) == 1:
            raise OSError("no process left")

    async with runtime.Runtime() as rt:
        before_launch(rt, fail_first)
        rt.register(make())
        with pytest.raises(runtime.ModelLoadFailed):
            await check(rt, "chat", "x")
        await check(rt, "chat", "x")


async def test_a_path_that_leads_nowhere_is_told_to_the_request() -> None:
    async with runtime.Runtime() as rt:
        rt.register(runtime.ModelSpec("chat", path="/nowhere/at/all"))
        for _ in range(2):
            with pytest.raises(runtime.ModelLoadFailed, match="nowhere"):
                await check(rt, "chat", "x")


async def test_only_the_last_waiting_request_that_leaves_ends_the_load_and_nothing_is_left(run_directories: Path) -> None:
    started: list[anyio.CancelScope] = []

    async def wait(rt: runtime.Runtime) -> None:
        with anyio.CancelScope() as scope:
            started.append(scope)
            await rt.tenant("a").generate("chat", prompt="x")

    async with runtime.Runtime() as rt:
        before = census.take(run_directories)
        rt.register(make(load_seconds=60.0))
        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(wait, rt)
            await until(lambda: states(rt) == {"chat": "loading"})
            loading = pid(rt, "chat")
            for scope in started[:2]:
                scope.cancel()
            await until(lambda: rt.stats().scheduler.cancelled == 2)
            assert (states(rt), pid(rt, "chat")) == ({"chat": "loading"}, loading)
            started[2].cancel()
        assert states(rt) == {"chat": "registered"}
        assert not await anyio.to_thread.run_sync(census.wait_until_gone, before, run_directories, 5.0)
        assert rt.stats().workers == ()
        assert not rt.stats().scheduler.models


async def test_a_request_in_the_moment_a_load_is_cancelled_begins_another() -> None:
    async with runtime.Runtime() as rt:
        rt.register(make(load_seconds=0.3))
        async with rt.tenant("a").stream("chat", prompt="x") as first:
            await until(lambda: states(rt) == {"chat": "loading"})
            first.cancel()
            async with rt.tenant("a").stream("chat", prompt="y", max_tokens=5) as second:
                answer = await second.completion()
        assert answer.text == expected_text(text_tokens("y"), max_tokens=5)


async def test_an_explicit_load_goes_on_when_the_requests_leave() -> None:
    infos: list[object] = []
    async with runtime.Runtime() as rt:
        spec = make(load_seconds=0.3)
        rt.register(spec)
        async with anyio.create_task_group() as group:
            async with rt.tenant("a").stream("chat", prompt="x"):
                group.start_soon(outcome, lambda: rt.load(spec), infos)
                await until(lambda: states(rt) == {"chat": "loading"})
        (info,) = infos
        assert isinstance(info, runtime.ModelInfo)
        assert info.state == "ready"


async def test_a_refused_request_loads_nothing() -> None:
    async with runtime.Runtime() as rt:
        rt.register(make())
        with pytest.raises(runtime.InvalidRequest, match="no drafter"):
            await rt.tenant("a").generate("chat", prompt="x", speculate=True)
        assert states(rt) == {"chat": "registered"}
        with pytest.raises(runtime.ModelNotLoaded, match="'chat'"):
            await check(rt, "other", "x")


async def test_closing_ends_a_load_on_demand() -> None:
    results: list[object] = []
    async with anyio.create_task_group() as group:
        async with runtime.Runtime() as rt:
            rt.register(make(load_seconds=60.0))
            group.start_soon(outcome, lambda: check(rt, "chat", "x"), results)
            await until(lambda: states(rt) == {"chat": "loading"})
    assert [type(result) for result in results] == [runtime.RuntimeClosed]


async def test_unloading_ends_a_load_on_demand_and_a_registered_name_comes_back() -> None:
    results: list[object] = []
    async with runtime.Runtime() as rt:
        rt.register(make(load_seconds=0.5))
        async with anyio.create_task_group() as group:
            group.start_soon(outcome, lambda: check(rt, "chat", "x"), results)
            await until(lambda: states(rt) == {"chat": "loading"})
            await rt.unload("chat")
        assert [type(result) for result in results] == [runtime.ModelLoadFailed]
        await check(rt, "chat", "x")
        await rt.unload("chat")
        assert states(rt) == {"chat": "unloaded"}
        await rt.unregister("chat")
        assert states(rt) == {}
        with pytest.raises(runtime.ModelNotLoaded):
            await check(rt, "chat", "x")


async def test_loads_unloads_and_requests_in_any_order_leave_one_worker_or_none() -> None:
    """Whatever a request hears, it is an answer or a typed error, and the model serves again afterwards."""
    results: list[object] = []
    spec = make()
    async with runtime.Runtime() as rt:
        rt.register(spec)
        async with anyio.create_task_group() as group:
            for number in range(8):
                group.start_soon(outcome, lambda number=number: check(rt, "chat", f"{number}"), results)
                group.start_soon(outcome, lambda: rt.load(spec), results)
                group.start_soon(outcome, lambda: rt.unload("chat"), results)
                await anyio.sleep(0.02)
        errors = {type(result) for result in results if isinstance(result, Exception)}
        assert errors <= {runtime.ModelLoadFailed, runtime.ModelNotLoaded}
        await check(rt, "chat", "after")
        await until(lambda: len(workers()) == 1)


async def test_a_registered_drafter_is_loaded_with_its_target() -> None:
    async with runtime.Runtime() as rt:
        rt.register(make("small", load_seconds=0.5))
        rt.register(make(drafter="small"))
        await check(rt, "chat", "x")
        assert states(rt)["small"] != "ready"  # the target neither waits for its load nor ends it
        await until(lambda: states(rt) == {"chat": "ready", "small": "ready"})


# -- idle -----------------------------------------------------------------------------------------------------


async def test_an_idle_model_ends_and_its_next_request_brings_it_back_with_its_settings() -> None:
    ended: list[runtime.ModelEnded] = []

    async def watch(rt: runtime.Runtime) -> None:
        async with rt.watch() as events:
            async for event in events:
                if isinstance(event, runtime.ModelEnded):
                    ended.append(event)

    async with anyio.create_task_group() as group, runtime.Runtime() as rt:
        group.start_soon(watch, rt)
        first = await rt.load(make(idle=0.2, context_length=777))
        await until(lambda: states(rt) == {"chat": "unloaded"})
        await until(lambda: not workers())
        await check(rt, "chat", "x")
        (again,) = rt.models()
        assert again.context_length == first.context_length == 777
        assert again.pid != first.pid
        await until(lambda: len(ended) == 2)
    assert set(ended) == {runtime.ModelEnded("chat", "idle")}


async def test_a_stream_longer_than_the_idle_time_keeps_its_model_also_while_nobody_reads() -> None:
    async with runtime.Runtime(runtime.Settings(stream_window_tokens=4)) as rt:
        info = await rt.load(make(idle=0.1, **SLOW))
        async with rt.tenant("a").stream("chat", prompt="x", max_tokens=40) as stream:
            async for _ in stream:
                break
            await anyio.sleep(0.4)  # parked: several idle times pass
            answer = await stream.completion()
        assert list(answer.token_ids) == expected_tokens(text_tokens("x"), max_tokens=40)
        assert (states(rt), pid(rt, "chat")) == ({"chat": "ready"}, info.pid)
        await until(lambda: states(rt) == {"chat": "unloaded"})


# -- memory pressure ------------------------------------------------------------------------------------------


async def test_room_is_made_of_the_least_recently_used_model_that_is_neither_busy_nor_pinned() -> None:
    async with runtime.Runtime() as rt:
        for spec in (make("pinned", pin=True), make("first"), make("second"), make("third"), make("busy", **SLOW)):
            await rt.load(spec)
        await check(rt, "first", "x")
        async with rt.tenant("a").stream("busy", prompt="x", max_tokens=60) as stream:
            assert not await rt._residency.make_room(HUGE)
            assert set(states(rt).values()) == {"ready"}
            assert await rt._residency.make_room(1)
            assert {name for name, state in states(rt).items() if state == "unloaded"} == {"second"}
            assert len(workers()) == 4
            assert await rt._residency.make_room(1)
            assert {name for name, state in states(rt).items() if state == "unloaded"} == {"second", "third"}
            answer = await stream.completion()
        assert list(answer.token_ids) == expected_tokens(text_tokens("x"), max_tokens=60)
        await check(rt, "second", "back")


async def test_a_drafter_of_a_loaded_model_is_evicted_last_and_never_while_its_target_is_busy() -> None:
    async with runtime.Runtime() as rt:
        for spec in (make("small"), make("chat", drafter="small", **SLOW), make("other")):
            await rt.load(spec)
        assert await rt._residency.make_room(1)
        assert states(rt)["small"] == "ready"
        await check(rt, "other", "x")
        async with rt.tenant("a").stream("chat", prompt="x", max_tokens=40) as stream:
            assert await rt._residency.make_room(1)
            assert states(rt)["other"] == "unloaded"
            assert not await rt._residency.make_room(1)
            await stream.completion()


async def test_a_stream_goes_on_unchanged_while_another_model_loads_under_pressure() -> None:
    """A ledger with room for two models is played: the third load waits until an idle one has gone."""
    gone: list[int] = []

    async with runtime.Runtime() as rt:

        async def admit(spec: runtime.ModelSpec) -> None:
            if len(rt.stats().workers) > 2 and not await rt._residency.make_room(1):
                raise OSError("no memory left")
            gone.append(len(workers()))

        await rt.load(make("streaming", **SLOW))
        await rt.load(make("idle"))
        before_launch(rt, admit)
        async with rt.tenant("a").stream("streaming", prompt="x", max_tokens=150) as stream:
            async for _ in stream:
                break
            rt.register(make("wanted"))
            await check(rt, "wanted", "y")
            assert gone == [1]  # the idle one's process had ended before the new one started
            assert states(rt) == {"streaming": "ready", "wanted": "ready", "idle": "unloaded"}
            rt.register(make("too-much"))
            async with rt.tenant("b").stream("wanted", prompt="z", max_tokens=4000) as other:
                async for _ in other:
                    break
                with pytest.raises(runtime.ModelLoadFailed, match="no memory left"):
                    await check(rt, "too-much", "y")
            answer = await stream.completion()
        assert list(answer.token_ids) == expected_tokens(text_tokens("x"), max_tokens=150)


async def test_a_worker_that_dies_on_demand_is_no_reason_to_forget_the_name() -> None:
    async with runtime.Runtime() as rt:
        rt.register(make(faults=(Fault("decode", "kill", number=3),)))
        await check(rt, "chat", "x")
        (info,) = rt.models()
        assert (info.state, info.restarts) == ("ready", 1)
