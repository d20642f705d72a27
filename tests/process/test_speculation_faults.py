"""A drafter that dies, hangs, goes or is another: its targets' streams are what they would be without it, and hardly later."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio
import pytest

import runtime
from runtime.testing import FakeScript, expected_tokens
from tests.support.waiting import until

pytestmark = [pytest.mark.anyio, pytest.mark.limit(240)]

NUM_FAULTS = {"asyncio": 80, "trio": 24}
NUM_STREAMS = 3
MAX_STALL_SECONDS = 1.0
"""Beyond what the same target needs between two tokens when it decodes alone."""
TARGET = FakeScript(prefill_seconds_per_token=0.0002, decode_seconds_per_step=0.006)
DRAFTER = FakeScript(prefill_seconds_per_token=0.0002, decode_seconds_per_step=0.0015, disagrees_one_in=6)
SETTINGS = runtime.Settings(prefix_memory_bytes=0, prefix_disk_bytes=0)


@dataclass
class Heard:
    token_ids: list[int] = field(default_factory=list)
    longest_gap: float = 0.0


def _prompt(seed: int) -> list[int]:
    numbers = random.Random(seed)
    return [numbers.randrange(32, 127) for _ in range(numbers.randint(1, 60))]


async def _hear(tenant: runtime.Tenant, model: str, seed: int, max_tokens: int, heard: Heard) -> None:
    """Reads a stream to its end, and takes the time between its pieces (not before the first)."""
    last: float | None = None
    async with tenant.stream(model, tokens=_prompt(seed), max_tokens=max_tokens, ignore_eos=True) as stream:
        async for event in stream:
            if isinstance(event, runtime.TextDelta):
                now = time.monotonic()
                heard.longest_gap = max(heard.longest_gap, 0.0 if last is None else now - last)
                last = now
                heard.token_ids.extend(event.token_ids)


def _drafter(name: str = "drafter", script: FakeScript = DRAFTER) -> runtime.ModelSpec:
    return runtime.ModelSpec(name, kind="fake", fake=script)


@asynccontextmanager
async def _house(**options: object) -> AsyncIterator[tuple[runtime.Runtime, runtime.Tenant]]:
    async with runtime.Runtime(SETTINGS) as rt:
        await rt.load(_drafter())
        spec = runtime.ModelSpec("target", kind="fake", fake=TARGET, drafter="drafter", draft_tokens=4, draft_ahead=True)
        await rt.load(spec)
        yield rt, rt.tenant("a", runtime.TenantSpec(max_running=16))


def _pairing(rt: runtime.Runtime, target: str = "target") -> runtime.PairingStats:
    return next(pairing for pairing in rt.stats().scheduler.pairings if pairing.target == target)


def _pid(rt: runtime.Runtime, name: str) -> int:
    pid = next(model.pid for model in rt.models() if model.name == name)
    assert pid is not None
    return pid


def _expected(seed: int, max_tokens: int) -> list[int]:
    return expected_tokens(_prompt(seed), max_tokens=max_tokens, ignore_eos=True)


async def test_a_drafter_killed_or_stopped_at_any_moment_changes_nothing(anyio_backend: str) -> None:
    numbers = random.Random(f"faults on {anyio_backend}")
    async with _house() as (rt, tenant):
        alone = Heard()
        await rt.load(runtime.ModelSpec("plain", kind="fake", fake=TARGET))
        await _hear(tenant, "plain", 0, 100, alone)
        longest = 0.0
        for fault in range(NUM_FAULTS[anyio_backend]):
            pid, before = _pid(rt, "drafter"), _pairing(rt)
            assert before.state in ("paired", "away")
            lengths = [numbers.randint(30, 80) for _ in range(NUM_STREAMS)]
            heard = [Heard() for _ in lengths]
            is_kill = fault % 4 == 0
            async with anyio.create_task_group() as group:
                for number, length in enumerate(lengths):
                    group.start_soon(_hear, tenant, "target", 10 * fault + number, length, heard[number])
                await anyio.sleep(numbers.uniform(0.0, 0.2))
                os.kill(pid, signal.SIGKILL if is_kill else signal.SIGSTOP)
                if not is_kill:
                    await anyio.sleep(numbers.choice([0.0, 0.02, 0.1, 0.6]))
                    os.kill(pid, signal.SIGCONT)
            for number, (one, length) in enumerate(zip(heard, lengths, strict=True)):
                assert one.token_ids == _expected(10 * fault + number, length), (fault, number)
                longest = max(longest, one.longest_gap)
            if is_kill:  # loaded anew, for a worker that dies too often is given up
                await rt.unload("drafter")
                await rt.load(_drafter())
            rounds = _pairing(rt).rounds

            async def works_again(rounds: int = rounds) -> bool:
                again = Heard()
                await _hear(tenant, "target", 1, 40, again)
                assert again.token_ids == _expected(1, 40)
                return _pairing(rt).rounds > rounds

            with anyio.fail_after(20):
                while not await works_again():
                    pass
        assert longest <= alone.longest_gap + MAX_STALL_SECONDS
        assert _pairing(rt).accepted > 0
        await until(lambda: _pairing(rt).guests == 0)


async def test_a_drafter_that_restarts_by_itself_is_paired_again_in_mid_stream(anyio_backend: str) -> None:
    async with _house() as (rt, tenant):
        heard = Heard()
        async with anyio.create_task_group() as group:
            group.start_soon(_hear, tenant, "target", 3, 1300, heard)
            await until(lambda: _pairing(rt).rounds > 3)
            os.kill(_pid(rt, "drafter"), signal.SIGKILL)
            await until(lambda: _pairing(rt).state == "waiting")
            num_rounds = _pairing(rt).rounds
            await until(lambda: _pairing(rt).rounds > num_rounds + 3)
        assert heard.token_ids == _expected(3, 1300)


async def test_a_drafter_unloaded_and_another_loaded_under_its_name(anyio_backend: str) -> None:
    async with _house() as (rt, tenant):
        heard = Heard()
        async with anyio.create_task_group() as group:
            group.start_soon(_hear, tenant, "target", 4, 2000, heard)
            await until(lambda: _pairing(rt).rounds > 3)
            await rt.unload("drafter")
            assert (_pairing(rt).state, _pairing(rt).reason) == ("waiting", "its drafter 'drafter' is not loaded")
            with pytest.raises(runtime.InvalidRequest, match="not loaded"):
                await tenant.generate("target", prompt="x", speculate=True)
            await rt.load(_drafter(script=FakeScript(vocabulary="another")))
            assert _pairing(rt).state == "refused"
            with pytest.raises(runtime.InvalidRequest, match="vocabulary"):
                await tenant.generate("target", prompt="x", speculate=True)
            assert any("vocabulary" in note for note in rt.capabilities("target").notes)
            await rt.unload("drafter")
            await rt.load(_drafter())
            num_rounds = _pairing(rt).rounds
            await until(lambda: _pairing(rt).rounds > num_rounds)
        assert heard.token_ids == _expected(4, 2000)
        answer = await tenant.generate("target", prompt="x", speculate=True, max_tokens=60, ignore_eos=True)
        assert answer.usage.proposed_tokens >= answer.usage.accepted_tokens > 0
        short = await tenant.generate("target", prompt="x", speculate=True, max_tokens=1, ignore_eos=True)
        assert [warning for warning in short.warnings if "nothing was proposed" in warning]
        assert not answer.warnings
        never = await tenant.generate("target", prompt="x", speculate=False, max_tokens=60, ignore_eos=True)
        assert never.usage.proposed_tokens == 0
        assert never.token_ids == answer.token_ids


async def test_a_target_that_ends_leaves_nothing_in_the_drafter_that_serves_another(anyio_backend: str) -> None:
    async with _house() as (rt, tenant):
        await rt.load(runtime.ModelSpec("other", kind="fake", fake=TARGET, drafter="drafter", draft_tokens=2))
        heard, lost = Heard(), Heard()
        async with anyio.create_task_group() as group:
            group.start_soon(_hear, tenant, "other", 5, 1500, heard)

            async def loses() -> None:
                with pytest.raises(runtime.WorkerCrashed):
                    await _hear(tenant, "target", 6, 3000, lost)

            group.start_soon(loses)
            await until(lambda: _pairing(rt).rounds > 3 and _pairing(rt, "other").rounds > 3)
            os.kill(_pid(rt, "target"), signal.SIGKILL)
            await until(lambda: _pairing(rt).guests == 0)
            num_rounds = _pairing(rt, "other").rounds
            await until(lambda: _pairing(rt, "other").rounds > num_rounds + 3)
        assert heard.token_ids == _expected(5, 1500)
        assert lost.token_ids == _expected(6, 3000)[: len(lost.token_ids)]
        await until(lambda: next(model.state for model in rt.models() if model.name == "target") == "ready")
        again = Heard()
        await _hear(tenant, "target", 7, 200, again)
        assert again.token_ids == _expected(7, 200)
        report = await rt.inspect("drafter")
        assert (report.running, report.prefilling) == ((), ())
