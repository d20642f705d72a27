"""`troupe cache`: what a person and a script see of the prefix files, and what is left on the disk after it."""

from __future__ import annotations

import json
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

from runtime.cli.cache import main
from runtime.cli.cache_listing import age, table, tenant_name
from runtime.cli.parser import parse
from runtime.errors import EraseFailed, InvalidRequest
from runtime.prefix import hits, restore, scan
from runtime.prefix.hashing import BLOCK_TOKENS, Scope, shared_scope
from runtime.prefix.keys import Keyring
from runtime.prefix.layout import Layout
from runtime.prefix.restore import Miss
from runtime.prefix.scan import Scanner
from runtime.protocol.ids import TenantId
from tests.unit.prefix.model import (
    DENSE_LAYOUT,
    MIXED_LAYOUT,
    STATE_LAYOUT,
    draft,
    files,
    fingerprint,
    published,
    tokens,
    wanted,
)

B = BLOCK_TOKENS
ALICE, BOB = TenantId("alice"), TenantId("bob")
DAY_SECONDS = 24 * 60 * 60


class Shelf:
    """A home with prefix files, and the command line over it."""

    def __init__(self, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.home = home
        self.root = home / "prefix"
        self.capsys = capsys
        self.errors = ""

    def scope(self, tenant: TenantId | None) -> Scope:
        return shared_scope() if tenant is None else Keyring(self.root).scope(tenant)

    def publish(
        self, tenant: TenantId | None, start: int, end: int, *, seed: int = 0, layout: Layout = MIXED_LAYOUT, days: float = 0.0
    ) -> Path:
        """days: since it was made."""
        path = published(self.root, draft(tokens(4 * B, seed), start, end, scope=self.scope(tenant), layout=layout)).path
        made_ns = time.time_ns() - int(days * DAY_SECONDS * 1e9)
        os.utime(path, ns=(made_ns, made_ns))
        return path

    def use(self, *paths: Path) -> None:
        scanner = Scanner(self.root, Keyring(self.root))
        entries = {entry.name.hex(): entry for entry in scanner.scan().added}
        scanner.mark_used([entries[path.stem] for path in paths])

    def segments(self) -> set[Path]:
        return {path for path in files(self.root / "v1") if path.suffix == ".safetensors"}

    def say(self, *arguments: str, code: int = 0) -> str:
        options = parse(["cache", *arguments, "--home", str(self.home)])
        assert options.command == "cache"
        assert anyio.run(partial(main, options)) == code
        said = self.capsys.readouterr()
        self.errors = said.err
        return said.out

    def tell(self, *arguments: str, code: int = 0) -> Any:
        said = self.say(*arguments, "--json", code=code)
        assert said.count("\n") == 1
        return json.loads(said)


@pytest.fixture
def shelf(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Shelf:
    return Shelf(tmp_path, capsys)


# -- looking ----------------------------------------------------------------------------------------------


def test_a_home_without_prefixes_has_none_and_gets_none(shelf: Shelf) -> None:
    assert shelf.say("ls") == ""
    assert shelf.tell("ls") == []
    assert shelf.tell("stat")["segments"] == 0
    assert shelf.tell("stat")["free_bytes"] > 0
    assert shelf.tell("verify")["bad"] == []
    assert shelf.tell("gc", "--max-bytes", "0", "--older-than", "0")["segments"] == 0
    assert shelf.tell("erase", "--tenant", "nobody") == {"tenant": "nobody", "had_key": False, "files": 0, "ownerless": 0}
    assert list(shelf.home.iterdir()) == []


def test_each_segment_has_a_row_least_recently_used_first(shelf: Shelf) -> None:
    parent = shelf.publish(ALICE, 0, B, days=3)
    child = shelf.publish(ALICE, B, 3 * B, days=2)
    common = shelf.publish(None, 0, 2 * B, layout=DENSE_LAYOUT, days=1)
    shelf.use(parent)
    shelf.use(parent)
    rows = shelf.tell("ls")
    assert [(row["path"], row["tenant"], row["start"], row["end"], row["hits"]) for row in rows] == [
        (str(child), "alice", B, 3 * B, 0),
        (str(common), None, 0, 2 * B, 0),
        (str(parent), "alice", 0, B, 2),
    ]
    assert (rows[0]["parent"], rows[0]["name"]) == (parent.stem, child.stem)
    assert rows[1]["parent"] is None
    assert [row["fingerprint"] for row in rows] == [fingerprint(), fingerprint(DENSE_LAYOUT), fingerprint()]
    assert [row["style"] for row in rows] == ["mixed", "dense", "mixed"]
    assert [row["age_seconds"] // DAY_SECONDS for row in rows] == [2, 1, 3]
    assert rows[0]["unused_seconds"] == rows[0]["age_seconds"]
    assert rows[2]["unused_seconds"] < DAY_SECONDS
    assert [row["bytes"] for row in rows] == [path.stat().st_size + hits.RESERVED_BYTES for path in (child, common, parent)]
    assert [line.split() for line in shelf.say("ls").splitlines()] == [
        ["model", "tenant", "tokens", "size", "hits", "unused", "age"],
        f"{fingerprint()[:12]} alice 256..768 0.0 MB 0 2 d 2 d".split(),
        f"{fingerprint(DENSE_LAYOUT)[:12]} shared 0..512 0.0 MB 0 1 d 1 d".split(),
        f"{fingerprint()[:12]} alice 0..256 0.0 MB 2 0 s 3 d".split(),
    ]
    assert shelf.errors == ""


def test_totals_are_told_for_each_model_and_tenant(shelf: Shelf) -> None:
    shelf.publish(ALICE, 0, B, days=5)
    shelf.use(shelf.publish(ALICE, B, 2 * B, days=1))
    shelf.publish(BOB, 0, B)
    shelf.publish(None, 0, B)
    shelf.publish(None, 0, B, layout=DENSE_LAYOUT)
    shelf.publish(BOB, 0, B, seed=1).write_bytes(b"junk")
    rows, totals = shelf.tell("ls"), shelf.tell("stat")
    parts = {(part["fingerprint"], part["tenant"]): part for part in totals["parts"]}
    assert set(parts) == {(fingerprint(), ALICE), (fingerprint(), BOB), (fingerprint(), None), (fingerprint(DENSE_LAYOUT), None)}
    of_alice = parts[fingerprint(), ALICE]
    assert (of_alice["segments"], of_alice["hits"], of_alice["oldest_seconds"] // DAY_SECONDS) == (2, 1, 5)
    assert of_alice["bytes"] == sum(row["bytes"] for row in rows if row["tenant"] == ALICE)
    for what in ("segments", "bytes", "hits"):
        assert totals[what] == sum(part[what] for part in totals["parts"])
    assert totals["segments"] == len(rows) == 5
    assert totals["refused"] == {"files": 1, "bytes": 4}
    assert totals["root"] == str(shelf.root)
    lines = shelf.say("stat").splitlines()
    assert lines[-2].split()[:2] == ["all", "5"]
    assert lines[-1].endswith(f"free on the disk of {shelf.root}")
    assert "1 files cannot be used" in shelf.errors


def test_looking_changes_nothing(shelf: Shelf) -> None:
    path = shelf.publish(ALICE, 0, B)
    shelf.use(path)
    shelf.publish(ALICE, 0, B, seed=1).write_bytes(b"junk")
    (path.parent / f"{'0' * 64}.hits").touch()
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files(shelf.home)}
    shelf.say("ls")
    shelf.say("stat")
    shelf.say("verify", code=1)
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files(shelf.home)} == before


def test_a_directory_that_cannot_be_looked_at_is_no_empty_one(shelf: Shelf) -> None:
    shelf.root.write_text("a file")
    with pytest.raises(NotADirectoryError):
        shelf.say("ls")


# -- checking ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [DENSE_LAYOUT, MIXED_LAYOUT, STATE_LAYOUT])
def test_sound_segments_of_any_model_and_scope_are_found_sound(shelf: Shelf, layout: Layout) -> None:
    for tenant in (ALICE, None):
        for start, end in ((0, B), (B, 3 * B), (3 * B, 4 * B)):
            shelf.publish(tenant, start, end, layout=layout)
    assert shelf.tell("verify")["sound"] == 6
    assert shelf.say("verify") == "6 segments are sound, 0 files are not\n"


def test_every_kind_of_damage_is_told_and_removed_when_asked(shelf: Shelf) -> None:
    sound = shelf.publish(ALICE, 0, B)
    damaged = {}
    for seed, reason in enumerate(("checksum", "seal", "size", "malformed", "owner"), 1):
        path = damaged[reason] = shelf.publish(ALICE, 0, B, seed=seed)
        shelf.use(path)
    contents = {reason: bytearray(path.read_bytes()) for reason, path in damaged.items()}
    contents["checksum"][-1] ^= 1
    contents["seal"][contents["seal"].index(b'"seal":"') + 8] ^= 1
    del contents["size"][-1:]
    del contents["malformed"][100:]
    place = contents["owner"].index(b'owner\\":\\"') + 10
    contents["owner"][place] = ord("1") if contents["owner"][place] == ord("0") else ord("0")
    for reason, path in damaged.items():
        path.write_bytes(contents[reason])
    misplaced = damaged["name"] = sound.with_name(f"{'2' * 64}.safetensors")
    misplaced.write_bytes(sound.read_bytes())
    told = shelf.tell("verify", code=1)
    assert told["sound"] == 1
    assert {row["reason"]: row["path"] for row in told["bad"]} == {reason: str(path) for reason, path in damaged.items()}
    assert not any(row["removed"] for row in told["bad"])
    assert all(path.exists() for path in damaged.values())
    said = shelf.say("verify", "--remove").splitlines()
    assert all(any(line.startswith(f"removed {path}: {reason}: ") for line in said) for reason, path in damaged.items())
    assert said[-1] == "1 segments are sound, 6 files are not, 0 of them left"
    assert files(shelf.root / "v1") == [sound]
    assert shelf.tell("verify")["bad"] == []


@pytest.mark.parametrize("where", ["head", "tensors"])
def test_a_bit_flipped_anywhere_is_found(shelf: Shelf, where: str) -> None:
    path = shelf.publish(ALICE, 0, B, layout=STATE_LAYOUT)
    sound = path.read_bytes()
    head_bytes = 8 + int.from_bytes(sound[:8], "little")
    places = range(0, head_bytes, 97) if where == "head" else range(head_bytes, len(sound), 397)
    for place in places:
        damaged = bytearray(sound)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        (row,) = shelf.tell("verify", code=1)["bad"]
        assert row["path"] == str(path)


def test_what_cannot_be_read_is_told_and_stays(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    path = shelf.publish(ALICE, 0, B)
    real = os.pread

    def pread(descriptor: int, num_bytes: int, place: int) -> bytes:
        if num_bytes == 8:
            raise OSError(5, "Input/output error")
        return real(descriptor, num_bytes, place)

    with monkeypatch.context() as patched:
        patched.setattr(os, "pread", pread)
        (row,) = shelf.tell("verify", "--remove", code=1)["bad"]
    assert (row["path"], row["reason"], row["removed"]) == (str(path), "unreadable", False)
    assert shelf.tell("verify")["sound"] == 1


# -- making room ------------------------------------------------------------------------------------------


def test_without_an_order_only_what_nobody_can_use_goes(shelf: Shelf) -> None:
    kept = shelf.publish(ALICE, 0, B, days=1000)
    shelf.use(kept)
    shelf.publish(ALICE, 0, B, seed=1).write_bytes(b"junk")
    published(shelf.root, draft(tokens(B), 0, B, scope=shelf.scope(BOB)))
    Keyring(shelf.root).destroy(BOB)
    (shelf.root / "v0" / "x").mkdir(parents=True)
    (shelf.root / "tmp").mkdir(exist_ok=True)
    (shelf.root / "tmp" / "1-dead").touch()
    told = shelf.tell("gc")
    assert (told["leftovers"], told["unusable"], told["segments"], told["kept_segments"]) == (2, 2, 0, 1)
    assert set(files(shelf.root / "v1")) == {kept, hits.hits_path(kept)}
    assert files(shelf.root / "tmp") == []
    assert not (shelf.root / "v0").exists()
    assert shelf.say("gc").splitlines()[0].startswith("removed 0 leftovers, 0 files that nobody can use, 0 segments of ")


def test_a_bound_takes_the_least_recently_used_and_no_parent_before_its_child(shelf: Shelf) -> None:
    parent = shelf.publish(ALICE, 0, B, days=9)
    child = shelf.publish(ALICE, B, 2 * B, days=1)
    old, new = shelf.publish(BOB, 0, B, days=5), shelf.publish(None, 0, B, days=0.5)
    size = sum(row["bytes"] for row in shelf.tell("ls") if row["path"] != str(old))
    told = shelf.tell("gc", "--max-bytes", str(size))
    assert (told["segments"], told["kept_bytes"]) == (1, size)
    assert shelf.segments() == {parent, child, new}
    shelf.tell("gc", "--max-bytes", str(size - 1))
    assert shelf.segments() == {parent, new}
    shelf.tell("gc", "--max-bytes", "0")
    assert files(shelf.root / "v1") == []
    assert not (shelf.root / "v1" / fingerprint()).exists()


def test_what_is_unused_for_long_goes_unless_something_newer_hangs_on_it(shelf: Shelf) -> None:
    needed, recent = shelf.publish(ALICE, 0, 2 * B, days=40), shelf.publish(ALICE, B, 3 * B, days=1)
    shelf.publish(BOB, 0, B, days=40)
    shelf.publish(BOB, B, 2 * B, days=35)
    state = shelf.publish(ALICE, B, 2 * B, layout=STATE_LAYOUT, days=1)
    shelf.publish(ALICE, 0, B, layout=STATE_LAYOUT, days=40)  # which a state that came after it does not need
    used = shelf.publish(None, 0, B, days=40)
    shelf.use(used)
    assert shelf.tell("gc", "--older-than", "30.5")["segments"] == 3
    assert shelf.segments() == {needed, recent, state, used}
    assert shelf.tell("gc", "--older-than", "0")["kept_segments"] == 0


@pytest.mark.parametrize(
    ("option", "value"), [("--max-bytes", "-1"), ("--older-than", "-0.5"), ("--older-than", "nan"), ("--older-than", "inf")]
)
def test_a_bound_out_of_range_is_refused_and_nothing_is_removed(shelf: Shelf, option: str, value: str) -> None:
    shelf.publish(ALICE, 0, B, days=9)
    with pytest.raises(InvalidRequest, match=f"{option}: got"):
        shelf.say("gc", option, value)
    assert len(shelf.segments()) == 1


def test_what_cannot_be_removed_is_told(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    path = shelf.publish(ALICE, 0, B)

    def unlink(*_: object) -> None:
        raise PermissionError(1, "no")

    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", unlink)
        told = shelf.tell("gc", "--max-bytes", "0", code=1)
        assert shelf.errors == f"troupe: {path} cannot be removed\n"
        with pytest.raises(EraseFailed, match="erasing tenant 'alice'"):
            shelf.say("erase", "--tenant", "alice")
    assert (told["segments"], told["kept_segments"]) == (0, 1)
    assert shelf.tell("verify")["sound"] == 1


# -- erasing ----------------------------------------------------------------------------------------------


def test_erasing_leaves_nothing_of_the_tenant_and_all_of_the_others(shelf: Shelf) -> None:
    kept = {shelf.publish(BOB, 0, B), shelf.publish(None, 0, B)}
    shelf.use(shelf.publish(ALICE, 0, B), shelf.publish(ALICE, B, 2 * B), shelf.publish(ALICE, 0, B, layout=DENSE_LAYOUT))
    before = shelf.scope(ALICE)
    assert shelf.say("erase", "--tenant", "alice") == "erased 3 files of tenant 'alice': its key is destroyed\n"
    assert set(files(shelf.root / "v1")) == kept
    assert shelf.say("erase", "--tenant", "alice") == "erased 0 files of tenant 'alice': it had no key\n"
    assert shelf.scope(ALICE) != before
    published(shelf.root, draft(tokens(B), 0, B, scope=before))  # by a runtime that had not heard of it yet
    assert shelf.tell("erase", "--tenant", "alice") == {"tenant": "alice", "had_key": True, "files": 0, "ownerless": 1}
    assert set(files(shelf.root / "v1")) == kept


def test_a_runtime_beside_it_misses_what_was_removed_and_goes_on(shelf: Shelf) -> None:
    for remove in (
        partial(shelf.say, "gc", "--max-bytes", "0"),
        partial(shelf.say, "erase", "--tenant", "alice"),
        partial(shelf.say, "verify", "--remove"),
    ):
        path = shelf.publish(ALICE, 0, B)
        keyring = Keyring(shelf.root)  # of the runtime
        scanner = Scanner(shelf.root, keyring)
        original = draft(tokens(4 * B), 0, B, scope=keyring.scope(ALICE))
        entries = scanner.scan().added
        assert [entry.name.hex() for entry in entries] == [path.stem]
        if remove.args[0] == "verify":
            path.write_bytes(path.read_bytes()[:-1])
        remove()
        found = restore.read(shelf.root, wanted(original))
        assert isinstance(found, Miss)
        assert found.reason == "absent"
        scanner.mark_used(entries)
        assert scanner.scan().gone == [entry.name for entry in entries]
        assert scanner.delete(entries) == 0
        assert files(shelf.root / "v1") == []
        published(shelf.root, draft(tokens(4 * B), 0, B, scope=keyring.scope(ALICE)))
        assert len(scanner.scan().added) == 1
        scan.erase(shelf.root, keyring.scope(ALICE))


# -- parts ------------------------------------------------------------------------------------------------


def test_ages_are_whole_units_and_a_clock_ahead_counts_as_now() -> None:
    seconds = (-5, 0, 59, 60, 3599, 3600, 86399, 86400, 1e9)
    assert [age(int(second * 1e9)) for second in seconds] == [
        "0 s",
        "0 s",
        "59 s",
        "1 min",
        "59 min",
        "1 h",
        "23 h",
        "1 d",
        "11574 d",
    ]


def test_a_tenant_is_never_taken_for_the_shared_scope_and_never_moves_the_cursor() -> None:
    names = (None, "shared", "notes", "", " x", "a\x1b[2J", "中", "\ud800")
    shown = [tenant_name(None if name is None else TenantId(name)) for name in names]
    assert shown == ["shared", "'shared'", "notes", "''", "' x'", "'a\\x1b[2J'", "中", "'\\ud800'"]


def test_columns_of_numbers_are_flush_right() -> None:
    assert table(("a", "b", "n"), [("x", "", "1"), ("long", "y", "200")]) == "a     b    n\nx          1\nlong  y  200"
