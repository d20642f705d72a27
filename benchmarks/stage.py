"""Who is alive during the measurement? Opens each side when a part first needs it and closes all of them in the end."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import runtime
from benchmarks.children import HttpServer, InProcess, http_server, in_process
from benchmarks.measure import BenchmarkError, Run, equal_fraction, require_same_work
from benchmarks.subject import Subject

_LOAD_SECONDS = 300.0
_NUM_WARM_UP_TOKENS = 16
RUNTIME = "runtime"


@dataclass(frozen=True)
class Plan:
    """What one invocation measures. Token counts are per stream; models map a short name to a checkpoint directory."""

    parts: frozenset[str]
    models: Mapping[str, Path]
    main_model: str
    threads: int
    num_runs: int
    num_load_runs: int
    num_single_tokens: Mapping[str, int]
    num_crowd_tokens: int
    num_pair_tokens: int
    num_cpu_tokens: Mapping[str, int]
    num_cancel_tokens: int


@dataclass
class Ledger:
    """Every raw run of the invocation, in the order they ran, and what was found out beside them."""

    runs: list[dict[str, Any]] = field(default_factory=list)
    agreement: list[dict[str, Any]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def note(self, part: str, what: str, side: str, round_number: int, run: Run) -> None:
        self.runs.append({"part": part, "what": what, "side": side, "round": round_number, **run.summary()})

    def note_agreement(self, what: str, opponent: str, pairs: Sequence[tuple[Run, Run]]) -> None:
        """How far the output of (subject, opponent) was the same, in each round."""
        has_ids = all(stream.token_ids is not None for run in pairs[0] for stream in run.streams)
        fractions = [round(equal_fraction(ours.streams, theirs.streams), 4) for ours, theirs in pairs]
        compared = "token ids" if has_ids else "text"
        self.agreement.append({"what": what, "opponent": opponent, "compared": compared, "equal_fraction": fractions})


class Stage(contextlib.AsyncExitStack):
    """One Runtime and its opponents, all with the same number of compute threads. Everything on it ends with it."""

    def __init__(self, plan: Plan, ledger: Ledger, threads: int, environment: Mapping[str, str]) -> None:
        super().__init__()
        self.plan = plan
        self.ledger = ledger
        self.environment = environment
        self._threads = threads
        self._subject: Subject | None = None
        self._loaded: set[str] = set()
        self._opponents: dict[str, InProcess] = {}
        self._server: HttpServer | None = None

    async def subject(self, *names: str) -> Subject:
        """The Runtime with these models loaded. "left" and "right" are two loads of the main model."""
        if self._subject is None:
            home = self.enter_context(tempfile.TemporaryDirectory(prefix="troupe-bench-"))  # prefixes are kept, but not the user's
            settings = runtime.Settings(home=Path(home), compute_threads=self._threads, load_seconds=_LOAD_SECONDS)
            self._subject = Subject(await self.enter_async_context(runtime.Runtime(settings)))
        for name in names:
            if name not in self._loaded:
                say(f"loading {name} in the runtime")
                await self._subject.rt.load(runtime.ModelSpec(name, path=str(self.path(name))))
                self._loaded.add(name)
        return self._subject

    async def opponent(self, name: str) -> InProcess:
        """A child with mlx-lm and this model loaded, with the same BLAS as the runtime's workers."""
        if name not in self._opponents:
            say(f"loading {name} in an mlx-lm child")
            child = await self.enter_async_context(in_process(self.environment))
            await child.load(self.path(name))
            await self._require_same_blas(name, await child.ask("facts"))
            self._opponents[name] = child
        return self._opponents[name]

    async def server(self) -> HttpServer:
        """`mlx_lm.server` with the main model."""
        if self._server is None:
            say("starting mlx_lm.server")
            self._server = await self.enter_async_context(http_server(self.path(self.plan.main_model), self.environment))
        return self._server

    def path(self, name: str) -> Path:
        return self.plan.models.get(name, self.plan.models[self.plan.main_model])

    async def _require_same_blas(self, name: str, facts: dict[str, Any]) -> None:
        key = f"{self._threads} compute threads"
        self.ledger.facts.setdefault("opponents", {})[key] = facts
        if self._subject is not None and name in self._loaded:
            ours = self._subject.info(name).blas
            self.ledger.facts.setdefault("workers", {})[key] = {"blas": ours}
            if ours != facts["blas"]:
                raise BenchmarkError(f"the worker computes with {ours!r} and mlx-lm with {facts['blas']!r}; no fair comparison")


Side = Callable[[int, int], Awaitable[Run]]
"""(round number, tokens per stream) → one run."""


async def alternate(
    ledger: Ledger, part: str, what: str, num_runs: int, num_tokens: int, sides: Mapping[str, Side], *, same_work: bool = True
) -> dict[str, list[Run]]:
    """Run every side once a round, another one first each time, after a short warm-up of each that is not recorded.

    same_work: the first side and each other one must have read and made equally many tokens; how far they agree is noted.
    :raises BenchmarkError: they did not.
    """
    names = list(sides)
    for name in names:
        say(f"{part} {what}: warming up {name}")
        await sides[name](-1, min(num_tokens, _NUM_WARM_UP_TOKENS))
    runs: dict[str, list[Run]] = {name: [] for name in names}
    for round_number in range(num_runs):
        shift = round_number % len(names)
        for name in names[shift:] + names[:shift]:
            run = await sides[name](round_number, num_tokens)
            runs[name].append(run)
            ledger.note(part, what, name, round_number, run)
            say(f"{part} {what}: round {round_number + 1}/{num_runs} {name} {run.end_to_end_tokens_per_second:.1f} tok/s")
    for name in names[1:] if same_work else ():
        pairs = list(zip(runs[names[0]], runs[name], strict=True))
        for ours, theirs in pairs:
            require_same_work(ours, theirs, what=f"{part} {what}, {names[0]} beside {name}")
        ledger.note_agreement(f"{part} {what}", name, pairs)
    return runs


def say(line: str) -> None:
    """Progress, for people."""
    print(line, file=sys.stderr, flush=True)
