"""Order of steps: decode and prefill take turns, short prompts first, and nobody starves."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from runtime.worker.plan import PATIENCE_CHUNKS, chunk_widths, next_batch, next_kind


def test_decode_and_prefill_take_turns_while_both_have_work() -> None:
    assert next_kind(can_decode=True, can_prefill=True, last="decode") == "prefill"
    assert next_kind(can_decode=True, can_prefill=True, last="prefill") == "decode"


def test_whoever_has_work_alone_goes_on() -> None:
    assert next_kind(can_decode=True, can_prefill=False, last="decode") == "decode"
    assert next_kind(can_decode=False, can_prefill=True, last="prefill") == "prefill"
    assert next_kind(can_decode=False, can_prefill=False, last="prefill") is None


def test_the_batch_with_the_fewest_tokens_left_goes_first() -> None:
    assert next_batch([900, 20, 30], [0, 0, 0]) == 1


def test_a_batch_that_cannot_be_fed_now_is_passed_over() -> None:
    assert next_batch([0, 20], [9, 0]) == 1
    assert next_batch([0, 0], [9, 9]) is None
    assert next_batch([], []) is None


def test_a_long_prompt_is_not_starved_by_a_stream_of_short_ones() -> None:
    long_left, waited, turns_between = 50, 0, 0
    for _ in range(200):
        turns_between += 1
        if next_batch([long_left, 1], [waited, 0]) == 0:
            assert turns_between <= PATIENCE_CHUNKS
            long_left, waited, turns_between = long_left - 1, 0, 0
            if not long_left:
                return
        else:
            waited += 1
    raise AssertionError("the long prompt never finished")


@given(st.lists(st.integers(0, 50), max_size=8))
def test_every_feedable_batch_gets_a_chunk_within_patience_times_their_number(left: list[int]) -> None:
    waited = [0] * len(left)
    for _ in range(60):
        number = next_batch(left, waited)
        if number is None:
            break
        for other in range(len(left)):
            waited[other] = 0 if other == number else waited[other] + 1
        assert max((w for w, n in zip(waited, left, strict=True) if n), default=0) < PATIENCE_CHUNKS + len(left)


@given(st.lists(st.integers(1, 600), min_size=1, max_size=40), st.integers(1, 512))
def test_a_chunk_keeps_its_padded_size_within_the_budget_and_feeds_every_row(left: list[int], budget: int) -> None:
    widths = chunk_widths(left, budget)
    assert all(1 <= width <= most for width, most in zip(widths, left, strict=True))
    assert len(widths) * max(widths) <= max(budget, len(left))


def test_a_row_alone_gets_the_whole_budget() -> None:
    assert chunk_widths([1000], 512) == [512]
    assert chunk_widths([10, 1000], 512) == [10, 256]
