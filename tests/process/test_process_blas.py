"""Is OpenBLAS really what MLX computes with, and does a library that does not load harm nobody?"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from runtime.actors import blas
from runtime.actors.blas import BlasChoice, choose_blas, find_mlx_libraries, find_openblas
from runtime.actors.process import worker_environment

pytestmark = [pytest.mark.anyio, pytest.mark.skipif(sys.platform != "linux", reason="elsewhere MLX computes with Accelerate")]

# Asks the loader which file gives the matrix product that MLX calls, and for one product.
_CHILD = """
import ctypes
import mlx.core as mx

class Info(ctypes.Structure):
    _fields_ = [("file", ctypes.c_char_p), ("base", ctypes.c_void_p), ("name", ctypes.c_char_p), ("address", ctypes.c_void_p)]

ones = mx.ones((64, 576)) @ mx.ones((576, 32))
assert ones[5, 7].item() == 576
libraries = {line.split()[-1] for line in open("/proc/self/maps") if "blas" in line and ".so" in line}
everything = ctypes.CDLL(None)
if hasattr(everything, "cblas_sgemm"):
    info = Info()
    everything.dladdr(ctypes.cast(everything.cblas_sgemm, ctypes.c_void_p), ctypes.byref(info))
    print("global", info.file.decode())
print("mapped", *sorted(libraries))
"""


def computes_with(choice: BlasChoice) -> dict[str, str]:
    done = subprocess.run(
        [sys.executable, "-c", _CHILD],
        env=worker_environment(os.environ, choice.changes, Path(tempfile.gettempdir())),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stderr == ""
    return dict(line.split(" ", 1) for line in done.stdout.splitlines())


@pytest.fixture(autouse=True)
def no_verdicts_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blas, "_verdicts", {})


async def test_mlx_computes_with_openblas_when_it_is_installed(tmp_path: Path) -> None:
    choice = await choose_blas("auto", tmp_path, threads=1)
    assert choice.name == "openblas", choice.reason
    assert choice.changes["OPENBLAS_NUM_THREADS"] == "1"
    found = computes_with(choice)
    assert choice.library is not None
    assert found["global"] == choice.library
    assert choice.library in found["mapped"]


async def test_reference_keeps_openblas_out_even_when_the_user_preloads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preloaded = await choose_blas("auto", tmp_path)
    for name, value in preloaded.changes.items():
        assert value is not None
        monkeypatch.setenv(name, value)
    choice = await choose_blas("reference", tmp_path)
    found = computes_with(choice)
    assert "openblas" not in found["mapped"]
    assert "libblas" in found["mapped"]


async def test_the_environment_is_tried_once_in_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = await choose_blas("auto", tmp_path)

    async def again(*_: object) -> None:
        pytest.fail("tried again")

    monkeypatch.setattr(blas, "_probe", again)
    (tmp_path / "other").mkdir()
    second = await choose_blas("auto", tmp_path / "other")
    assert second.name == first.name
    assert second.changes["LD_LIBRARY_PATH"] == str(tmp_path / "other" / "lib")


async def test_a_library_without_its_fortran_runtime_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loader would end every worker before its first line (where the system has no Fortran runtime of its own)."""
    broken = tmp_path / "libopenblas.so.0"
    broken.write_bytes(b"\x7fELF but not really")
    monkeypatch.setattr(blas, "find_openblas", lambda: str(broken))
    choice = await choose_blas("auto", tmp_path)
    assert choice.name == "reference"
    assert choice.changes == {}
    assert str(broken) in choice.reason
    assert "global" not in computes_with(choice) or "openblas" not in computes_with(choice)["global"]


async def test_a_missing_system_library_is_said_to_be_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blas, "find_openblas", lambda: "libopenblas-that-nobody-has.so.0")
    choice = await choose_blas("auto", tmp_path)
    assert choice.name == "reference"
    assert "cannot be preloaded" in choice.reason
    assert "cmeel-openblas" in choice.reason


async def test_a_directory_that_takes_no_links_costs_speed_only(tmp_path: Path) -> None:
    choice = await choose_blas("auto", tmp_path / "missing")
    assert choice.name == "reference"
    assert "FileNotFoundError" in choice.reason
    assert (await choose_blas("auto", tmp_path)).name == "openblas"


async def test_an_environment_with_a_blank_in_its_path_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "my venv"
    folder.mkdir()
    shutil.copy(find_openblas(), folder / "libopenblas.so.0")
    monkeypatch.setattr(blas, "find_openblas", lambda: str(folder / "libopenblas.so.0"))
    choice = await choose_blas("auto", tmp_path)
    assert choice.name == "openblas", choice.reason
    assert computes_with(choice)["global"] == str(folder / "libopenblas.so.0")


async def test_what_is_linked_is_what_the_wheel_brings(tmp_path: Path) -> None:
    await choose_blas("auto", tmp_path)
    bundled = find_mlx_libraries()
    assert bundled is not None
    for link in (tmp_path / "lib").iterdir():
        assert link.resolve().parent == bundled.resolve()
