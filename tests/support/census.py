"""What is there: processes that this test run started (also those whose parent died), our descriptors, our run directories."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MARK = "TROUPE_TEST_CENSUS"
RUN_DIRECTORY_PREFIX = "troupe-"


@contextlib.contextmanager
def mark() -> Iterator[None]:
    """Every process started inside inherits the mark in its environment."""
    before = os.environ.get(MARK)
    if before is None:
        os.environ[MARK] = uuid.uuid4().hex
    try:
        yield
    finally:
        if before is None:
            del os.environ[MARK]


@dataclass(frozen=True)
class Census:
    """processes: pid → command line. descriptors: number → what it is. directories: run directories."""

    processes: dict[int, str]
    descriptors: dict[int, str]
    directories: frozenset[Path]

    def __bool__(self) -> bool:
        return bool(self.processes or self.descriptors or self.directories)

    def beyond(self, before: Census) -> Census:
        return Census(
            {pid: command for pid, command in self.processes.items() if pid not in before.processes},
            {number: what for number, what in self.descriptors.items() if before.descriptors.get(number) != what},
            self.directories - before.directories,
        )


def take(directory: Path) -> Census:
    """`directory`: where run directories are looked for."""
    return Census(processes(), _descriptors(), run_directories(directory))


def wait_until_gone(before: Census, directory: Path, seconds: float) -> Census:
    """What is there beyond `before`, once that is nothing or `seconds` have passed: ends of processes take their moment."""
    end = time.monotonic() + seconds
    while (left := take(directory).beyond(before)) and time.monotonic() < end:
        time.sleep(0.01)
    return left


def processes() -> dict[int, str]:
    """Processes of this run other than this one: those with the mark, and all our children (a zombie shows no environment)."""
    found = {}
    if sys.platform == "linux":
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                with contextlib.suppress(OSError):
                    if _parent(entry) == os.getpid() or _has_mark(entry):
                        found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        return found
    listing = subprocess.run(["ps", "-axo", "pid=,ppid=,command="], capture_output=True, text=True, check=True).stdout
    for line in listing.splitlines():
        pid, parent, command = line.split(None, 2)
        if int(parent) == os.getpid() and not command.startswith("ps "):
            found[int(pid)] = command
    return found


def _parent(entry: Path) -> int:
    # The command name, in parentheses, may hold spaces and parentheses itself.
    return int((entry / "stat").read_text().rpartition(")")[2].split()[1])


def _has_mark(entry: Path) -> bool:
    return f"{MARK}={os.environ.get(MARK)}".encode() in (entry / "environ").read_bytes().split(b"\0")


def _descriptors() -> dict[int, str]:
    folder = "/proc/self/fd" if sys.platform == "linux" else "/dev/fd"
    found = {}
    for name in os.listdir(folder):
        with contextlib.suppress(OSError):  # the listing's own
            found[int(name)] = os.readlink(f"{folder}/{name}") if sys.platform == "linux" else str(os.fstat(int(name)).st_mode)
    return found


def run_directories(directory: Path) -> frozenset[Path]:
    return frozenset(path for path in directory.iterdir() if path.name.startswith(RUN_DIRECTORY_PREFIX))
