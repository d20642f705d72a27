"""May this file be believed, and what are its tensors? A doubt of any kind is a miss with a reason, never an exception.

What is handed out lies in memory of our own, read and then checked. A mapping of the file would save one copy (a seventh of
the time the checksum takes) but leave two holes: bytes that change after they were checked, and a file cut short under
the mapping, which kills the process by SIGBUS. So an evicted, overwritten or truncated file never reaches past this function.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from runtime.prefix import container, hits, segment
from runtime.prefix.container import ContainerError, Parsed
from runtime.prefix.hashing import BLOCK_TOKENS, BlockHash, Secret, seal_key
from runtime.prefix.layout import ITEM_BYTES, Layout, TensorSpec
from runtime.prefix.segment import Header, OtherFormat

MissReason = Literal[
    "absent",  # no such file: never published, or evicted meanwhile
    "unreadable",  # it is there but cannot be read (permissions, I/O error, no memory)
    "malformed",  # no segment file, or one that ends inside its header
    "format",  # another format version or block size
    "seal",  # the header is not as it was written under this secret
    "fingerprint",
    "name",  # it is a segment, but not of this name
    "parent",  # it continues another context
    "tokens",  # it is of other tokens
    "layout",  # kinds, dtypes or shapes are not this model's
    "size",  # the file is shorter or longer than its header says
    "checksum",
    "range",  # sound, but cut at other positions than wanted
]

_READ_BYTES = 64 << 20
"""In one call; macOS refuses 2 GiB."""

_HARMLESS: frozenset[MissReason] = frozenset(("absent", "unreadable", "range"))
"""Say nothing against the file. With any other reason it is removed."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a reader needs: positions [start, end) of the context whose block hashes are `chain`, found in segment `name`.

    The chain must come from the reader's own tokens: that is what makes another prompt's cache impossible to take.
    with_checkpoint: also the sliding and recurrent layers' state, valid at the segment's end only, hence at `end`.
    """

    fingerprint: str
    secret: Secret = field(repr=False)
    layout: Layout
    chain: Sequence[BlockHash]
    name: BlockHash
    start: int
    end: int
    with_checkpoint: bool


@dataclass(frozen=True, slots=True)
class Segment:
    """Read and proven. tensors: read-only bytes by name, aligned to their items, of the segment's whole [start, end): the
    caller cuts out the positions it wants. num_bytes: read from the disk."""

    start: int
    end: int
    tensors: dict[str, tuple[TensorSpec, memoryview]]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Miss:
    """is_removed: the file was at fault and is gone."""

    reason: MissReason
    detail: str
    is_removed: bool = False


class _Doubt(Exception):
    def __init__(self, reason: MissReason, detail: str) -> None:
        super().__init__(detail)
        self.reason: MissReason = reason


def read(root: Path, wanted: Wanted) -> Segment | Miss:
    """Read one segment. Blocks for as long as the disk takes; never raises for what is on it."""
    return _open_and_read(root, wanted, removes=True)


def check(root: Path, wanted: Wanted) -> Miss | None:
    """As `read`, but leaves a file that is at fault where it is. None: it is sound."""
    found = _open_and_read(root, wanted, removes=False)
    return found if isinstance(found, Miss) else None


def _open_and_read(root: Path, wanted: Wanted, *, removes: bool) -> Segment | Miss:
    path = segment.segment_path(root, wanted.fingerprint, wanted.name)
    try:
        descriptor = segment.open_regular(path)
    except OSError as error:
        absent = isinstance(error, FileNotFoundError | NotADirectoryError)
        return Miss("absent" if absent else "unreadable", str(error))
    try:
        return _read(descriptor, wanted)
    except _Doubt as doubt:
        is_removed = removes and doubt.reason not in _HARMLESS and _remove(path, descriptor)
        return Miss(doubt.reason, f"{path}: {doubt}", is_removed)
    finally:
        os.close(descriptor)


def _read(descriptor: int, wanted: Wanted) -> Segment:
    try:
        head = segment.read_head(descriptor)
        num_file_bytes = os.fstat(descriptor).st_size
        header, parsed = segment.decode_head(head)
    except OtherFormat as error:
        raise _Doubt("format", str(error)) from error
    except ContainerError as error:
        raise _Doubt("malformed", str(error)) from error
    except (OSError, MemoryError) as error:
        raise _Doubt("unreadable", str(error)) from error
    if not segment.is_sealed(head, wanted.secret):
        raise _Doubt("seal", "the header is damaged or was not written under this secret")
    _compare(header, wanted)
    if {name: span.spec for name, span in parsed.spans.items()} != wanted.layout.tensors(header.start, header.end):
        raise _Doubt("layout", "its tensors are not those of its layout")
    if num_file_bytes != len(head) + parsed.payload_bytes:
        raise _Doubt("size", f"expected {len(head) + parsed.payload_bytes} bytes, found {num_file_bytes}")
    return _tensors(descriptor, len(head), header, parsed, wanted)


def _compare(header: Header, wanted: Wanted) -> None:
    """What the file says of itself against what we know. :raises _Doubt:"""
    if header.fingerprint != wanted.fingerprint:
        raise _Doubt("fingerprint", f"it is of {header.fingerprint}")
    if header.name != wanted.name:
        raise _Doubt("name", f"it is segment {header.name.hex()}")
    if header.layout != wanted.layout:
        raise _Doubt("layout", "it was written by a model of another layout")
    whole = header.end == wanted.end
    # Of an incomplete block at the prompt's end there is no hash, so nothing proves its tokens.
    inside = header.start <= wanted.start < wanted.end <= min(header.end, BLOCK_TOKENS * len(wanted.chain))
    if not inside or (wanted.with_checkpoint and not whole):
        raise _Doubt("range", f"it has {header.start}..{header.end}, wanted {wanted.start}..{wanted.end}")
    first, last = header.start // BLOCK_TOKENS, -(-wanted.end // BLOCK_TOKENS)
    if first > 0 and header.parent_hash != wanted.chain[first - 1]:
        raise _Doubt("parent", f"it continues {header.parent}")
    if header.block_hashes[: last - first] != tuple(wanted.chain[first:last]):
        raise _Doubt("tokens", "it is of other tokens than the prompt's")


def _tensors(descriptor: int, place: int, header: Header, parsed: Parsed, wanted: Wanted) -> Segment:
    names = (
        wanted.layout.tensors(header.start, header.end)
        if wanted.with_checkpoint
        else wanted.layout.slices(header.start, header.end)
    )
    spans = {name: span for name, span in parsed.spans.items() if name in names}
    num_bytes = sum(span.end - span.begin for span in spans.values())
    key = seal_key(wanted.secret)
    try:
        # Tensors keep the file's order of falling item sizes, hence their alignment, also when some are left out.
        buffer = memoryview(bytearray(num_bytes))
        tensors = {}
        filled = 0
        for name, span in sorted(spans.items(), key=lambda item: (-ITEM_BYTES[item[1].spec.dtype], item[1].begin)):
            view = buffer[filled : filled + span.end - span.begin]
            filled += len(view)
            _fill(descriptor, view, place + span.begin)
            if container.checksum(name, view, key) != header.checksums.get(name):
                raise _Doubt("checksum", f"tensor {name!r} is not as it was written")
            tensors[name] = (span.spec, view.toreadonly())
    except (OSError, MemoryError) as error:
        raise _Doubt("unreadable", str(error)) from error
    return Segment(header.start, header.end, tensors, place + num_bytes)


def _fill(descriptor: int, view: memoryview, place: int) -> None:
    filled = 0
    while filled < len(view):
        num_read = os.preadv(descriptor, [view[filled : filled + _READ_BYTES]], place + filled)
        if num_read == 0:
            raise _Doubt("size", f"it was cut short at {place + filled} bytes while being read")
        filled += num_read


def _remove(path: Path, descriptor: int) -> bool:
    """Remove the file we read, but not a sound one that someone else has put in its place meanwhile."""
    with contextlib.suppress(OSError):
        if os.path.samestat(os.lstat(path), os.fstat(descriptor)):
            os.unlink(path)
            with contextlib.suppress(OSError):
                os.unlink(hits.hits_path(path))
            return True
    return False
