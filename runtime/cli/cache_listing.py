"""`troupe cache ls` and `stat`: how do the prefix files of a home look to a person, and to a program?"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from runtime.cli.bars import megabytes
from runtime.errors import shown
from runtime.prefix import scan
from runtime.prefix.keys import Keyring
from runtime.prefix.survey import Found, Survey, survey
from runtime.protocol.ids import TenantId

SHARED: Final = "shared"
_SHORT_DIGITS: Final = 12
_UNITS: Final = ((24 * 60 * 60, "d"), (60 * 60, "h"), (60, "min"))


def list_segments(root: Path, *, as_json: bool) -> None:
    seen, now_ns = survey(root, Keyring(root)), time.time_ns()
    if as_json:
        print(json.dumps([_as_json(found, now_ns) for found in seen.found]))
        return
    rows = [
        (
            _short(found.header.fingerprint),
            tenant_name(found.scope.tenant),
            f"{found.header.start}..{found.header.end}",
            megabytes(found.entry.num_bytes),
            str(found.num_hits),
            age(now_ns - found.used_ns),
            age(now_ns - found.made_ns),
        )
        for found in seen.found
    ]
    if rows:
        print(table(("model", "tenant", "tokens", "size", "hits", "unused", "age"), rows))
    _tell_of_refused(seen)


def _as_json(found: Found, now_ns: int) -> dict[str, Any]:
    """`tenant`: null for the shared scope. `bytes`: with the counter of hits."""
    entry = found.entry
    return {
        "fingerprint": entry.fingerprint,
        "tenant": entry.tenant,
        "name": entry.name.hex(),
        "parent": None if entry.parent is None else entry.parent.hex(),
        "start": entry.start,
        "end": entry.end,
        "style": entry.style,
        "bytes": entry.num_bytes,
        "hits": found.num_hits,
        "unused_seconds": _seconds(now_ns - found.used_ns),
        "age_seconds": _seconds(now_ns - found.made_ns),
        "path": str(found.path),
    }


def show_totals(root: Path, *, as_json: bool) -> None:
    seen, now_ns = survey(root, Keyring(root)), time.time_ns()
    groups: dict[tuple[str, TenantId | None], list[Found]] = {}
    for found in seen.found:
        groups.setdefault((found.header.fingerprint, found.scope.tenant), []).append(found)
    ordered = sorted(groups.items(), key=lambda item: (item[0][0], item[0][1] is not None, item[0][1] or ""))
    free_bytes = scan.free_bytes(root)
    if as_json:
        parts = [{"fingerprint": group[0], "tenant": group[1], **_totals(members, now_ns)} for group, members in ordered]
        refused = {"files": len(seen.refused), "bytes": sum(one.num_bytes for one in seen.refused)}
        whole = {"root": str(root), "free_bytes": free_bytes, **_totals(seen.found, now_ns)}
        print(json.dumps({**whole, "refused": refused, "parts": parts}))
        return
    rows = [(_short(group[0]), tenant_name(group[1]), *_cells(_totals(members, now_ns))) for group, members in ordered]
    rows.append(("all", "", *_cells(_totals(seen.found, now_ns))))
    print(table(("model", "tenant", "segments", "size", "hits", "oldest"), rows))
    print(f"{megabytes(free_bytes)} free on the disk of {root}")
    _tell_of_refused(seen)


def _totals(members: Sequence[Found], now_ns: int) -> dict[str, Any]:
    """`oldest_seconds`: since the first was made; null when there is none."""
    return {
        "segments": len(members),
        "bytes": sum(found.entry.num_bytes for found in members),
        "hits": sum(found.num_hits for found in members),
        "oldest_seconds": max((_seconds(now_ns - found.made_ns) for found in members), default=None),
    }


def _cells(totals: dict[str, Any]) -> tuple[str, str, str, str]:
    oldest = totals["oldest_seconds"]
    return (
        str(totals["segments"]),
        megabytes(totals["bytes"]),
        str(totals["hits"]),
        "-" if oldest is None else age(int(oldest * 1e9)),
    )


def _tell_of_refused(seen: Survey) -> None:
    if seen.refused:
        print(f"{len(seen.refused)} files cannot be used ('troupe cache verify')", file=sys.stderr)


# -- how it looks -----------------------------------------------------------------------------------------


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The first two columns are names, the others numbers."""
    widths = [max(len(row[place]) for row in (heads, *rows)) for place in range(len(heads))]
    lines = []
    for row in (heads, *rows):
        cells = [
            cell.ljust(width) if place < 2 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def tenant_name(tenant: TenantId | None) -> str:
    """In quotes when it could be taken for something else, or would move the cursor."""
    if tenant is None:
        return SHARED
    is_plain = tenant.isprintable() and tenant == tenant.strip() and tenant not in ("", SHARED)
    return tenant if is_plain else shown(tenant)


def age(nanoseconds: int) -> str:
    """In whole units, rounded down. A clock that was ahead counts as now."""
    seconds = int(_seconds(nanoseconds))
    for unit_seconds, unit in _UNITS:
        if seconds >= unit_seconds:
            return f"{seconds // unit_seconds} {unit}"
    return f"{seconds} s"


def _seconds(nanoseconds: int) -> float:
    return max(0.0, nanoseconds / 1e9)


def _short(fingerprint: str) -> str:
    return fingerprint[:_SHORT_DIGITS]
