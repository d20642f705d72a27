"""A spec's path is a directory, a fetched model, or a hub id, in this order; anything else is refused with what was tried."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime.errors import ModelLoadFailed
from runtime.locate import Location, locate


def nothing_fetched(home: Path, name: str) -> Path | None:
    return None


def fetched(home: Path, name: str) -> Path | None:
    return home / "models" / name


@pytest.mark.parametrize("name", ["model", "мой модель", "模型", "cafe\u0301 with spaces", "owner/name"])
def test_a_directory_is_taken_whatever_it_is_called(tmp_path: Path, name: str) -> None:
    directory = tmp_path / name
    directory.mkdir(parents=True)
    assert locate("m", str(directory), tmp_path, fetched) == Location(str(directory), is_hub_id=False)


def test_a_relative_directory_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert locate("m", "owner/name", tmp_path, nothing_fetched) == Location(str(tmp_path / "owner" / "name"), is_hub_id=False)


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    assert locate("m", "~/model", tmp_path, nothing_fetched).path == str(tmp_path / "model")


def test_a_fetched_model_is_found_by_its_name(tmp_path: Path) -> None:
    assert locate("m", "smollm2-135m", tmp_path, fetched) == Location(str(tmp_path / "models/smollm2-135m"), is_hub_id=False)


def test_owner_and_name_is_a_hub_id(tmp_path: Path) -> None:
    assert locate("m", "owner-1/Some.Model_4bit", tmp_path, nothing_fetched) == Location("owner-1/Some.Model_4bit", is_hub_id=True)


@pytest.mark.parametrize("path", ["nowhere", "/no/such/dir", "a/b/c", "../name", "own er/name", "модель/имя"])
def test_what_is_nowhere_is_refused_with_all_that_was_tried(tmp_path: Path, path: str) -> None:
    with pytest.raises(ModelLoadFailed) as caught:
        locate("chat", path, tmp_path, nothing_fetched)
    assert caught.value.reason == "not_found"
    for tried in (repr(path), "directory", str(tmp_path / "models"), "hub id", "troupe models fetch"):
        assert tried in str(caught.value)


def test_a_file_is_no_checkpoint_directory(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"")
    with pytest.raises(ModelLoadFailed, match="is a file") as caught:
        locate("chat", str(tmp_path / "weights.bin"), tmp_path, nothing_fetched)
    assert caught.value.reason == "not_found"
