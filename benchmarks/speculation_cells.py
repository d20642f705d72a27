"""(a) What does each way of speculating make of a known acceptance and cost? All sides alternate, round by round."""

from __future__ import annotations

import os
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import runtime
from benchmarks.measure import Run, equal_fraction, from_answer
from benchmarks.report import Figure, Target
from benchmarks.speculation_bench import NUM_DRAFT_TOKENS, Bench, RoundParts, rate, rotated

PREDICTED = Target("ratio", at_least=0.9)
AHEAD = Target("ratio", at_least=1.15)
NEVER_WORSE = Target("ratio", at_least=0.95)
BESIDE_MLX = Target("ratio", at_least=1.0)
WIRE = Target("median", at_most=0.03)

DRAFT_SHARE = 0.25
"""Of a round, from which drafting ahead is expected to show."""
SIDES: dict[str, dict[str, Any]] = {
    "plain": {},
    "sequential": {"draft_tokens": NUM_DRAFT_TOKENS, "draft_ahead": False},
    "ahead": {"draft_tokens": NUM_DRAFT_TOKENS, "draft_ahead": True},
    "auto": {"draft_tokens": "auto", "draft_ahead": "auto"},
}
MLX = "mlx-lm"
"""`stream_generate` with `draft_model` and as many draft tokens, in one process."""
_NUM_WARM_UP_TOKENS = 16


@dataclass
class Cell:
    """What was measured in one cell: tokens per second by side and round; of the rounds one after the other, their parts; and how
    many of the drafts made ahead were of use."""

    name: str
    ratio: int
    acceptance: float
    batch: int
    rates: dict[str, list[float]]
    parts: list[RoundParts] = field(default_factory=list)
    ahead_hits: list[float] = field(default_factory=list)


async def matrix(bench: Bench) -> list[Figure]:
    """All cells; the models of one ratio and acceptance are loaded together."""
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
    speculating = [side for side in SIDES if side != "plain"]
    for ratio in bench.ratios:
        path = made["targets"][str(ratio)]
        await bench.load("plain", path)
        await bench.child.load(Path(path))
        for acceptance in bench.acceptances:
            drafter = made["drafters"][str(acceptance)]["path"]
            await bench.load("drafter", drafter)
            for side in speculating:
                await bench.load(side, path, drafter="drafter", **SIDES[side])
            for batch in bench.batches:
                name = f"acceptance {acceptance:g}, cost 1/{ratio}, batch {batch}"
                sides = [*SIDES, *([MLX] if batch == 1 else []), *(["drafter"] if acceptance == bench.acceptances[0] else [])]
                cell = Cell(name, ratio, acceptance, batch, {side: [] for side in sides})
                await _measure(bench, cell, prompts[:batch], drafter)
                figures += figures_of(cell)
            await bench.unload(*speculating, "drafter")
        await bench.unload("plain")
    return figures


async def _measure(bench: Bench, cell: Cell, prompts: list[str], drafter: str) -> None:
    asks = [{"prompt": prompt, "ignore_eos": True} for prompt in prompts]
    num_tokens = 160 if bench.is_quick else 48 if cell.ratio > 4 else 80  # tiny models say a lot before a drafter is ready
    for side in cell.rates:
        if side != MLX:
            await bench.crowd(side, asks, num_tokens if side == "auto" else _NUM_WARM_UP_TOKENS)  # "auto" has most to learn
    last: dict[str, Run] = {}
    for number in range(bench.num_runs):
        for side in rotated(list(cell.rates), number):
            if side == MLX:
                answer = await bench.child.ask(
                    "speculate", drafter=drafter, prompt=prompts[0], max_tokens=num_tokens, num_draft_tokens=NUM_DRAFT_TOKENS
                )
                last[side] = Run([from_answer(answer)])
            elif side == "sequential":
                last[side], parts = await _with_parts(bench, side, asks, num_tokens)
                cell.parts += [parts] if parts.num_rounds else []
            elif side == "ahead":
                before = bench.pairing(side)
                last[side] = await bench.crowd(side, asks, num_tokens)
                after = bench.pairing(side)
                cell.ahead_hits.append((after.ahead_hits - before.ahead_hits) / max(1, after.ahead - before.ahead))
            else:
                last[side] = await bench.crowd(side, asks, num_tokens)
            cell.rates[side].append(rate(last[side]))
            bench.note("a", cell.name, side, number, tokens_per_second=cell.rates[side][-1])
    bench.facts.setdefault("same tokens as plain", {})[cell.name] = {
        side: round(equal_fraction(last["plain"].streams, last[side].streams), 4)
        for side in last
        if side not in ("plain", "drafter")
    }
    bench.facts.setdefault("controller", {})[cell.name] = [
        f"{stats.num_rows} rows: {stats.state}, {stats.num_draft_tokens} tokens, gain {stats.expected_gain:.2f}"
        for stats in bench.pairing("auto").controller
    ]
    bench.facts.setdefault("acceptance by position", {})[cell.name] = [
        [round(share, 3) for share in stats.acceptance[:NUM_DRAFT_TOKENS]] for stats in bench.pairing("sequential").controller[-1:]
    ]


async def _with_parts(bench: Bench, side: str, asks: list[dict[str, Any]], num_tokens: int) -> tuple[Run, RoundParts]:
    """A run, and what its rounds consisted of while all rows decoded."""
    edges: list[runtime.PairingStats] = []

    def note() -> None:
        edges.append(bench.pairing(side))

    run = await bench.crowd(side, asks, num_tokens, note)
    return run, RoundParts.between(edges[0], edges[1], len(asks))


def figures_of(cell: Cell) -> list[Figure]:
    """The cell's figures with their targets."""

    def beside(what: str, side: str, other: str, target: Target | None = None, note: str = "") -> Figure:
        name = f"{cell.name}: {what}"
        return Figure("a", name, "tok/s", side, cell.rates[side], other, cell.rates[other], target, note)

    best = max(("plain", "sequential", "ahead"), key=lambda side: statistics.median(cell.rates[side]))
    figures = [beside("auto", "auto", best, NEVER_WORSE, "the other is the best of plain, sequential and ahead")]
    if cell.acceptance == 0 and best != "plain":
        figures.append(beside("auto", "auto", "plain", NEVER_WORSE))
    figures.append(beside("rounds", "sequential", "plain"))
    figures += _round_figures(cell)
    figures.append(beside("ahead", "ahead", "sequential", *_wanted_of_ahead(cell)))
    if MLX in cell.rates:
        for side, target in (("sequential", None), ("ahead", BESIDE_MLX), ("auto", BESIDE_MLX)):
            figures.append(beside(side, side, MLX, target))
    if "drafter" in cell.rates:
        name = f"cost 1/{cell.ratio}, batch {cell.batch}: measured cost"
        target_rates, drafter_rates = cell.rates["plain"], cell.rates["drafter"]
        figures.append(Figure("a", name, "tok/s", "the target, plain", target_rates, "the drafter, plain", drafter_rates))
    return figures


def _round_figures(cell: Cell) -> list[Figure]:
    if not cell.parts:
        return []
    predicted = [parts.predicted_tokens_per_second for parts in cell.parts]
    note = "draft and verify steps alone, with the tokens that were accepted"
    side, parts = "sequential", cell.parts
    return [
        Figure("a", f"{cell.name}: rounds", "tok/s", side, cell.rates[side], "predicted", predicted, PREDICTED, note),
        Figure("a", f"{cell.name}: wire", "of a round", side, [each.wire_share for each in parts], target=WIRE),
        Figure("a", f"{cell.name}: drafting", "of a round", side, [each.draft_share for each in parts]),
        Figure("a", f"{cell.name}: accepted", "of the proposals", side, [each.accepted_share for each in parts]),
    ]


def _wanted_of_ahead(cell: Cell) -> tuple[Target | None, str]:
    """Where drafting is a good part of a round and another core is free; and how much was to be had at most."""
    if not cell.parts or not cell.ahead_hits:
        return None, ""
    share, hits = statistics.median(parts.draft_share for parts in cell.parts), statistics.median(cell.ahead_hits)
    note = f"{hits:.0%} of the drafts ahead were of use, which spares at most {share * hits:.0%} of a round"
    return (AHEAD if share >= DRAFT_SHARE and (os.cpu_count() or 1) > 1 else None), note
