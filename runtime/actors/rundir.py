"""Where do the sockets of one Runtime live, and who removes them when the host is killed?

A private 0700 directory under the first base whose name is short enough for a socket's address, whatever TMPDIR is called.
A janitor, a few lines of shell in a session of its own that hold a pipe from us, removes it when that pipe ends: however the
host dies, its directory goes. It is started before the directory is made, so there is no moment without it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import anyio
import anyio.lowlevel

from runtime.actors.exits import wait_for_exit
from runtime.errors import RunDirectoryError
from runtime.protocol.channel import MAX_KEY_BYTES, MAX_SOCKET_PATH_BYTES

PREFIX: Final = "troupe-"
_NAME_DIGITS: Final = 10
MAX_BASE_BYTES: Final = MAX_SOCKET_PATH_BYTES - (1 + len(PREFIX) + _NAME_DIGITS) - (1 + MAX_KEY_BYTES + 2)
"""What remains for the base when `/troupe-…` and `/KEY.c` follow."""
JANITOR_SECONDS: Final = 2.0

# `read` waits for the end of the pipe, into which nothing is ever written. A host that closes has tidied up itself. Otherwise its
# workers are dying; what each was writing elsewhere, a ledger of its own names. One may still make a file here, so `rm` may find
# the directory not empty and gets more than one turn.
_JANITOR: Final = """
read -r nothing
[ -e "$1" ] || exit 0
sleep 0.2
for ledger in "$1"/*.temporary; do
    [ -f "$ledger" ] && IFS= read -r path <"$ledger" || continue
    case "$path" in
        */tmp/[0-9]*-*) rm -f -- "$path" ;;
    esac
done
for turn in 1 2 3 4 5; do
    rm -rf -- "$1" 2>/dev/null
    [ -e "$1" ] || exit 0
    sleep 0.1
done
"""


def base_candidates() -> list[str]:
    """Where to look for a base, best first."""
    candidates = [os.environ.get("XDG_RUNTIME_DIR", "")]
    with contextlib.suppress(FileNotFoundError):  # not one of the usual places is writable
        candidates.append(tempfile.gettempdir())
    candidates += ["/tmp", "/var/tmp"]
    return list(dict.fromkeys(os.path.abspath(each) for each in candidates if each))


def objection(base: str) -> str | None:
    """Why `base` cannot hold run directories, as far as looking tells; None when nothing speaks against it."""
    address = os.fsencode(base)
    if len(address) > MAX_BASE_BYTES:
        return f"its name has {len(address)} bytes, and at most {MAX_BASE_BYTES} leave room for a socket's name"
    if address != base.encode(errors="replace"):
        return "its name is no UTF-8"
    try:
        mode = os.stat(base).st_mode
    except OSError as error:
        return error.strerror or str(error)
    if not stat.S_ISDIR(mode):
        return "it is no directory"
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        return "everyone may replace what is in it (world-writable without the sticky bit)"
    return None


class RunDirectory:
    """`path` exists, is ours alone and empty. `async with await RunDirectory.make() as directory`, or call `close`."""

    def __init__(self, path: Path, janitor: subprocess.Popen[bytes]) -> None:
        self.path = path
        self._janitor = janitor

    @classmethod
    async def make(cls, candidates: Sequence[str] | None = None) -> Self:
        """:raises RunDirectoryError: none of the candidates (default: `base_candidates()`) will do."""
        await anyio.lowlevel.checkpoint()
        tried: list[tuple[str, str]] = []
        for base in base_candidates() if candidates is None else candidates:
            made = cls._make_in(base)
            if not isinstance(made, str):
                return made
            tried.append((base, made))
        raise RunDirectoryError(tuple(tried))

    @classmethod
    def _make_in(cls, base: str) -> Self | str:
        """The directory, or why there can be none."""
        if (why_not := objection(base)) is not None:
            return why_not
        path = Path(base, PREFIX + secrets.token_hex(_NAME_DIGITS // 2))
        try:
            janitor = _start_janitor(path)
        except OSError as error:  # no descriptor or no process is left
            return f"no janitor can be started: {error.strerror or error}"
        try:
            path.mkdir(mode=0o700)
        except OSError as error:
            _dismiss(janitor)  # not by its pipe: what stands there, if anything does, is not ours to remove
            return error.strerror or str(error)
        if (why_not := _socket_objection(path)) is not None:
            path.rmdir()
            _dismiss(janitor)
            return why_not
        return cls(path, janitor)

    async def close(self) -> None:
        """Remove the directory with all in it, and end the janitor; takes at most `JANITOR_SECONDS`. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        assert self._janitor.stdin is not None
        self._janitor.stdin.close()
        with anyio.move_on_after(JANITOR_SECONDS, shield=True):
            await wait_for_exit(self._janitor)
        _dismiss(self._janitor)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()


def _start_janitor(path: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        ["/bin/sh", "-c", _JANITOR, "troupe-janitor", str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        env={**os.environ, "PATH": "/usr/bin:/bin"},
        start_new_session=True,
    )


def _dismiss(janitor: subprocess.Popen[bytes]) -> None:
    """Kill it with its helpers unless it has ended. A shell dies of SIGKILL at once, so waiting for it holds nobody up."""
    if janitor.poll() is None:
        os.killpg(janitor.pid, signal.SIGKILL)
        janitor.wait()
    assert janitor.stdin is not None
    janitor.stdin.close()


def _socket_objection(path: Path) -> str | None:
    """Some file systems hold directories but no sockets."""
    try:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.bind(os.fspath(path / "probe"))
        (path / "probe").unlink()
    except OSError as error:
        return f"no socket can be made in it: {error.strerror or error}"
    return None
