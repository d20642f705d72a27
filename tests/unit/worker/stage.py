"""A worker's loop without a process: commands by turn on one side, events on the other, an engine that is watched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from runtime.engine import fake
from runtime.engine.engine import PendingStep, RowResult, RowStep
from runtime.engine.fake_text import FakeTokenizer
from runtime.protocol.commands import AnyCommand, FakeScript, Load, PrefillRow, Sampling, Shutdown
from runtime.protocol.events import AnyEvent, Released, StepDone
from runtime.protocol.frames import FrameError
from runtime.protocol.ids import SequenceId
from runtime.protocol.tokens import TokenIds
from runtime.worker.desk import TextDesk
from runtime.worker.device import Device, FreeDevice
from runtime.worker.loop import Loop
from runtime.worker.status import Status


class ScriptedChannel:
    """Each look for commands that finds none is the end of a turn; an idle wait skips to the next turn that has some.

    At the end of the script `Shutdown` comes.
    """

    def __init__(self, turns: Sequence[Sequence[AnyCommand | FrameError]]) -> None:
        self.turns = [list(turn) for turn in turns]
        self.events: list[AnyEvent] = []
        self.on_send: Callable[[AnyEvent], Sequence[AnyCommand]] = lambda event: ()
        self.num_idle = 0

    def receive(self, timeout_seconds: float) -> AnyCommand | None:
        if timeout_seconds:
            self.num_idle += 1
            while self.turns and not self.turns[0]:
                self.turns.pop(0)
        if not self.turns:
            return Shutdown() if timeout_seconds else None
        if not self.turns[0]:
            self.turns.pop(0)
            return None
        message = self.turns[0].pop(0)
        if isinstance(message, FrameError):
            raise message
        return message

    def send(self, event: AnyEvent) -> None:
        self.events.append(event)
        answers = list(self.on_send(event))
        if answers:
            self.turns = self.turns or [[]]
            self.turns[0].extend(answers)

    def close(self) -> None: ...


class WatchedEngine(fake.FakeEngine):
    """Checks the look-ahead, and keeps what every step fed."""

    num_unfinished = 0

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.steps: list[list[RowStep]] = []

    def step(self, rows: Sequence[RowStep]) -> PendingStep:  # type: ignore[override]
        assert self.num_unfinished <= 1, "more than one step ahead"
        self.num_unfinished += 1
        self.steps.append(list(rows))
        return _Watched(self, super().step(rows))


class _Watched:
    def __init__(self, engine: WatchedEngine, pending: PendingStep) -> None:
        self.engine = engine
        self.pending = pending

    def result(self) -> list[RowResult]:
        self.engine.num_unfinished -= 1
        return self.pending.result()


class Stage:
    """One loop over a script of turns. Options are those of `Load`."""

    def __init__(
        self,
        turns: Sequence[Sequence[AnyCommand | FrameError]],
        *,
        script: FakeScript = FakeScript(),  # noqa: B008
        tokenizer: FakeTokenizer | None = None,
        chunked_prefill: bool = True,
        device: Device | None = None,
        **options: Any,
    ) -> None:
        load = Load("m", "", kind="fake", fake=script, **options)
        loaded = fake.load(load, lambda stage, done, total: None)
        self.engine = WatchedEngine(script, loaded.engine.faults, loaded.facts.context_length)
        capabilities = msgspec.structs.replace(loaded.facts.capabilities, chunked_prefill=chunked_prefill)
        loaded = fake.Loaded(
            self.engine,
            tokenizer or loaded.tokenizer,
            msgspec.structs.replace(loaded.facts, capabilities=capabilities),
            loaded.numerics,
        )
        self.channel = ScriptedChannel(turns)
        self.desk = TextDesk(loaded.tokenizer, self.channel)  # type: ignore[arg-type]
        self.loop = Loop(self.channel, loaded, load, self.desk, Status(), device or FreeDevice())  # type: ignore[arg-type]

    def run(self) -> list[AnyEvent]:
        try:
            self.loop.run()
        finally:
            self.desk.close()
        assert self.engine.num_unfinished == 0
        return self.channel.events


def row(
    sequence: int, prompt: Sequence[int], *, max_tokens: int = 8, limit: int = 1 << 20, output: Sequence[int] = (), **options: Any
) -> PrefillRow:
    """`output`: earlier output of a replay. `limit` is absolute."""
    return PrefillRow(
        SequenceId(sequence),
        TokenIds([*prompt, *output]),
        len(prompt),
        len(prompt) + max_tokens,
        limit,
        **{"sampling": Sampling(), **options},
    )


def tokens_of(events: Sequence[AnyEvent], sequence: int) -> list[int]:
    return [t for event in events if isinstance(event, StepDone) for r in event.rows if r.sequence == sequence for t in r.tokens]


def text_of(events: Sequence[AnyEvent], sequence: int) -> str:
    return "".join(r.text for event in events if isinstance(event, StepDone) for r in event.rows if r.sequence == sequence)


def ends_of(events: Sequence[AnyEvent], sequence: int) -> list[tuple[str, str | None]]:
    """(finish, matched stop) of each end of the sequence: there should be one at most."""
    return [
        (r.finish, r.matched_stop)
        for event in events
        if isinstance(event, StepDone)
        for r in event.rows
        if r.sequence == sequence and r.finish is not None
    ]


def step_of_release(events: Sequence[AnyEvent], sequence: int) -> int:
    return next(event.step for event in events if isinstance(event, Released) and sequence in event.sequences)
