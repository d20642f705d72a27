"""The drafter without weights proposes what followed the longest, latest match: compared with a search that reads everything."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.worker import lookup
from runtime.worker.lookup import MAX_CANDIDATES, MAX_MATCH_TOKENS, MIN_MATCH_TOKENS, Lookup


def naive(tokens: list[int], num_tokens: int) -> list[int]:
    """Every earlier place, its match counted token by token; the text then goes on by itself, one token after the other."""
    best_place, best_length = 0, MIN_MATCH_TOKENS - 1
    for place in range(1, len(tokens)):
        length = 0
        while length < min(place, MAX_MATCH_TOKENS) and tokens[place - 1 - length] == tokens[len(tokens) - 1 - length]:
            length += 1
        if length >= best_length and length >= MIN_MATCH_TOKENS:  # of equally long ones the last
            best_place, best_length = place, length
    if not best_place:
        return []
    text = list(tokens)
    for number in range(num_tokens):
        text.append(text[best_place + number])
    return text[len(tokens) :]


@st.composite
def repetitive_texts(draw: st.DrawFn) -> list[int]:
    """Few different ids, and pieces of what was said said again."""
    tokens: list[int] = []
    for _ in range(draw(st.integers(1, 12))):
        if tokens and draw(st.booleans()):
            begin = draw(st.integers(0, len(tokens) - 1))
            tokens += tokens[begin : begin + draw(st.integers(1, 80))]
        else:
            tokens += draw(st.lists(st.integers(0, 4), max_size=8))
    return tokens[-(MAX_CANDIDATES - 1) :]


@given(repetitive_texts(), st.integers(0, 9), st.integers(0, 300))
@settings(max_examples=400, deadline=None)
def test_it_proposes_what_a_search_through_everything_would(tokens: list[int], num_tokens: int, num_prompt: int) -> None:
    drafter = Lookup(tokens[:num_prompt])
    for token in tokens[num_prompt:]:
        drafter.extend([token])
    assert drafter.propose(num_tokens) == naive(tokens, num_tokens)
    assert drafter.length == len(tokens)


@given(st.lists(st.integers(0, 3), max_size=120))
@settings(max_examples=100, deadline=None)
def test_proposing_changes_nothing(tokens: list[int]) -> None:
    asked, unasked = Lookup(), Lookup(tokens)
    for token in tokens:
        asked.propose(4)
        asked.extend([token])
    assert asked.propose(5) == unasked.propose(5)


def test_the_longest_match_wins_over_a_later_one() -> None:
    long, short = [7, 1, 2, 3, 100], [8, 1, 2, 3, 200]
    assert Lookup([*long, *short, 7, 1, 2, 3]).propose(1) == [100]


def test_of_equally_long_matches_the_latest_wins() -> None:
    assert Lookup([1, 2, 3, 100, 1, 2, 3, 200, 1, 2, 3]).propose(1) == [200]


def test_a_run_shorter_than_the_minimum_is_no_match() -> None:
    short = list(range(1, MIN_MATCH_TOKENS))
    assert Lookup([*short, 100, 50, *short]).propose(3) == []


@pytest.mark.parametrize("num_tokens", range(MIN_MATCH_TOKENS + 1))
def test_a_text_too_short_to_have_repeated_proposes_nothing(num_tokens: int) -> None:
    assert Lookup(range(num_tokens)).propose(4) == []


def test_text_that_goes_in_circles_is_continued_in_circles() -> None:
    assert Lookup([1, 2, 3, 1, 2, 3, 1, 2, 3]).propose(7) == [1, 2, 3, 1, 2, 3, 1]


def test_ids_up_to_32_bits_do_not_run_into_each_other() -> None:
    top = (1 << 32) - 1
    assert Lookup([top, 0, top, 5, 0, top, 0, 6, top, 0, top]).propose(1) == [5]


@pytest.mark.parametrize("token", [-1, 1 << 32])
def test_an_id_that_cannot_be_one_is_refused(token: int) -> None:
    with pytest.raises(OverflowError):
        Lookup([token])


def test_a_match_far_back_is_not_looked_for_behind_too_many_later_ones() -> None:
    common = [1, 2, 3]
    text = [9, *common, 100, *[token for number in range(MAX_CANDIDATES) for token in (*common, 1000 + number)], 9, *common]
    assert Lookup(text).propose(1) == [1000 + MAX_CANDIDATES - 1]


def test_beyond_its_bound_the_older_half_is_forgotten_and_the_rest_still_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "MAX_TOKENS", 64)
    drafter = Lookup(range(1000, 1070))
    assert drafter.length == 70
    drafter.extend([1066, 1067, 1068])
    assert drafter.propose(2) == [1069, 1066]
    drafter.extend([1001, 1002, 1003])  # said at the beginning, forgotten since
    assert drafter.propose(2) == []
    for number in range(10_000):
        drafter.extend([number])
        assert len(drafter._tokens) == len(drafter._previous) <= 64
        assert len(drafter._last) <= 64
