"""Which rows of a step share one forward? Pure."""

from __future__ import annotations

from collections.abc import Sequence

FORWARD_TOKENS = 40
"""What a forward costs before its first token (reading the weights), in tokens of padding: 90 ms beside 2.3 ms a token were
measured on two cores."""


def width_groups(widths: Sequence[int], forward_tokens: int = FORWARD_TOKENS) -> list[list[int]]:
    """Partition rows (by index) so that padding, plus `forward_tokens` for every group, is least.

    With 0 a group has one width only. Groups come widest first; within a group indices ascend.
    """
    order = sorted(range(len(widths)), key=lambda index: (-widths[index], index))
    # best[n]: the least cost of the n widest rows, and how many of them come before their last group.
    best = [(0, 0)]
    for num_rows in range(1, len(order) + 1):
        padding = 0
        choices = []
        for first in reversed(range(num_rows)):
            padding += (widths[order[first]] - widths[order[first + 1]]) * (num_rows - first - 1) if first + 1 < num_rows else 0
            choices.append((best[first][0] + padding + forward_tokens, first))
        best.append(min(choices))
    groups: list[list[int]] = []
    end = len(order)
    while end:
        start = best[end][1]
        groups.append(sorted(order[start:end]))
        end = start
    return groups[::-1]
