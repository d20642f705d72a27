"""What is left to the machine becomes a number once, and where no file can lie there are none."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from runtime import allowance
from runtime.config import Settings

GIB = 1 << 30


def free(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=num_bytes))


def test_memory_is_a_sixteenth_of_the_machines_and_files_a_tenth_of_what_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free(monkeypatch, 50 * GIB)
    settled = allowance.settled(Settings(home=tmp_path), tmp_path / "prefix")
    assert settled.prefix_memory_bytes == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 16
    assert settled.prefix_disk_bytes == 5 * GIB
    assert settled.home == tmp_path


def test_files_take_at_most_32_gib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, 1 << 50)
    assert allowance.settled(Settings(), tmp_path).prefix_disk_bytes == 32 * GIB


def test_what_the_app_has_set_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, GIB)
    settings = Settings(memory_budget_bytes=GIB, prefix_memory_bytes=0, prefix_disk_bytes=7, device_lease=3)
    assert allowance.settled(settings, tmp_path) == settings


def test_three_quarters_of_the_memory_are_the_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allowance, "physical_memory_bytes", lambda: 16 * GIB)
    assert allowance.settled(Settings(), tmp_path).memory_budget_bytes == 12 * GIB


@pytest.mark.parametrize(("device_lease", "on_mac", "elsewhere"), [("auto", 1, None), (None, None, None), (1, 1, 1), (4, 4, 4)])
def test_one_worker_at_a_time_computes_on_a_mac_unless_the_app_says_otherwise(
    device_lease: Any, on_mac: int | None, elsewhere: int | None
) -> None:
    assert allowance.num_device_slots(device_lease, "darwin") == on_mac
    assert allowance.num_device_slots(device_lease, "linux") == elsewhere


def test_a_system_that_does_not_tell_its_memory_gets_a_number_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for answer in (-1, 0):
        monkeypatch.setattr(os, "sysconf", lambda name, answer=answer: answer)
        assert allowance.physical_memory_bytes() > GIB


def test_the_root_is_absolute_and_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert allowance.prefix_root(Settings(home="here")) == tmp_path / "here" / "prefix"  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("home", [os.fsdecode(b"/caches/\xff"), "~nobody-of-that-name/cache"])
def test_where_home_is_nowhere_or_cannot_be_named_to_a_worker_there_are_no_files(
    home: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TROUPE_HOME", home)
    root = allowance.prefix_root(Settings())
    assert root is None
    assert allowance.settled(Settings(prefix_disk_bytes=5), root).prefix_disk_bytes == 0


def test_a_user_without_a_home_gets_no_directory_of_a_tildes_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TROUPE_HOME")
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda name: f"~/.cache/{name}")
    assert allowance.prefix_root(Settings()) is None
