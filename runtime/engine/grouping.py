"""Which rows of a step share one forward? Pure."""

from __future__ import annotations

from collections.abc import Sequence

MAX_WASTED_TOKENS = 64
"""Padding that is cheaper than a second forward: about what a forward's fixed cost (reading the weights) is worth."""


def width_groups(widths: Sequence[int], max_wasted_tokens: int = MAX_WASTED_TOKENS) -> list[list[int]]:
    """Partition rows (by index) so that padding each group to its widest row wastes at most `max_wasted_tokens`.

    With 0 a group has one width only. Groups come widest first; within a group indices ascend.
    """
    groups: list[list[int]] = []
    widest = wasted = 0
    for index in sorted(range(len(widths)), key=lambda index: (-widths[index], index)):
        waste = widest - widths[index]
        if not groups or wasted + waste > max_wasted_tokens:
            groups.append([])
            widest, wasted, waste = widths[index], 0, 0
        groups[-1].append(index)
        wasted += waste
    return [sorted(group) for group in groups]
