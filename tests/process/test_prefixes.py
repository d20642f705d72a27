"""Shared prefixes through a whole Runtime: what is found again and by whom, and what an app holds of it. Real processes, the fake
engine, on directories of their own."""

from __future__ import annotations

import hashlib
import os
import random
import stat
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

import runtime
from runtime.testing import chat_tokens, expected_tokens, fake_model
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

NUM_TOKENS = 1000
IN_FILES = 768
"""Of them: whole blocks of 256."""
MAX_TOKENS = 4
SYSTEM = [{"role": "system", "content": "Answer briefly. " * 40}]


def prompt(seed: int = 1, num_tokens: int = NUM_TOKENS) -> list[int]:
    """Of one seed, beginnings of one endless prompt."""
    numbers = random.Random(seed)
    return [numbers.randrange(256) for _ in range(num_tokens)]


def settings(home: Path, **changes: Any) -> runtime.Settings:
    given = {"prefix_memory_bytes": 64 << 20, "prefix_disk_bytes": 64 << 20, "prefix_free_bytes": 0, **changes}
    return runtime.Settings(home=home, **given)


@asynccontextmanager
async def house(home: Path, *, script: dict[str, Any] | None = None, **changes: Any) -> AsyncIterator[runtime.Runtime]:
    """A Runtime with the model "chat", in whose tables nothing is wrong at the end."""
    async with runtime.Runtime(settings(home, **changes)) as rt:
        await rt.load(fake_model("chat", **(script or {})))
        yield rt
        await until(lambda: not rt._scheduler.state.book.requests)
        rt._scheduler.state.validate()


async def ask(tenant: runtime.Tenant, tokens: list[int], **options: Any) -> int:
    """How much of the prompt was restored; the answer must be right whatever that was."""
    answer = await tenant.generate("chat", tokens=tokens, max_tokens=MAX_TOKENS, ignore_eos=True, **options)
    assert list(answer.token_ids) == expected_tokens(tokens, max_tokens=MAX_TOKENS, ignore_eos=True)
    assert answer.usage.prompt_tokens == len(tokens)
    return answer.usage.cached_tokens


def segments(home: Path) -> list[Path]:
    return sorted((home / "prefix").rglob("*.safetensors"))


async def written(rt: runtime.Runtime, home: Path, num_files: int) -> None:
    """Until so many segments are there, and the scheduler knows of them."""
    await until(lambda: len(segments(home)) == num_files and len(rt._scheduler.state.book.prefixes.index) == num_files)


# -- memory, files --------------------------------------------------------------------------------------------


async def test_the_second_time_all_but_one_token_comes_from_memory(tmp_path: Path) -> None:
    async with house(tmp_path) as rt:
        tenant = rt.tenant("a")
        assert await ask(tenant, prompt()) == 0
        assert await ask(tenant, prompt()) == NUM_TOKENS - 1
        assert await ask(tenant, [*prompt(num_tokens=700), *prompt(2, 50)]) == 700
        assert await ask(tenant, prompt(3)) == 0


async def test_the_next_turn_finds_the_answer_of_the_last_one_too(tmp_path: Path) -> None:
    async with house(tmp_path) as rt:
        tenant = rt.tenant("a")
        await ask(tenant, prompt())
        known = [*prompt(), *expected_tokens(prompt(), max_tokens=MAX_TOKENS, ignore_eos=True)]
        assert await ask(tenant, [*known, *prompt(2, 50)]) == len(known) - 1  # the last token drawn was never fed


async def test_a_later_runtime_and_another_model_of_equal_weights_find_the_files(tmp_path: Path) -> None:
    async with house(tmp_path) as rt:
        assert await ask(rt.tenant("a"), prompt()) == 0
        await written(rt, tmp_path, 2)
        await rt.load(fake_model("other"))
        answer = await rt.tenant("a").generate("other", tokens=prompt(), max_tokens=1)
        assert answer.usage.cached_tokens == IN_FILES
        assert answer.timings.restore_seconds is not None
    async with house(tmp_path) as rt:
        assert await ask(rt.tenant("a"), prompt()) == IN_FILES
        assert await ask(rt.tenant("a"), prompt()) == NUM_TOKENS - 1


async def test_directories_and_files_are_for_their_owner_alone_and_nothing_temporary_stays(tmp_path: Path) -> None:
    home = tmp_path / "home"
    async with house(home) as rt:
        await ask(rt.tenant("a"), prompt())
        await written(rt, home, 2)
    for path in [home / "prefix", *(home / "prefix").rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    assert list((home / "prefix" / "tmp").iterdir()) == []


async def test_a_runtime_that_was_open_before_finds_what_another_one_writes(tmp_path: Path) -> None:
    async with house(tmp_path) as early, house(tmp_path) as rt:
        await ask(rt.tenant("a"), prompt())
        await written(rt, tmp_path, 2)
        await until(lambda: len(early._scheduler.state.book.prefixes.index) == 2)
        assert await ask(early.tenant("a"), prompt()) == IN_FILES


async def test_off_finds_nothing_keeps_nothing_and_leaves_the_directory_untouched(tmp_path: Path) -> None:
    home = tmp_path / "home"
    async with house(home) as rt:
        tenant = rt.tenant("a")
        for _ in range(2):
            assert await ask(tenant, prompt(), cache="off") == 0
        assert (await rt.inspect("chat")).prefix_nodes == 0
        assert not home.exists()
        await ask(tenant, prompt())
        assert await ask(tenant, prompt(), cache="off") == 0


async def test_read_only_finds_but_writes_nothing(tmp_path: Path) -> None:
    home = tmp_path / "home"
    async with house(home) as rt:
        tenant = rt.tenant("a")
        for _ in range(2):
            assert await ask(tenant, prompt(), cache="read-only") == 0
        assert (await rt.inspect("chat")).prefix_nodes == 0
        assert not home.exists()
        await ask(tenant, prompt())
        await written(rt, home, 2)
        num_nodes = (await rt.inspect("chat")).prefix_nodes
        assert await ask(tenant, prompt(), cache="read-only") == NUM_TOKENS - 1
        assert await ask(tenant, prompt(2), cache="read-only") == 0
        assert (await rt.inspect("chat")).prefix_nodes == num_nodes
        assert len(segments(home)) == 2


async def test_without_a_disk_budget_memory_alone_serves_and_nothing_is_written(tmp_path: Path) -> None:
    home = tmp_path / "home"
    async with house(home, prefix_disk_bytes=0) as rt:
        await ask(rt.tenant("a"), prompt())
        assert await ask(rt.tenant("a"), prompt()) == NUM_TOKENS - 1
    assert not home.exists()


async def test_without_a_memory_budget_nothing_is_kept(tmp_path: Path) -> None:
    async with house(tmp_path, prefix_memory_bytes=0) as rt:
        for _ in range(2):
            assert await ask(rt.tenant("a"), prompt()) == 0
        assert segments(tmp_path) == []


async def test_a_home_that_cannot_be_written_costs_the_files_alone(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.write_text("no directory")  # no permission could stop a superuser, but this does
    async with house(home) as rt:
        assert await ask(rt.tenant("a"), prompt()) == 0
        assert await ask(rt.tenant("a"), prompt()) == NUM_TOKENS - 1
        assert (await rt.erase_tenant("a")).num_files == 0
        assert await ask(rt.tenant("a"), prompt()) == 0


# -- whose it is ----------------------------------------------------------------------------------------------


async def test_two_tenants_share_nothing_and_each_counts_its_own_hits(tmp_path: Path) -> None:
    async with house(tmp_path) as rt:
        a, b = rt.tenant("a"), rt.tenant("b")
        await ask(a, prompt())
        assert await ask(b, prompt()) == 0
        await ask(a, prompt())
        stats = rt.stats().scheduler
        assert (stats.tenants["a"].prefixes.hits_memory, stats.tenants["a"].prefixes.cached_tokens) == (1, NUM_TOKENS - 1)
        assert (stats.tenants["b"].prefixes.hits_memory, stats.tenants["b"].prefixes.hits_file) == (0, 0)
        assert stats.tenants["b"].prefixes.cached_tokens == 0
        await written(rt, tmp_path, 4)
    async with house(tmp_path) as rt:
        await ask(rt.tenant("a"), prompt(4))
        assert await ask(rt.tenant("c"), prompt()) == 0
        assert await ask(rt.tenant("b"), prompt()) == IN_FILES


async def test_tenants_that_may_share_what_is_shared_and_nobody_else(tmp_path: Path) -> None:
    async with house(tmp_path) as rt:
        may = runtime.TenantSpec(may_share=True)
        a, b, c = rt.tenant("a", may), rt.tenant("b", may), rt.tenant("c")
        await ask(a, prompt(), cache_scope="shared")
        assert await ask(b, prompt(), cache_scope="shared") == NUM_TOKENS - 1
        assert await ask(b, prompt()) == 0  # its own scope is another
        with pytest.raises(runtime.InvalidRequest, match=r"'shared'.*TenantSpec\(may_share=True\)"):
            await ask(c, prompt(), cache_scope="shared")
        with pytest.raises(runtime.InvalidRequest, match="may_share"):
            await c.prefill("chat", tokens=prompt(), cache_scope="shared")
        assert await ask(c, prompt()) == 0
        rt.tenant("b", runtime.TenantSpec())
        with pytest.raises(runtime.InvalidRequest, match="may_share"):
            await ask(b, prompt(), cache_scope="shared")


async def test_an_erased_tenant_is_gone_from_memory_and_files_and_others_still_hit(tmp_path: Path) -> None:
    async with house(tmp_path) as rt:
        a, b = rt.tenant("a"), rt.tenant("b")
        await ask(a, prompt())
        await ask(b, prompt())
        await written(rt, tmp_path, 4)
        others = {path.name: path.stat().st_ino for path in segments(tmp_path)}
        assert await rt.erase_tenant("a") == runtime.Erasure(num_files=2)
        assert len(segments(tmp_path)) == 2
        assert others.items() >= {path.name: path.stat().st_ino for path in segments(tmp_path)}.items()
        assert len(os.listdir(tmp_path / "prefix" / "keys")) == 1
        assert await ask(b, prompt()) == NUM_TOKENS - 1
        assert await ask(a, prompt()) == 0  # it stays usable, with a new key
        assert await ask(a, prompt()) == NUM_TOKENS - 1


async def test_a_tenant_that_this_process_never_saw_is_erased_too(tmp_path: Path) -> None:
    async with house(tmp_path) as rt:
        await ask(rt.tenant("a"), prompt())
        await written(rt, tmp_path, 2)
    async with house(tmp_path) as rt:
        assert (await rt.erase_tenant("nobody")).num_files == 0
        assert (await rt.erase_tenant("a")).num_files == 2
        assert segments(tmp_path) == []
        assert await ask(rt.tenant("a"), prompt()) == 0


async def test_erasing_asks_for_a_tenants_name_and_an_open_runtime(tmp_path: Path) -> None:
    async with runtime.Runtime(settings(tmp_path)) as rt:
        for wrong in ("", "x" * 129, None):
            with pytest.raises(runtime.InvalidRequest, match="tenant"):
                await rt.erase_tenant(wrong)  # type: ignore[arg-type]
    with pytest.raises(runtime.RuntimeClosed):
        await rt.erase_tenant("a")


# -- ahead of use ---------------------------------------------------------------------------------------------


async def test_a_prefill_warms_what_comes_after_it(tmp_path: Path) -> None:
    async with house(tmp_path) as rt:
        tenant = rt.tenant("a")
        handle = await tenant.prefill("chat", tokens=prompt(), boundaries=[300, 2000, 100, 300])
        assert (handle.model, handle.cached_tokens, handle.boundaries) == ("chat", NUM_TOKENS, (100, 300, NUM_TOKENS))
        assert list(handle.tokens) == prompt()
        packed = struct.pack(f"<{NUM_TOKENS}i", *prompt())
        assert list(handle.digests) == [hashlib.sha256(packed[: 4 * end]).hexdigest() for end in handle.boundaries]
        assert await ask(tenant, [*prompt(), *prompt(2, 30)]) == NUM_TOKENS
        assert await ask(tenant, [*prompt(num_tokens=300), *prompt(3, 30)]) == 300


async def test_a_handle_is_extended_by_tokens_and_only_what_is_new_is_computed(tmp_path: Path) -> None:
    async with house(tmp_path) as rt:
        tenant = rt.tenant("a")
        async with await tenant.prefill("chat", tokens=prompt()) as first:
            longer = await tenant.prefill("chat", tokens=prompt(2, 200), extend=first, boundaries=[NUM_TOKENS])
            assert list(longer.tokens) == [*prompt(), *prompt(2, 200)]
            assert longer.boundaries == (NUM_TOKENS, NUM_TOKENS + 200)
            assert longer.digests[0] == first.digests[-1]
            assert longer.cached_tokens == NUM_TOKENS + 200
        assert rt.stats().scheduler.tenants["a"].prefixes.cached_tokens == NUM_TOKENS
        await longer.release()


async def test_messages_extend_a_handle_when_they_are_rendered_to_its_beginning(tmp_path: Path) -> None:
    async with house(tmp_path) as rt:
        tenant = rt.tenant("a")
        user = {"role": "user", "content": "Hi"}
        question = chat_tokens([*SYSTEM, user])
        begun = await tenant.prefill("chat", tokens=question[:500])
        whole = await tenant.prefill("chat", messages=[*SYSTEM, user], extend=begun)
        assert list(whole.tokens) == question
        assert rt.stats().scheduler.tenants["a"].prefixes.cached_tokens == 500
        with pytest.raises(runtime.InvalidRequest, match="at token") as caught:
            await tenant.prefill("chat", messages=[user], extend=begun)
        assert caught.value.option == "extend"
        for handle in (begun, whole):
            await handle.release()
        await until_unpinned(rt)


async def until_unpinned(rt: runtime.Runtime) -> None:
    while (await rt.inspect("chat")).prefix_pinned_bytes:  # noqa: ASYNC110
        await anyio.sleep(0.005)


async def test_what_a_handle_pins_stays_until_it_is_released(tmp_path: Path) -> None:
    async with house(tmp_path, prefix_disk_bytes=0) as rt:
        tenant = rt.tenant("a")
        handle = await tenant.prefill("chat", tokens=prompt())
        assert (await rt.inspect("chat")).prefix_pinned_bytes > 0
        await handle.release()
        await handle.release()
        await until_unpinned(rt)


async def test_a_prefill_given_up_pins_nothing(tmp_path: Path) -> None:
    async with house(tmp_path, script={"prefill_seconds_per_token": 0.001}) as rt:
        tenant = rt.tenant("a")
        with anyio.move_on_after(0.3) as given_up:
            await tenant.prefill("chat", tokens=prompt(num_tokens=3000))
        assert given_up.cancelled_caught
        await until(lambda: not rt._scheduler.state.book.requests)
        await until_unpinned(rt)


async def test_a_handle_outlives_its_worker_and_its_runtime_without_harm(tmp_path: Path) -> None:
    async with house(tmp_path) as rt:
        tenant = rt.tenant("a")
        handle = await tenant.prefill("chat", tokens=prompt())
        await rt.unload("chat")
        await handle.release()
        await rt.load(fake_model("chat"))
        late = await tenant.prefill("chat", tokens=prompt(2))
    await late.release()
