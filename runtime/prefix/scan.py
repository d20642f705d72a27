"""What is on the disk, what did others publish or use since, and what is litter?

All functions block: for a thread of their own. What cannot be read is passed over, what vanishes meanwhile is not there.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, NamedTuple

from runtime.prefix import hits, segment, temporary
from runtime.prefix.container import ContainerError
from runtime.prefix.hashing import FORMAT_VERSION, BlockHash, Scope
from runtime.prefix.keys import Keyring, Known
from runtime.prefix.plans import Entry
from runtime.prefix.restore import MissReason
from runtime.prefix.segment import SUFFIX, Header, OtherFormat

_HEX: Final = frozenset("0123456789abcdef")


@dataclass(frozen=True, slots=True)
class Changes:
    """Since the scan before. added: least recently used first. used: by another process. gone: evicted or erased by one.

    num_removed: files that were of no use to anyone: damaged, of another block size, of a tenant whose key is destroyed,
    counters of uses without a segment.
    """

    added: list[Entry] = field(default_factory=list)
    used: list[BlockHash] = field(default_factory=list)
    gone: list[BlockHash] = field(default_factory=list)
    num_removed: int = 0


class Stamp(NamedTuple):
    """used_ns: the file's time of last change, which a use sets."""

    inode: int
    num_bytes: int
    used_ns: int


class Scanner:
    """Looks at one cache directory again and again, reading only the headers of files that are new. One thread at a time."""

    def __init__(self, root: Path, keyring: Keyring) -> None:
        self._root = root
        self._keyring = keyring
        self._seen: dict[Path, tuple[Stamp, BlockHash]] = {}

    def scan(self) -> Changes:
        changes = Changes()
        # Files first, keys after: a tenant's key is on the disk before its first file is.
        stamps, orphans = listing(self._root)
        known = self._keyring.known()
        for path in [path for path in self._seen if path not in stamps]:
            changes.gone.append(self._seen.pop(path)[1])
        num_removed = _remove_orphans(orphans)
        # By time of last use, of which only the order counts; a clock that jumped costs a wrong order once.
        for path, stamp in sorted(stamps.items(), key=lambda item: item[1].used_ns):
            before = self._seen.get(path)
            if before is not None and before[0][:2] == stamp[:2]:
                if before[0] != stamp:
                    changes.used.append(before[1])
                    self._seen[path] = (stamp, before[1])
                continue
            found = look(path, stamp, known)
            if isinstance(found, Recognised):
                changes.added.append(describe(*found))
                self._seen[path] = (stamp, found.header.name)
                continue
            if before is not None:  # something else lies in its place
                changes.gone.append(self._seen.pop(path)[1])
            if found.is_litter:
                num_removed += remove([path])
        return Changes(changes.added, changes.used, changes.gone, num_removed)

    def mark_used(self, entries: Iterable[Entry]) -> None:
        """Let other processes and later ones know. Each is counted as one use, as often as it is given."""
        for entry, num_uses in Counter(entries).items():
            path = self._path(entry)
            with contextlib.suppress(OSError):
                before = _stamp(path)
                os.utime(path, follow_symlinks=False)
                seen = self._seen.get(path)
                if seen is not None:  # our own use is no news
                    self._seen[path] = (_stamp(path), seen[1])
                hits.add(self._root, path, before.used_ns, num_uses)

    def delete(self, entries: Iterable[Entry]) -> int:
        """Carry evictions out; how many segments are gone."""
        return remove(self._path(entry) for entry in entries)

    def _path(self, entry: Entry) -> Path:
        return segment.segment_path(self._root, entry.fingerprint, entry.name)


def erase(root: Path, scope: Scope) -> int:
    """Delete every segment of a scope, of whatever model and whoever published it; how many are gone.

    To be called after the key's destruction: a segment that another process publishes still later has no known owner
    and is removed by the next scan.
    """
    return remove(path for path in listing(root)[0] if (header := _header(path)) and _is_owner(scope, header))


def reclaim(root: Path) -> int:
    """Remove what earlier formats and dead processes left, and empty directories; how many files and old trees are gone."""
    num_removed = temporary.sweep(root) + _remove_orphans(listing(root)[1])
    for name in _listed(root):
        version = name.removeprefix("v")
        if name != version and version.isdecimal() and int(version) < FORMAT_VERSION:
            shutil.rmtree(root / name, ignore_errors=True)
            num_removed += not (root / name).exists()
    for fingerprint in _listed(root / segment.FORMAT_DIRECTORY):
        directory = root / segment.FORMAT_DIRECTORY / fingerprint
        for inner in (*(directory / name for name in _listed(directory)), directory):
            with contextlib.suppress(OSError):  # not empty; a publisher that comes to need it makes it again
                os.rmdir(inner)
    return num_removed


def free_bytes(root: Path) -> int:
    """On the disk of the cache directory, also before there is one. 0 when nobody can tell: then nothing is published."""
    for directory in (root, *root.parents):
        try:
            return shutil.disk_usage(directory).free
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:
            break
    return 0


def remove(paths: Iterable[Path]) -> int:
    """Segment files and their counters of uses; how many segments are gone by it."""
    num_removed = 0
    for path in paths:
        num_removed += _unlink(path)
        _unlink(hits.hits_path(path))  # after the segment: see `hits`
    return num_removed


def describe(header: Header, scope: Scope, num_bytes: int) -> Entry:
    """The index's entry of a segment file of that size. Its counter of uses is reckoned in, also before there is one."""
    return Entry(
        fingerprint=header.fingerprint,
        tenant=scope.tenant,
        parent=header.parent_hash,
        start=header.start,
        blocks=header.block_hashes,
        style=header.layout.style,
        num_bytes=num_bytes + hits.RESERVED_BYTES,
        checkpoint_bytes=sum(spec.num_bytes for spec in header.layout.checkpoint(header.end).values()),
    )


class Recognised(NamedTuple):
    """num_bytes: of the file."""

    header: Header
    scope: Scope
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Unusable:
    """A file that is no segment for us. is_litter: nor for anybody else."""

    reason: MissReason | Literal["owner"]
    detail: str
    is_litter: bool


def look(path: Path, stamp: Stamp, known: Known) -> Recognised | Unusable:
    """What a file is, by its header alone. Changes nothing."""
    try:
        head = _head(path)
        header, parsed = segment.decode_head(head)
    except OtherFormat as error:
        return Unusable("format", str(error), True)
    except ContainerError as error:
        return Unusable("malformed", str(error), True)
    except FileNotFoundError as error:
        return Unusable("absent", str(error), False)
    except OSError as error:
        # A file that cannot be read now may be some other time.
        return Unusable("unreadable", str(error), path.is_symlink() or not path.is_file())
    scope = next((scope for scope in known.scopes if _is_owner(scope, header)), None)
    if scope is None:
        return Unusable("owner", "it is of no tenant whose key is here", known.is_complete)
    if segment.segment_path(Path(), header.fingerprint, header.name).parts != path.parts[-4:]:
        return Unusable("name", f"it is segment {header.name.hex()} of {header.fingerprint}", True)
    if not segment.is_sealed(head, scope.secret(header.fingerprint)):
        return Unusable("seal", "the header is not as it was written", True)
    if len(head) + parsed.payload_bytes != stamp.num_bytes:
        return Unusable("size", f"expected {len(head) + parsed.payload_bytes} bytes, found {stamp.num_bytes}", True)
    return Recognised(header, scope, stamp.num_bytes)


def _is_owner(scope: Scope, header: Header) -> bool:
    return scope.owner_tag(header.name) == header.owner


def _header(path: Path) -> Header | None:
    try:
        return segment.decode_head(_head(path))[0]
    except (OSError, ContainerError, OtherFormat):
        return None


def _head(path: Path) -> bytes:
    descriptor = segment.open_regular(path)
    try:
        return segment.read_head(descriptor)
    finally:
        os.close(descriptor)


def listing(root: Path) -> tuple[dict[Path, Stamp], list[Path]]:
    """Every file that is named like a segment, and every counter of uses that seems to be of none."""
    stamps: dict[Path, Stamp] = {}
    orphans: list[Path] = []
    base = root / segment.FORMAT_DIRECTORY
    for fingerprint in _listed(base):
        for prefix in _listed(base / fingerprint):
            directory = base / fingerprint / prefix
            names = _listed(directory)
            present = set(names)
            for name in names:
                digits, _, suffix = name.partition(".")
                if len(digits) != 64 or not _HEX.issuperset(digits):
                    continue
                if f".{suffix}" == SUFFIX:
                    with contextlib.suppress(OSError):
                        stamps[directory / name] = _stamp(directory / name)
                elif f".{suffix}" == hits.HITS_SUFFIX and digits + SUFFIX not in present:
                    orphans.append(directory / name)
    return stamps, orphans


def _remove_orphans(counters: Iterable[Path]) -> int:
    # The segment may have been published since, and used.
    return sum(_unlink(path) for path in counters if not os.path.lexists(path.with_suffix(SUFFIX)))


def _unlink(path: Path) -> bool:
    with contextlib.suppress(OSError):
        os.unlink(path)
        return True
    return False


def _stamp(path: Path) -> Stamp:
    status = os.lstat(path)
    return Stamp(status.st_ino, status.st_size, status.st_mtime_ns)


def _listed(directory: Path) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []
