"""The same request gives the same tokens, batched or alone, on tiny real models over real processes (reference BLAS)."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

import runtime
from tests.property.workload import differences, make_workload, run_alone, run_together
from tests.support.tiny import make_tiny

pytestmark = pytest.mark.anyio

FAMILIES = ["llama", "gemma3_text", "lfm2"]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.parametrize("family", FAMILIES)
async def test_ragged_requests_joining_and_leaving_equal_the_same_requests_alone(family: str, tmp_path: Path) -> None:
    checkpoint = make_tiny(tmp_path / family, family)
    spec = runtime.ModelSpec("tiny", str(checkpoint), max_slots=8)
    asks = make_workload(20_26, num_requests=32, longest_prompt=90, greedy_only=False, spread_seconds=1.5)
    settings = runtime.Settings(blas="reference", stream_window_tokens=8, prefill_chunk_tokens=64)
    with anyio.fail_after(240):
        async with runtime.Runtime(settings) as rt:
            await rt.load(spec)
            tenants = [rt.tenant(name, runtime.TenantSpec(weight=weight)) for name, weight in (("a", 1.0), ("b", 3.0), ("c", 0.5))]
            together = await run_together(tenants, "tiny", asks)
            assert (await rt.inspect("tiny")).running == ()
            second = await run_together(tenants, "tiny", asks)
        async with runtime.Runtime(runtime.Settings(blas="reference")) as rt:
            await rt.load(spec)
            tenant = rt.tenant("solo")
            alone = [await run_alone(tenant, "tiny", ask) for ask in asks]
    assert differences(asks, together, alone) == []
    assert differences(asks, second, alone) == []
    assert any(answer.token_ids for answer in together)


async def test_a_request_in_a_crowd_equals_itself_as_the_first_and_only_one_of_a_new_process(tmp_path: Path) -> None:
    checkpoint = make_tiny(tmp_path / "llama", "llama")
    spec = runtime.ModelSpec("tiny", str(checkpoint), max_slots=8)
    asks = make_workload(7, num_requests=12, longest_prompt=60, greedy_only=False, spread_seconds=0.3)
    chosen = [ask for ask in asks if ask.leave_after_tokens is None][:3]
    settings = runtime.Settings(blas="reference")
    with anyio.fail_after(120):
        async with runtime.Runtime(settings) as rt:
            await rt.load(spec)
            together = await run_together([rt.tenant("a"), rt.tenant("b")], "tiny", asks)
        alone = []
        for ask in chosen:
            async with runtime.Runtime(settings) as rt:
                await rt.load(spec)
                alone.append(await run_alone(rt.tenant("solo"), "tiny", ask))
    assert len(chosen) == 3
    assert differences(chosen, [together[ask.number] for ask in chosen], alone) == []
