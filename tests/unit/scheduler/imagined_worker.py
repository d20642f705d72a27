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

from runtime.protocol.commands import (
    AnyCommand,
    Draft,
    DraftRow,
    Grant,
    Hold,
    Prefill,
    PrefillRow,
    Prepare,
    Release,
    Resume,
    TextPrompt,
    Verify,
    VerifyRow,
)
from runtime.protocol.events import (
    AnyEvent,
    Drafted,
    DraftedRow,
    FinishReason,
    Held,
    Prefilled,
    Prepared,
    Refused,
    Released,
    StepDone,
    StepRow,
    Verified,
    VerifiedRow,
)
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
class ImaginedRow:
    start: PrefillRow
    context: list[int]
    limit: int
    is_held: bool
    is_prefilled: bool = False
    asked: VerifyRow | None = None
    num_own: int = 0
    order: DraftRow | None = None
    number: int = 0


@dataclass
class ImaginedWorker:
    """`text_events` and `step_events` are two channels: each in order, against each other in any order."""

    max_slots: int
    commands: deque[AnyCommand] = field(default_factory=deque)
    text_events: deque[AnyEvent] = field(default_factory=deque)
    step_events: deque[AnyEvent] = field(default_factory=deque)
    rows: dict[SequenceId, ImaginedRow] = field(default_factory=dict)
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
                    self.rows[row.sequence] = ImaginedRow(row, row.tokens.tolist(), row.limit, row.hold)
                num_guests = sum(row.start.hold for row in self.rows.values())
                assert max(num_guests, len(self.rows) - num_guests) <= self.max_slots, "more sequences than slots"
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
            case Hold(sequences=sequences):
                held = [sequence for sequence in sequences if sequence in self.rows]
                for sequence in held:
                    assert self.rows[sequence].is_prefilled, "held before it decodes"
                    self.rows[sequence].is_held = True
                if held:
                    self.step_events.append(Held(tuple((sequence, len(self.rows[sequence].context)) for sequence in held)))
            case Resume(sequences=sequences):
                for sequence in sequences:
                    if sequence in self.rows:
                        self.rows[sequence].is_held, self.rows[sequence].asked = False, None
            case Verify(rows=asked, lookup=lookup):
                for one in asked:
                    if one.sequence in self.rows:
                        row = self._numbered(one.sequence, one.number)
                        assert one.base <= len(row.context), "proposals for a place that the sequence has not reached"
                        row.is_held, row.asked, row.num_own = True, one, lookup
            case Draft(rows=orders):
                for order in orders:
                    if order.sequence in self.rows:
                        row = self._numbered(order.sequence, order.number)
                        assert row.is_prefilled, "an order before the prompt is computed"
                        assert order.base <= len(row.context), "an order for a place that the drafter has not reached"
                        del row.context[order.base :]
                        row.order = order
                    else:
                        self.step_events.append(Drafted((), (order.sequence,)))
            case other:
                raise AssertionError(f"a command the scheduler never sends: {other}")

    def _numbered(self, sequence: SequenceId, number: int) -> ImaginedRow:
        row = self.rows[sequence]
        assert number > row.number, "numbers only rise"
        row.number = number
        return row

    def prepare_one(self) -> None:
        request, text = next(iter(self.preparing.items()))
        del self.preparing[request]
        if text == REFUSED_TEXT:
            self.text_events.append(Refused("prepare", "template_error", "no such template", (request,)))
        else:
            self.text_events.append(Prepared(request, TokenIds(tokenize(text))))

    def runnable(self) -> list[SequenceId]:
        """Those with a token to feed or draw."""
        return [
            sequence
            for sequence, row in self.rows.items()
            if row.order is not None
            or (len(row.context) < row.limit and (row.asked is not None or not row.is_prefilled or not row.is_held))
        ]

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
        drafts = [sequence for sequence in ready if self.rows[sequence].order is not None]
        if drafts and chance.random() < 0.5:
            self._draft(drafts, chance)
            return
        asked = [sequence for sequence in ready if self.rows[sequence].asked is not None]
        if asked and chance.random() < 0.5:
            rounds = tuple(self._verify(sequence, self.rows[sequence], chance) for sequence in asked if chance.random() < 0.8)
            if rounds:
                self.step_events.append(Verified(self.num_steps, rounds, 0.01))
            return
        said = []
        for sequence in ready:
            row = self.rows[sequence]
            if row.is_prefilled and not row.is_held:
                if row.start.sampling.seed == FAILING_SEED and len(row.context) > row.start.prompt_length + 2:
                    del self.rows[sequence]
                    self.step_events.append(Refused("step", "generation_failed", "non-finite logits", (), (sequence,)))
                else:
                    said.append(self._decode(sequence, row))
        if said:
            self.step_events.append(StepDone(self.num_steps, tuple(said), 0.01))

    def _draft(self, sequences: list[SequenceId], chance: random.Random) -> None:
        """Carry out the orders; now and then one is wrong, and now and then a row is lost."""
        for sequence in sequences:
            row = self.rows[sequence]
            order, row.order = row.order, None
            assert order is not None
            if chance.random() < 0.02:
                del self.rows[sequence]
                self.step_events.append(Drafted((), (sequence,)))
                continue
            row.context += order.commit.tolist()
            proposed = self._guess(row, order.count, chance)
            row.context += proposed[:-1]
            self.step_events.append(Drafted((DraftedRow(sequence, order.number, tuple(proposed)),), (), 0.01))

    def _guess(self, row: ImaginedRow, count: int, chance: random.Random) -> list[int]:
        proposed: list[int] = []
        for _ in range(count):
            is_right = chance.random() < 0.85
            proposed.append(next_token([*row.context, *proposed], row.start.sampling.seed) if is_right else 250)
        return proposed

    def _verify(self, sequence: SequenceId, row: ImaginedRow, chance: random.Random) -> VerifiedRow:
        asked, row.asked = row.asked, None
        assert asked is not None
        base = len(row.context)
        room = min(row.limit, row.start.max_length) - base - 1
        proposed = list(asked.proposed) if asked.base == base else []
        proposed = (proposed or self._guess(row, row.num_own, chance))[:room]
        steps: list[StepRow] = []
        num_matched = 0
        while True:
            steps.append(self._decode(sequence, row))
            is_right = num_matched < len(proposed) and steps[-1].tokens == (proposed[num_matched],)
            num_matched += is_right
            if steps[-1].finish is not None or not is_right:
                break
        tokens = tuple(token for step in steps for token in step.tokens)
        text = "".join(step.text for step in steps)
        return VerifiedRow(asked.number, len(proposed), num_matched, StepRow(sequence, base, tokens, text, steps[-1].finish))

    def _decode(self, sequence: SequenceId, row: ImaginedRow) -> StepRow:
        index, token = len(row.context), next_token(row.context, row.start.sampling.seed)
        if token == END_TOKEN:
            del self.rows[sequence]
            return StepRow(sequence, index, (), "", "stop")
        row.context.append(token)
        is_full = len(row.context) >= row.start.max_length
        if is_full:
            del self.rows[sequence]
        return StepRow(sequence, index, (token,), f"<{token}>", "length" if is_full else None)
