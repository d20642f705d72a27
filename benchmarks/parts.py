"""What does each part (a) to (d) compare, and what must it reach? Part (e), the costs, is in `benchmarks.costs`."""

from __future__ import annotations

from operator import attrgetter

import anyio

from benchmarks import prompts
from benchmarks.children import InProcess
from benchmarks.measure import Run, StreamRun
from benchmarks.report import Figure, Target
from benchmarks.stage import RUNTIME, Side, Stage, alternate
from benchmarks.subject import Subject

STREAM_GENERATE = "mlx_lm.stream_generate"
BATCH_GENERATOR = "mlx_lm BatchGenerator"
SERVER = "mlx_lm.server"
NUM_CROWD = 8
PAIR = ("left", "right")

MAIN_SINGLE = Target("ratio", at_least=0.95)
TINY_SINGLE = Target("ratio", at_least=0.85)
BESIDE_BATCH_GENERATOR = Target("ratio", at_least=1.0)
BESIDE_SERVER = Target("ratio", at_least=1.2)
TOGETHER = Target("ratio", at_least=0.9)

RATES = {"end to end": "end_to_end_tokens_per_second", "decode": "decode_tokens_per_second"}


async def one_stream(stage: Stage) -> list[Figure]:
    """(a) One stream through the runtime beside `stream_generate`, for every model of the plan."""
    figures = []
    for model in stage.plan.models:
        subject = await stage.subject(model)
        opponent = await stage.opponent(model)
        sides = {RUNTIME: _stream_of(subject, model), STREAM_GENERATE: _bare_stream_of(opponent)}
        runs = await alternate(stage.ledger, "a", model, stage.plan.num_runs, stage.plan.num_single_tokens[model], sides)
        target = TINY_SINGLE if model == "tiny" else MAIN_SINGLE
        figures += _compared("a", f"{model}, one stream", runs, STREAM_GENERATE, {"end to end": target, "decode": target})
    return figures


async def crowd(stage: Stage) -> list[Figure]:
    """(b), (c) Eight ragged streams at once through the runtime beside `BatchGenerator` and beside the HTTP server.

    One run of the runtime stands beside one of each opponent. `BatchGenerator` makes no text, the other two do.
    """
    model = stage.plan.main_model
    subject = await stage.subject(model)
    sides: dict[str, Side] = {RUNTIME: lambda number, tokens: subject.crowd(model, prompts.crowd(number, NUM_CROWD), tokens)}
    if "b" in stage.plan.parts:
        opponent = await stage.opponent(model)
        sides[BATCH_GENERATOR] = lambda number, tokens: opponent.crowd(prompts.crowd(number, NUM_CROWD), tokens)
    if "c" in stage.plan.parts:
        server = await stage.server()
        sides[SERVER] = lambda number, tokens: server.crowd(prompts.crowd(number, NUM_CROWD), tokens)
    parts = "".join(sorted(stage.plan.parts & {"b", "c"}))
    runs = await alternate(stage.ledger, parts, model, stage.plan.num_runs, stage.plan.num_crowd_tokens, sides)
    figures = []
    opponents = (
        ("b", BATCH_GENERATOR, BESIDE_BATCH_GENERATOR, "the opponent makes token ids alone, the runtime their text, too"),
        ("c", SERVER, BESIDE_SERVER, "both sides' clients run in the benchmark's own process"),
    )
    for part, name, target, note in opponents:
        if name in runs:
            what = f"{model}, {NUM_CROWD} streams"
            figures += _compared(part, what, runs, name, {"end to end": target, "decode": None}, note)
            figures.append(_figure(part, f"{what}, first token", "s", runs, name, "first_token_seconds", None, note))
    return figures


async def two_models(stage: Stage) -> list[Figure]:
    """(d) Two models decoding at once beside each of them alone, every worker with one compute thread all the time.

    The same three runs with two bare mlx-lm processes show what share of a loss is the machine's (memory, host) and not ours.
    """
    subject = await stage.subject(*PAIR)
    bare = {name: await stage.opponent(name) for name in PAIR}
    sides: dict[str, Side] = {}
    for name in PAIR:
        sides[f"runtime, {name} alone"] = _stream_of(subject, name)
        sides[f"bare, {name} alone"] = _bare_stream_of(bare[name])
    sides["runtime, together"] = lambda number, tokens: subject.together([(name, prompts.single(number), tokens) for name in PAIR])
    sides["bare, together"] = lambda number, tokens: _bare_together(list(bare.values()), prompts.single(number), tokens)
    # Six sides of different shape: compared by rate only, hence no check that all did the same work.
    runs = await alternate(stage.ledger, "d", "two models", stage.plan.num_runs, stage.plan.num_pair_tokens, sides, same_work=False)
    figures = []
    for index, name in enumerate(PAIR):
        for side, target in (("runtime", TOGETHER), ("bare", None)):
            together = [run.decode_rates()[index] for run in runs[f"{side}, together"]]
            alone = [run.decode_tokens_per_second for run in runs[f"{side}, {name} alone"]]
            what = "two models in the runtime" if side == "runtime" else "two bare mlx-lm processes"
            figures.append(
                Figure(
                    part="d",
                    name=f"{what}, {name} decode",
                    unit="tok/s",
                    subject=f"{side}, together",
                    subject_runs=together,
                    opponent=f"{side}, {name} alone",
                    opponent_runs=alone,
                    target=target,
                )
            )
    return figures


def _stream_of(subject: Subject, model: str) -> Side:
    return lambda number, tokens: subject.stream(model, prompts.single(number), tokens)


def _bare_stream_of(opponent: InProcess) -> Side:
    return lambda number, tokens: opponent.stream(prompts.single(number), tokens)


async def _bare_together(children: list[InProcess], prompt: str, max_tokens: int) -> Run:
    """Each child counts from its own start, so the offsets of their starts (under a millisecond) are lost."""
    streams = [StreamRun() for _ in children]

    async def one(index: int) -> None:
        streams[index] = (await children[index].stream(prompt, max_tokens)).streams[0]

    async with anyio.create_task_group() as group:
        for index in range(len(children)):
            group.start_soon(one, index)
    return Run(streams)


def _compared(
    part: str, what: str, runs: dict[str, list[Run]], opponent: str, targets: dict[str, Target | None], note: str = ""
) -> list[Figure]:
    return [
        _figure(part, f"{what}, {name}", "tok/s", runs, opponent, RATES[name], target, note) for name, target in targets.items()
    ]


def _figure(
    part: str, name: str, unit: str, runs: dict[str, list[Run]], opponent: str, attribute: str, target: Target | None, note: str
) -> Figure:
    read = attrgetter(attribute)
    return Figure(
        part=part,
        name=name,
        unit=unit,
        subject=RUNTIME,
        subject_runs=[read(run) for run in runs[RUNTIME]],
        opponent=opponent,
        opponent_runs=[read(run) for run in runs[opponent]],
        target=target,
        note=note,
    )
