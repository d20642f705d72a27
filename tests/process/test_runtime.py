"""A Runtime from its opening to its closing, with real worker processes and the fake engine."""

from __future__ import annotations

import logging
import os
import resource
import signal
import tempfile
import threading
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

import runtime
from runtime.testing import Fault, chat_tokens, expected_text, expected_tokens, fake_model, text_tokens
from tests.support import census
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

SLOW = {"decode_seconds_per_step": 0.01}
FAR = 1000.0


async def test_two_models_serve_three_tenants_at_once_each_from_its_own_process() -> None:
    wrong: list[str] = []

    async def ask(tenant: runtime.Tenant, model: str, prompt: str) -> None:
        async with tenant.stream(model, prompt=prompt, max_tokens=30) as stream:
            events = [event async for event in stream]
        text = "".join(event.text for event in events if isinstance(event, runtime.TextDelta))
        if text != expected_text(text_tokens(prompt), max_tokens=30):
            wrong.append(f"{tenant} {model} {prompt}: {text!r}")

    async with runtime.Runtime() as rt:
        async with anyio.create_task_group() as group:
            group.start_soon(rt.load, fake_model("one", **SLOW))
            group.start_soon(rt.load, fake_model("two", **SLOW))
        async with anyio.create_task_group() as group:
            for name in ("a", "b", "c"):
                for model in ("one", "two"):
                    for number in range(3):
                        group.start_soon(ask, rt.tenant(name), model, f"{name} {model} {number} " + "x" * number * 40)
        assert wrong == []
        one, two = sorted(rt.models(), key=lambda info: info.name)
        assert (one.name, two.name, one.state, two.state) == ("one", "two", "ready", "ready")
        assert len({one.pid, two.pid, os.getpid()}) == 3
        stats = rt.stats().scheduler
        assert stats.finished == 18
        assert {name: tenant.tokens_served for name, tenant in stats.tenants.items()} == {"a": 180, "b": 180, "c": 180}


async def test_sixteen_loads_at_once_make_one_process() -> None:
    infos: list[runtime.ModelInfo] = []

    async def load() -> None:
        infos.append(await rt.load(fake_model("chat", load_seconds=0.2)))

    async with runtime.Runtime() as rt:
        async with anyio.create_task_group() as group:
            for _ in range(16):
                group.start_soon(load)
        assert len(infos) == 16
        assert len({info.pid for info in infos}) == 1
        workers = [command for command in census.processes().values() if "runtime.worker" in command]
        assert len(workers) == 1


async def test_what_loading_reveals_is_in_the_info() -> None:
    async with runtime.Runtime() as rt:
        info = await rt.load(fake_model("chat", context_length=777))
        assert (info.kind, info.model_type, info.context_length, info.incarnation, info.restarts) == ("fake", "fake", 777, 1, 0)
        assert info.fingerprint
        assert rt.models() == [info] or rt.models()[0].memory_bytes > info.memory_bytes
        assert rt.capabilities("chat").batched_decode
        await until(lambda: rt.models()[0].memory_bytes > 0)
        with pytest.raises(runtime.ModelNotLoaded, match="'chat'"):
            rt.capabilities("other")


async def test_an_exception_in_the_body_passes_through_unchanged_and_all_is_cleaned_up() -> None:
    with pytest.raises(ZeroDivisionError):  # noqa: PT012 (the whole body is the point)
        async with runtime.Runtime() as rt:
            await rt.load(fake_model("chat"))
            async with rt.tenant("a").stream("chat", prompt="hi", max_tokens=10_000):
                raise ZeroDivisionError


async def test_a_cancelled_body_is_cleaned_up_before_the_cancellation_goes_on() -> None:
    opened = []
    with anyio.move_on_after(FAR) as scope:
        async with runtime.Runtime() as rt:
            opened.append(rt)
            await rt.load(fake_model("chat", **SLOW))
            async with rt.tenant("a").stream("chat", prompt="hi", max_tokens=10_000) as stream:
                async for _ in stream:
                    scope.cancel()
    assert scope.cancelled_caught
    with pytest.raises(runtime.RuntimeClosed):
        opened[0].models()


async def test_streams_open_at_the_end_end_with_a_typed_error_and_their_text() -> None:
    ended: list[runtime.RuntimeClosed] = []
    started = anyio.Event()

    async def read(tenant: runtime.Tenant) -> None:
        try:
            async with tenant.stream("chat", prompt="hi", max_tokens=10_000) as stream:
                async for _ in stream:
                    started.set()
        except runtime.RuntimeClosed as error:
            ended.append(error)

    async with anyio.create_task_group() as group:
        async with runtime.Runtime() as rt:
            await rt.load(fake_model("chat", **SLOW))
            group.start_soon(read, rt.tenant("a"))
            await started.wait()
    (error,) = ended
    assert expected_text(text_tokens("hi"), max_tokens=1000).startswith(error.partial_text)
    assert error.partial_text


async def test_what_is_no_spec_is_refused_by_name_and_changes_nothing() -> None:
    wrong: Any = {"weight": 2.0}
    with pytest.raises(runtime.InvalidRequest, match="allowed: a Settings"):
        runtime.Runtime(wrong)
    async with runtime.Runtime() as rt:
        await rt.load(fake_model("chat"))
        with pytest.raises(runtime.InvalidRequest, match="allowed: a TenantSpec"):
            rt.tenant("a", wrong)
        with pytest.raises(runtime.InvalidRequest, match="allowed: a ModelSpec"):
            await rt.load(wrong)
        for seconds in (wrong, -1, True, float("nan")):
            with pytest.raises(runtime.InvalidRequest, match="drain_seconds"):
                await rt.unload("chat", drain_seconds=seconds)
        assert (await rt.tenant("a").generate("chat", prompt="hi", max_tokens=3)).token_ids


async def test_a_closed_runtime_refuses_everything() -> None:
    rt = runtime.Runtime()
    with pytest.raises(runtime.RuntimeClosed):
        rt.models()
    async with rt:
        await rt.load(fake_model("chat"))
        tenant = rt.tenant("a")
        late = tenant.stream("chat", prompt="hi")
    for use in (rt.models, rt.stats, rt.watch, lambda: rt.tenant("a"), lambda: rt.capabilities("chat")):
        with pytest.raises(runtime.RuntimeClosed):
            use()
    with pytest.raises(runtime.RuntimeClosed):
        await rt.load(fake_model("chat"))
    with pytest.raises(runtime.RuntimeClosed):
        await rt.unload("chat")
    with pytest.raises(runtime.RuntimeClosed):
        await tenant.generate("chat", prompt="hi")
    with pytest.raises(runtime.RuntimeClosed):
        await late.__aenter__()
    with pytest.raises(runtime.RuntimeClosed):
        await rt.__aenter__()


async def test_runtimes_can_be_nested_and_are_strangers_to_each_other() -> None:
    async with runtime.Runtime() as outer:
        await outer.load(fake_model("chat"))
        async with runtime.Runtime() as inner:
            await inner.load(fake_model("chat", eos_one_in=3))
            assert inner.models()[0].pid != outer.models()[0].pid
        answer = await outer.tenant("a").generate("chat", prompt="hi", max_tokens=5)
        assert list(answer.token_ids) == expected_tokens(text_tokens("hi"), max_tokens=5)


def test_a_runtime_may_run_in_a_thread_with_its_own_loop(anyio_backend: str) -> None:
    answers: list[runtime.Completion] = []

    async def main() -> None:
        async with runtime.Runtime() as rt:
            await rt.load(fake_model("chat"))
            answers.append(await rt.tenant("a").generate("chat", prompt="hi", max_tokens=5))

    thread = threading.Thread(target=lambda: anyio.run(main, backend=anyio_backend))
    thread.start()
    thread.join()
    assert list(answers[0].token_ids) == expected_tokens(text_tokens("hi"), max_tokens=5)


async def test_the_hosts_signals_limits_and_logging_stay_as_they_are() -> None:
    def host_state() -> tuple[object, ...]:
        handlers = tuple(signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGPIPE))
        root = logging.getLogger()
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        return handlers, limits, tuple(root.handlers), root.level

    before = host_state()
    async with runtime.Runtime() as rt:
        await rt.load(fake_model("chat"))
        await rt.tenant("a").generate("chat", prompt="hi", max_tokens=5)
        assert host_state() == before
    assert host_state() == before


async def test_closing_while_a_model_loads_ends_the_load() -> None:
    errors: list[runtime.TroupeError] = []

    async def load() -> None:
        try:
            await rt.load(fake_model("chat", load_seconds=60.0))
        except runtime.TroupeError as error:
            errors.append(error)

    async with anyio.create_task_group() as group:
        async with runtime.Runtime() as rt:
            group.start_soon(load)
            await until(lambda: rt.models() and rt.models()[0].state == "loading")
    assert [type(error) for error in errors] == [runtime.RuntimeClosed]


async def test_cancelling_a_load_ends_its_process_at_once() -> None:
    async with runtime.Runtime() as rt:
        with anyio.move_on_after(FAR) as scope:
            async with anyio.create_task_group() as group:
                group.start_soon(rt.load, fake_model("chat", load_seconds=60.0))
                await until(lambda: rt.models() and rt.models()[0].state == "loading")
                scope.cancel()
        assert rt.models() == []
        assert not [command for command in census.processes().values() if "runtime.worker" in command]
        assert (await rt.load(fake_model("chat"))).state == "ready"


async def test_unloading_ends_the_models_requests_and_leaves_the_others() -> None:
    ended: list[runtime.TroupeError] = []
    started = anyio.Event()

    async def read(tenant: runtime.Tenant) -> None:
        try:
            async with tenant.stream("going", prompt="hi", max_tokens=10_000) as stream:
                async for _ in stream:
                    started.set()
        except runtime.TroupeError as error:
            ended.append(error)

    async with runtime.Runtime() as rt:
        await rt.load(fake_model("going", **SLOW))
        await rt.load(fake_model("staying", **SLOW))
        tenant = rt.tenant("a")
        async with anyio.create_task_group() as group:
            group.start_soon(read, tenant)
            await started.wait()
            await rt.unload("going")
        assert [type(error) for error in ended] == [runtime.ModelNotLoaded]
        assert [info.name for info in rt.models()] == ["staying"]
        with pytest.raises(runtime.ModelNotLoaded):
            await tenant.generate("going", prompt="hi")
        assert (await tenant.generate("staying", prompt="hi", max_tokens=3)).token_ids
        await rt.unload("going")
        with pytest.raises(runtime.ModelNotLoaded, match="never"):
            await rt.unload("never")
        assert (await rt.load(fake_model("going"))).state == "ready"


async def test_draining_lets_running_requests_end_and_refuses_new_ones() -> None:
    answers: list[runtime.Completion] = []

    async def ask() -> None:
        answers.append(await tenant.generate("chat", prompt="hi", max_tokens=50))

    async with runtime.Runtime() as rt:
        await rt.load(fake_model("chat", **SLOW))
        tenant = rt.tenant("a")
        async with anyio.create_task_group() as group:
            group.start_soon(ask)
            await until(lambda: rt.stats().scheduler.models["chat"].running)
            group.start_soon(lambda: rt.unload("chat", drain_seconds=60))
            await anyio.wait_all_tasks_blocked()
            with pytest.raises(runtime.ModelNotLoaded, match="being unloaded"):
                await tenant.generate("chat", prompt="late")
        assert list(answers[0].token_ids) == expected_tokens(text_tokens("hi"), max_tokens=50)
        assert rt.models() == []


async def test_a_drain_that_takes_too_long_is_cut_short() -> None:
    async with runtime.Runtime() as rt:
        await rt.load(fake_model("chat", **SLOW))
        async with rt.tenant("a").stream("chat", prompt="hi", max_tokens=10_000) as stream:
            await anext(stream)
            await rt.unload("chat", drain_seconds=0.05)
            with pytest.raises(runtime.ModelNotLoaded):
                await stream.completion()


async def test_a_watcher_sees_the_load_and_the_requests() -> None:
    seen: list[runtime.WatchEvent] = []

    async def watch() -> None:
        async with rt.watch() as events:
            watching.set()
            async for event in events:
                seen.append(event)

    watching = anyio.Event()
    async with anyio.create_task_group() as group:
        async with runtime.Runtime() as rt:
            group.start_soon(watch)
            await watching.wait()
            await rt.load(fake_model("chat"))
            await rt.tenant("a").generate("chat", prompt="hi", max_tokens=3)
    states = [event.state for event in seen if isinstance(event, runtime.ModelStateChanged)]
    assert states == ["spawned", "connected", "loading", "ready", "draining", "stopped"]
    assert any(isinstance(event, runtime.LoadProgress) for event in seen)
    (queued,) = [event for event in seen if isinstance(event, runtime.RequestQueued)]
    (ended,) = [event for event in seen if isinstance(event, runtime.RequestEnded)]
    assert (queued.request, queued.tenant, ended.state) == (ended.request, "a", "finished")


async def test_prompts_can_be_tokenized_beside_running_requests() -> None:
    messages = [{"role": "user", "content": "Hi 東京"}]
    async with runtime.Runtime() as rt:
        await rt.load(fake_model("chat", **SLOW))
        async with rt.tenant("a").stream("chat", prompt="hi", max_tokens=10_000) as stream:
            await anext(stream)
            assert await rt.tokenize("chat", prompt="Hi 東京") == text_tokens("Hi 東京")
            assert await rt.tokenize("chat", messages=messages, primer="So") == chat_tokens(messages, primer="So")
            with anyio.move_on_after(0):
                await rt.tokenize("chat", prompt="left at once")
            with pytest.raises(runtime.InvalidRequest, match="exactly one"):
                await rt.tokenize("chat")
            with pytest.raises(runtime.InvalidRequest, match="max_tokens"):
                await rt.tokenize("chat", prompt="hi", max_tokens=3)
            with pytest.raises(runtime.ModelNotLoaded):
                await rt.tokenize("other", prompt="hi")
            await anext(stream)
        assert rt.models()[0].restarts == 0


@pytest.mark.parametrize("name", ["временный каталог", "临时目录", "cafe\u0301", "n" * 150])
async def test_the_temporary_directory_may_be_called_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    (tmp_path / name).mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / name))
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setattr(tempfile, "tempdir", None)
    async with runtime.Runtime(runtime.Settings(home=tmp_path / name)) as rt:
        await rt.load(fake_model("модель 模型"))
        answer = await rt.tenant("приложение").generate("модель 模型", prompt="привет", max_tokens=5)
        assert list(answer.token_ids) == expected_tokens(text_tokens("привет"), max_tokens=5)
    assert [path.name for path in (tmp_path / name).iterdir()] == ["prefix"]


async def test_a_path_that_is_nothing_fails_without_a_process(tmp_path: Path) -> None:
    async with runtime.Runtime(runtime.Settings(home=tmp_path)) as rt:
        with pytest.raises(runtime.ModelLoadFailed) as caught:
            await rt.load(runtime.ModelSpec("chat", path="nothing here"))
        assert caught.value.reason == "not_found"
        assert rt.models() == []


@pytest.mark.parametrize("name", ["", "x" * 129, None, 5, b"a"])
async def test_tenant_names_are_checked(name: str) -> None:
    async with runtime.Runtime() as rt:
        with pytest.raises(runtime.InvalidRequest, match="tenant"):
            rt.tenant(name)


async def test_the_same_name_is_the_same_tenant_and_a_given_spec_replaces_the_one_before() -> None:
    async with runtime.Runtime() as rt:
        await rt.load(fake_model("chat", **SLOW))
        tenant = rt.tenant("a", runtime.TenantSpec(max_running=1, max_queued=0))
        async with tenant.stream("chat", prompt="hi") as stream:
            await anext(stream)
            with pytest.raises(runtime.TenantLimitReached):
                await tenant.generate("chat", prompt="hi", max_tokens=1)
            assert rt.tenant("a", runtime.TenantSpec(max_running=2)) is tenant
            assert (await tenant.generate("chat", prompt="hi", max_tokens=1)).token_ids
            assert rt.tenant("a") is tenant


async def test_a_worker_that_will_not_stop_is_ended_within_the_ladder() -> None:
    settings = runtime.Settings(grace_seconds=0.1)
    async with runtime.Runtime(settings) as rt:
        await rt.load(fake_model("chat", faults=(Fault("shutdown", "hang"),)))
