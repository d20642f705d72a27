"""How an app tests its own handling of models, without a model: `pytest examples/fake_in_ci.py`.

`ask_patiently` stands for a piece of your app; below it are the tests that you would write.
"""

from __future__ import annotations

import anyio
import pytest

import runtime
from runtime import testing


async def ask_patiently(tenant: runtime.Tenant, model: str, prompt: str, *, attempts: int = 3) -> str:
    """The answer, asked for again while everything is full."""
    for attempt in range(1, attempts + 1):
        try:
            return (await tenant.generate(model, prompt=prompt, max_tokens=16)).text
        except runtime.AdmissionError as error:
            if attempt == attempts:
                raise
            await anyio.sleep(error.retry_after_seconds)
    raise AssertionError("attempts must be at least 1")


def test_the_answer_is_the_model_s() -> None:
    async def main() -> None:
        async with runtime.Runtime() as rt:
            await rt.load(testing.fake_model("chat", reply="Forty-two."))
            assert await ask_patiently(rt.tenant("app"), "chat", "How many?") == "Forty-two."

    anyio.run(main)


def test_a_crash_in_the_middle_of_an_answer_is_only_a_pause() -> None:
    async def main() -> None:
        crash = testing.Fault("decode", "kill", number=5)  # in the worker's first life alone
        async with runtime.Runtime() as rt:
            await rt.load(testing.fake_model("chat", faults=(crash,)))
            text = await ask_patiently(rt.tenant("app"), "chat", "Hello")
            assert text == testing.expected_text(testing.text_tokens("Hello"), max_tokens=16)
            assert rt.models()[0].restarts == 1

    anyio.run(main)


def test_a_full_queue_is_told_with_the_time_to_wait() -> None:
    async def main() -> None:
        async with runtime.Runtime() as rt:
            await rt.load(testing.fake_model("chat", decode_seconds_per_step=0.01))
            tenant = rt.tenant("app", runtime.TenantSpec(max_running=1, max_queued=0))
            async with tenant.stream("chat", prompt="a long one", max_tokens=1000):
                with pytest.raises(runtime.TenantLimitReached) as caught:
                    await tenant.generate("chat", prompt="one too many")
                assert caught.value.retry_after_seconds > 0

    anyio.run(main)
