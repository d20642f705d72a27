"""How much may prefixes take on this machine, where do their files lie, and how many workers may compute at once? Settles what
`Settings` leaves to the machine."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Final, Literal

import msgspec

from runtime.config import Settings
from runtime.prefix.scan import free_bytes

PREFIX_DIRECTORY: Final = "prefix"
MAX_DISK_BYTES: Final = 32 << 30
_MEMORY_PART: Final = 16
_DISK_PART: Final = 10
_ASSUMED_MEMORY_BYTES: Final = 8 << 30
"""Where the system does not tell."""


def prefix_root(settings: Settings) -> Path | None:
    """`<home>/prefix`, absolute; not made here. None where no files can be kept: nobody can say where home is, or its name cannot
    be sent to a worker."""
    try:
        home = settings.home_directory()
        if home.parts[:1] == ("~",):  # the user has no home: a directory of that name would be made where the app happens to run
            return None
        root = home.absolute() / PREFIX_DIRECTORY
        str(root).encode()
    except (OSError, RuntimeError, UnicodeEncodeError):
        return None
    return root


def settled(settings: Settings, root: Path | None) -> Settings:
    """With numbers for what was None: three quarters of the memory for everything and a sixteenth of it for prefixes, a tenth
    of what is free on the root's disk but at most 32 GiB. And with the device lease that this system gets by itself.

    Looks at the disk, so it may block: for a thread. Without a root no files are written or read.
    """
    memory_bytes, disk_bytes = settings.prefix_memory_bytes, settings.prefix_disk_bytes
    if memory_bytes is None:
        memory_bytes = physical_memory_bytes() // _MEMORY_PART
    if root is None:
        disk_bytes = 0
    elif disk_bytes is None:
        disk_bytes = min(MAX_DISK_BYTES, free_bytes(root) // _DISK_PART)
    budget_bytes = settings.memory_budget_bytes
    if budget_bytes is None:
        budget_bytes = physical_memory_bytes() * 3 // 4
    return msgspec.structs.replace(
        settings,
        memory_budget_bytes=budget_bytes,
        prefix_memory_bytes=memory_bytes,
        prefix_disk_bytes=disk_bytes,
        device_lease=num_device_slots(settings.device_lease, sys.platform),
    )


def num_device_slots(device_lease: int | Literal["auto"] | None, platform: str) -> int | None:
    """Of several processes that drive one Metal device at once, crashes and hangs are known; on a CPU the cores share it well."""
    if device_lease == "auto":
        return 1 if platform == "darwin" else None
    return device_lease


def physical_memory_bytes() -> int:
    """Of the machine."""
    try:
        num_pages, page_bytes = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return _ASSUMED_MEMORY_BYTES
    return num_pages * page_bytes if num_pages > 0 and page_bytes > 0 else _ASSUMED_MEMORY_BYTES
