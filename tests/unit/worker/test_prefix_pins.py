"""What is asked for ahead of its use stays until it is released, and what is erased goes at once."""

from __future__ import annotations

import pytest

from runtime.protocol.commands import AnyCommand, Forget, Unpin
from runtime.protocol.events import Kept, Prefilled
from runtime.protocol.ids import SequenceId
from tests.support.phases import SCOPE, Phases, ends, kept, restored, start
from tests.unit.worker.fake_prefixes import OTHER_SCOPE, expected, load_fake, prompt_of, tokens_of


@pytest.mark.parametrize("length", [1, 255, 256, 512, 600, 1300])
def test_a_prefill_alone_computes_all_says_nothing_and_is_pinned(length: int) -> None:
    prompt = prompt_of(length)
    phases: list[list[AnyCommand]] = [[start(number, prompt, max_tokens=0, prefill_only=True, pin=True)] for number in (1, 2)]
    stage = Phases(load_fake(), *phases, [start(3, [*prompt, 99])])
    events = stage.run()
    for number in (1, 2):
        assert (ends(events, number), tokens_of(events, number)) == (["length"], [])
        assert [(event.length, event.pinned_length) for event in kept(events, number)][-1] == (length, length)
        told = [event for event in events if isinstance(event, Kept | Prefilled)]
        assert any(isinstance(event, Prefilled) and event.rows == ((number, length),) for event in told)
    assert restored(events, 2).length == length - 1
    assert restored(events, 3).length == length
    assert stage.memory.pinned_bytes == length * 16


def test_a_pin_outlives_pressure_until_it_is_taken_off() -> None:
    prompt = prompt_of(600)
    others: list[list[AnyCommand]] = [[start(number, [33 + number, *prompt_of(599)])] for number in range(10, 14)]
    pinned = start(1, prompt, max_tokens=0, prefill_only=True, pin=True)
    stage = Phases(
        load_fake(),
        [pinned],
        *others,
        [start(2, prompt, keep=False)],
        [Unpin((SequenceId(1), SequenceId(77)))],
        *[[start(number, [33 + number, *prompt_of(599)])] for number in range(20, 24)],
        [start(3, prompt)],
        prefix_memory_bytes=1300 * 16,
    )
    events = stage.run()
    assert restored(events, 2).length == 599
    assert restored(events, 3).length == 0


def test_forgetting_a_scope_drops_it_and_keeps_nothing_more_of_it() -> None:
    prompt = prompt_of(600)
    stage = Phases(
        load_fake(),
        [start(1, prompt, pin=True), start(2, prompt, scope=OTHER_SCOPE)],
        [Forget((SCOPE, bytes(32))), start(3, prompt)],
    )
    events = stage.run()
    assert restored(events, 3).length == 0
    assert tokens_of(events, 3) == expected(prompt)
    assert {node.scope for node in stage.memory._nodes.values()} == {OTHER_SCOPE}
