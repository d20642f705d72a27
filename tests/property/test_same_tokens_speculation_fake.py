"""Speculation on the fake engine, whose next token is a hash of the whole visible context, under asyncio and trio: every length of
draft, right, wrong and mixed drafters, ends and stop strings inside blocks, small windows, clients that come and go."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import anyio
import pytest

import runtime
from runtime.protocol.events import Drafted, Verified
from runtime.scheduler.lanes import Lanes
from runtime.scheduler.state import SchedulerState
from runtime.scheduler.stimuli import Instruction, Stimulus, WorkerSaid
from runtime.testing import FakeScript
from tests.property.workload import Ask, differences, make_workload, run_alone, run_together

pytestmark = [pytest.mark.anyio, pytest.mark.limit(120)]

TARGET = FakeScript(eos_one_in=60, decode_seconds_per_step=0.003, prefill_seconds_per_token=0.0001)
DRAFTERS = {
    "twin": FakeScript(eos_one_in=60),
    "mixed": FakeScript(eos_one_in=60, disagrees_one_in=3),
    "wrong": FakeScript(disagrees_one_in=1),
}
SETTINGS = runtime.Settings(stream_window_tokens=6, prefill_chunk_tokens=32, prefix_disk_bytes=0)


def _asks(seed: int) -> list[Ask]:
    """Some with stop strings, which hashed tokens hit now and then."""
    asks = make_workload(seed, num_requests=20, longest_prompt=120, greedy_only=False, spread_seconds=0.25)
    stops = [{"stop": ["q", "zz"]} if ask.number % 3 == 0 else {} for ask in asks]
    return [dataclasses.replace(ask, options={**ask.options, **stop}) for ask, stop in zip(asks, stops, strict=True)]


def _target(name: str, drafter: str | None, **options: object) -> runtime.ModelSpec:
    return runtime.ModelSpec(name, kind="fake", fake=TARGET, max_slots=8, drafter=drafter, **options)  # type: ignore[arg-type]


async def test_every_draft_length_and_any_drafter_give_the_tokens_of_plain_decoding(anyio_backend: str) -> None:
    asks = _asks(11)
    async with runtime.Runtime(SETTINGS) as rt:
        tenants = [
            rt.tenant("a"),
            rt.tenant("b", runtime.TenantSpec(weight=5.0)),
            rt.tenant("c", runtime.TenantSpec(max_running=2)),
        ]
        await rt.load(_target("plain", None))
        alone = [await run_alone(tenants[0], "plain", ask) for ask in asks]
        for name, script in DRAFTERS.items():
            await rt.load(runtime.ModelSpec(name, kind="fake", fake=script, max_slots=6))
        names = [*DRAFTERS, "lookup"]
        accepted: dict[str, int] = dict.fromkeys(names, 0)
        for number, num_tokens in enumerate([1, 2, 3, 4, 5, 6, 7, 8, "auto", "auto"]):
            name = names[number % 3] if num_tokens != 5 else "lookup"
            await rt.load(_target("target", name, draft_tokens=num_tokens, draft_ahead="auto" if number > 7 else number % 2 == 0))
            together = await run_together(tenants, "target", asks)
            (pairing,) = rt.stats().scheduler.pairings
            assert differences(asks, together, alone) == [], (name, num_tokens)
            assert pairing.rounds > 0 or num_tokens == "auto"
            assert pairing.guests == 0
            accepted[name] += pairing.accepted
            report = await rt.inspect("target")
            assert (report.running, report.prefilling, report.parked) == ((), (), ())
            await rt.unload("target")
            assert (await rt.inspect("twin")).running == ()
        assert accepted["twin"] > accepted["mixed"] > 0
        assert accepted["wrong"] == 0


async def test_two_cohorts_that_take_turns_give_the_tokens_of_plain_decoding(
    anyio_backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Lanes, "choose", lambda lanes, num_rows: 2 if num_rows > 1 else 1)
    asks = _asks(12)
    async with runtime.Runtime(SETTINGS) as rt:
        tenants = [rt.tenant("a"), rt.tenant("b")]
        await rt.load(_target("plain", None))
        alone = [await run_alone(tenants[0], "plain", ask) for ask in asks]
        for name in ("twin", "mixed"):
            await rt.load(runtime.ModelSpec(name, kind="fake", fake=DRAFTERS[name], max_slots=8))
            await rt.load(_target("target", name, draft_tokens=3))
            together = await run_together(tenants, "target", asks)
            assert differences(asks, together, alone) == [], name
            (pairing,) = rt.stats().scheduler.pairings
            assert pairing.accepted > 0
            assert pairing.guests == 0
            assert (await rt.inspect("target")).running == ()
            await rt.unload("target")


async def test_several_sequences_logprobs_and_texts_are_those_of_plain_decoding(anyio_backend: str) -> None:
    options = {"prompt": "Once upon a time", "max_tokens": 90, "temperature": 1.2, "top_p": 0.9, "seed": 4, "n": 3, "logprobs": 2}
    async with runtime.Runtime(SETTINGS) as rt:
        await rt.load(runtime.ModelSpec("mixed", kind="fake", fake=DRAFTERS["mixed"]))
        await rt.load(_target("plain", None))
        await rt.load(_target("target", "mixed", draft_tokens=5))
        plain = await rt.tenant("a").generate("plain", **options)
        answer = await rt.tenant("a").generate("target", **options)
    for ours, theirs in zip([answer, *answer.alternatives], [plain, *plain.alternatives], strict=True):
        assert (ours.text, ours.token_ids, ours.logprobs, ours.finish_reason) == (
            theirs.text,
            theirs.token_ids,
            theirs.logprobs,
            theirs.finish_reason,
        )
    assert sum(one.usage.proposed_tokens for one in (answer, *answer.alternatives)) > 0


async def test_a_twin_is_right_every_time_counted_from_the_messages(anyio_backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each proposal the drafter sent is looked up in what its sequence turned out to be."""
    proposals: list[tuple[int, tuple[int, ...]]] = []
    num_matched = num_proposed = 0
    handle: Callable[[SchedulerState, Stimulus, float], list[Instruction]] = SchedulerState.handle

    def listen(state: SchedulerState, stimulus: Stimulus, now: float) -> list[Instruction]:
        nonlocal num_matched, num_proposed
        if isinstance(stimulus, WorkerSaid):
            if isinstance(stimulus.event, Drafted):
                proposals.extend((row.number, row.proposed) for row in stimulus.event.rows)
            elif isinstance(stimulus.event, Verified):
                num_matched += sum(row.num_matched for row in stimulus.event.rows)
                num_proposed += sum(row.num_proposed for row in stimulus.event.rows)
        return handle(state, stimulus, now)

    monkeypatch.setattr(SchedulerState, "handle", listen)
    async with runtime.Runtime(SETTINGS) as rt:
        await rt.load(runtime.ModelSpec("twin", kind="fake", fake=DRAFTERS["twin"]))
        await rt.load(_target("target", "twin", draft_tokens=4, draft_ahead=False))
        answer = await rt.tenant("a").generate("target", prompt="Hello", max_tokens=150, ignore_eos=True)
        longer = await rt.tenant("a").generate("target", prompt="Hello", max_tokens=170, ignore_eos=True, speculate=False)
    ids = list(longer.token_ids)
    assert ids[:150] == list(answer.token_ids)
    assert len(proposals) > 10
    for _, proposed in proposals:
        assert any(ids[place : place + len(proposed)] == list(proposed) for place in range(len(ids))), proposed
    assert num_matched == num_proposed == answer.usage.proposed_tokens == answer.usage.accepted_tokens
    # One token comes with each round beside the accepted ones, and some came before the drafter was ready.
    assert 150 - num_matched >= len(proposals)


async def test_the_rounds_stop_where_they_do_not_pay_and_the_loss_is_small(anyio_backend: str) -> None:
    async with runtime.Runtime(SETTINGS) as rt:
        await rt.load(runtime.ModelSpec("wrong", kind="fake", fake=DRAFTERS["wrong"]))
        await rt.load(_target("target", "wrong"))
        with anyio.fail_after(60):
            await rt.tenant("a").generate("target", prompt="Hello", max_tokens=400, ignore_eos=True)
        (pairing,) = rt.stats().scheduler.pairings
    (row,) = pairing.controller
    assert row.state == "off"
    assert 0 < pairing.rounds < 30
    assert pairing.accepted == 0
