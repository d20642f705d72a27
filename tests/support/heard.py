"""Targets with a drafter on the fake engine, and streams that are heard: what they say, and how long they are silent."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import anyio

import runtime
from runtime.testing import FakeScript, expected_tokens
from tests.support.waiting import until

LONG = 60_000
TARGET = FakeScript(prefill_seconds_per_token=0.0002, decode_seconds_per_step=0.004, context_length=LONG)
DRAFTER = FakeScript(prefill_seconds_per_token=0.0002, decode_seconds_per_step=0.001, context_length=LONG, disagrees_one_in=6)
SETTINGS = runtime.Settings(prefix_memory_bytes=0, prefix_disk_bytes=0, prefill_chunk_tokens=32)
PROMPT = [ord(letter) for letter in "Once upon a time"]


@dataclass
class Heard:
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    longest_gap: float = 0.0
    """Seconds without a token, the wait for the first included."""


def stays(_: Heard) -> bool:
    return False


async def hear(tenant: runtime.Tenant, model: str, heard: Heard, leaves: Callable[[Heard], bool] = stays, **options: Any) -> None:
    """Reads a stream to its end, or until its client leaves."""
    last = time.monotonic()
    async with tenant.stream(model, ignore_eos=True, **options) as stream:
        async for event in stream:
            if isinstance(event, runtime.TextDelta):
                now = time.monotonic()
                heard.longest_gap = max(heard.longest_gap, now - last)
                last = now
                heard.token_ids.extend(event.token_ids)
                heard.text += event.text
                if leaves(heard):
                    return


def make_drafter(name: str = "drafter", script: FakeScript = DRAFTER) -> runtime.ModelSpec:
    return runtime.ModelSpec(name, kind="fake", fake=script)


def make_target(name: str, drafter: str, **options: Any) -> runtime.ModelSpec:
    return runtime.ModelSpec(name, kind="fake", fake=TARGET, drafter=drafter, **options)


def pairing_of(rt: runtime.Runtime, target: str = "target") -> runtime.PairingStats:
    return next(pairing for pairing in rt.stats().scheduler.pairings if pairing.target == target)


def pid_of(rt: runtime.Runtime, name: str) -> int:
    pid = next(model.pid for model in rt.models() if model.name == name)
    assert pid is not None
    return pid


@asynccontextmanager
async def house() -> AsyncIterator[tuple[runtime.Runtime, runtime.Tenant]]:
    async with runtime.Runtime(SETTINGS) as rt:
        await rt.load(make_drafter())
        await rt.load(make_target("target", "drafter", draft_tokens=4, draft_ahead=True))
        yield rt, rt.tenant("a", runtime.TenantSpec(max_running=16))


@asynccontextmanager
async def streaming(tenant: runtime.Tenant, *models: str) -> AsyncIterator[dict[str, Heard]]:
    """Streams of one prompt by these models, until the body is done; then what was said is compared with what had to be."""
    is_over = False
    heard = {model: Heard() for model in models}
    async with anyio.create_task_group() as group:
        for model in models:
            options = {"tokens": PROMPT, "max_tokens": LONG - 100}
            group.start_soon(partial(hear, tenant, model, heard[model], lambda _: is_over, **options))
        yield heard
        is_over = True
    for model, one in heard.items():
        assert one.token_ids, model
        assert one.token_ids == expected(len(one.token_ids)), model


def expected(num_tokens: int) -> list[int]:
    return expected_tokens(PROMPT, max_tokens=num_tokens, script=TARGET, ignore_eos=True)


async def new_rounds(rt: runtime.Runtime, target: str = "target") -> None:
    num_rounds = pairing_of(rt, target).rounds
    await until(lambda: pairing_of(rt, target).rounds > num_rounds + 3)
