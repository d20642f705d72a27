"""Looking at the disk again and again: what others did is seen, litter goes, keys decide what is whose."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from runtime.prefix import hits, restore, scan
from runtime.prefix.hashing import BLOCK_TOKENS, Scope, block_hashes, shared_scope
from runtime.prefix.index import Index, Limits
from runtime.prefix.keys import Keyring
from runtime.prefix.plans import Entry
from runtime.prefix.restore import Miss
from runtime.protocol.ids import TenantId
from tests.unit.prefix.model import DENSE_LAYOUT, draft, files, fingerprint, published, tokens, wanted

B = BLOCK_TOKENS
ALICE, BOB = TenantId("alice"), TenantId("bob")
PROMPT = tokens(4 * B)


class Process:
    """What one host process has of the cache."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.keyring = Keyring(root)
        self.scanner = scan.Scanner(root, self.keyring)
        self.index = Index(Limits(1 << 40))

    def scope(self, tenant: TenantId) -> Scope:
        return self.keyring.scope(tenant)

    def publish(self, tenant: TenantId, start: int, end: int, seed: int = 0) -> Path:
        return published(self.root, draft(tokens(4 * B, seed), start, end, scope=self.scope(tenant))).path

    def look(self) -> scan.Changes:
        changes = self.scanner.scan()
        for entry in changes.added:
            self.index.add(entry)
        for name in changes.gone:
            self.index.drop(name)
        self.index.use(changes.used)
        self.index.validate()
        return changes

    def reach(self, tenant: TenantId, seed: int = 0) -> int:
        prompt = tokens(4 * B, seed)
        found = self.index.plans(block_hashes(self.scope(tenant).secret(fingerprint()), prompt), len(prompt) + 1)
        return found[-1].end if found else 0


@pytest.fixture
def here(tmp_path: Path) -> Process:
    return Process(tmp_path)


def test_a_process_that_starts_later_sees_what_was_published_before(here: Process) -> None:
    here.publish(ALICE, 0, 2 * B)
    here.publish(ALICE, 2 * B, 3 * B)
    later = Process(here.root)
    assert len(later.look().added) == 2
    assert later.reach(ALICE) == 3 * B
    later.scanner.mark_used(later.index.entries())  # which is reckoned with from the beginning
    on_disk = sum(path.stat().st_size for path in files(here.root / "v1"))
    assert later.index.num_bytes == on_disk + 2 * hits.MAX_BYTES, "each counter may have a successor"


def test_a_later_scan_brings_only_what_is_new_used_or_gone(here: Process) -> None:
    path = here.publish(ALICE, 0, B)
    other = Process(here.root)
    (first,) = other.look().added
    assert other.look() == scan.Changes()
    here.publish(ALICE, B, 2 * B)
    assert [entry.start for entry in other.look().added] == [B]
    here.scanner.mark_used([first])
    assert other.look().used == [first.name]
    other.scanner.mark_used([first])
    assert other.look() == scan.Changes()  # its own use is no news
    path.unlink()
    assert other.look().gone == [first.name]


def test_recency_survives_a_restart_and_a_clock_that_jumps(here: Process) -> None:
    paths = [here.publish(ALICE, 0, B, seed) for seed in range(3)]
    times = [2_000_000_000, 5_000_000_000, 0]  # the second one from a clock far ahead, the third from one reset
    for path, seconds in zip(paths, times, strict=True):
        os.utime(path, (seconds, seconds))
    here.look()
    assert [entry.name.hex() for entry in here.index.entries()] == [paths[n].stem for n in (2, 0, 1)]
    entry = next(entry for entry in here.index.entries() if entry.name.hex() == paths[1].stem)
    os.utime(paths[1], (1, 1))  # used by a process whose clock is far behind: a change is a use, whatever it says
    here.look()
    assert here.index.entries()[-1] == entry


def test_children_listed_before_their_parents_still_go_first(here: Process) -> None:
    parent, child = here.publish(ALICE, 0, B), here.publish(ALICE, B, 2 * B)
    os.utime(parent, (1, 1))
    os.utime(child, (9, 9))
    here.look()
    assert [entry.start for entry in here.index.entries()] == [B, 0]


def test_litter_goes_and_what_merely_cannot_be_read_stays(here: Process) -> None:
    good = here.publish(ALICE, 0, B)
    bad = here.publish(ALICE, 0, B, seed=1)
    bad.write_bytes(bad.read_bytes()[:-1])
    (good.parent / f"{'0' * 64}.safetensors").write_bytes(b"junk")
    (good.parent / f"{'1' * 64}.safetensors").symlink_to(good)
    (good.parent / f"{'2' * 64}.safetensors").write_bytes(good.read_bytes())
    (good.parent / "notes.txt").touch()
    changes = here.look()
    assert [entry.name.hex() for entry in changes.added] == [good.stem]
    assert changes.num_removed == 4
    assert {path.name for path in files(here.root / "v1")} == {good.name, "notes.txt"}


def test_a_file_replaced_by_litter_is_reported_gone(here: Process) -> None:
    path = here.publish(ALICE, 0, B)
    (entry,) = here.look().added
    path.write_bytes(b"junk")
    changes = here.look()
    assert (changes.gone, changes.num_removed, len(here.index)) == ([entry.name], 1, 0)


def test_random_damage_to_headers_never_breaks_a_scan(here: Process) -> None:
    generator = random.Random(3)
    path = here.publish(ALICE, 0, B)
    sound = path.read_bytes()
    head_bytes = 8 + int.from_bytes(sound[:8], "little")
    for _ in range(150):
        damaged = bytearray(sound)
        damaged[generator.randrange(head_bytes)] = generator.randrange(256)
        path.write_bytes(damaged)
        os.utime(path, ns=(0, generator.randrange(1 << 60)))
        added = Process(here.root).look().added
        assert (added == []) == (bytes(damaged) != sound)


def test_old_formats_other_block_sizes_and_empty_directories_are_reclaimed(here: Process) -> None:
    for name in ("v0/f/aa/x.safetensors", "v2/f/aa/x.safetensors", "vain/x", "other/x"):
        (here.root / name).parent.mkdir(parents=True)
        (here.root / name).touch()
    old = here.publish(ALICE, 0, B)
    data = old.read_bytes().replace(b'\\"block_tokens\\":256', b'\\"block_tokens\\":128')
    old.write_bytes(data)
    assert here.look().num_removed == 1
    assert scan.reclaim(here.root) == 1
    names = {path.name for path in here.root.iterdir()}
    assert {"v2", "vain", "other"} <= names
    assert "v0" not in names
    assert not (here.root / "v1" / fingerprint()).exists()
    here.publish(ALICE, 0, B)  # makes its directories again
    assert len(here.look().added) == 1


# -- tenants ----------------------------------------------------------------------------------------------


def test_one_tenant_finds_nothing_of_anothers_same_prompt(here: Process) -> None:
    here.publish(ALICE, 0, 3 * B)
    here.look()
    assert here.reach(ALICE) == 3 * B
    assert here.reach(BOB) == 0
    here.publish(BOB, 0, B)
    here.look()
    assert here.reach(BOB) == B
    assert {entry.tenant for entry in here.index.entries()} == {ALICE, BOB}


def test_the_shared_scope_is_found_by_everyone(here: Process) -> None:
    published(here.root, draft(PROMPT, 0, B, scope=shared_scope()))
    other = Process(here.root)
    assert [entry.tenant for entry in other.look().added] == [None]


def test_processes_share_a_tenants_key_and_tenants_do_not(here: Process) -> None:
    other = Process(here.root)
    assert here.scope(ALICE) == other.scope(ALICE)
    assert here.scope(BOB) != here.scope(ALICE)
    assert len(files(here.root / "keys")) == 2
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in files(here.root / "keys"))
    assert not any("alice" in str(path) for path in files(here.root))


def test_erasing_a_tenant_leaves_no_file_of_it_and_spares_the_others(here: Process) -> None:
    here.publish(ALICE, 0, 2 * B)
    published(here.root, draft(PROMPT, 0, B, scope=here.scope(ALICE), layout=DENSE_LAYOUT))  # of another model
    kept = here.publish(BOB, 0, B)
    here.look()
    before = here.scope(ALICE)
    scope = Process(here.root).keyring.destroy(ALICE)  # another process does it
    assert scope == before
    assert scan.erase(here.root, scope) == 2
    assert files(here.root / "v1") == [kept]
    here.look()
    assert here.scope(ALICE) != before
    assert here.reach(BOB) == B
    assert Keyring(here.root).destroy(TenantId("nobody")) is None


def test_what_is_published_under_a_destroyed_key_is_litter(here: Process) -> None:
    before = here.scope(ALICE)
    Keyring(here.root).destroy(ALICE)
    published(here.root, draft(PROMPT, 0, B, scope=before))  # a publish that was under way
    assert here.look().num_removed == 1
    assert files(here.root / "v1") == []


def test_unknown_owners_are_spared_while_keys_cannot_be_looked_at(here: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    here.publish(ALICE, 0, B)
    newcomer = Process(here.root)
    real = os.listdir

    def listdir(path: Path) -> list[str]:
        if Path(path).name == "keys":
            raise PermissionError(13, "no")
        return real(path)

    with monkeypatch.context() as patched:
        patched.setattr(os, "listdir", listdir)
        assert newcomer.look() == scan.Changes()
    assert len(newcomer.look().added) == 1


def test_a_damaged_key_file_is_replaced(here: Process) -> None:
    before = here.scope(ALICE)
    (path,) = files(here.root / "keys")
    for damage in (b"", b"x" * 32, b"x" * 32 + b"mallory", b"x" * 32 + b"\xff"):
        path.write_bytes(damage)
        new = Process(here.root).scope(ALICE)
        assert new != before
        assert Process(here.root).scope(ALICE) == new


@pytest.mark.parametrize("name", ["", "..", "a/b", "x" * 3000, "中\0", "\ud800"])
def test_a_tenant_may_have_any_name_and_keeps_its_key(tmp_path: Path, name: str) -> None:
    assert Process(tmp_path).scope(TenantId(name)) == Process(tmp_path).scope(TenantId(name))


def test_a_miss_says_nothing_about_anothers_entries(here: Process) -> None:
    here.publish(ALICE, 0, B)
    misses = []
    for seed in (0, 7):  # a prompt that Alice has cached, and one that nobody has
        mine = draft(tokens(4 * B, seed), 0, B, scope=here.scope(BOB))
        found = restore.read(here.root, wanted(mine))
        assert isinstance(found, Miss)
        misses.append((found.reason, found.is_removed))
    assert misses[0] == misses[1] == ("absent", False)


def test_evictions_are_carried_out_and_the_disk_follows_the_index(here: Process) -> None:
    for seed in range(4):
        here.publish(ALICE, 0, B, seed)
    here.look()
    size = here.index.entries()[0].num_bytes
    here.index.limits = Limits(2 * size)
    victims: list[Entry] = here.index.excess(scan.free_bytes(here.root))
    assert here.scanner.delete(victims) == 2
    assert here.scanner.delete(victims) == 0  # another process was first: fine
    here.scanner.mark_used(here.index.entries())
    on_disk = sum(path.stat().st_size for path in files(here.root / "v1"))
    assert on_disk + len(here.index) * hits.MAX_BYTES == here.index.num_bytes <= 2 * size
    here.look()
    assert len(here.index) == 2
