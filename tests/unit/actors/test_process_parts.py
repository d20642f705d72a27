from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import pytest

import runtime
from runtime.actors import process
from runtime.actors.process import Tail, worker_command, worker_environment

SOURCE = str(Path(runtime.__file__).parent.parent)


def test_a_tail_keeps_the_last_bytes_whatever_comes() -> None:
    tail = Tail(limit_bytes=10)
    assert tail.text() == ""
    tail.write(b"abc")
    assert tail.text() == "abc"
    tail.write(b"0123456789")
    assert tail.text() == "0123456789"
    tail.write(b"x" * 1_000_000 + b"end")
    assert tail.text() == "xxxxxxxend"


def test_a_tail_begins_with_a_whole_character_and_marks_bytes_that_are_no_text() -> None:
    tail = Tail(limit_bytes=4)
    tail.write("ab€€".encode())  # 2 + 3 + 3 bytes: the cut falls into the first €
    assert tail.text() == "€"
    whole = Tail()
    whole.write(b"\x80 ok \xff")
    assert whole.text() == "\ufffd ok \ufffd"


def test_the_command_names_directory_key_incarnation_and_host() -> None:
    command = worker_command(Path("/run/troupe-1"), "w3.2", 2)
    assert command[:3] == [sys.executable, "-m", "runtime.worker"]
    pairs = dict(zip(command[3::2], command[4::2], strict=True))
    assert pairs == {
        "--directory": "/run/troupe-1",
        "--key": "w3.2",
        "--incarnation": "2",
        "--host-pid": str(os.getpid()),
    }


def test_the_environment_is_the_users_own_with_what_workers_need() -> None:
    base = {"HF_HUB_OFFLINE": "1", "HOME": "/home/x", "OPENBLAS_CORETYPE": "Haswell", "LD_PRELOAD": "a.so"}
    made = worker_environment(base, {"OPENBLAS_NUM_THREADS": "2", "LD_PRELOAD": None, "ABSENT": None}, Path("/run"))
    assert made["HF_HUB_OFFLINE"] == "1"
    assert made["HOME"] == "/home/x"
    assert made["OPENBLAS_CORETYPE"] == "Haswell"
    assert made["OPENBLAS_NUM_THREADS"] == "2"
    assert made["PYTHONUNBUFFERED"] == "1"
    assert made["TOKENIZERS_PARALLELISM"] == "false"
    assert "LD_PRELOAD" not in made
    assert "ABSENT" not in made
    assert base["LD_PRELOAD"] == "a.so"


def test_a_worker_finds_this_package_and_not_one_of_that_name_in_the_working_directory(tmp_path: Path) -> None:
    (tmp_path / "runtime").mkdir()
    (tmp_path / "runtime" / "__init__.py").write_text("raise SystemExit('the wrong one')")
    found = subprocess.run(
        [sys.executable, "-c", "import runtime; print(runtime.__file__)"],
        cwd=tmp_path,
        env=worker_environment(os.environ, {}, tmp_path),
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    assert Path(found).samefile(runtime.__file__)


def test_an_installed_package_is_not_put_before_the_standard_library(monkeypatch: pytest.MonkeyPatch) -> None:
    assert worker_environment({"PYTHONPATH": "/mine"}, {}, Path("/run"))["PYTHONPATH"] == f"{SOURCE}{os.pathsep}/mine"
    monkeypatch.setattr(process.sysconfig, "get_path", lambda name: SOURCE if name == "purelib" else "/elsewhere")
    assert worker_environment({"PYTHONPATH": "/mine"}, {}, Path("/run"))["PYTHONPATH"] == "/mine"
    assert "PYTHONPATH" not in worker_environment({}, {}, Path("/run"))
    assert sysconfig.get_path("purelib") == SOURCE


@pytest.mark.parametrize("found", ["/tmp", "/mine", None, "/where/the/user/works"])
def test_an_unusable_temp_directory_is_replaced_for_the_worker(found: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def gettempdir() -> str:
        if found is None:
            raise FileNotFoundError
        return found

    monkeypatch.setattr(tempfile, "gettempdir", gettempdir)
    made = worker_environment({"TMPDIR": "/mine"}, {}, Path("/run/ours"))
    assert made["TMPDIR"] == (found if found in ("/tmp", "/mine") else "/run/ours")
    assert worker_environment({}, {}, Path("/run/ours")).get("TMPDIR") == (None if found == "/tmp" else "/run/ours")
