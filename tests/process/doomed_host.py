"""A host to be killed: it brings a worker to a state and says its pid. `python -m tests.process.doomed_host STATE DIR`."""

from __future__ import annotations

import sys
from pathlib import Path

import anyio

from runtime.protocol.channel import HostChannel
from runtime.protocol.commands import FakeScript, Fault, Prefill, Prepare, TextPrompt
from runtime.protocol.events import Hello, Loading, Ready, StepDone
from runtime.protocol.ids import RequestId
from tests.process.live_worker import KEY, LiveWorker, load_command, row, spawn

FAULTS = {
    "import": (Fault("import", "hang"),),
    "load": (Fault("load", "hang"),),
    "prepare": (Fault("prepare", "hang"),),
    "prefill": (Fault("prefill", "hang"),),
}


async def main(state: str, directory: Path) -> None:
    with HostChannel(directory, KEY) as channel:
        process = spawn(directory)
        worker = LiveWorker(channel, process, directory)
        await bring_to(state, worker)
        print(process.pid, flush=True)
        await anyio.sleep_forever()


async def bring_to(state: str, worker: LiveWorker) -> None:
    if state == "spawned":
        return
    await worker.next(Hello)
    if state == "connected":
        return
    worker.send(load_command(FakeScript(decode_seconds_per_step=0.005), *FAULTS.get(state, ())))
    await worker.next(Loading)
    if state in ("import", "load"):
        return
    await worker.next(Ready)
    worker.send(Prepare(RequestId(1), TextPrompt("x")), Prefill((row(1, [65], max_tokens=4000),)))
    if state == "decode":
        await worker.next(StepDone, lambda step: step.step > 3)
    else:
        await worker.report()


if __name__ == "__main__":
    anyio.run(main, sys.argv[1], Path(sys.argv[2]))
