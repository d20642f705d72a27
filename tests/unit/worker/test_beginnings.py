"""Byte strings are found by what they begin, and by what they have in common, as if each were compared."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.worker.beginnings import Beginnings, num_common

few = st.text("ab", max_size=6).map(str.encode)
keys = st.lists(few.filter(bool), unique=True)


def naive(one: bytes, other: bytes) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (mine, theirs) in pairs if mine != theirs), min(len(one), len(other)))


def map_of(found: list[bytes]) -> Beginnings[bytes]:
    made: Beginnings[bytes] = Beginnings()
    for key in found:
        made.add(key, key)
    return made


@given(keys, few)
def test_all_that_begin_a_string_are_found_longest_first(held: list[bytes], data: bytes) -> None:
    expected = sorted((key for key in held if data.startswith(key)), key=len, reverse=True)
    assert map_of(held).beginning(data) == expected


@given(keys, few)
def test_the_nearest_shares_as_much_as_any(held: list[bytes], data: bytes) -> None:
    found = map_of(held).nearest(data)
    if found is None:
        assert held == []
    else:
        key, num_bytes = found
        assert num_bytes == naive(key, data)
        assert num_bytes == max(naive(other, data) for other in held)


@given(keys.filter(bool), st.data())
def test_what_is_removed_is_not_found(held: list[bytes], data: st.DataObject) -> None:
    made = map_of(held)
    gone = data.draw(st.sampled_from(held))
    made.remove(gone)
    assert list(made) == sorted(key for key in held if key != gone)
    assert gone not in made.beginning(gone)
    with pytest.raises(KeyError):
        made.remove(gone)


def test_a_key_is_there_once() -> None:
    made = map_of([b"a"])
    with pytest.raises(ValueError, match="there already"):
        made.add(b"a", b"again")
    assert len(made) == 1


@given(st.binary(max_size=40), st.binary(max_size=40), st.binary(max_size=40))
def test_what_two_strings_have_in_common(shared: bytes, one: bytes, other: bytes) -> None:
    assert num_common(shared + one, shared + other) == naive(shared + one, shared + other)
