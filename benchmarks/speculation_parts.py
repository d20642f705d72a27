"""What does each part of the speculation benchmark compare, and what must it reach? Runs of the sides alternate, round by round."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio

import runtime
from benchmarks.children import InProcess
from benchmarks.measure import BenchmarkError, Run, StreamRun, from_answer
from benchmarks.report import Figure, Target
from benchmarks.stage import say

NUM_DRAFT_TOKENS = 4
PREDICTED = Target("ratio", at_least=0.9)
AHEAD = Target("ratio", at_least=1.15)
NEVER_WORSE = Target("ratio", at_least=0.95)
BESIDE_MLX = Target("ratio", at_least=1.0)
WIRE = Target("median", at_most=0.03)
LOOKUP = Target("ratio", at_least=1.3)

DRAFT_SHARE = 0.25
"""Of a round, from which drafting ahead is expected to show."""
SIDES: dict[str, dict[str, Any]] = {
    "plain": {},
    "sequential": {"draft_tokens": NUM_DRAFT_TOKENS, "draft_ahead": False},
    "ahead": {"draft_tokens": NUM_DRAFT_TOKENS, "draft_ahead": True},
    "auto": {},
}
CHATS = (
    "What is the capital of France, and what is it known for?",
    "Explain in a few sentences why the sky is blue.",
    "Write a short note that thanks a neighbour for watering the plants.",
    "Name three animals that live in the sea and say what they eat.",
)
REPEATING = (
    "Copy this list of names line by line:\nAlice Johnson, 24 Park Road\nBob Miller, 7 Station Street\n"
    "Carol Smith, 118 High Street\nDavid Brown, 5 Mill Lane\nEve Wilson, 32 Church Road\n",
    "Write out the following text once more, word for word:\nThe museum opens at nine in the morning and closes at six in the "
    "evening. Tickets are sold at the front desk, and children under twelve do not pay. The last tour begins at five.\n",
    "Extract the lines that contain a number:\nThe train leaves at 8.\nBring a coat.\nThe hotel has 40 rooms.\n"
    "Breakfast is at 7.\n",
)


@dataclass
class Bench:
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

    async def crowd(self, model: str, asks: Sequence[Mapping[str, Any]], max_tokens: int) -> Run:
        """All at once, each a stream of its own; `max_tokens` are made of each."""
        tenant = self.rt.tenant("benchmark", runtime.TenantSpec(max_running=64))
        streams = [StreamRun(token_ids=[]) for _ in asks]
        started = time.perf_counter()

        async def one(ask: Mapping[str, Any], run: StreamRun) -> None:
            assert run.token_ids is not None
            async with tenant.stream(model, max_tokens=max_tokens, cache="off", **ask) as events:
                async for event in events:
                    if isinstance(event, runtime.TextDelta) and event.token_ids:
                        run.arrivals.append((time.perf_counter() - started, len(event.token_ids)))
                        run.token_ids.extend(event.token_ids)

        async with anyio.create_task_group() as group:
            for ask, run in zip(asks, streams, strict=True):
                group.start_soon(one, ask, run)
        return Run(streams)

    def pairing(self, target: str) -> runtime.PairingStats:
        return next(pairing for pairing in self.rt.stats().scheduler.pairings if pairing.target == target)

    def note(self, part: str, cell: str, side: str, round_number: int, **facts: float) -> None:
        self.runs.append({"part": part, "cell": cell, "side": side, "round": round_number, **facts})
        shown = ", ".join(f"{name} {value:.4g}" for name, value in facts.items())
        say(f"{part} {cell}, round {round_number + 1}/{self.num_runs}, {side}: {shown}")

    async def load(self, name: str, path: str | Path, **options: Any) -> None:
        await self.rt.load(runtime.ModelSpec(name, path=str(path), compute_threads=1, **options))


@dataclass
class Cell:
    """What the sides did in one cell: tok/s by round, and of rounds one after the other what they consisted of."""

    rates: dict[str, list[float]] = field(default_factory=dict)
    predicted: list[float] = field(default_factory=list)
    draft_shares: list[float] = field(default_factory=list)
    wire_shares: list[float] = field(default_factory=list)
    accepted: list[float] = field(default_factory=list)

    def note_parts(self, before: runtime.PairingStats, after: runtime.PairingStats, num_rows: int) -> None:
        """Of one run of rounds one after the other."""
        num_rounds = after.rounds - before.rounds
        if not num_rounds:
            return
        draft, verify = after.draft_seconds - before.draft_seconds, after.verify_seconds - before.verify_seconds
        wire = after.wire_seconds - before.wire_seconds
        proposed, accepted = after.proposed - before.proposed, after.accepted - before.accepted
        num_tokens = accepted + num_rounds * num_rows
        self.predicted.append(num_tokens / (draft + verify))
        self.draft_shares.append(draft / (draft + verify))
        self.wire_shares.append(wire / (draft + verify + wire))
        self.accepted.append(accepted / max(1, proposed))


async def matrix(bench: Bench) -> list[Figure]:
    """(a) All cells; the models of one ratio and acceptance are loaded together."""
    prompts = [f"The river number {number} is wide and" for number in range(max(bench.batches))]
    made = await bench.child.ask(
        "make_pairing",
        directory=str(bench.directory / "pairings"),
        is_quick=bench.is_quick,
        ratios=list(bench.ratios),
        acceptances=list(bench.acceptances),
        prompts=prompts,
    )
    bench.facts["agreement"] = {wanted: drafter["agreement"] for wanted, drafter in made["drafters"].items()}
    figures: list[Figure] = []
    for ratio in bench.ratios:
        path = made["targets"][str(ratio)]
        await bench.load("plain", path)
        await bench.child.load(Path(path))
        for acceptance in bench.acceptances:
            drafter = made["drafters"][str(acceptance)]["path"]
            await bench.load("drafter", drafter)
            for side in list(SIDES)[1:]:
                await bench.load(side, path, drafter="drafter", **SIDES[side])
            for batch in bench.batches:
                figures += await _cell(bench, ratio, acceptance, batch, prompts[:batch], drafter)
            for side in [*list(SIDES)[1:], "drafter"]:
                await bench.rt.unload(side)
        await bench.rt.unload("plain")
    return figures


async def _cell(bench: Bench, ratio: int, acceptance: float, batch: int, prompts: list[str], drafter: str) -> list[Figure]:
    name = f"acceptance {acceptance:g}, cost 1/{ratio}, batch {batch}"
    asks = [{"prompt": prompt, "ignore_eos": True} for prompt in prompts]
    num_tokens = 24 if bench.is_quick else 64 if ratio > 4 else 96
    sides = [*SIDES, *(["mlx-lm"] if batch == 1 else [])]
    cell = Cell({side: [] for side in sides})
    for side in SIDES:
        await bench.crowd(side, asks, num_tokens)  # also what "auto" learns from
    texts: dict[str, list[Any]] = {}
    for number in range(bench.num_runs):
        for side in _rotated(sides, number):
            if side == "mlx-lm":
                answer = await bench.child.ask(
                    "speculate", drafter=drafter, prompt=prompts[0], max_tokens=num_tokens, num_draft_tokens=NUM_DRAFT_TOKENS
                )
                run = Run([from_answer(answer)])
            else:
                before = bench.pairing(side) if side == "sequential" else None
                run = await bench.crowd(side, asks, num_tokens)
                if before is not None:
                    cell.note_parts(before, bench.pairing(side), batch)
                texts[side] = [stream.token_ids for stream in run.streams]
            cell.rates[side].append(run.decode_tokens_per_second)
            bench.note("a", name, side, number, tokens_per_second=run.decode_tokens_per_second)
    bench.facts.setdefault("same tokens as plain", {})[name] = {
        side: round(_equal_share(texts["plain"], texts[side]), 4) for side in list(SIDES)[1:]
    }
    bench.facts.setdefault("controller", {})[name] = [
        f"{stats.num_rows} rows: {stats.state}, {stats.num_draft_tokens} tokens, gain {stats.expected_gain:.2f}"
        for stats in bench.pairing("auto").controller
    ]
    return _figures(name, acceptance, batch, cell)


def _figures(name: str, acceptance: float, batch: int, cell: Cell) -> list[Figure]:
    rates = cell.rates
    figures: list[Figure] = []
    best = max(("plain", "sequential", "ahead"), key=lambda side: statistics.median(rates[side]))
    figures.append(Figure("a", f"{name}: auto", "tok/s", "auto", rates["auto"], best, rates[best], NEVER_WORSE))
    if acceptance == 0:
        figures.append(Figure("a", f"{name}: auto", "tok/s", "auto", rates["auto"], "plain", rates["plain"], NEVER_WORSE))
    figures.append(Figure("a", f"{name}: rounds", "tok/s", "sequential", rates["sequential"], "plain", rates["plain"]))
    if cell.predicted:
        figures.append(
            Figure("a", f"{name}: rounds", "tok/s", "sequential", rates["sequential"], "predicted", cell.predicted, PREDICTED)
        )
        figures.append(Figure("a", f"{name}: wire", "of a round", "sequential", cell.wire_shares, target=WIRE))
        figures.append(Figure("a", f"{name}: drafting", "of a round", "sequential", cell.draft_shares))
        figures.append(Figure("a", f"{name}: accepted", "of the proposals", "sequential", cell.accepted))
    share = statistics.median(cell.draft_shares) if cell.draft_shares else 0.0
    target = AHEAD if share >= DRAFT_SHARE and acceptance == 1 else None
    figures.append(Figure("a", f"{name}: ahead", "tok/s", "ahead", rates["ahead"], "sequential", rates["sequential"], target))
    if batch == 1:
        figures.append(Figure("a", f"{name}: ahead", "tok/s", "ahead", rates["ahead"], "mlx-lm", rates["mlx-lm"], BESIDE_MLX))
    return figures


async def requantised(bench: Bench) -> list[Figure]:
    """(b) Real text: the target says what SmolLM2 says at three times its cost; the drafter is SmolLM2 through four bits."""
    source = bench.model or await _tiny(bench)
    deeper = await bench.child.ask(
        "make_deeper", source=str(source), directory=str(bench.directory / "deeper"), num_more=_num_more(source)
    )
    coarser = await bench.child.ask("make_requantised", source=str(source), directory=str(bench.directory / "coarser"), bits=4)
    await bench.load("plain", deeper["path"])
    await bench.load("drafter", coarser["path"])
    await bench.load("auto", deeper["path"], drafter="drafter")
    figures: list[Figure] = []
    for temperature in (0.0, 0.8):
        name = f"chat, temperature {temperature:g}"
        figures += await _beside_plain(bench, "b", name, CHATS, {"temperature": temperature, "seed": 5}, "auto", None)
    for model in ("auto", "drafter", "plain"):
        await bench.rt.unload(model)
    return figures


async def lookup(bench: Bench) -> list[Figure]:
    """(c) Answers that repeat their prompt."""
    source = bench.model or await _tiny(bench)
    await bench.load("plain", source)
    await bench.load("repeating", source, drafter="lookup")
    figures = await _beside_plain(bench, "c", "lookup, answers that repeat the prompt", REPEATING, {}, "repeating", LOOKUP)
    for model in ("repeating", "plain"):
        await bench.rt.unload(model)
    return figures


async def _beside_plain(
    bench: Bench, part: str, name: str, chats: Sequence[str], options: Mapping[str, Any], side: str, target: Target | None
) -> list[Figure]:
    num_tokens = 16 if bench.is_quick else 96
    rates: dict[str, list[float]] = {"plain": [], side: []}
    accepted: list[float] = []
    for number in range(-1, bench.num_runs):  # the first is for "auto" to learn from
        texts: dict[str, list[Any]] = {}
        for model in _rotated(list(rates), number):
            before = bench.pairing(side)
            seconds, num_made, texts[model] = 0.0, 0, []
            for chat in chats:
                ask = {"messages": [{"role": "user", "content": chat}], "ignore_eos": True, **options}
                run = await bench.crowd(model, [ask], num_tokens)
                seconds += run.total_seconds - run.first_token_seconds
                num_made += run.num_tokens - run.streams[0].arrivals[0][1]
                texts[model].append(run.streams[0].token_ids)
            after = bench.pairing(side)
            if number >= 0:
                rates[model].append(num_made / seconds)
                bench.note(part, name, model, number, tokens_per_second=num_made / seconds)
                if model == side:
                    accepted.append((after.accepted - before.accepted) / max(1, after.proposed - before.proposed))
    bench.facts.setdefault("same tokens as plain", {})[name] = round(_equal_share(texts["plain"], texts[side]), 4)
    return [
        Figure(part, name, "tok/s", side, rates[side], "plain", rates["plain"], target),
        Figure(part, f"{name}: accepted", "of the proposals", side, accepted),
    ]


PARTS: dict[str, Callable[[Bench], Any]] = {"a": matrix, "b": requantised, "c": lookup}


async def _tiny(bench: Bench) -> Path:
    return Path((await bench.child.ask("make_tiny", directory=str(bench.directory / "tiny")))["path"])


def _num_more(source: Path) -> int:
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    if "num_hidden_layers" not in config:
        raise BenchmarkError(f"{source}: config.json names no num_hidden_layers")
    return 2 * int(config["num_hidden_layers"])


def _equal_share(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> float:
    """Of the tokens, up to each text's first difference. On OpenBLAS a wider step may round another way."""
    same = total = 0
    for one, other in zip(ours, theirs, strict=True):
        differing = (index for index, (left, right) in enumerate(zip(one, other, strict=False)) if left != right)
        same += next(differing, len(one))
        total += len(one)
    return same / max(1, total)


def _rotated(sides: list[str], number: int) -> list[str]:
    shift = number % len(sides)
    return sides[shift:] + sides[:shift]
