"""The import arrows of the house hold, and the check that says so can fail."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import arrows

ROOT = Path(__file__).parents[2]


def test_every_import_of_the_package_follows_an_arrow() -> None:
    assert arrows.breaches(ROOT / "runtime") == []


@pytest.mark.parametrize(
    ("file", "line", "complaint"),
    [
        ("scheduler/state.py", "from runtime.actors import supervisor", "scheduler may not import actors"),
        ("scheduler/state.py", "from runtime import actors", "scheduler may not import actors"),
        ("scheduler/state.py", "import runtime.actors.supervisor as other", "scheduler may not import actors"),
        ("scheduler/state.py", "from ..actors import supervisor", "scheduler may not import actors"),
        ("scheduler/state.py", "from .. import actors", "scheduler may not import actors"),
        ("actors/supervisor.py", "import runtime.scheduler", "actors may not import scheduler"),
        ("protocol/frames.py", "from runtime.config import Settings", "protocol may not import config"),
        ("worker/loop.py", "from runtime.host import Runtime", "worker may not import host"),
        ("scheduler/state.py", "from runtime import Runtime", "scheduler may not import __init__"),
        ("scheduler/state.py", "import runtime", "scheduler may not import __init__"),
        ("testing.py", "from runtime.engine.lm import load", "testing may not import engine.lm"),
        ("store.py", "def f():\n    import mlx.core as mx", "only engine/ may import mlx"),
        ("worker/loop.py", "if TYPE_CHECKING:\n    from numpy import ndarray", "may import numpy"),
        ("worker/__main__.py", "importlib.import_module('transformers')", "may import transformers"),
        ("host.py", "import tokenizers", "may import tokenizers"),
        ("novelty.py", "import os", "not in the table"),
    ],
)
def test_a_planted_breach_is_found(tmp_path: Path, file: str, line: str, complaint: str) -> None:
    path = tmp_path / "runtime" / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(line + "\n")
    (found,) = arrows.breaches(tmp_path / "runtime")
    assert found.startswith(file)
    assert complaint in found


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("engine/lm.py", "import mlx.core as mx"),
        ("worker/loop.py", "from runtime.engine.engine import Engine"),
        ("scheduler/state.py", "from .stimuli import Submit"),
        ("host.py", "from runtime import actors, scheduler"),
        ("cli/run.py", "from runtime import Runtime, store"),
    ],
)
def test_a_planted_allowed_import_is_let_pass(tmp_path: Path, file: str, line: str) -> None:
    path = tmp_path / "runtime" / file
    path.parent.mkdir(parents=True)
    path.write_text(line + "\n")
    assert arrows.breaches(tmp_path / "runtime") == []


@pytest.mark.parametrize("module", ["runtime", "runtime.cli"])
def test_what_an_app_imports_pulls_in_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print(*{{name.partition('.')[0] for name in sys.modules}} & set(sys.argv[1:]))"
    result = subprocess.run([sys.executable, "-c", code, *arrows.HEAVY], capture_output=True, text=True, cwd=ROOT, check=True)
    assert result.stdout.strip() == ""
