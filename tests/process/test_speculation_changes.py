"""Drafters and targets that come, go and are replaced while streams are heard; and requests that say whether to speculate."""

from __future__ import annotations

import os
import signal

import anyio
import pytest

import runtime
from runtime.testing import FakeScript
from tests.support.heard import (
    LONG,
    PROMPT,
    Heard,
    expected,
    hear,
    house,
    make_drafter,
    make_target,
    new_rounds,
    pairing_of,
    pid_of,
    streaming,
)
from tests.support.waiting import until

pytestmark = [pytest.mark.anyio, pytest.mark.limit(180)]


async def test_a_drafter_that_restarts_by_itself_is_paired_again_in_mid_stream(anyio_backend: str) -> None:
    async with house() as (rt, tenant), streaming(tenant, "target"):
        await new_rounds(rt)
        os.kill(pid_of(rt, "drafter"), signal.SIGKILL)
        await until(lambda: pairing_of(rt).state == "waiting")
        await new_rounds(rt)


async def test_a_drafter_unloaded_and_another_loaded_under_its_name(anyio_backend: str) -> None:
    async with house() as (rt, tenant):
        async with streaming(tenant, "target"):
            await new_rounds(rt)
            await rt.unload("drafter")
            assert (pairing_of(rt).state, pairing_of(rt).reason) == ("waiting", "its drafter 'drafter' is not loaded")
            with pytest.raises(runtime.InvalidRequest, match="not loaded"):
                await tenant.generate("target", prompt="x", speculate=True)
            await rt.load(make_drafter(script=FakeScript(vocabulary="another")))
            assert pairing_of(rt).state == "refused"
            with pytest.raises(runtime.InvalidRequest, match="vocabulary"):
                await tenant.generate("target", prompt="x", speculate=True)
            assert any("vocabulary" in note for note in rt.capabilities("target").notes)
            num_rounds = pairing_of(rt).rounds
            refused = await tenant.generate("target", tokens=PROMPT, max_tokens=60, ignore_eos=True)
            assert (refused.usage.proposed_tokens, list(refused.token_ids)) == (0, expected(60))
            assert pairing_of(rt).rounds == num_rounds
            await rt.unload("drafter")
            await rt.load(make_drafter())
            await new_rounds(rt)
            assert not any("vocabulary" in note for note in rt.capabilities("target").notes)


async def test_a_request_says_whether_it_speculates(anyio_backend: str) -> None:
    async with house() as (_, tenant):
        answers = {
            wish: await tenant.generate("target", tokens=PROMPT, speculate=wish, max_tokens=60, ignore_eos=True)
            for wish in (None, True, False)
        }
        for wish, answer in answers.items():
            assert list(answer.token_ids) == expected(60)
            assert answer.usage.proposed_tokens >= answer.usage.accepted_tokens
            assert (answer.usage.accepted_tokens > 0) == (wish is not False)
            assert not answer.warnings
        short = await tenant.generate("target", prompt="x", speculate=True, max_tokens=1, ignore_eos=True)
        assert [warning for warning in short.warnings if "nothing was proposed" in warning]


@pytest.mark.parametrize("is_killed", [True, False])
async def test_a_target_that_ends_leaves_nothing_in_the_drafter_that_serves_another(is_killed: bool, anyio_backend: str) -> None:
    async with house() as (rt, tenant):
        await rt.load(make_target("other", "drafter", draft_tokens=2))
        lost = Heard()

        async def loses() -> None:
            if is_killed:
                await hear(tenant, "target", lost, tokens=PROMPT, max_tokens=700)
            else:
                with pytest.raises(runtime.ModelNotLoaded):
                    await hear(tenant, "target", lost, tokens=PROMPT, max_tokens=LONG - 100)

        async with streaming(tenant, "other"), anyio.create_task_group() as group:
            group.start_soon(loses)
            await new_rounds(rt)
            await new_rounds(rt, "other")
            assert len((await rt.inspect("drafter")).running) == 2
            if is_killed:
                os.kill(pid_of(rt, "target"), signal.SIGKILL)
                await until(lambda: rt.stats().scheduler.replayed == 1)
                await new_rounds(rt)
            else:
                await rt.unload("target")
                assert len((await rt.inspect("drafter")).running) == 1
            await new_rounds(rt, "other")
            if not is_killed:
                await rt.load(make_target("target", "drafter", draft_tokens=3))
            await until(lambda: next(model.state for model in rt.models() if model.name == "target") == "ready")
            again = Heard()
            await hear(tenant, "target", again, tokens=PROMPT, max_tokens=200)
            assert again.token_ids == expected(200)
            assert pairing_of(rt).rounds > 0
        assert lost.token_ids == expected(700 if is_killed else len(lost.token_ids))
        await until(lambda: pairing_of(rt, "other").guests == 0)
        report = await rt.inspect("drafter")
        assert (report.running, report.prefilling) == ((), ())
