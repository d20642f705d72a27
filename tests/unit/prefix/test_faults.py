"""Disks that fill, directories that vanish, processes that die at any step: a miss or an unpublished segment, nothing worse."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from runtime.prefix import publish, restore, scan, temporary
from runtime.prefix.hashing import BLOCK_TOKENS
from runtime.prefix.keys import Keyring
from runtime.prefix.publish import Published, Rejected
from runtime.prefix.restore import Miss, Segment
from runtime.protocol.ids import TenantId
from tests.unit.prefix.model import contents, draft, files, published, tokens, wanted, written

B = BLOCK_TOKENS
ROOT = Path(__file__).parents[3]
PROMPT = tokens(2 * B)


def child(*arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "tests.unit.prefix.publishing_child", *arguments], cwd=ROOT)


STEPS = [
    ("mkdir", 1, "before"),
    ("mkdir", 1, "after"),
    ("open", 1, "before"),
    ("open", 1, "after"),
    ("flock", 1, "after"),
    ("write", 1, "before"),
    ("write", 1, "inside"),
    ("write", 3, "inside"),
    ("fsync", 1, "before"),
    ("fsync", 1, "after"),
    ("link", 1, "before"),
    ("link", 1, "after"),
    ("unlink", 1, "after"),
]


def test_a_publisher_killed_at_any_step_leaves_a_whole_segment_or_none(tmp_path: Path) -> None:
    original = draft(PROMPT, 0, B)
    for at_once in (STEPS[:7], STEPS[7:]):
        dying = [(step, child("die", str(tmp_path / "-".join(map(str, step))), *map(str, step))) for step in at_once]
        for step, process in dying:
            assert process.wait(60) == -signal.SIGKILL, step
    for step in STEPS:
        root = tmp_path / "-".join(map(str, step))
        found = restore.read(root, wanted(original))
        is_linked = step in (("link", 1, "after"), ("unlink", 1, "after"))
        if is_linked:
            assert isinstance(found, Segment), step
            assert contents(found) == written(original)
        else:
            assert isinstance(found, Miss)
            assert found.reason == "absent"
        left = files(root / "tmp")
        is_open = STEPS.index(("open", 1, "after")) <= STEPS.index(step) <= STEPS.index(("link", 1, "after"))
        assert len(left) == is_open, step
        assert scan.reclaim(root) == len(left)
        assert files(root / "tmp") == []
        assert published(root, original).is_new != is_linked  # the next publisher is not held up
        assert contents(restore.read(root, wanted(original))) == written(original)  # type: ignore[arg-type]


def test_a_living_publishers_file_is_not_swept(tmp_path: Path) -> None:
    with temporary.temporary_file(tmp_path) as (_, path):
        assert temporary.sweep(tmp_path) == 0
        assert path.exists()
    assert files(tmp_path) == []
    litter = tmp_path / "tmp" / "1-0123456789abcdef"  # process 1 lives, but it is not this file's owner
    litter.touch()
    assert temporary.sweep(tmp_path) == 1


def test_a_sweeper_that_comes_between_making_and_locking_only_costs_another_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, swept = fcntl.flock, []

    def flock(descriptor: int, operation: int) -> None:
        if not swept:
            swept.append(True)
            for path in files(tmp_path):
                path.unlink()
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    assert isinstance(publish.publish(tmp_path, draft(PROMPT, 0, B)), Published)
    assert len(files(tmp_path)) == 1


def test_a_file_that_a_sweeper_holds_at_that_moment_only_costs_another_try(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, refused = fcntl.flock, []

    def flock(descriptor: int, operation: int) -> None:
        if not refused:
            refused.append(True)
            raise BlockingIOError(errno.EAGAIN, "held")
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    assert isinstance(publish.publish(tmp_path, draft(PROMPT, 0, B)), Published)


@pytest.mark.parametrize(
    ("call", "number", "reason"),
    [
        ("mkdir", errno.EROFS, "read_only"),
        ("mkdir", errno.EACCES, "read_only"),
        ("open", errno.EROFS, "read_only"),
        ("open", errno.EMFILE, "io"),
        ("write", errno.ENOSPC, "no_space"),
        ("write", errno.EDQUOT, "no_space"),
        ("write", errno.EIO, "io"),
        ("fsync", errno.ENOSPC, "no_space"),
        ("fsync", errno.EIO, "io"),
        ("link", errno.ENOSPC, "no_space"),
        ("link", errno.ENOENT, "io"),
        ("link", errno.EROFS, "read_only"),
    ],
)
def test_a_publish_that_fails_says_so_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int, reason: str
) -> None:
    def fail(*arguments: Any, **options: Any) -> Any:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(os, call, fail)
        result = publish.publish(tmp_path, draft(PROMPT, 0, B))
    assert isinstance(result, Rejected)
    assert result.reason == reason
    assert files(tmp_path) == []
    assert isinstance(publish.publish(tmp_path, draft(PROMPT, 0, B)), Published)


def test_a_full_disk_in_the_middle_of_a_file_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, num_calls = os.write, 0

    def write(descriptor: int, data: Any) -> int:
        nonlocal num_calls
        num_calls += 1
        if num_calls > 2:
            raise OSError(errno.ENOSPC, "full")
        return real(descriptor, data[:5])

    monkeypatch.setattr(os, "write", write)
    result = publish.publish(tmp_path, draft(PROMPT, 0, B))
    assert isinstance(result, Rejected)
    assert files(tmp_path) == []


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", lambda descriptor, data: real(descriptor, data[:1000]))
        published(tmp_path, draft(PROMPT, 0, B))
    found = restore.read(tmp_path, wanted(draft(PROMPT, 0, B)))
    assert isinstance(found, Segment)


@pytest.mark.parametrize("call", ["open", "pread", "preadv"])
def test_a_disk_that_cannot_be_read_is_a_miss_and_keeps_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    original = draft(PROMPT, 0, B)
    path = published(tmp_path, original).path

    def fail(*arguments: Any, **options: Any) -> Any:
        raise OSError(errno.EIO, "I/O error")

    with monkeypatch.context() as patched:
        patched.setattr(os, call, fail)
        found = restore.read(tmp_path, wanted(original))
    assert isinstance(found, Miss)
    assert (found.reason, found.is_removed) == ("unreadable", False)
    assert path.exists()


def test_a_file_cut_short_while_it_is_read_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = draft(PROMPT, 0, B)
    path = published(tmp_path, original).path
    real = os.preadv

    def cut(descriptor: int, *arguments: Any) -> int:
        os.truncate(path, 4000)
        return real(descriptor, *arguments)

    monkeypatch.setattr(os, "preadv", cut)
    found = restore.read(tmp_path, wanted(original))
    assert isinstance(found, Miss)
    assert found.reason in ("size", "checksum")


def test_a_reader_does_not_remove_the_sound_file_that_took_the_place_of_a_damaged_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = draft(PROMPT, 0, B)
    path = published(tmp_path, original).path
    sound = path.read_bytes()
    path.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
    real = os.preadv

    def replaced(descriptor: int, *arguments: Any) -> int:
        (tmp_path / "new").write_bytes(sound)
        os.replace(tmp_path / "new", path)
        return real(descriptor, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(os, "preadv", replaced)
        found = restore.read(tmp_path, wanted(original))
    assert isinstance(found, Miss)
    assert not found.is_removed
    assert isinstance(restore.read(tmp_path, wanted(original)), Segment)


def test_a_root_that_cannot_be_made_disturbs_nobody(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    root = tmp_path / "file" / "cache"  # below a file, nothing can be made, whoever one is
    result = publish.publish(root, draft(PROMPT, 0, B))
    assert isinstance(result, Rejected)
    found = restore.read(root, wanted(draft(PROMPT, 0, B)))
    assert isinstance(found, Miss)
    keyring = Keyring(root)
    assert keyring.scope(TenantId("a")) == keyring.scope(TenantId("a"))
    assert scan.Scanner(root, keyring).scan() == scan.Changes()
    assert scan.reclaim(root) == 0
    assert scan.free_bytes(root) > 0


def test_a_directory_deleted_under_readers_and_writers_disturbs_nobody(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    originals = [draft(PROMPT, start, start + B) for start in (0, B)]
    over = threading.Event()

    def delete() -> None:
        while not over.is_set():
            shutil.rmtree(root, ignore_errors=True)

    deleter = threading.Thread(target=delete)
    deleter.start()
    try:
        for _ in range(40):
            for original in originals:
                assert isinstance(publish.publish(root, original), Published | Rejected)
                found = restore.read(root, wanted(original))
                assert isinstance(found, Miss) or contents(found) == written(original)
    finally:
        over.set()
        deleter.join()
    assert isinstance(publish.publish(root, originals[0]), Published)


def test_readers_beside_an_evictor_get_all_or_nothing(tmp_path: Path) -> None:
    original = draft(PROMPT, 0, B)
    path = published(tmp_path, original).path
    over = threading.Event()

    def evict() -> None:
        while not over.is_set():
            scan.remove([path])
            publish.publish(tmp_path, original)

    evictor = threading.Thread(target=evict)
    evictor.start()
    try:
        for _ in range(100):
            found = restore.read(tmp_path, wanted(original))
            assert isinstance(found, Segment) or found.reason == "absent"
            assert isinstance(found, Miss) or contents(found) == written(original)
    finally:
        over.set()
        evictor.join()


def test_two_processes_publish_twenty_prefixes_each_on_one_root(tmp_path: Path) -> None:
    first, second = child("many", str(tmp_path), "0", "20"), child("many", str(tmp_path), "10", "30")
    assert [first.wait(60), second.wait(60)] == [0, 0]
    assert len(files(tmp_path)) == 60
    for seed in range(30):
        for start in (0, B):
            original = draft(tokens(2 * B, seed), start, start + B)
            found = restore.read(tmp_path, wanted(original))
            assert isinstance(found, Segment)
            assert contents(found) == written(original)
