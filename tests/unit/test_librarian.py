"""The librarian on real directories: what is there is told in order, deletes happen also at the end, no loop waits for a disk."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.from_thread
import anyio.lowlevel
import pytest

from runtime import librarian as module
from runtime.errors import EraseFailed
from runtime.librarian import MAX_MARKS, Librarian
from runtime.prefix import hits, scan, temporary
from runtime.prefix.hashing import BLOCK_TOKENS, tenant_file_name
from runtime.prefix.keys import Keyring
from runtime.prefix.plans import Entry
from runtime.protocol.ids import TenantId
from runtime.scheduler.stimuli import EraseTenant, FilesSeen, Stimulus
from tests.support.waiting import until
from tests.unit.prefix.model import draft, published, tokens

pytestmark = pytest.mark.anyio

ALICE, BOB = TenantId("alice"), TenantId("bob")
FAR = 1000.0
SOON = 0.02


class House:
    """A librarian, and what it told."""

    def __init__(self, root: Path | None, **changes: Any) -> None:
        self.root = root
        self.keyring = Keyring(root)
        self.told: list[Stimulus] = []
        self.defects: list[Exception] = []
        self.has_models = True
        arguments: dict[str, Any] = {"is_active": True, "scan_seconds": FAR, **changes}
        self.librarian = Librarian(
            root,
            self.keyring,
            offer=self.told.append,
            has_models=lambda: self.has_models,
            report=self.defects.append,
            **arguments,
        )

    def publish(self, tenant: TenantId = ALICE, seed: int = 0) -> Path:
        """As a worker does."""
        assert self.root is not None
        made = draft(tokens(BLOCK_TOKENS, seed), 0, BLOCK_TOKENS, scope=self.keyring.scope(tenant))
        return published(self.root, made).path

    @property
    def seen(self) -> list[FilesSeen]:
        return [stimulus for stimulus in self.told if isinstance(stimulus, FilesSeen)]

    @property
    def entries(self) -> list[Entry]:
        return [entry for seen in self.seen for entry in seen.added]


@asynccontextmanager
async def running(house: House) -> AsyncIterator[House]:
    async with anyio.create_task_group() as group:
        group.start_soon(house.librarian.run)
        await house.librarian.first_scan()
        yield house
        group.cancel_scope.cancel()
    assert house.librarian.over.is_set()
    assert house.defects == []


async def test_what_is_there_at_the_start_is_told_before_a_model_is_handed_out(tmp_path: Path) -> None:
    house = House(tmp_path / "prefix")
    house.publish()
    async with running(house):
        (seen,) = house.seen
        assert [entry.tenant for entry in seen.added] == [ALICE]
        assert seen.free_bytes > 0


async def test_the_dead_are_tidied_up_after_at_the_start(tmp_path: Path) -> None:
    root = tmp_path / "prefix"
    temporary.make_directory(root / "tmp")
    (root / "tmp" / "1-dead").write_bytes(b"half a segment")
    async with running(House(root)):
        assert list((root / "tmp").iterdir()) == []


@pytest.mark.parametrize("has_models", [True, False])
async def test_the_dead_are_tidied_up_after_later_too_and_the_living_left_alone(tmp_path: Path, has_models: bool) -> None:
    left = tmp_path / temporary.TEMPORARY_DIRECTORY / "12345-feedfeedfeedfeed-1000"
    house = House(tmp_path, scan_seconds=SOON)
    house.has_models = has_models
    async with running(house):
        with temporary.temporary_file(tmp_path) as (_, alive):
            left.write_bytes(b"x" * 1000)
            await until(lambda: not left.exists())
            assert alive.exists()


async def test_what_a_worker_was_writing_goes_when_its_death_is_told(tmp_path: Path) -> None:
    left = tmp_path / temporary.TEMPORARY_DIRECTORY / "12345-feedfeedfeedfeed-1000"
    async with running(House(tmp_path)) as house:
        left.parent.mkdir()
        left.write_bytes(b"x" * 1000)
        house.librarian.worker_died()
        await until(lambda: not left.exists())


async def test_a_directory_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    async with running(House(tmp_path / "home" / "prefix", scan_seconds=SOON)) as house:
        await until(lambda: len(house.seen) > 2)
        assert all(seen.free_bytes > 0 and not seen.added for seen in house.seen)
    assert os.listdir(tmp_path) == []


async def test_what_others_publish_and_delete_later_is_told(tmp_path: Path) -> None:
    async with running(House(tmp_path, scan_seconds=SOON)) as house:
        path = house.publish()
        await until(lambda: house.entries)
        (entry,) = house.entries
        path.unlink()
        await until(lambda: any(seen.gone for seen in house.seen))
        assert [seen.gone for seen in house.seen if seen.gone] == [(entry.name,)]


async def test_without_a_model_nothing_is_looked_for(tmp_path: Path) -> None:
    house = House(tmp_path, scan_seconds=SOON)
    house.has_models = False
    async with running(house):
        house.publish()
        await anyio.sleep(5 * SOON)
        assert len(house.seen) == 1
        house.has_models = True
        await until(lambda: house.entries)


async def test_a_file_told_to_go_goes_at_once(tmp_path: Path) -> None:
    house = House(tmp_path)
    path = house.publish()
    async with running(house):
        house.librarian.delete(house.entries)
        await until(lambda: not path.exists())


async def test_what_is_still_to_be_deleted_at_the_end_is(tmp_path: Path) -> None:
    house = House(tmp_path)
    path = house.publish()
    async with running(house):
        house.librarian.delete(house.entries)
    assert not path.exists()


async def test_a_file_on_its_way_out_is_not_told_as_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler gave it up while the directory was being looked at."""
    house = House(tmp_path)
    house.publish()
    async with running(house):
        entries = house.entries
    other = House(tmp_path)
    is_looking, may_go_on = threading.Event(), threading.Event()
    looked = scan.free_bytes

    def slow(root: Path) -> int:
        is_looking.set()
        may_go_on.wait(FAR)
        return looked(root)

    monkeypatch.setattr(scan, "free_bytes", slow)
    async with anyio.create_task_group() as group:
        group.start_soon(other.librarian.run)
        await until(is_looking.is_set)
        other.librarian.delete(entries)
        may_go_on.set()
        await other.librarian.first_scan()
        group.cancel_scope.cancel()
    assert other.entries == []


async def test_uses_are_marked_by_the_end_at_the_latest_and_each_is_counted(tmp_path: Path) -> None:
    house = House(tmp_path)
    old, new = house.publish(seed=1), house.publish(seed=2)
    for path in (old, new):
        os.utime(path, (1, 1))
    async with running(house):
        entry = next(entry for entry in house.entries if old.name.startswith(entry.name.hex()))
        house.librarian.mark_used([entry, entry])
        house.librarian.mark_used([entry])
    assert old.stat().st_mtime > 1
    assert hits.read(old) == (3, 1_000_000_000)
    assert hits.read(new) is None
    assert new.stat().st_mtime == 1


async def test_marks_are_bounded_and_the_oldest_are_lost(tmp_path: Path) -> None:
    house = House(tmp_path)
    paths = [house.publish(seed=seed) for seed in range(2)]
    for path in paths:
        os.utime(path, (1, 1))
    async with running(house):
        first, second = house.entries
        others = [Entry("f" * 64, None, None, 0, (bytes([n >> 8, n & 255]) * 16,), "dense", 1) for n in range(MAX_MARKS - 1)]  # type: ignore[arg-type]
        house.librarian.mark_used([first, second, *others])
    assert sorted(path.stat().st_mtime > 1 for path in paths) == [False, True]


async def test_a_file_used_and_then_deleted_is_not_marked_back_to_life(tmp_path: Path) -> None:
    house = House(tmp_path)
    path = house.publish()
    async with running(house):
        house.librarian.mark_used(house.entries)
        house.librarian.delete(house.entries)
    assert not path.exists()


async def test_the_loop_runs_on_while_the_disk_is_slow_and_a_model_waits_only_so_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FIRST_SCAN_SECONDS", 0.05)
    may_go_on = threading.Event()
    monkeypatch.setattr(scan, "free_bytes", lambda root: may_go_on.wait(FAR) and 5)
    house = House(tmp_path, close_seconds=0.05)
    async with running(house):
        assert house.seen == []
    assert house.librarian.over.is_set()  # nobody waited for the disk
    may_go_on.set()
    await until(lambda: not house.librarian._shelf._lock.locked())  # type: ignore[union-attr]


async def test_a_defect_in_the_thread_is_reported_and_the_librarian_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = House(tmp_path, scan_seconds=SOON)
    looked = scan.free_bytes
    faults = [ZeroDivisionError("first"), ZeroDivisionError("second")]

    def faulty(root: Path) -> int:
        if faults:
            raise faults.pop(0)
        return looked(root)

    monkeypatch.setattr(scan, "free_bytes", faulty)
    async with running(house):
        await until(lambda: house.seen)
        assert [str(defect) for defect in house.defects] == ["first", "second"]
        house.defects.clear()


async def test_without_files_there_is_no_work_at_all(tmp_path: Path) -> None:
    for house in (House(None, is_active=False), House(tmp_path, is_active=False)):
        await house.librarian.run()
        await house.librarian.first_scan()
        entry = Entry("f" * 64, None, None, 0, (b"x" * 32,), "dense", 1)  # type: ignore[arg-type]
        house.librarian.delete([entry])
        house.librarian.mark_used([entry])
        assert (house.told, house.librarian._deletes, house.librarian._marks) == ([], {}, {})


async def test_erasing_destroys_key_and_files_and_tells_the_scheduler_first(tmp_path: Path) -> None:
    house = House(tmp_path)
    mine, others = house.publish(ALICE), house.publish(BOB)
    scope = house.keyring.scope(ALICE)
    async with running(house):
        assert await house.librarian.erase(ALICE) == 1
        assert house.told[1] == EraseTenant(ALICE, scope)
        assert isinstance(house.told[2], FilesSeen)
        assert len(house.told[2].gone) == 1
    assert not mine.exists()
    assert others.exists()
    assert house.keyring.find(ALICE) is None
    assert house.keyring.scope(ALICE) != scope


async def test_a_tenant_of_another_process_is_erased_too_and_an_unknown_one_harmlessly(tmp_path: Path) -> None:
    path = House(tmp_path).publish(ALICE)
    async with running(House(tmp_path)) as house:
        assert await house.librarian.erase(TenantId("nobody")) == 0
        assert await house.librarian.erase(ALICE) == 1
        assert await house.librarian.erase(ALICE) == 0
    assert not path.exists()
    assert os.listdir(tmp_path / "keys") == []


async def test_a_runtime_that_uses_no_files_erases_those_of_earlier_ones(tmp_path: Path) -> None:
    path = House(tmp_path).publish(ALICE)
    house = House(tmp_path, is_active=False)
    house.librarian._keyring = Keyring(None)
    fleeting = house.librarian._keyring.scope(ALICE)
    assert await house.librarian.erase(ALICE) == 1
    assert not path.exists()
    assert fleeting in [told.scope for told in house.told if isinstance(told, EraseTenant)]
    assert house.seen == []


async def test_a_key_that_cannot_be_removed_is_named_and_nothing_is_erased(tmp_path: Path) -> None:
    key = tmp_path / "keys" / tenant_file_name(ALICE)
    house = House(tmp_path)
    path = house.publish(BOB)
    key.mkdir(parents=True)  # no permission could stop a superuser, but this does
    async with running(house):
        with pytest.raises(EraseFailed) as caught:
            await house.librarian.erase(ALICE)
        assert caught.value.path == str(key)
        assert str(key) in str(caught.value)
        assert caught.value.code == "erase_failed"
        assert len(house.told) == 1
    assert path.exists()


async def test_erasing_is_done_whole_when_its_caller_is_cancelled(tmp_path: Path) -> None:
    house = House(tmp_path)
    path = house.publish(ALICE)
    destroyed = house.librarian._destroy_keys
    scope = anyio.CancelScope()

    def destroy(tenant: TenantId) -> Any:
        anyio.from_thread.run_sync(scope.cancel)
        return destroyed(tenant)

    house.librarian._destroy_keys = destroy  # type: ignore[method-assign]
    async with running(house):
        with scope:
            await house.librarian.erase(ALICE)
            await anyio.lowlevel.checkpoint()
        assert scope.cancelled_caught
        assert [type(told) for told in house.told] == [FilesSeen, EraseTenant, FilesSeen]
    assert not path.exists()


# -- keys, from several threads -------------------------------------------------------------------------------


def test_threads_that_ask_at_once_are_given_one_scope(tmp_path: Path) -> None:
    for root in (None, tmp_path):
        keyring = Keyring(root)
        scopes: list[object] = []
        start = threading.Barrier(8)

        def ask(keyring: Keyring, start: threading.Barrier, scopes: list[object]) -> None:
            start.wait(FAR)
            scopes.append(keyring.scope(ALICE))

        threads = [threading.Thread(target=ask, args=(keyring, start, scopes)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(FAR)
        assert len(set(map(id, scopes))) == 1


def test_finding_a_scope_makes_no_key(tmp_path: Path) -> None:
    keyring = Keyring(tmp_path)
    assert keyring.find(ALICE) is None
    assert list(tmp_path.iterdir()) == []
    scope = Keyring(tmp_path).scope(ALICE)
    assert keyring.find(ALICE) == scope
    assert stat.S_IMODE((tmp_path / "keys").stat().st_mode) == 0o700


def test_without_a_root_keys_live_as_long_as_the_process() -> None:
    keyring = Keyring(None)
    scope = keyring.scope(ALICE)
    assert keyring.find(ALICE) is scope
    assert scope in keyring.known().scopes
    assert keyring.known().is_complete
    assert keyring.destroy(ALICE) == scope
    assert keyring.find(ALICE) is None


def test_all_scopes_of_a_tenant_are_found_also_when_another_process_made_a_new_key(tmp_path: Path) -> None:
    keyring, other = Keyring(tmp_path), Keyring(tmp_path)
    old = keyring.scope(ALICE)
    other.destroy(ALICE)
    new = other.scope(ALICE)
    assert keyring.scopes_of(ALICE) == {old, new}


def test_a_key_made_while_the_directory_was_looked_at_is_not_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keyring = Keyring(tmp_path)
    keyring.scope(BOB)
    listed = os.listdir

    def late(path: Path) -> list[str]:
        names = listed(path)
        monkeypatch.setattr(os, "listdir", listed)
        made.append(keyring.scope(ALICE))
        return names

    made: list[object] = []
    monkeypatch.setattr(os, "listdir", late)
    keyring.known()
    assert keyring._scopes[ALICE] is made[0]
