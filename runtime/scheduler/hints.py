"""What is a worker's memory known to hold? Hints from what it said of its last sequences; it may have forgotten since. Pure."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from runtime.prefix.hashing import Secret
from runtime.protocol.ids import SequenceId
from runtime.protocol.tokens import TokenIds
from runtime.scheduler.following import common_length

MAX_HINTS = 64


@dataclass(frozen=True, slots=True)
class _Hint:
    secret: Secret = field(repr=False)
    tokens: TokenIds
    length: int
    number: int


class Hints:
    """`number` counts what was noted, so that a reader can ask for what is new only."""

    def __init__(self) -> None:
        self.number = 0
        self._hints: OrderedDict[SequenceId, _Hint] = OrderedDict()
        """By the sequence that was kept, in the order of their numbers."""

    def __len__(self) -> int:
        return len(self._hints)

    def note(self, sequence: SequenceId, secret: Secret, tokens: TokenIds, length: int) -> None:
        """Memory holds the first `length` of the sequence's tokens. Saying less than before takes nothing back."""
        before = self._hints.pop(sequence, None)
        if before is not None and before.length > length:
            tokens, length = before.tokens, before.length
        if length == 0:
            return
        self.number += 1
        self._hints[sequence] = _Hint(secret, tokens, length, self.number)
        if len(self._hints) > MAX_HINTS:
            self._hints.popitem(last=False)

    def reach(self, secret: Secret, tokens: TokenIds, since: int = 0) -> int:
        """How many of these tokens memory holds, by what was noted after number `since`."""
        longest = 0
        for hint in reversed(self._hints.values()):
            if hint.number <= since:
                break
            if hint.secret == secret:
                longest = max(longest, min(hint.length, common_length(hint.tokens, tokens)))
        return longest

    def correct(self, secret: Secret, tokens: TokenIds, length: int) -> None:
        """No more than `length` of these tokens were found: drop what said otherwise."""
        for sequence, hint in list(self._hints.items()):
            if hint.secret == secret and min(hint.length, common_length(hint.tokens, tokens)) > length:
                del self._hints[sequence]

    def forget(self, secret: Secret) -> None:
        """Of a scope that is erased."""
        for sequence in [sequence for sequence, hint in self._hints.items() if hint.secret == secret]:
            del self._hints[sequence]

    def clear(self) -> None:
        """The worker is gone; numbers go on."""
        self._hints.clear()
