"""A process that publishes, for tests: kills itself at a given step of a publish, or publishes many segments.

python -m tests.unit.prefix.publishing_child die ROOT CALL NUMBER WHEN      at the number-th call of that os function
python -m tests.unit.prefix.publishing_child many ROOT FIRST_SEED LAST_SEED
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from runtime.prefix import temporary
from runtime.prefix.hashing import BLOCK_TOKENS
from runtime.prefix.publish import Published, publish
from tests.unit.prefix.model import draft, tokens


def die(root: Path, call: str, number: int, when: str) -> None:
    module: Any = temporary.fcntl if call == "flock" else os
    real = getattr(module, call)
    calls = 0

    def deadly(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            if when == "after":
                real(*arguments, **options)
            if when == "inside":  # half of a write
                real(arguments[0], arguments[1][: len(arguments[1]) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **options)

    setattr(module, call, deadly)
    publish(root, draft(tokens(BLOCK_TOKENS), 0, BLOCK_TOKENS))


def many(root: Path, first: int, last: int) -> None:
    for seed in range(first, last):
        prompt = tokens(2 * BLOCK_TOKENS, seed)
        for start, end in ((0, BLOCK_TOKENS), (BLOCK_TOKENS, 2 * BLOCK_TOKENS)):
            result = publish(root, draft(prompt, start, end))
            assert isinstance(result, Published), result


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["die", root, call, number, when]:
            die(Path(root), call, int(number), when)
        case ["many", root, first, last]:
            many(Path(root), int(first), int(last))
