"""What does speculation gain, and can it lose? `python -m benchmarks.speculation`; `--help` lists the options.

Prints progress on stderr and one JSON object on stdout, as `benchmarks.overhead` does.

    a   random models, acceptance 0, 0.5, 0.8, 1 x cost 1/8, 1/3 x batch 1, 4, 8: plain, rounds one after the other, drafts
        made ahead, and "auto", beside each other, the rounds' own parts, and mlx-lm's speculation in one process
    b   SmolLM2 made three times as deep, drafted for by its own weights in four bits: chat prompts, temperature 0 and 0.8
    c   drafter="lookup" on prompts whose answer repeats them, beside plain
    d   one drafter for two targets at once: tokens and acceptance of every row, beside plain and beside a row alone
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio

import runtime
from benchmarks.children import in_process
from benchmarks.environment import opponent_environment
from benchmarks.overhead import MAIN_MODEL, carry_out, checkpoint, machine
from benchmarks.report import Figure, table
from benchmarks.speculation_bench import Bench
from benchmarks.speculation_cells import matrix
from benchmarks.speculation_shared import shared
from benchmarks.speculation_texts import lookup, requantised
from benchmarks.stage import say

_DEADLINE_SECONDS = 3600.0
PARTS: dict[str, Callable[[Bench], Awaitable[list[Figure]]]] = {"a": matrix, "b": requantised, "c": lookup, "d": shared}


def _arguments(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speculation", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="few tokens of tiny models: shows that it runs, measures little")
    parser.add_argument("--only", default=",".join(PARTS), help="parts to run, for instance a,c (default: all)")
    parser.add_argument("--runs", type=int, help="runs of each side (default: 3, with --quick 1)")
    parser.add_argument(
        "--model", default=MAIN_MODEL, help="checkpoint directory, or model to fetch, of b and c (default: %(default)s)"
    )
    parser.add_argument("--ratios", default="8,3", help="depths of the targets of a, in drafters (default: %(default)s)")
    parser.add_argument("--acceptances", default="1,0.8,0.5,0", help="of a (default: %(default)s)")
    parser.add_argument("--batches", default="1,4,8", help="of a (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")
    values = parser.parse_args(given)
    unknown = set(values.only.split(",")) - set(PARTS)
    if unknown:
        parser.error(f"--only: unknown part {', '.join(sorted(unknown))}; parts are {', '.join(PARTS)}")
    return values


async def run(values: argparse.Namespace) -> dict[str, Any]:
    """The whole report. :raises BenchmarkError: something cannot be measured, or not fairly."""
    started = time.monotonic()
    facts = machine()
    parts = values.only.split(",")
    with tempfile.TemporaryDirectory(prefix="troupe-bench-") as name, anyio.fail_after(_DEADLINE_SECONDS):
        directory = Path(name)
        environment = await opponent_environment(1, directory)
        needs_model = bool({"b", "c"} & set(parts)) and not values.quick
        async with contextlib.AsyncExitStack() as stack:
            child = await stack.enter_async_context(in_process(environment))
            settings = runtime.Settings(home=directory / "home", compute_threads=1, prefix_memory_bytes=0, prefix_disk_bytes=0)
            bench = Bench(
                await stack.enter_async_context(runtime.Runtime(settings)),
                child,
                directory,
                is_quick=values.quick,
                num_runs=values.runs or (1 if values.quick else 3),
                model=await checkpoint(values.model) if needs_model else None,
                ratios=[int(ratio) for ratio in values.ratios.split(",")],
                acceptances=[float(acceptance) for acceptance in values.acceptances.split(",")],
                batches=[int(batch) for batch in values.batches.split(",")],
            )
            figures: list[Figure] = []
            for part in parts:
                figures += await PARTS[part](bench)
    say(table(figures))
    judged = [figure.is_met for figure in figures if figure.is_met is not None]
    return {
        "benchmark": "speculation",
        "quick": values.quick,
        "parts": parts,
        "machine": {**facts, "load_average_after": os.getloadavg()},
        "compute": {"threads": 1},
        "figures": [figure.as_json() for figure in figures],
        "num_targets_met": sum(judged),
        "num_targets": len(judged),
        "all_met": all(judged),
        "facts": bench.facts,
        "runs": bench.runs,
        "total_seconds": round(time.monotonic() - started, 1),
    }


def main(given: list[str] | None = None) -> int:
    return carry_out(run, _arguments(given))


if __name__ == "__main__":
    sys.exit(main())
