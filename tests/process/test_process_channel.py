"""The channel between real processes, one of which is killed in the middle of a word."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from runtime.actors.process import spawn_worker
from runtime.protocol.channel import HostChannel
from runtime.protocol.commands import Inspect
from runtime.protocol.events import Stopped
from runtime.protocol.frames import FrameError

pytestmark = pytest.mark.anyio
PATIENCE_SECONDS = 20.0

_WORKER = """
import sys
from pathlib import Path
from runtime.protocol.channel import WorkerChannel
from runtime.protocol.events import Prepared, Stopped
from runtime.protocol.tokens import TokenIds

channel = WorkerChannel(Path(sys.argv[1]), sys.argv[2])
channel.send(Stopped(channel.receive(20).number))
while True:  # until killed: long messages, so that the end comes in the middle of one
    channel.send(Prepared(1, TokenIds(range(100_000))))
"""


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tr-", dir="/tmp") as made:
        yield Path(made)


async def test_a_worker_killed_while_it_speaks_leaves_whole_events_only_and_no_file(directory: Path) -> None:
    async with anyio.create_task_group() as group:
        for number in (1, 2):  # the second incarnation starts afresh in the same directory
            key = f"w1.{number}"
            with HostChannel(directory, key) as channel:
                channel.send(Inspect(number))
                process = await spawn_worker(
                    group,
                    [sys.executable, "-c", _WORKER, str(directory), key],
                    environment=os.environ,
                    model="chat",
                    incarnation=number,
                )
                with anyio.fail_after(PATIENCE_SECONDS):
                    first = await channel.receive()
                    while len(first) < 3:
                        first += await channel.receive()
                assert first[0] == Stopped(number), process.report("").stderr_tail
                os.kill(process.pid, signal.SIGKILL)
                await process.wait()
                rest: list[object] = []
                with anyio.move_on_after(0.3):
                    while True:
                        rest += await channel.receive()
                assert not [event for event in rest if isinstance(event, FrameError)]
                await process.close()
            assert os.listdir(directory) == []
