"""Who is computing right now what another row begins with? Pure: token ids in, whom to wait for out.

Only rows of one scope secret (hence of one tenant or the shared scope, and of one model) are ever compared.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

from runtime.prefix.hashing import BLOCK_TOKENS, Secret
from runtime.prefix.layout import Style
from runtime.protocol.tokens import TokenIds

FOLLOW_TOKENS = 128
"""A row waits for another only when that spares it computing so many tokens. Short shared headers are not worth a wait."""

_FIRST_CHUNK_TOKENS = 64

T = TypeVar("T", bound=Hashable)


def common_length(first: TokenIds, second: TokenIds) -> int:
    """How many tokens both begin with."""
    end = min(len(first), len(second))
    low, chunk = 0, _FIRST_CHUNK_TOKENS
    while first[low : (high := min(end, low + chunk))] == second[low:high]:
        if high == end:
            return end
        low, chunk = high, 2 * chunk
    while high - low > 1:  # equal before low, different somewhere before high
        middle = (low + high) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle
    return low


def usable_length(shared: int, num_tokens: int, style: Style) -> int:
    """How much of a context of `num_tokens` tokens can be restored when `shared` of them are there; one is always computed."""
    usable = max(0, min(shared, num_tokens - 1))
    return usable if style == "dense" else usable // BLOCK_TOKENS * BLOCK_TOKENS


class Leaders(Generic[T]):
    """Prompts being computed, by the secret and the tokens that a follower must share at least."""

    def __init__(self) -> None:
        self._leaders: dict[tuple[Secret, bytes], dict[T, TokenIds]] = {}

    def add(self, secret: Secret, tokens: TokenIds, who: T) -> None:
        if len(tokens) >= FOLLOW_TOKENS:
            self._leaders.setdefault((secret, _head(tokens)), {})[who] = tokens

    def best(self, secret: Secret, tokens: TokenIds, style: Style) -> tuple[T, int] | None:
        """Who shares most with these tokens, and how much of it can be restored; None when that is below FOLLOW_TOKENS."""
        if len(tokens) <= FOLLOW_TOKENS:
            return None
        alike = self._leaders.get((secret, _head(tokens)), {})
        shared = [(usable_length(common_length(theirs, tokens), len(tokens), style), who) for who, theirs in alike.items()]
        length, who = max(shared, key=lambda found: found[0], default=(0, None))
        return (who, length) if who is not None and length >= FOLLOW_TOKENS else None


def _head(tokens: TokenIds) -> bytes:
    return tokens[:FOLLOW_TOKENS].to_bytes()
