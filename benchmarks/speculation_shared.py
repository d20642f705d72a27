"""(d) Does one drafter serve two targets at once without a wrong token, and guess each row as well in a crowd as alone?

This is about tokens, not speed: tiny models on the reference BLAS, where a row is computed alike in every batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio

import runtime
from benchmarks.children import in_process
from benchmarks.environment import opponent_environment
from benchmarks.report import Figure, Target
from benchmarks.speculation_bench import NUM_DRAFT_TOKENS, Bench, rotated
from benchmarks.stage import say

NUM_ROWS = 8
NONE = Target("worst", at_most=0)
WANTED_AGREEMENT = 0.7
_NUM_TOKENS = 96
_TARGETS = ("noisy pair", "equal pair")
Row = tuple[str, int]
"""(target, number of the prompt)"""


async def shared(bench: Bench) -> list[Figure]:
    """The drafter is a noisy copy of the first target and says exactly what the second one says."""
    prompts = [[32 + (number * 13 + place * place) % 90 for place in range(5 + number * 7)] for number in range(NUM_ROWS)]
    rows = [(name, number) for name in _TARGETS for number in range(NUM_ROWS)]
    async with (
        in_process(await opponent_environment(1, bench.directory, blas="reference")) as child,
        runtime.Runtime(_settings(bench.directory)) as rt,
    ):
        made = await child.ask(
            "make_shared",
            directory=str(bench.directory / "shared"),
            names=list(_TARGETS),
            prompts=[f"The river number {number} is wide and" for number in range(NUM_ROWS)],
            wanted=WANTED_AGREEMENT,
        )
        await rt.load(runtime.ModelSpec("drafter", path=made["drafter"], max_slots=2 * NUM_ROWS))
        for name in _TARGETS:
            path = made["targets"][name]
            spec = runtime.ModelSpec(name, path=path, drafter="drafter", draft_tokens=NUM_DRAFT_TOKENS, draft_ahead=False)
            await rt.load(spec)
        plain = await _together(rt, prompts, rows, speculate=False)
        right = await _right_guesses(child, made["drafter"], prompts, plain)
        alone: list[dict[Row, runtime.Completion]] = []
        crowds: list[dict[Row, runtime.Completion]] = []
        for number in range(bench.num_runs):
            for side in rotated(["alone", "crowd"], number):
                if side == "crowd":
                    crowds.append(await _together(rt, prompts, rows))
                else:
                    one_by_one: dict[Row, runtime.Completion] = {}
                    for row in rows:
                        one_by_one.update(await _together(rt, prompts, [row]))
                    alone.append(one_by_one)
                say(f"d, round {number + 1}/{bench.num_runs}, {side}: done")
        bench.facts["shared drafter"] = {
            "late rounds": {pairing.target: pairing.late for pairing in rt.stats().scheduler.pairings},
            "agreement, counted in mlx-lm": {name: _mean([right[name, number] for number in range(NUM_ROWS)]) for name in _TARGETS},
        }
    figures = []
    for name in _TARGETS:
        own = [row for row in rows if row[0] == name]
        for what, runs in (("both at once, batch 8 each", crowds), ("batch 1", alone)):
            differing = [float(sum(run[row].token_ids != plain[row].token_ids for row in own)) for run in runs]
            figures.append(
                Figure("d", f"{name}, {what}: other tokens than plain", "rows", "shared drafter", differing, target=NONE)
            )
            unexplained = [float(sum(not _is_explained(run[row].usage, right[row]) for row in own)) for run in runs]
            title = f"{name}, {what}: accepted otherwise than mlx-lm's guesses say"
            figures.append(Figure("d", title, "rows", "shared drafter", unexplained, target=NONE))
        title = f"{name}: accepted, row by row"
        figures.append(
            Figure("d", title, "of the proposals", "batch 8", _shares(crowds[-1], own), "batch 1", _shares(alone[-1], own))
        )
    return figures


def _settings(directory: Path) -> runtime.Settings:
    return runtime.Settings(
        home=directory / "home of d", blas="reference", compute_threads=1, prefix_memory_bytes=0, prefix_disk_bytes=0
    )


async def _together(
    rt: runtime.Runtime, prompts: Sequence[Sequence[int]], rows: Sequence[Row], **options: Any
) -> dict[Row, runtime.Completion]:
    """Of these rows, all at once."""
    tenant = rt.tenant("benchmark", runtime.TenantSpec(max_running=64))
    found: dict[Row, runtime.Completion] = {}

    async def one(row: Row) -> None:
        name, number = row
        tokens = list(prompts[number])
        found[row] = await tenant.generate(name, tokens=tokens, max_tokens=_NUM_TOKENS, ignore_eos=True, cache="off", **options)

    async with anyio.create_task_group() as group:
        for row in rows:
            group.start_soon(one, row)
    return found


async def _right_guesses(
    child: Any, drafter: str, prompts: Sequence[Sequence[int]], plain: Mapping[Row, runtime.Completion]
) -> dict[Row, list[bool]]:
    """Of each token of each plain answer: would the drafter, in mlx-lm and given all before it, have said the same?"""
    texts = [{"prompt": list(prompts[number]), "answer": list(plain[name, number].token_ids)} for name, number in plain]
    answer = await child.ask("guesses", drafter=drafter, texts=texts)
    return dict(zip(plain, answer["right"], strict=True))


def _is_explained(usage: runtime.Usage, right: Sequence[bool]) -> bool:
    """Whether these are the proposals and acceptances of rounds to the end, after some plain steps to begin with: the drafter
    reads the prompt while the target already decodes."""
    return any(
        num_proposed_and_accepted(right, num_plain) == (usage.proposed_tokens, usage.accepted_tokens)
        for num_plain in range(1, len(right) + 1)
    )


def num_proposed_and_accepted(right: Sequence[bool], num_plain: int, num_draft_tokens: int = NUM_DRAFT_TOKENS) -> tuple[int, int]:
    """What rounds come to from token `num_plain` of an answer on, if the drafter guesses token i of it just when `right[i]`."""
    length, proposed, accepted = num_plain, 0, 0
    while length < len(right):
        wanted = min(num_draft_tokens, len(right) - length - 1)  # the round's last token is the target's own
        matched = next((number for number in range(wanted) if not right[length + number]), wanted)
        proposed, accepted, length = proposed + wanted, accepted + matched, length + matched + 1
    return proposed, accepted


def _shares(run: Mapping[Row, runtime.Completion], rows: Sequence[Row]) -> list[float]:
    return [run[row].usage.accepted_tokens / max(1, run[row].usage.proposed_tokens) for row in rows]


def _mean(rights: Sequence[Sequence[bool]]) -> float:
    return round(sum(map(sum, rights)) / sum(map(len, rights)), 4)
