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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

import runtime
from runtime.librarian import Librarian
from runtime.prefix import hits, room, temporary
from runtime.prefix.hashing import BLOCK_TOKENS as B
from runtime.prefix.publish import Published, Rejected, publish
from runtime.testing import fake_model
from tests.process.test_prefixes import ask, house, prompt, settings, written
from tests.support.waiting import until
from tests.unit.prefix.model import draft, tokens

pytestmark = pytest.mark.anyio

BUDGET_BYTES = 60_000
"""Some six files of two blocks of the fake model."""


def _there(root: Path) -> dict[int, int]:
    """Bytes of all files but keys, by inode."""
    found: dict[int, int] = {}
    for directory, directories, names in os.walk(root):
        directories[:] = [name for name in directories if name != "keys"]
        for name in names:
            with contextlib.suppress(OSError):
                stat = os.lstat(os.path.join(directory, name))
                found[stat.st_ino] = stat.st_size
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


async def _fill_again_and_again(runtimes: Sequence[runtime.Runtime], home: Path) -> list[int]:
    """What was there meanwhile."""
    for rt in runtimes:
        for number in range(2):
            await rt.load(fake_model(f"model {number}"))
    with watched(home / "prefix") as seen:
        for turn in range(5):
            async with anyio.create_task_group() as group:
                for number, rt in enumerate(runtimes):
                    group.start_soon(_fill, rt, 1000 * turn + 100 * number, 8 // len(runtimes))
            await anyio.sleep(0.05)
    for rt in runtimes:
        await until(lambda rt=rt: not rt._scheduler.state.book.requests)  # type: ignore[misc]
        rt._scheduler.state.validate()
    return seen


async def test_two_workers_of_one_runtime_never_exceed_the_budget_and_write_all_there_is_room_for(tmp_path: Path) -> None:
    async with runtime.Runtime(settings(tmp_path, prefix_disk_bytes=BUDGET_BYTES)) as rt:
        seen = await _fill_again_and_again([rt], tmp_path)
        book = rt._scheduler.state.book
        await until(lambda: not any(model.promises for model in book.models.values()))
        prefixes = rt.stats().scheduler.prefixes
    assert BUDGET_BYTES // 2 < max(seen) <= BUDGET_BYTES
    assert prefixes.evictions > 10
    assert "over_budget" not in prefixes.rejected, "the host promised room that it did not make"


async def test_two_runtimes_never_exceed_the_budget_together(tmp_path: Path) -> None:
    given = settings(tmp_path, prefix_disk_bytes=BUDGET_BYTES)
    async with runtime.Runtime(given) as one, runtime.Runtime(given) as other:
        seen = await _fill_again_and_again([one, other], tmp_path)
        published = sum(rt.stats().scheduler.prefixes.published for rt in (one, other))
    assert BUDGET_BYTES // 2 < max(seen) <= BUDGET_BYTES
    assert published > 8


async def test_nothing_is_evicted_for_more_room_than_a_file_takes(tmp_path: Path) -> None:
    async with house(tmp_path / "one") as rt:
        await ask(rt.tenant("a"), prompt(1, 600))
        await written(rt, tmp_path / "one", 1)
        num_bytes = rt.stats().scheduler.prefixes.file_bytes
    async with house(tmp_path / "three", prefix_disk_bytes=3 * num_bytes + 512) as rt:
        for seed in range(3):
            await ask(rt.tenant("a"), prompt(seed, 600))
            await written(rt, tmp_path / "three", seed + 1)
        assert rt.stats().scheduler.prefixes.evictions == 0
        await ask(rt.tenant("a"), prompt(3, 600))
        await until(lambda: rt.stats().scheduler.prefixes.published == 4)
        assert rt.stats().scheduler.prefixes.evictions == 1


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


def test_two_that_write_at_the_same_moment_see_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = publish(tmp_path, draft(tokens(3 * B), 0, B))
    assert isinstance(first, Published)
    limit_bytes = room.num_bytes_in(tmp_path) + first.num_bytes + first.num_bytes // 2
    make = temporary.temporary_file

    @contextmanager
    def beside_another(root: Path, ledger: Path | None = None, *, num_bytes: int | None = None) -> Iterator[tuple[int, Path]]:
        with make(root, num_bytes=num_bytes), make(root, ledger, num_bytes=num_bytes) as (descriptor, path):
            yield descriptor, path
            assert os.fstat(descriptor).st_size == 0, "written without room"

    monkeypatch.setattr(temporary, "temporary_file", beside_another)
    refused = publish(tmp_path, draft(tokens(3 * B), B, 2 * B), limit_bytes=limit_bytes)
    assert isinstance(refused, Rejected)
    assert refused.reason == "over_budget"
    monkeypatch.undo()
    assert isinstance(publish(tmp_path, draft(tokens(3 * B), B, 2 * B), limit_bytes=limit_bytes), Published)


def test_counters_of_uses_are_reckoned_with_before_during_and_after(tmp_path: Path) -> None:
    first = publish(tmp_path, draft(tokens(3 * B), 0, B))
    assert isinstance(first, Published)
    before = room.num_bytes_in(tmp_path)
    hits.add(tmp_path, first.path, 0)
    assert room.num_bytes_in(tmp_path) == before >= sum(_there(tmp_path).values()) + hits.MAX_BYTES
    first.path.unlink()
    assert room.num_bytes_in(tmp_path) == sum(_there(tmp_path).values()) == hits.MAX_BYTES


def _is_writing(home: Path, pid: int) -> bool:
    """Whether a worker has a temporary file."""
    with contextlib.suppress(FileNotFoundError):
        return any(name.startswith(f"{pid}-") for name in os.listdir(home / "prefix" / "tmp"))
    return False


def _stopped_while_writing(home: Path, pid: int, is_over: threading.Event) -> bool:
    """Stop a worker's process in the middle of a file; False when `is_over` came first."""
    while not is_over.is_set():
        if _is_writing(home, pid):
            os.kill(pid, signal.SIGSTOP)
            time.sleep(0.02)  # it stops in the meantime
            if _is_writing(home, pid):
                return True
            os.kill(pid, signal.SIGCONT)
    return False


async def test_what_a_killed_worker_was_writing_goes_while_the_runtime_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, anyio_backend: str
) -> None:
    if anyio_backend != "asyncio":
        pytest.skip("files are the same on any event loop")
    monkeypatch.setitem(Librarian.__init__.__kwdefaults__, "scan_seconds", 1000.0)  # no look will chance upon it
    async with house(tmp_path) as rt:
        pid = rt.models()[0].pid
        assert pid is not None
        is_over = threading.Event()

        async def write() -> None:
            with contextlib.suppress(runtime.WorkerError):
                for seed in range(1000):
                    await ask(rt.tenant("a"), prompt(seed, 2100))

        async with anyio.create_task_group() as group:
            group.start_soon(write)
            try:
                assert await anyio.to_thread.run_sync(_stopped_while_writing, tmp_path, pid, is_over, abandon_on_cancel=True)
            finally:
                is_over.set()
            os.kill(pid, signal.SIGKILL)
        await until(lambda: not _is_writing(tmp_path, pid))
        await until(lambda: rt.models()[0].state == "ready")
        await ask(rt.tenant("a"), prompt())


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
