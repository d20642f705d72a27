"""What do shared prefixes save, and what do they cost? `python -m benchmarks.prefix`; `--help` lists the options.

Prints progress on stderr and one JSON object on stdout, as `benchmarks.overhead` does.

    a   a prompt from another process's file, and from memory      beside computing it
    b   eight clients at once with one new prefix                  beside one client, and beside mlx_lm.server
    c   decode speed while a prefix is being published             beside cache="off"
    d   prompts that are never repeated                            beside cache="off"
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import anyio

import runtime
from benchmarks.children import http_server, in_process
from benchmarks.environment import opponent_environment
from benchmarks.overhead import DEFAULT_THREADS, MAIN_MODEL, carry_out, checkpoint, machine
from benchmarks.prefix_parts import PARTS, Bench
from benchmarks.report import Figure, table
from benchmarks.stage import say

_DEADLINE_SECONDS = 1800.0


def _arguments(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prefix", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="few tokens of a tiny model: shows that it runs, measures little")
    parser.add_argument("--only", default=",".join(PARTS), help="parts to run, for instance a,c (default: all)")
    parser.add_argument("--runs", type=int, help="runs of each side (default: 5, with --quick 1)")
    parser.add_argument("--model", default=MAIN_MODEL, help="checkpoint directory, or model to fetch (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=DEFAULT_THREADS, help="compute threads (default: %(default)s)")
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
        environment = await opponent_environment(values.threads, directory)
        path = await make_tiny_checkpoint(environment, directory) if values.quick else await checkpoint(values.model)
        async with contextlib.AsyncExitStack() as stack:
            server = await stack.enter_async_context(http_server(path, environment)) if "b" in parts else None
            settings = runtime.Settings(
                home=directory / "home",
                compute_threads=values.threads,
                prefix_memory_bytes=4 << 30,
                prefix_disk_bytes=8 << 30,
                prefix_free_bytes=0,
            )
            rt = await stack.enter_async_context(runtime.Runtime(settings))
            for model in ("left", "right"):
                say(f"loading {model}")
                info = await rt.load(runtime.ModelSpec(model, path=str(path)))
            bench = Bench(
                rt,
                num_runs=values.runs or (1 if values.quick else 5),
                num_prefix_tokens=600 if values.quick else 1024,
                num_prefix_words=150 if values.quick else 920,
                num_decode_tokens=8 if values.quick else 32,
                num_cold_prompts=3 if values.quick else 8,
                vocabulary_size=info.vocabulary_size or 0,
                server=server,
            )
            await bench.ask("left", bench.tokens(40), 4)
            await bench.ask("right", bench.tokens(40), 4)
            figures: list[Figure] = []
            for part in parts:
                figures += await PARTS[part](bench)
    say(table(figures))
    judged = [figure.is_met for figure in figures if figure.is_met is not None]
    return {
        "benchmark": "prefix",
        "quick": values.quick,
        "parts": parts,
        "machine": {**facts, "load_average_after": os.getloadavg()},
        "compute": {"threads": values.threads},
        "figures": [figure.as_json() for figure in figures],
        "num_targets_met": sum(judged),
        "num_targets": len(judged),
        "all_met": all(judged),
        "runs": bench.runs,
        "total_seconds": round(time.monotonic() - started, 1),
    }


async def make_tiny_checkpoint(environment: dict[str, str], directory: Path) -> Path:
    async with in_process(environment) as child:
        return Path((await child.ask("make_tiny", directory=str(directory / "tiny")))["path"])


def main(given: list[str] | None = None) -> int:
    return carry_out(run, _arguments(given))


if __name__ == "__main__":
    sys.exit(main())
