"""The safetensors format in plain Python: how do named tensors and text become a file's header, and back?

u64 little-endian header length, JSON header, then the tensors' bytes without gaps up to the end of the file. Any safetensors
reader can open our files. Ours begin with a seal at a fixed place, a keyed digest of the whole header with the seal
itself set to zeros, so that nothing of a damaged header is ever believed:

    {"__metadata__":{"seal":"<64 hex digits>", ...

Tensors lie in order of falling item size behind a header padded to `ALIGNMENT`, so each is aligned to its items.
"""

from __future__ import annotations

import hmac
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

import msgspec

from runtime.prefix.layout import ITEM_BYTES, TensorSpec

ALIGNMENT: Final = 64
LENGTH_BYTES: Final = 8
MAX_HEADER_BYTES: Final = 16 << 20
"""Far above any model's; bounds what a damaged length makes us read."""

_SEAL_DIGITS: Final = 64
_BEFORE_SEAL: Final = b'{"__metadata__":{"seal":"'
_NO_SEAL: Final = b"0" * _SEAL_DIGITS
_METADATA: Final = "__metadata__"


class ContainerError(ValueError):
    """These bytes are no header of this format."""


@dataclass(frozen=True, slots=True)
class Span:
    """Where a tensor's bytes lie, counted from the end of the header."""

    spec: TensorSpec
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Parsed:
    """metadata: without the seal."""

    metadata: dict[str, str]
    spans: dict[str, Span]

    @property
    def payload_bytes(self) -> int:
        return max((span.end for span in self.spans.values()), default=0)


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


_decode_top = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_metadata = msgspec.json.Decoder(dict[str, str]).decode
_decode_entry = msgspec.json.Decoder(_Entry).decode


def in_file_order(specs: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    return dict(sorted(specs.items(), key=lambda item: -ITEM_BYTES[item[1].dtype]))


def build(metadata: Mapping[str, str], specs: Mapping[str, TensorSpec], key: bytes) -> bytes:
    """Everything of the file before the tensors, which follow in the order of `in_file_order`."""
    entries: dict[str, object] = {_METADATA: {"seal": _NO_SEAL.decode(), **metadata}}
    place = 0
    for name, spec in in_file_order(specs).items():
        entries[name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": (place, place + spec.num_bytes)}
        place += spec.num_bytes
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-(LENGTH_BYTES + len(header)) % ALIGNMENT)
    unsealed = struct.pack("<Q", len(header)) + header
    first = LENGTH_BYTES + len(_BEFORE_SEAL)
    return unsealed[:first] + _seal(unsealed, key) + unsealed[first + _SEAL_DIGITS :]


def is_sealed(head: bytes, key: bytes) -> bool:
    """Whether `head` (length and header) is exactly what `build` made with this key."""
    first = LENGTH_BYTES + len(_BEFORE_SEAL)
    last = first + _SEAL_DIGITS
    return head[LENGTH_BYTES:first] == _BEFORE_SEAL and hmac.compare_digest(
        _seal(head[:first] + _NO_SEAL + head[last:], key), head[first:last]
    )


def parse(head: bytes) -> Parsed:
    """Read a header, sealed or not.

    :raises ContainerError: it is damaged in a way that shows without the key.
    """
    try:
        top = _decode_top(head[LENGTH_BYTES:])
        metadata = _decode_metadata(top.pop(_METADATA, msgspec.Raw(b"{}")))
        entries = {name: _decode_entry(raw) for name, raw in top.items()}
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ContainerError(f"the header is no safetensors header: {error}") from error
    metadata.pop("seal", None)
    spans: dict[str, Span] = {}
    place = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        begin, end = entry.data_offsets
        if entry.dtype not in ITEM_BYTES or min(entry.shape, default=0) < 0:
            raise ContainerError(f"tensor {name!r} has dtype {entry.dtype!r} and shape {entry.shape}")
        spec = TensorSpec(entry.dtype, entry.shape)
        if begin != place or end != begin + spec.num_bytes:
            raise ContainerError(f"tensor {name!r} lies at {begin}..{end}, expected {place}..{place + spec.num_bytes}")
        spans[name] = Span(spec, begin, end)
        place = end
    return Parsed(metadata, spans)


def checksum(name: str, data: memoryview, key: bytes) -> str:
    """Of one tensor's bytes, under its name: two tensors that changed places do not pass either."""
    encoded = name.encode()
    digest = blake2b(struct.pack("<Q", len(encoded)) + encoded, digest_size=16, key=key)
    digest.update(data)
    return digest.hexdigest()


def _seal(unsealed: bytes, key: bytes) -> bytes:
    return blake2b(unsealed, digest_size=_SEAL_DIGITS // 2, key=key, person=b"troupe-seal").hexdigest().encode()
