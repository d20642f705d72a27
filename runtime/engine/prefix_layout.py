"""How are a row's caches copied out as parts of a prefix, and a row made of such parts?

The one place that knows both sides: what lies in the stand-in caches (`ragged_cache`, `recurrent`) and what parts are made of
(`prefix_parts`). Only the row's own positions are ever handed out: slots behind its length hold what others left there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np

from runtime.engine.batch import RaggedBatch
from runtime.engine.engine import RowError
from runtime.engine.layers import Kind, flattened
from runtime.engine.prefix_parts import Export, PrefixArray, PrefixField, PrefixLayout, PrefixPart, check_chain, cut_part
from runtime.engine.ragged_cache import RaggedKV
from runtime.engine.rows import Row

_DTYPES = {
    mx.bool_: "BOOL",
    mx.uint8: "U8",
    mx.int8: "I8",
    mx.uint16: "U16",
    mx.int16: "I16",
    mx.float16: "F16",
    mx.bfloat16: "BF16",
    mx.uint32: "U32",
    mx.int32: "I32",
    mx.float32: "F32",
    mx.uint64: "U64",
    mx.int64: "I64",
    mx.float64: "F64",
}
_BY_NAME = {name: dtype for dtype, name in _DTYPES.items()}


def layout_of(batch: RaggedBatch) -> PrefixLayout:
    """From a batch that has run a forward: shapes and types are the model's own business.

    :raises ValueError: something that a part cannot hold.
    """
    fields: list[PrefixField] = []
    for number, layer in enumerate(batch.layers):
        if isinstance(layer, RaggedKV):
            window = layer.family.window
            for name, array in (("keys", layer.keys), ("values", layer.values)):
                if array is not None:
                    shape = (array.shape[1], array.shape[3])
                    dtype = _dtype_name(array)
                    if window is None:
                        fields.append(PrefixField(number, name, "tokens", dtype, shape))
                    else:
                        fields.append(PrefixField(number, name, "window", dtype, shape, window))
        else:
            for index, array in enumerate(layer.cache):
                if array is not None:
                    fields.append(PrefixField(number, _state_name(index), "state", _dtype_name(array), array.shape[1:]))
    for field in fields:
        if not field.num_bytes_in(0, 2):
            raise ValueError(f"layer {field.layer} has {field.name} without contents, of shape {list(field.shape)}")
    return PrefixLayout(tuple(fields))


class Prefixes:
    """What an engine offers of prefixes; see `Engine`. layout: None when it is not proved that rows can be restored."""

    def __init__(self, kinds: Sequence[Kind], layout: PrefixLayout | None) -> None:
        self._kinds = kinds
        self.layout = layout

    def export(self, row: Row, start: int, end: int) -> Export:
        layout = self._proved_layout()
        if not isinstance(row.batch, RaggedBatch):
            raise RowError("invalid_request", f"sequence {row.sequence} has computed nothing yet that could be exported")
        return exported(row.batch, row, layout, start, end)

    def adopt(self, part: PrefixPart, start: int | None = None, end: int | None = None) -> PrefixPart:
        """The copy from bytes, which `restore` then need not make. Cutting builds no operation of MLX: those belong to a thread."""
        part = cut_part(self._proved_layout(), part, start, end)
        return replace(part, arrays=tuple(replace(array, data=_of_bytes(array.data)) for array in part.arrays))

    def restore(self, row: Row, parts: Sequence[PrefixPart]) -> None:
        layout = self._proved_layout()
        if row.batch is not None or row.known:
            raise RowError("conflict", f"sequence {row.sequence} has begun already; only a row of length 0 can be restored")
        restored(self._kinds, row, layout, parts)

    def _proved_layout(self) -> PrefixLayout:
        if self.layout is None:
            raise RowError(
                "generation_failed", "prefixes of this model cannot be kept: capabilities.prefix is false, see its notes"
            )
        return self.layout


def exported(batch: RaggedBatch, row: Row, layout: PrefixLayout, start: int, end: int) -> Export:
    """Copies, already on their way to be computed.

    They must not stay lazy: a pending slice of a cache would make the next step's write copy the whole of it.

    :raises RowError: "invalid_request": positions that are not in the caches.
    """
    if not 0 <= start < end <= row.num_cached:
        raise RowError(
            "invalid_request", f"cannot export [{start}, {end}) of sequence {row.sequence}: {row.num_cached} tokens are computed"
        )
    place = batch.rows.index(row)
    states = batch.states_at(row, end)
    arrays: list[PrefixArray] = []
    missing: dict[int, str] = {}
    for field in layout.fields:
        layer = batch.layers[field.layer]
        first = field.first_in(start, end)
        if isinstance(layer, RaggedKV):
            array = layer.positions(place, field.name, first, end)
            reason = f"positions from {first} on are no longer kept"
        else:
            state = states.get(layer)
            array = None if state is None else state[_state_index(field.name)]
            array = None if array is None else array[0]
            reason = f"its state at {end} is not kept; the sequence stands at {row.num_cached}"
        shape = field.shape_in(start, end)
        if array is not None and (_dtype_name(array), array.shape) != (field.dtype, shape):
            reason = f"{field.name} is {array.dtype} {list(array.shape)}, but at load it was {field.dtype} {list(shape)}"
            array = None
        if array is None:
            missing[field.layer] = reason
        else:
            arrays.append(PrefixArray(field.layer, field.name, field.dtype, shape, _as_bytes(array)))
    mx.async_eval([array.data for array in arrays])
    return Export(PrefixPart(start, end, tuple(arrays)), tuple(missing.items()))


def restored(kinds: Sequence[Kind], row: Row, layout: PrefixLayout, parts: Sequence[PrefixPart]) -> RaggedBatch:
    """A batch with `row`, which was empty and in none, alone: as it stood at the last part's end. Shares nothing with the parts.

    :raises RowError: see `check_chain`; the row is then as before.
    """
    chain = check_chain(layout, parts, len(row.context))
    end = parts[-1].end
    contents: list[dict[str, list[mx.array]]] = [{} for _ in flattened(kinds)]
    for field in layout.fields:
        sources = chain if field.span == "tokens" else chain[-1:]
        contents[field.layer][field.name] = [_restored_array(arrays[field.layer, field.name]) for arrays in sources]
    batch = RaggedBatch(kinds)
    batch.add_restored(row, end)
    row.known = list(row.context[:end])
    for layer, pieces in zip(batch.layers, contents, strict=True):
        if isinstance(layer, RaggedKV):
            if pieces:
                layer.fill(pieces["keys"], pieces["values"])
        else:
            for name, (array,) in pieces.items():
                layer.cache[_state_index(name)] = array[None]
    mx.async_eval(batch.arrays())
    return batch


def _state_name(index: int) -> str:
    return f"state{index}"


def _state_index(name: str) -> int:
    return int(name.removeprefix("state"))


def _dtype_name(array: mx.array) -> str:
    if array.dtype not in _DTYPES:
        raise ValueError(f"arrays of {array.dtype} cannot be part of a prefix")
    return _DTYPES[array.dtype]


def _as_bytes(array: mx.array) -> mx.array:
    """One copy (unless the slice is nearly the whole buffer), then the same memory seen as bytes."""
    return mx.contiguous(array).reshape(-1).view(mx.uint8)


def _of_bytes(data: Any) -> mx.array:
    return data if isinstance(data, mx.array) else mx.array(np.frombuffer(data, np.uint8))


def _restored_array(array: PrefixArray) -> mx.array:
    return _of_bytes(array.data).view(_BY_NAME[array.dtype]).reshape(array.shape)
