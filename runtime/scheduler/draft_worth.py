"""What would a round of k proposals be worth, by what was measured?

For b rows, with a_i the chance that proposal i is right given that those before it were:

    tokens of a row in a round     E(k) = 1 + a_1 + a_1 a_2 + ... + a_1 a_2 ... a_k
    seconds of a round             T(k) = draft(k) + verify(b (k + 1)) + wire
    worth of k                     E(k) / T(k), beside 1 / plain of plain decoding

With all a_i equal E(k) = (1 - a^(k+1)) / (1 - a), the formula of Leviathan, Kalman and Matias, Fast Inference from Transformers
via Speculative Decoding, ICML 2023 (arXiv 2211.17192), equation 1. It is not assumed here, nor that verifying costs no more than
a decode step: both are false on a CPU and in large batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from runtime.scheduler.draft_costs import Acceptance, CostTable, Mean, expected_tokens

MARGIN: Final = 0.02
"""Least gain over plain decoding worth drafting for."""


class RowRound(NamedTuple):
    """One row's part of a round: proposals asked for (fewer near its limit), made, and right."""

    num_asked: int
    num_proposed: int
    num_matched: int


@dataclass(frozen=True, slots=True)
class Outlook:
    """By draft length, from 0: seconds of a round and of its parts, and its gain over plain decoding (0.3: 30 % more tokens)."""

    draft: list[float]
    verify: list[float]
    seconds: list[float]
    gains: list[float]
    best: int
    """The best length above 0."""
    has_potential: bool
    """Some length would gain if every proposal were right."""

    @property
    def best_gain(self) -> float:
        return self.gains[self.best]


class Measured:
    """What a pairing's batch sizes have in common."""

    __slots__ = ("_fill", "_max_tokens", "_verify", "acceptance", "wire")

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self.acceptance = Acceptance(max_tokens)
        self._verify = CostTable()
        self.wire = Mean()
        self._fill = 1.0
        """Share of the proposals asked for that is made."""

    @property
    def is_known(self) -> bool:
        """A round was measured."""
        return len(self._verify) > 0

    def note(self, rows: Sequence[RowRound], verify_seconds: float, wire_seconds: float) -> None:
        self._verify.note(sum(row.num_proposed + 1 for row in rows), verify_seconds)
        self.wire.note(wire_seconds)
        num_asked = sum(row.num_asked for row in rows)
        if num_asked:
            self._fill += (sum(row.num_proposed for row in rows) / num_asked - self._fill) / 16
        for row in rows:
            self.acceptance.note(row.num_asked, row.num_matched)

    def doubt(self) -> None:
        """What is known is old, and a hint only."""
        self.acceptance.doubt()
        self._verify.doubt()

    def turns_gain(self, num_rows: int, length: int, plain_seconds: float, draft: CostTable) -> float:
        """What two halves that take turns would make more of the same tokens than one cohort (0.3: 30 %), by what was measured of
        one. While a half drafts the other verifies, and only one verifies at a time."""
        num_half = (num_rows + 1) // 2
        sizes = [number * (1 + self._fill * length) for number in (num_rows, num_half)]
        whole, half = self._verify.estimates(sizes, (num_rows, plain_seconds))
        drafting = draft.estimates([length])[0]
        turn = max(2 * half, half + drafting) + 2 * self.wire.value
        return (drafting + whole + self.wire.value) / max(turn, 1e-12) - 1

    def outlook(self, num_rows: int, plain_seconds: float, draft: CostTable) -> Outlook:
        """For `num_rows` rows, whose plain step takes `plain_seconds`. A round was measured."""
        lengths = range(self._max_tokens + 1)
        sizes = [num_rows * (1 + self._fill * length) for length in lengths]
        verify = self._verify.estimates(sizes, (num_rows, plain_seconds))
        drafting = draft.estimates(lengths)
        drafting[0] = 0.0
        seconds = [max(one + other + self.wire.value, 1e-12) for one, other in zip(drafting, verify, strict=True)]
        tokens = expected_tokens(self.acceptance.by_position())
        gains = [made * plain_seconds / spent - 1 for made, spent in zip(tokens, seconds, strict=True)]
        gains[0] = 0.0
        best = max(lengths[1:], key=gains.__getitem__)
        has_potential = any((1 + length) * plain_seconds > (1 + MARGIN) * seconds[length] for length in lengths[1:])
        return Outlook(drafting, verify, seconds, gains, best, has_potential)
