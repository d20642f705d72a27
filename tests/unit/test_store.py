"""Fetched models appear and vanish whole; nothing reaches outside the home; leftovers of the dead are swept."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from runtime import store
from runtime.errors import InvalidRequest


def put(home: Path, name: str, *, source: str = "aa", content: bytes = b"weights") -> Path:
    descriptor = store.try_lock(home, name)
    assert descriptor is not None
    try:
        with store.building(home, name) as build:
            checkpoint = build / "checkpoint"
            checkpoint.mkdir()
            (checkpoint / "model.safetensors").write_bytes(content)
            manifest = store.manifest_now(name=name, form="float32", source="wheel", source_sha256=source, license="MIT")
            return store.publish(home, checkpoint, manifest)
    finally:
        store.unlock(descriptor)


def test_an_empty_home_has_no_models_and_is_not_created(tmp_path: Path) -> None:
    home = tmp_path / "home"
    assert store.list_models(home) == []
    assert store.resolve(home, "chat") is None
    assert not home.exists()


def test_a_published_model_is_listed_with_its_path_and_bytes(tmp_path: Path) -> None:
    home = tmp_path / "Käse 東京 home"
    path = put(home, "chat", content=b"x" * 1000)
    assert store.resolve(home, "chat") == path
    (model,) = store.list_models(home)
    assert (model.manifest.name, model.path) == ("chat", path)
    assert model.num_bytes == 1000 + (path / store.MANIFEST).stat().st_size


def test_models_and_their_directories_are_private(tmp_path: Path) -> None:
    home = tmp_path / "home"
    previous = os.umask(0)
    try:
        path = put(home, "chat")
    finally:
        os.umask(previous)
    for directory in (home, home / "models", home / "tmp", home / "locks", path):
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    for file in path.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.parametrize("name", ["", ".", "..", "../chat", "a/b", "/etc", ".hidden", "a\0b", "a" * 65, "-x", "ключ"])
def test_a_name_cannot_leave_the_directory(tmp_path: Path, name: str) -> None:
    put(tmp_path, "chat")
    assert not store.is_name(name)
    assert store.resolve(tmp_path, name) is None
    with pytest.raises(InvalidRequest, match="fetched: chat"):
        store.remove(tmp_path, name)


def test_a_directory_without_a_readable_manifest_of_its_own_name_is_no_model(tmp_path: Path) -> None:
    path = put(tmp_path, "chat")
    path.rename(path.with_name("renamed"))
    (tmp_path / "models" / "empty").mkdir()
    (tmp_path / "models" / "broken").mkdir()
    (tmp_path / "models" / "broken" / store.MANIFEST).write_text("{")
    assert store.list_models(tmp_path) == []


def test_publishing_over_an_unreadable_model_replaces_it_whole(tmp_path: Path) -> None:
    path = put(tmp_path, "chat", content=b"old")
    (path / store.MANIFEST).write_text("not json")
    (path / "stray").write_text("of the old one")
    put(tmp_path, "chat", content=b"new")
    assert (path / "model.safetensors").read_bytes() == b"new"
    assert not (path / "stray").exists()
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def fail() -> None:
        with store.building(tmp_path, "chat") as build:
            (build / "part").write_text("x")
            raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        fail()
    assert list((tmp_path / "tmp").iterdir()) == []
    assert store.resolve(tmp_path, "chat") is None


def test_removing_a_model_that_is_not_there_names_those_that_are(tmp_path: Path) -> None:
    put(tmp_path, "small")
    put(tmp_path, "chat")
    with pytest.raises(InvalidRequest, match=r"no fetched model 'chatt'; fetched: chat, small"):
        store.remove(tmp_path, "chatt")


def test_removing_the_last_model_of_a_source_removes_the_source_file_too(tmp_path: Path) -> None:
    put(tmp_path, "chat", source="aa")
    put(tmp_path, "chat-4bit", source="aa")
    kept = store.download_path(tmp_path, "aa")
    kept.write_bytes(b"gguf")
    store.remove(tmp_path, "chat")
    assert kept.exists()
    store.remove(tmp_path, "chat-4bit")
    assert not kept.exists()
    assert store.list_models(tmp_path) == []
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_model_under_work_elsewhere_is_not_removed(tmp_path: Path) -> None:
    path = put(tmp_path, "chat")
    descriptor = store.try_lock(tmp_path, "chat")
    assert descriptor is not None
    with pytest.raises(InvalidRequest, match="another process"):
        store.remove(tmp_path, "chat")
    store.unlock(descriptor)
    assert path.exists()


def test_a_lock_has_one_holder_and_goes_with_its_process(tmp_path: Path) -> None:
    code = (
        "import pathlib, sys; from runtime import store; "
        "assert store.try_lock(pathlib.Path(sys.argv[1]), 'chat') is not None; print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        assert store.try_lock(tmp_path, "chat") is None
        holder.kill()
    descriptor = store.try_lock(tmp_path, "chat")
    assert descriptor is not None
    store.unlock(descriptor)


def test_sweeping_removes_what_nobody_works_on_and_nothing_else(tmp_path: Path) -> None:
    leftovers = tmp_path / "tmp"
    leftovers.mkdir(parents=True)
    for entry in ("mine.99.aa", "dead-1.2b.99.aa", "busy.99.aa"):
        (leftovers / entry).mkdir()
        (leftovers / entry / "part").write_text("x")
    mine, busy = store.try_lock(tmp_path, "mine"), store.try_lock(tmp_path, "busy")
    assert mine is not None
    assert busy is not None
    assert store.sweep(tmp_path, "mine") == ["dead-1.2b.99.aa", "mine.99.aa"]
    assert [entry.name for entry in leftovers.iterdir()] == ["busy.99.aa"]
    store.unlock(mine)
    store.unlock(busy)
