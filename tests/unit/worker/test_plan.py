"""Order of steps: the kinds take turns, short prompts first, and nobody starves."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from runtime.worker.plan import KINDS, PATIENCE_CHUNKS, StepKind, chunk_widths, next_batch, next_kind


def test_kinds_of_step_take_turns_while_they_have_work() -> None:
    assert next_kind({"decode", "prefill"}, "decode") == "prefill"
    assert next_kind({"decode", "prefill"}, "prefill") == "decode"
    kind, turns = "draft", []
    for _ in range(8):
        kind = next_kind(KINDS, kind)
        turns.append(kind)
    assert turns == [*KINDS, *KINDS]


@given(st.sets(st.sampled_from(KINDS)), st.sampled_from(KINDS))
def test_nobody_waits_for_more_than_one_step_of_each_other_kind(possible: set[StepKind], last: StepKind) -> None:
    turns = [last]
    for _ in range(len(KINDS)):
        kind = next_kind(possible, turns[-1])
        assert (kind is None) == (not possible)
        if kind is None:
            return
        turns.append(kind)
    assert set(turns[1 : len(possible) + 1]) == possible


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
