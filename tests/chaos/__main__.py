"""`python -m tests.chaos [--seconds 600] [--seed N]`: one run, its summary as JSON, exit code 1 when somebody noticed."""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from pathlib import Path
from unittest import mock

import anyio

from tests.chaos.recorder import recorded
from tests.chaos.run import run
from tests.support import census


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", file=sys.stderr, flush=True)
    path = Path(f"chaos-{arguments.seed}.recording")
    with (
        tempfile.TemporaryDirectory() as directory,
        mock.patch("runtime.actors.health.RESTART_FIRST_SECONDS", 0.01),
        mock.patch("runtime.actors.health.RESTART_MOST_SECONDS", 0.05),
        census.mark(),
        recorded(path),
    ):
        run_directories = Path(directory) / "t"
        run_directories.mkdir()
        tempfile.tempdir = str(run_directories)
        before = census.take(run_directories)
        tally = anyio.run(run, Path(directory), arguments.seed, arguments.seconds)
        left = census.wait_until_gone(before, run_directories, 5.0)
        if left:
            tally.leaks.append(f"left behind: {left}")
    print(json.dumps(tally.summary(), indent=1))
    if tally.is_clean:
        path.unlink()
    else:
        print(f"its scheduler's stimuli are in {path}: python -m tests.chaos.replay {path}", file=sys.stderr)
    return 0 if tally.is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
