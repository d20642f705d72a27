"""What does the drafter hold of a sequence, and so what must it truncate to and be fed for the next round?

The target commits, the drafter follows. Everything is by absolute position and round number, so a lost, late or
repeated message costs a few tokens fed again, never a wrong cache: a position counts as held only when it is held whether or
not the messages still on their way arrive. What becomes of a proposed block itself is `protocol/acceptance.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from runtime.protocol.acceptance import num_common


@dataclass(frozen=True, slots=True)
class DraftOrder:
    """One sequence's part of a `Draft`: truncate to `base`, feed `commit`, propose from position `start` on. May be sent again."""

    number: int
    base: int
    commit: tuple[int, ...]

    @property
    def start(self) -> int:
        return self.base + len(self.commit)


class Follower:
    """One sequence in one drafter. Make a new one when the drafter has lost the sequence.

    `guess`: proposals not yet decided, the first for position `length`; they may reach beyond the block that is being
    verified, when the drafter drafts ahead. `num_held`: tokens that the drafter's cache surely holds, of the committed ones
    followed by `guess`. It never counts on an order whose answer has not come.
    """

    __slots__ = ("_committed", "_order", "_since", "_wrong_from", "guess", "num_held", "number")

    def __init__(self, committed: Sequence[int], num_held: int = 0, number: int = 0) -> None:
        """`committed`: prompt and output so far, at least one token. `num_held`: of them, prefilled in the drafter already.
        `number`: of the last round that this sequence had with this drafter.

        :raises ValueError: nothing is committed, or more is held than committed.
        """
        if not 0 <= num_held <= len(committed) or not committed:
            raise ValueError(f"a drafter cannot hold {num_held} of {len(committed)} tokens; it follows at least one")
        self._committed = list(committed)
        self.num_held = num_held
        self.number = number
        self.guess: tuple[int, ...] = ()
        self._order: DraftOrder | None = None
        self._since: list[int] = []
        """Committed at and after the order's start, while it is under way."""
        self._wrong_from: int | None = None
        """Position from which the order under way builds on a guess that did not come true."""

    @property
    def length(self) -> int:
        """Tokens committed, as far as this follower was told."""
        return len(self._committed)

    @property
    def is_waiting(self) -> bool:
        return self._order is not None

    @property
    def is_hopeful(self) -> bool:
        """An order is under way, and nothing committed since contradicts what it builds on."""
        return self._order is not None and self._wrong_from is None

    def order(self, number: int, *, ahead: bool = False) -> DraftOrder:
        """The next round's order. It replaces one whose answer never came.

        With `ahead` the drafter goes on from `guess`; without, from the committed tokens, and `guess` is given up.
        At least one token is fed, for there is no proposal without one: after a wholly accepted block two, otherwise one.

        :raises ValueError: the number is not higher than the last.
        """
        if number <= self.number:
            raise ValueError(f"round {number} comes after round {self.number}; round numbers only rise")
        if not ahead:
            self.guess = ()
        text = [*self._committed, *self.guess]
        base = min(self.num_held, len(text) - 1)
        self.number, self.num_held = number, base  # whether the order arrives or not, the drafter holds these
        self._since, self._wrong_from = [], None
        self._order = DraftOrder(number, base, tuple(text[base:]))
        return self._order

    def drafted(self, number: int, proposed: Sequence[int]) -> bool:
        """The answer has come. False when it is of no use: of another round, heard before, or overtaken by what was committed."""
        order = self._order
        if order is None or number != order.number:
            return False
        self._order = None
        if self._wrong_from is not None:
            self.num_held = self._wrong_from  # it was fed, and right up to there
            return False
        num_right = num_common(proposed, self._since)
        num_fed = order.start + max(0, len(proposed) - 1)  # the last proposal is drawn, not fed
        if num_right < len(self._since):
            self.num_held = min(order.start + num_right, num_fed)
            return False
        self.num_held = num_fed
        self.guess = (*self.guess, *proposed[num_right:])
        return num_right < len(proposed)

    def commit(self, index: int, tokens: Sequence[int]) -> bool:
        """The target committed `tokens` from position `index` on. True when `guess` goes on from there: the next draft is free.

        What was said before is ignored.

        :raises ValueError: positions are missing between what was said and `index`.
        """
        if index > self.length:
            raise ValueError(f"tokens at {index}, but only {self.length} are known: {index - self.length} are missing")
        for token in tokens[self.length - index :]:
            self._commit_one(token)
        return bool(self.guess)

    def _commit_one(self, token: int) -> None:
        position = self.length
        self._committed.append(token)
        order = self._order
        if self.guess:
            if self.guess[0] == token:
                self.guess = self.guess[1:]
                return
            self.guess = ()
            self.num_held = min(self.num_held, position)
            if order is not None and position < order.start:
                self._wrong_from = position
        if order is not None and self._wrong_from is None and position >= order.start:
            self._since.append(token)
