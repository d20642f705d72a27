"""Several workers of one model under one name: requests spread over them, and those of a dead one go on in the others."""

from __future__ import annotations

import os
import signal

import anyio
import pytest

import runtime
from runtime.testing import Fault, expected_tokens, fake_model, text_tokens
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


def make_replicas(name: str = "chat", *, replicas: int = 2, max_slots: int = 2, **script: object) -> runtime.ModelSpec:
    spec = fake_model(name, max_slots=max_slots, **script)  # type: ignore[arg-type]
    return runtime.ModelSpec(name, kind="fake", fake=spec.fake, max_slots=max_slots, replicas=replicas)


def kill(rt: runtime.Runtime, name: str) -> None:
    (pid,) = [info.pid for info in rt.models() if info.name == name]
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


async def ask(rt: runtime.Runtime, answers: dict[int, runtime.Completion], number: int, num_tokens: int) -> None:
    tenant = rt.tenant(f"{number % 3}")
    answers[number] = await tenant.generate("chat", prompt=f"{number}", max_tokens=num_tokens)


def check(answers: dict[int, runtime.Completion], num_answers: int, num_tokens: int) -> None:
    assert len(answers) == num_answers
    for number, answer in answers.items():
        assert list(answer.token_ids) == expected_tokens(text_tokens(f"{number}"), max_tokens=num_tokens)


async def test_requests_are_spread_over_all_replicas_and_the_model_has_one_name() -> None:
    answers: dict[int, runtime.Completion] = {}
    async with runtime.Runtime() as rt:
        await rt.load(make_replicas(replicas=3, decode_seconds_per_step=0.005))
        assert [info.name for info in rt.models()] == ["chat", "chat#2", "chat#3"]
        assert len({info.pid for info in rt.models()}) == 3
        async with anyio.create_task_group() as group:
            for number in range(6):
                group.start_soon(ask, rt, answers, number, 60)
            await until(lambda: sum(model.running for model in rt.stats().scheduler.models.values()) == 6)
            assert [model.running for model in rt.stats().scheduler.models.values()] == [2, 2, 2]
        check(answers, 6, 60)
        with pytest.raises(runtime.ModelNotLoaded):
            await rt.tenant("a").generate("chat#2", prompt="hi")
        await rt.unload("chat")
        assert rt.models() == []


async def test_what_waits_at_a_full_replica_goes_to_an_idle_one() -> None:
    answers: dict[int, runtime.Completion] = {}
    async with runtime.Runtime() as rt:
        await rt.load(make_replicas(max_slots=1, decode_seconds_per_step=0.01))
        async with anyio.create_task_group() as group:
            group.start_soon(ask, rt, answers, 0, 150)
            await until(lambda: rt.stats().scheduler.models["chat"].running == 1)
            for number in range(1, 5):
                group.start_soon(ask, rt, answers, number, 5)
            await until(lambda: len(answers) == 4)
            assert 0 not in answers, "nobody waited for the long one"
        check({number: answer for number, answer in answers.items() if number}, 4, 5)


async def test_the_requests_of_a_dead_replica_go_on_in_the_other_at_once() -> None:
    answers: dict[int, runtime.Completion] = {}
    async with runtime.Runtime() as rt:
        await rt.load(make_replicas(max_slots=8, decode_seconds_per_step=0.005, load_seconds=1.0))
        async with anyio.create_task_group() as group:
            for number in range(8):
                group.start_soon(ask, rt, answers, number, 150)
            await until(lambda: sum(model.running for model in rt.stats().scheduler.models.values()) == 8)
            kill(rt, "chat")
            await until(lambda: rt.stats().scheduler.models["chat#2"].running == 8)
            assert next(info.state for info in rt.models() if info.name == "chat") != "ready", "nobody waited for its restart"
        check(answers, 8, 150)
        assert rt.stats().scheduler.failed == 0
        rt._scheduler.state.validate()


async def test_a_replica_that_is_not_started_again_leaves_its_requests_to_the_others() -> None:
    answers: dict[int, runtime.Completion] = {}
    async with runtime.Runtime(runtime.Settings(max_restarts=0)) as rt:
        await rt.load(make_replicas(max_slots=8, decode_seconds_per_step=0.005))
        async with anyio.create_task_group() as group:
            for number in range(8):
                group.start_soon(ask, rt, answers, number, 100)
            await until(lambda: sum(model.running for model in rt.stats().scheduler.models.values()) == 8)
            kill(rt, "chat")
        check(answers, 8, 100)
        assert [info.state for info in rt.models()] == ["failed", "ready"]
        await ask(rt, answers, 8, 5)
        kill(rt, "chat#2")
        await until(lambda: [info.state for info in rt.models()] == ["failed", "failed"])
        with pytest.raises(runtime.ModelUnavailable):
            await rt.tenant("a").generate("chat", prompt="hi")
        await rt.load(make_replicas(max_slots=8, decode_seconds_per_step=0.005))
        await ask(rt, answers, 9, 5)


async def test_a_load_in_which_one_replica_fails_leaves_none() -> None:
    async with runtime.Runtime() as rt:
        with pytest.raises(runtime.ModelLoadFailed):
            await rt.load(make_replicas(replicas=3, faults=(Fault("load", "exit"),)))
        await until(lambda: rt.models() == [])


@pytest.mark.parametrize("name", ["chat#2", "a#17"])
def test_a_name_that_looks_like_a_replicas_is_refused(name: str) -> None:
    with pytest.raises(runtime.InvalidRequest, match="does not end in"):
        fake_model(name)
