"""The worker process's first lines: be sure not to outlive the host, then live.

    python -m runtime.worker --directory DIR --key KEY --incarnation N --host-pid PID

stdin is a pipe from the host (its end means that the host is gone), stderr carries JSON lines.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from runtime.worker import stacks, watchdog


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m runtime.worker", allow_abbrev=False)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--key", required=True)
    parser.add_argument("--incarnation", type=int, required=True)
    parser.add_argument("--host-pid", type=int, required=True)
    arguments = parser.parse_args()
    watchdog.arm(arguments.host_pid)
    stacks.arm(arguments.directory / f"{arguments.key}.stacks")
    from runtime.worker.life import live  # only now: nothing heavy may be imported before the watchdog is armed

    return live(arguments.directory, arguments.key, arguments.incarnation, os.getpid())


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    # Without the interpreter's teardown: a text thread stuck in a template, or a library's exit hook, must not hold up the end.
    os._exit(code)
