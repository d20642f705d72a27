"""Uses of a segment are counted over all processes; a counter goes with its segment, and nothing ever hangs on it."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from runtime.prefix import hits, restore, scan
from runtime.prefix.hashing import BLOCK_TOKENS
from runtime.prefix.hits import Hits
from runtime.prefix.keys import Keyring
from runtime.prefix.plans import Entry
from runtime.prefix.scan import Scanner
from runtime.protocol.ids import TenantId
from tests.unit.prefix.model import draft, files, published, tokens, wanted

B = BLOCK_TOKENS
ALICE = TenantId("alice")
MADE_NS = 1_700_000_000_000_000_007


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Of a segment that was made at MADE_NS."""
    segment = published(tmp_path, draft(tokens(B), 0, B, scope=Keyring(tmp_path).scope(ALICE))).path
    os.utime(segment, ns=(MADE_NS, MADE_NS))
    return segment


def process(root: Path) -> tuple[Scanner, list[Entry]]:
    scanner = Scanner(root, Keyring(root))
    return scanner, scanner.scan().added


def test_uses_of_all_processes_add_up_and_the_time_of_making_stays(tmp_path: Path, path: Path) -> None:
    assert hits.read(path) is None
    for num_before in (0, 2):
        scanner, entries = process(tmp_path)  # another each time
        scanner.mark_used([*entries, *entries])
        assert hits.read(path) == Hits(num_before + 2, MADE_NS)
    assert path.stat().st_mtime_ns > MADE_NS
    counter = hits.hits_path(path)
    assert (counter.stat().st_mode & 0o777, counter.stat().st_size) == (0o600, hits.MAX_BYTES)
    assert files(tmp_path / "tmp") == []


@pytest.mark.parametrize(
    "contents", [b"", b"7", b"x" * hits.MAX_BYTES, b"1" * (hits.MAX_BYTES + 9), "٣".encode() * 21, b"\xff" * 42]
)
def test_a_damaged_counter_begins_again(tmp_path: Path, path: Path, contents: bytes) -> None:
    hits.hits_path(path).write_bytes(contents)
    assert hits.read(path) is None
    scanner, entries = process(tmp_path)
    scanner.mark_used(entries)
    assert hits.read(path) == Hits(1, MADE_NS)


def test_a_counter_at_its_end_stays_there(tmp_path: Path, path: Path) -> None:
    hits.hits_path(path).write_bytes(b"9" * 20 + b" " + b"0" * 20 + b"\n")
    hits.add(tmp_path, path, MADE_NS)
    assert hits.read(path) == Hits(10**20 - 1, 0)


def test_a_segment_from_before_1970_is_counted_too(tmp_path: Path, path: Path) -> None:
    hits.add(tmp_path, path, -5)
    assert hits.read(path) == Hits(1, 0)


def test_a_link_in_a_counters_place_is_not_followed(tmp_path: Path, path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    hits.hits_path(path).symlink_to(victim)
    scanner, entries = process(tmp_path)
    scanner.mark_used(entries)
    assert victim.read_bytes() == b"precious"
    assert hits.read(path) == Hits(1, MADE_NS)


def test_a_use_that_cannot_be_counted_is_told_all_the_same(tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def replace(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    scanner, entries = process(tmp_path)
    other, _ = process(tmp_path)
    monkeypatch.setattr(os, "replace", replace)
    scanner.mark_used(entries)
    assert hits.read(path) is None
    assert other.scan().used == [entry.name for entry in entries]
    assert files(tmp_path / "tmp") == []


# -- a counter goes with its segment -------------------------------------------------------------------------


def test_eviction_and_erasing_take_the_counter_along(tmp_path: Path, path: Path) -> None:
    scanner, entries = process(tmp_path)
    scanner.mark_used(entries)
    assert scanner.delete(entries) == 1
    assert files(tmp_path / "v1") == []
    keyring = Keyring(tmp_path)
    published(tmp_path, draft(tokens(B), 0, B, scope=keyring.scope(ALICE)))
    scanner.mark_used(entries)
    assert scan.erase(tmp_path, keyring.scope(ALICE)) == 1
    assert files(tmp_path / "v1") == []


def test_a_reader_that_removes_a_damaged_segment_takes_the_counter_along(tmp_path: Path, path: Path) -> None:
    original = draft(tokens(B), 0, B, scope=Keyring(tmp_path).scope(ALICE))
    hits.add(tmp_path, path, MADE_NS)
    path.write_bytes(path.read_bytes()[:-1])
    doubt = restore.check(tmp_path, wanted(original))  # which only looks
    assert doubt is not None
    assert (doubt.reason, doubt.is_removed) == ("size", False)
    assert len(files(tmp_path / "v1")) == 2
    found = restore.read(tmp_path, wanted(original))
    assert isinstance(found, restore.Miss)
    assert found.is_removed
    assert files(tmp_path / "v1") == []


def test_a_counter_without_a_segment_is_litter(tmp_path: Path, path: Path) -> None:
    scanner, entries = process(tmp_path)
    scanner.mark_used(entries)
    path.unlink()
    changes = scanner.scan()
    assert (changes.gone, changes.num_removed) == ([entry.name for entry in entries], 1)
    hits.hits_path(path).touch()
    (path.parent / "notes.hits").touch()
    assert scan.reclaim(tmp_path) == 1
    assert [file.name for file in files(tmp_path / "v1")] == ["notes.hits"]


def test_a_use_of_a_segment_that_is_gone_makes_no_counter(tmp_path: Path, path: Path) -> None:
    scanner, entries = process(tmp_path)
    path.unlink()
    scanner.mark_used(entries)
    assert files(tmp_path / "v1") == []


def test_a_segment_removed_while_it_is_counted_leaves_no_counter(
    tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scanner, entries = process(tmp_path)
    other, _ = process(tmp_path)
    real = os.replace

    def replace(source: Path, target: Path) -> None:
        other.delete(entries)  # it has nothing to remove but the segment yet
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    scanner.mark_used(entries)
    assert files(tmp_path / "v1") == []


def test_counting_beside_an_evictor_leaves_no_counter_behind(tmp_path: Path, path: Path) -> None:
    original = draft(tokens(B), 0, B, scope=Keyring(tmp_path).scope(ALICE))
    scanner, entries = process(tmp_path)
    over = threading.Event()

    def use() -> None:
        while not over.is_set():
            scanner.mark_used(entries)

    user = threading.Thread(target=use)
    user.start()
    try:
        for _ in range(100):
            scan.remove([path])
            published(tmp_path, original)
    finally:
        over.set()
        user.join()
    scan.remove([path])
    assert files(tmp_path / "v1") == []
