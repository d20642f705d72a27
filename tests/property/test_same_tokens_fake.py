"""The same law on the fake engine, whose next token is a hash of the whole visible context, under asyncio and trio."""

from __future__ import annotations

import anyio
import pytest

import runtime
from runtime.testing import FakeScript
from tests.property.workload import differences, make_workload, run_alone, run_together

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_ragged_requests_joining_and_leaving_equal_the_same_requests_alone(seed: int) -> None:
    script = FakeScript(eos_one_in=60, decode_seconds_per_step=0.001, prefill_seconds_per_token=0.0001)
    spec = runtime.ModelSpec("fake", kind="fake", fake=script, max_slots=6)
    asks = make_workload(seed, num_requests=32, longest_prompt=200, greedy_only=False, spread_seconds=0.4)
    with anyio.fail_after(60):
        async with runtime.Runtime(runtime.Settings(stream_window_tokens=4, prefill_chunk_tokens=32)) as rt:
            await rt.load(spec)
            tenants = [
                rt.tenant("a"),
                rt.tenant("b", runtime.TenantSpec(weight=5.0)),
                rt.tenant("c", runtime.TenantSpec(max_running=1)),
            ]
            together = await run_together(tenants, "fake", asks)
            report = await rt.inspect("fake")
            assert (report.running, report.prefilling, report.parked, report.preparing) == ((), (), (), ())
        async with runtime.Runtime() as rt:
            await rt.load(spec)
            alone = [await run_alone(rt.tenant("solo"), "fake", ask) for ask in asks]
    assert differences(asks, together, alone) == []
