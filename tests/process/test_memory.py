"""Models that do not fit together: who waits, who goes, who is told; with fake models that say how large they are."""

from __future__ import annotations

import os
import signal

import anyio
import pytest

import runtime
from runtime.testing import FakeScript, expected_tokens, text_tokens
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

GIB = 1 << 30


def model(name: str, num_bytes: int = GIB, *, pin: bool = False, **script: object) -> runtime.ModelSpec:
    return runtime.ModelSpec(name, kind="fake", fake=FakeScript(weight_bytes=num_bytes, **script), pin=pin)  # type: ignore[arg-type]


def settings(num_bytes: int, wait_seconds: float = 0.3) -> runtime.Settings:
    return runtime.Settings(memory_budget_bytes=num_bytes, memory_wait_seconds=wait_seconds, prefix_memory_bytes=0)


async def test_of_two_loads_with_room_for_one_exactly_one_proceeds() -> None:
    outcomes: dict[str, object] = {}

    async def load(name: str) -> None:
        try:
            outcomes[name] = await rt.load(model(name, load_seconds=0.6))
        except runtime.MemoryShort as error:
            outcomes[name] = error

    async with runtime.Runtime(settings(3 * GIB // 2)) as rt:
        async with anyio.create_task_group() as group:
            for name in ("one", "two"):
                group.start_soon(load, name)
        (error,) = [outcome for outcome in outcomes.values() if isinstance(outcome, runtime.MemoryShort)]
        assert (error.needed_bytes > GIB, error.budget_bytes) == (True, 3 * GIB // 2)
        assert error.retry_after_seconds > 0
        assert "wait until one is idle" in str(error)
        assert [info.state for info in rt.models()] == ["ready"]
        memory = rt.stats().memory
        assert GIB < memory.reserved_bytes <= memory.budget_bytes
        assert [one.weights_bytes for one in memory.models] == [GIB]


async def test_an_idle_model_makes_room_and_what_it_held_is_given_back_when_its_process_is_gone() -> None:
    async with runtime.Runtime(settings(3 * GIB // 2)) as rt:
        await rt.load(model("old"))
        pid = rt.models()[0].pid
        assert pid is not None
        await rt.load(model("new"))
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        assert [info.name for info in rt.models() if info.state == "ready"] == ["new"]
        await rt.unload("new")
        assert rt.stats().memory.reserved_bytes == 0


async def test_a_long_stream_goes_on_unchanged_while_another_model_waits_for_its_memory() -> None:
    async with runtime.Runtime(settings(3 * GIB // 2, wait_seconds=30.0)) as rt:
        await rt.load(model("busy", decode_seconds_per_step=0.005))
        loaded = anyio.Event()

        async def load() -> None:
            await rt.load(model("waiting"))
            loaded.set()

        async with anyio.create_task_group() as group:
            async with rt.tenant("a").stream("busy", prompt="hi", max_tokens=200) as stream:
                await anext(stream)
                group.start_soon(load)
                answer = await stream.completion()
                assert not loaded.is_set()
            assert list(answer.token_ids) == expected_tokens(text_tokens("hi"), max_tokens=200)
        assert [info.name for info in rt.models() if info.state == "ready"] == ["waiting"]


async def test_a_pinned_model_stays_and_what_can_never_fit_is_refused_at_once() -> None:
    async with runtime.Runtime(settings(3 * GIB // 2, wait_seconds=30.0)) as rt:
        await rt.load(model("pinned", pin=True))
        with anyio.fail_after(5), pytest.raises(runtime.MemoryShort, match="memory_budget_bytes"):
            await rt.load(model("huge", 2 * GIB))
        with anyio.move_on_after(0.5):
            await rt.load(model("second"))
        assert [info.name for info in rt.models() if info.state == "ready"] == ["pinned"]
        await until(lambda: len(rt.stats().memory.models) == 1)


async def test_a_worker_that_dies_keeps_its_memory_for_its_next_life() -> None:
    async with runtime.Runtime(settings(3 * GIB // 2, wait_seconds=0.1)) as rt:
        await rt.load(model("chat", load_seconds=0.5))
        pid = rt.models()[0].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await until(lambda: rt.models()[0].state != "ready")
        with pytest.raises(runtime.MemoryShort):
            await rt.load(model("other"))
        await until(lambda: rt.models()[0].state == "ready")


async def test_a_request_for_a_model_that_there_is_no_room_for_is_told() -> None:
    async with runtime.Runtime(settings(GIB)) as rt:
        rt.register(model("huge", 2 * GIB))
        with pytest.raises(runtime.MemoryShort):
            await rt.tenant("a").generate("huge", prompt="hi")


async def test_a_plan_agrees_with_what_the_loads_then_find() -> None:
    async with runtime.Runtime(settings(3 * GIB)) as rt:
        both = [model("one", pin=True), model("two", pin=True)]
        assert (await rt.plan(both)).fits
        three = [*both, model("three", pin=True)]
        plan = await rt.plan(three)
        assert not plan.fits
        assert plan.needed_bytes > plan.budget_bytes == 3 * GIB
        assert "leave out" in plan.advice
        assert rt.models() == []
        for spec in both:
            await rt.load(spec)
        with pytest.raises(runtime.MemoryShort):
            await rt.load(three[-1])
