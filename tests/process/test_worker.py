"""A real worker process over real sockets: one conversation, everything it may be told, in any state."""

from __future__ import annotations

import itertools
import json
import random
import subprocess

import anyio
import pytest

from runtime.protocol.commands import (
    PROTOCOL_VERSION,
    ChatPrompt,
    FakeScript,
    Fault,
    Grant,
    Inspect,
    Load,
    Prefill,
    Prepare,
    Release,
    Sampling,
    Shutdown,
    TextPrompt,
)
from runtime.protocol.events import (
    Failed,
    Heartbeat,
    Hello,
    Inspected,
    Loading,
    Prefilled,
    Prepared,
    Ready,
    Refused,
    Released,
    StepDone,
)
from runtime.protocol.frames import FrameError
from runtime.protocol.ids import RequestId, SequenceId
from runtime.testing import chat_tokens, expected_text, expected_tokens, text_tokens
from tests.process.live_worker import live_worker, load_command, row

pytestmark = pytest.mark.anyio

HELLO = list(b"Hello")
LONG = list(range(32, 127)) * 4
ONE = SequenceId(1)
SLOW = FakeScript(decode_seconds_per_step=0.02, prefill_seconds_per_token=0.001)


def release(*sequences: int) -> Release:
    return Release((), tuple(SequenceId(sequence) for sequence in sequences))


# -- a whole life -----------------------------------------------------------------------------------------


async def test_a_conversation_from_hello_to_stopped() -> None:
    async with live_worker(is_loaded=False) as worker:
        hello = await worker.next(Hello)
        assert (hello.version, hello.pid, hello.incarnation) == (PROTOCOL_VERSION, worker.process.pid, 1)
        worker.send(load_command(FakeScript()))
        facts = (await worker.next(Ready)).facts
        assert (facts.kind, facts.context_length, facts.chat_restrictions) == ("fake", 4096, ())
        messages = [{"role": "user", "content": "Hello"}]
        worker.send(Prepare(RequestId(7), ChatPrompt(json.dumps(messages))))
        prepared = await worker.next(Prepared)
        assert (prepared.request, prepared.tokens.tolist()) == (7, chat_tokens(messages))
        worker.send(Prefill((row(1, prepared.tokens.tolist(), max_tokens=20),)))
        await worker.end_of(1)
        assert worker.tokens(1) == expected_tokens(chat_tokens(messages), max_tokens=20)
        assert worker.text(1) == expected_text(chat_tokens(messages), max_tokens=20)
        assert await worker.stop() == 0


async def test_what_comes_before_the_load_is_refused() -> None:
    async with live_worker(is_loaded=False) as worker:
        worker.send(Prepare(RequestId(3), TextPrompt("x")), Prefill((row(1, HELLO),)), release(5))
        refused = await worker.next(Refused)
        assert (refused.command, refused.code, refused.requests) == ("prepare", "not_ready", (3,))
        refused = await worker.next(Refused)
        assert (refused.command, refused.code, refused.sequences) == ("prefill", "not_ready", (1,))
        assert (await worker.next(Released)).sequences == (5,)
        worker.send(load_command(FakeScript()))
        await worker.next(Ready)


async def test_a_worker_may_be_stopped_before_it_has_loaded() -> None:
    async with live_worker(is_loaded=False) as worker:
        assert await worker.stop() == 0


async def test_a_load_reports_progress_and_the_worker_beats_meanwhile() -> None:
    async with live_worker(FakeScript(load_seconds=1.2), is_loaded=False) as worker:
        worker.send(load_command(FakeScript(load_seconds=1.2)))
        await worker.next(Ready)
        stages = [(event.stage, event.done) for event in worker.all(Loading)]
        assert stages[0] == ("imports", 0)
        assert stages[-1] == ("weights", 24)
        assert len(stages) < 20
        assert "loading" in {beat.phase for beat in worker.all(Heartbeat)}


async def test_a_beat_during_a_step_carries_its_promise() -> None:
    async with live_worker(FakeScript(), Fault("prefill", "sleep", seconds=1.8)) as worker:
        worker.send(Prefill((row(1, HELLO),)))
        beat = await worker.next(Heartbeat, lambda beat: beat.phase == "prefill")
        assert beat.promised_seconds == 1.8
        assert beat.resident_bytes > 1 << 20
        await worker.end_of(1)
        assert (await worker.next(Heartbeat, lambda beat: beat.phase == "idle")).promised_seconds == 0


# -- batches ----------------------------------------------------------------------------------------------


async def test_ragged_rows_join_and_leave_and_each_equals_itself_alone() -> None:
    rng = random.Random(11)
    asks = {}
    for number in range(24):
        prompt = [rng.randrange(32, 127) for _ in range(rng.choice([1, 5, 60, 300]))]
        sampling = rng.choice([Sampling(), Sampling(temperature=0.7, seed=number), Sampling(temperature=1.0, top_k=5, seed=1)])
        asks[number] = (prompt, sampling, rng.randint(1, 60))
    leaving = {3, 9, 15, 21}
    async with live_worker(FakeScript(eos_one_in=50), max_slots=8, prefill_chunk_tokens=64) as worker:
        for first in range(0, 24, 3):
            batch = [row(n, asks[n][0], max_tokens=asks[n][2], sampling=asks[n][1]) for n in range(first, first + 3)]
            worker.send(Prefill(tuple(batch)))
            if first % 2:
                await worker.next(StepDone)
            worker.send(release(*leaving & {first, first - 3}))
        await worker.end_of(*set(asks) - leaving)
        for number, (prompt, sampling, max_tokens) in asks.items():
            alone = expected_tokens(prompt, max_tokens=max_tokens, sampling=sampling, script=FakeScript(eos_one_in=50))
            here = worker.tokens(number)
            assert here == (alone[: len(here)] if number in leaving else alone)
        report = await worker.report()
        assert (report.running, report.parked, report.prefilling, report.cache_bytes) == ((), (), (), 0)


async def test_a_parked_sequence_goes_on_with_a_grant() -> None:
    async with live_worker() as worker:
        worker.send(Prefill((row(1, HELLO, max_tokens=12, limit=9),)))
        await worker.next(StepDone, lambda step: step.rows[0].index == 8)
        assert (await worker.report()).parked == (1,)
        worker.send(Grant(((ONE, 9),)), Grant(((ONE, 3),)))
        assert (await worker.report(2)).parked == (1,)
        worker.send(Grant(((ONE, 100),)))
        await worker.end_of(1)
        assert worker.tokens(1) == expected_tokens(HELLO, max_tokens=12)


# -- release in every state -------------------------------------------------------------------------------


async def test_a_release_while_decoding_stops_it_after_the_step_under_way() -> None:
    async with live_worker(SLOW) as worker:
        worker.send(Prefill((row(1, HELLO, max_tokens=1000),)))
        await worker.next(StepDone, lambda step: step.step == 5)
        worker.send(Inspect(1), release(1))
        before = (await worker.next(Inspected)).report
        released = await worker.next(Released)
        assert released.step <= before.steps + 1
        assert (await worker.report(2)).steps == released.step


async def test_a_release_amid_a_prefill_stops_it_after_the_chunk_under_way() -> None:
    async with live_worker(SLOW, prefill_chunk_tokens=16) as worker:
        worker.send(Prefill((row(1, LONG * 4),)))
        while (await worker.report()).prefill_steps < 3:
            pass
        worker.send(Inspect(2), release(1))
        before = (await worker.next(Inspected)).report
        released = await worker.next(Released)
        assert released.step <= before.steps + 1
        assert before.prefilling == (1,)
        report = await worker.report(3)
        assert (report.steps, report.prefilling, report.cache_bytes) == (released.step, (), 0)
        assert worker.tokens(1) == []


async def test_a_release_while_preparing_is_answered_at_once_and_nothing_follows() -> None:
    async with live_worker(FakeScript(), Fault("prepare", "sleep", seconds=0.4)) as worker:
        worker.send(Prepare(RequestId(1), TextPrompt("one")))
        assert (await worker.report()).preparing == (1,)
        worker.send(Release((RequestId(1),), ()))
        assert (await worker.next(Released)).requests == (1,)
        worker.send(Prepare(RequestId(2), TextPrompt("two")))
        prepared = await worker.next(Prepared)
        assert (prepared.request, prepared.tokens.tolist()) == (2, text_tokens("two"))


async def test_a_release_of_the_parked_the_finished_and_the_unknown() -> None:
    async with live_worker() as worker:
        worker.send(Prefill((row(1, HELLO, limit=7), row(2, HELLO, max_tokens=2))))
        await worker.end_of(2)
        worker.send(release(1, 2, 3))
        assert (await worker.next(Released)).sequences == (1, 2, 3)
        report = await worker.report()
        assert (report.parked, report.cache_bytes) == ((), 0)
        worker.send(release(1, 2, 3))
        assert (await worker.next(Released)).sequences == (1, 2, 3)


# -- faults -----------------------------------------------------------------------------------------------


async def test_a_broken_engine_is_told_with_its_traceback_and_ends_the_worker() -> None:
    async with live_worker(FakeScript(), Fault("decode", "raise", number=3), stderr=subprocess.PIPE) as worker:
        worker.send(Prefill((row(1, HELLO),)))
        failed = await worker.next(Failed)
        assert failed.reason == "error"
        assert "scripted fault 'raise' at 'decode'" in failed.message
        assert "fake.py" in failed.traceback
        assert await worker.exit_code() == 1
        assert worker.tokens(1) == expected_tokens(HELLO, max_tokens=3)
        assert worker.process.stderr is not None
        line = json.loads(worker.process.stderr.read().decode().splitlines()[-1])
        assert (line["level"], line["event"]) == ("error", "worker failed")


@pytest.mark.parametrize("at", ["import", "load"])
async def test_a_load_that_raises_is_told(at: str) -> None:
    async with live_worker(is_loaded=False) as worker:
        worker.send(load_command(FakeScript(), Fault(at, "raise")))
        assert at in (await worker.next(Failed)).message
        assert await worker.exit_code() == 1


async def test_a_fake_model_without_a_script_fails_to_load() -> None:
    async with live_worker(is_loaded=False) as worker:
        worker.send(Load("m", "", kind="fake"))
        assert "FakeScript" in (await worker.next(Failed)).message


@pytest.mark.parametrize("at", ["import", "load", "prepare", "prefill", "decode", "release", "shutdown"])
async def test_a_worker_exits_where_it_is_scripted_to(at: str) -> None:
    async with live_worker(is_loaded=False) as worker:
        worker.send(load_command(FakeScript(), Fault(at, "exit", exit_code=33)))
        worker.send(*([Shutdown()] if at == "shutdown" else [Prepare(RequestId(1), TextPrompt("x")), Prefill((row(1, HELLO),))]))
        assert await worker.exit_code() == 33


async def test_frames_that_are_no_event_come_between_good_ones() -> None:
    async with live_worker(FakeScript(), Fault("decode", "garbage", number=2)) as worker:
        worker.send(Prefill((row(1, HELLO),)))
        await worker.end_of(1)
        with anyio.fail_after(10):
            while not any(isinstance(event, FrameError) for event in worker.events):
                worker.events += await worker.channel.receive()
        assert worker.tokens(1) == expected_tokens(HELLO, max_tokens=8)


async def test_a_prompt_that_cannot_be_prepared_is_refused_and_the_next_one_works() -> None:
    async with live_worker() as worker:
        worker.send(Prepare(RequestId(1), ChatPrompt("[]")), Prepare(RequestId(2), TextPrompt("ok")))
        refused = await worker.next(Refused)
        assert (refused.code, refused.requests) == ("invalid_request", (1,))
        assert (await worker.next(Prepared)).request == 2


async def test_a_long_prefill_delays_no_decode_step_by_more_than_a_chunk() -> None:
    async with live_worker(FakeScript(), prefill_chunk_tokens=16) as worker:
        worker.send(Prefill((row(1, HELLO, max_tokens=4000),)), Prefill((row(2, LONG),)))
        await worker.end_of(2)
        prefilled = next(i for i, event in enumerate(worker.events) if isinstance(event, Prefilled) and event.rows[0][0] == 2)
        steps = [event.step for event in worker.events[:prefilled] if isinstance(event, StepDone)]
        assert len(steps) > len(LONG) // 16 - 2
        assert max(later - earlier for earlier, later in itertools.pairwise(steps)) <= 2
