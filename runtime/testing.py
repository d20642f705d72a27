"""How does an app test itself without a model? With the fake engine: quick, deterministic, misbehaving on request.

    spec = runtime.testing.fake_model("chat", faults=(Fault("decode", "kill", number=5),))
    expected = runtime.testing.expected_text(runtime.testing.text_tokens("Hello"), max_tokens=8)

A fake model runs in a worker process of its own, like a real one. Its tokens are a hash of the whole visible context
unless the script gives a `reply`, so `expected_tokens` can tell beforehand what a correct runtime must deliver.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from runtime.config import ModelSpec
from runtime.engine import fake_draw, fake_text
from runtime.protocol.commands import FakeScript, Fault, Sampling
from runtime.worker import fallback

__all__ = [
    "FakeScript",
    "Fault",
    "chat_tokens",
    "expected_text",
    "expected_tokens",
    "fake_model",
    "text_tokens",
]


def fake_model(name: str = "fake", *, max_slots: int = 16, max_context_tokens: int | None = None, **script: Any) -> ModelSpec:
    """A model to load: `script` are the fields of `FakeScript`.

    :raises TypeError: no such field. :raises InvalidRequest: see `ModelSpec`.
    """
    return ModelSpec(name, kind="fake", max_slots=max_slots, max_context_tokens=max_context_tokens, fake=FakeScript(**script))


def text_tokens(text: str) -> list[int]:
    """The ids of `prompt=text`."""
    return fake_text.encode(text, add_special_tokens=not text.startswith("<|bos|>"))


def chat_tokens(
    messages: Sequence[dict[str, Any]],
    *,
    tools: Sequence[dict[str, Any]] | None = None,
    reasoning_effort: str | None = None,
    primer: str | None = None,
    script: FakeScript = FakeScript(),  # noqa: B008 (immutable)
) -> list[int]:
    """The ids of `messages=messages` whose contents are strings."""
    copies = [dict(message) for message in json.loads(json.dumps(list(messages)))]
    if not script.chat_template:
        return text_tokens(fallback.render(copies, fake_text.FakeTokenizer().special_token_text) + (primer or ""))
    options: dict[str, Any] = {}
    if tools is not None:
        options["tools"] = list(tools)
    if reasoning_effort is not None:
        options["reasoning_effort"] = reasoning_effort
    text = fake_text.render(copies, options=options, add_generation_prompt=True)
    return fake_text.encode(text + (primer or ""), add_special_tokens=False)


def expected_tokens(
    prompt: Sequence[int],
    *,
    max_tokens: int,
    sampling: Sampling = Sampling(),  # noqa: B008 (immutable)
    script: FakeScript = FakeScript(),  # noqa: B008 (immutable)
    ignore_eos: bool = False,
) -> list[int]:
    """The tokens that follow the prompt's ids, without the end token, whatever else runs beside them.

    Stop strings are not considered: with one, a sequence ends with the token that decides the match.
    """
    context = fake_draw.Context(prompt)
    key = fake_draw.settings_key(sampling)
    reply = None if script.reply is None else script.reply.encode()
    tokens: list[int] = []
    while len(tokens) < min(max_tokens, script.context_length - len(prompt)):
        if reply is None:
            token = context.draw(key, with_position=sampling.temperature > 0, eos_one_in=script.eos_one_in)
        else:
            token = reply[len(tokens)] if len(tokens) < len(reply) else fake_text.EOS
        if token == fake_text.EOS and not ignore_eos:
            break
        tokens.append(token)
        context.feed((token,))
    return tokens


def expected_text(
    prompt: Sequence[int],
    *,
    max_tokens: int,
    sampling: Sampling = Sampling(),  # noqa: B008 (immutable)
    script: FakeScript = FakeScript(),  # noqa: B008 (immutable)
    ignore_eos: bool = False,
) -> str:
    """The text of `expected_tokens`."""
    tokens = expected_tokens(prompt, max_tokens=max_tokens, sampling=sampling, script=script, ignore_eos=ignore_eos)
    detokenizer = fake_text.FakeDetokenizer()
    pieces = [detokenizer.push(token) for token in tokens if token not in fake_text.EOS_IDS]
    return "".join(pieces) + detokenizer.flush()
