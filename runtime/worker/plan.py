"""What is the next step, and how much of which prefill batch does it feed? Pure: facts in, decision out.

The kinds of step take turns while they have work, so nobody waits for more than one step of each other kind.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final, Literal

StepKind = Literal["verify", "decode", "prefill", "draft"]

KINDS: Final[tuple[StepKind, ...]] = ("verify", "decode", "prefill", "draft")
"""In the order of a turn: whose answer a round waits for first, then the running rows, then at most one bounded chunk."""

PATIENCE_CHUNKS: Final = 4
"""A batch passed over this often goes first, however much it has left."""


def next_kind(possible: Collection[StepKind], last: StepKind) -> StepKind | None:
    """The next in turn after `last`; None when there is nothing to do."""
    after = KINDS.index(last) + 1
    return next((kind for kind in KINDS[after:] + KINDS[:after] if kind in possible), None)


def next_batch(tokens_left: Sequence[int], chunks_waited: Sequence[int]) -> int | None:
    """Which batch gets the next chunk: the one with the fewest tokens to feed, unless another has waited too long.

    tokens_left: of each batch, in order of arrival; 0 cannot be fed now. None when no batch can.
    """
    ready = [number for number, left in enumerate(tokens_left) if left]
    if not ready:
        return None
    longest_waiting = max(ready, key=lambda number: chunks_waited[number])
    if chunks_waited[longest_waiting] >= PATIENCE_CHUNKS - 1:
        return longest_waiting
    return min(ready, key=lambda number: tokens_left[number])


def chunk_widths(tokens_left: Sequence[int], budget_tokens: int) -> list[int]:
    """Tokens that each row of a batch feeds in one step: at least 1, and rows times the widest is at most the budget.

    tokens_left: of each row, all above 0. Only when there are more rows than the budget has tokens is it exceeded.
    """
    width = max(1, budget_tokens // len(tokens_left))
    return [min(width, left) for left in tokens_left]
