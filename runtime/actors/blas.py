"""Which linear algebra will a CPU worker use, and what must stand in its environment for that?

MLX's Linux wheel links a reference BLAS: bit-exact over batch shapes, and tens of times slower than OpenBLAS, which takes its
place when it is preloaded. The library comes from the `cmeel-openblas` package or from the system; the Fortran runtime it
needs, often absent, is bundled with MLX and made visible by a private directory of links. A preload with a missing
dependency kills a process before its first line, so the environment is tried once on a trivial child, and left alone when
that fails. macOS needs nothing. How many threads compute later on is `engine/blas.py`'s matter.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

import anyio

BlasName = Literal["openblas", "reference", "accelerate"]

LIBRARY: Final = "libopenblas.so.0"
FORTRAN: Final = "libgfortran.so.5"
PROBE_SECONDS: Final = 20.0
_PROBE: Final = "import sys; sys.exit(0 if 'libopenblas' in open('/proc/self/maps').read() else 3)"


@dataclass(frozen=True, slots=True)
class BlasChoice:
    """What workers get. `changes`: environment variables to set, or (None) to remove. `reason`: in words, why this one.

    `library`: the file that is preloaded, None when none is.
    """

    name: BlasName
    reason: str
    changes: Mapping[str, str | None] = field(default_factory=dict)
    library: str | None = None


_verdicts: dict[tuple[str, ...], str | None] = {}
"""What was tried → what is wrong with it, for this process's life. (Where the links lie makes no difference.)"""


async def choose_blas(
    setting: Literal["auto", "reference"],
    directory: Path,
    *,
    threads: int | None = None,
    environment: Mapping[str, str] | None = None,
) -> BlasChoice:
    """Decide for workers that are started with `environment` (default: ours) and `BlasChoice.changes`.

    directory: a run directory; the links are made in it and must stay as long as workers are started. threads: of OpenBLAS
    in each worker; None leaves it to OpenBLAS and the user's environment. OPENBLAS_CORETYPE and OPENBLAS_L2_SIZE stay as
    they are. Never raises for a library that does not work: the reason says so.
    """
    base = os.environ if environment is None else environment
    if sys.platform == "darwin":
        return BlasChoice("accelerate", "macOS brings Accelerate")
    if setting == "reference":
        return BlasChoice("reference", "settings ask for blas='reference'", without_openblas(base))
    library = find_openblas()
    links = fortran_links(find_mlx_libraries())
    link_directory = directory / "lib" if links else None
    changes = preload(base, library, link_directory=link_directory, threads=threads)
    tried = (library, repr(sorted(links.items())), repr(_loader_variables(base)))
    try:
        if link_directory is not None:
            make_links(link_directory, links)
        if tried not in _verdicts:
            _verdicts[tried] = await _probe(base, changes)
        wrong = _verdicts[tried]
    except (OSError, TimeoutError) as error:  # of the moment, hence not remembered
        wrong = f"{type(error).__name__}: {error}"
    if wrong is None:
        return BlasChoice("openblas", f"preloaded from {library}", changes, library)
    return BlasChoice("reference", f"OpenBLAS ({library}) does not load: {wrong}. 'pip install cmeel-openblas' brings one")


def find_openblas() -> str:
    """The file of the `cmeel-openblas` package, or the bare name, with which the system's loader finds its own, if any."""
    try:
        distribution = importlib.metadata.distribution("cmeel-openblas")
    except importlib.metadata.PackageNotFoundError:
        return LIBRARY
    path = Path(str(distribution.locate_file(f"cmeel.prefix/lib/{LIBRARY}")))
    return str(path) if path.is_file() else LIBRARY


def find_mlx_libraries() -> Path | None:
    """The directory of libraries bundled with MLX's CPU wheel, found without importing it."""
    try:
        distribution = importlib.metadata.distribution("mlx-cpu")
    except importlib.metadata.PackageNotFoundError:
        return None
    path = Path(str(distribution.locate_file("mlx_cpu.libs")))
    return path if path.is_dir() else None


def fortran_links(libraries: Path | None) -> dict[str, Path]:
    """Link name → target, for the Fortran runtime in `libraries`; empty when it is not there.

    The wheel's names carry a hash. libgfortran is wanted by its plain name, libquadmath (absent on ARM) by the hashed one.
    """
    if libraries is None:
        return {}
    fortran = sorted(libraries.glob(f"libgfortran-*.{FORTRAN.partition('.')[2]}*"))
    if not fortran:
        return {}
    return {FORTRAN: fortran[-1], **{each.name: each for each in sorted(libraries.glob("libquadmath-*"))}}


def make_links(directory: Path, links: Mapping[str, Path]) -> None:
    directory.mkdir(mode=0o700, exist_ok=True)
    for name, target in links.items():
        link = directory / name
        if not link.is_symlink():
            link.symlink_to(target)


def preload(base: Mapping[str, str], library: str, *, link_directory: Path | None, threads: int | None) -> dict[str, str | None]:
    """The changes that make the loader take `library` first. What the user preloads stays, before ours."""
    # The loader splits LD_PRELOAD at colons and blanks and knows no quoting, so such a path goes into the search path instead.
    folder, name = os.path.split(library)
    is_plain = not any(each in library for each in ": \t\n")
    searched = [str(link_directory)] if link_directory is not None else []
    if folder and not is_plain:
        searched.append(folder)
    changes: dict[str, str | None] = {"LD_PRELOAD": ":".join([*_preloads(base), library if is_plain else name])}
    if searched:
        changes["LD_LIBRARY_PATH"] = os.pathsep.join([*searched, *filter(None, [base.get("LD_LIBRARY_PATH")])])
    if threads is not None:
        changes["OPENBLAS_NUM_THREADS"] = str(threads)
    return changes


def without_openblas(base: Mapping[str, str]) -> dict[str, str | None]:
    """The changes that leave out an OpenBLAS that the user preloads."""
    entries = _preloads(base)
    kept = [each for each in entries if "openblas" not in os.path.basename(each)]
    return {} if kept == entries else {"LD_PRELOAD": ":".join(kept) or None}


def _preloads(base: Mapping[str, str]) -> list[str]:
    return base.get("LD_PRELOAD", "").replace(":", " ").split()


def _loader_variables(base: Mapping[str, str]) -> list[tuple[str, str]]:
    return sorted((name, value) for name, value in base.items() if name.startswith("LD_"))


async def _probe(base: Mapping[str, str], changes: Mapping[str, str | None]) -> str | None:
    """What is wrong with this environment; None when a child starts in it and has the library.

    :raises OSError: :raises TimeoutError: no child could be tried.
    """
    environment = {**base, **{name: value for name, value in changes.items() if value is not None}}
    with anyio.fail_after(PROBE_SECONDS):
        done = await anyio.run_process(
            [sys.executable, "-I", "-S", "-c", _PROBE],
            env=environment,
            check=False,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    if done.returncode == 0:
        return None
    words = done.stderr.decode(errors="replace").strip().splitlines()
    return words[0] if words else f"a trial child ended with {done.returncode}"
