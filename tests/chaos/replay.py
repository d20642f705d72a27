"""`python -m tests.chaos.replay FILE`: play a recording into a fresh scheduler, recounting all its tables after each stimulus."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.chaos.recorder import replay


def main() -> int:
    (path,) = sys.argv[1:]
    num_stimuli, different = replay(Path(path))
    what = "the same" if different is None else f"other instructions from number {different} on"
    print(f"{num_stimuli} stimuli: {what}")
    return 0 if different is None else 1


if __name__ == "__main__":
    sys.exit(main())
