"""Rows share a forward unless padding them to each other would waste too much."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from runtime.engine.grouping import width_groups


def test_rows_of_one_width_share_one_forward() -> None:
    assert width_groups([1] * 32, 64) == [list(range(32))]


def test_a_long_chunk_does_not_drag_decoding_rows_to_its_width() -> None:
    assert width_groups([1, 512, 1, 500], 64) == [[1, 3], [0, 2]]


def test_without_padding_every_width_has_a_forward_of_its_own() -> None:
    assert width_groups([3, 1, 3, 2], 0) == [[0, 2], [3], [1]]


@given(st.lists(st.integers(1, 600), max_size=40), st.integers(0, 200))
def test_every_row_is_in_one_group_and_no_group_wastes_more_than_allowed(widths: list[int], max_wasted: int) -> None:
    groups = width_groups(widths, max_wasted)
    assert sorted(index for group in groups for index in group) == list(range(len(widths)))
    for group in groups:
        widest = max(widths[index] for index in group)
        assert sum(widest - widths[index] for index in group) <= max_wasted
