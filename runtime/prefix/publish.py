"""How does a segment get onto the disk? Whole, under its final name, or not at all; a failure is a result, never an exception.

Checksums, temporary file, fsync, link, in this order: whatever moment the process or the machine dies at, a file that has a
final name was complete and on the disk before it got it. Blocks for as long as the disk takes: for a thread of its own.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from runtime.prefix import container, room, segment, temporary
from runtime.prefix.hashing import BLOCK_TOKENS, BlockHash, Secret, seal_key
from runtime.prefix.layout import Layout, TensorSpec

RejectReason = Literal[
    "no_space",
    "read_only",
    "io",  # any other error of the file system, also directories that vanish meanwhile
    "contents",  # the tensors are not what the layout says a segment of these positions has
    "over_budget",  # with it the directory would take more than it may
]

_REASONS: Final[dict[int | None, RejectReason]] = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "no_space"),
    **dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM), "read_only"),
}


@dataclass(frozen=True, slots=True)
class Draft:
    """A segment to publish.

    owner: the scope's tag for this segment's name (`Scope.owner_tag`); the host makes it, so that no worker needs a tenant's key.
    chain: block hashes of the context from its beginning, at least up to `end`. tensors: (spec, contiguous buffer) by
    name, as `layout.tensors(start, end)` lists them: exactly the true length, nothing of the allocated slack behind it.
    """

    fingerprint: str
    secret: Secret = field(repr=False)
    owner: str
    chain: Sequence[BlockHash]
    start: int
    end: int
    layout: Layout
    tensors: Mapping[str, tuple[TensorSpec, Any]] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Published:
    """is_new: False when there was a file of that name already. num_bytes: of the file this segment makes."""

    name: BlockHash
    path: Path
    num_bytes: int
    is_new: bool


@dataclass(frozen=True, slots=True)
class Rejected:
    reason: RejectReason
    detail: str


def publish(root: Path, draft: Draft, *, limit_bytes: int | None = None, ledger: Path | None = None) -> Published | Rejected:
    """Write one segment under the cache directory `root`. Never raises for what disk, directories or `draft` are like.

    limit_bytes: most that the directory may take, whoever has written in it; None for no bound. ledger: see `temporary_file`.
    """
    try:
        views = _checked(draft)
    except ValueError as error:
        return Rejected("contents", str(error))
    name = BlockHash(draft.chain[draft.end // BLOCK_TOKENS - 1])
    path = segment.segment_path(root, draft.fingerprint, name)
    payload_bytes = sum(len(view) for view in views.values())
    # Asked again and again while there is no room, this should not cost the checksums each time.
    if (refusal := _refusal(root, limit_bytes, payload_bytes)) is not None and not os.path.lexists(path):
        return refusal
    key = seal_key(draft.secret)
    header = segment.make_header(
        fingerprint=draft.fingerprint,
        owner=draft.owner,
        chain=draft.chain,
        start=draft.start,
        end=draft.end,
        layout=draft.layout,
        checksums={name: container.checksum(name, view, key) for name, view in views.items()},
    )
    specs = {name: spec for name, (spec, _) in draft.tensors.items()}
    head = segment.encode_head(header, specs, draft.secret)
    num_bytes = len(head) + payload_bytes
    try:
        if path.exists():
            return Published(name, path, num_bytes, is_new=False)
        with temporary.temporary_file(root, ledger, num_bytes=num_bytes) as (descriptor, written):
            if (refusal := _refusal(root, limit_bytes, 0)) is not None:
                return refusal
            temporary.write_whole(descriptor, [head, *views.values()])
            is_new = temporary.give_name(written, path)
    except OSError as error:
        return Rejected(_REASONS.get(error.errno, "io"), str(error))
    return Published(name, path, num_bytes, is_new)


def _refusal(root: Path, limit_bytes: int | None, more_bytes: int) -> Rejected | None:
    """None when the directory may take so much more than it does now."""
    if limit_bytes is None or (taken := room.num_bytes_in(root) + more_bytes) <= limit_bytes:
        return None
    return Rejected("over_budget", f"{taken} bytes with it, {limit_bytes} are allowed")


def _checked(draft: Draft) -> dict[str, memoryview]:
    """The tensors' bytes in the order of the file. :raises ValueError: they do not make a segment."""
    start, end = draft.start, draft.end
    if not 0 <= start < end <= len(draft.chain) * BLOCK_TOKENS or start % BLOCK_TOKENS or end % BLOCK_TOKENS:
        raise ValueError(f"positions {start}..{end} are no run of the {len(draft.chain)} blocks")
    wanted = draft.layout.tensors(start, end)
    given = {name: spec for name, (spec, _) in draft.tensors.items()}
    for name in wanted.keys() | given.keys():
        if wanted.get(name) != given.get(name):
            raise ValueError(f"tensor {name!r}: the layout wants {wanted.get(name)}, given {given.get(name)}")
    views = {}
    for name, spec in container.in_file_order(given).items():
        try:
            view = memoryview(draft.tensors[name][1]).cast("B")
        except TypeError as error:
            raise ValueError(f"tensor {name!r}: no contiguous buffer ({error})") from error
        if len(view) != spec.num_bytes:
            raise ValueError(f"tensor {name!r}: {spec} has {spec.num_bytes} bytes, given {len(view)}")
        views[name] = view
    return views
