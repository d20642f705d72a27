"""Which tensors does a segment of this model have, and of which of them can a part be used?

The engine describes its layers once; writer and reader both derive from that what a segment [start, end) must hold.
Dense layers keep every position, so a segment holds their slice. A sliding layer forgets and a recurrent layer has no
positions at all: a segment holds what they are at its end (a checkpoint), which is valid there and nowhere else.
"""

from __future__ import annotations

import math
from typing import Final, Literal, dataclass_transform

import msgspec

TOKENS: Final = -1
"""Stands in a field's shape for its token axis."""

ITEM_BYTES: Final = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}
"""Bytes an item, by the dtype's name in the safetensors format."""

Style = Literal["dense", "mixed", "checkpoint"]
"""Of a model's segments. "dense": every layer is, any part from the front is usable. "mixed": the slices of a whole chain and the
checkpoint of its last segment are needed. "checkpoint": no layer is dense, one segment is enough."""


@dataclass_transform(frozen_default=True, field_specifiers=(msgspec.field,))  # tells type checkers that subclasses are frozen too
class _Plain(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of the values that go into headers and fingerprints."""


class Field(_Plain):
    """One tensor of a layer, for instance its keys: `shape` [heads, TOKENS, dim] without a batch axis."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"field {self.name!r}: dtype {self.dtype!r} is none of {', '.join(ITEM_BYTES)}")
        if any(size < 1 and size != TOKENS for size in self.shape) or self.shape.count(TOKENS) > 1:
            raise ValueError(f"field {self.name!r}: shape {self.shape} must have positive sizes and at most one {TOKENS} (tokens)")

    def sized(self, num_positions: int) -> TensorSpec:
        return TensorSpec(self.dtype, tuple(num_positions if size == TOKENS else size for size in self.shape))


class _Positioned(_Plain):
    fields: tuple[Field, ...]

    def __post_init__(self) -> None:
        for field in self.fields:
            if TOKENS not in field.shape:
                raise ValueError(f"field {field.name!r}: shape {field.shape} needs a token axis ({TOKENS})")


class Dense(_Positioned, tag="dense"):
    """Keeps all positions."""


class Sliding(_Positioned, tag="sliding"):
    """Keeps the last `num_held` positions (fewer when there are not so many)."""

    num_held: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_held < 1:
            raise ValueError(f"num_held is {self.num_held}; a sliding layer holds at least one position")


class Recurrent(_Plain, tag="recurrent"):
    """Keeps a state of fixed size."""

    fields: tuple[Field, ...]

    def __post_init__(self) -> None:
        for field in self.fields:
            if TOKENS in field.shape:
                raise ValueError(f"field {field.name!r}: a recurrent state has no token axis")


Layer = Dense | Sliding | Recurrent


class TensorSpec(_Plain):
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class Layout(_Plain):
    """All cache entries of a model, in the model's own order."""

    layers: tuple[Layer, ...]

    def __post_init__(self) -> None:
        for number, layer in enumerate(self.layers):
            names = [field.name for field in layer.fields]
            if not names or len(set(names)) < len(names):
                raise ValueError(f"layer {number} needs fields with different names, has {names}")

    @property
    def style(self) -> Style:
        num_dense = sum(isinstance(layer, Dense) for layer in self.layers)
        if num_dense == len(self.layers):
            return "dense"
        return "mixed" if num_dense else "checkpoint"

    def slices(self, start: int, end: int) -> dict[str, TensorSpec]:
        """The tensors of the dense layers for positions [start, end), by their name in the file."""
        return {
            tensor_name(number, field): field.sized(end - start)
            for number, layer in enumerate(self.layers)
            if isinstance(layer, Dense)
            for field in layer.fields
        }

    def checkpoint(self, end: int) -> dict[str, TensorSpec]:
        """The tensors of the other layers after position end - 1, by their name in the file."""
        return {
            tensor_name(number, field): field.sized(min(layer.num_held, end) if isinstance(layer, Sliding) else 0)
            for number, layer in enumerate(self.layers)
            if not isinstance(layer, Dense)
            for field in layer.fields
        }

    def tensors(self, start: int, end: int) -> dict[str, TensorSpec]:
        """All tensors of a segment [start, end)."""
        return self.slices(start, end) | self.checkpoint(end)

    def encoded(self) -> bytes:
        """Equal for equal layouts only."""
        return msgspec.json.encode(self)


def tensor_name(layer: int, field: Field) -> str:
    return f"{layer}.{field.name}"
