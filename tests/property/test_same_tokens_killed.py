"""The same request gives the same tokens when its worker is killed under it, on tiny real models (reference BLAS)."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import anyio
import pytest

import runtime
from runtime.protocol.ids import ModelName
from runtime.scheduler.stimuli import MemorySet
from tests.property.workload import differences, make_workload, run_alone, run_together
from tests.support.tiny import make_tiny
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

SETTINGS = runtime.Settings(blas="reference", stream_window_tokens=64, prefill_chunk_tokens=64)
KILLS_AT_TOKENS = (40, 200)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def served(rt: runtime.Runtime) -> int:
    return sum(tenant.tokens_served for tenant in rt.stats().scheduler.tenants.values())


async def kill_when_served(rt: runtime.Runtime, name: str, num_tokens: int) -> None:
    await until(lambda: served(rt) >= num_tokens)
    (pid,) = [info.pid for info in rt.models() if info.name == name]
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "lfm2"])
async def test_requests_whose_worker_is_killed_again_and_again_equal_the_same_requests_alone(family: str, tmp_path: Path) -> None:
    checkpoint = make_tiny(tmp_path / family, family)
    spec = runtime.ModelSpec("tiny", str(checkpoint), max_slots=8)
    asks = make_workload(1_12, num_requests=24, longest_prompt=90, greedy_only=False, spread_seconds=1.0)
    with anyio.fail_after(240):
        async with runtime.Runtime(SETTINGS) as rt:
            await rt.load(spec)
            tenants = [rt.tenant(name) for name in ("a", "b", "c")]

            async def kill() -> None:
                for num_tokens in KILLS_AT_TOKENS:
                    await kill_when_served(rt, "tiny", num_tokens)
                    await until(lambda: rt.stats().scheduler.models["tiny"].running > 0)

            async with anyio.create_task_group() as group:
                group.start_soon(kill)
                together = await run_together(tenants, "tiny", asks)
            assert rt.models()[0].restarts == len(KILLS_AT_TOKENS)
            stats = rt.stats().scheduler
            assert stats.replayed > 0
            assert stats.failed == 0
            rt._scheduler.state.validate()
            tenant = rt.tenant("solo")
            alone = [await run_alone(tenant, "tiny", ask) for ask in asks]
    assert differences(asks, together, alone) == []


@pytest.mark.parametrize("victims", [("target",), ("drafter",), ("target", "drafter")], ids="+".join)
async def test_a_speculating_stream_equals_plain_decoding_whoever_of_its_workers_is_killed(
    victims: tuple[str, ...], tmp_path: Path
) -> None:
    checkpoint = make_tiny(tmp_path / "llama", "llama")
    asks = make_workload(5, num_requests=8, longest_prompt=60, greedy_only=False, spread_seconds=0.2)
    with anyio.fail_after(240):
        async with runtime.Runtime(SETTINGS) as rt:
            await rt.load(runtime.ModelSpec("drafter", str(checkpoint), max_slots=8))
            await rt.load(runtime.ModelSpec("target", str(checkpoint), max_slots=8, drafter="drafter", draft_tokens=3))
            tenants = [rt.tenant(name) for name in ("a", "b")]

            async def kill() -> None:
                await kill_when_served(rt, victims[0], 30)
                for name in victims[1:]:
                    await kill_when_served(rt, name, 30)

            async with anyio.create_task_group() as group:
                group.start_soon(kill)
                together = await run_together(tenants, "target", asks)
            assert rt.stats().scheduler.failed == 0
            alone = [await run_alone(rt.tenant("solo"), "target", ask) for ask in asks]
    assert differences(asks, together, alone) == []


@pytest.mark.parametrize("cache", ["on", "off"])
@pytest.mark.parametrize("family", ["llama", "lfm2"])
async def test_preempted_requests_equal_the_same_requests_alone(family: str, cache: str, tmp_path: Path) -> None:
    checkpoint = make_tiny(tmp_path / family, family)
    asks = make_workload(8, num_requests=32, longest_prompt=90, greedy_only=False, spread_seconds=0.1)
    for ask in asks:
        ask.options["cache"] = cache
    with anyio.fail_after(240):
        async with runtime.Runtime(SETTINGS) as rt:
            await rt.load(runtime.ModelSpec("tiny", str(checkpoint), max_slots=8))

            async def crowd() -> None:
                while True:
                    for max_tokens in (None, 60):
                        rt._scheduler.offer(MemorySet(ModelName("tiny"), max_tokens))
                        await anyio.sleep(0.02)

            async with anyio.create_task_group() as group:
                group.start_soon(crowd)
                together = await run_together([rt.tenant(name) for name in ("a", "b")], "tiny", asks)
                group.cancel_scope.cancel()
            assert rt.stats().scheduler.preempted > 3
            rt._scheduler.offer(MemorySet(ModelName("tiny"), None))
            alone = [await run_alone(rt.tenant("solo"), "tiny", ask) for ask in asks]
    assert differences(asks, together, alone) == []
