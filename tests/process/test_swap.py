"""Other weights under the same name while requests come and go. Fake engine: the weights are told by what they say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

import runtime
from runtime.testing import Fault, expected_tokens, fake_model, text_tokens
from tests.support import census
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

OLD, NEW = "o" * 60, "n" * 60


def saying(reply: str, *, replicas: int = 1, **script: Any) -> runtime.ModelSpec:
    spec = fake_model("chat", reply=reply, **{"decode_seconds_per_step": 0.003, **script})
    return msgspec.structs.replace(spec, replicas=replicas)


def workers() -> list[str]:
    return [command for command in census.processes().values() if "runtime.worker" in command]


@pytest.mark.parametrize("replicas", [1, 2])
async def test_under_load_no_request_fails_and_each_answer_is_wholly_of_one_set_of_weights(replicas: int) -> None:
    answers: list[runtime.Completion] = []
    over = anyio.Event()

    async def keep_asking(rt: runtime.Runtime, name: str) -> None:
        while not over.is_set():
            answers.append(await rt.tenant(name).generate("chat", prompt="x", max_tokens=100))

    async def keep_streaming(rt: runtime.Runtime, name: str) -> None:
        while not over.is_set():
            async with rt.tenant(name).stream("chat", prompt="x", max_tokens=100) as stream:
                text = "".join([event.text async for event in stream if isinstance(event, runtime.TextDelta)])
                answers.append(await stream.completion())
                assert text == answers[-1].text

    async with runtime.Runtime() as rt:
        old = await rt.load(saying(OLD, replicas=replicas))
        async with anyio.create_task_group() as group:
            for number in range(6):
                group.start_soon(keep_asking if number % 2 else keep_streaming, rt, f"{number}")
            await until(lambda: len(answers) > 6)
            new = await rt.swap(saying(NEW, replicas=replicas, load_seconds=0.3))
            num_before = len(answers)
            await until(lambda: len(answers) > num_before + 18)
            over.set()
        said = {old.fingerprint: OLD, new.fingerprint: NEW}
        assert len(said) == 2
        assert all(answer.text == said[answer.fingerprint] for answer in answers)
        assert {answer.text for answer in answers} == {OLD, NEW}
        assert [answer.text for answer in answers[-6:]] == [NEW] * 6
        await until(lambda: len(workers()) == replicas)
        assert {info.fingerprint for info in rt.models()} == {new.fingerprint}
        names = ["chat", "chat#2"][:replicas]
        assert [info.name for info in rt.models()] == list(rt.stats().scheduler.models) == names
        assert rt.stats().scheduler.failed == 0


async def test_new_requests_go_to_the_new_weights_at_once_and_an_old_stream_finishes_on_the_old() -> None:
    seen: list[object] = []

    async def watch(rt: runtime.Runtime) -> None:
        async with rt.watch() as events:
            async for event in events:
                if isinstance(event, runtime.ModelEnded | runtime.ModelSwapped):
                    seen.append(event)

    async with anyio.create_task_group() as group, runtime.Runtime() as rt:
        group.start_soon(watch, rt)
        old = await rt.load(saying(OLD))
        async with rt.tenant("a").stream("chat", prompt="x", max_tokens=100) as stream:
            async for _ in stream:
                break
            new = await rt.swap(saying(NEW, decode_seconds_per_step=0.0))
            assert {info.pid for info in rt.models()} == {old.pid, new.pid}
            assert list(rt.stats().scheduler.models) == ["chat"]
            assert (await rt.tenant("b").generate("chat", prompt="x", max_tokens=100)).text == NEW
            assert rt.capabilities("chat").batched_decode
            assert await rt.inspect("chat")
            completion = await stream.completion()
        assert (completion.text, completion.fingerprint) == (OLD, old.fingerprint)
        await until(lambda: len(seen) == 2)
    assert old.fingerprint is not None
    assert new.fingerprint is not None
    assert seen == [runtime.ModelSwapped("chat", old.fingerprint, new.fingerprint), runtime.ModelEnded("chat", "swapped")]


async def test_a_stream_of_the_old_weights_survives_its_workers_death_after_the_swap() -> None:
    async with runtime.Runtime() as rt:
        await rt.load(saying(OLD, faults=(Fault("decode", "kill", number=40),)))
        async with rt.tenant("a").stream("chat", prompt="x", max_tokens=100) as stream:
            async for _ in stream:
                break
            await rt.swap(saying(NEW))
            assert (await stream.completion()).text == OLD
        assert rt.stats().scheduler.replayed == 1


async def test_when_the_new_load_fails_the_old_weights_stay() -> None:
    async with runtime.Runtime() as rt:
        old = await rt.load(saying(OLD))
        with pytest.raises(runtime.ModelLoadFailed):
            await rt.swap(saying(NEW, faults=(Fault("load", "raise"),)))
        assert (await rt.tenant("a").generate("chat", prompt="x", max_tokens=100)).text == OLD
        assert [info.pid for info in rt.models()] == [old.pid]
        await rt.swap(saying(NEW))
        assert (await rt.tenant("a").generate("chat", prompt="x", max_tokens=100)).text == NEW


async def test_a_cancelled_swap_leaves_the_old_weights_and_nothing_of_the_new(run_directories: Path) -> None:
    async with runtime.Runtime() as rt:
        old = await rt.load(saying(OLD))
        before = census.take(run_directories)
        async with anyio.create_task_group() as group:
            group.start_soon(rt.swap, saying(NEW, load_seconds=60.0))
            await until(lambda: "loading" in [info.state for info in rt.models()])
            group.cancel_scope.cancel()
        assert not await anyio.to_thread.run_sync(census.wait_until_gone, before, run_directories, 5.0)
        assert [info.pid for info in rt.models()] == [old.pid]
        assert (await rt.tenant("a").generate("chat", prompt="x", max_tokens=100)).text == OLD


async def test_swaps_of_one_name_take_turns_and_the_last_one_counts() -> None:
    async with runtime.Runtime() as rt:
        await rt.load(saying(OLD))
        async with anyio.create_task_group() as group:
            for reply in ("1", "2", "3"):
                group.start_soon(rt.swap, saying(reply))
        answer = await rt.tenant("a").generate("chat", prompt="x", max_tokens=100)
        assert answer.text in {"1", "2", "3"}
        await until(lambda: len(workers()) == 1)
        assert answer.fingerprint == rt.models()[0].fingerprint


async def test_a_swapped_model_comes_back_with_its_new_weights_after_an_idle_end() -> None:
    async with runtime.Runtime() as rt:
        await rt.load(saying(OLD))
        await rt.swap(msgspec.structs.replace(saying(NEW), idle_unload_seconds=0.1))
        await until(lambda: [info.state for info in rt.models()] == ["unloaded"])
        assert (await rt.tenant("a").generate("chat", prompt="x", max_tokens=100)).text == NEW


async def test_unloading_during_a_swap_ends_both() -> None:
    errors: list[runtime.TroupeError] = []

    async def swap(rt: runtime.Runtime) -> None:
        try:
            await rt.swap(saying(NEW, load_seconds=60.0))
        except runtime.TroupeError as error:
            errors.append(error)

    async with runtime.Runtime() as rt:
        await rt.load(saying(OLD))
        async with anyio.create_task_group() as group:
            group.start_soon(swap, rt)
            await until(lambda: "loading" in [info.state for info in rt.models()])
            await rt.unload("chat")
        assert [type(error) for error in errors] == [runtime.ModelLoadFailed]
        assert (rt.models(), workers()) == ([], [])


async def test_what_is_not_known_cannot_be_swapped_and_what_is_not_loaded_takes_the_new_spec() -> None:
    async with runtime.Runtime() as rt:
        with pytest.raises(runtime.ModelNotLoaded):
            await rt.swap(saying(NEW))
        rt.register(saying(OLD))
        await rt.swap(saying(NEW))
        assert (await rt.tenant("a").generate("chat", prompt="x", max_tokens=100)).text == NEW


async def test_a_swapped_drafter_drafts_for_its_target_again_and_tokens_are_the_same() -> None:
    script = {"decode_seconds_per_step": 0.002}

    def drafter(**more: Any) -> runtime.ModelSpec:
        return fake_model("small", **script, **more)

    def target() -> runtime.ModelSpec:
        return msgspec.structs.replace(fake_model("chat", **script), drafter="small", draft_tokens=3)

    async def ask(rt: runtime.Runtime) -> None:
        answer = await rt.tenant("a").generate("chat", prompt="x", max_tokens=300)
        assert list(answer.token_ids) == expected_tokens(text_tokens("x"), max_tokens=300)

    def num_rounds(rt: runtime.Runtime) -> int:
        (pairing,) = rt.stats().scheduler.pairings
        assert (pairing.target, pairing.drafter) == ("chat", "small")
        return pairing.rounds

    async with runtime.Runtime() as rt:
        await rt.load(drafter())
        await rt.load(target())
        while not num_rounds(rt):
            await ask(rt)
        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(ask, rt)
            await rt.swap(drafter(context_length=2048))
        await until(lambda: len(workers()) == 2)
        before = num_rounds(rt)
        while num_rounds(rt) == before:
            await ask(rt)
        await rt.swap(target())
        await until(lambda: [pairing.state for pairing in rt.stats().scheduler.pairings] == ["paired"])
        await ask(rt)
