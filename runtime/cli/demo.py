"""`troupe demo`: two real models in two processes, three tenants talking to both at once, and the proof that it is real."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass

import anyio
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from runtime import ModelSpec, Runtime, Settings, Tenant
from runtime.catalog import catalog
from runtime.cli.bars import megabytes
from runtime.cli.models import ensure_fetched
from runtime.cli.run import load_with_bars
from runtime.completion import Completion, TextDelta
from runtime.info import ModelInfo

QUESTIONS = {
    "geographer": "What is the capital of France?",
    "painter": "Name three colors of the rainbow.",
    "sailor": "Write one short sentence about the sea.",
}
PROOF_TENANT, PROOF = "geographer", "Paris"
MAX_TOKENS = 32

_FRAMES_PER_SECOND = 8


@dataclass
class Talk:
    """One tenant's conversation with one model, as the live view shows it."""

    tenant: str
    model: str
    text: str = ""
    num_tokens: int = 0
    completion: Completion | None = None
    ended: float = 0.0


def demo_models(platform: str = sys.platform) -> tuple[str, str]:
    """The model in the form that suits this machine, and the same model in the other form: other weights, another process."""
    items = catalog(platform)
    first = next(iter(items.values()))
    second = next(item for item in items.values() if item.form != first.form)
    return first.name, second.name


async def main(options: argparse.Namespace) -> int:
    console = Console()
    settings = Settings()
    models = demo_models()
    for model in models:
        await ensure_fetched(model, settings.home_directory())
    async with Runtime(settings) as rt:
        console.print(f"loading {' and '.join(models)}, each in a process of its own")
        await load_with_bars(rt, *(ModelSpec(model, model) for model in models))
        talks = [Talk(tenant, model) for tenant in QUESTIONS for model in models]
        started = time.perf_counter()
        await _talk_all(rt, talks, console)
        console.print(model_table([info for info in rt.models() if info.name in models], talks, started))
    answers = [talk for talk in talks if talk.tenant == PROOF_TENANT]
    for talk in answers:
        console.print(Text(f"{talk.model}: {QUESTIONS[talk.tenant]} {_one_line(talk.text)}"), soft_wrap=True)
    if not all(PROOF in talk.text for talk in answers):
        console.print(Text(f"an answer lacks {PROOF}: a model is not what it should be", style="red"), soft_wrap=True)
        return 1
    console.print(f"real: each of {len(models)} processes knows {PROOF}", soft_wrap=True)
    return 0


async def _talk_all(rt: Runtime, talks: list[Talk], console: Console) -> None:
    async with anyio.create_task_group() as tasks:
        for talk in talks:
            tasks.start_soon(_talk, rt.tenant(talk.tenant), talk)
        if console.is_terminal:
            await _show_live(talks, console)
        else:
            await _show_lines(talks, console)


async def _talk(tenant: Tenant, talk: Talk) -> None:
    messages = [{"role": "user", "content": QUESTIONS[talk.tenant]}]
    async with tenant.stream(talk.model, messages=messages, max_tokens=MAX_TOKENS) as stream:
        async for event in stream:
            if isinstance(event, TextDelta):
                talk.text += event.text
                talk.num_tokens += len(event.token_ids)
        talk.completion = await stream.completion()
        talk.ended = time.perf_counter()


# -- the view ---------------------------------------------------------------------------------------------


async def _show_live(talks: list[Talk], console: Console) -> None:
    with Live(console=console, auto_refresh=False) as live:
        while any(talk.completion is None for talk in talks):
            live.update(stream_view(talks, console.width), refresh=True)
            await anyio.sleep(1 / _FRAMES_PER_SECOND)
        live.update(stream_view(talks, console.width), refresh=True)


async def _show_lines(talks: list[Talk], console: Console) -> None:
    """A line whenever a talk ends; the others are shown as far as they are."""
    waiting = list(talks)
    while waiting:
        for talk in [talk for talk in waiting if talk.completion is not None]:
            waiting.remove(talk)
            console.print(Text(f"{talk.tenant} ↔ {talk.model}: {_one_line(talk.text)}"), soft_wrap=True)
        await anyio.sleep(1 / _FRAMES_PER_SECOND)


def stream_view(talks: list[Talk], width: int) -> Table:
    """A line for each talk, with as much of the end of its text as fits."""
    rows = [(talk.tenant, talk.model, str(talk.num_tokens)) for talk in talks]
    heads = ("tenant", "model", "tokens")
    taken = sum(max(len(cell) for cell in column) for column in zip(heads, *rows, strict=True))
    table = Table(box=None, padding=(0, 1), expand=True)
    for head in heads:
        table.add_column(head, justify="right" if head == "tokens" else "left", no_wrap=True)
    table.add_column("text", ratio=1, no_wrap=True, overflow="crop")
    room = max(10, width - taken - 2 * (len(heads) + 1))
    for talk, row in zip(talks, rows, strict=True):
        text = Text(_one_line(talk.text)[-room:])
        while text.cell_len > room:  # in cells: a character of some scripts takes two
            text = text[1:]
        text.style = "dim" if talk.completion is not None else ""
        table.add_row(*row, text)
    return table


def _one_line(text: str) -> str:
    return " ".join(text.split())


def model_table(infos: list[ModelInfo], talks: list[Talk], started: float) -> Table:
    """started: when all talks were handed in. tok/s is a model's tokens of all tenants over the time to its last one."""
    table = Table(title=f"{len(QUESTIONS)} tenants, {len(infos)} models, {len(talks)} streams at the same time")
    for heading in ("model", "pid", "tokens", "TTFT", "tok/s", "memory"):
        table.add_column(heading, justify="left" if heading == "model" else "right", no_wrap=True)
    for info in infos:
        own = [talk for talk in talks if talk.model == info.name]
        num_tokens = sum(talk.num_tokens for talk in own)
        firsts = [
            talk.completion.timings.first_token_seconds
            for talk in own
            if talk.completion is not None and talk.completion.timings.first_token_seconds is not None
        ]
        seconds = max(talk.ended for talk in own) - started
        table.add_row(
            info.name,
            str(info.pid),
            str(num_tokens),
            f"{statistics.median(firsts):.2f} s" if firsts else "-",
            f"{num_tokens / seconds:.1f}",
            megabytes(info.memory_bytes),
        )
    return table
