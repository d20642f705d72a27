"""SIGKILL of the host, at any moment: two seconds later nothing of it is left, no process and no run directory."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support import census

HOST = """
import signal
import sys
import anyio
import runtime
from runtime.testing import FakeScript, Fault, fake_model

stage, backend = sys.argv[1:]
for number in (signal.SIGHUP, signal.SIGTERM):
    signal.signal(number, signal.SIG_DFL)  # whoever runs the tests in the background or under nohup has them ignored
signal.signal(signal.SIGINT, signal.default_int_handler)
SLOW = FakeScript(decode_seconds_per_step=0.01)
SPECS = {
    "import": fake_model("chat", faults=(Fault("import", "sleep", seconds=600.0),)),
    "load": fake_model("chat", faults=(Fault("load", "hang"),)),
    "prefill": fake_model("chat", prefill_seconds_per_token=0.01),
    "decode": fake_model("chat", decode_seconds_per_step=0.01),
    "birth": fake_model("chat"),
    "restart": fake_model("chat", faults=(Fault("load", "hang", incarnations=(2,)), Fault("decode", "kill", number=3))),
    "drain": fake_model("chat", faults=(Fault("shutdown", "hang"),)),
    "rounds": runtime.ModelSpec("chat", kind="fake", fake=SLOW, drafter="other", draft_tokens=3),
    "stuck": fake_model("chat", decode_seconds_per_step=0.01, faults=(Fault("decode", "hang", number=3),)),
}

async def main():
    async with runtime.Runtime(runtime.Settings(prefill_chunk_tokens=8)) as rt:
        async with anyio.create_task_group() as group:
            if stage in ("birth", "import", "load"):
                if stage == "birth":
                    print("now", flush=True)
                group.start_soon(rt.load, SPECS[stage])
                while not rt.models() or rt.models()[0].state != "loading":
                    await anyio.sleep(0.001)
            else:
                await rt.load(SPECS[stage])
                await rt.load(fake_model("other"))
                async with rt.tenant("a").stream("chat", prompt="x" * 3000, max_tokens=100_000, ignore_eos=True) as stream:
                    if stage == "restart":
                        while rt.models()[0].incarnation != 2 or rt.models()[0].state != "loading":
                            await anyio.sleep(0.001)
                    elif stage == "rounds":
                        while not rt.stats().scheduler.pairings[0].rounds:
                            await anyio.sleep(0.001)
                    elif stage == "drain":
                        group.start_soon(rt.unload, "chat")
                        while any(info.name == "chat" and info.state != "draining" for info in rt.models()):
                            await anyio.sleep(0.001)
                    elif stage == "stuck":
                        await anyio.sleep(0.5)
                    elif stage == "decode":
                        await anext(stream)
                    else:
                        while not (await rt.inspect("chat")).prefilling:
                            await anyio.sleep(0.001)
                    print("now", flush=True)
                    await anyio.sleep_forever()
            if stage != "birth":  # it has said so already, and nobody reads a second line
                print("now", flush=True)
            await anyio.sleep_forever()

anyio.run(main, backend=backend)
"""


@contextmanager
def host(stage: str, backend: str) -> Iterator[subprocess.Popen[bytes]]:
    """A host that has reached the stage. Killed at the end in any case."""
    program = subprocess.Popen([sys.executable, "-c", HOST, stage, backend], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        assert program.stdout is not None
        with program.stdout:
            assert program.stdout.readline() == b"now\n"
        yield program
    finally:
        program.kill()
        program.wait()


def assert_nothing_is_left(before: census.Census, run_directories: Path) -> None:
    left = census.wait_until_gone(before, run_directories, seconds=2.0)
    assert not left.processes
    assert not left.directories


@pytest.mark.parametrize("stage", ["import", "load", "prefill", "decode", "restart", "drain", "rounds", "stuck"])
def test_a_killed_host_leaves_nothing(stage: str, anyio_backend: str, run_directories: Path) -> None:
    if anyio_backend != "asyncio" and stage in ("restart", "drain", "rounds", "stuck"):
        pytest.skip("its event loop matters where it is born and where it serves")
    before = census.take(run_directories)
    with host(stage, anyio_backend) as program:
        assert census.run_directories(run_directories) - before.directories
        assert len(census.take(run_directories).beyond(before).processes) >= 3, "host, janitor, worker"
        program.kill()
        program.wait()
        assert_nothing_is_left(before, run_directories)


@pytest.mark.parametrize("seed", range(4))
def test_a_host_killed_while_its_worker_is_being_born_leaves_nothing(seed: int, anyio_backend: str, run_directories: Path) -> None:
    before = census.take(run_directories)
    with host("birth", anyio_backend) as program:
        # Anywhere between the spawn and the end of the child's imports.
        with pytest.raises(subprocess.TimeoutExpired):
            program.wait(random.Random(seed).uniform(0.0, 0.15))
        program.kill()
        program.wait()
        assert_nothing_is_left(before, run_directories)


HUNG_UP = [(stage, signal.SIGHUP) for stage in ("load", "prefill", "decode", "restart", "drain", "rounds", "stuck")]


@pytest.mark.parametrize(("stage", "number"), [*HUNG_UP, ("decode", signal.SIGTERM)])
def test_a_host_ended_by_a_signal_it_does_not_handle_leaves_nothing(
    stage: str, number: signal.Signals, run_directories: Path
) -> None:
    before = census.take(run_directories)
    with host(stage, "asyncio") as program:
        os.kill(program.pid, number)
        program.wait()
        assert_nothing_is_left(before, run_directories)


def test_ctrl_c_leaves_nothing(anyio_backend: str, run_directories: Path) -> None:
    before = census.take(run_directories)
    with host("decode", anyio_backend) as program:
        os.kill(program.pid, signal.SIGINT)
        assert program.wait() != 0
        assert_nothing_is_left(before, run_directories)
