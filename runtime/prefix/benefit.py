"""Is restoring a prefix cheaper than computing it, and up to where? Pure, from what this model's own runs have shown.

Costs are straight lines: so much a file and a byte for restoring, so much a token for prefill. Attention makes late tokens
dearer than early ones, so the estimate of what restoring saves is on the low side.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from runtime.prefix.plans import Plan

_WEIGHT: Final = 0.25
"""Of a new measurement against the old ones: a slow disk is believed after a few, one hiccup is not."""

_PROBE_EVERY: Final = 16
"""Refusals in a row after which a plan is taken all the same: costs change, and only a restore shows it."""

FILE_SECONDS: Final = 0.0005
"""Opening, reading and checking a header."""


class Benefit:
    """One model's measured rates. As long as one is unknown, restoring is tried: that is how it becomes known."""

    def __init__(self) -> None:
        self.restore_seconds_per_byte: float | None = None
        self.prefill_seconds_per_token: float | None = None
        self._num_refusals = 0

    def restored(self, num_files: int, num_bytes: int, seconds: float) -> None:
        """A restore of that much took so long, until its tensors were in place."""
        if num_bytes > 0:
            rate = max(0.0, seconds - num_files * FILE_SECONDS) / num_bytes
            self.restore_seconds_per_byte = _blend(self.restore_seconds_per_byte, rate)

    def prefilled(self, num_tokens: int, seconds: float) -> None:
        """Computing that many tokens took so long."""
        if num_tokens > 0:
            self.prefill_seconds_per_token = _blend(self.prefill_seconds_per_token, seconds / num_tokens)

    def saved_seconds(self, plan: Plan) -> float | None:
        """Against computing the plan's positions; negative when restoring is dearer; None while a rate is unknown."""
        if self.restore_seconds_per_byte is None or self.prefill_seconds_per_token is None:
            return None
        cost = len(plan.pieces) * FILE_SECONDS + plan.num_bytes * self.restore_seconds_per_byte
        return plan.end * self.prefill_seconds_per_token - cost

    def choose(self, plans: Sequence[Plan]) -> Plan | None:
        """The plan that saves most, None when none does. `plans`: as `Index.plans` lists them, shortest first."""
        if not plans:
            return None
        best = max(plans, key=lambda plan: (self.saved_seconds(plan) or 0.0, plan.end))
        saved = self.saved_seconds(best)
        if saved is None or saved > 0:
            self._num_refusals = 0
            return best
        self._num_refusals += 1
        if self._num_refusals < _PROBE_EVERY:
            return None
        self._num_refusals = 0
        return best


def _blend(old: float | None, new: float) -> float:
    return new if old is None else old + _WEIGHT * (new - old)
