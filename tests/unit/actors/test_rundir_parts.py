from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from runtime.actors import rundir
from runtime.actors.rundir import MAX_BASE_BYTES, base_candidates, objection
from runtime.protocol.channel import MAX_KEY_BYTES, MAX_SOCKET_PATH_BYTES, socket_path


def test_the_longest_base_leaves_room_for_the_longest_socket_name() -> None:
    name = rundir.PREFIX + "0" * 10
    longest = socket_path(Path("/" + "b" * (MAX_BASE_BYTES - 1), name), "k" * MAX_KEY_BYTES, "c")
    assert len(os.fsencode(longest)) == MAX_SOCKET_PATH_BYTES


def test_candidates_are_absolute_each_once_and_end_with_the_places_every_system_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    assert base_candidates() == ["/run/user/7", "/tmp", "/var/tmp"]
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setattr(tempfile, "tempdir", "relative")
    assert base_candidates() == [os.path.abspath("relative"), "/tmp", "/var/tmp"]


def test_a_system_without_a_writable_temp_directory_still_has_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise FileNotFoundError("no usable temporary directory")

    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(tempfile, "gettempdir", none)
    assert base_candidates() == ["/tmp", "/var/tmp"]


@pytest.mark.parametrize("name", ["run", "模型", "Модель", "with spaces", "cafe\u0301"])
def test_short_names_of_any_script_will_do(tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        base = Path(short, name)
        base.mkdir()
        assert objection(str(base)) is None


def test_length_is_counted_in_bytes(tmp_path: Path) -> None:
    assert "bytes" in (objection("/tmp/" + "界" * (MAX_BASE_BYTES // 3)) or "")
    assert "bytes" in (objection("/" + "x" * MAX_BASE_BYTES) or "")


def test_what_cannot_hold_a_private_directory_is_refused_with_the_reason() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        file = Path(short, "file")
        file.touch()
        public = Path(short, "public")
        public.mkdir()
        public.chmod(0o777)
        assert objection(str(file)) == "it is no directory"
        assert "No such file" in (objection(f"{short}/missing") or "")
        assert "sticky" in (objection(str(public)) or "")
        assert "UTF-8" in (objection(os.fsdecode(os.fsencode(short) + b"/\xff")) or "")
