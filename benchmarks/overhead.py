"""What does the runtime cost, and gain, beside mlx-lm on this machine? `python -m benchmarks.overhead`; `--help` lists the options.

Prints progress on stderr and one JSON object on stdout: facts of the machine, every raw run, and for each figure the medians
of both sides, their ratio, and whether the target was met. Runs of the two sides alternate within the one invocation.

    a   one stream                          beside mlx_lm.stream_generate in a process of its own
    b   eight concurrent streams            beside mlx-lm's BatchGenerator in a process of its own
    c   eight concurrent streams            beside mlx_lm.server over HTTP
    d   two models at once, a core each     beside each of them alone
    e   what it costs: load to ready, memory, host CPU per token, cancel to stop

Exit code 0: measured, whatever the verdicts are. 1: could not be measured, or not fairly; stderr says why.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import anyio

import runtime
from benchmarks.children import in_process
from benchmarks.costs import costs
from benchmarks.environment import opponent_environment
from benchmarks.measure import BenchmarkError
from benchmarks.parts import crowd, one_stream, two_models
from benchmarks.report import Figure, table
from benchmarks.stage import Ledger, Plan, Stage, say
from runtime.fetch import fetch

PARTS = ("a", "b", "c", "d", "e")
MAIN_MODEL = "smollm2-135m"
DEFAULT_THREADS = max(1, (os.cpu_count() or 1) - 1)
"""As the runtime does for one model: on all cores, BLAS threads spin whenever anything else wants one, on either side."""
_DEADLINE_SECONDS = 1800.0
_PACKAGES = ("mlx-troupe", "mlx", "mlx-lm", "pyzmq", "msgspec", "anyio")


def _arguments(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="a few tokens of the tiny model: shows that it runs, measures little")
    parser.add_argument("--only", default=",".join(PARTS), help="parts to run, for instance a,c (default: all)")
    parser.add_argument("--runs", type=int, help="runs of each side (default: 5, with --quick 1)")
    parser.add_argument("--model", default=MAIN_MODEL, help="checkpoint directory, or model to fetch (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=DEFAULT_THREADS, help="compute threads, but for d (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")
    values = parser.parse_args(given)
    unknown = set(values.only.split(",")) - set(PARTS)
    if unknown:
        parser.error(f"--only: unknown part {', '.join(sorted(unknown))}; parts are {', '.join(PARTS)}")
    if values.runs is not None and values.runs < 1:
        parser.error(f"--runs: got {values.runs}; at least 1")
    return values


async def _plan(values: argparse.Namespace, directory: Path) -> Plan:
    async with in_process(await opponent_environment(1, directory)) as child:
        tiny = Path((await child.ask("make_tiny", directory=str(directory / "tiny")))["path"])
    parts = frozenset(values.only.split(","))
    if values.quick:
        return Plan(
            parts=parts,
            models={"tiny": tiny},
            main_model="tiny",
            threads=values.threads,
            num_runs=values.runs or 1,
            num_load_runs=1,
            num_single_tokens={"tiny": 200},
            num_crowd_tokens=16,
            num_pair_tokens=400,
            num_cpu_tokens={"tiny": 32},
            num_cancel_tokens=1000,
        )
    return Plan(
        parts=parts,
        models={"smollm2": await checkpoint(values.model), "tiny": tiny},
        main_model="smollm2",
        threads=values.threads,
        num_runs=values.runs or 5,
        num_load_runs=min(values.runs or 5, 3),
        num_single_tokens={"smollm2": 48, "tiny": 1000},
        num_crowd_tokens=48,
        num_pair_tokens=40,
        num_cpu_tokens={"smollm2": 16, "tiny": 500},
        num_cancel_tokens=1000,
    )


async def checkpoint(model: str) -> Path:
    """A directory, or a model to fetch by name."""
    directory = anyio.Path(model)
    if await directory.is_dir():
        return Path(await directory.absolute())
    say(f"fetching {model} (nothing to do when it is there)")
    return await fetch(model, runtime.Settings().home_directory())


async def measure(plan: Plan, ledger: Ledger, directory: Path) -> list[Figure]:
    """All parts of the plan. `directory`: for temporary files.

    :raises BenchmarkError: a part cannot be measured, or not fairly.
    """
    figures: list[Figure] = []
    if plan.parts - {"d"}:
        environment = await opponent_environment(plan.threads, directory)
        async with Stage(plan, ledger, plan.threads, environment) as stage:
            if "e" in plan.parts:
                figures += await costs(stage)
            if "a" in plan.parts:
                figures += await one_stream(stage)
            if plan.parts & {"b", "c"}:
                figures += await crowd(stage)
    if "d" in plan.parts:
        async with Stage(plan, ledger, 1, await opponent_environment(1, directory)) as stage:
            figures += await two_models(stage)
    return sorted(figures, key=lambda figure: figure.part)


def machine() -> dict[str, Any]:
    """What was measured on."""
    return {
        "system": platform.platform(),
        "processor": platform.machine(),
        "num_cores": os.cpu_count(),
        "python": platform.python_version(),
        "packages": {name: metadata.version(name) for name in _PACKAGES},
        "load_average": os.getloadavg(),
    }


Benchmark = Callable[[argparse.Namespace], Awaitable[dict[str, Any]]]


async def interrupted_by_signals(run: Benchmark, values: argparse.Namespace) -> dict[str, Any]:
    """:raises BenchmarkError: as `run`, and after Ctrl-C or SIGTERM, once every child and file is gone."""
    async with anyio.create_task_group() as group:
        group.start_soon(_stop_at_signal, group.cancel_scope)
        report = await run(values)
        group.cancel_scope.cancel()
        return report
    raise BenchmarkError("interrupted")


async def _stop_at_signal(scope: anyio.CancelScope) -> None:
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for _ in signals:
            scope.cancel()


async def run(values: argparse.Namespace) -> dict[str, Any]:
    """The whole report. :raises BenchmarkError: something cannot be measured, or not fairly."""
    started = time.monotonic()
    ledger = Ledger()
    facts = machine()
    with tempfile.TemporaryDirectory(prefix="troupe-bench-") as directory, anyio.fail_after(_DEADLINE_SECONDS):
        plan = await _plan(values, Path(directory))
        figures = await measure(plan, ledger, Path(directory))
    say(table(figures))
    judged = [figure.is_met for figure in figures if figure.is_met is not None]
    return {
        "benchmark": "overhead",
        "quick": values.quick,
        "parts": sorted(plan.parts),
        "machine": {**facts, "load_average_after": os.getloadavg()},
        "compute": {"threads": plan.threads, **ledger.facts},
        "figures": [figure.as_json() for figure in figures],
        "num_targets_met": sum(judged),
        "num_targets": len(judged),
        "all_met": all(judged),
        "agreement": ledger.agreement,
        "runs": ledger.runs,
        "total_seconds": round(time.monotonic() - started, 1),
    }


def leaves(error: BaseException) -> Iterator[BaseException]:
    """The exceptions in a group of groups."""
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            yield from leaves(each)
    else:
        yield error


def carry_out(run: Benchmark, values: argparse.Namespace) -> int:
    """A whole command: the JSON of `run` on stdout and in `values.output`, or why there is none. Gives the exit code."""
    report = None
    try:
        report = anyio.run(interrupted_by_signals, run, values)
    except* (BenchmarkError, runtime.TroupeError, TimeoutError) as group:
        for error in leaves(group):
            say(f"error: {type(error).__name__}: {error}")
    if report is None:
        return 1
    text = json.dumps(report, indent=1)
    if values.output is not None:
        values.output.write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0


def main(given: list[str] | None = None) -> int:
    return carry_out(run, _arguments(given))


if __name__ == "__main__":
    sys.exit(main())
