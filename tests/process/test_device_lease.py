"""The device lease between real workers: how many are inside steps, whatever becomes of those who are."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import AsyncIterator, Collection
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import groupby
from pathlib import Path

import anyio
import msgspec
import pytest

import runtime
from runtime.protocol.commands import DeviceLease, FakeScript, Prefill, Release
from runtime.testing import expected_tokens, fake_model, text_tokens
from runtime.worker.turns import MAX_OVERTAKES
from tests.process.live_worker import LiveWorker, live_worker, row
from tests.support.turns import inside_now, most_inside, num_steps, stamps
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

STEP_SECONDS = 0.004
MANY = 3000
PROMPT = [7, 8, 9]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return tmp_path / "trace"


@asynccontextmanager
async def workers(
    num_workers: int, num_slots: int | None, trace: Path, seconds: float = STEP_SECONDS
) -> AsyncIterator[list[LiveWorker]]:
    """They share one lease, or have none."""
    script = FakeScript(decode_seconds_per_step=seconds, prefill_seconds_per_token=seconds / 3, trace=str(trace))
    lease = None if num_slots is None else DeviceLease(str(trace.with_name("device")), num_slots, 60.0)
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(live_worker(script, device_lease=lease)) for _ in range(num_workers)]


def start(worker: LiveWorker, *, max_tokens: int = MANY, background: bool = False) -> None:
    worker.send(Prefill((msgspec.structs.replace(row(1, PROMPT, max_tokens=max_tokens), background=background),)))


@pytest.mark.parametrize(("num_slots", "expected"), [(1, 1), (2, 2), (None, 4)])
async def test_no_more_workers_are_inside_a_step_than_the_lease_says_and_the_tokens_are_the_same(
    num_slots: int | None, expected: int, trace: Path
) -> None:
    async with workers(4, num_slots, trace) as crew:
        for worker in crew:
            start(worker, max_tokens=60)
        for worker in crew:
            await worker.end_of(1)
            assert worker.tokens(1) == expected_tokens(PROMPT, max_tokens=60)
    assert most_inside(trace) == expected
    assert len(num_steps(trace)) == 4


async def test_workers_of_one_class_have_like_shares(trace: Path) -> None:
    async with workers(4, 1, trace) as crew:
        for worker in crew:
            start(worker)
        await until(lambda: len(num_steps(trace)) == 4 and sum(num_steps(trace).values()) > 240)
        counts = num_steps(trace)
    assert max(counts.values()) - min(counts.values()) <= 0.1 * sum(counts.values())


async def test_background_work_gets_about_a_fifth_beside_an_interactive_worker_and_all_when_it_is_alone(trace: Path) -> None:
    """More than its fifth when the reader is late, as on a busy machine; `test_turns.py` has the exact shares."""
    async with workers(2, 1, trace, seconds=2 * STEP_SECONDS) as (reader, batch):
        start(batch, background=True)
        start(reader)
        await until(lambda: num_steps(trace)[reader.process.pid] > 0)
        before = num_steps(trace)
        await until(lambda: sum(num_steps(trace).values()) - sum(before.values()) >= 250)
        counts = num_steps(trace) - before
        share = counts[batch.process.pid] / sum(counts.values())
        assert 0.1 <= share <= 0.4, counts
        turns = [stamp.pid for stamp in stamps(trace) if stamp.what == "begin"][sum(before.values()) :]
        in_a_row = [len(list(run)) for pid, run in groupby(turns) if pid == reader.process.pid]
        assert max(in_a_row) <= 3 * MAX_OVERTAKES
        reader.send(Release((), (1,)))
        await until(lambda: reader.process.pid not in inside_now(trace))
        settled = num_steps(trace)
        await until(lambda: num_steps(trace)[batch.process.pid] > settled[batch.process.pid] + 20)
    assert most_inside(trace) == 1


async def test_the_kernel_frees_what_a_killed_worker_held(trace: Path) -> None:
    async with workers(3, 1, trace, seconds=0.03) as crew:
        for worker in crew:
            start(worker)
        await until(lambda: len(num_steps(trace)) == 3)
        deaths: dict[int, int] = {}
        for num_left in (2, 1):
            # A holder that has ended its step by the time of the signal would prove nothing.
            await until(lambda: len(inside_now(trace) - deaths.keys()) == 1)
            (holder,) = inside_now(trace) - deaths.keys()
            killed_at = time.monotonic_ns()
            os.kill(holder, signal.SIGKILL)
            deaths[holder] = killed_at
            went_on_at = await next_stamp(trace, killed_at, of_others_than=deaths.keys())
            assert (went_on_at - killed_at) / 1e9 <= 0.2
            assert len({worker.process.pid for worker in crew} - deaths.keys()) == num_left
    assert most_inside(trace, deaths) == 1


async def next_stamp(trace: Path, after: int, *, of_others_than: Collection[int]) -> int:
    """When another process wrote for the first time after a moment."""

    def found() -> list[int]:
        return [stamp.nanoseconds for stamp in stamps(trace) if stamp.nanoseconds > after and stamp.pid not in of_others_than]

    await until(found)
    return found()[0]


async def test_a_stopped_worker_that_waits_holds_up_nobody(trace: Path) -> None:
    async with workers(2, 1, trace, seconds=0.03) as crew:
        for worker in crew:
            start(worker)
        await until(lambda: len(num_steps(trace)) == 2)
        stopped, other = crew[0].process.pid, crew[1].process.pid
        await stop_outside(trace, stopped)
        before = num_steps(trace)
        with anyio.fail_after(5):
            await until(lambda: num_steps(trace)[other] >= before[other] + 20)
        assert num_steps(trace)[stopped] == before[stopped]
        os.kill(stopped, signal.SIGCONT)
        await until(lambda: num_steps(trace)[stopped] >= before[stopped] + 5)
    assert most_inside(trace) == 1


async def test_a_stopped_holder_is_ended_within_its_silence_and_every_stream_goes_on(trace: Path) -> None:
    answers: dict[str, runtime.Completion] = {}
    models = ("one", "two", "three")

    async def ask(model: str) -> None:
        answers[model] = await rt.tenant("a").generate(model, tokens=PROMPT, max_tokens=60)

    async with runtime.Runtime(runtime.Settings(device_lease=1, silence_seconds=1.5)) as rt:
        for model in models:
            await rt.load(fake_model(model, decode_seconds_per_step=0.03, trace=str(trace)))
        async with anyio.create_task_group() as group:
            for model in models:
                group.start_soon(ask, model)
            await until(lambda: len(num_steps(trace)) == 3)
            holder = await stop_inside(trace)
            stopped_at = time.monotonic_ns()
            went_on_at = await next_stamp(trace, stopped_at, of_others_than=(holder,))
        assert (went_on_at - stopped_at) / 1e9 <= 1.5 + 1.0  # its last beat may have come just before the signal
        for model in models:
            assert list(answers[model].token_ids) == expected_tokens(PROMPT, max_tokens=60)
        assert sum(info.restarts for info in rt.models()) == 1
        stats = rt.stats()
        assert stats.scheduler.failed == 0
        assert all(worker.num_device_waits > 0 and worker.device_wait_seconds > 0 for worker in stats.workers)
    assert most_inside(trace, {holder: stopped_at}) == 1


async def stop_inside(trace: Path) -> int:
    """A process that stands still inside a step: one that was about to end it goes on, and another is tried."""
    while True:
        await until(lambda: len(inside_now(trace)) == 1)
        (holder,) = inside_now(trace)
        await stop(holder)
        if inside_now(trace) == {holder}:
            return holder
        os.kill(holder, signal.SIGCONT)


async def stop_outside(trace: Path, pid: int) -> None:
    """It stands still while another process is inside a step."""
    while True:
        await until(lambda: inside_now(trace) - {pid})
        await stop(pid)
        if pid not in inside_now(trace):
            return
        os.kill(pid, signal.SIGCONT)


async def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    await until(lambda: os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT))


async def test_a_runtime_without_a_lease_waits_for_nothing(trace: Path) -> None:
    async with runtime.Runtime(runtime.Settings(device_lease=None)) as rt:
        for model in ("one", "two"):
            await rt.load(fake_model(model, decode_seconds_per_step=STEP_SECONDS, trace=str(trace)))
        async with anyio.create_task_group() as group:
            for model in ("one", "two"):
                group.start_soon(lambda model=model: rt.tenant("a").generate(model, tokens=text_tokens("hi"), max_tokens=60))
        assert not any(worker.num_device_waits for worker in rt.stats().workers)
    assert most_inside(trace) == 2
