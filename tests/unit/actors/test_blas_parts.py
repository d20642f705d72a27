from __future__ import annotations

import os
from pathlib import Path

import pytest

from runtime.actors import blas
from runtime.actors.blas import BlasChoice, choose_blas, find_openblas, fortran_links, make_links, preload, without_openblas

LIBRARY = "/venv/cmeel.prefix/lib/libopenblas.so.0"
LINKS = Path("/run/troupe-1/lib")


def test_our_library_is_preloaded_after_the_users_own() -> None:
    assert preload({}, LIBRARY, link_directory=LINKS, threads=2) == {
        "LD_PRELOAD": LIBRARY,
        "LD_LIBRARY_PATH": "/run/troupe-1/lib",
        "OPENBLAS_NUM_THREADS": "2",
    }
    base = {"LD_PRELOAD": "/usr/lib/first.so second.so", "LD_LIBRARY_PATH": "/opt/lib"}
    assert preload(base, LIBRARY, link_directory=LINKS, threads=None) == {
        "LD_PRELOAD": f"/usr/lib/first.so:second.so:{LIBRARY}",
        "LD_LIBRARY_PATH": "/run/troupe-1/lib:/opt/lib",
    }
    assert preload({}, "libopenblas.so.0", link_directory=None, threads=None) == {"LD_PRELOAD": "libopenblas.so.0"}


def test_a_library_whose_path_the_loader_would_split_is_found_through_the_search_path() -> None:
    assert preload({}, "/my venv/lib/libopenblas.so.0", link_directory=LINKS, threads=None) == {
        "LD_PRELOAD": "libopenblas.so.0",
        "LD_LIBRARY_PATH": "/run/troupe-1/lib:/my venv/lib",
    }


@pytest.mark.parametrize("name", ["OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"])
def test_the_users_tuning_of_openblas_is_left_alone(name: str) -> None:
    assert name not in preload({name: "x"}, LIBRARY, link_directory=LINKS, threads=2)


def test_reference_takes_out_an_openblas_that_the_user_preloads_and_nothing_else() -> None:
    assert without_openblas({}) == {}
    assert without_openblas({"LD_PRELOAD": "jemalloc.so"}) == {}
    assert without_openblas({"LD_PRELOAD": "/usr/lib/libopenblas.so.0"}) == {"LD_PRELOAD": None}
    assert without_openblas({"LD_PRELOAD": "a.so:/x/libopenblasp-r0.so b.so"}) == {"LD_PRELOAD": "a.so:b.so"}


def test_the_fortran_runtime_is_linked_under_the_name_it_is_wanted_by(tmp_path: Path) -> None:
    libraries = tmp_path / "mlx_cpu.libs"
    libraries.mkdir()
    for name in ("libblas-1.so.3", "libgfortran-f73.so.5.0.0", "libquadmath-a96.so.0.0.0"):
        (libraries / name).touch()
    links = fortran_links(libraries)
    assert links == {
        "libgfortran.so.5": libraries / "libgfortran-f73.so.5.0.0",
        "libquadmath-a96.so.0.0.0": libraries / "libquadmath-a96.so.0.0.0",
    }
    for _ in range(2):  # a second Runtime in the same directory finds them there
        make_links(tmp_path / "lib", links)
    assert (tmp_path / "lib" / "libgfortran.so.5").samefile(libraries / "libgfortran-f73.so.5.0.0")


def test_without_the_wheels_libraries_there_are_no_links(tmp_path: Path) -> None:
    assert fortran_links(None) == {}
    assert fortran_links(tmp_path) == {}


def test_without_the_package_the_systems_library_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise blas.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(blas.importlib.metadata, "distribution", absent)
    assert find_openblas() == "libopenblas.so.0"
    assert blas.find_mlx_libraries() is None


@pytest.mark.anyio
async def test_a_mac_needs_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(blas.sys, "platform", "darwin")
    assert await choose_blas("auto", tmp_path) == BlasChoice("accelerate", "macOS brings Accelerate")


@pytest.mark.anyio
async def test_reference_leaves_the_environment_as_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(blas.sys, "platform", "linux")
    choice = await choose_blas("reference", tmp_path, threads=2, environment={"HOME": "/x"})
    assert (choice.name, choice.changes, choice.library) == ("reference", {}, None)
    assert os.listdir(tmp_path) == []
