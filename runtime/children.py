"""How does a helper program (pip, a conversion) run so that it never outlives us?

The program runs in a session of its own under a few lines of shell that hold a pipe from us: the pipe ends when we
close it, exit or are killed in any way, and then the whole group is killed. Workers have their own, richer ladder.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections import deque
from collections.abc import AsyncIterable, Callable, Mapping, Sequence

import anyio
from anyio.abc import Process

# Background jobs of a shell without job control read /dev/null, hence the descriptor 3. `read` waits for the end of the pipe.
_GUARD = 'exec 3<&0; (read -r _ <&3; kill -KILL 0) & guard=$!; "$@" </dev/null 3<&-; code=$?; kill -KILL "$guard"; exit "$code"'

_TAIL_LINES = 40
_TAIL_LINE_CHARACTERS = 1000
_LINE_BYTES = 1 << 16
_REAP_SECONDS = 5.0


async def run_guarded(
    command: Sequence[str],
    *,
    deadline_seconds: float,
    on_line: Callable[[str], None] | None = None,
    environment: Mapping[str, str] | None = None,
    directory: str | os.PathLike[str] | None = None,
) -> tuple[int, str]:
    """Run a program to its end; returns its exit code and the last lines of its stderr (and of stdout without `on_line`).

    on_line: called with each line of stdout. environment: added to ours.
    :raises TimeoutError: it took longer than `deadline_seconds`. Then, as on cancellation, its whole group has been killed.
    """
    tail: deque[str] = deque(maxlen=_TAIL_LINES)

    def keep(line: str) -> None:
        tail.append(line[-_TAIL_LINE_CHARACTERS:])

    process = await anyio.open_process(
        ["/bin/sh", "-c", _GUARD, "sh", *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **(environment or {})},
        cwd=directory,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        with anyio.fail_after(deadline_seconds):
            async with anyio.create_task_group() as readers:
                readers.start_soon(_each_line, process.stdout, on_line or keep)
                readers.start_soon(_each_line, process.stderr, keep)
            code = await process.wait()
    finally:
        await _end(process)
    return code, "\n".join(tail)


async def _each_line(stream: AsyncIterable[bytes], on_line: Callable[[str], None]) -> None:
    pending = b""
    async for chunk in stream:
        *lines, pending = (pending + chunk).split(b"\n")
        for line in lines:
            on_line(line.decode(errors="replace"))
        if len(pending) > _LINE_BYTES:
            on_line(pending.decode(errors="replace"))
            pending = b""
    if pending:
        on_line(pending.decode(errors="replace"))


async def _end(process: Process) -> None:
    with anyio.CancelScope(shield=True), anyio.move_on_after(_REAP_SECONDS, shield=True):
        # Not reaped yet means that the group id is still this group's; once reaped, the guard has ended with the program.
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        await process.aclose()
