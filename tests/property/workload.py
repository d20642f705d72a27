"""A random workload of ragged requests that join, leave and are cancelled, and the same requests one at a time.

The house's great law says that both give the same tokens. Everything random comes from one seed.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import anyio

import runtime


@dataclass(frozen=True)
class Ask:
    """One request: its prompt ids, its options, when it joins, and after how many tokens its client leaves (None: stays)."""

    number: int
    tokens: list[int]
    options: dict[str, Any]
    join_after_seconds: float
    leave_after_tokens: int | None
    slow_seconds: float


@dataclass
class Answer:
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    text: str = ""
    logprobs: list[runtime.TokenLogprob] = field(default_factory=list)


def options_for(rng: random.Random, *, greedy_only: bool) -> dict[str, Any]:
    options: dict[str, Any] = {"max_tokens": rng.randint(1, 40), "seed": rng.getrandbits(63)}
    if greedy_only or rng.random() < 0.4:
        return options
    options["temperature"] = rng.choice([0.3, 0.7, 1.0, 1.3])
    if rng.random() < 0.4:
        options["top_p"] = rng.choice([0.5, 0.9, 0.95])
    if rng.random() < 0.4:
        options["top_k"] = rng.choice([1, 5, 40])
    if rng.random() < 0.3:
        options["min_p"] = rng.choice([0.02, 0.1])
    if rng.random() < 0.4:
        options["repetition_penalty"] = rng.choice([1.1, 1.5])
    if rng.random() < 0.3:
        options["presence_penalty"] = rng.choice([-0.5, 0.8])
    if rng.random() < 0.3:
        options["frequency_penalty"] = rng.choice([0.3, 1.0])
    if rng.random() < 0.3:
        options["logit_bias"] = {rng.randrange(32, 120): rng.choice([-20.0, 2.0, 5.0]) for _ in range(3)}
    if rng.random() < 0.2:
        options["logprobs"] = rng.choice([0, 3])
    return options


def make_workload(seed: int, *, num_requests: int, longest_prompt: int, greedy_only: bool, spread_seconds: float) -> list[Ask]:
    rng = random.Random(seed)
    asks = []
    for number in range(num_requests):
        length = rng.choice([1, 2, 3, rng.randint(4, 24), rng.randint(4, longest_prompt), longest_prompt])
        options = options_for(rng, greedy_only=greedy_only)
        leaves = rng.random() < 0.25
        asks.append(
            Ask(
                number=number,
                tokens=[rng.randrange(32, 127) for _ in range(length)],
                options=options,
                join_after_seconds=rng.random() * spread_seconds,
                leave_after_tokens=rng.randint(0, options["max_tokens"]) if leaves else None,
                slow_seconds=0.01 if rng.random() < 0.2 else 0.0,
            )
        )
    return asks


async def run_together(tenants: list[runtime.Tenant], model: str, asks: list[Ask]) -> list[Answer]:
    """All asks at once, spread over the tenants. A client that leaves keeps what it had read."""
    answers = [Answer() for _ in asks]

    async def one(ask: Ask) -> None:
        await anyio.sleep(ask.join_after_seconds)
        tenant = tenants[ask.number % len(tenants)]
        answer = answers[ask.number]
        async with tenant.stream(model, tokens=ask.tokens, **ask.options) as stream:
            if ask.leave_after_tokens == 0:
                return
            async for event in stream:
                if isinstance(event, runtime.TextDelta):
                    answer.token_ids.extend(event.token_ids)
                    answer.text += event.text
                    answer.logprobs.extend(event.logprobs)
                    if ask.leave_after_tokens is not None and len(answer.token_ids) >= ask.leave_after_tokens:
                        return
                    if ask.slow_seconds:
                        await anyio.sleep(ask.slow_seconds)
                elif isinstance(event, runtime.Finished):
                    answer.finish_reason = event.completion.finish_reason
                    assert answer.token_ids == list(event.completion.token_ids)
                    assert answer.text == event.completion.text

    async with anyio.create_task_group() as group:
        for ask in asks:
            group.start_soon(one, ask)
    return answers


async def run_alone(tenant: runtime.Tenant, model: str, ask: Ask) -> Answer:
    completion = await tenant.generate(model, tokens=ask.tokens, **ask.options)
    return Answer(list(completion.token_ids), completion.finish_reason, completion.text, list(completion.logprobs))


def differences(asks: list[Ask], together: list[Answer], alone: list[Answer]) -> list[str]:
    """One line for each ask whose answers differ; a client that left must hold a prefix of the solo run's."""
    found = []
    for ask, here, solo in zip(asks, together, alone, strict=True):
        if ask.leave_after_tokens is None:
            same = here == solo
        else:
            same = (
                here.token_ids == solo.token_ids[: len(here.token_ids)]
                and here.logprobs == solo.logprobs[: len(here.logprobs)]
                and solo.text.startswith(here.text)
            )
        if not same:
            found.append(f"request {ask.number} {ask.options}: together {here}, alone {solo}")
    return found
