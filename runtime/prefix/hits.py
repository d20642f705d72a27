"""How often was a segment used, by all processes there have been, and since when is it there?

    <root>/v1/<fingerprint>/<hh>/<hash>.hits    0600: uses in 20 digits, a blank, its making in 20 digits (ns since 1970), a newline

For people, and nothing depends on it: a counter that is damaged begins again, of two processes that count at the same moment one
may be lost, and where nothing can be written nothing is counted. A counter goes with its segment. Who deletes removes the segment
first and the counter after it; who counts looks for the segment again after it has written. So whichever is first, none stays
behind, but for a process that dies between the two: a counter without a segment is litter.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final, NamedTuple

from runtime.prefix import temporary
from runtime.prefix.segment import SUFFIX, open_regular

HITS_SUFFIX: Final = ".hits"
_DIGITS: Final = 20
_LAST: Final = 10**_DIGITS - 1
MAX_BYTES: Final = 2 * (_DIGITS + 1)
"""Of a counter, always."""
RESERVED_BYTES: Final = 2 * MAX_BYTES
"""What a segment is counted with beside its own bytes, so that counting never exceeds a budget: the counter, and the one that is
being written to replace it."""


class Hits(NamedTuple):
    """made_ns: when the segment was published, as its time of last change told at the first use."""

    num_hits: int
    made_ns: int


def hits_path(path: Path) -> Path:
    """Of the segment file `path`."""
    return path.with_name(path.name.removesuffix(SUFFIX) + HITS_SUFFIX)


def read(path: Path) -> Hits | None:
    """Of the segment file `path`; None when there is no counter, or none that makes sense."""
    try:
        descriptor = open_regular(hits_path(path))
        try:
            contents = os.read(descriptor, MAX_BYTES + 1)
        finally:
            os.close(descriptor)
    except OSError:
        return None
    first, last = contents[:_DIGITS], contents[_DIGITS + 1 : -1]
    if len(contents) != MAX_BYTES or contents != first + b" " + last + b"\n" or not (first + last).isdigit():
        return None
    return Hits(int(first), int(last))


def add(root: Path, path: Path, changed_ns: int, num_uses: int = 1) -> None:
    """Count uses of the segment file `path` in the cache directory `root`. changed_ns: its time of last change before them.

    :raises OSError: it could not be counted.
    """
    before = read(path) or Hits(0, max(changed_ns, 0))
    after = Hits(min(before.num_hits + num_uses, _LAST), before.made_ns)
    counter = hits_path(path)
    with temporary.temporary_file(root) as (descriptor, written):
        # Not brought to the disk at once: after a power cut it may count from the beginning, which is worth no wait.
        os.write(descriptor, f"{after.num_hits:0{_DIGITS}d} {after.made_ns:0{_DIGITS}d}\n".encode())
        os.replace(written, counter)
    if not os.path.lexists(path):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(counter)
