"""Stop strings over streamed text: the earliest begins the end, the longest of a tie, and nothing of one is ever shown."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.worker.stops import StopMatcher


def stream(stops: tuple[str, ...], pieces: list[str]) -> tuple[list[str], str | None]:
    """What is shown for each piece (and at the end), and the stop string."""
    matcher = StopMatcher(stops)
    shown: list[str] = []
    for piece in pieces:
        text, matched = matcher.push(piece)
        shown.append(text)
        if matched is not None:
            return shown, matched
    text, matched = matcher.flush()
    return [*shown, text], matched


def over_whole_text(stops: tuple[str, ...], text: str) -> tuple[str, str | None]:
    for begin in range(len(text)):
        here = [stop for stop in stops if stop.strip(" ") and text.startswith(stop, begin)]
        if here:
            return text[:begin], max(here, key=len)
    return text, None


def could_become_a_stop(stops: tuple[str, ...], tail: str) -> bool:
    return any(stop.strip(" ") and stop.startswith(tail) for stop in stops)


def test_a_stop_that_may_grow_into_a_longer_one_waits_for_it() -> None:
    assert stream(("END", "ENDING"), ["xEN", "DING"]) == (["x", ""], "ENDING")


def test_the_shorter_stop_wins_once_the_longer_one_is_out_of_reach() -> None:
    assert stream(("END", "ENDING"), ["xEND", "IVE!"]) == (["x", ""], "END")


def test_the_shorter_stop_wins_when_the_text_ends_before_the_longer_one() -> None:
    assert stream(("END", "ENDING"), ["xEND", "IN"]) == (["x", "", ""], "END")


def test_a_stop_inside_one_that_began_earlier_waits_for_the_earlier_one() -> None:
    assert stream(("abcde", "cd"), ["abcd", "e"]) == (["", ""], "abcde")
    assert stream(("abcde", "cd"), ["abcd", "x"]) == (["", "ab"], "cd")


def test_text_is_released_as_soon_as_it_can_be_part_of_no_stop() -> None:
    assert stream(("STOP",), ["ST", "A", "S", "x"]) == (["", "STA", "", "Sx", ""], None)


def test_held_text_is_released_at_the_end() -> None:
    assert stream(("STOP",), ["so STO"]) == (["so ", "STO"], None)


def test_a_stop_within_one_piece_drops_the_rest() -> None:
    assert stream(("\n\n",), ["one\n\ntwo"]) == (["one"], "\n\n")


@pytest.mark.parametrize("stops", [(), ("",), (" ",), ("   ", "")])
def test_empty_stops_and_runs_of_spaces_are_none(stops: tuple[str, ...]) -> None:
    assert stream(stops, ["a b", "   c"]) == (["a b", "   c", ""], None)


def test_characters_outside_the_basic_plane_are_characters_like_any_other() -> None:
    assert stream(("🎉ü",), ["ja 🎉", "ü nein"]) == (["ja ", ""], "🎉ü")


def test_a_million_characters_that_nearly_match_are_matched_in_linear_time() -> None:
    matcher = StopMatcher(("a" * 2000 + "b",))
    shown = sum(len(matcher.push("a" * 1000)[0]) for _ in range(1000))
    assert shown == 1_000_000 - 2000


letters = st.text(alphabet="ab ", max_size=5)


@given(st.lists(letters, max_size=4).map(tuple), st.lists(letters, max_size=12))
def test_streaming_equals_the_rule_over_the_whole_text(stops: tuple[str, ...], pieces: list[str]) -> None:
    shown, matched = stream(stops, pieces)
    num_read = len(shown) if matched is not None else len(pieces)
    assert ("".join(shown), matched) == over_whole_text(stops, "".join(pieces[:num_read]))
    assert ("".join(shown), matched) == over_whole_text(stops, "".join(pieces))


@given(st.lists(letters, max_size=4).map(tuple), st.lists(letters, max_size=12))
def test_no_more_is_held_back_than_may_belong_to_a_stop(stops: tuple[str, ...], pieces: list[str]) -> None:
    matcher = StopMatcher(stops)
    held = ""
    for piece in pieces:
        text, matched = matcher.push(piece)
        if matched is not None:
            return
        held += piece
        assert held.startswith(text)
        held = held[len(text) :]
        assert not held or could_become_a_stop(stops, held)
