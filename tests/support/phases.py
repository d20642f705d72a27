"""A worker's loop in this process, with an engine that outlives it: commands in phases, each when nothing is left to do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from time import sleep
from typing import Any

import msgspec

from runtime.engine.engine import Loaded
from runtime.protocol.commands import (
    AnyCommand,
    Load,
    Prefill,
    PrefillRow,
    PrefixUse,
    Publish,
    Release,
    Sampling,
    SegmentRange,
    Shutdown,
)
from runtime.protocol.events import AnyEvent, Kept, KeptNode, Restored, SegmentPublished, StepDone
from runtime.protocol.ids import SequenceId
from runtime.protocol.tokens import TokenIds
from runtime.worker.desk import TextDesk
from runtime.worker.device import FreeDevice
from runtime.worker.loop import IDLE_SECONDS, Loop
from runtime.worker.prefix_form import PrefixForm
from runtime.worker.status import Status

SCOPE = bytes(range(32))
OWNER = "0" * 64
BUDGET_BYTES = 64 << 20


class PhasedChannel:
    """The next phase comes when the loop has nothing to do, `Shutdown` after the last. `on_send` may answer events at once."""

    def __init__(self, phases: Iterable[Sequence[AnyCommand]]) -> None:
        self.phases = [list(phase) for phase in phases]
        self.waiting: list[AnyCommand] = []
        self.events: list[AnyEvent] = []
        self.on_send: Callable[[AnyEvent], Sequence[AnyCommand]] = lambda event: ()

    def receive(self, timeout_seconds: float) -> AnyCommand | None:
        if not self.waiting and timeout_seconds >= IDLE_SECONDS:
            self.waiting = self.phases.pop(0) if self.phases else [Shutdown()]
        if self.waiting:
            return self.waiting.pop(0)
        sleep(timeout_seconds if timeout_seconds < IDLE_SECONDS else 0)
        return None

    def send(self, event: AnyEvent) -> None:
        self.events.append(event)
        self.waiting += self.on_send(event)

    def close(self) -> None: ...


class Phases:
    """One loop over `loaded`. Options are those of `Load`."""

    def __init__(self, loaded: Loaded, *phases: Sequence[AnyCommand], root: Path | None = None, **options: Any) -> None:
        options = {"prefix_memory_bytes": BUDGET_BYTES, **options}
        load = Load("m", "", prefix_root=None if root is None else str(root), **options)
        self.channel = PhasedChannel(phases)
        self.desk = TextDesk(loaded.tokenizer, self.channel)  # type: ignore[arg-type]
        self.loop = Loop(self.channel, loaded, load, self.desk, Status(), FreeDevice())  # type: ignore[arg-type]
        self.memory = self.loop._prefixes.memory

    def run(self) -> list[AnyEvent]:
        try:
            self.loop.run()
        finally:
            self.desk.close()
        self.memory.validate()
        return self.channel.events


def start(
    sequence: int,
    prompt: Sequence[int],
    *,
    max_tokens: int = 4,
    sampling: Sampling = Sampling(),  # noqa: B008 (immutable)
    scope: bytes = SCOPE,
    segments: Sequence[SegmentRange] = (),
    keep: bool = True,
    pin: bool = False,
    boundaries: tuple[int, ...] = (),
    **options: Any,
) -> Prefill:
    """A row of its own that uses prefixes."""
    use = PrefixUse(scope, tuple(segments), keep, boundaries, pin)
    length = len(prompt) + max_tokens
    row = PrefillRow(
        SequenceId(sequence),
        TokenIds(prompt),
        len(prompt),
        length,
        1 << 20,
        sampling=sampling,
        ignore_eos=True,
        prefix=use,
        **options,
    )
    return Prefill((row,))


def release(*sequences: int) -> Release:
    return Release((), tuple(SequenceId(sequence) for sequence in sequences))


def publish_all(event: AnyEvent) -> list[AnyCommand]:
    """An `on_send` that has every node written that is offered."""
    if isinstance(event, Kept) and event.nodes:
        return [Publish(tuple((node.node, OWNER) for node in event.nodes))]
    return []


def restored(events: Iterable[AnyEvent], sequence: int) -> Restored:
    (said,) = [event for event in events if isinstance(event, Restored) and event.sequence == sequence]
    return said


def kept(events: Iterable[AnyEvent], sequence: int) -> list[Kept]:
    return [event for event in events if isinstance(event, Kept) and event.sequence == sequence]


def offered(events: Iterable[AnyEvent]) -> list[KeptNode]:
    return [node for event in events if isinstance(event, Kept) for node in event.nodes]


def said(events: Iterable[AnyEvent], sequence: int) -> list[Any]:
    """Tokens with their log-probabilities, if asked for: these show every bit."""
    rows = [row for event in events if isinstance(event, StepDone) for row in event.rows if row.sequence == sequence]
    return [(row.tokens, row.logprobs) for row in rows if row.tokens]


def ends(events: Iterable[AnyEvent], sequence: int) -> list[str]:
    rows = [row for event in events if isinstance(event, StepDone) for row in event.rows]
    return [row.finish for row in rows if row.sequence == sequence and row.finish is not None]


def segments_of(events: Sequence[AnyEvent], *, form: PrefixForm, length: int) -> list[SegmentRange]:
    """What a prompt of `length` tokens can be restored from of what was published for it."""
    nodes = {node.node: node for node in offered(events)}
    named = sorted(
        (nodes[event.node].start, nodes[event.node].end, event.name) for event in events if isinstance(event, SegmentPublished)
    )
    if not form.has_checkpoints:  # any position will do
        named = [(first, min(end, length - 1), name) for first, end, name in named]
    ranges = [SegmentRange(name, first, end, False) for first, end, name in named if first < end < length]
    if ranges and form.has_checkpoints:
        ranges[-1] = msgspec.structs.replace(ranges[-1], with_checkpoint=True)
    return ranges[-1:] if form.layout.style == "checkpoint" else ranges
