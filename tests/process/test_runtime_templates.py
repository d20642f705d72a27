"""A checkpoint whose chat template misbehaves loads all the same, and costs only the requests that use it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import runtime
from tests.support.tiny import make_tiny

pytestmark = pytest.mark.anyio

ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% for k in range(99999) %}{% endfor %}{% endfor %}{% endfor %}"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_a_template_that_never_ends_does_not_hold_up_the_load(tmp_path: Path) -> None:
    checkpoint = make_tiny(tmp_path / "endless", "llama")
    settings = json.loads((checkpoint / "tokenizer_config.json").read_text())
    (checkpoint / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": ENDLESS}))
    async with runtime.Runtime(runtime.Settings(load_seconds=60, silence_seconds=10)) as rt:
        info = await rt.load(runtime.ModelSpec("tiny", checkpoint))
        assert info.facts is not None
        assert info.facts.chat_restrictions == ("unusable",)
        tenant = rt.tenant("a")
        with pytest.raises(runtime.InvalidRequest, match="longer than 20 s"):
            await tenant.generate("tiny", messages=[{"role": "user", "content": "hi"}])
        answer = await tenant.generate("tiny", prompt="hi", max_tokens=3, ignore_eos=True)
        assert len(answer.token_ids) == 3
        assert rt.models()[0].restarts == 0
