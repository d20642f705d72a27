"""`TokenIds`: an immutable run of token ids, four bytes each, the only bulk data messages carry."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Iterator
from typing import overload

_TYPECODE = "I"
assert array(_TYPECODE).itemsize == 4


class TokenIds:
    """A sequence of unsigned 32-bit token ids.

    :raises OverflowError: an id is negative or does not fit in 32 bits.
    :raises TypeError: an element is not an integer.
    """

    __slots__ = ("_ids",)

    def __init__(self, ids: Iterable[int] = ()) -> None:
        self._ids: array[int] = array(_TYPECODE, ids)

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> TokenIds:
        """`data` holds little-endian u32 values.

        :raises ValueError: the length is no multiple of four.
        """
        made = cls()
        made._ids.frombytes(data)
        if sys.byteorder == "big":
            made._ids.byteswap()
        return made

    def to_bytes(self) -> bytes:
        if sys.byteorder == "big":
            swapped = array(_TYPECODE, self._ids)
            swapped.byteswap()
            return swapped.tobytes()
        return self._ids.tobytes()

    def tolist(self) -> list[int]:
        return self._ids.tolist()

    def __len__(self) -> int:
        return len(self._ids)

    def __iter__(self) -> Iterator[int]:
        return iter(self._ids)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> TokenIds: ...
    def __getitem__(self, index: int | slice) -> int | TokenIds:
        if isinstance(index, slice):
            part = TokenIds()
            part._ids = self._ids[index]
            return part
        return self._ids[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TokenIds) and self._ids == other._ids

    def __hash__(self) -> int:
        return hash(self._ids.tobytes())

    def __repr__(self) -> str:
        shown = ", ".join(map(str, self._ids[:8]))
        more = ", ..." if len(self._ids) > 8 else ""
        return f"TokenIds([{shown}{more}], len={len(self._ids)})"
