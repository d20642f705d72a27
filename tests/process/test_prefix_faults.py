"""Shared prefixes through a whole Runtime while things go wrong, and while many want the same: never a wrong token, never an error.

Every answer is compared with what the fake model must say (`ask`), so a foreign or missing position of a cache shows at once.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import statistics
import time
from pathlib import Path

import anyio
import pytest

import runtime
from runtime.testing import expected_tokens, fake_model
from tests.process.test_prefixes import IN_FILES, MAX_TOKENS, NUM_TOKENS, ask, house, prompt, segments, settings, written
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

SLOW = {"prefill_seconds_per_token": 0.0003}
"""So that a file is worth reading."""


@pytest.mark.limit(180)
async def test_workers_killed_while_they_publish_leave_whole_files_or_none(tmp_path: Path, anyio_backend: str) -> None:
    numbers = random.Random(anyio_backend)
    for life in range(6):
        async with house(tmp_path) as rt:
            for number in range(2):  # more would wait long for their restart
                tokens = prompt(10 * life + number, 2100)
                await ask(rt.tenant("a"), tokens)
                await anyio.sleep(numbers.uniform(0.0, 0.02))
                pid = rt.models()[0].pid
                assert pid is not None
                os.kill(pid, signal.SIGKILL)
                await until(lambda pid=pid: rt.models()[0].state == "ready" and rt.models()[0].pid != pid)  # type: ignore[misc]
                await ask(rt.tenant("a"), tokens)
    async with house(tmp_path) as rt:
        assert list((tmp_path / "prefix" / "tmp").iterdir()) == []
        for life in range(6):
            for number in range(2):
                await ask(rt.tenant("a"), prompt(10 * life + number, 2100))
        assert rt.stats().scheduler.prefixes.hits_file > 0
        assert set(rt.stats().scheduler.prefixes.misses) <= {"none"}


async def test_a_stream_whose_worker_dies_goes_on_from_the_files_of_its_prompt(tmp_path: Path) -> None:
    tokens = prompt(1, 2100)
    async with house(tmp_path, script={"decode_seconds_per_step": 0.01, **SLOW}) as rt:
        async with rt.tenant("a").stream("chat", tokens=tokens, max_tokens=60) as stream:
            await anext(stream)
            await written(rt, tmp_path, 4)
            pid = rt.models()[0].pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            answer = await stream.completion()
        assert list(answer.token_ids) == expected_tokens(tokens, max_tokens=60)
        assert answer.usage.cached_tokens == 0, "what the client is told is of the first start"
        prefixes = rt.stats().scheduler.prefixes
        assert (prefixes.hits_file, prefixes.cached_tokens) == (1, 2048)


@pytest.mark.parametrize("part", ["length", "header", "first tensor byte", "last byte", "half of it", "nothing"])
async def test_a_damaged_file_is_a_miss_and_goes(part: str, tmp_path: Path) -> None:
    async with house(tmp_path) as rt:
        await ask(rt.tenant("a"), prompt())
        await written(rt, tmp_path, 2)
    first = min(segments(tmp_path), key=lambda path: path.stat().st_mtime_ns)
    data = bytearray(first.read_bytes())
    place = {"length": 0, "header": 40, "first tensor byte": 8 + int.from_bytes(data[:8], "little"), "last byte": len(data) - 1}
    if part in place:
        data[place[part]] ^= 1
    first.write_bytes(data[: len(data) // 2] if part == "half of it" else data if part in place else b"")
    async with house(tmp_path) as rt:
        await ask(rt.tenant("a"), prompt())
        assert await ask(rt.tenant("a"), prompt()) == NUM_TOKENS - 1
        await written(rt, tmp_path, 2)
    async with house(tmp_path) as rt:
        assert await ask(rt.tenant("a"), prompt()) == IN_FILES


async def test_a_file_damaged_under_a_running_runtime_is_a_counted_miss(tmp_path: Path) -> None:
    async with house(tmp_path) as rt:
        await ask(rt.tenant("a"), prompt())
        await written(rt, tmp_path, 2)
        await rt.load(fake_model("other"))
        for path in segments(tmp_path):
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            path.write_bytes(data)
        answer = await rt.tenant("a").generate("other", tokens=prompt(), max_tokens=MAX_TOKENS, ignore_eos=True)
        assert list(answer.token_ids) == expected_tokens(prompt(), max_tokens=MAX_TOKENS, ignore_eos=True)
        assert answer.usage.cached_tokens == 0
        assert rt.stats().scheduler.prefixes.misses["checksum"] > 0


async def test_a_directory_deleted_under_a_running_runtime_costs_its_files_alone(tmp_path: Path) -> None:
    async with house(tmp_path) as rt:
        await ask(rt.tenant("a"), prompt())
        await written(rt, tmp_path, 2)
        shutil.rmtree(tmp_path / "prefix")
        for seed in range(2, 6):
            await ask(rt.tenant("a"), prompt(seed))
        assert await ask(rt.tenant("a"), prompt()) == NUM_TOKENS - 1
        await until(lambda: len(segments(tmp_path)) >= 2)


async def test_clocks_that_jumped_cost_nothing_but_an_order(tmp_path: Path) -> None:
    async with house(tmp_path) as rt:
        for seed in range(1, 4):
            await ask(rt.tenant("a"), prompt(seed))
        await written(rt, tmp_path, 6)
    for number, path in enumerate(segments(tmp_path)):
        os.utime(path, (0, 0) if number % 2 else (4e9, 4e9))
    async with house(tmp_path, script=SLOW) as rt:
        for seed in range(1, 4):
            assert await ask(rt.tenant("a"), prompt(seed)) == IN_FILES


@pytest.mark.limit(180)
async def test_many_tenants_on_a_small_budget_evict_and_read_at_once(tmp_path: Path) -> None:
    budget = 300_000
    async with house(tmp_path, prefix_disk_bytes=budget, prefix_memory_bytes=1 << 20) as rt:
        await rt.load(fake_model("other"))

        async def work(name: str) -> None:
            numbers = random.Random(name)
            tenant = rt.tenant(name)
            for _ in range(30):
                tokens = [*prompt(numbers.randrange(12), 600), *prompt(numbers.randrange(100, 200), 30)]
                model = numbers.choice(("chat", "other"))
                answer = await tenant.generate(model, tokens=tokens, max_tokens=MAX_TOKENS, ignore_eos=True)
                assert list(answer.token_ids) == expected_tokens(tokens, max_tokens=MAX_TOKENS, ignore_eos=True)

        async with anyio.create_task_group() as group:
            for name in ("a", "b", "c", "d"):
                group.start_soon(work, name)
        assert rt.stats().scheduler.prefixes.evictions > 0
        assert rt.stats().scheduler.prefixes.file_bytes <= budget
        await until(lambda: sum(path.stat().st_size for path in segments(tmp_path)) <= budget)


async def test_two_runtimes_on_one_root_find_what_the_other_wrote(tmp_path: Path) -> None:
    async with house(tmp_path, script=SLOW) as one, house(tmp_path, script=SLOW) as other:

        async def write(rt: runtime.Runtime, seeds: range) -> None:
            for seed in seeds:
                await ask(rt.tenant("a"), prompt(seed, 520))

        async with anyio.create_task_group() as group:
            group.start_soon(write, one, range(20))
            group.start_soon(write, other, range(20, 40))
        for rt in (one, other):
            await until(lambda rt=rt: len(rt._scheduler.state.book.prefixes.index) == 40)  # type: ignore[misc]
        assert [await ask(one.tenant("a"), prompt(seed, 520)) for seed in range(20, 40)] == [512] * 20
        assert [await ask(other.tenant("a"), prompt(seed, 520)) for seed in range(20)] == [512] * 20


# -- single flight ------------------------------------------------------------------------------------------------


async def test_eight_requests_with_one_prefix_compute_it_once(tmp_path: Path) -> None:
    async with house(tmp_path, script={"prefill_seconds_per_token": 0.0003}) as rt:
        tenant = rt.tenant("a", runtime.TenantSpec(max_running=16))
        cached: list[int] = []

        async def one(number: int) -> None:
            cached.append(await ask(tenant, [*prompt(), *prompt(100 + number, 20)]))

        async with anyio.create_task_group() as group:
            for number in range(8):
                group.start_soon(one, number)
        assert sorted(cached)[0] == 0
        assert all(length >= NUM_TOKENS for length in sorted(cached)[1:])
        stats = rt.stats().scheduler.prefixes
        assert stats.followed == 7
        assert stats.computed_tokens <= NUM_TOKENS + 8 * 20


async def test_a_follower_takes_over_from_a_leader_that_is_cancelled(tmp_path: Path) -> None:
    async with house(tmp_path, script={"prefill_seconds_per_token": 0.001}, prefill_chunk_tokens=64) as rt:
        tenant = rt.tenant("a", runtime.TenantSpec(max_running=16))
        cached: list[int] = []

        async def follow(number: int) -> None:
            cached.append(await ask(tenant, [*prompt(), *prompt(100 + number, 20)]))

        async with anyio.create_task_group() as group:
            async with tenant.stream("chat", tokens=[*prompt(), *prompt(99, 20)], max_tokens=4):
                await until(lambda: any(record.state.name == "PREFILLING" for record in rt._scheduler.state.book.requests.values()))
                for number in range(3):
                    group.start_soon(follow, number)
                await anyio.sleep(0.3)
        assert len(cached) == 3
        assert min(cached) > 0, "what the leader had computed was kept"
        assert rt.stats().scheduler.prefixes.computed_tokens < 3 * NUM_TOKENS


async def test_the_sequences_of_one_request_compute_their_prompt_once(tmp_path: Path) -> None:
    async with house(tmp_path, script={"prefill_seconds_per_token": 0.0003}) as rt:
        answer = await rt.tenant("a").generate("chat", tokens=prompt(), max_tokens=4, n=4, temperature=0.8, seed=3)
        cold = await rt.tenant("a").generate("chat", tokens=prompt(), max_tokens=4, n=4, temperature=0.8, seed=3, cache="off")
        assert [one.token_ids for one in (answer, *answer.alternatives)] == [one.token_ids for one in (cold, *cold.alternatives)]
        assert sorted(one.usage.cached_tokens for one in (answer, *answer.alternatives)) == [0, *[NUM_TOKENS - 1] * 3]


# -- isolation ------------------------------------------------------------------------------------------------------


async def test_a_tenant_learns_nothing_of_anothers_prefix_by_the_clock(tmp_path: Path) -> None:
    async with house(tmp_path, script={"prefill_seconds_per_token": 0.0002}) as rt:

        async def seconds(name: str, tokens: list[int]) -> float:
            started = time.perf_counter()
            await ask(rt.tenant(name), tokens)
            return time.perf_counter() - started

        own, others, fresh = [], [], []
        for number in range(5):
            secret = prompt(number)
            await seconds("a", secret)
            own.append(await seconds("a", secret))
            others.append(await seconds("b", secret))
            fresh.append(await seconds("b", prompt(100 + number)))
        assert statistics.median(own) < 0.5 * statistics.median(fresh), "a hit would show"
        assert statistics.median(others) > 0.8 * statistics.median(fresh)
        assert rt.stats().scheduler.tenants["b"].prefixes.cached_tokens == 0


async def test_a_leader_makes_no_stranger_wait(tmp_path: Path) -> None:
    async with house(tmp_path, script={"prefill_seconds_per_token": 0.0005}) as rt:

        async def one(name: str) -> None:
            await ask(rt.tenant(name), prompt())

        async with anyio.create_task_group() as group:
            for name in ("a", "b"):
                group.start_soon(one, name)
        assert rt.stats().scheduler.prefixes.followed == 0
        assert rt.stats().scheduler.prefixes.computed_tokens == 2 * NUM_TOKENS


async def test_files_of_two_tenants_with_one_prompt_have_nothing_in_common(tmp_path: Path) -> None:
    async with house(tmp_path) as rt:
        for name in ("a", "b"):
            await ask(rt.tenant(name), prompt())
        await written(rt, tmp_path, 4)
    heads = []
    for path in segments(tmp_path):
        data = path.read_bytes()
        heads.append(data[8 : 8 + int.from_bytes(data[:8], "little")].decode())
    names = [path.stem for path in segments(tmp_path)]
    assert len(set(names)) == 4
    for one, other in ((0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)):
        ours, theirs = _digests(heads[one]), _digests(heads[other])
        shared = ours & theirs - {path.parent.parent.name for path in segments(tmp_path)}  # the model's fingerprint
        assert len(shared) <= 1, "at most that one continues the other"
    assert not any("tenant" in head for head in heads)


def _digests(head: str) -> set[str]:
    """Everything in a header that looks like a digest."""
    words = "".join(character if character in "0123456789abcdef" else " " for character in head).split()
    return {word for word in words if len(word) == 64}


async def test_a_read_only_root_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "prefix").write_text("a file in the way")
    async with runtime.Runtime(settings(tmp_path)) as rt:
        await rt.load(fake_model("chat"))
        await ask(rt.tenant("a"), prompt())
        assert await ask(rt.tenant("a"), prompt()) == NUM_TOKENS - 1
    assert (tmp_path / "prefix").read_text() == "a file in the way"
