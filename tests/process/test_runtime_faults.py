"""What apps see when workers die, hang, refuse or babble. Real processes, the fake engine's scripted faults, real signals."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any, Literal

import anyio
import pytest

import runtime
from runtime.testing import Fault, expected_text, expected_tokens, fake_model, text_tokens
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

LIVES = tuple(range(1, 100))


def kill(rt: runtime.Runtime, name: str, number: int = signal.SIGKILL) -> None:
    (pid,) = [info.pid for info in rt.models() if info.name == name]
    assert pid is not None
    os.kill(pid, number)


async def test_a_killed_worker_is_a_pause_in_the_streams_of_its_callers_and_nothing_to_the_other_model() -> None:
    answers: dict[str, runtime.Completion] = {}

    async def ask(model: str, prompt: str, max_tokens: int) -> None:
        answers[model + prompt] = await rt.tenant("a").generate(model, prompt=prompt, max_tokens=max_tokens)

    async with runtime.Runtime() as rt:
        await rt.load(fake_model("dying", decode_seconds_per_step=0.005))
        await rt.load(fake_model("living", decode_seconds_per_step=0.002))
        rt.tenant("a", runtime.TenantSpec(max_running=5))
        async with anyio.create_task_group() as group:
            group.start_soon(ask, "living", "hi", 300)
            for number in range(6):
                group.start_soon(ask, "dying", f"{number}", 150)
            await until(lambda: rt.stats().scheduler.tenants["a"].tokens_served > 40)
            pid = rt.models()[0].pid
            kill(rt, "dying")
            await until(lambda: rt.stats().scheduler.models["dying"].replaying > 0)
        for number in range(6):
            answer = answers[f"dying{number}"]
            assert list(answer.token_ids) == expected_tokens(text_tokens(f"{number}"), max_tokens=150)
            assert answer.text == expected_text(text_tokens(f"{number}"), max_tokens=150)
            assert answer.usage.completion_tokens == 150
        assert list(answers["livinghi"].token_ids) == expected_tokens(text_tokens("hi"), max_tokens=300)
        dying, living = rt.models()
        assert (dying.incarnation, dying.restarts, living.restarts) == (2, 1, 0)
        assert dying.pid != pid
        stats = rt.stats().scheduler
        assert 4 <= stats.replayed <= 5
        assert stats.failed == 0


def num_served(rt: runtime.Runtime) -> int:
    return sum(tenant.tokens_served for tenant in rt.stats().scheduler.tenants.values())


async def test_a_crowd_whose_worker_is_killed_again_and_again_never_notices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.actors.health.RESTART_FIRST_SECONDS", 0.01)
    answers: dict[int, runtime.Completion] = {}

    async def ask(number: int) -> None:
        tenant, tokens = rt.tenant(f"{number % 3}"), text_tokens(f"{number}")
        answers[number] = await tenant.generate("chat", tokens=tokens, max_tokens=90, logprobs=1, stop=["never"])

    async with runtime.Runtime() as rt:
        await rt.load(fake_model("chat", max_slots=8, decode_seconds_per_step=0.003))
        async with anyio.create_task_group() as group:
            for number in range(24):
                group.start_soon(ask, number)
            for incarnation in (1, 2, 3):
                await until(lambda incarnation=incarnation: model(rt, "chat").incarnation == incarnation)
                await until(lambda: rt.stats().scheduler.models["chat"].running >= 8)
                served = num_served(rt)
                await until(lambda served=served: num_served(rt) >= served + 8 * 20)
                kill(rt, "chat")
        for number, answer in answers.items():
            assert list(answer.token_ids) == expected_tokens(text_tokens(f"{number}"), max_tokens=90)
            assert len(answer.logprobs or ()) == 90
        assert len(answers) == 24
        assert rt.stats().scheduler.replayed >= 3 * 8
        rt._scheduler.state.validate()


POISON = ord("#")
CRASHES: list[Literal["kill", "exit", "raise", "hang"]] = ["kill", "exit", "raise", "hang"]


@pytest.mark.parametrize("at", ["prefill", "decode"])
@pytest.mark.parametrize("action", CRASHES)
async def test_a_request_that_ends_three_workers_gets_the_report_and_those_beside_it_do_not_notice(
    action: Literal["kill", "exit", "raise", "hang"],
    at: Literal["prefill", "decode"],
    monkeypatch: pytest.MonkeyPatch,
    anyio_backend: str,
) -> None:
    if action != "kill" and (at != "decode" or anyio_backend != "asyncio"):
        pytest.skip("how it ends its workers matters neither to the step nor to the event loop")
    monkeypatch.setattr("runtime.actors.health.RESTART_FIRST_SECONDS", 0.01)
    answers: dict[int, runtime.Completion] = {}

    async def ask(number: int) -> None:
        answers[number] = await rt.tenant("a").generate("chat", prompt=f"innocent {number}", max_tokens=80)

    poison = Fault(at, action, number=1 if at == "prefill" else 3, incarnations=LIVES, token=POISON)
    async with runtime.Runtime(runtime.Settings(silence_seconds=1.2)) as rt:
        await rt.load(fake_model("chat", faults=(poison,), decode_seconds_per_step=0.002))
        async with anyio.create_task_group() as group:
            for number in range(3):
                group.start_soon(ask, number)
            await until(lambda: rt.stats().scheduler.models["chat"].running == 3)
            with pytest.raises(runtime.WorkerUnresponsive if action == "hang" else runtime.WorkerCrashed) as caught:
                await rt.tenant("b").generate("chat", prompt="poison #", max_tokens=50)
        assert caught.value.report.incarnation == 3
        for number in range(3):
            assert list(answers[number].token_ids) == expected_tokens(text_tokens(f"innocent {number}"), max_tokens=80)
        assert (await rt.tenant("b").generate("chat", prompt="hi", max_tokens=3)).token_ids
        assert model(rt, "chat").restarts == 3


STEPS: tuple[Literal["import", "load", "prepare", "prefill", "decode", "release", "shutdown"], ...] = (
    "import",
    "load",
    "prepare",
    "prefill",
    "decode",
    "release",
    "shutdown",
)


@pytest.mark.parametrize("action", ["raise", "exit", "kill", "hang", "garbage"])
async def test_a_fault_at_any_step_of_a_loaded_model_ends_in_the_right_answer_and_a_worker_that_serves_again(
    action: Any, anyio_backend: str
) -> None:
    """All steps side by side, each with a model of its own."""
    if action == "hang" and anyio_backend != "asyncio":
        pytest.skip("the longest wait is the same on any event loop")
    settings = runtime.Settings(load_seconds=1.5, silence_seconds=2.0, grace_seconds=0.3)
    outcomes: dict[str, str] = {}

    async def meet(at: Any) -> None:
        spec = fake_model(at, faults=(Fault(at, action, exit_code=0 if at == "decode" else 3),))
        tenant = rt.tenant(at)
        try:
            await rt.load(spec)
        except runtime.ModelLoadFailed as error:
            outcomes[at] = f"load: {error.reason}"
            return
        try:
            answer = await tenant.generate(at, prompt="hi", max_tokens=5)
        except runtime.TroupeError as error:
            outcomes[at] = type(error).__name__
        else:
            assert list(answer.token_ids) == expected_tokens(text_tokens("hi"), max_tokens=5)
            outcomes[at] = "answer"
        if at == "release":  # the fault is met after the answer: a second request sees its consequence
            await until(lambda: not rt._scheduler.state.book.requests or model(rt, at).restarts)
        await until(lambda: model(rt, at).state == "ready")
        answer = await tenant.generate(at, prompt="again", max_tokens=5)
        assert list(answer.token_ids) == expected_tokens(text_tokens("again"), max_tokens=5)

    async with runtime.Runtime(settings) as rt:
        async with anyio.create_task_group() as group:
            for at in STEPS:
                group.start_soon(meet, at)
    if action == "garbage":
        assert set(outcomes.values()) == {"answer"}
        return
    load_failure = {"raise": "error", "exit": "crashed", "kill": "crashed", "hang": "timeout"}[action]
    assert outcomes["import"] == outcomes["load"] == f"load: {load_failure}"
    assert {outcomes[at] for at in ("prefill", "decode", "release", "shutdown")} == {"answer"}
    # A prompt that takes for ever is refused by the worker itself, which goes on serving.
    assert outcomes["prepare"] == ("InvalidRequest" if action in ("raise", "hang") else "answer")


def model(rt: runtime.Runtime, name: str) -> runtime.ModelInfo:
    (found,) = [info for info in rt.models() if info.name == name]
    return found


async def test_a_load_that_crashes_is_told_with_what_the_process_said_last() -> None:
    async with runtime.Runtime() as rt:
        with pytest.raises(runtime.ModelLoadFailed) as caught:
            await rt.load(fake_model("chat", faults=(Fault("load", "exit", exit_code=7),)))
        cause = caught.value.__cause__
        assert isinstance(cause, runtime.WorkerCrashed)
        assert cause.report.exit_code == 7
        assert rt.models() == []


async def test_requests_that_wait_for_a_load_that_fails_are_told() -> None:
    errors: list[runtime.TroupeError] = []

    async def collect(ask: Any) -> None:
        try:
            await ask()
        except runtime.TroupeError as error:
            errors.append(error)

    async with runtime.Runtime() as rt:
        async with anyio.create_task_group() as group:
            group.start_soon(collect, lambda: rt.load(fake_model("chat", load_seconds=0.2, faults=(Fault("load", "raise"),))))
            await until(lambda: rt.models())
            group.start_soon(collect, lambda: rt.tenant("a").generate("chat", prompt="hi"))
        assert [type(error) for error in errors] == [runtime.ModelLoadFailed] * 2


async def test_five_deaths_make_the_model_unavailable_until_it_is_loaded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.actors.health.RESTART_FIRST_SECONDS", 0.01)
    async with runtime.Runtime() as rt:
        spec = fake_model("chat", decode_seconds_per_step=0.002, faults=(Fault("decode", "kill", number=40, incarnations=LIVES),))
        await rt.load(spec)
        await rt.load(fake_model("other"))
        tenant = rt.tenant("a")
        with pytest.raises(runtime.ModelUnavailable, match="died too often") as caught:
            await tenant.generate("chat", prompt="hi", max_tokens=1000)
        assert expected_text(text_tokens("hi"), max_tokens=1000).startswith(caught.value.partial_text)
        assert model(rt, "chat").restarts == 4
        with pytest.raises(runtime.ModelUnavailable, match="load it again"):
            await tenant.generate("chat", prompt="hi")
        assert model(rt, "chat").state == "failed"
        assert (await tenant.generate("other", prompt="hi", max_tokens=3)).token_ids
        assert (await rt.load(spec)).state == "ready"
        assert (await tenant.generate("chat", prompt="hi", max_tokens=1)).token_ids


async def test_a_stopped_worker_is_silent_and_is_replaced() -> None:
    async with runtime.Runtime(runtime.Settings(silence_seconds=1.5)) as rt:
        await rt.load(fake_model("chat", decode_seconds_per_step=0.01))
        async with rt.tenant("a").stream("chat", prompt="hi", max_tokens=200) as stream:
            await anext(stream)
            kill(rt, "chat", signal.SIGSTOP)
            answer = await stream.completion()
        assert list(answer.token_ids) == expected_tokens(text_tokens("hi"), max_tokens=200)
        assert model(rt, "chat").restarts == 1
        assert (await rt.tenant("a").generate("chat", prompt="hi", max_tokens=3)).token_ids


async def test_a_long_declared_prefill_is_not_taken_for_silence() -> None:
    async with runtime.Runtime(runtime.Settings(silence_seconds=1.3)) as rt:
        await rt.load(fake_model("chat", faults=(Fault("prefill", "sleep", seconds=3.5),)))
        answer = await rt.tenant("a").generate("chat", prompt="hi", max_tokens=3)
        assert list(answer.token_ids) == expected_tokens(text_tokens("hi"), max_tokens=3)
        assert model(rt, "chat").restarts == 0


async def test_a_blocked_host_does_not_blame_its_workers() -> None:
    async with runtime.Runtime(runtime.Settings(silence_seconds=1.2)) as rt:
        await rt.load(fake_model("chat", decode_seconds_per_step=0.05))
        async with rt.tenant("a").stream("chat", prompt="hi", max_tokens=30) as stream:
            await anext(stream)
            time.sleep(2.5)  # noqa: ASYNC251 (a host that blocks its loop is the case)
            completion = await stream.completion()
        assert list(completion.token_ids) == expected_tokens(text_tokens("hi"), max_tokens=30)
        assert model(rt, "chat").restarts == 0


async def test_a_row_that_cannot_go_on_fails_alone_with_its_text() -> None:
    answers: list[runtime.Completion] = []

    async def ask(prompt: str) -> None:
        answers.append(await rt.tenant("a").generate("chat", prompt=prompt, max_tokens=40))

    fault = Fault("decode", "nonfinite", number=6, sequence_number=1)
    async with runtime.Runtime() as rt:
        await rt.load(fake_model("chat", decode_seconds_per_step=0.005, faults=(fault,)))
        async with rt.tenant("a").stream("chat", prompt="first", max_tokens=40) as stream:
            await anext(stream)
            async with anyio.create_task_group() as group:
                group.start_soon(ask, "second")
                with pytest.raises(runtime.GenerationFailed) as caught:
                    await stream.completion()
        assert caught.value.partial_text
        assert list(answers[0].token_ids) == expected_tokens(text_tokens("second"), max_tokens=40)
        assert model(rt, "chat").restarts == 0


async def test_garbage_from_a_worker_is_counted_and_harms_nobody() -> None:
    async with runtime.Runtime() as rt:
        await rt.load(fake_model("chat", faults=(Fault("decode", "garbage", number=3),)))
        answer = await rt.tenant("a").generate("chat", prompt="hi", max_tokens=10)
        assert list(answer.token_ids) == expected_tokens(text_tokens("hi"), max_tokens=10)
        await until(lambda: rt.stats().workers[0].malformed_frames == 1)


@pytest.mark.parametrize("how", ["stopped", "hanging"])
async def test_a_stuck_worker_leaves_a_report_without_a_word_of_its_prompts(how: str, tmp_path: Path) -> None:
    secret = "MARZIPAN"
    faults = (Fault("decode", "hang", number=20),) if how == "hanging" else ()
    stalls: list[runtime.WorkerHealthChanged] = []

    async def listen(watch: runtime.Watch) -> None:
        async for event in watch:
            if isinstance(event, runtime.WorkerHealthChanged):
                stalls.append(event)

    async with runtime.Runtime(runtime.Settings(home=tmp_path, silence_seconds=1.5)) as rt, anyio.create_task_group() as group:
        await rt.load(fake_model("chat", decode_seconds_per_step=0.01, faults=faults))
        async with rt.watch() as watch:
            group.start_soon(listen, watch)
            async with rt.tenant("a").stream("chat", prompt=secret, max_tokens=120) as stream:
                await anext(stream)
                if how == "stopped":
                    kill(rt, "chat", signal.SIGSTOP)
                answer = await stream.completion()
        assert list(answer.token_ids) == expected_tokens(text_tokens(secret), max_tokens=120)
    (stall,) = stalls
    assert stall.health == "stuck"
    assert stall.report is not None
    written = {path.name: path.read_bytes() for path in Path(stall.report).iterdir()}  # noqa: ASYNC240
    assert all(secret.encode() not in data for data in written.values())
    if how == "hanging":
        assert b"fake_faults.py" in written["stacks.txt"], "where it hung"


async def test_an_exit_is_noticed_within_a_fifth_of_a_second_and_called_gone() -> None:
    """The quickest of three: a busy machine may hold up any of them."""
    noticed: list[float] = []
    async with runtime.Runtime() as rt:
        await rt.load(fake_model("chat"))
        async with rt.watch() as watch:
            for _ in range(3):
                await until(lambda: model(rt, "chat").state == "ready")
                kill(rt, "chat")
                killed_at = time.monotonic()
                async for event in watch:
                    if isinstance(event, runtime.WorkerHealthChanged):
                        assert event.health == "gone"
                        noticed.append(time.monotonic() - killed_at)
                        break
    assert min(noticed) < 0.2, noticed
