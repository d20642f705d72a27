"""Which of many byte strings begin a given one, and which has most in common with it?

A sorted list answers both by bisection: whatever shares most with a string stands next to its place. The cost is that of comparing
along the string, however many others there are.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Beginnings(Generic[Value]):
    """A map with keys of bytes, none of them empty."""

    __slots__ = ("_keys", "_values", "longest")

    def __init__(self) -> None:
        self._keys: list[bytes] = []
        self._values: list[Value] = []
        self.longest = 0
        """No key was ever longer: of a given string no byte after that matters."""

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[Value]:
        return iter(self._values)

    def add(self, key: bytes, value: Value) -> None:
        """:raises ValueError: the key is there already."""
        place = bisect_left(self._keys, key)
        if self._keys[place : place + 1] == [key]:
            raise ValueError(f"a key of {len(key)} bytes is there already")
        self._keys.insert(place, key)
        self._values.insert(place, value)
        self.longest = max(self.longest, len(key))

    def remove(self, key: bytes) -> None:
        """:raises KeyError: there is no such key."""
        place = bisect_left(self._keys, key)
        if self._keys[place : place + 1] != [key]:
            raise KeyError(key)
        del self._keys[place], self._values[place]

    def beginning(self, data: bytes) -> list[Value]:
        """All whose key `data` begins with, the longest key first."""
        found: list[Value] = []
        while place := bisect_right(self._keys, data):
            key = self._keys[place - 1]
            if data.startswith(key):
                found.append(self._values[place - 1])
                data = key[:-1]
            else:
                # The greatest key up to `data` leaves it here, so none that begins it is longer than what they share.
                data = data[: num_common(key, data)]
        return found

    def nearest(self, data: bytes) -> tuple[Value, int] | None:
        """One that has as many first bytes in common with `data` as any, and how many; None of an empty map."""
        place = bisect_right(self._keys, data)
        beside = range(max(0, place - 1), min(place + 1, len(self._keys)))
        shared = [(num_common(self._keys[index], data), index) for index in beside]
        if not shared:
            return None
        num_bytes, index = max(shared, key=lambda pair: pair[0])
        return self._values[index], num_bytes


def num_common(one: bytes, other: bytes) -> int:
    """How many first bytes are the same; by comparing runs, each half as long as the one before."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
