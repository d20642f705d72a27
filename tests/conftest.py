"""What every test runs under: both event loops, a time limit, and a census of what it leaves behind."""

from __future__ import annotations

import functools
import gc
import inspect
import os
import tempfile
import uuid
from collections.abc import Awaitable, Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import anyio
import hypothesis
import pytest

from tests.support import census

TEST_SECONDS = 120.0
"""For one asynchronous test; `@pytest.mark.limit(seconds)` asks for another. pyproject's faulthandler_timeout ends a stuck run."""

hypothesis.settings.register_profile(
    "house",
    deadline=None,  # this machine's speed is nobody's property
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
    database=None,
    derandomize=os.environ.get("CI") == "true",  # there a run must be repeatable; everywhere else each one explores
)
hypothesis.settings.load_profile("house")


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    assert isinstance(request.param, str)
    return request.param


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    function = pyfuncitem.obj
    if inspect.iscoroutinefunction(function) and not hasattr(function, "hypothesis"):
        marker = pyfuncitem.get_closest_marker("limit")
        pyfuncitem.obj = _limited(function, float(marker.args[0]) if marker else TEST_SECONDS)
    return (yield)


def _limited(function: Callable[..., Awaitable[None]], seconds: float) -> Callable[..., Awaitable[None]]:
    @functools.wraps(function)
    async def limited(**arguments: Any) -> None:
        with anyio.fail_after(seconds):
            await function(**arguments)

    return limited


@pytest.fixture(scope="session", autouse=True)
def run_directories() -> Iterator[Path]:
    """Where this run's run directories are made: its own place, so that other runs beside it do not disturb the census.

    Everything this run starts also inherits a mark in its environment, by which the census finds it.
    """
    before = os.environ.get("XDG_RUNTIME_DIR")
    with census.mark(), tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as directory:
        os.environ["XDG_RUNTIME_DIR"] = directory
        yield Path(directory)
        if before is None:
            del os.environ["XDG_RUNTIME_DIR"]
        else:
            os.environ["XDG_RUNTIME_DIR"] = before


@pytest.fixture(autouse=True)
def own_home(request: pytest.FixtureRequest, run_directories: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test finds nothing of another's prefixes, and leaves nothing in the user's home; it is made when something is written.

    Tests with a real model look for it where the user keeps it.
    """
    if request.node.get_closest_marker("real_model") is None:
        monkeypatch.setenv("TROUPE_HOME", str(run_directories / f"home-{uuid.uuid4().hex}"))


@pytest.fixture(autouse=True)
def nothing_left_behind(run_directories: Path) -> Iterator[None]:
    """After each test no process of it runs, no descriptor is open and no run directory stands that was not there before."""
    before = census.take(run_directories)
    yield
    left = census.wait_until_gone(before, run_directories, seconds=2.0)
    if left.descriptors:
        gc.collect()  # descriptors of an event loop that sits in a cycle (a test that failed on purpose keeps its frames)
        left = census.wait_until_gone(before, run_directories, seconds=0.0)
    assert not left, f"left behind: {left}"
