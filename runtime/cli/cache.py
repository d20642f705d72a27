"""`troupe cache`: look at the prefix files of a home, check them, make room, erase a tenant.

Needs no runtime, and may be used beside running ones: what it removes is a miss to them. Exit code 1 when damage, or a file that
was to be removed, is left.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

import anyio.to_thread

from runtime.allowance import prefix_root
from runtime.cli.bars import Bars, megabytes
from runtime.cli.cache_listing import list_segments, show_totals
from runtime.config import Settings
from runtime.errors import EraseFailed, InvalidRequest, shown
from runtime.prefix import scan
from runtime.prefix.index import Index, Limits
from runtime.prefix.keys import KEYS_DIRECTORY, Keyring
from runtime.prefix.segment import FORMAT_DIRECTORY
from runtime.prefix.survey import Found, damage, survey, unused_since
from runtime.protocol.ids import TenantId

_DAY_SECONDS = 24 * 60 * 60


async def main(options: argparse.Namespace) -> int:
    root = root_of(options.home)
    match options.action:
        case "ls":
            list_segments(root, as_json=options.json)
            return 0
        case "stat":
            show_totals(root, as_json=options.json)
            return 0
        case "verify":
            return await verify(root, removes=options.remove, as_json=options.json)
        case "gc":
            return collect(root, options.max_bytes, options.older_than, as_json=options.json)
        case _:
            return erase(root, TenantId(options.tenant), as_json=options.json)


def root_of(home: str | None) -> Path:
    """Of the prefix files; there need be none.

    :raises OSError: it is there and cannot be looked at, so that an empty answer would be a wrong one.
    """
    root = prefix_root(Settings() if home is None else Settings(home=Path(home)))
    if root is None:
        raise InvalidRequest("--home", "no home directory is known, or its name is no UTF-8; give another one")
    for directory in (root, root / FORMAT_DIRECTORY, root / KEYS_DIRECTORY):
        try:
            os.listdir(directory)
        except FileNotFoundError:
            continue
    return root


# -- checking ---------------------------------------------------------------------------------------------


async def verify(root: Path, *, removes: bool, as_json: bool) -> int:
    """A file that cannot be read now, or whose owner's key cannot, is told too, but never removed."""
    seen = survey(root, Keyring(root))
    bad = [(one.path, one.why.reason, one.why.detail, one.why.is_litter) for one in seen.refused]
    total_bytes, done_bytes, num_sound = sum(found.entry.num_bytes for found in seen.found), 0, 0
    with Bars() as bars:
        for found in seen.found:
            bars.update("cache", "verify", done_bytes, total_bytes)
            miss = await anyio.to_thread.run_sync(partial(damage, root, found))
            done_bytes += found.entry.num_bytes
            if miss is None:
                num_sound += 1
            else:
                bad.append((found.path, miss.reason, miss.detail.removeprefix(f"{found.path}: "), miss.reason != "unreadable"))
    if removes:
        scan.remove(path for path, _, _, is_removable in bad if is_removable)
    left = _present(path for path, _, _, _ in bad)
    rows = [{"path": str(path), "reason": reason, "detail": detail, "removed": path not in left} for path, reason, detail, _ in bad]
    if as_json:
        print(json.dumps({"sound": num_sound, "bytes": total_bytes, "bad": rows}))
    else:
        for row in rows:
            print(f"{'removed' if row['removed'] else 'BAD'} {row['path']}: {row['reason']}: {row['detail']}")
        print(f"{num_sound} segments are sound, {len(rows)} files are not" + (f", {len(left)} of them left" if rows else ""))
    return 1 if left else 0


# -- making room ------------------------------------------------------------------------------------------


def collect(root: Path, max_bytes: int | None, older_than_days: float | None, *, as_json: bool) -> int:
    if max_bytes is not None and max_bytes < 0:
        raise InvalidRequest("--max-bytes", f"got {shown(max_bytes)}; allowed: 0 or more")
    if older_than_days is not None and not (math.isfinite(older_than_days) and older_than_days >= 0):
        raise InvalidRequest("--older-than", f"got {shown(older_than_days)}; allowed: a number of days, 0 or more")
    seen = survey(root, Keyring(root))
    litter = [refused.path for refused in seen.refused if refused.why.is_litter]
    before_ns = None if older_than_days is None else time.time_ns() - int(older_than_days * _DAY_SECONDS * 1e9)
    doomed = [*litter, *(found.path for found in _victims(seen.found, max_bytes, before_ns))]
    scan.remove(doomed)
    num_leftovers = scan.reclaim(root)  # at last: also the directories that are empty now
    left = _present(doomed)
    gone = set(doomed) - left
    removed = [found for found in seen.found if found.path in gone]
    kept = [found for found in seen.found if found.path not in gone]
    result = {
        "leftovers": num_leftovers,
        "unusable": len(gone.intersection(litter)),
        "segments": len(removed),
        "bytes": sum(found.entry.num_bytes for found in removed),
        "kept_segments": len(kept),
        "kept_bytes": sum(found.entry.num_bytes for found in kept),
    }
    if as_json:
        print(json.dumps(result))
    else:
        print(f"removed {num_leftovers} leftovers, {result['unusable']} files that nobody can use", end="")
        print(f", {len(removed)} segments of {megabytes(result['bytes'])}")
        print(f"kept {len(kept)} segments of {megabytes(result['kept_bytes'])}")
    return _tell_of_left(left)


def _victims(found: Sequence[Found], max_bytes: int | None, before_ns: int | None) -> list[Found]:
    """In the order in which they are to go: what continues another before it. `found`: least recently used first."""
    victims = [] if before_ns is None else unused_since(found, before_ns)
    if max_bytes is not None:
        going = {one.entry.name for one in victims}
        by_name = {one.entry.name: one for one in found if one.entry.name not in going}
        index = Index(Limits(max_bytes))
        for one in by_name.values():
            index.add(one.entry)
        victims += [by_name[entry.name] for entry in index.excess(free_bytes=0)]
    return victims


# -- erasing ----------------------------------------------------------------------------------------------


def erase(root: Path, tenant: TenantId, *, as_json: bool) -> int:
    """:raises EraseFailed: the key cannot be removed; nothing has been changed."""
    keyring = Keyring(root)
    scopes = keyring.scopes_of(tenant)
    try:
        keyring.destroy(tenant)
    except OSError as error:
        raise EraseFailed(tenant, str(error.filename or root), error.strerror or str(error)) from error
    num_files = sum(scan.erase(root, scope) for scope in scopes)
    # What is left of it, and what a runtime published just now, has no known owner any more.
    ownerless = [one.path for one in survey(root, keyring).refused if one.why.reason == "owner" and one.why.is_litter]
    num_ownerless = scan.remove(ownerless)
    if as_json:
        print(json.dumps({"tenant": tenant, "had_key": bool(scopes), "files": num_files, "ownerless": num_ownerless}))
    else:
        key = "its key is destroyed" if scopes else "it had no key"
        print(f"erased {num_files} files of tenant {shown(tenant)}: {key}")
        if num_ownerless:
            print(f"removed {num_ownerless} files whose owner's key was gone")
    return _tell_of_left(_present(ownerless))


def _present(paths: Iterable[Path]) -> set[Path]:
    return {path for path in paths if os.path.lexists(path)}


def _tell_of_left(left: set[Path]) -> int:
    for path in sorted(left):
        print(f"troupe: {path} cannot be removed", file=sys.stderr)
    return 1 if left else 0
