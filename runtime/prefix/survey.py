"""What lies in a cache directory, is it whole, and what of it has been unused for long? For people; changes nothing.

Blocks, for a thread of its own. What vanishes meanwhile is not there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from runtime.prefix import hits, restore, scan
from runtime.prefix.hashing import BLOCK_TOKENS, BlockHash, Scope
from runtime.prefix.keys import Keyring
from runtime.prefix.plans import Entry
from runtime.prefix.restore import Miss, Wanted
from runtime.prefix.scan import Unusable
from runtime.prefix.segment import Header


@dataclass(frozen=True, slots=True)
class Found:
    """A segment whose header is sound. used_ns, made_ns: since 1970, by the clocks of who used and made it."""

    path: Path
    header: Header
    scope: Scope
    entry: Entry
    num_hits: int
    used_ns: int
    made_ns: int


@dataclass(frozen=True, slots=True)
class Refused:
    """A file named like a segment that we cannot use."""

    path: Path
    num_bytes: int
    why: Unusable


@dataclass(frozen=True, slots=True)
class Survey:
    """found: least recently used first."""

    found: list[Found] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)


def survey(root: Path, keyring: Keyring) -> Survey:
    """By the headers alone."""
    result = Survey()
    # Files first, keys after: a tenant's key is on the disk before its first file is.
    stamps, _ = scan.listing(root)
    known = keyring.known()
    for path, stamp in sorted(stamps.items(), key=lambda item: item[1].used_ns):
        seen = scan.look(path, stamp, known)
        if isinstance(seen, Unusable):
            if seen.reason != "absent":
                result.refused.append(Refused(path, stamp.num_bytes, seen))
            continue
        num_hits, made_ns = hits.read(path) or (0, stamp.used_ns)
        result.found.append(Found(path, seen.header, seen.scope, scan.describe(*seen), num_hits, stamp.used_ns, made_ns))
    return result


def damage(root: Path, found: Found) -> Miss | None:
    """Read a segment whole; what is wrong with it. None: it is sound, or something else lies in its place by now."""
    header = found.header
    first = header.start // BLOCK_TOKENS
    # What comes before its parent no segment knows: a reader compares that with its own tokens.
    before = (*[BlockHash(b"")] * (first - 1), *([] if header.parent_hash is None else [header.parent_hash]))
    wanted = Wanted(
        fingerprint=header.fingerprint,
        secret=found.scope.secret(header.fingerprint),
        layout=header.layout,
        chain=(*before, *header.block_hashes),
        name=header.name,
        start=header.start,
        end=header.end,
        with_checkpoint=True,
    )
    miss = restore.check(root, wanted)
    return None if miss is None or miss.reason in ("absent", "range") else miss


def unused_since(found: Iterable[Found], before_ns: int) -> list[Found]:
    """Those not used since then, and nothing that continues them either; what continues another comes before it. Pure."""
    unused = []
    needed: set[BlockHash] = set()
    for one in sorted(found, key=lambda one: -one.entry.start):  # what continues a segment begins after it
        entry = one.entry
        if one.used_ns < before_ns and needed.isdisjoint(entry.blocks):
            unused.append(one)
        elif entry.parent is not None and entry.style != "checkpoint":
            needed.add(entry.parent)
    return unused
