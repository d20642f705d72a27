"""How does a target carry out `Verify`? One step for all rows that were asked for, and of each what plain decoding would commit.

The arithmetic of a block is `protocol/acceptance.py`'s. Tokens are taken one by one, as from decode steps, so that ends, stop
strings and limits fall where they would without proposals.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from runtime.engine.engine import Engine, RowResult, RowStep
from runtime.protocol.acceptance import accepted, judge_verify, rebase
from runtime.protocol.commands import Verify, VerifyRow
from runtime.protocol.events import AnyEvent, StepRow, TokenLogprob, Verified, VerifiedRow
from runtime.protocol.ids import SequenceId
from runtime.worker.row import Row
from runtime.worker.sequences import Sequences


@dataclass(frozen=True, slots=True)
class Block:
    """A row's part of a verify step. proposed: what is fed after its last committed token."""

    row: Row
    number: int
    proposed: Sequence[int]

    @property
    def step(self) -> RowStep:
        if not self.proposed:
            return self.row.decode_step
        return RowStep(self.row.sequence, [self.row.committed[-1], *self.proposed], len(self.proposed) + 1)


class Verifier:
    def __init__(self, engine: Engine, sequences: Sequences, *, vocabulary_size: int, send: Callable[[AnyEvent], None]) -> None:
        self._engine = engine
        self._sequences = sequences
        self._vocabulary_size = vocabulary_size
        self._send = send
        self._asked: dict[SequenceId, tuple[Row, VerifyRow, int]] = {}

    @property
    def is_asked(self) -> bool:
        """A step of it is possible now."""
        return any(_is_ready(row) for row, _, _ in self._asked.values())

    def ask(self, command: Verify, num_steps: int) -> None:
        """Remember what is to be verified, until the next `take`. A round that is done is answered again."""
        answers: list[VerifiedRow] = []
        for asked in command.rows:
            row = self._sequences.running(asked.sequence)
            if row is None or row.start.hold or not row.committed:
                continue  # it has ended, which was said
            verdict = judge_verify(asked.number, asked.base, last_number=row.last_number, length=row.length)
            if verdict in ("run", "behind", "gap"):  # of a gap nothing can be used, but the sequence goes on
                row.is_held = True
                self._asked[row.sequence] = (row, asked, command.lookup)
            elif verdict == "repeat" and row.answer is not None:
                answers.append(row.answer)
        if answers:
            self._send(Verified(num_steps, tuple(answers), 0.0))

    def resume(self, sequences: Sequence[SequenceId]) -> None:
        """What was asked of them is asked no more."""
        for sequence in sequences:
            self._asked.pop(sequence, None)

    def take(self) -> list[Block]:
        """The next step's blocks; each of their rows has one step under way then."""
        blocks: list[Block] = []
        for row, asked, lookup in list(self._asked.values()):
            if not _is_ready(row):
                if row.is_over:
                    del self._asked[row.sequence]
                continue
            del self._asked[row.sequence]
            row.last_number, row.answer = asked.number, None
            row.num_pending += 1
            blocks.append(Block(row, asked.number, self._proposals(row, asked, lookup)))
        return blocks

    def _proposals(self, row: Row, asked: VerifyRow, lookup: int) -> list[int]:
        """Those that are of use: for its present length, within what is granted, and of its vocabulary."""
        proposed: Sequence[int] = asked.proposed
        num_since = row.length - asked.base
        if lookup and not proposed:
            proposed = row.propose(min(lookup, row.num_proposable))
        elif not 0 <= num_since <= len(row.committed):
            proposed = ()
        elif num_since:
            proposed = rebase(asked.base, proposed, row.length, row.committed[len(row.committed) - num_since :])
        useful: list[int] = []
        for token in proposed[: row.num_proposable]:
            if not 0 <= token < self._vocabulary_size:
                break
            useful.append(token)
        return useful

    def commit(self, block: Block, result: RowResult) -> VerifiedRow:
        """Take what the block's step drew. The row may be over afterwards.

        :raises RowError: the step failed on it, or its text does.
        """
        row, num_proposed = block.row, len(block.proposed)
        row.num_pending -= 1
        if result.error is not None:
            raise result.error
        num_matched, tokens = accepted(block.proposed, result.tokens)
        base = row.length
        pieces: list[StepRow] = []
        for place, token in enumerate(tokens):
            pieces.append(row.commit(token, result.logprobs[place : place + 1]))
            if row.is_over or row.is_bounded:
                break
        row.num_proven = min(base + num_matched, row.length)
        if not row.is_over and self._engine.length(row.sequence) > row.length - 1:
            self._engine.truncate(row.sequence, row.length - 1)
        row.answer = VerifiedRow(block.number, num_proposed, num_matched, _joined(pieces))
        return row.answer


def _is_ready(row: Row) -> bool:
    return row.is_held and not row.is_over and not row.num_pending and not row.is_bounded


def _joined(pieces: Sequence[StepRow]) -> StepRow:
    """What consecutive steps said of one sequence, as one."""
    last = pieces[-1]
    tokens = tuple(token for piece in pieces for token in piece.tokens)
    logprobs: tuple[TokenLogprob, ...] = tuple(entry for piece in pieces for entry in piece.logprobs)
    text = "".join(piece.text for piece in pieces)
    return StepRow(last.sequence, pieces[0].index, tokens, text, last.finish, last.matched_stop, logprobs)
