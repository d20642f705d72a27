"""No worker outlives its host, however the host ends and whatever the worker is doing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from runtime.protocol.commands import FakeScript, Fault, Prefill
from runtime.worker.watchdog import HOST_GONE_EXIT_CODE
from tests.process.live_worker import ROOT, live_worker, row, spawn

pytestmark = pytest.mark.anyio

STATES = ["spawned", "connected", "import", "load", "prepare", "prefill", "decode"]


def is_alive(pid: int) -> bool:
    """A zombie that nobody has reaped yet is dead."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    listing = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout
    return bool(listing.strip()) and not listing.strip().startswith("Z")


def wait_until_dead(pid: int, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while is_alive(pid):
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


@pytest.mark.parametrize("state", STATES)
def test_a_killed_host_takes_its_worker_along(state: str, tmp_path: Path) -> None:
    host = subprocess.Popen(
        [sys.executable, "-m", "tests.process.doomed_host", state, str(tmp_path)], stdout=subprocess.PIPE, cwd=ROOT
    )
    try:
        assert host.stdout is not None
        pid = int(host.stdout.readline())
        if state != "spawned":
            assert is_alive(pid)
        host.send_signal(signal.SIGKILL)
        assert wait_until_dead(pid, 2.0)
    finally:
        host.kill()
        host.communicate()


async def test_the_end_of_stdin_ends_a_worker_that_hangs() -> None:
    async with live_worker(FakeScript(), Fault("decode", "hang")) as worker:
        worker.send(Prefill((row(1, [65]),)))
        assert worker.process.stdin is not None
        worker.process.stdin.close()
        assert await worker.exit_code() == HOST_GONE_EXIT_CODE
        worker.process.stdin = None


async def test_a_worker_is_deaf_to_ctrl_c() -> None:
    async with live_worker() as worker:
        worker.process.send_signal(signal.SIGINT)
        worker.send(Prefill((row(1, [65]),)))
        await worker.end_of(1)


def test_a_worker_whose_host_has_another_pid_ends_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: real + 1)
    process = spawn(tmp_path)
    monkeypatch.undo()
    try:
        assert process.wait(10) == HOST_GONE_EXIT_CODE
    finally:
        process.kill()
        process.communicate()
