"""Contexts that share beginnings, and parts of them in which a foreign piece shows."""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b

from runtime.engine.prefix_parts import PrefixArray, PrefixPart
from runtime.prefix.hashing import BLOCK_TOKENS
from runtime.protocol.tokens import TokenIds
from runtime.worker.memory import Match

B = BLOCK_TOKENS
STATE_BYTES = 100
A, Z = b"scope a", b"scope z"


def ids(blocks: str, more: int = 0) -> TokenIds:
    """A block a letter, then `more` ids of the next. Blocks of different letters share their first 100 ids."""
    context = [id for letter in blocks for id in [*range(100), *[ord(letter)] * (B - 100)]]
    return TokenIds([*context, *range(more)])


def part(tokens: TokenIds, start: int, end: int, *, state: bool = False) -> PrefixPart:
    """With a byte a position."""
    arrays = [PrefixArray(0, "entries", "U8", (1, end - start, 1), contents(tokens, start, end))]
    if state:
        data = blake2b(tokens[:end].to_bytes(), digest_size=20).digest() * (STATE_BYTES // 20)
        arrays.append(PrefixArray(1, "state0", "U8", (STATE_BYTES,), data))
    return PrefixPart(start, end, tuple(arrays))


def contents(tokens: TokenIds, start: int, end: int) -> bytes:
    """Each byte depends on the ids up to its position, and on no later one."""
    return _contents(tokens)[start:end]


@lru_cache(maxsize=1000)
def _contents(tokens: TokenIds) -> bytes:
    running = blake2b(digest_size=1)
    made = bytearray()
    for id in tokens.tolist():
        running.update(id.to_bytes(4, "little"))
        made += running.copy().digest()
    return bytes(made)


def restored(match: Match) -> bytes:
    """What a row restored from it would hold."""
    return b"".join(bytes(node.part.arrays[0].buffer()) for node in match.path)[: match.length]
