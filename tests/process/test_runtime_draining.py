"""Unloading with `drain_seconds`: each unload waits for its own model's requests, and one that is given up changes nothing."""

from __future__ import annotations

import time

import anyio
import pytest

import runtime
from runtime.testing import fake_model
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


async def test_an_unload_given_up_while_it_drains_leaves_the_model_serving() -> None:
    async with runtime.Runtime() as rt:
        await rt.load(fake_model("chat", decode_seconds_per_step=0.01))
        tenant = rt.tenant("a")
        async with tenant.stream("chat", prompt="long", max_tokens=2000, ignore_eos=True) as stream:
            with anyio.move_on_after(0.1) as given_up:
                await rt.unload("chat", drain_seconds=60)
            assert given_up.cancelled_caught
            answer = await tenant.generate("chat", prompt="hi", max_tokens=3, ignore_eos=True)
            assert len(answer.token_ids) == 3
            stream.cancel()


async def test_models_that_drain_side_by_side_each_end_with_their_own_last_request() -> None:
    """Both when another drain has begun since, and when another request of the same model ends in between."""
    ended: dict[str, float] = {}

    async def unload(rt: runtime.Runtime, name: str) -> None:
        await rt.unload(name, drain_seconds=60)
        ended[name] = time.monotonic()

    async with runtime.Runtime() as rt:
        for name in ("first", "second"):
            await rt.load(fake_model(name))
        tenant = rt.tenant("a")
        async with (
            tenant.stream("first", prompt="x", max_tokens=1000, ignore_eos=True) as of_first,
            tenant.stream("second", prompt="x", max_tokens=1000, ignore_eos=True) as of_second,
            anyio.create_task_group() as group,
        ):
            for name in ("first", "first", "second"):
                group.start_soon(unload, rt, name)
                await anyio.wait_all_tasks_blocked()
            began = time.monotonic()
            of_first.cancel()
            await until(lambda: "first" in ended)
            assert "second" not in ended
            of_second.cancel()
        assert time.monotonic() - began < 15
        assert rt.models() == []
