"""The directory of prefix files never takes more than its budget, at whatever moment one looks and whoever writes.

And what the dead were writing goes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import pytest

import runtime
from runtime.prefix import room
from runtime.prefix.hashing import BLOCK_TOKENS as B
from runtime.prefix.publish import Published, Rejected, publish
from runtime.testing import fake_model
from tests.process.test_prefixes import ask, house, prompt, segments, settings
from tests.support.waiting import until
from tests.unit.prefix.model import draft, tokens

pytestmark = pytest.mark.anyio

BUDGET_BYTES = 60_000
"""Some six files of two blocks of the fake model."""


def _there(root: Path) -> dict[int, int]:
    """Bytes that files really take, by inode; a temporary file has its length before it has its contents."""
    found: dict[int, int] = {}
    for path in root.rglob("*"):
        with contextlib.suppress(OSError):
            stat = path.lstat()
            if path.is_file() and path.parent.parent.parent.name != "keys":
                found[stat.st_ino] = stat.st_size if path.suffix else min(stat.st_size, stat.st_blocks * 512)
    return found


@contextmanager
def watched(root: Path) -> Iterator[list[int]]:
    """What was there, at some thousand moments: the files of two looks in a row were all there at some time in between."""
    seen: list[int] = []
    is_over = threading.Event()

    def watch() -> None:
        before: dict[int, int] = {}
        while not is_over.is_set():
            now = _there(root)
            seen.append(sum(min(before[inode], now[inode]) for inode in before.keys() & now.keys()))
            before = now
            time.sleep(0.0005)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        is_over.set()
        thread.join()


async def _fill(rt: runtime.Runtime, first_seed: int, num_prompts: int) -> None:
    async def one(number: int) -> None:
        await rt.tenant("a").generate(f"model {number % 2}", tokens=prompt(first_seed + number, 600), max_tokens=2, ignore_eos=True)

    async with anyio.create_task_group() as group:
        for number in range(num_prompts):
            group.start_soon(one, number)


async def test_two_runtimes_with_two_workers_each_never_exceed_the_budget_together(tmp_path: Path, anyio_backend: str) -> None:
    given = settings(tmp_path, prefix_disk_bytes=BUDGET_BYTES)
    async with runtime.Runtime(given) as one, runtime.Runtime(given) as other:
        for rt in (one, other):
            for number in range(2):
                await rt.load(fake_model(f"model {number}"))
        with watched(tmp_path / "prefix") as seen:
            for turn in range(6):
                async with anyio.create_task_group() as group:
                    group.start_soon(_fill, one, 1000 * turn, 4)
                    group.start_soon(_fill, other, 1000 * turn + 500, 4)
                await anyio.sleep(0.1)
        published = sum(rt.stats().scheduler.prefixes.published for rt in (one, other))
    assert published > 8
    assert max(seen) <= BUDGET_BYTES
    assert max(seen) > BUDGET_BYTES // 2, "nothing was near the edge"


def test_a_segment_for_which_there_is_no_room_is_rejected_and_leaves_nothing(tmp_path: Path) -> None:
    first = publish(tmp_path, draft(tokens(3 * B), 0, B), limit_bytes=1 << 30)
    assert isinstance(first, Published)
    taken = room.num_bytes_in(tmp_path)
    assert taken >= first.num_bytes
    refused = publish(tmp_path, draft(tokens(3 * B), B, 2 * B), limit_bytes=taken + first.num_bytes // 2)
    assert isinstance(refused, Rejected)
    assert refused.reason == "over_budget"
    assert room.num_bytes_in(tmp_path) == taken
    assert isinstance(publish(tmp_path, draft(tokens(3 * B), B, 2 * B), limit_bytes=3 * taken), Published)


async def test_what_a_dead_process_was_writing_goes_while_the_runtime_lives(tmp_path: Path) -> None:
    async with house(tmp_path) as rt:
        await ask(rt.tenant("a"), prompt())
        await until(lambda: len(segments(tmp_path)) == 2)
        left = tmp_path / "prefix" / "tmp" / "12345-feedfeedfeedfeed"
        left.parent.mkdir(exist_ok=True)
        left.write_bytes(b"x" * 1000)
        await until(lambda: not left.exists())


_HOST = """
import sys, time
import anyio
from pathlib import Path
from runtime.actors.rundir import RunDirectory

async def main():
    async with await RunDirectory.make() as directory:
        (directory.path / "w1.1.temporary").write_text(sys.argv[1] + "\\n")
        print(directory.path, flush=True)
        await anyio.sleep_forever()

anyio.run(main)
"""


def test_what_the_worker_of_a_killed_host_was_writing_goes_with_its_directory(tmp_path: Path) -> None:
    left = tmp_path / "some home" / "prefix" / "tmp" / f"{os.getpid()}-feedfeedfeedfeed"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"x" * 1000)
    with subprocess.Popen([sys.executable, "-c", _HOST, str(left)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        path = Path(process.stdout.readline().strip())
        assert path.is_dir()
        process.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 2.0
    while (left.exists() or path.exists()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left.exists()
    assert not path.exists()
