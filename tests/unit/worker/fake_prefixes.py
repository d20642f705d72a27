"""Prompts for the fake engine, and what is said and offered for them."""

from __future__ import annotations

from runtime.engine import fake
from runtime.engine.engine import Loaded
from runtime.protocol.commands import FakeScript, Fault, Load
from runtime.protocol.events import AnyEvent
from runtime.testing import expected_tokens
from runtime.worker.prefix_form import form_of
from tests.support.phases import SCOPE, offered, said

OTHER_SCOPE = bytes(reversed(SCOPE))


def load_fake(*faults: Fault, **script: object) -> Loaded:
    return fake.load(Load("m", "", kind="fake", fake=FakeScript(faults=faults, **script)), lambda stage, done, total: None)  # type: ignore[arg-type]


FORM = form_of(load_fake())
assert FORM is not None


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [32 + (7 * index + seed * (index % 13) + index // 95) % 95 for index in range(length)]


def tokens_of(events: list[AnyEvent], sequence: int) -> list[int]:
    return [token for tokens, _ in said(events, sequence) for token in tokens]


def expected(prompt: list[int], max_tokens: int = 4) -> list[int]:
    return expected_tokens(prompt, max_tokens=max_tokens)


def positions(events: list[AnyEvent]) -> list[tuple[int, int]]:
    return [(node.start, node.end) for node in offered(events)]
