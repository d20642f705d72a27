"""One real worker process at the other end of a real channel, driven by a test."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import anyio
import anyio.to_thread

from runtime.protocol.channel import HostChannel
from runtime.protocol.commands import AnyCommand, FakeScript, Fault, Inspect, Load, PrefillRow, Sampling, Shutdown
from runtime.protocol.events import (
    AnyEvent,
    Failed,
    Heartbeat,
    Hello,
    Inspected,
    Loading,
    Prepared,
    Ready,
    Refused,
    Released,
    StepDone,
    Stopped,
    WorkerReport,
)
from runtime.protocol.frames import FrameError
from runtime.protocol.ids import SequenceId
from runtime.protocol.tokens import TokenIds

KEY = "w1.1"
ROOT = Path(__file__).parents[2]
EventKind = TypeVar(
    "EventKind", Failed, Heartbeat, Hello, Inspected, Loading, Prepared, Ready, Refused, Released, StepDone, Stopped
)


def spawn(directory: Path, *, incarnation: int = 1, stderr: int | None = None) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "runtime.worker", "--directory", str(directory), "--key", KEY]
    command += ["--incarnation", str(incarnation), "--host-pid", str(os.getpid())]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=stderr, cwd=ROOT, start_new_session=True
    )


class LiveWorker:
    """`events` keeps everything received, in order; waiting reads on from there."""

    def __init__(self, channel: HostChannel, process: subprocess.Popen[bytes], directory: Path) -> None:
        self.channel = channel
        self.process = process
        self.directory = directory
        self.events: list[AnyEvent | FrameError] = []
        self._num_seen = 0

    def send(self, *commands: AnyCommand) -> None:
        for command in commands:
            self.channel.send(command)

    async def next(self, kind: type[EventKind], accept: Callable[[EventKind], bool] = lambda event: True) -> EventKind:
        """The next event of that kind that is accepted, passing over others."""
        with anyio.fail_after(20):
            while True:
                while self._num_seen < len(self.events):
                    event = self.events[self._num_seen]
                    self._num_seen += 1
                    if isinstance(event, kind) and accept(event):
                        return event
                self.events += await self.channel.receive()

    async def end_of(self, *sequences: int) -> None:
        """Wait until each of these has ended by itself."""
        waiting = set(sequences) - {r.sequence for step in self.all(StepDone) for r in step.rows if r.finish is not None}
        while waiting:
            step = await self.next(StepDone)
            waiting -= {r.sequence for r in step.rows if r.finish is not None}

    async def report(self, number: int = 1) -> WorkerReport:
        self.send(Inspect(number))
        return (await self.next(Inspected, lambda event: event.number == number)).report

    async def stop(self) -> int:
        self.send(Shutdown())
        await self.next(Stopped)
        return await self.exit_code()

    async def exit_code(self) -> int:
        with anyio.fail_after(10):
            return await anyio.to_thread.run_sync(self.process.wait, abandon_on_cancel=True)

    def all(self, kind: type[EventKind]) -> list[EventKind]:
        return [event for event in self.events if isinstance(event, kind)]

    def tokens(self, sequence: int) -> list[int]:
        return [token for step in self.all(StepDone) for r in step.rows if r.sequence == sequence for token in r.tokens]

    def text(self, sequence: int) -> str:
        return "".join(r.text for step in self.all(StepDone) for r in step.rows if r.sequence == sequence)


@asynccontextmanager
async def live_worker(
    script: FakeScript = FakeScript(),  # noqa: B008
    *faults: Fault,
    is_loaded: bool = True,
    stderr: int | None = subprocess.DEVNULL,
    **options: object,
) -> AsyncIterator[LiveWorker]:
    """`options` are those of `Load`; with `is_loaded` the worker is ready."""
    directory = Path(tempfile.mkdtemp(prefix="troupe-"))
    process = None
    try:
        with HostChannel(directory, KEY) as channel:
            process = spawn(directory, stderr=stderr)
            worker = LiveWorker(channel, process, directory)
            if is_loaded:
                worker.send(load_command(script, *faults, **options))
                await worker.next(Ready)
            yield worker
    finally:
        if process is not None:
            process.kill()
            process.communicate()
        shutil.rmtree(directory)


def load_command(script: FakeScript, *faults: Fault, **options: object) -> Load:
    fields = {field: getattr(script, field) for field in script.__struct_fields__}
    return Load("m", "", kind="fake", fake=FakeScript(**{**fields, "faults": faults or script.faults}), **options)


def row(
    sequence: int, prompt: Sequence[int], *, max_tokens: int = 8, limit: int = 1 << 20, sampling: Sampling | None = None
) -> PrefillRow:
    """`limit` is absolute."""
    length = len(prompt)
    return PrefillRow(SequenceId(sequence), TokenIds(prompt), length, length + max_tokens, limit, sampling=sampling or Sampling())
