"""What the worker does with a device that it shares: no step without a turn, no turn without a step, and the same tokens."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.protocol.commands import Prefill, Release
from runtime.protocol.ids import SequenceId
from runtime.testing import expected_tokens
from runtime.worker.device import DeviceTimeout
from tests.unit.worker.stage import Stage, ends_of, row, tokens_of

PROMPT = [5, 6, 7]


class MoodyDevice:
    """Refuses turns and wants them back at random, and keeps the books."""

    def __init__(self, seed: int = 0, *, refuses: float = 0.0, wants: float = 0.0) -> None:
        self._random = random.Random(seed)
        self._refuses = refuses
        self._wants = wants
        self.stage: Stage | None = None
        self.is_held = False
        self.is_waiting = False
        self.classes: list[bool] = []
        self.num_given_back = 0
        self.most_ahead = 0

    def take(self, *, is_background: bool) -> bool:
        if not self.is_held and self._random.random() < self._refuses:
            self.is_waiting = True
            return False
        self.is_held, self.is_waiting = True, False
        self.classes.append(is_background)
        return True

    def is_wanted(self) -> bool:
        self.most_ahead = max(self.most_ahead, self.num_unfinished)
        return self.is_held and self._random.random() < self._wants

    def give_back(self) -> None:
        assert not self.num_unfinished, "the device was given back during a step"
        self.num_given_back += self.is_held
        self.is_held = False

    def withdraw(self) -> None:
        assert not self.num_unfinished or self.is_held, "a step is under way without a turn"
        self.is_waiting = False

    def close(self) -> None: ...

    @property
    def num_unfinished(self) -> int:
        assert self.stage is not None
        return self.stage.engine.num_unfinished


def shared(turns: list[list[object]], device: MoodyDevice) -> Stage:
    stage = Stage(turns, device=device)  # type: ignore[arg-type]
    device.stage = stage
    return stage


@given(st.integers(0, 1 << 20), st.sampled_from([0.0, 0.3, 0.9]), st.sampled_from([0.0, 0.5, 1.0]))
def test_tokens_do_not_depend_on_when_the_device_is_free(seed: int, refuses: float, wants: float) -> None:
    device = MoodyDevice(seed, refuses=refuses, wants=wants)
    stage = shared([[Prefill((row(1, PROMPT), row(2, [9]))), Prefill((row(3, [4, 4], max_tokens=20),))]], device)
    events = stage.run()
    assert tokens_of(events, 1) == expected_tokens(PROMPT, max_tokens=8)
    assert tokens_of(events, 2) == expected_tokens([9], max_tokens=8)
    assert tokens_of(events, 3) == expected_tokens([4, 4], max_tokens=20)
    assert len(device.classes) == len(stage.engine.steps)
    assert not device.is_held


def test_a_worker_whom_nobody_waits_for_computes_one_step_ahead_in_one_turn() -> None:
    device = MoodyDevice()
    shared([[Prefill((row(1, PROMPT, max_tokens=30),))]], device).run()
    assert device.num_given_back == 2  # after the first tokens, which are awaited, and at the end


def test_while_somebody_waits_every_step_is_a_turn_of_its_own() -> None:
    device = MoodyDevice(wants=1.0)
    stage = shared([[Prefill((row(1, PROMPT, max_tokens=30),))]], device)
    stage.run()
    assert device.num_given_back == len(stage.engine.steps)


def test_an_idle_worker_holds_nothing() -> None:
    device = MoodyDevice()
    stage = shared([[Prefill((row(1, PROMPT),))], [], [], [], [Prefill((row(2, PROMPT),))]], device)
    held_when_idle: list[bool] = []
    receive = stage.channel.receive

    def watched(timeout_seconds: float) -> object:
        if timeout_seconds:
            held_when_idle.append(device.is_held)
        return receive(timeout_seconds)

    stage.channel.receive = watched  # type: ignore[method-assign, assignment]
    stage.run()
    assert held_when_idle
    assert not any(held_when_idle)


def test_commands_are_heard_during_a_wait_and_one_may_end_it() -> None:
    device = MoodyDevice(refuses=1.0)
    stage = shared([[Prefill((row(1, PROMPT),))], [], [], [Release((), (SequenceId(1),))], []], device)
    events = stage.run()
    assert not stage.engine.steps
    assert ends_of(events, 1) == []
    assert not device.is_waiting


@pytest.mark.parametrize(("classes", "expected"), [((True,), True), ((False,), False), ((True, False), False)])
def test_a_worker_is_background_when_all_its_rows_are(classes: tuple[bool, ...], expected: bool) -> None:
    device = MoodyDevice()
    rows = tuple(row(number, PROMPT, background=background) for number, background in enumerate(classes, 1))
    shared([[Prefill(rows)]], device).run()
    assert set(device.classes) == {expected}


def test_a_parked_reader_does_not_speak_for_the_background_rows_beside_it() -> None:
    device = MoodyDevice()
    parked = row(1, PROMPT, limit=len(PROMPT) + 2)
    shared([[Prefill((parked,))], [Prefill((row(2, PROMPT, background=True),))], [Release((), (SequenceId(1),))]], device).run()
    assert device.classes[0] is False
    assert device.classes[-1] is True


def test_a_wait_beyond_all_patience_ends_the_worker() -> None:
    class Stuck(MoodyDevice):
        def take(self, *, is_background: bool) -> bool:
            raise DeviceTimeout

    stage = shared([[Prefill((row(1, PROMPT),))]], Stuck())
    with pytest.raises(DeviceTimeout):
        stage.run()
