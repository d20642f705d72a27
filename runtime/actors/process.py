"""How is a worker's process started, watched and ended?

`spawn_worker` gives a `WorkerProcess`: stdin is a pipe that stays open as long as we live (its end tells the worker that
its host is gone), stdout goes nowhere, stderr is read all the time so that the worker never blocks on it, and its last
8 KiB are kept for the `ExitReport`. What the process says through its channel is `incarnation.py`'s matter.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import anyio
from anyio.abc import TaskGroup, TaskStatus

from runtime.actors.exits import wait_for_exit
from runtime.errors import ExitReport

STDERR_TAIL_BYTES: Final = 8192
REAP_SECONDS: Final = 5.0
"""After SIGKILL. Only a process stuck inside the kernel takes longer; it is then left to the system."""
_STDERR_READ_BYTES: Final = 1 << 16
_MAX_LAST_READS: Final = 64


def worker_command(directory: Path, key: str, incarnation: int) -> list[str]:
    return [
        *(sys.executable, "-m", "runtime.worker"),
        *("--directory", os.fspath(directory), "--key", key),
        *("--incarnation", str(incarnation), "--host-pid", str(os.getpid())),
    ]


def worker_environment(base: Mapping[str, str], changes: Mapping[str, str | None], directory: Path) -> dict[str, str]:
    """The environment of a worker: the user's own, what every worker needs, then `changes` (None removes a name).

    The worker must find this very package, and no other module of the user's working directory by accident. `directory`: a
    place of ours for temporary files, where the system has none.
    """
    made = {**base, "PYTHONUNBUFFERED": "1", "PYTHONSAFEPATH": "1", "TOKENIZERS_PARALLELISM": "false"}
    if (temporary := usable_temporary_directory(base, directory)) != base.get("TMPDIR", "/tmp"):
        made["TMPDIR"] = temporary
    source = str(Path(__file__).absolute().parents[2])
    if source not in {
        sysconfig.get_path("purelib"),
        sysconfig.get_path("platlib"),
    }:  # those must not come before the standard library
        made["PYTHONPATH"] = os.pathsep.join(filter(None, (source, base.get("PYTHONPATH"))))
    for name, value in changes.items():
        if value is None:
            made.pop(name, None)
        else:
            made[name] = value
    return made


def usable_temporary_directory(base: Mapping[str, str], otherwise: Path) -> str:
    """TMPDIR, or the first usual place that can be written to: MLX compiles its CPU kernels there, and without it runs nothing."""
    usual = {*(os.path.abspath(base[name]) for name in ("TMPDIR", "TEMP", "TMP") if base.get(name)), "/tmp", "/var/tmp", "/usr/tmp"}
    try:
        found = tempfile.gettempdir()
    except FileNotFoundError:
        return str(otherwise)
    return found if found in usual else str(otherwise)  # the last place it tries is the working directory, which is the user's


class Tail:
    """The last bytes of a stream of any length."""

    def __init__(self, limit_bytes: int = STDERR_TAIL_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._bytes = bytearray()
        self._is_cut = False

    def write(self, data: bytes) -> None:
        self._bytes += data
        surplus = len(self._bytes) - self._limit_bytes
        if surplus > 0:
            del self._bytes[:surplus]
            self._is_cut = True

    def text(self) -> str:
        """Bytes that are no UTF-8 become U+FFFD; half a character at the cut is left out."""
        start = 0
        while self._is_cut and start < min(3, len(self._bytes)) and self._bytes[start] & 0xC0 == 0x80:
            start += 1
        return self._bytes[start:].decode(errors="replace")


class WorkerProcess:
    """One child process. Owned by one task, which calls `close` at last; all on the event loop's thread."""

    def __init__(self, child: subprocess.Popen[bytes], stderr: int, model: str, incarnation: int) -> None:
        self.pid = child.pid
        self.model = model
        self.incarnation = incarnation
        self._child = child
        self._stderr = stderr
        self._tail = Tail()
        self._started = time.monotonic()
        self._ended: float | None = None
        self._pump_scope = anyio.CancelScope()
        self._pump_ended = anyio.Event()
        self._closed = False

    @property
    def exit_code(self) -> int | None:
        """None while it runs (as far as `wait` has seen), and when a signal ended it."""
        code = self._child.returncode
        return None if code is None or code < 0 else code

    @property
    def signal_name(self) -> str | None:
        code = self._child.returncode
        if code is None or code >= 0:
            return None
        try:
            return signal.Signals(-code).name
        except ValueError:  # a real-time signal
            return f"signal {-code}"

    async def wait(self) -> tuple[int | None, str | None]:
        """Wait for the end of the process; gives (exit_code, signal_name), one of them None. Any number of tasks may wait."""
        await wait_for_exit(self._child)
        self._note_end()
        return self.exit_code, self.signal_name

    def kill(self) -> None:
        """SIGKILL, at once. Harmless when it has ended."""
        self._child.kill()

    def end_softly(self) -> None:
        """`worker/stacks.py` says what it does then. Harmless when it has ended."""
        self._child.send_signal(signal.SIGUSR1)

    async def shut_down(self, grace_seconds: float, *, asked: bool = True) -> None:
        """The ladder: wait for the process, close its stdin, SIGTERM, SIGKILL; up to `grace_seconds` on each rung.

        Returns as soon as it is gone. asked: it was told to stop by other means (`Shutdown`), so first it gets time to do so.
        Cancelling goes to the last rung at once: in either case the process has ended when this is left.
        """
        try:
            if asked and await self._ends_within(grace_seconds):
                return
            self._close_stdin()
            if await self._ends_within(grace_seconds):
                return
            self._child.terminate()
            await self._ends_within(grace_seconds)
        finally:
            await self._end_now()

    async def close(self) -> None:
        """End the process if it has not, and give back everything it held. Bounded, not to be cancelled, idempotent."""
        if self._closed:
            return
        self._closed = True
        await self._end_now()
        self._close_stdin()
        self._pump_scope.cancel()
        with anyio.CancelScope(shield=True):
            await self._pump_ended.wait()
        self._read_what_is_there()
        os.close(self._stderr)

    def report(self, phase: str) -> ExitReport:
        """What is known about the end (after `close`: everything)."""
        end = self._ended if self._ended is not None else time.monotonic()
        return ExitReport(
            model=self.model,
            pid=self.pid,
            incarnation=self.incarnation,
            exit_code=self.exit_code,
            signal_name=self.signal_name,
            phase=phase,
            uptime_seconds=end - self._started,
            stderr_tail=self._tail.text(),
        )

    async def _ends_within(self, seconds: float) -> bool:
        with anyio.move_on_after(seconds):
            await self.wait()
        return self._child.returncode is not None

    async def _end_now(self) -> None:
        if self._child.poll() is None:
            self._child.kill()
            with anyio.move_on_after(REAP_SECONDS, shield=True):
                await self.wait()
        self._note_end()

    def _note_end(self) -> None:
        if self._ended is None and self._child.returncode is not None:
            self._ended = time.monotonic()

    def _close_stdin(self) -> None:
        assert self._child.stdin is not None
        self._child.stdin.close()

    async def _pump(self, *, task_status: TaskStatus[None]) -> None:
        """Reads stderr until its end. Runs in the spawner's task group."""
        try:
            with self._pump_scope:
                task_status.started()
                while True:
                    await anyio.wait_readable(self._stderr)
                    if not self._read_stderr():
                        return
        finally:
            self._pump_ended.set()

    def _read_stderr(self) -> bool:
        """Whether more may come."""
        try:
            data = os.read(self._stderr, _STDERR_READ_BYTES)
        except BlockingIOError:
            return True
        self._tail.write(data)
        return bool(data)

    def _read_what_is_there(self) -> None:
        """The last words. A grandchild may hold the pipe open and go on writing, hence the bound."""
        for _ in range(_MAX_LAST_READS):
            try:
                data = os.read(self._stderr, _STDERR_READ_BYTES)
            except BlockingIOError:
                return
            if not data:
                return
            self._tail.write(data)


async def spawn_worker(
    group: TaskGroup,
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    model: str,
    incarnation: int,
) -> WorkerProcess:
    """Start `command` (see `worker_command`, `worker_environment`) in a session of its own, out of reach of Ctrl-C.

    `group` runs the task that reads its stderr; it ends with the process or with `close`.

    :raises OSError: the process cannot be started; nothing is left.
    """
    child, stderr = _start(command, environment)
    process = WorkerProcess(child, stderr, model, incarnation)
    try:
        await group.start(process._pump, name=f"stderr of {model}")
    except BaseException:
        process._pump_ended.set()
        await process.close()
        raise
    return process


def _start(command: Sequence[str], environment: Mapping[str, str]) -> tuple[subprocess.Popen[bytes], int]:
    """The child and the reading end of its stderr. Blocks for the few milliseconds of a spawn: see `exits.py` for why here."""
    reading, writing = os.pipe()
    try:
        os.set_blocking(reading, False)
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=writing,
            env=environment,
            start_new_session=True,
        )
    except BaseException:
        os.close(reading)
        raise
    finally:
        os.close(writing)
    return child, reading
