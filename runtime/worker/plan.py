"""What is the next step, and how much of which prefill batch does it feed? Pure: facts in, decision out.

Decode and prefill steps alternate while both have work, so decoding rows wait for at most one bounded chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

StepKind = Literal["decode", "prefill"]

PATIENCE_CHUNKS: Final = 4
"""A batch passed over this often goes first, however much it has left."""


def next_kind(*, can_decode: bool, can_prefill: bool, last: StepKind) -> StepKind | None:
    """None when there is nothing to do."""
    if can_decode and can_prefill:
        return "prefill" if last == "decode" else "decode"
    return "decode" if can_decode else "prefill" if can_prefill else None


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
