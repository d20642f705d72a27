"""Settings and fixtures for tests that run MLX in this process."""

from __future__ import annotations

import os

os.environ.setdefault("MLX_DISABLE_COMPILE", "1")  # spares seconds of compiling kernels at first use
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest

from tests.support.tiny import MakeTiny, TinyShelf


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> MakeTiny:
    """`tiny("llama", seed=1)`: a tiny checkpoint's directory, made once per session; copy it before changing it."""
    return TinyShelf(tmp_path_factory.mktemp("tiny"))
