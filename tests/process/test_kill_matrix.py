"""SIGKILL of target, drafter or both at every message and every kind of step: every stream is what it is undisturbed.

`KILLS` in the environment asks for more kills than the few of an ordinary run.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import anyio
import pytest

import runtime
from runtime.scheduler.state import SchedulerState
from runtime.scheduler.stimuli import Instruction, Stimulus, WorkerLost
from runtime.testing import FakeScript
from tests.property.workload import Answer, Ask, differences, make_workload, run_alone, run_together
from tests.support.tiny import make_tiny
from tests.support.traps import Trap, lay
from tests.support.waiting import until

pytestmark = [pytest.mark.anyio, pytest.mark.limit(900)]

TARGET = FakeScript(prefill_seconds_per_token=0.0001, decode_seconds_per_step=0.003)
DRAFTER = FakeScript(decode_seconds_per_step=0.001, disagrees_one_in=6)
OFTEN: Final = ("StepDone", "Draft", "Drafted", "Verify", "Verified", "Grant")
MESSAGES: Final = {
    "target": (
        *("Prepare", "Prepared", "Prefill", "Restored", "Prefilled", "Kept", "Publish", "SegmentPublished"),
        *("StepDone", "Hold", "Held", "Verify", "Verified", "Release", "Released"),
    ),
    "drafter": ("Prefill", "Prefilled", "Draft", "Drafted", "Release", "Released"),
}
MAX_TRIES = 8


@dataclass
class Matrix:
    """One target and its drafter, struck again and again under the same requests. `detected`: seconds from a kill to its notice."""

    rt: runtime.Runtime
    traps: list[Trap]
    asks: list[Ask]
    alone: list[Answer]
    chance: random.Random
    number: int
    tally: Counter[tuple[str, str]] = field(default_factory=Counter)
    killed_at: dict[str, float] = field(default_factory=dict)

    def name(self, role: str) -> str:
        return f"{role} {self.number}"

    def kill(self, role: str) -> None:
        pid = next(info.pid for info in self.rt.models() if info.name == self.name(role))
        if pid is not None:
            self.killed_at[self.name(role)] = time.monotonic()
            os.kill(pid, signal.SIGKILL)

    async def strike(self, victims: tuple[str, ...], message: str) -> None:
        for _ in range(MAX_TRIES):
            struck = anyio.Event()

            def hit(struck: anyio.Event = struck) -> None:
                struck.set()
                for role in victims:
                    self.kill(role)

            trap = Trap([self.name(role) for role in victims], message, self.chance.randint(1, 9) if message in OFTEN else 1, hit)
            self.traps.append(trap)
            tenants = [self.rt.tenant(f"{self.name('tenant')}{letter}") for letter in "ab"]
            try:
                together = await run_together(tenants, self.name("target"), self.asks)
            finally:
                self.traps.remove(trap)
            assert differences(self.asks, together, self.alone) == [], (victims, message)
            for tenant in tenants:  # what they computed must be computed, kept and written again
                await self.rt.erase_tenant(tenant.name)
            if struck.is_set():
                self.tally[",".join(victims), message] += 1
                await until(lambda: all(info.state == "ready" for info in self.rt.models()))
                return
        raise AssertionError(f"message {message!r} of {victims} never came")


def everything() -> list[tuple[tuple[str, ...], str]]:
    single = [((role,), message) for role, messages in MESSAGES.items() for message in messages]
    return single + [
        (("target", "drafter"), message) for message in ("Prefill", "StepDone", "Draft", "Drafted", "Verify", "Verified")
    ]


def long_ask(rng: random.Random, num_tokens: int) -> Ask:
    """One that is certainly kept and written, and speaks for a while."""
    tokens = [rng.randrange(32, 127) for _ in range(num_tokens)]
    return Ask(0, tokens, {"max_tokens": 60, "seed": 5, "temperature": 0.7, "ignore_eos": True, "logprobs": 1}, 0.0, None, 0.0)


def num_kills(default: int) -> int:
    return int(os.environ.get("KILLS", default))


def watch_deaths(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, float]]:
    deaths: list[tuple[str, float]] = []
    handle = SchedulerState.handle

    def watched(state: SchedulerState, stimulus: Stimulus, now: float) -> list[Instruction]:
        if isinstance(stimulus, WorkerLost):
            deaths.append((stimulus.model, time.monotonic()))
        return handle(state, stimulus, now)

    monkeypatch.setattr(SchedulerState, "handle", watched)
    return deaths


async def test_a_kill_at_any_message_changes_no_stream_on_the_fake_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, anyio_backend: str
) -> None:
    monkeypatch.setattr("runtime.actors.health.RESTART_FIRST_SECONDS", 0.01)
    monkeypatch.setattr("runtime.actors.health.RESTART_MOST_SECONDS", 0.01)
    deaths = watch_deaths(monkeypatch)
    traps = lay(monkeypatch)
    rng = random.Random(f"fake {anyio_backend}")
    settings = runtime.Settings(home=tmp_path, prefix_disk_bytes=64 << 20, prefix_free_bytes=0, max_restarts=100_000)
    detected: list[float] = []
    async with runtime.Runtime(settings) as rt:
        await rt.load(runtime.ModelSpec("plain", kind="fake", fake=TARGET))
        matrices = []
        for number in range(3):
            asks = make_workload(rng.randrange(10**6), num_requests=6, longest_prompt=600, greedy_only=False, spread_seconds=0.05)
            asks[0] = long_ask(rng, 600)
            alone = [await run_alone(rt.tenant("solo"), "plain", ask) for ask in asks]
            matrix = Matrix(rt, traps, asks, alone, random.Random(rng.random()), number)
            await rt.load(runtime.ModelSpec(matrix.name("drafter"), kind="fake", fake=DRAFTER))
            spec = runtime.ModelSpec(
                matrix.name("target"), kind="fake", fake=TARGET, drafter=matrix.name("drafter"), draft_tokens=4
            )
            await rt.load(spec)
            matrices.append(matrix)
        left = [fault for _, fault in zip(range(num_kills(16)), itertools.cycle(rng.sample(everything(), len(everything()))))]
        rng.shuffle(left)

        async def suffer(matrix: Matrix) -> None:
            while left:
                victims, message = left.pop()
                await matrix.strike(victims, message)

        async with anyio.create_task_group() as group:
            for matrix in matrices:
                group.start_soon(suffer, matrix)
        stats = rt.stats().scheduler
        assert stats.failed == 0
        assert stats.replayed > 0
        for model in stats.models:
            report = await rt.inspect(model)
            assert (report.running, report.prefilling, report.parked, report.preparing) == ((), (), (), ())
    for matrix in matrices:
        for name, at in matrix.killed_at.items():
            detected += [death - at for model, death in deaths if model == name and 0 <= death - at < 5][:1]
    assert statistics.median(detected) < 0.2
    assert sum(sum(matrix.tally.values()) for matrix in matrices) == num_kills(16)


async def test_a_kill_at_any_message_changes_no_stream_on_tiny_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, anyio_backend: str
) -> None:
    if anyio_backend != "asyncio":
        pytest.skip("one event loop will do for the models' part")
    monkeypatch.setattr("runtime.actors.health.RESTART_FIRST_SECONDS", 0.01)
    monkeypatch.setattr("runtime.actors.health.RESTART_MOST_SECONDS", 0.01)
    traps = lay(monkeypatch)
    rng = random.Random("tiny")
    checkpoint = make_tiny(tmp_path / "llama", "llama")
    home = tmp_path / "home"
    settings = runtime.Settings(home=home, blas="reference", prefix_disk_bytes=64 << 20, prefix_free_bytes=0, max_restarts=100_000)
    asks = make_workload(3, num_requests=5, longest_prompt=400, greedy_only=False, spread_seconds=0.1)
    asks[0] = long_ask(rng, 600)
    async with runtime.Runtime(settings) as rt:
        await rt.load(runtime.ModelSpec("drafter 0", str(checkpoint)))
        await rt.load(runtime.ModelSpec("target 0", str(checkpoint), drafter="drafter 0", draft_tokens=3))
        alone = [await run_alone(rt.tenant("solo"), "target 0", ask) for ask in asks]
        matrix = Matrix(rt, traps, asks, alone, rng, 0)
        faults = [fault for _, fault in zip(range(num_kills(4)), itertools.cycle(rng.sample(everything(), len(everything()))))]
        for victims, message in faults:
            await matrix.strike(victims, message)
        assert rt.stats().scheduler.failed == 0
    assert sum(matrix.tally.values()) == num_kills(4)


STATES: Final = ("spawned", "connected", "loading")


@pytest.mark.parametrize("state", STATES)
async def test_a_kill_in_any_state_of_the_restart_is_a_longer_pause_and_nothing_else(
    state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.actors.health.RESTART_FIRST_SECONDS", 0.01)
    script = FakeScript(decode_seconds_per_step=0.003, load_seconds=0.2)
    async with runtime.Runtime() as rt:
        await rt.load(runtime.ModelSpec("chat", kind="fake", fake=script))
        tenant = rt.tenant("a")
        undisturbed = await tenant.generate("chat", prompt="hi", max_tokens=150, seed=1, logprobs=1)
        async with tenant.stream("chat", prompt="hi", max_tokens=150, seed=1, logprobs=1) as stream:
            await anext(stream)
            async with rt.watch() as events:
                os.kill(rt.models()[0].pid or 0, signal.SIGKILL)
                async for event in events:
                    if isinstance(event, runtime.ModelStateChanged) and event.state == state:
                        assert event.pid is not None
                        os.kill(event.pid, signal.SIGKILL)
                        break
            answer = await stream.completion()
        assert (answer.token_ids, answer.text, answer.logprobs) == (undisturbed.token_ids, undisturbed.text, undisturbed.logprobs)
        assert rt.models()[0].restarts == 2


async def test_a_kill_during_shutdown_leaves_nothing() -> None:
    async with runtime.Runtime() as rt:
        await rt.load(runtime.ModelSpec("chat", kind="fake", fake=FakeScript()))
        pid = rt.models()[0].pid
        assert pid is not None
        async with anyio.create_task_group() as group, rt.watch() as events:
            group.start_soon(rt.unload, "chat")
            async for event in events:
                if isinstance(event, runtime.ModelStateChanged) and event.state == "draining":
                    os.kill(pid, signal.SIGKILL)
                    break
        assert rt.models() == []
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


async def test_the_pause_of_a_killed_tiny_model_is_its_restart_and_the_prefill_of_what_was_said(
    tmp_path: Path, anyio_backend: str
) -> None:
    """From death to the next token, beside spawn, load and replay prefill as measured in the same deaths."""
    if anyio_backend != "asyncio":
        pytest.skip("one event loop will do for the models' part")
    checkpoint = make_tiny(tmp_path / "llama", "llama")
    ratios: list[float] = []
    async with runtime.Runtime(runtime.Settings(blas="reference", max_restarts=100)) as rt:
        await rt.load(runtime.ModelSpec("tiny", str(checkpoint)))
        tenant = rt.tenant("a")
        for seed in range(3):
            moments: dict[str, float] = {}
            ask = tenant.stream("tiny", prompt="Once", max_tokens=2000, ignore_eos=True, seed=seed)
            async with ask as stream, rt.watch() as events:
                async for event in stream:
                    if isinstance(event, runtime.TextDelta) and len(event.token_ids):
                        break
                os.kill(rt.models()[0].pid or 0, signal.SIGKILL)
                moments["killed"] = time.monotonic()
                async for event in events:
                    if isinstance(event, runtime.ModelStateChanged):
                        moments.setdefault(event.state, time.monotonic())
                        if event.state == "ready":
                            break
                served = rt.stats().scheduler.tenants["a"].tokens_served
                await until(lambda served=served: rt.stats().scheduler.tenants["a"].tokens_served > served)  # type: ignore[misc]
                moments["token"] = time.monotonic()
            assert moments["dead"] - moments["killed"] < 0.2, "the exit is noticed"
            cost = moments["token"] - moments["ready"] + moments["ready"] - moments["spawned"]
            ratios.append((moments["token"] - moments["killed"]) / cost)
            await until(lambda: not rt._scheduler.state.book.requests)
    assert max(ratios) <= 3.0, ratios
