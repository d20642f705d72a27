"""Speculation on the fake engine, whose next token is a hash of the whole visible context, under asyncio and trio: every length of
draft, right, wrong and mixed drafters, ends and stop strings inside blocks, small windows, clients that come and go."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import anyio
import pytest

import runtime
from runtime.protocol.commands import Verify, VerifyRow
from runtime.scheduler.lanes import Lanes
from runtime.scheduler.state import SchedulerState
from runtime.scheduler.stimuli import Instruction, Send, Stimulus
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
    asks = make_workload(seed, num_requests=16, longest_prompt=120, greedy_only=False, spread_seconds=0.2)
    stops = [{"stop": ["q", "zz"]} if ask.number % 3 == 0 else {} for ask in asks]
    return [dataclasses.replace(ask, options={**ask.options, **stop}) for ask, stop in zip(asks, stops, strict=True)]


def _target(name: str, drafter: str | None, *, max_slots: int = 8, **options: Any) -> runtime.ModelSpec:
    return runtime.ModelSpec(name, kind="fake", fake=TARGET, max_slots=max_slots, drafter=drafter, **options)


async def test_every_draft_length_and_any_drafter_give_the_answers_of_plain_decoding(anyio_backend: str) -> None:
    """Each length with two drafters, under the other event loop with the other two."""
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

        async def try_one(target: str, name: str, number: int, num_tokens: int | str) -> None:
            await rt.load(_target(target, name, draft_tokens=num_tokens, draft_ahead=("auto", True, False)[number % 3]))
            together = await run_together(tenants, target, asks)
            pairing = next(pairing for pairing in rt.stats().scheduler.pairings if pairing.target == target)
            assert differences(asks, together, alone) == [], (name, num_tokens)
            assert pairing.rounds > 0 or num_tokens == "auto"
            assert pairing.guests == 0
            accepted[name] += pairing.accepted
            report = await rt.inspect(target)
            assert (report.running, report.prefilling, report.parked) == ((), (), ())
            await rt.unload(target)

        lengths: list[int | str] = [1, 2, 3, 4, 5, 6, 7, 8, "auto"]
        for number, num_tokens in enumerate(lengths):
            shift = number + (anyio_backend == "trio")
            async with anyio.create_task_group() as group:
                for place, name in enumerate((names[shift % 4], names[(shift + 2) % 4])):
                    group.start_soon(try_one, f"target {place}", name, number, num_tokens)
        for name in DRAFTERS:
            assert (await rt.inspect(name)).running == ()
        assert accepted["twin"] > accepted["mixed"] > 0
        assert accepted["wrong"] == 0


async def test_batches_of_one_to_eight_give_the_answers_of_plain_decoding(anyio_backend: str) -> None:
    """One or two sequences for each request, at temperatures 0, 0.7 and 1.2, with stop strings, ends and log probabilities."""
    rng = random.Random(anyio_backend)
    names = [*DRAFTERS, "lookup"]
    answers: dict[str, runtime.Completion] = {}
    async with runtime.Runtime(SETTINGS) as rt:
        tenant = rt.tenant("a", runtime.TenantSpec(max_running=128))
        for name, script in DRAFTERS.items():
            await rt.load(runtime.ModelSpec(name, kind="fake", fake=script, max_slots=16))
            await rt.load(_target(f"after {name}", name, max_slots=16, draft_tokens=rng.randint(2, 6)))
        await rt.load(_target("after lookup", "lookup", max_slots=16, draft_tokens=4))
        await rt.load(_target("plain", None, max_slots=16))

        async def ask(model: str, number: int, options: dict[str, Any]) -> None:
            answers[f"{model} {number}"] = await tenant.generate(model, **options)

        for num_requests in range(1, 9):
            async with anyio.create_task_group() as group:
                for number in range(num_requests):
                    length = rng.choice([1, rng.randint(2, 20), rng.randint(30, 90)])
                    options = {
                        "tokens": [rng.randrange(32, 127) for _ in range(length)],
                        "max_tokens": rng.randint(1, 50),
                        "temperature": (0.0, 0.7, 1.2)[number % 3],
                        "top_p": rng.choice([1.0, 0.9]),
                        "repetition_penalty": rng.choice([1.0, 1.2]),
                        "seed": rng.getrandbits(60),
                        "n": rng.choice([1, 2]),
                        "stop": rng.choice([[], ["q", "zz"]]),
                        "logprobs": rng.choice([None, 2]),
                    }
                    for model in ("plain", *(f"after {name}" for name in names)):
                        group.start_soon(ask, model, number, options)
            for number in range(num_requests):
                for name in names:
                    ours, theirs = answers[f"after {name} {number}"], answers[f"plain {number}"]
                    assert _all(ours) == _all(theirs), (name, num_requests, number)
        rates = {pairing.drafter: pairing.accepted / max(1, pairing.proposed) for pairing in rt.stats().scheduler.pairings}
        assert all(pairing.rounds > 0 for pairing in rt.stats().scheduler.pairings)
    assert rates["twin"] > rates["mixed"] > rates["wrong"] == 0


def _all(answer: runtime.Completion) -> list[tuple[object, ...]]:
    """What must be the same, of each sequence."""
    sequences = [answer, *answer.alternatives]
    return [(one.text, one.token_ids, one.finish_reason, one.matched_stop, one.logprobs) for one in sequences]


async def test_a_drafter_of_another_vocabulary_is_refused_and_the_answers_are_the_same(anyio_backend: str) -> None:
    asks = _asks(13)[:8]
    async with runtime.Runtime(SETTINGS) as rt:
        await rt.load(runtime.ModelSpec("foreign", kind="fake", fake=FakeScript(vocabulary="another")))
        await rt.load(_target("plain", None))
        await rt.load(_target("target", "foreign", draft_tokens=3))
        tenant = rt.tenant("a")
        alone = [await run_alone(tenant, "plain", ask) for ask in asks]
        assert differences(asks, await run_together([tenant], "target", asks), alone) == []
        (pairing,) = rt.stats().scheduler.pairings
        assert (pairing.state, pairing.rounds, pairing.guests) == ("refused", 0, 0)
        assert any("vocabulary" in note for note in rt.capabilities("target").notes)
        with pytest.raises(runtime.InvalidRequest, match="vocabulary"):
            await tenant.generate("target", prompt="x", speculate=True)


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


@pytest.mark.parametrize("is_ahead", [True, False])
async def test_a_twin_is_right_every_time_counted_from_the_messages(
    is_ahead: bool, anyio_backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is sent to be verified is compared with what plain decoding said there, and the runtime's own counts with that."""
    sent: list[tuple[list[int], VerifyRow]] = []
    handle: Callable[[SchedulerState, Stimulus, float], list[Instruction]] = SchedulerState.handle

    def listen(state: SchedulerState, stimulus: Stimulus, now: float) -> list[Instruction]:
        out = handle(state, stimulus, now)
        for instruction in out:
            if isinstance(instruction, Send) and isinstance(instruction.command, Verify):
                sequences = state.book.models[instruction.model].sequences
                for row in instruction.command.rows:
                    prompt = sequences[row.sequence].record.prompt_tokens
                    assert prompt is not None
                    sent.append((list(prompt), row))
        return out

    monkeypatch.setattr(SchedulerState, "handle", listen)
    prompts = [[ord("a") + number, *range(40, 41 + 9 * number)] for number in range(6)]
    plain: dict[int, runtime.Completion] = {}
    answers: dict[int, runtime.Completion] = {}
    async with runtime.Runtime(SETTINGS) as rt:
        await rt.load(runtime.ModelSpec("twin", kind="fake", fake=DRAFTERS["twin"]))
        await rt.load(_target("target", "twin", draft_tokens=4, draft_ahead=is_ahead))
        tenant = rt.tenant("a", runtime.TenantSpec(max_running=16))

        async def ask(number: int) -> None:
            options: dict[str, Any] = {
                "tokens": prompts[number],
                "temperature": (0.0, 0.7, 1.2)[number % 3],
                "seed": number,
                "ignore_eos": True,
            }
            plain[number] = await tenant.generate("target", max_tokens=120, speculate=False, **options)
            answers[number] = await tenant.generate("target", max_tokens=100 + number, **options)

        async with anyio.create_task_group() as group:
            for number in range(len(prompts)):
                group.start_soon(ask, number)
    assert len(sent) > 50
    for prompt, row in sent:
        place = row.base - len(prompt)
        right = plain[prompts.index(prompt)].token_ids[place : place + len(row.proposed)]
        assert row.proposed == tuple(right)
    for number, answer in answers.items():
        assert answer.token_ids == plain[number].token_ids[: 100 + number]
        num_proposed = sum(len(row.proposed) for prompt, row in sent if prompt == prompts[number])
        assert num_proposed == answer.usage.proposed_tokens == answer.usage.accepted_tokens > 30


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
