"""Striking at a chosen message between the scheduler and a pairing's two workers: at the very moment it is said or heard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import pytest

from runtime.protocol.commands import Draft, Hold, Prefill, Release, Resume, Verify
from runtime.protocol.events import Drafted, Held, Prefilled, Verified
from runtime.scheduler.state import SchedulerState
from runtime.scheduler.stimuli import Instruction, Send, Stimulus, WorkerSaid

_TO_DRAFTER: Final = {Prefill: "guest prefill", Draft: "draft", Release: "guest release"}
_TO_TARGET: Final = {Hold: "hold", Verify: "verify", Resume: "resume"}
_FROM_DRAFTER: Final = {Prefilled: "guest prefilled", Drafted: "drafted"}
_FROM_TARGET: Final = {Held: "held", Verified: "verified"}
ROUND_MESSAGES: Final = (
    "guest prefill",
    "guest prefilled",
    "hold",
    "held",
    "draft",
    "draft ahead",
    "drafted",
    "verify",
    "verified",
    "guest release",
)
"""Those of every request that speculates with a drafter that drafts ahead; "resume" and "catch up" follow a late draft only."""


class Ambush:
    """Calls `strike`, once, when the `number`-th such message (from 1) of the pair is said, before it leaves, or heard."""

    def __init__(self, target: str, drafter: str, message: str, number: int, strike: Callable[[], None]) -> None:
        self.target, self.drafter = target, drafter
        self._message = message
        self._number = number
        self._strike = strike

    def see(self, message: str | None) -> None:
        if message == self._message:
            self._number -= 1
            if self._number == 0:
                self._strike()


def lay(monkeypatch: pytest.MonkeyPatch) -> list[Ambush]:
    """A list to put ambushes into. As long as it holds, the scheduler also recounts all it knows after every stimulus."""
    ambushes: list[Ambush] = []
    handle: Callable[[SchedulerState, Stimulus, float], list[Instruction]] = SchedulerState.handle

    def watched(state: SchedulerState, stimulus: Stimulus, now: float) -> list[Instruction]:
        for ambush in list(ambushes):
            ambush.see(_heard(ambush, stimulus))
        out = handle(state, stimulus, now)
        state.validate()
        for ambush in list(ambushes):
            has_verify = False
            for instruction in out:
                if isinstance(instruction, Send):
                    ambush.see(_said(ambush, instruction, has_verify=has_verify))
                    has_verify |= isinstance(instruction.command, Verify)
        return out

    monkeypatch.setattr(SchedulerState, "handle", watched)
    return ambushes


def _heard(ambush: Ambush, stimulus: Stimulus) -> str | None:
    if not isinstance(stimulus, WorkerSaid):
        return None
    if stimulus.model == ambush.drafter:
        return _FROM_DRAFTER.get(type(stimulus.event))
    return _FROM_TARGET.get(type(stimulus.event)) if stimulus.model == ambush.target else None


def _said(ambush: Ambush, send: Send, *, has_verify: bool) -> str | None:
    """`has_verify`: the same instructions sent a verify before."""
    if send.model == ambush.target:
        return _TO_TARGET.get(type(send.command))
    if send.model != ambush.drafter:
        return None
    if isinstance(send.command, Draft):
        if all(row.count == 0 for row in send.command.rows):
            return "catch up"
        return "draft ahead" if has_verify else "draft"
    return _TO_DRAFTER.get(type(send.command))
