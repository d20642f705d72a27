"""What does speculation gain on real text? (b) Chats, with a requantised drafter. (c) Answers that repeat their prompt: lookup."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import BenchmarkError, Run, equal_fraction
from benchmarks.report import Figure, Target
from benchmarks.speculation_bench import Bench, rotated

LOOKUP = Target("ratio", at_least=1.3)
CHATS = (
    "Explain in a few sentences why the sky is blue.",
    "Name three animals that live in the sea and say what they eat.",
)
REPEATING = (
    "Correct the spelling mistakes in this paragraph and keep everything else:\nThe musuem opens at nine in the morning and closes "
    "at six in the evening. Tickets are sold at the front desk, and childern under twelve do not pay. The last tour begins at "
    "five.\n",
    'Replace "Monday" with "Friday" in this text:\nThe committee meets on Monday at ten in the small hall on the first floor. '
    "Members who cannot come on Monday write to the secretary before noon, and the minutes are sent to everybody by the end of the "
    "week.\n",
    "Fix the grammar of this paragraph:\nThe river rise in the hills above the old town and flow past the mill, the market and the "
    "harbour before it reach the sea. In spring it carry the melted snow, and the lower bridge are closed for a week.\n",
    "Extract the lines that contain a number:\nThe train leaves at 8.\nBring a coat.\nThe hotel has 40 rooms.\n"
    "Breakfast is at 7.\n",
    "List the names in this table, one on each line, with their addresses:\nAlice Johnson, 24 Park Road; Bob Miller, 7 Station "
    "Street; Carol Smith, 118 High Street; David Brown, 5 Mill Lane; Eve Wilson, 32 Church Road\n",
)
_DEPTH = 3
_NUM_BITS = 4


async def requantised(bench: Bench) -> list[Figure]:
    """(b) The target says what SmolLM2 says at three times its cost; the drafter is SmolLM2 through four bits."""
    source = bench.model or await _tiny(bench)
    deeper = await bench.child.ask(
        "make_deeper", source=str(source), directory=str(bench.directory / "deeper"), num_more=(_DEPTH - 1) * _num_layers(source)
    )
    coarser = await bench.child.ask(
        "make_requantised", source=str(source), directory=str(bench.directory / "coarser"), bits=_NUM_BITS
    )
    await bench.load("plain", deeper["path"])
    await bench.load("drafter", coarser["path"])
    await bench.load("auto", deeper["path"], drafter="drafter")
    figures: list[Figure] = []
    for temperature in (0.0, 0.8):
        name = f"chat, temperature {temperature:g}"
        options = {"temperature": temperature, "seed": 5}
        figures += await _beside_plain(bench, "b", name, CHATS, options, "auto", num_tokens=48, target=None)
    await bench.unload("auto", "drafter", "plain")
    return figures


async def lookup(bench: Bench) -> list[Figure]:
    """(c) Proposed is what followed the same words before in the prompt or the answer."""
    source = bench.model or await _tiny(bench)
    await bench.load("plain", source)
    await bench.load("repeating", source, drafter="lookup")
    name = "answers that repeat the prompt"
    figures = await _beside_plain(bench, "c", name, REPEATING, {}, "repeating", num_tokens=96, target=LOOKUP)
    await bench.unload("repeating", "plain")
    return figures


async def _beside_plain(
    bench: Bench,
    part: str,
    name: str,
    chats: Sequence[str],
    options: Mapping[str, Any],
    side: str,
    *,
    num_tokens: int,
    target: Target | None,
) -> list[Figure]:
    """One chat after the other to its own end, at most `num_tokens` of each; a first round is for the controller to learn from.

    What comes after an end of its own is no real text: a small model repeats itself there, which is easily guessed. Random
    models of a quick run may end at once, and go on all the same.
    """
    rates: dict[str, list[float]] = {"plain": [], side: []}
    accepted: list[float] = []
    equal: list[float] = []
    for number in range(-1, bench.num_runs):
        runs: dict[str, list[Run]] = {}
        for model in rotated(list(rates), number) if number >= 0 else [side]:
            before = bench.pairing(side)
            runs[model] = []
            for chat in chats:
                ask = {"messages": [{"role": "user", "content": chat}], "ignore_eos": bench.is_quick, **options}
                runs[model] += [await bench.crowd(model, [ask], 16 if bench.is_quick else num_tokens)]
            after = bench.pairing(side)
            if number < 0:
                continue
            rates[model].append(_decode_rate(runs[model], name))
            bench.note(part, name, model, number, tokens_per_second=rates[model][-1])
            if model == side:
                accepted.append((after.accepted - before.accepted) / max(1, after.proposed - before.proposed))
        if number >= 0:
            streams = {model: [run.streams[0] for run in found] for model, found in runs.items()}
            equal.append(round(equal_fraction(streams["plain"], streams[side]), 4))
    bench.facts.setdefault("same tokens as plain", {})[name] = equal
    return [
        Figure(part, name, "tok/s", side, rates[side], "plain", rates["plain"], target),
        Figure(part, f"{name}: accepted", "of the proposals", side, accepted),
    ]


def _decode_rate(runs: Sequence[Run], name: str) -> float:
    """Of all answers together, each from its first token on. :raises BenchmarkError: they were over before they began."""
    seconds = sum(run.total_seconds - run.first_token_seconds for run in runs)
    num_tokens = sum(run.num_tokens - run.streams[0].arrivals[0][1] for run in runs)
    if not seconds:
        raise BenchmarkError(f"{name}: every answer came in one piece; ask for longer ones")
    return num_tokens / seconds


async def _tiny(bench: Bench) -> Path:
    return Path((await bench.child.ask("make_tiny", directory=str(bench.directory / "tiny")))["path"])


def _num_layers(source: Path) -> int:
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    if "num_hidden_layers" not in config:
        raise BenchmarkError(f"{source}: config.json names no num_hidden_layers")
    return int(config["num_hidden_layers"])
