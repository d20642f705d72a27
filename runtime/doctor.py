"""What can this machine do, what is missing, and which command mends it?

Looks, and asks small child processes; changes nothing. A finding is a fact with a verdict; one that is not fine has a remedy.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shutil
import sys
import tempfile
from pathlib import Path

import msgspec

from runtime import store
from runtime.actors.blas import choose_blas
from runtime.children import run_guarded
from runtime.download import find_pip
from runtime.errors import FetchFailed

MIN_OPEN_FILES = 256
"""A worker costs the host about a dozen descriptors (sockets, pipes)."""

MIN_FREE_BYTES = 1 << 30
"""The fetchable model takes up to 0.9 GiB while it is converted."""

PACKAGES = ("mlx", "mlx-lm", "msgspec", "pyzmq", "anyio")

_PROBE_SECONDS = 60.0
_MLX_PROBE = (
    "import mlx.core as mx; mx.eval(mx.ones(4) + 1); "
    "print(mx.default_device().type.name, 'metal' if mx.metal.is_available() else 'no-metal')"
)


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """`remedy`: the exact command that mends it, or what to do; None when all is well."""

    name: str
    value: str
    remedy: str | None = None

    @property
    def is_fine(self) -> bool:
        return self.remedy is None


async def examine(home: Path) -> list[Finding]:
    """Every finding, in the order a person wants to read them."""
    findings = [_system(), _python(), *map(_package, PACKAGES)]
    findings.extend([await _device(), await _blas()])
    findings.extend([_cores(), _memory(), _open_files(), *_home(home), _temporary_directory()])
    findings.append(await _pip())
    return findings


def _system() -> Finding:
    value = f"{platform.platform()}, {platform.machine()}"
    if sys.platform == "darwin":
        fine = platform.machine() == "arm64"
        return Finding(name="system", value=value, remedy=None if fine else "MLX needs Apple silicon; use such a Mac, or Linux")
    fine = sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64")
    return Finding(
        name="system", value=value, remedy=None if fine else "use a Mac with Apple silicon, or Linux on x86_64 or aarch64"
    )


def _python() -> Finding:
    fine = sys.version_info >= (3, 11)
    value = f"{platform.python_version()} ({sys.executable})"
    return Finding(name="python", value=value, remedy=None if fine else "install Python 3.11 or newer")


def _package(name: str) -> Finding:
    try:
        return Finding(name=name, value=importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        wanted = "'mlx[cpu]'" if (name, sys.platform) == ("mlx", "linux") else name
        return Finding(name=name, value="not installed", remedy=f"{sys.executable} -m pip install {wanted}")


async def _device() -> Finding:
    """Whether MLX computes, asked of a child: the host side never imports it, and a broken install must not end us."""
    try:
        code, tail = await run_guarded([sys.executable, "-P", "-c", _MLX_PROBE], deadline_seconds=_PROBE_SECONDS)
    except TimeoutError:
        code, tail = -1, f"no answer within {_PROBE_SECONDS:.0f} s"
    last = tail.splitlines()[-1] if tail else "no output"
    if code != 0:
        wanted = "'mlx[cpu]'" if sys.platform == "linux" else "mlx"
        remedy = f"{sys.executable} -m pip install --force-reinstall {wanted}"
        return Finding(name="device", value=f"MLX does not compute: {last}", remedy=remedy)
    device, metal = last.split()
    return Finding(name="device", value=f"{device}, {'Metal' if metal == 'metal' else 'without Metal'}")


async def _blas() -> Finding:
    """What CPU workers will multiply with, decided as for them. The reference BLAS is right, but many times slower."""
    try:
        with tempfile.TemporaryDirectory(prefix="troupe-doctor-") as directory:
            choice = await choose_blas("auto", Path(directory))
    except OSError as error:
        return Finding(name="blas", value=f"cannot be tried: {error}", remedy="set TMPDIR to a directory you can write to")
    value = f"{choice.name}: {choice.reason}"
    remedy = f"{sys.executable} -m pip install cmeel-openblas" if choice.name == "reference" else None
    return Finding(name="blas", value=value, remedy=remedy)


def _cores() -> Finding:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return Finding(name="cores", value=f"{usable} usable of {os.cpu_count()}")


def _memory() -> Finding:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Finding(name="memory", value=f"{total / 2**30:.1f} GiB")


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    fine = soft == resource.RLIM_INFINITY or soft >= MIN_OPEN_FILES
    return Finding(name="open files", value=f"limit {soft} (hard {hard})", remedy=None if fine else "ulimit -n 1024")


def _home(home: Path) -> list[Finding]:
    standing = home
    while not standing.exists():
        standing = standing.parent
    free = shutil.disk_usage(standing).free
    remedy = None
    if not (standing.is_dir() and os.access(standing, os.W_OK | os.X_OK)):
        remedy = f"make {standing} a directory you can write to, or set TROUPE_HOME to one"
    elif free < MIN_FREE_BYTES:
        remedy = "make room there, or set TROUPE_HOME to a directory on a larger disk"
    names = (
        ", ".join(model.manifest.name for model in store.list_models(home))
        or "none yet; 'troupe models fetch smollm2-135m' gets one"
    )
    return [
        Finding(name="home", value=f"{home} ({free / 2**30:.1f} GiB free)", remedy=remedy),
        Finding(name="models", value=names),
    ]


def _temporary_directory() -> Finding:
    try:
        where = tempfile.gettempdir()
    except FileNotFoundError as error:
        return Finding(name="temp", value=str(error), remedy="set TMPDIR to a directory you can write to")
    return Finding(name="temp", value=where)


async def _pip() -> Finding:
    try:
        return Finding(name="pip", value=" ".join(await find_pip("any")))
    except FetchFailed:
        return Finding(name="pip", value="none found; models cannot be fetched", remedy=f"{sys.executable} -m ensurepip --upgrade")
