"""A sequence that is held after its first token, and what a target says of it in rounds."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from runtime.protocol.commands import AnyCommand, FakeScript, Hold, Prefill, PrefillRow, Verify, VerifyRow
from runtime.protocol.events import AnyEvent, Held, StepDone, StepRow, Verified, VerifiedRow
from runtime.protocol.ids import SequenceId
from tests.unit.worker.stage import Stage

ONE, TWO = SequenceId(1), SequenceId(2)
PROMPT = b"count: "
START = len(PROMPT)
REPLY = b"one two three four five six seven"
SAYS = FakeScript(reply=REPLY.decode())
WRONG = ord("#")

Answer = Callable[[int], Sequence[AnyCommand]]


def verify(number: int, base: int, proposed: Sequence[int] = (), lookup: int = 0, sequence: SequenceId = ONE) -> Verify:
    return Verify((VerifyRow(sequence, number, base, tuple(proposed)),), lookup)


def right(length: int, num_tokens: int) -> bytes:
    """What will be said from the absolute position `length` on."""
    return REPLY[length - START :][:num_tokens]


def play(start: PrefillRow, *answers: Answer, script: FakeScript = SAYS) -> list[AnyEvent]:
    """The sequence is held after its first token. `answers`: to its `Held` and then to each `Verified`, given its length."""
    stage = Stage([[Prefill((start,))]], script=script)
    left = list(answers)
    holds = itertools.chain([[Hold((start.sequence,))]], itertools.repeat([]))

    def reply(event: AnyEvent) -> Sequence[AnyCommand]:
        match event:
            case StepDone():
                return next(holds)
            case Held(rows=((_, length),)):
                return left.pop(0)(length) if left else []
            case Verified(rows=(one,)):
                return left.pop(0)(one.step.index + len(one.step.tokens)) if left else []
        return []

    stage.channel.on_send = reply
    return stage.run()


def rounds(events: Sequence[AnyEvent]) -> list[VerifiedRow]:
    return [one for event in events if isinstance(event, Verified) for one in event.rows]


def said(events: Sequence[AnyEvent], sequence: int = ONE) -> list[StepRow]:
    """All that was said of a sequence, in free steps and in rounds."""
    found = []
    for event in events:
        rows: Sequence[StepRow] = ()
        if isinstance(event, StepDone):
            rows = event.rows
        elif isinstance(event, Verified):
            rows = [one.step for one in event.rows]
        found += [one for one in rows if one.sequence == sequence]
    return found


def output(events: Sequence[AnyEvent], sequence: int = ONE) -> bytes:
    return bytes(token for one in said(events, sequence) for token in one.tokens)
