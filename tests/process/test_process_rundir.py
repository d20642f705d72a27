from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import anyio
import pytest

from runtime.actors import rundir
from runtime.actors.rundir import RunDirectory
from runtime.errors import RunDirectoryError
from runtime.protocol.channel import MAX_KEY_BYTES, HostChannel
from tests.support import census
from tests.support.waiting import until

pytestmark = pytest.mark.anyio
GONE_SECONDS = 2.0


@pytest.fixture
def short() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="base-", dir="/tmp") as made:
        yield Path(made)


def names_in(directory: Path) -> list[str]:
    return os.listdir(directory)


def janitors() -> list[int]:
    return [pid for pid, command in census.processes().items() if "troupe-janitor" in command]


async def test_the_directory_is_private_empty_and_gone_after_close_with_its_janitor(short: Path) -> None:
    async with await RunDirectory.make([str(short)]) as directory:
        assert directory.path.parent == short
        assert stat.S_IMODE(directory.path.stat().st_mode) == 0o700
        assert names_in(directory.path) == []
        await until(lambda: len(janitors()) == 1)  # a process that has just become the shell shows no command line for a moment
        (directory.path / "lib").mkdir()
        (directory.path / "lib" / "link").symlink_to("/etc")
        (directory.path / "socket").touch()
    assert names_in(short) == []
    assert janitors() == []
    await directory.close()
    assert names_in(Path("/etc"))


@pytest.mark.parametrize("name", ["模型 与 演员", "Модель", "with 'quotes\" and $(spaces)", "cafe\u0301", "-rf"])
async def test_sockets_work_below_temp_directories_of_any_name(short: Path, name: str) -> None:
    base = short / name
    base.mkdir()
    async with await RunDirectory.make([str(base)]) as directory:
        assert directory.path.parent == base
        with HostChannel(directory.path, "k" * MAX_KEY_BYTES):
            pass
    assert names_in(base) == []


async def test_a_too_long_missing_or_refusing_base_is_passed_over(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = short / ("d" * 80)
    refusing = short / "refusing"
    good = short / "good"
    for each in (long, refusing, good):
        each.mkdir()
    _refuse_below(refusing, monkeypatch)
    bases = [str(long), str(short / "missing"), str(refusing), str(good)]
    async with await RunDirectory.make(bases) as directory:
        assert directory.path.parent == good
        await until(lambda: len(janitors()) == 1)


async def test_when_nothing_fits_the_error_names_all_that_was_tried(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refusing = short / "refusing"
    refusing.mkdir()
    _refuse_below(refusing, monkeypatch)
    with pytest.raises(RunDirectoryError) as caught:
        await RunDirectory.make([str(short / "missing"), str(refusing), "/" + "x" * 90])
    assert [directory for directory, _ in caught.value.tried] == [str(short / "missing"), str(refusing), "/" + "x" * 90]
    for words in (str(refusing), "No such file", "Permission denied", "bytes", "TMPDIR"):
        assert words in str(caught.value)
    assert names_in(refusing) == []


def _refuse_below(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an unwritable directory does, also to root."""
    mkdir = Path.mkdir

    def refuse(self: Path, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        if self.parent == base:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))
        mkdir(self, mode, parents, exist_ok)

    monkeypatch.setattr(Path, "mkdir", refuse)


async def test_a_file_system_without_sockets_is_passed_over(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rundir, "_socket_objection", lambda path: "no socket can be made in it")
    with pytest.raises(RunDirectoryError, match="no socket"):
        await RunDirectory.make([str(short)])
    assert names_in(short) == []


async def test_no_descriptor_left_is_an_error_of_ours_that_says_so(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    for name, played in (
        ("subprocess", SimpleNamespace(Popen=refuse, PIPE=-1, DEVNULL=-3)),
        ("socket", SimpleNamespace(socket=refuse, AF_UNIX=1)),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(rundir, name, played)
            with pytest.raises(RunDirectoryError, match="Too many open files"):
                await RunDirectory.make([str(short)])
        assert names_in(short) == []


async def test_a_directory_that_already_stands_there_is_never_removed(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rundir.secrets, "token_hex", lambda count: "0" * count * 2)
    foreign = short / "troupe-0000000000"
    foreign.mkdir()
    (foreign / "precious").touch()
    with pytest.raises(RunDirectoryError):
        await RunDirectory.make([str(short)])
    await anyio.sleep(0.2)  # time in which a janitor would have tidied
    assert (foreign / "precious").exists()


async def test_a_hanging_janitor_does_not_hold_up_the_close(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rundir, "JANITOR_SECONDS", 0.1)
    monkeypatch.setattr(rundir, "_JANITOR", "sleep 60")
    directory = await RunDirectory.make([str(short)])
    with anyio.fail_after(10):
        await directory.close()
    assert names_in(short) == []
    assert janitors() == []


_HOST = """
import anyio, os, sys
from runtime.actors.process import spawn_worker
from runtime.actors.rundir import RunDirectory
from runtime.protocol.channel import HostChannel

async def main():
    async with await RunDirectory.make([sys.argv[1]]) as directory, anyio.create_task_group() as group:
        with HostChannel(directory.path, "w1.1"):
            code = "import sys; sys.stdin.read()"
            for number in range(3):
                await spawn_worker(group, [sys.executable, "-c", code], environment=os.environ, model="chat", incarnation=1)
            print(directory.path, flush=True)
            await anyio.sleep_forever()

anyio.run(main, backend=sys.argv[2])
"""


@contextmanager
def host(base: Path, backend: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, "-c", _HOST, str(base), backend], stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def is_soon(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + GONE_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def everything_is_gone_soon(base: Path) -> bool:
    return is_soon(lambda: not names_in(base) and not census.processes())


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_when_the_host_is_killed_its_directory_its_janitor_and_its_children_go(short: Path, backend: str) -> None:
    with host(short, backend) as process:
        assert process.stdout is not None
        path = Path(process.stdout.readline().strip())
        assert path.parent == short
        assert names_in(path) == ["w1.1.e"]
        assert is_soon(lambda: len(census.processes()) == 1 + 1 + 3)  # the host, its janitor, its children
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert everything_is_gone_soon(short)


@pytest.mark.parametrize("delay_seconds", [0.0, 0.001, 0.005, 0.02])
def test_however_early_the_host_is_killed_nothing_stays(short: Path, delay_seconds: float) -> None:
    with host(short, "asyncio") as process:
        while not names_in(short) and process.poll() is None:
            pass  # the directory comes after the imports, with its janitor already there
        time.sleep(delay_seconds)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert everything_is_gone_soon(short)
