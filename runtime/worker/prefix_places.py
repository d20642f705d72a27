"""Where does a context have nodes, and which prefixes may a command ask for? Pure."""

from __future__ import annotations

from typing import Final

from runtime.engine.engine import RowError
from runtime.prefix.hashing import BLOCK_TOKENS, DIGEST_BYTES
from runtime.prefix.layout import Style
from runtime.protocol.commands import PrefillRow

MIN_TOKENS: Final = 64
"""Shorter contexts are neither kept nor restored unless they are pinned: that costs about what computing them again does."""

NODE_TOKENS: Final = 512
"""Whole-block nodes end at its multiples: contexts that differ early share nothing much later than where they part."""


def node_ends(start: int, end: int) -> list[int]:
    """Where the nodes of positions [start, end) end, when a row can be restored anywhere: whole blocks, then perhaps a tail."""
    ends = set(range((start // NODE_TOKENS + 1) * NODE_TOKENS, end + 1, NODE_TOKENS))
    ends |= {edge for edge in (end // BLOCK_TOKENS * BLOCK_TOKENS, end) if edge > start}
    return sorted(ends)


def stops(num_tokens: int, boundaries: tuple[int, ...]) -> tuple[int, ...]:
    """Where a prompt's chunks must end, when a row can be restored only where a state of it was kept.

    The last edge is one that leaves a token to compute: the same prompt again can go on from there.
    """
    ends = set(range(NODE_TOKENS, num_tokens + 1, NODE_TOKENS))
    last_edge = (num_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    return tuple(sorted(ends | {last_edge, *boundaries, num_tokens} - {0}))


def check_use(start: PrefillRow, style: Style | None) -> None:
    """style: of the model's prefixes, None when it has none.

    :raises RowError: "invalid_request": these prefixes cannot be.
    """
    use = start.prefix
    if use is None:
        return
    num_tokens = len(start.tokens)
    if len(use.scope) != DIGEST_BYTES:
        raise RowError("invalid_request", f"prefix.scope has {len(use.scope)} bytes; a scope's secret has {DIGEST_BYTES}")
    before = 0
    for boundary in use.boundaries:
        if not before < boundary <= num_tokens:
            raise RowError("invalid_request", f"prefix.boundaries: {boundary} must be above {before}, at most {num_tokens}")
        before = boundary
    end = use.segments[0].start if use.segments and style == "checkpoint" else 0
    for segment in use.segments:
        where = f"prefix.segments: [{segment.start}, {segment.end})"
        if len(segment.name) != DIGEST_BYTES:
            raise RowError("invalid_request", f"{where}: a name has {DIGEST_BYTES} bytes, this one {len(segment.name)}")
        if not (0 <= segment.start == end < segment.end):
            raise RowError("invalid_request", f"{where} does not join: the ones before it end at {end}")
        end = segment.end
    if end >= num_tokens:
        raise RowError("invalid_request", f"prefix.segments end at {end}: of {num_tokens} tokens one must be left to compute")
