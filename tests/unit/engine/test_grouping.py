"""Rows share a forward unless padding them to each other would cost more than a second one."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from runtime.engine.grouping import width_groups


def test_rows_of_one_width_share_one_forward() -> None:
    assert width_groups([1] * 32, 64) == [list(range(32))]


def test_a_long_chunk_does_not_drag_decoding_rows_to_its_width() -> None:
    assert width_groups([1, 512, 1, 500], 64) == [[1, 3], [0, 2]]


def test_without_padding_every_width_has_a_forward_of_its_own() -> None:
    assert width_groups([3, 1, 3, 2], 0) == [[0, 2], [3], [1]]


def test_a_cut_is_made_where_it_saves_most() -> None:
    assert width_groups([14, 29, 13, 34, 17, 38, 13, 17], 40) == [[1, 3, 5], [0, 2, 4, 6, 7]]


def _cost(widths: list[int], groups: list[list[int]], forward_tokens: int) -> int:
    return sum(len(group) * max(widths[index] for index in group) + forward_tokens for group in groups)


@given(st.lists(st.integers(1, 300), max_size=7), st.integers(0, 200))
def test_every_row_is_in_one_group_and_no_other_cut_is_cheaper(widths: list[int], forward_tokens: int) -> None:
    groups = width_groups(widths, forward_tokens)
    assert sorted(index for group in groups for index in group) == list(range(len(widths)))
    order = sorted(range(len(widths)), key=lambda index: -widths[index])
    for cuts in range(2 ** max(0, len(widths) - 1)):
        edges = [0, *(place + 1 for place in range(len(widths) - 1) if cuts >> place & 1), len(widths)]
        other = [order[start:end] for start, end in pairwise(edges) if end > start]
        assert _cost(widths, groups, forward_tokens) <= _cost(widths, other, forward_tokens)
