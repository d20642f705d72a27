"""What is left behind of a worker that got stuck, for people who want to know why? One directory of small files for each stall.

Stacks, states, counts, and the kinds of the last messages: never a prompt, a token or a key.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

MAX_REPORTS: Final = 20
MAX_STACKS_BYTES: Final = 256 << 10
_FROM_PROC: Final = ("status", "wchan", "stack", "syscall")


@dataclass(frozen=True, slots=True)
class Stall:
    """messages: the last ones to and from it, as (seconds before now, "to" or "from", kind). stacks: the file it writes them to."""

    model: str
    pid: int
    incarnation: int
    complaint: str
    phase: str
    messages: tuple[tuple[float, str, str], ...]
    stacks: Path


def write_report(directory: Path, stall: Stall, house: dict[str, Any]) -> Path | None:
    """A new directory (0700) in `directory` with files (0600); the oldest beyond MAX_REPORTS go. None where nothing can be written.

    house: what the host knows, of plain values. Blocks on the disk: for a thread.
    """
    try:
        os.makedirs(directory, mode=0o700, exist_ok=True)
        name = f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{stall.pid}-{stall.incarnation}"
        place = directory / name
        place.mkdir(mode=0o700)
        facts = {
            "model": stall.model,
            "pid": stall.pid,
            "incarnation": stall.incarnation,
            "complaint": stall.complaint,
            "phase": stall.phase,
            "messages": stall.messages,
            "house": house,
        }
        _write(place / "stall.json", json.dumps(facts, indent=1, default=repr).encode())
        _write(place / "stacks.txt", _read(stall.stacks))
        for part in _FROM_PROC:
            if found := _read(Path(f"/proc/{stall.pid}/{part}")):
                _write(place / f"{part}.txt", found)
        _forget_old(directory)
        return place
    except OSError:
        return None


def _write(path: Path, data: bytes) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)


def _read(path: Path) -> bytes:
    """Its end, empty where it cannot be read."""
    try:
        return path.read_bytes()[-MAX_STACKS_BYTES:]
    except OSError:
        return b""


def _forget_old(directory: Path) -> None:
    reports = sorted(entry for entry in directory.iterdir() if entry.is_dir())
    for old in reports[:-MAX_REPORTS]:
        shutil.rmtree(old, ignore_errors=True)
