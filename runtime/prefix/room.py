"""How much of the disk does a cache directory take right now, whoever writes in it?

What several processes know of each other is always a little old, so who writes a segment looks at the disk itself, after it has
made its temporary file and before it writes into it. The name of that says how long it will be: of two that come at the same moment
at least one sees the other, and perhaps both give up.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from runtime.prefix.hits import HITS_SUFFIX, RESERVED_BYTES
from runtime.prefix.segment import FORMAT_DIRECTORY, SUFFIX
from runtime.prefix.temporary import TEMPORARY_DIRECTORY, announced_bytes


def num_bytes_in(root: Path) -> int:
    """Of all segments and temporary files, each with room for a counter of uses, and of counters that have outlived their
    segment. Keys apart. What cannot be looked at counts nothing."""
    sizes: dict[int, int] = {}
    # Temporary files first: one that is given its name meanwhile is then met twice, not never.
    for entry in _files(root / TEMPORARY_DIRECTORY):
        num_bytes = max(entry.stat(follow_symlinks=False).st_size, announced_bytes(entry.name))
        sizes[entry.inode()] = num_bytes + RESERVED_BYTES
    counters: dict[str, int] = {}
    segments: set[str] = set()
    for entry in _files(root / FORMAT_DIRECTORY):
        name, dot, suffix = entry.name.partition(".")
        num_bytes = entry.stat(follow_symlinks=False).st_size
        if dot + suffix == HITS_SUFFIX:
            counters[name] = num_bytes
            continue
        if dot + suffix == SUFFIX:
            segments.add(name)
        sizes[entry.inode()] = num_bytes + RESERVED_BYTES
    return sum(sizes.values()) + sum(num_bytes for name, num_bytes in counters.items() if name not in segments)


def _files(directory: Path | str) -> Iterator[os.DirEntry[str]]:
    """With all below, their sizes looked up already. Files that vanish meanwhile are passed over."""
    try:
        entries = list(os.scandir(directory))
    except OSError:
        return
    for entry in entries:
        try:
            if entry.is_dir(follow_symlinks=False):
                yield from _files(entry.path)
            elif entry.is_file(follow_symlinks=False) and entry.stat(follow_symlinks=False):
                yield entry
        except OSError:
            continue
