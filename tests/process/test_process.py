"""Real children, small ones: how they start, end, and what they leave (the census after each test looks for that)."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest

from runtime.actors import exits
from runtime.actors import process as processes
from runtime.actors.process import STDERR_TAIL_BYTES, WorkerProcess, spawn_worker

pytestmark = pytest.mark.anyio

UNTIL_EOF = "import sys; sys.stdin.read()"
"""As a worker does: ends when its host closes the pipe or dies."""
DEAF = """
import signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("deaf", file=sys.stderr, flush=True)
time.sleep(60)
"""
PATIENCE_SECONDS = 10.0
PROMPT_SECONDS = 2.0
"""The promise is 0.2 s; a busy machine may take longer, and what this bound tells apart is a minute."""


@asynccontextmanager
async def child(code: str) -> AsyncIterator[WorkerProcess]:
    async with anyio.create_task_group() as group:
        process = await spawn_worker(group, [sys.executable, "-c", code], environment=os.environ, model="chat", incarnation=3)
        try:
            yield process
        finally:
            await process.close()


async def says(process: WorkerProcess, words: str) -> None:
    with anyio.fail_after(PATIENCE_SECONDS):
        while True:
            if words in process.report("").stderr_tail:
                return
            await anyio.sleep(0.01)


async def test_an_exit_code_and_the_last_words_are_reported() -> None:
    async with child("import sys; print('no such model', file=sys.stderr); sys.exit(3)") as process:
        with anyio.fail_after(PATIENCE_SECONDS):
            assert await process.wait() == (3, None)
    report = process.report("loading")
    assert (report.model, report.pid, report.incarnation, report.phase) == ("chat", process.pid, 3, "loading")
    assert (report.exit_code, report.signal_name) == (3, None)
    assert report.stderr_tail == "no such model\n"
    assert 0 < report.uptime_seconds < PATIENCE_SECONDS


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV", "SIGTERM"])
async def test_a_signal_is_reported_by_its_name(name: str) -> None:
    async with child(f"import os, signal; os.kill(os.getpid(), signal.{name})") as process:
        with anyio.fail_after(PATIENCE_SECONDS):
            assert await process.wait() == (None, name)
    assert process.report("decode").describe().count(name) == 1


async def test_uptime_ends_with_the_process() -> None:
    async with child("pass") as process:
        await process.wait()
        at_exit = process.report("").uptime_seconds
        await anyio.sleep(0.05)
    assert process.report("").uptime_seconds == at_exit


async def test_all_who_wait_are_told() -> None:
    ends: list[object] = []
    async with child(UNTIL_EOF) as process:

        async def wait() -> None:
            ends.append(await process.wait())

        with anyio.fail_after(PATIENCE_SECONDS):
            async with anyio.create_task_group() as group:
                for _ in range(3):
                    group.start_soon(wait)
                await anyio.wait_all_tasks_blocked()
                process.kill()
        process.kill()
    assert ends == [(None, "SIGKILL")] * 3


async def test_the_exit_is_seen_though_a_grandchild_holds_the_pipes_open() -> None:
    code = (
        "import subprocess, sys, time\n"
        "held = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(f'grandchild {held.pid} runs', file=sys.stderr, flush=True)\n"
        "time.sleep(60)"
    )
    async with child(code) as process:
        await says(process, "runs")
        grandchild = int(process.report("").stderr_tail.split()[1])
        try:
            killed = time.monotonic()
            process.kill()
            await process.wait()
            await process.close()
            assert time.monotonic() - killed < PROMPT_SECONDS
        finally:
            os.kill(grandchild, signal.SIGKILL)
    assert "runs" in process.report("").stderr_tail


async def test_megabytes_of_stderr_neither_block_the_child_nor_pile_up() -> None:
    code = "import sys\nfor i in range(200_000): print('line', i, file=sys.stderr)\nprint('last words', file=sys.stderr)"
    async with child(code) as process:
        with anyio.fail_after(30):
            assert await process.wait() == (0, None)
    tail = process.report("").stderr_tail
    assert tail.endswith("line 199999\nlast words\n")
    assert len(tail) == STDERR_TAIL_BYTES


async def test_last_words_written_just_before_the_end_are_not_lost() -> None:
    async with child("import os; os.write(2, b'x' * 60_000 + b'the end'); os.kill(os.getpid(), 9)") as process:
        await process.wait()
    assert process.report("").stderr_tail.endswith("xthe end")


async def test_stderr_that_is_no_text_is_kept_readable() -> None:
    async with child("import os; os.write(2, b'\\xff\\xfe ok')") as process:
        await process.wait()
    assert process.report("").stderr_tail == "\ufffd\ufffd ok"


async def test_stdin_stays_open_until_the_ladder_closes_it_and_that_is_enough() -> None:
    async with child(UNTIL_EOF + "; sys.exit(7)") as process:
        with anyio.move_on_after(0.3):
            await process.wait()
            pytest.fail("it ended by itself")
        with anyio.fail_after(PATIENCE_SECONDS):
            await process.shut_down(60, asked=False)
        assert process.exit_code == 7


async def test_one_that_was_asked_gets_time_to_end_by_itself() -> None:
    async with child("import time; time.sleep(0.2); raise SystemExit(5)") as process:
        with anyio.fail_after(PATIENCE_SECONDS):
            await process.shut_down(60)
        assert process.exit_code == 5


async def test_the_second_rung_is_sigterm() -> None:
    async with child("import sys, time; print('up', file=sys.stderr, flush=True); time.sleep(60)") as process:
        await says(process, "up")
        await process.shut_down(0.05)
        assert process.signal_name == "SIGTERM"


async def test_the_last_rung_is_sigkill() -> None:
    async with child(DEAF) as process:
        await says(process, "deaf")
        started = time.monotonic()
        await process.shut_down(0.05)
        assert process.signal_name == "SIGKILL"
        assert time.monotonic() - started >= 0.15  # each rung got its time


async def test_a_cancelled_ladder_kills_at_once() -> None:
    async with child(DEAF) as process:
        await says(process, "deaf")
        with anyio.move_on_after(0.05) as scope:
            await process.shut_down(60)
        assert scope.cancelled_caught
        assert process.signal_name == "SIGKILL"


async def test_closing_ends_a_running_process_even_when_cancelled() -> None:
    with anyio.CancelScope() as scope:
        async with child(DEAF) as process:
            await says(process, "deaf")
            scope.cancel()
    assert process.signal_name == "SIGKILL"
    await process.close()


async def test_a_command_that_cannot_be_started_leaves_nothing() -> None:
    async with anyio.create_task_group() as group:
        with pytest.raises(FileNotFoundError):
            await spawn_worker(group, ["/no/such/python"], environment={}, model="chat", incarnation=1)


async def test_a_cancelled_start_leaves_nothing() -> None:
    async with anyio.create_task_group() as group:
        with anyio.CancelScope() as scope:
            scope.cancel()
            await spawn_worker(group, [sys.executable, "-c", UNTIL_EOF], environment=os.environ, model="chat", incarnation=1)
            await anyio.lowlevel.checkpoint()
        group.cancel_scope.cancel()
    gc.collect()  # a process left running would warn here, and warnings are errors


async def test_a_child_is_out_of_reach_of_the_terminals_interrupt() -> None:
    async with child(UNTIL_EOF) as process:
        assert os.getsid(process.pid) == process.pid


async def test_children_are_started_by_the_loops_own_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker dies with the thread that started it (PDEATHSIG), and a pool's thread ends when it is idle."""
    starters: list[int] = []

    class Recorded(subprocess.Popen[bytes]):
        def __init__(self, *args: object, **options: object) -> None:
            starters.append(threading.get_ident())
            super().__init__(*args, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(processes.subprocess, "Popen", Recorded)
    async with child("pass"):
        pass
    assert starters == [threading.get_ident()]


async def test_without_the_kernels_help_a_thread_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exits, "_exit_descriptor", lambda pid: None)
    async with child("raise SystemExit(4)") as process:
        with anyio.fail_after(PATIENCE_SECONDS):
            assert await process.wait() == (4, None)
    async with child(DEAF) as process:
        await says(process, "deaf")
        await process.shut_down(0.05)
        assert process.signal_name == "SIGKILL"
