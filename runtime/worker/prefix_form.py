"""How do an engine's parts of a row become the tensors of a segment file, and back?

The engine's layout and the file's say the same in two vocabularies: of the first an engine is made, of the second files are
judged by processes that have none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from runtime.engine.engine import Loaded
from runtime.engine.prefix_parts import PrefixArray, PrefixField, PrefixLayout, PrefixPart
from runtime.prefix import segment
from runtime.prefix.hashing import Identity
from runtime.prefix.layout import TOKENS, Dense, Field, Layer, Layout, Recurrent, Sliding, TensorSpec, tensor_name
from runtime.prefix.restore import Segment
from runtime.protocol.events import PrefixFacts


@dataclass(frozen=True)
class PrefixForm:
    """What is known of one model's prefixes. `places`: by a tensor's name in files, the engine's layer and name for it."""

    fingerprint: str
    layout: Layout
    places: dict[str, tuple[int, str]]

    @property
    def has_checkpoints(self) -> bool:
        return self.layout.style != "dense"

    @property
    def facts(self) -> PrefixFacts:
        slices = self.layout.slices(0, 1).values()
        furthest = max((layer.num_held for layer in self.layout.layers if isinstance(layer, Sliding)), default=1)
        checkpoint = self.layout.checkpoint(furthest).values()
        head_bytes, block_head_bytes = segment.most_head_bytes(self.layout)
        return PrefixFacts(
            fingerprint=self.fingerprint,
            style=self.layout.style,
            slice_bytes_per_token=sum(spec.num_bytes for spec in slices),
            checkpoint_bytes=sum(spec.num_bytes for spec in checkpoint),
            head_bytes=head_bytes,
            block_head_bytes=block_head_bytes,
        )

    def tensors(self, part: PrefixPart) -> dict[str, tuple[TensorSpec, Any]]:
        """As a `Draft` takes them. Waits until they are computed."""
        names = {place: name for name, place in self.places.items()}
        return {names[array.layer, array.name]: (TensorSpec(array.dtype, array.shape), array.buffer()) for array in part.arrays}

    def part(self, segment: Segment, start: int) -> PrefixPart:
        """start: the segment's own, or where the part is to begin when nothing in it depends on that."""
        arrays = [
            PrefixArray(*self.places[name], dtype=spec.dtype, shape=spec.shape, data=data)
            for name, (spec, data) in segment.tensors.items()
        ]
        return PrefixPart(start, segment.end, tuple(arrays))


def form_of(loaded: Loaded) -> PrefixForm | None:
    """None when this model's prefixes cannot be kept. The same in every process that loads the same model for the same machine."""
    engine_layout = loaded.engine.layout()
    capabilities = loaded.facts.capabilities
    if engine_layout is None or not (capabilities.prefix and capabilities.chunked_prefill):
        return None
    numbers, layers = _layers(engine_layout)
    try:
        layout = Layout(tuple(_layer(fields) for fields in layers))
    except ValueError:  # for instance a window of one position, of which nothing is held
        return None
    if not layout.layers:
        return None
    places = {
        tensor_name(number, field): (numbers[number], field.name)
        for number, layer in enumerate(layout.layers)
        for field in layer.fields
    }
    identity = Identity(model=loaded.facts.fingerprint, adapter=None, numerics=loaded.numerics, layout=layout)
    return PrefixForm(identity.fingerprint(), layout, places)


def _layers(layout: PrefixLayout) -> tuple[list[int], list[list[PrefixField]]]:
    """The numbers of the layers that have fields, and these."""
    numbers = sorted({field.layer for field in layout.fields})
    return numbers, [[field for field in layout.fields if field.layer == number] for number in numbers]


def _layer(fields: Sequence[PrefixField]) -> Layer:
    """:raises ValueError: what files have no word for."""
    first = fields[0]
    if any((field.span, field.window) != (first.span, first.window) for field in fields):
        raise ValueError(f"layer {first.layer} has fields of several kinds")
    match first.span:
        case "state":
            return Recurrent(tuple(Field(field.name, field.dtype, field.shape) for field in fields))
        case "tokens":
            return Dense(_positioned(fields))
        case "window":
            return Sliding(_positioned(fields), num_held=first.window - 1)


def _positioned(fields: Sequence[PrefixField]) -> tuple[Field, ...]:
    return tuple(Field(field.name, field.dtype, (field.shape[0], TOKENS, field.shape[1])) for field in fields)
