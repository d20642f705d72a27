"""How does a drafter carry out `Draft`? Each held sequence goes back to where the order says, is fed, and proposes token by token.

Orders of any number of targets run in the same steps. Each step is submitted before the one before it is taken, for the engine
feeds what it drew itself. A later order for a sequence replaces one that is not done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from runtime.engine.engine import Engine, RowError, RowResult, RowStep
from runtime.protocol.acceptance import judge_draft
from runtime.protocol.commands import Draft, DraftRow
from runtime.protocol.events import AnyEvent, Drafted, DraftedRow
from runtime.protocol.ids import SequenceId
from runtime.worker.row import Row
from runtime.worker.sequences import Sequences


@dataclass(slots=True, eq=False)
class Order:
    """num_asked: of submitted steps. commit: what the first of them feeds, empty afterwards. seconds: inside its steps."""

    row: Row
    number: int
    count: int
    commit: Sequence[int]
    num_asked: int = 0
    proposed: list[int] = field(default_factory=list)
    seconds: float = 0.0
    is_replaced: bool = False

    @property
    def is_submitted(self) -> bool:
        return not self.commit and self.num_asked == self.count

    def next_step(self) -> RowStep:
        tokens, self.commit = self.commit or None, ()
        num_samples = int(self.num_asked < self.count)
        self.num_asked += num_samples
        return RowStep(self.row.sequence, tokens, num_samples)


class Drafter:
    def __init__(self, engine: Engine, sequences: Sequences, send: Callable[[AnyEvent], None]) -> None:
        self._engine = engine
        self._sequences = sequences
        self._send = send
        self._orders: dict[SequenceId, Order] = {}

    @property
    def is_asked(self) -> bool:
        """A step of it is possible now."""
        return any(not order.is_submitted and not order.row.is_over for order in self._orders.values())

    def order(self, command: Draft) -> None:
        answers: list[DraftedRow] = []
        lost: list[SequenceId] = []
        for ordered in command.rows:
            row = self._sequences.running(ordered.sequence)
            if row is None or not row.start.hold or not len(ordered.commit):
                lost.append(ordered.sequence)
                continue
            length = self._engine.length(row.sequence)
            match judge_draft(ordered.number, ordered.base, last_number=row.last_number, length=length):
                case "run":
                    if not self._begin(row, ordered, length):
                        lost.append(row.sequence)
                case "gap":
                    lost.append(row.sequence)
                case "repeat" if row.sequence not in self._orders:
                    answers.append(DraftedRow(row.sequence, row.last_number, tuple(row.committed)))
                case _:
                    pass
        self._lose(lost)
        if answers or lost:
            self._send(Drafted(tuple(answers), tuple(lost)))

    def _begin(self, row: Row, ordered: DraftRow, length: int) -> bool:
        """False when the row cannot go back so far."""
        before = self._orders.pop(row.sequence, None)
        if before is not None:
            before.is_replaced = True
        if ordered.base < length:
            try:
                self._engine.truncate(row.sequence, ordered.base)
            except RowError:
                return False
        row.last_number = ordered.number
        self._orders[row.sequence] = Order(row, ordered.number, ordered.count, ordered.commit.tolist())
        return True

    def _lose(self, sequences: Sequence[SequenceId]) -> None:
        rows = [row for sequence in sequences if (row := self._sequences.known(sequence)) is not None and row.start.hold]
        for row in rows:
            row.is_over = row.has_failed = True
            order = self._orders.pop(row.sequence, None)
            if order is not None:
                order.is_replaced = True
        self._sequences.forget(rows)

    def take(self) -> list[Order]:
        """Orders that take part in the next step; it is made of their `next_step`s."""
        for order in [order for order in self._orders.values() if order.row.is_over]:
            del self._orders[order.row.sequence]
        return [order for order in self._orders.values() if not order.is_submitted]

    def took(self, orders: Sequence[Order], results: Sequence[RowResult], seconds: float) -> None:
        """A step's results are in; what is done by it is said."""
        done: list[Order] = []
        lost: list[SequenceId] = []
        for order, result in zip(orders, results, strict=True):
            if order.row.is_over:
                continue
            if result.error is not None:
                lost.append(order.row.sequence)
                continue
            if order.is_replaced:
                continue
            order.seconds += seconds
            order.proposed += result.tokens
            if order.is_submitted and len(order.proposed) == order.count:
                done.append(order)
                order.row.committed = order.proposed  # of a held row: what it last proposed, should it be asked again
                del self._orders[order.row.sequence]
        self._lose(lost)
        if done or lost:
            answers = tuple(DraftedRow(order.row.sequence, order.number, tuple(order.proposed)) for order in done)
            self._send(Drafted(answers, tuple(lost), max((order.seconds for order in done), default=0.0)))
