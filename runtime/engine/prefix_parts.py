"""What does an engine hand out of a row's caches, and what does it take back? Plain data, and the rules it is judged by.

Positions are absolute. A part covers the positions [start, end) of a sequence; a chain of parts, each beginning where the one
before ends and the first at 0, gives a row back as it stood at the last one's end. How long a part is is its maker's business.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from runtime.engine.engine import RowError

ITEM_BYTES: Final = {
    **dict.fromkeys(("BOOL", "U8", "I8"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}
"""Bytes of an item of each type a layout may name. The names are those of the safetensors format."""

Span = Literal["tokens", "window", "state"]


@dataclass(frozen=True, slots=True)
class PrefixField:
    """One array of one layer. `layer` counts caches in the model's order, `name` is unique within it.

    span says what a part [start, end) holds of it:
    "tokens": every position's slice, [heads, end - start, dim], for `shape` (heads, dim);
    "window": a checkpoint at `end`, the last positions a later one still sees, [heads, min(end, window - 1), dim];
    "state": a checkpoint at `end`, an array of `shape`.
    """

    layer: int
    name: str
    span: Span
    dtype: str
    shape: tuple[int, ...]
    window: int = 0

    def shape_in(self, start: int, end: int) -> tuple[int, ...]:
        """Of this field's array in a part [start, end)."""
        if self.span == "state":
            return self.shape
        heads, dim = self.shape
        return (heads, end - self.first_in(start, end), dim)

    def first_in(self, start: int, end: int) -> int:
        """The first position that a part [start, end) holds of this field (of a state: its end)."""
        match self.span:
            case "tokens":
                return start
            case "window":
                return max(0, end - self.window + 1)
            case "state":
                return end

    def num_bytes_in(self, start: int, end: int) -> int:
        return math.prod(self.shape_in(start, end)) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class PrefixLayout:
    """All that a row of this model consists of. Two engines of the same model have equal layouts."""

    fields: tuple[PrefixField, ...]

    @property
    def has_checkpoints(self) -> bool:
        """Whether a row must be caught where a part is to end: prefill chunks should then stop there."""
        return any(field.span != "tokens" for field in self.fields)

    def num_bytes_in(self, start: int, end: int) -> int:
        """Of a whole part [start, end)."""
        return sum(field.num_bytes_in(start, end) for field in self.fields)


@dataclass(frozen=True, slots=True)
class PrefixArray:
    """Contents of one field in one part. data: bytes-like, or an array of the engine (of bytes, contiguous)."""

    layer: int
    name: str
    dtype: str
    shape: tuple[int, ...]
    data: Any

    @property
    def num_bytes(self) -> int:
        return len(self.data) if isinstance(self.data, bytes | bytearray) else int(self.data.nbytes)

    def buffer(self) -> memoryview:
        """The bytes, little-endian, in row-major order, not copied. On any thread; waits until they are computed."""
        return memoryview(self.data).cast("B")


@dataclass(frozen=True, slots=True)
class PrefixPart:
    """Positions [start, end) of a sequence. Without its checkpoints it can be a link of a chain, but not its last one."""

    start: int
    end: int
    arrays: tuple[PrefixArray, ...]


@dataclass(frozen=True, slots=True)
class Export:
    """missing: (layer, reason) for each layer whose checkpoint at the part's end cannot be given (any more)."""

    part: PrefixPart
    missing: tuple[tuple[int, str], ...] = ()


def check_part(layout: PrefixLayout, part: PrefixPart) -> dict[tuple[int, str], PrefixArray]:
    """The part's arrays by (layer, name): all slices of tokens, and any of the checkpoints.

    :raises RowError: "invalid_request": this is no part of a sequence of this model.
    """
    where = f"part [{part.start}, {part.end})"
    if not 0 <= part.start < part.end:
        raise RowError("invalid_request", f"{where} has no positions")
    expected = {(field.layer, field.name): field for field in layout.fields}
    found: dict[tuple[int, str], PrefixArray] = {}
    for array in part.arrays:
        key = (array.layer, array.name)
        field = expected.get(key)
        what = f"{where}, layer {array.layer}, {array.name}"
        if field is None or key in found:
            raise RowError("invalid_request", f"{what}: {'twice' if field else 'this model has no such array'}")
        shape = field.shape_in(part.start, part.end)
        if (array.dtype, array.shape) != (field.dtype, shape):
            raise RowError(
                "invalid_request", f"{what}: {array.dtype} {list(array.shape)}, but this model has {field.dtype} {list(shape)}"
            )
        num_bytes = field.num_bytes_in(part.start, part.end)
        if array.num_bytes != num_bytes:
            raise RowError("invalid_request", f"{what}: {array.num_bytes} bytes instead of {num_bytes}")
        found[key] = array
    for key, field in expected.items():
        if field.span == "tokens" and key not in found:
            raise RowError("invalid_request", f"{where} lacks {field.name} of layer {field.layer}")
    return found


def cut_part(layout: PrefixLayout, part: PrefixPart, start: int | None, end: int | None) -> PrefixPart:
    """The checked part, or the positions [start, end) of it (None: from or to its own end), copied out on any thread.

    Checkpoints hold at the part's own end only, so they stay out of one that ends before.

    :raises RowError: "invalid_request": this is no part of a sequence of this model, or does not hold these positions.
    """
    contents = check_part(layout, part)
    start, end = part.start if start is None else start, part.end if end is None else end
    if (start, end) == (part.start, part.end):
        return part
    if not part.start <= start < end <= part.end:
        raise RowError("invalid_request", f"part [{part.start}, {part.end}) does not hold the positions [{start}, {end})")
    arrays: list[PrefixArray] = []
    for field in layout.fields:
        array = contents.get((field.layer, field.name))
        if array is not None and field.span == "tokens":
            shape = field.shape_in(start, end)
            arrays.append(replace(array, shape=shape, data=_cut(array, start - part.start, end - part.start)))
        elif array is not None and end == part.end:
            arrays.append(array)
    return PrefixPart(start, end, tuple(arrays))


def _cut(array: PrefixArray, first: int, last: int) -> bytes:
    """The positions [first, last) of each head, counted from the part's start."""
    heads, num_positions, _ = array.shape
    view = array.buffer()
    head_bytes = len(view) // heads
    position_bytes = head_bytes // num_positions
    return b"".join(
        view[head * head_bytes + first * position_bytes : head * head_bytes + last * position_bytes] for head in range(heads)
    )


def check_chain(layout: PrefixLayout, parts: Sequence[PrefixPart], context_length: int) -> list[dict[tuple[int, str], PrefixArray]]:
    """Each part's arrays by (layer, name). context_length: tokens known of the sequence, of which at least one must be left.

    :raises RowError: "invalid_request": parts that are none of this model's, or do not join, or whose last lacks a checkpoint.
    """
    end = 0
    for part in parts:
        if part.start != end:
            raise RowError("invalid_request", f"part [{part.start}, {part.end}) does not join: positions are there up to {end}")
        end = part.end
    if not 0 < end < context_length:
        raise RowError(
            "invalid_request",
            f"{end} positions cannot be restored of {context_length} tokens: at least one goes in, one is left out",
        )
    contents = [check_part(layout, part) for part in parts]
    for field in layout.fields:
        if (field.layer, field.name) not in contents[-1]:
            raise RowError("invalid_request", f"the last part lacks the checkpoint {field.name} of layer {field.layer} at {end}")
    return contents
