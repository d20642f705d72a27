"""The same request gives the same tokens wherever its prefix comes from: nowhere, memory, a file, another worker, an earlier life.

Tiny real models over real processes on the reference BLAS, at split points around the edges of blocks (256) and nodes (512).
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

import runtime
from runtime.worker.prefix_places import MIN_TOKENS
from tests.support.tiny import make_tiny

pytestmark = [pytest.mark.anyio, pytest.mark.limit(300)]

FAMILIES = {
    "llama": {},
    "gemma3_text": {},  # a window of 16: far shorter than a block
    "gpt_oss": {"sliding_window": 300},  # longer than a block, shorter than a node
    "lfm2": {},
}
LENGTHS = (1, 2, 255, 256, 257, 258, 511, 512, 513, 514, 767, 768, 769, 1023, 1024, 1025, 1100)
"""Of prompts that are asked again as they are: one token is always left to compute."""
SHARED = (1, 200, 255, 256, 257, 300, 511, 512, 513, 600, 699, 700)
"""How much a prompt shares with one of 700 tokens that was seen before."""
SETTLE_SECONDS = 20.0


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def _ids(seed: int, num_tokens: int) -> list[int]:
    numbers = random.Random(seed)
    return [numbers.randrange(256) for _ in range(num_tokens)]


def _options(number: int) -> dict[str, Any]:
    """Greedy and sampled, the latter with everything that looks at the context."""
    if number % 2 == 0:
        return {"temperature": 0.0, "repetition_penalty": 1.1}
    return {"temperature": 0.9, "top_p": 0.95, "top_k": 40, "presence_penalty": 0.3, "seed": number, "logprobs": 1}


async def _ask(tenant: runtime.Tenant, model: str, tokens: list[int], number: int, **options: Any) -> runtime.Completion:
    return await tenant.generate(model, tokens=tokens, max_tokens=5, ignore_eos=True, **_options(number), **options)


@asynccontextmanager
async def _house(home: Path, checkpoint: Path) -> AsyncIterator[tuple[runtime.Runtime, runtime.Tenant]]:
    settings = runtime.Settings(
        blas="reference", home=home, prefix_memory_bytes=64 << 20, prefix_disk_bytes=256 << 20, prefix_free_bytes=0
    )
    async with runtime.Runtime(settings) as rt:
        for name in ("left", "right"):
            await rt.load(runtime.ModelSpec(name, str(checkpoint)))
        yield rt, rt.tenant("tenant")


async def _settled(rt: runtime.Runtime) -> None:
    """Until what was kept has been written."""
    with anyio.fail_after(SETTLE_SECONDS):
        before = -1
        while (now := rt.stats().scheduler.prefixes.published) != before:
            before = now
            await anyio.sleep(0.3)


def _same(answer: runtime.Completion, cold: runtime.Completion, where: object) -> None:
    assert answer.token_ids == cold.token_ids, where
    assert answer.logprobs == cold.logprobs, where
    assert cold.usage.cached_tokens == 0
    assert 0 <= answer.usage.cached_tokens < answer.usage.prompt_tokens, where


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_prompt_asked_again_gives_the_same_tokens_wherever_it_is_found(family: str, tmp_path: Path) -> None:
    checkpoint = make_tiny(tmp_path / family, family, **FAMILIES[family])
    home = tmp_path / "home"
    cold: dict[int, runtime.Completion] = {}
    cached: dict[str, int] = {"first": 0, "memory": 0, "other worker": 0, "later": 0}

    async def again(tenant: runtime.Tenant, where: str, model: str) -> None:
        for number, length in enumerate(LENGTHS):
            answer = await _ask(tenant, model, _ids(length, length), number)
            _same(answer, cold[length], (family, where, length))
            cached[where] += answer.usage.cached_tokens

    async with _house(home, checkpoint) as (rt, tenant):
        for number, length in enumerate(LENGTHS):
            cold[length] = await _ask(tenant, "left", _ids(length, length), number, cache="off")
        await again(tenant, "first", "left")
        await again(tenant, "memory", "left")
        await _settled(rt)
        await again(tenant, "other worker", "right")
    async with _house(home, checkpoint) as (rt, tenant):
        await again(tenant, "later", "left")
        assert rt.stats().scheduler.prefixes.hits_file > 0

    in_blocks = sum((length - 1) // 256 * 256 for length in LENGTHS)
    assert cached["first"] <= len(LENGTHS)  # unrelated prompts may begin with the same token
    assert cached["memory"] >= in_blocks
    assert cached["other worker"] == cached["later"]
    at_most = sum(min(length - 1, length // 256 * 256) for length in LENGTHS)  # where any position can be continued
    assert 0.8 * in_blocks <= cached["later"] <= at_most + len(LENGTHS) * 2


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_prompt_that_shares_a_beginning_gives_the_same_tokens(family: str, tmp_path: Path) -> None:
    checkpoint = make_tiny(tmp_path / family, family, **FAMILIES[family])
    home = tmp_path / "home"
    base = _ids(0, 700)
    prompts = [base[:shared] + _ids(1000 + shared, 40) for shared in SHARED]
    async with _house(home, checkpoint) as (rt, tenant):
        cold = [await _ask(tenant, "left", tokens, number, cache="off") for number, tokens in enumerate(prompts)]
        await _ask(tenant, "left", base, 0)
        warm = [await _ask(tenant, "left", tokens, number, cache="read-only") for number, tokens in enumerate(prompts)]
        await _settled(rt)
        other = [await _ask(tenant, "right", tokens, number, cache="read-only") for number, tokens in enumerate(prompts)]
        together: list[runtime.Completion | None] = [None] * len(prompts)

        async def one(number: int) -> None:
            together[number] = await _ask(tenant, "right", prompts[number], number)

        async with anyio.create_task_group() as group:
            for number in range(len(prompts)):
                group.start_soon(one, number)
    for number, shared in enumerate(SHARED):
        for answers in (warm, other, together):
            answer = answers[number]
            assert answer is not None
            _same(answer, cold[number], (family, shared))
    assert sum(answer.usage.cached_tokens for answer in warm) > 0
    if family == "llama":  # every position can be continued
        worth = [shared if shared >= MIN_TOKENS else 0 for shared in SHARED]
        assert [answer.usage.cached_tokens for answer in warm] == worth
        assert [answer.usage.cached_tokens for answer in other] == [shared // 256 * 256 for shared in SHARED]


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_conversation_goes_on_from_its_last_turn_and_says_what_a_cold_replay_says(family: str, tmp_path: Path) -> None:
    checkpoint = make_tiny(tmp_path / family, family, **FAMILIES[family])
    async with _house(tmp_path / "home", checkpoint) as (_, tenant):
        context, num_known = _ids(5, 300), 0
        for turn in range(3):
            answer = await tenant.generate("left", tokens=context, max_tokens=30, ignore_eos=True, temperature=0.8, seed=turn)
            cold = await tenant.generate(
                "left", tokens=context, max_tokens=30, ignore_eos=True, temperature=0.8, seed=turn, cache="off"
            )
            _same(answer, cold, (family, turn))
            if turn:  # all but the last token drawn, which was never fed
                assert answer.usage.cached_tokens == num_known - 1
            num_known = len(context) + len(answer.token_ids)
            context = [*context, *answer.token_ids, *_ids(50 + turn, 25)]
