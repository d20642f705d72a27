"""How does a file come to its final name whole or not at all, and who may remove the leftovers of the dead?

    <root>/tmp/<pid>-<random>             small
    <root>/tmp/<pid>-<random>-<bytes>     it will have so many bytes, which count from the beginning (`room`)

A file under tmp/ is locked (flock) by who writes it, from its making to its end. The kernel drops the lock when its holder
dies in whatever way, so a lock that can be had means a dead owner. A pid would not tell: pids are used again, and
processes in two containers that share a directory do not see each other's. The pid in the name is for people.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

TEMPORARY_DIRECTORY: Final = "tmp"
_ATTEMPTS: Final = 4
_WRITE_BYTES: Final = 4 << 20


def make_directory(path: Path) -> None:
    """With all above it, each 0700 when new.

    :raises OSError: it cannot be made.
    """
    for directory in (*reversed(path.parents), path):
        with contextlib.suppress(FileExistsError):
            if not directory.is_dir():
                os.mkdir(directory, 0o700)


@contextlib.contextmanager
def temporary_file(root: Path, ledger: Path | None = None, *, num_bytes: int | None = None) -> Iterator[tuple[int, Path]]:
    """A new, empty, locked file 0600: (descriptor, path). Removed at the end, whatever happened; a hard link to it stays.

    ledger: a file that names it before it is made, for who tidies up when this process and its host have been killed.
    num_bytes: to be put down in its name.

    :raises OSError: it cannot be made.
    """
    descriptor, path = _locked_file(root, ledger, "" if num_bytes is None else f"-{num_bytes}")
    try:
        yield descriptor, path
    finally:
        # Removed before the lock goes: nobody meets it unlocked.
        with contextlib.suppress(OSError):
            os.unlink(path)
        with contextlib.suppress(OSError):  # a late write error; what matters has been fsynced
            os.close(descriptor)


def _locked_file(root: Path, ledger: Path | None, suffix: str) -> tuple[int, Path]:
    directory = root / TEMPORARY_DIRECTORY
    for _ in range(_ATTEMPTS):
        make_directory(directory)
        path = directory / f"{os.getpid()}-{secrets.token_hex(8)}{suffix}"
        if ledger is not None:
            with contextlib.suppress(OSError):  # its directory may be going already
                ledger.write_text(f"{path}\n", encoding="utf-8")
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_nlink:
                return descriptor, path
        except BlockingIOError:
            pass
        except OSError:
            os.close(descriptor)
            with contextlib.suppress(OSError):
                os.unlink(path)
            raise
        # Between making and locking it a sweeper came by, and took it for a leftover. It removes it.
        os.close(descriptor)
    raise FileNotFoundError(f"files made in {directory} vanish at once")


def announced_bytes(name: str) -> int:
    """What a temporary file of this name will have, as far as its name tells; else 0."""
    fields = name.split("-")
    return int(fields[2]) if len(fields) == 3 and fields[2].isascii() and fields[2].isdigit() else 0


def write_whole(descriptor: int, parts: Iterable[bytes | memoryview]) -> None:
    """:raises OSError: not everything could be written and brought to the disk."""
    for part in parts:
        view = memoryview(part)
        place = 0
        while place < len(view):
            place += os.write(descriptor, view[place : place + _WRITE_BYTES])
    os.fsync(descriptor)


def give_name(temporary: Path, final: Path) -> bool:
    """Give a written temporary file its final name too. False when there is such a file already, which is left as it is.

    :raises OSError: it cannot be done.
    """
    for _ in range(_ATTEMPTS):
        with contextlib.suppress(FileNotFoundError):  # someone tidied the empty directory away at this moment
            return _link(temporary, final)
    return _link(temporary, final)


def _link(temporary: Path, final: Path) -> bool:
    make_directory(final.parent)
    try:
        os.link(temporary, final)
    except FileExistsError:
        return False
    return True


def sweep(root: Path) -> int:
    """Remove files under tmp/ whose owner is dead; how many it were. What cannot be looked at is left."""
    num_removed = 0
    try:
        names = os.listdir(root / TEMPORARY_DIRECTORY)
    except OSError:
        return 0
    for name in names:
        path = root / TEMPORARY_DIRECTORY / name
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(path)
            num_removed += 1
        except OSError:  # its owner lives, or it is gone already
            pass
        finally:
            os.close(descriptor)
    return num_removed
