"""Prefill batches: which rows are prefilled together, and how many batches may be under way in one worker.

Pure: lengths in, row numbers out. Rows of a batch are padded to the longest, so only rows of like length go together;
which rows are candidates, and in what order, is decided before (fairness.py, placement.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MAX_BATCHES = 2
"""Batches under way in one worker. More would put a short prompt that comes later behind all of them, and leave fewer to join."""

COLLECT_SECONDS = 0.02
"""How long a row that is ready waits for requests that are just being tokenized, to be prefilled together with them."""

LIKE_TOKENS = 64
"""Padding of this many tokens is always fine: it costs less than another forward."""


@dataclass(slots=True, eq=False)
class Batch:
    """A batch under way. `num_rows_left`: rows neither prefilled nor ended yet; at 0 it is over. `num_rows`: at the start."""

    padded_tokens: int
    num_rows_left: int
    num_rows: int = 0


def is_room(outstanding: Sequence[int], chunk_tokens: int) -> bool:
    """Whether another batch may be sent beside those with `outstanding` padded tokens.

    A batch of a single chunk is soon over, and what waits for it grows into one larger batch; a longer one must not keep short
    prompts waiting.
    """
    return not outstanding or (len(outstanding) < MAX_BATCHES and min(outstanding) > chunk_tokens)


def are_alike(shortest: int, longest: int) -> bool:
    """Whether rows of these lengths may share a batch: at most half of it is padding, or little."""
    return longest <= 2 * shortest or longest - shortest <= LIKE_TOKENS


def plan_batches(lengths: Sequence[int], outstanding: Sequence[int], budget_tokens: int) -> list[list[int]]:
    """Indexes into `lengths` (rows in the order of who is next), grouped into the batches to send now.

    `outstanding`: padded tokens of the batches under way. A batch stays within `budget_tokens` padded tokens; a longer row goes
    alone, and only one such at a time, so that two of them never fill the worker. Rows left out wait for the next call; the
    first row is left out only when there is no room for any batch, or when it is too long beside another too long one.
    """
    batches: list[list[int]] = []
    num_free = MAX_BATCHES - len(outstanding)
    has_oversize = any(padded > budget_tokens for padded in outstanding)
    waiting = list(range(len(lengths)))
    while waiting and len(batches) < num_free:
        anchor = next((row for row in waiting if not has_oversize or lengths[row] <= budget_tokens), None)
        if anchor is None:
            break
        chosen = [anchor]
        shortest = longest = lengths[anchor]
        if longest > budget_tokens:
            has_oversize = True
        else:
            for row in waiting:
                low, high = min(shortest, lengths[row]), max(longest, lengths[row])
                if row != anchor and are_alike(low, high) and high * (len(chosen) + 1) <= budget_tokens:
                    chosen.append(row)
                    shortest, longest = low, high
        batches.append(chosen)
        taken = set(chosen)
        waiting = [row for row in waiting if row not in taken]
    return batches
