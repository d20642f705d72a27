"""Does a busy host or a busy machine get workers killed that are well? A loaded run whose host blocks its own loop all the time.

`python -m benchmarks.health [--seconds 600]`: fake and tiny real models under a steady load, the event loop blocked for 50 ms of
every 200 ms, and every beat late for it. Anything but 0 restarts is a false kill. JSON on stdout.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path

import anyio

import runtime
from runtime.testing import fake_model
from tests.support.tiny import make_tiny

BLOCKED_SECONDS, PERIOD_SECONDS = 0.05, 0.2
SILENCE_SECONDS = 2.0
NUM_CLIENTS = 8


async def measure(directory: Path, seconds: float) -> dict[str, object]:
    checkpoint = make_tiny(directory / "tiny", "llama")
    settings = runtime.Settings(home=directory / "home", silence_seconds=SILENCE_SECONDS)
    num_answers, longest_gap, is_over = 0, 0.0, False

    async def client(number: int) -> None:
        nonlocal num_answers
        chance = random.Random(number)
        while not is_over:
            name = chance.choice(["fake", "tiny", "slow"])
            prompt = "x" * chance.choice([1, 50, 1500])
            await rt.tenant(f"{number}").generate(name, prompt=prompt, max_tokens=chance.randint(1, 60), cache="off")
            num_answers += 1

    async def block() -> None:
        nonlocal longest_gap
        last = time.monotonic()
        while not is_over:
            time.sleep(BLOCKED_SECONDS)  # noqa: ASYNC251 (a host that blocks its loop is the case)
            await anyio.sleep(PERIOD_SECONDS - BLOCKED_SECONDS)
            longest_gap, last = max(longest_gap, time.monotonic() - last), time.monotonic()

    async with runtime.Runtime(settings) as rt:
        await rt.load(fake_model("fake", decode_seconds_per_step=0.002))
        await rt.load(fake_model("slow", prefill_seconds_per_token=0.004, decode_seconds_per_step=0.05))
        await rt.load(runtime.ModelSpec("tiny", str(checkpoint)))
        start = time.monotonic()
        async with anyio.create_task_group() as group:
            for number in range(NUM_CLIENTS):
                group.start_soon(client, number)
            group.start_soon(block)
            await anyio.sleep(seconds)
            is_over = True
        return {
            "seconds": round(time.monotonic() - start, 1),
            "silence_seconds": SILENCE_SECONDS,
            "answers": num_answers,
            "longest_turn_of_the_loop_seconds": round(longest_gap, 3),
            "false_kills": sum(info.restarts for info in rt.models()),
            "failed_requests": rt.stats().scheduler.failed,
        }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.health")
    parser.add_argument("--seconds", type=float, default=600.0)
    with tempfile.TemporaryDirectory() as directory:
        found = anyio.run(measure, Path(directory), parser.parse_args().seconds)
    print(json.dumps(found, indent=1))
    return 0 if found["false_kills"] == found["failed_requests"] == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
