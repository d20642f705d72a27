"""What does each part of the prefix benchmark compare, and what must it reach? Runs of the sides alternate, round by round."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import anyio

import runtime
from benchmarks.children import HttpServer
from benchmarks.measure import BenchmarkError, Run, StreamRun
from benchmarks.report import Figure, Target
from benchmarks.stage import say

WARM_FILE = Target("ratio", at_most=1 / 15)
WARM_MEMORY = Target("ratio", at_most=1 / 20)
CROWD = Target("ratio", at_most=1.5)
PUBLISHING = Target("ratio", at_least=0.97)
NEVER_REPEATED = Target("ratio", at_most=1.03)

NUM_CROWD = 8
NUM_TAIL_TOKENS = 12
SETTLE_SECONDS = 30.0
Cache = Literal["on", "read-only", "off"]
_WORDS = ("river", "stone", "market", "winter", "copper", "garden", "letter", "bridge", "window", "harbour", "candle", "orchard")


@dataclass
class Bench:
    """One Runtime with two workers of one model, `left` and `right`, and what is measured of it."""

    rt: runtime.Runtime
    num_runs: int
    num_prefix_tokens: int
    num_prefix_words: int
    num_decode_tokens: int
    num_cold_prompts: int
    vocabulary_size: int
    server: HttpServer | None
    numbers: random.Random = field(default_factory=lambda: random.Random(20))
    runs: list[dict[str, Any]] = field(default_factory=list)

    def tokens(self, num_tokens: int) -> list[int]:
        """Ids that no prompt had before."""
        return [self.numbers.randrange(self.vocabulary_size * 3 // 4) for _ in range(num_tokens)]  # special ids are few

    async def ask(self, model: str, tokens: list[int], max_tokens: int, *, cache: Cache = "on") -> tuple[Run, runtime.Usage]:
        """One stream; its usage tells what was restored."""
        stream = StreamRun(token_ids=[])
        started = time.perf_counter()
        usage = None
        async with self._tenant.stream(model, tokens=tokens, max_tokens=max_tokens, ignore_eos=True, cache=cache) as events:
            async for event in events:
                if isinstance(event, runtime.TextDelta):
                    stream.arrivals.append((time.perf_counter() - started, len(event.token_ids)))
                elif isinstance(event, runtime.Finished):
                    usage = event.completion.usage
        assert usage is not None
        stream.prompt_tokens = usage.prompt_tokens
        return Run([stream]), usage

    async def crowd(self, model: str, prompts: list[str], max_tokens: int) -> Run:
        streams = [StreamRun() for _ in prompts]
        started = time.perf_counter()

        async def one(prompt: str, run: StreamRun) -> None:
            async with self._tenant.stream(model, prompt=prompt, max_tokens=max_tokens, ignore_eos=True) as events:
                async for event in events:
                    if isinstance(event, runtime.TextDelta):
                        run.arrivals.append((time.perf_counter() - started, len(event.token_ids)))
                    elif isinstance(event, runtime.Finished):
                        run.prompt_tokens = event.completion.usage.prompt_tokens

        async with anyio.create_task_group() as group:
            for prompt, run in zip(prompts, streams, strict=True):
                group.start_soon(one, prompt, run)
        return Run(streams)

    async def published(self, num_before: int, num_files: int) -> None:
        """Wait until so many more files are published. :raises BenchmarkError: they do not come."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while time.monotonic() < deadline:
            if self.num_published() >= num_before + num_files:
                return
            await anyio.sleep(0.01)
        raise BenchmarkError(f"{num_files} prefix files were not published within {SETTLE_SECONDS:g} s: {self.rt.stats()}")

    def num_published(self) -> int:
        return self.rt.stats().scheduler.prefixes.published

    def note(self, part: str, side: str, round_number: int, **facts: Any) -> None:
        self.runs.append({"part": part, "side": side, "round": round_number, **facts})
        shown = ", ".join(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in facts.items())
        say(f"{part} round {round_number + 1}/{self.num_runs} {side}: {shown}")

    @property
    def _tenant(self) -> runtime.Tenant:
        return self.rt.tenant("benchmark", runtime.TenantSpec(max_running=64))


async def warm(bench: Bench) -> list[Figure]:
    """(a) Time to first token of a prompt nobody saw, then of the same one in the other process, then there again.

    The prompt is whole blocks and one token: what files hold of another length ends at the last whole block.
    """
    num_tokens = bench.num_prefix_tokens // 256 * 256 + 1
    seconds: dict[str, list[float]] = {"cold": [], "file": [], "memory": []}
    for number in range(bench.num_runs):
        tokens = bench.tokens(num_tokens)
        for side, model, cached in (("cold", "left", 0), ("file", "right", num_tokens - 1), ("memory", "right", num_tokens - 1)):
            before = bench.num_published()
            run, usage = await bench.ask(model, tokens, 2)
            if usage.cached_tokens != cached:
                raise BenchmarkError(f"{side}: {usage.cached_tokens} tokens came from the cache, {cached} should have")
            seconds[side].append(run.first_token_seconds)
            bench.note("a", side, number, first_token_seconds=run.first_token_seconds, cached_tokens=usage.cached_tokens)
            if side == "cold":
                await bench.published(before, num_tokens // 512)
    return [
        _ratio("a", f"first token, {num_tokens} tokens, file of another process", "s", seconds, "file", "cold", WARM_FILE),
        _ratio("a", f"first token, {num_tokens} tokens, memory", "s", seconds, "memory", "cold", WARM_MEMORY),
    ]


async def crowd(bench: Bench) -> list[Figure]:
    """(b) Eight clients at once with one new prefix and a question each, beside one client alone with such a prompt."""
    seconds: dict[str, list[float]] = {"alone": [], "crowd": [], "server": []}
    for number in range(bench.num_runs):
        for side in _rotated(["alone", "crowd", *(["server"] if bench.server else [])], number):
            prompts = _questions(bench, 1 if side == "alone" else NUM_CROWD)
            if side == "server":
                assert bench.server is not None
                run = await bench.server.crowd(prompts, 2)
            else:
                run = await bench.crowd("left", prompts, 2)
            worst = max(stream.first_token_seconds for stream in run.streams)
            seconds[side].append(worst)
            bench.note("b", side, number, worst_first_token_seconds=worst, prompt_tokens=run.streams[0].prompt_tokens)
    what = f"worst first token, {NUM_CROWD} clients, one new prefix"
    figures = [_ratio("b", f"{what}, beside one client", "s", seconds, "crowd", "alone", CROWD)]
    if bench.server:
        figures.append(_ratio("b", f"{what}, beside mlx_lm.server", "s", seconds, "crowd", "server", None))
    return figures


async def publishing(bench: Bench) -> list[Figure]:
    """(c) Decode speed right after a prompt was computed: while its prefix is written, beside cache="off"."""
    rates: dict[str, list[float]] = {"on": [], "off": []}
    for number in range(bench.num_runs):
        for side in _rotated(["on", "off"], number):
            before = bench.num_published()
            run, _ = await bench.ask("left", bench.tokens(bench.num_prefix_tokens), bench.num_decode_tokens, cache=_cache(side))
            rates[side].append(run.decode_tokens_per_second)
            bench.note("c", side, number, decode_tokens_per_second=run.decode_tokens_per_second)
            if side == "on":
                await bench.published(before, bench.num_prefix_tokens // 512)
    name = f"decode while publishing, {bench.num_prefix_tokens} + {bench.num_decode_tokens} tokens"
    return [_ratio("c", name, "tok/s", rates, "on", "off", PUBLISHING)]


async def never_repeated(bench: Bench) -> list[Figure]:
    """(d) Prompts that nobody repeats, one after the other, with the cache on and off."""
    seconds: dict[str, list[float]] = {"on": [], "off": []}
    for number in range(bench.num_runs):
        for side in _rotated(["on", "off"], number):
            prompts = [bench.tokens(num_tokens) for num_tokens in range(100, 100 + 60 * bench.num_cold_prompts, 60)]
            started = time.perf_counter()
            for tokens in prompts:
                await bench.ask("left", tokens, 8, cache=_cache(side))
            seconds[side].append(time.perf_counter() - started)
            bench.note("d", side, number, seconds=seconds[side][-1])
    return [_ratio("d", f"{bench.num_cold_prompts} prompts never repeated", "s", seconds, "on", "off", NEVER_REPEATED)]


PARTS: dict[str, Callable[[Bench], Any]] = {"a": warm, "b": crowd, "c": publishing, "d": never_repeated}


def _questions(bench: Bench, num_prompts: int) -> list[str]:
    """Prompts with one long beginning that was never seen, and an end of their own."""
    prefix = f"Notes number {bench.numbers.randrange(10**9)}: " + " ".join(
        bench.numbers.choice(_WORDS) for _ in range(bench.num_prefix_words)
    )
    return [f"{prefix}. Question {number}: what about {_WORDS[number]} and {_WORDS[-number]}?" for number in range(num_prompts)]


def _rotated(sides: list[str], number: int) -> list[str]:
    shift = number % len(sides)
    return sides[shift:] + sides[:shift]


def _cache(side: str) -> Cache:
    return "on" if side == "on" else "off"


def _ratio(
    part: str, name: str, unit: str, runs: dict[str, list[float]], subject: str, opponent: str, target: Target | None
) -> Figure:
    say(f"{part} {name}: {statistics.median(runs[subject]):.4g} {unit} beside {statistics.median(runs[opponent]):.4g}")
    return Figure(part, name, unit, subject, runs[subject], opponent, runs[opponent], target)
