"""What do the parts of the speculation benchmark measure with? One Runtime, one mlx-lm child, and what was found out so far."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio

import runtime
from benchmarks.children import InProcess
from benchmarks.measure import BenchmarkError, Run, StreamRun
from benchmarks.stage import say

NUM_DRAFT_TOKENS = 4
_RUN_SECONDS = 300.0
_LEAST_WINDOW = 0.3


@dataclass
class Bench:
    """model: the checkpoint of real text, None with `is_quick`. ratios, acceptances, batches: the cells of part a."""

    rt: runtime.Runtime
    child: InProcess
    directory: Path
    is_quick: bool
    num_runs: int
    model: Path | None
    ratios: Sequence[int]
    acceptances: Sequence[float]
    batches: Sequence[int]
    runs: list[dict[str, Any]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    async def crowd(
        self,
        model: str,
        asks: Sequence[Mapping[str, Any]],
        max_tokens: int,
        on_edge: Callable[[], None] = lambda: None,
    ) -> Run:
        """All at once, each a stream of its own.

        on_edge: called when the last of them has its first token, and when the first of them ends: the time that `Run` rates.

        :raises BenchmarkError: it takes too long.
        """
        tenant = self.rt.tenant("benchmark", runtime.TenantSpec(max_running=64))
        streams = [StreamRun(token_ids=[]) for _ in asks]
        num_begun = num_ended = 0
        started = time.perf_counter()

        async def one(ask: Mapping[str, Any], run: StreamRun) -> None:
            nonlocal num_begun, num_ended
            assert run.token_ids is not None
            async with tenant.stream(model, max_tokens=max_tokens, cache="off", **ask) as events:
                async for event in events:
                    if isinstance(event, runtime.TextDelta) and event.token_ids:
                        run.arrivals.append((time.perf_counter() - started, len(event.token_ids)))
                        run.token_ids.extend(event.token_ids)
                        if len(run.arrivals) == 1:
                            num_begun += 1
                            if num_begun == len(streams):
                                on_edge()
                    elif isinstance(event, runtime.Finished):
                        run.prompt_tokens = event.completion.usage.prompt_tokens
                        num_ended += 1
                        if num_ended == 1:
                            on_edge()

        try:
            with anyio.fail_after(_RUN_SECONDS):
                async with anyio.create_task_group() as group:
                    for ask, run in zip(asks, streams, strict=True):
                        group.start_soon(one, ask, run)
        except TimeoutError as error:
            raise BenchmarkError(f"{model}: {len(streams)} streams did not end within {_RUN_SECONDS:g} s") from error
        return Run(streams)

    def pairing(self, target: str) -> runtime.PairingStats:
        return next(pairing for pairing in self.rt.stats().scheduler.pairings if pairing.target == target)

    def note(self, part: str, cell: str, side: str, round_number: int, **facts: float) -> None:
        self.runs.append({"part": part, "cell": cell, "side": side, "round": round_number, **facts})
        shown = ", ".join(f"{name} {value:.4g}" for name, value in facts.items())
        say(f"{part} {cell}, round {round_number + 1}/{self.num_runs}, {side}: {shown}")

    async def load(self, name: str, path: str | Path, **options: Any) -> None:
        await self.rt.load(runtime.ModelSpec(name, path=str(path), compute_threads=1, **options))

    async def unload(self, *names: str) -> None:
        for name in names:
            await self.rt.unload(name)


@dataclass(frozen=True)
class RoundParts:
    """What the rounds between two moments consisted of, of `num_rows` rows each. Seconds are inside the workers' steps, all rounds
    together; `wire_seconds` is what these do not explain of the time from a round's beginning to its end."""

    num_rows: int
    num_rounds: int
    num_proposed: int
    num_accepted: int
    draft_seconds: float
    verify_seconds: float
    wire_seconds: float

    @classmethod
    def between(cls, before: runtime.PairingStats, after: runtime.PairingStats, num_rows: int) -> RoundParts:
        return cls(
            num_rows,
            after.rounds - before.rounds,
            after.proposed - before.proposed,
            after.accepted - before.accepted,
            after.draft_seconds - before.draft_seconds,
            after.verify_seconds - before.verify_seconds,
            after.wire_seconds - before.wire_seconds,
        )

    @property
    def accepted_share(self) -> float:
        return self.num_accepted / max(1, self.num_proposed)

    @property
    def draft_share(self) -> float:
        """Of the computing time of a round."""
        return self.draft_seconds / (self.draft_seconds + self.verify_seconds)

    @property
    def wire_share(self) -> float:
        return self.wire_seconds / (self.draft_seconds + self.verify_seconds + self.wire_seconds)

    @property
    def predicted_tokens_per_second(self) -> float:
        """Of all rows, if a round were nothing but its draft and its verify step, and each gave what was accepted and one token."""
        num_tokens = self.num_rows * (1 + NUM_DRAFT_TOKENS * self.accepted_share)
        return num_tokens * self.num_rounds / (self.draft_seconds + self.verify_seconds)


def rate(run: Run) -> float:
    """Tokens per second of all streams while all of them decode; when that is but a small part of the run, of the whole run."""
    start = max(stream.first_token_seconds for stream in run.streams)
    end = min(stream.total_seconds for stream in run.streams)
    if end - start >= _LEAST_WINDOW * run.total_seconds:
        return run.decode_tokens_per_second
    return run.end_to_end_tokens_per_second


def rotated(sides: Sequence[str], number: int) -> list[str]:
    """Another one first in every round."""
    shift = number % len(sides)
    return [*sides[shift:], *sides[:shift]]
