"""A drafter that dies, hangs or goes at any message of a round: its targets' streams say the same without it, and hardly later."""

from __future__ import annotations

import itertools
import os
import random
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import anyio
import msgspec
import pytest

import runtime
from runtime.protocol.ids import ModelName
from tests.support.ambush import ROUND_MESSAGES, Ambush, lay
from tests.support.heard import (
    PROMPT,
    SETTINGS,
    TARGET,
    Heard,
    expected,
    hear,
    make_drafter,
    make_target,
    new_rounds,
    pairing_of,
    pid_of,
    stays,
    streaming,
)
from tests.support.waiting import until

pytestmark = [pytest.mark.anyio, pytest.mark.limit(180)]

UNLEASED = msgspec.structs.replace(SETTINGS, device_lease=None)
"""A drafter that is stopped inside a step keeps a lease of one from its target until its silence ends it."""

MAX_STALL_SECONDS = 1.0
"""Beyond the longest gap of the same request decoded plainly at the same time."""
PAIRS: tuple[dict[str, Any], ...] = (
    {"draft_tokens": 4, "draft_ahead": True},
    {"draft_tokens": 2, "draft_ahead": True},
    {"draft_tokens": 3, "draft_ahead": "auto"},
    {"draft_tokens": 6, "draft_ahead": True},
    {"draft_tokens": 1, "draft_ahead": True},
    {"draft_tokens": 5, "draft_ahead": True},
)
TURNS = 2
"""The pair of this number is made to work in two cohorts that take turns; those do not draft ahead."""
MAX_TRIES = 10
OFTEN = ("draft", "draft ahead", "drafted", "verify", "verified")
Kind = Literal["kill", "stop", "unload"]
KINDS: tuple[Kind, ...] = ("kill", "stop", "kill", "stop", "stop", "unload")
"""What a drafter suffers at each message, under each event loop."""


@dataclass
class Pair:
    """One target and its drafter, struck again and again; `tally`: what was done, and at which message."""

    rt: runtime.Runtime
    tenant: runtime.Tenant
    ambushes: list[Ambush]
    number: int
    numbers: random.Random
    tally: Counter[tuple[str, Kind]]

    @property
    def target(self) -> str:
        return f"target {self.number}"

    @property
    def drafter(self) -> str:
        return f"drafter {self.number}"

    async def load(self) -> None:
        await self.rt.load(make_drafter(self.drafter))
        await self.rt.load(make_target(self.target, self.drafter, **PAIRS[self.number]))
        if self.number == TURNS:
            pairing = self.rt._scheduler.state.book.models[ModelName(self.target)].pairing
            assert pairing is not None
            pairing.lanes.choose = lambda num_rows: 2 if num_rows > 1 else 1  # type: ignore[method-assign]

    async def suffer(self, faults: list[tuple[str, Kind]]) -> None:
        """Take faults, and each again until its message was caught: on a busy machine a stream may be over too soon."""
        while suitable := [fault for fault in faults if self.number != TURNS or fault[0] != "draft ahead"]:
            message, kind = suitable[0]
            faults.remove(suitable[0])
            for _ in range(MAX_TRIES):
                if is_struck := await self._suffer_one(message, kind):
                    break
            assert is_struck, f"message {message!r} never came: {pairing_of(self.rt, self.target)}"
            self.tally[message, kind] += 1
            await self._works_again()

    async def _suffer_one(self, message: str, kind: Kind) -> bool:
        """A fault while some streams are heard, each beside the same request decoded plainly. False when it did not come."""
        asks = [self._ask(number) for number in range(self.numbers.choice([2, 3]))]
        pairs = [(Heard(), Heard()) for _ in asks]
        struck = anyio.Event()
        async with anyio.create_task_group() as faults:
            faults.start_soon(self._fault, message, kind, struck)
            async with anyio.create_task_group() as group:
                for (here, plain), (ask, leaves, delay) in zip(pairs, asks, strict=True):
                    group.start_soon(self._join, self.target, here, leaves, delay, ask)
                    group.start_soon(self._join, "plain", plain, stays, delay, ask)
            if not struck.is_set():
                faults.cancel_scope.cancel()
        for (here, plain), (ask, leaves, _) in zip(pairs, asks, strict=True):
            what = (self.target, message, kind, ask)
            end = len(here.token_ids) if leaves is not stays else None
            assert here.token_ids == plain.token_ids[:end], what
            assert here.text == plain.text or (leaves is not stays and plain.text.startswith(here.text)), what
            assert here.longest_gap <= plain.longest_gap + MAX_STALL_SECONDS, what
        if kind == "kill" and struck.is_set():  # loaded anew, for a worker that dies too often is given up
            await self.rt.unload(self.drafter)
            await self.rt.load(make_drafter(self.drafter))
        return struck.is_set()

    def _ask(self, number: int) -> tuple[dict[str, Any], Callable[[Heard], bool], float]:
        """Options, when its client leaves, and how much later than the first it comes."""
        numbers = self.numbers
        length = numbers.choice([1, numbers.randint(2, 30), numbers.randint(60, 200)])
        options: dict[str, Any] = {
            "tokens": [numbers.randrange(32, 127) for _ in range(length)],
            "max_tokens": numbers.randint(30, 50) if number else 50,
            "temperature": numbers.choice([0.0, 0.7, 1.2]),
            "seed": numbers.getrandbits(32),
        }
        num_read = numbers.randint(5, 25)
        leaves = (lambda heard: len(heard.token_ids) >= num_read) if number == 2 else stays
        return options, leaves, numbers.uniform(0.0, 0.05) if number else 0.0

    async def _join(self, model: str, heard: Heard, leaves: Callable[[Heard], bool], delay: float, options: dict[str, Any]) -> None:
        await anyio.sleep(delay)
        await hear(self.tenant, model, heard, leaves, **options)

    async def _fault(self, message: str, kind: Kind, struck: anyio.Event) -> None:
        pid = pid_of(self.rt, self.drafter)
        at_once = kind != "unload" and self.numbers.random() < 0.6

        def strike() -> None:
            if at_once:
                os.kill(pid, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
            struck.set()

        number = self.numbers.randint(1, 4) if message in OFTEN else 1
        ambush = Ambush(self.target, self.drafter, message, number, strike)
        self.ambushes.append(ambush)
        try:
            await struck.wait()
        finally:
            self.ambushes.remove(ambush)
        if not at_once:
            await anyio.sleep(self.numbers.uniform(0.0, 0.004))
        if kind == "unload":
            await self.rt.unload(self.drafter)
            await self.rt.load(make_drafter(self.drafter))
            return
        if not at_once:
            os.kill(pid, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        if kind == "stop":
            await anyio.sleep(self.numbers.choice([0.0, 0.02, 0.1, 1.3]))
            os.kill(pid, signal.SIGCONT)

    async def _works_again(self) -> None:
        rounds = pairing_of(self.rt, self.target).rounds
        with anyio.fail_after(20):
            while pairing_of(self.rt, self.target).rounds == rounds:
                heard = Heard()
                await hear(self.tenant, self.target, heard, tokens=PROMPT, max_tokens=24)
                assert heard.token_ids == expected(24)


async def test_a_drafter_killed_or_stopped_at_any_message_changes_nothing(
    anyio_backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tally: Counter[tuple[str, Kind]] = Counter()
    faults = list(itertools.product(ROUND_MESSAGES, KINDS))
    random.Random(anyio_backend).shuffle(faults)
    left = list(faults)
    async with runtime.Runtime(UNLEASED) as rt:
        await rt.load(runtime.ModelSpec("plain", kind="fake", fake=TARGET, max_slots=16))
        tenant = rt.tenant("a", runtime.TenantSpec(max_running=64))
        ambushes = lay(monkeypatch)
        pairs = [
            Pair(rt, tenant, ambushes, number, random.Random(f"{anyio_backend} {number}"), tally) for number in range(len(PAIRS))
        ]
        async with anyio.create_task_group() as group:
            for pair in pairs:
                await pair.load()
                group.start_soon(pair.suffer, left)
        for pair in pairs:
            await until(lambda pair=pair: pairing_of(rt, pair.target).guests == 0)  # type: ignore[misc]
            assert pairing_of(rt, pair.target).accepted > 0
            for name in (pair.target, pair.drafter):
                report = await rt.inspect(name)
                assert (report.running, report.prefilling, report.parked) == ((), (), ())
    assert tally == Counter(faults)
    assert sum(number for (_, kind), number in tally.items() if kind != "unload") == 50  # and as many under the other event loop


async def _late_and_struck(rt: runtime.Runtime, tenant: runtime.Tenant, ambushes: list[Ambush], message: str, kind: Kind) -> None:
    target, drafter = f"target {message} {kind}", f"drafter {message} {kind}"
    await rt.load(make_drafter(drafter))
    await rt.load(make_target(target, drafter, draft_tokens=4, draft_ahead=True))
    struck, pid = anyio.Event(), pid_of(rt, drafter)

    def strike() -> None:
        os.kill(pid, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        struck.set()

    async with streaming(tenant, target, "plain") as heard:
        await new_rounds(rt, target)
        ambushes.append(Ambush(target, drafter, message, 1, strike))
        os.kill(pid, signal.SIGSTOP)
        await until(lambda: pairing_of(rt, target).late)
        if message == "catch up":
            os.kill(pid, signal.SIGCONT)
        await struck.wait()
        if kind == "stop":
            await anyio.sleep(0.7)
            os.kill(pid, signal.SIGCONT)
        await new_rounds(rt, target)
    assert heard[target].longest_gap <= heard["plain"].longest_gap + MAX_STALL_SECONDS, target


async def test_a_late_drafter_is_struck_again_while_its_target_goes_on_alone(
    anyio_backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where its rows are let go, and where it is fed what it missed."""
    async with runtime.Runtime(UNLEASED) as rt:
        await rt.load(runtime.ModelSpec("plain", kind="fake", fake=TARGET, max_slots=16))
        tenant = rt.tenant("a", runtime.TenantSpec(max_running=64))
        ambushes = lay(monkeypatch)
        async with anyio.create_task_group() as group:
            struck: list[tuple[str, Kind]] = [("resume", "kill"), ("catch up", "kill"), ("catch up", "stop")]
            for message, kind in struck:
                group.start_soon(_late_and_struck, rt, tenant, ambushes, message, kind)
