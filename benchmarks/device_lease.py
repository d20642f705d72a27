"""What does the device lease cost, and what does it change? `python -m benchmarks.device_lease`; `--help` lists the options.

Prints progress on stderr and one JSON object on stdout, as `benchmarks.overhead` does.

    a   a turn that nobody else wants, in microseconds
    b   tokens per second of models side by side, with each lease    beside no lease
    c   of an interactive and a background model side by side, with each lease: the share of the interactive one's tokens
    d   one model alone, with each lease                             beside no lease
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio

import runtime
from benchmarks.environment import opponent_environment
from benchmarks.measure import BenchmarkError
from benchmarks.overhead import DEFAULT_THREADS, MAIN_MODEL, carry_out, checkpoint, machine
from benchmarks.prefix import make_tiny_checkpoint
from benchmarks.report import Figure, Target, table
from benchmarks.stage import say
from runtime.protocol.commands import DeviceLease
from runtime.worker.device import LeasedDevice
from runtime.worker.status import Status

TURN = Target("median", at_most=20.0)
_DEADLINE_SECONDS = 1800.0
_NUM_TURNS = 5000
_PROMPT = "The quick brown fox jumps over the lazy dog, and then"


def turn_microseconds(num_runs: int) -> list[float]:
    """Taking the device, being asked for it by nobody, and giving it back."""
    costs = []
    with tempfile.TemporaryDirectory(prefix="troupe-bench-") as name:
        device = LeasedDevice(DeviceLease(str(Path(name, "device")), 1, 60.0), Status())
        for _ in range(num_runs):
            began = time.perf_counter()
            for _ in range(_NUM_TURNS):
                device.take(is_background=False)
                device.is_wanted()
                device.give_back()
            costs.append((time.perf_counter() - began) / _NUM_TURNS * 1e6)
        device.close()
    return costs


class House:
    """One Runtime with a lease and its models."""

    def __init__(self, rt: runtime.Runtime, models: Sequence[str]) -> None:
        self.rt = rt
        self._models = models

    async def alone(self, num_tokens: int) -> float:
        """Tokens per second of the first model."""
        began = time.perf_counter()
        await self._ask(self._models[0], num_tokens, "interactive")
        return num_tokens / (time.perf_counter() - began)

    async def together(self, num_tokens: int) -> float:
        """Tokens per second of all models, each with one stream."""
        began = time.perf_counter()
        async with anyio.create_task_group() as group:
            for model in self._models:
                group.start_soon(self._ask, model, num_tokens, "interactive")
        return len(self._models) * num_tokens / (time.perf_counter() - began)

    async def share(self, num_tokens: int) -> float:
        """Of the tokens made until an interactive stream has its `num_tokens`, beside a background one: how many are its own."""
        first, second = self._models[:2]
        others = 0

        async def work() -> None:
            nonlocal others
            asked = self.rt.tenant("background").stream(
                second, prompt=_PROMPT, max_tokens=900, ignore_eos=True, priority="background"
            )
            async with asked as stream:
                async for event in stream:
                    others += len(event.token_ids) if isinstance(event, runtime.TextDelta) else 0

        async with anyio.create_task_group() as group:
            group.start_soon(work)
            while not others:  # noqa: ASYNC110 (it says nothing)
                await anyio.sleep(0.001)
            before = others
            await self._ask(first, num_tokens, "interactive")
            made = others - before
            group.cancel_scope.cancel()
        return num_tokens / (num_tokens + made)

    async def _ask(self, model: str, num_tokens: int, priority: str) -> None:
        answer = await self.rt.tenant("benchmark").generate(
            model, prompt=_PROMPT, max_tokens=num_tokens, ignore_eos=True, cache="off", priority=priority
        )
        if answer.usage.completion_tokens != num_tokens:
            raise BenchmarkError(f"model {model!r} made {answer.usage.completion_tokens} tokens of {num_tokens}")

    def waits(self) -> dict[str, Any]:
        workers = self.rt.stats().workers
        return {
            "num_device_waits": sum(worker.num_device_waits for worker in workers),
            "device_wait_seconds": round(sum(worker.device_wait_seconds for worker in workers), 3),
        }


Measure = Callable[[House, int], Awaitable[float]]
PARTS: Mapping[str, tuple[str, str, Measure]] = {
    "b": ("models side by side", "tok/s", House.together),
    "c": ("share of the interactive model", "of tokens", House.share),
    "d": ("one model alone", "tok/s", House.alone),
}


async def measured(houses: Mapping[str, House], part: str, num_runs: int, num_tokens: int) -> dict[str, list[float]]:
    """Every house once a round, another one first each time."""
    name, unit, measure = PARTS[part]
    runs: dict[str, list[float]] = {lease: [] for lease in houses}
    for lease in houses:
        await measure(houses[lease], min(num_tokens, 16))
    for number in range(num_runs):
        order = list(houses)
        shift = number % len(order)
        for lease in order[shift:] + order[:shift]:
            runs[lease].append(await measure(houses[lease], num_tokens))
            say(f"{part} {name}: round {number + 1}/{num_runs} lease {lease}: {runs[lease][-1]:.4g} {unit}")
    return runs


def figures_of(part: str, runs: Mapping[str, Sequence[float]]) -> list[Figure]:
    name, unit, _ = PARTS[part]
    return [
        Figure(part, f"{name}, lease {lease}", unit, f"lease {lease}", mine, "no lease", runs["none"])
        for lease, mine in runs.items()
        if lease != "none"
    ]


async def run(values: argparse.Namespace) -> dict[str, Any]:
    """The whole report. :raises BenchmarkError: something cannot be measured."""
    started = time.monotonic()
    facts = machine()
    num_runs = values.runs or (1 if values.quick else 5)
    num_tokens = values.tokens or (48 if values.quick else 96)
    figures = [Figure("a", "a turn that nobody else wants", "us", "lease 1", turn_microseconds(num_runs), target=TURN)]
    waits: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="troupe-bench-") as name, anyio.fail_after(_DEADLINE_SECONDS):
        directory = Path(name)
        if values.quick:
            path = await make_tiny_checkpoint(await opponent_environment(values.threads, directory), directory)
        else:
            path = await checkpoint(values.model)
        async with AsyncExitStack() as stack:
            houses: dict[str, House] = {}
            for lease in ("none", *values.leases.split(",")):
                say(f"loading {values.models} models with lease {lease}")
                settings = runtime.Settings(
                    home=directory / "home",
                    compute_threads=values.threads,
                    device_lease=None if lease == "none" else int(lease),
                    prefix_memory_bytes=0,
                    prefix_disk_bytes=0,
                )
                rt = await stack.enter_async_context(runtime.Runtime(settings))
                models = [f"m{number}" for number in range(values.models)]
                for model in models:
                    await rt.load(runtime.ModelSpec(model, path=str(path)))
                houses[lease] = House(rt, models)
            for part in PARTS:
                figures += figures_of(part, await measured(houses, part, num_runs, num_tokens))
            await anyio.sleep(1.5)  # counts come with the next heartbeat
            waits = {lease: house.waits() for lease, house in houses.items()}
    say(table(figures))
    judged = [figure.is_met for figure in figures if figure.is_met is not None]
    return {
        "benchmark": "device_lease",
        "quick": values.quick,
        "machine": {**facts, "load_average_after": os.getloadavg()},
        "compute": {"threads": values.threads, "models": values.models},
        "figures": [figure.as_json() for figure in figures],
        "waits": waits,
        "num_targets_met": sum(judged),
        "num_targets": len(judged),
        "all_met": all(judged),
        "total_seconds": round(time.monotonic() - started, 1),
    }


def _arguments(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.device_lease", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="few tokens of a tiny model: shows that it runs, measures little")
    parser.add_argument("--leases", default="1", help="leases to compare with none, for instance 1,2 (default: %(default)s)")
    parser.add_argument("--models", type=int, default=2, help="models side by side, at least 2 (default: %(default)s)")
    parser.add_argument("--runs", type=int, help="runs of each side (default: 5, with --quick 1)")
    parser.add_argument("--tokens", type=int, help="tokens of a stream (default: 96, with --quick 48)")
    parser.add_argument("--model", default=MAIN_MODEL, help="checkpoint directory, or model to fetch (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=DEFAULT_THREADS, help="compute threads (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")
    values = parser.parse_args(given)
    if values.models < 2:
        parser.error("--models: at least 2")
    if not all(lease.isdecimal() and int(lease) >= 1 for lease in values.leases.split(",")):
        parser.error("--leases: whole numbers from 1, separated by commas")
    return values


def main(given: list[str] | None = None) -> int:
    return carry_out(run, _arguments(given))


if __name__ == "__main__":
    sys.exit(main())
