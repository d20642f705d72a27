"""Which environment do opponents get? The one the runtime makes for its workers: same BLAS, same number of compute threads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from runtime.actors.blas import choose_blas
from runtime.actors.process import worker_environment

ROOT = Path(__file__).resolve().parents[1]


async def opponent_environment(threads: int, directory: Path, *, blas: Literal["auto", "reference"] = "auto") -> dict[str, str]:
    """The whole environment of a child. `directory` must stay as long as children start."""
    choice = await choose_blas(blas, directory, threads=threads)
    made = worker_environment({**os.environ, "HF_HUB_OFFLINE": "1"}, choice.changes, directory)
    made["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [made.get("PYTHONPATH")])])
    return made
