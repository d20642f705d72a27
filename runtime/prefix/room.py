"""How much of the disk does a cache directory take right now, whoever writes in it?

What several processes know of each other is always a little old, so who writes a segment looks at the disk itself. A temporary
file has its full length from the beginning: two that write at the same moment see each other.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from runtime.prefix.hits import MAX_BYTES as HITS_BYTES
from runtime.prefix.segment import FORMAT_DIRECTORY, SUFFIX
from runtime.prefix.temporary import TEMPORARY_DIRECTORY


def num_bytes_in(root: Path) -> int:
    """Of all segments, each with a counter of its uses, and all temporary files. What cannot be looked at counts nothing."""
    sizes: dict[int, int] = {}
    # Temporary files first: one that is given its name meanwhile is then met twice, not never.
    for entry in (*_files(root / TEMPORARY_DIRECTORY), *_files(root / FORMAT_DIRECTORY)):
        if entry.name.endswith(SUFFIX) or "." not in entry.name:
            stat = entry.stat(follow_symlinks=False)
            sizes[stat.st_ino] = stat.st_size + HITS_BYTES
    return sum(sizes.values())


def _files(directory: Path | str) -> Iterator[os.DirEntry[str]]:
    """With all below. Files that vanish meanwhile are passed over."""
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
