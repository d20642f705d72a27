"""What apps see when workers die, hang, refuse or babble. Real processes, the fake engine's scripted faults, real signals."""

from __future__ import annotations

import os
import signal
import time
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


async def test_a_killed_worker_is_told_to_all_its_callers_at_once_and_comes_back_and_the_other_model_does_not_notice() -> None:
    errors: list[runtime.WorkerCrashed] = []
    told_at: list[float] = []
    undisturbed: list[runtime.Completion] = []

    async def lose(tenant: runtime.Tenant, prompt: str) -> None:
        try:
            await tenant.generate("dying", prompt=prompt, max_tokens=10_000)
        except runtime.WorkerCrashed as error:
            errors.append(error)
            told_at.append(time.monotonic())

    async def stay() -> None:
        undisturbed.append(await rt.tenant("b").generate("living", prompt="hi", max_tokens=300))

    async with runtime.Runtime() as rt:
        await rt.load(fake_model("dying", decode_seconds_per_step=0.005))
        await rt.load(fake_model("living", decode_seconds_per_step=0.002))
        tenant = rt.tenant("a", runtime.TenantSpec(max_running=4))
        async with anyio.create_task_group() as group:
            group.start_soon(stay)
            for number in range(6):
                group.start_soon(lose, tenant, f"{number}")
            await until(lambda: rt.stats().scheduler.tenants["a"].tokens_served > 20)
            pid = rt.models()[0].pid
            killed_at = time.monotonic()
            kill(rt, "dying")
        assert len(errors) == 6, "running and queued alike"
        assert max(told_at) - killed_at < 1.0
        for error in errors:
            assert (error.report.signal_name, error.report.pid, error.report.incarnation) == ("SIGKILL", pid, 1)
            assert error.code == "worker_crashed"
        assert sum(bool(error.partial_text) for error in errors) == 4
        assert list(undisturbed[0].token_ids) == expected_tokens(text_tokens("hi"), max_tokens=300)
        answer = await tenant.generate("dying", prompt="again", max_tokens=5)
        assert list(answer.token_ids) == expected_tokens(text_tokens("again"), max_tokens=5)
        dying, living = rt.models()
        assert (dying.incarnation, dying.restarts, living.restarts) == (2, 1, 0)
        assert dying.pid != pid


async def test_a_crowd_whose_worker_is_killed_again_and_again_gets_right_tokens_or_typed_errors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("runtime.actors.health.RESTART_FIRST_SECONDS", 0.01)
    outcomes: list[str] = []
    partial: list[tuple[list[int], str]] = []

    async def ask(number: int) -> None:
        prompt = text_tokens(f"{number}")
        while True:
            try:
                answer = await rt.tenant(f"{number % 3}").generate("chat", tokens=prompt, max_tokens=60)
            except runtime.WorkerCrashed as error:
                outcomes.append("crashed")
                partial.append((prompt, error.partial_text))
            else:
                outcomes.append("answer")
                assert list(answer.token_ids) == expected_tokens(prompt, max_tokens=60)
                return

    async with runtime.Runtime() as rt:
        await rt.load(fake_model("chat", max_slots=8, decode_seconds_per_step=0.003))
        async with anyio.create_task_group() as group:
            for number in range(24):
                group.start_soon(ask, number)
            for incarnation in (1, 2, 3):
                await until(lambda incarnation=incarnation: model(rt, "chat").incarnation == incarnation)
                await until(lambda: rt.stats().scheduler.models["chat"].running >= 8)
                kill(rt, "chat")
        assert outcomes.count("answer") == 24
        assert outcomes.count("crashed") >= 3 * 8
        assert all(expected_text(prompt, max_tokens=60).startswith(text) for prompt, text in partial)
        rt._scheduler.state.validate()


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
async def test_a_fault_at_any_step_ends_in_an_answer_or_a_typed_error_and_a_worker_that_serves_again(action: Any) -> None:
    """All steps side by side, each with a model of its own."""
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
    serving = "WorkerUnresponsive" if action == "hang" else "WorkerCrashed"
    assert outcomes["import"] == outcomes["load"] == f"load: {load_failure}"
    assert outcomes["prefill"] == outcomes["decode"] == serving
    # A prompt that takes for ever is refused by the worker itself, which goes on serving.
    assert outcomes["prepare"] == ("InvalidRequest" if action in ("raise", "hang") else serving)
    assert outcomes["shutdown"] == "answer"
    # The last tokens are on their way when the row is released; a sudden end may take them along.
    assert outcomes["release"] in (("answer", serving) if action in ("exit", "kill") else ("answer",))


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
        spec = fake_model("chat", faults=(Fault("decode", "kill", number=3, incarnations=LIVES),))
        await rt.load(spec)
        await rt.load(fake_model("other"))
        tenant = rt.tenant("a")
        seen: list[str] = []
        while "model_unavailable" not in seen:
            with pytest.raises((runtime.WorkerCrashed, runtime.ModelUnavailable)) as caught:
                await tenant.generate("chat", prompt="hi", max_tokens=10)
            seen.append(caught.value.code)
        assert seen == ["worker_crashed"] * 4 + ["model_unavailable"]
        with pytest.raises(runtime.ModelUnavailable, match="load it again"):
            await tenant.generate("chat", prompt="hi")
        assert model(rt, "chat").state == "failed"
        assert (await tenant.generate("other", prompt="hi", max_tokens=3)).token_ids
        assert (await rt.load(spec)).state == "ready"
        assert (await tenant.generate("chat", prompt="hi", max_tokens=1)).token_ids


async def test_a_stopped_worker_is_silent_and_is_replaced() -> None:
    async with runtime.Runtime(runtime.Settings(silence_seconds=1.5)) as rt:
        await rt.load(fake_model("chat", decode_seconds_per_step=0.01))
        async with rt.tenant("a").stream("chat", prompt="hi", max_tokens=10_000) as stream:
            await anext(stream)
            kill(rt, "chat", signal.SIGSTOP)
            with pytest.raises(runtime.WorkerUnresponsive, match="no message") as caught:
                await stream.completion()
            assert expected_text(text_tokens("hi"), max_tokens=2000).startswith(caught.value.partial_text)
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
