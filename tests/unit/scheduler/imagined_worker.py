"""A worker made of plain data: takes commands, says what a real one would say, at any pace, with repeats and stragglers.

Its next token is a hash of the whole context and the seed, so a stream shows every foreign, missing or doubled token.
It checks on its side what a worker may rely on: never more sequences than slots, no id twice, absolute positions.
"""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from runtime.protocol.commands import AnyCommand, Grant, Prefill, PrefillRow, Prepare, Release, TextPrompt
from runtime.protocol.events import AnyEvent, FinishReason, Prefilled, Prepared, Refused, Released, StepDone, StepRow
from runtime.protocol.ids import RequestId, SequenceId
from runtime.protocol.tokens import TokenIds

END_TOKEN = 0
REFUSED_TEXT = "!"
FAILING_SEED = 666


def tokenize(text: str) -> list[int]:
    return [1 + ord(character) % 200 for character in text]


def next_token(context: Iterable[int], seed: int) -> int:
    """END_TOKEN about once in 25."""
    digest = hashlib.blake2b(repr((tuple(context), seed)).encode(), digest_size=4).digest()
    value = int.from_bytes(digest, "little")
    return END_TOKEN if value % 25 == 0 else 1 + value % 199


def whole_output(text: str, seed: int, max_length: int) -> tuple[list[int], FinishReason]:
    """What a sequence says when nobody disturbs it."""
    context = tokenize(text)
    start = len(context)
    while len(context) < max_length:
        token = next_token(context, seed)
        if token == END_TOKEN:
            return context[start:], "stop"
        context.append(token)
    return context[start:], "length"


@dataclass
class _Row:
    start: PrefillRow
    context: list[int]
    limit: int
    is_prefilled: bool = False


@dataclass
class ImaginedWorker:
    """`text_events` and `step_events` are two channels: each in order, against each other in any order."""

    max_slots: int
    commands: deque[AnyCommand] = field(default_factory=deque)
    text_events: deque[AnyEvent] = field(default_factory=deque)
    step_events: deque[AnyEvent] = field(default_factory=deque)
    rows: dict[SequenceId, _Row] = field(default_factory=dict)
    preparing: dict[RequestId, str] = field(default_factory=dict)
    seen: set[SequenceId] = field(default_factory=set)
    num_steps: int = 0

    @property
    def is_quiet(self) -> bool:
        return not (self.commands or self.text_events or self.step_events or self.preparing or self.runnable())

    def take_command(self) -> None:
        match self.commands.popleft():
            case Prepare(request=request, prompt=prompt):
                assert isinstance(prompt, TextPrompt)
                self.preparing[request] = prompt.text
            case Prefill(rows=rows):
                for row in rows:
                    assert row.sequence not in self.seen, "an id came twice"
                    self.seen.add(row.sequence)
                    self.rows[row.sequence] = _Row(row, row.tokens.tolist(), row.limit)
                assert len(self.rows) <= self.max_slots, "more sequences than slots"
            case Grant(limits=limits):
                for sequence, limit in limits:
                    if sequence in self.rows:
                        self.rows[sequence].limit = max(self.rows[sequence].limit, limit)
            case Release(requests=requests, sequences=sequences):
                if requests:
                    for request in requests:
                        self.preparing.pop(request, None)
                    self.text_events.append(Released(requests, (), self.num_steps))
                if sequences:
                    for sequence in sequences:
                        self.rows.pop(sequence, None)
                    self.step_events.append(Released((), sequences, self.num_steps))
            case other:
                raise AssertionError(f"a command the scheduler never sends: {other}")

    def prepare_one(self) -> None:
        request, text = next(iter(self.preparing.items()))
        del self.preparing[request]
        if text == REFUSED_TEXT:
            self.text_events.append(Refused("prepare", "template_error", "no such template", (request,)))
        else:
            self.text_events.append(Prepared(request, TokenIds(tokenize(text))))

    def runnable(self) -> list[SequenceId]:
        return [sequence for sequence, row in self.rows.items() if len(row.context) < row.limit]

    def step(self, chance: random.Random) -> None:
        """Prefill some rows, or decode one token in every row that may."""
        self.num_steps += 1
        ready = self.runnable()
        fresh = [sequence for sequence in ready if not self.rows[sequence].is_prefilled]
        if fresh and chance.random() < 0.5:
            for sequence in fresh:
                self.rows[sequence].is_prefilled = True
            self.step_events.append(Prefilled(tuple((s, len(self.rows[s].context)) for s in fresh), 0.1))
            return
        said = []
        for sequence in ready:
            row = self.rows[sequence]
            if row.is_prefilled:
                if row.start.sampling.seed == FAILING_SEED and len(row.context) > row.start.prompt_length + 2:
                    del self.rows[sequence]
                    self.step_events.append(Refused("step", "generation_failed", "non-finite logits", (), (sequence,)))
                else:
                    said.append(self._decode(sequence, row))
        if said:
            self.step_events.append(StepDone(self.num_steps, tuple(said)))

    def _decode(self, sequence: SequenceId, row: _Row) -> StepRow:
        index, token = len(row.context), next_token(row.context, row.start.sampling.seed)
        if token == END_TOKEN:
            del self.rows[sequence]
            return StepRow(sequence, index, (), "", "stop")
        row.context.append(token)
        is_full = len(row.context) >= row.start.max_length
        if is_full:
            del self.rows[sequence]
        return StepRow(sequence, index, (token,), f"<{token}>", "length" if is_full else None)
