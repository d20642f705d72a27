"""What is on the disk, what did others publish or use since, and what is litter?

All functions block: for a thread of their own. What cannot be read is passed over, what vanishes meanwhile is not there.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from runtime.prefix import segment, temporary
from runtime.prefix.container import ContainerError
from runtime.prefix.hashing import FORMAT_VERSION, BlockHash, Scope
from runtime.prefix.keys import Keyring, Known
from runtime.prefix.plans import Entry
from runtime.prefix.segment import SUFFIX, Header, OtherFormat

_HEX: Final = frozenset("0123456789abcdef")


@dataclass(frozen=True, slots=True)
class Changes:
    """Since the scan before. added: least recently used first. used: by another process. gone: evicted or erased by one.

    num_removed: files that were of no use to anyone: damaged, of another block size, of a tenant whose key is destroyed.
    """

    added: list[Entry] = field(default_factory=list)
    used: list[BlockHash] = field(default_factory=list)
    gone: list[BlockHash] = field(default_factory=list)
    num_removed: int = 0


class _Stamp(NamedTuple):
    inode: int
    num_bytes: int
    used_ns: int


class Scanner:
    """Looks at one cache directory again and again, reading only the headers of files that are new. One thread at a time."""

    def __init__(self, root: Path, keyring: Keyring) -> None:
        self._root = root
        self._keyring = keyring
        self._seen: dict[Path, tuple[_Stamp, BlockHash]] = {}

    def scan(self) -> Changes:
        changes = Changes()
        # Files first, keys after: a tenant's key is on the disk before its first file is.
        stamps = dict(_stamps(self._root))
        known = self._keyring.known()
        for path in [path for path in self._seen if path not in stamps]:
            changes.gone.append(self._seen.pop(path)[1])
        num_removed = 0
        # By time of last use, of which only the order counts; a clock that jumped costs a wrong order once.
        for path, stamp in sorted(stamps.items(), key=lambda item: item[1].used_ns):
            before = self._seen.get(path)
            if before is not None and before[0][:2] == stamp[:2]:
                if before[0] != stamp:
                    changes.used.append(before[1])
                    self._seen[path] = (stamp, before[1])
                continue
            entry, is_litter = _look(path, stamp, known)
            if entry is not None:
                changes.added.append(entry)
                self._seen[path] = (stamp, entry.name)
                continue
            if before is not None:  # something else lies in its place
                changes.gone.append(self._seen.pop(path)[1])
            if is_litter:
                num_removed += unlink([path])
        return Changes(changes.added, changes.used, changes.gone, num_removed)

    def mark_used(self, entries: Iterable[Entry]) -> None:
        """Let other processes and later ones know."""
        for entry in entries:
            path = segment.segment_path(self._root, entry.fingerprint, entry.name)
            with contextlib.suppress(OSError):
                os.utime(path, follow_symlinks=False)
                seen = self._seen.get(path)
                if seen is not None:  # our own use is no news
                    self._seen[path] = (_stamp(path), seen[1])

    def delete(self, entries: Iterable[Entry]) -> int:
        """Carry evictions out; how many files are gone."""
        return unlink(segment.segment_path(self._root, entry.fingerprint, entry.name) for entry in entries)


def erase(root: Path, scope: Scope) -> int:
    """Delete every segment of a scope, of whatever model and whoever published it; how many files are gone.

    To be called after the key's destruction: a segment that another process publishes still later has no known owner
    and is removed by the next scan.
    """
    return unlink(path for path, _ in _stamps(root) if (header := _header(path)) and _is_owner(scope, header))


def reclaim(root: Path) -> int:
    """Remove what earlier formats and dead processes left, and empty directories; how many files and old trees are gone."""
    num_removed = temporary.sweep(root)
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


def unlink(paths: Iterable[Path]) -> int:
    num_removed = 0
    for path in paths:
        with contextlib.suppress(OSError):
            os.unlink(path)
            num_removed += 1
    return num_removed


def describe(header: Header, scope: Scope, num_bytes: int) -> Entry:
    """The index's entry of a segment file of that size."""
    return Entry(
        fingerprint=header.fingerprint,
        tenant=scope.tenant,
        parent=header.parent_hash,
        start=header.start,
        blocks=header.block_hashes,
        style=header.layout.style,
        num_bytes=num_bytes,
        checkpoint_bytes=sum(spec.num_bytes for spec in header.layout.checkpoint(header.end).values()),
    )


def _look(path: Path, stamp: _Stamp, known: Known) -> tuple[Entry | None, bool]:
    """What a file is: (its entry, or None and whether it is litter)."""
    try:
        head = _head(path)
        header, parsed = segment.decode_head(head)
    except (ContainerError, OtherFormat):
        return None, True
    except OSError:
        return None, path.is_symlink() or not path.is_file()  # a file that cannot be read now may be some other time
    scope = next((scope for scope in known.scopes if _is_owner(scope, header)), None)
    if scope is None:
        return None, known.is_complete
    is_sound = (
        segment.segment_path(Path(), header.fingerprint, header.name).parts == path.parts[-4:]
        and segment.is_sealed(head, scope.secret(header.fingerprint))
        and len(head) + parsed.payload_bytes == stamp.num_bytes
    )
    return (describe(header, scope, stamp.num_bytes), False) if is_sound else (None, True)


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


def _stamps(root: Path) -> Iterable[tuple[Path, _Stamp]]:
    """Every file that is named like a segment."""
    base = root / segment.FORMAT_DIRECTORY
    for fingerprint in _listed(base):
        for prefix in _listed(base / fingerprint):
            for name in _listed(base / fingerprint / prefix):
                digits = name.removesuffix(SUFFIX)
                if digits != name and len(digits) == 64 and _HEX.issuperset(digits):
                    path = base / fingerprint / prefix / name
                    with contextlib.suppress(OSError):
                        yield path, _stamp(path)


def _stamp(path: Path) -> _Stamp:
    status = os.lstat(path)
    return _Stamp(status.st_ino, status.st_size, status.st_mtime_ns)


def _listed(directory: Path) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []
