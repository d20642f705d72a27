"""How much of a prompt can be restored from these segments, and what has to be read for it? Pure.

A dense model's segment can be used up to any of its positions, so a plan may end anywhere. With sliding or recurrent layers
a plan ends where a segment ends, whose checkpoint it needs; before that, only dense slices are read, from whichever segments
hold them. A model without dense layers needs just that one checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from runtime.prefix.hashing import BLOCK_TOKENS, BlockHash
from runtime.prefix.layout import Style
from runtime.protocol.ids import TenantId


@dataclass(frozen=True, slots=True)
class Entry:
    """One segment on the disk. tenant: None for the shared scope. checkpoint_bytes: part of num_bytes needed only at its end."""

    fingerprint: str
    tenant: TenantId | None
    parent: BlockHash | None
    start: int
    blocks: tuple[BlockHash, ...]
    style: Style
    num_bytes: int
    checkpoint_bytes: int = 0

    @property
    def name(self) -> BlockHash:
        return self.blocks[-1]

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    @property
    def end(self) -> int:
        return self.start + BLOCK_TOKENS * len(self.blocks)


@dataclass(frozen=True, slots=True)
class Piece:
    """Positions [start, end) of a segment; the last piece of a plan also its checkpoint, where the model has such layers."""

    entry: Entry
    start: int
    end: int
    with_checkpoint: bool

    @property
    def num_bytes(self) -> int:
        return self.entry.num_bytes - (0 if self.with_checkpoint else self.entry.checkpoint_bytes)


@dataclass(frozen=True, slots=True)
class Plan:
    """Restore positions [0, end) from these pieces, in order, without gap or overlap."""

    pieces: tuple[Piece, ...]

    @property
    def end(self) -> int:
        return self.pieces[-1].end

    @property
    def num_bytes(self) -> int:
        """To read."""
        return sum(piece.num_bytes for piece in self.pieces)


Holding = Mapping[BlockHash, Mapping[BlockHash, Entry]]


def plans(named: Mapping[BlockHash, Entry], holding: Holding, chain: Sequence[BlockHash], num_tokens: int) -> list[Plan]:
    """See `Index.plans`. named: segments by name. holding: segments by the blocks in them, then by name."""
    chain = chain[: num_tokens // BLOCK_TOKENS]
    first = next(iter(holding.get(chain[0], {}).values()), None) if chain else None
    if first is not None and first.style == "dense":
        return _dense(_cover(holding, chain), num_tokens - 1)
    # A checkpoint cannot be cut by one token, so a plan that leaves none to compute is none.
    ends = [number for number in range(1, len(chain) + 1) if chain[number - 1] in named and number * BLOCK_TOKENS < num_tokens]
    whole = [named[chain[end - 1]] for end in ends]
    alone = [Plan((Piece(entry, entry.start, entry.end, True),)) for entry in whole if entry.style == "checkpoint"]
    cover = _cover(holding, chain)
    reach = cover[-1].end if cover else 0
    return alone + [_mixed(cover, entry) for entry in whole if entry.style == "mixed" and entry.start <= reach]


def _cover(holding: Holding, chain: Sequence[BlockHash]) -> list[Piece]:
    """The fewest pieces that cover as much of the chain as can be: at each gap, whichever segment reaches furthest."""
    cover: list[Piece] = []
    place = 0
    while place < len(chain):
        reaching = [(_reach(entry, chain), entry) for entry in holding.get(chain[place], {}).values()]
        if not reaching:
            break
        end, entry = max(reaching, key=lambda reached: (reached[0], -reached[1].num_bytes))
        cover.append(Piece(entry, place * BLOCK_TOKENS, end * BLOCK_TOKENS, False))
        place = end
    return cover


def _reach(entry: Entry, chain: Sequence[BlockHash]) -> int:
    """Number of the block up to which the segment agrees with the chain."""
    place = entry.start // BLOCK_TOKENS
    for block in entry.blocks:
        if place == len(chain) or chain[place] != block:
            break
        place += 1
    return place


def _dense(cover: Sequence[Piece], end: int) -> list[Plan]:
    """Each beginning of the cover; the last one cut so that it ends at `end`."""
    pieces = [piece if piece.end <= end else Piece(piece.entry, piece.start, end, False) for piece in cover if piece.start < end]
    return [Plan(tuple(pieces[:number])) for number in range(1, len(pieces) + 1)]


def _mixed(cover: Sequence[Piece], last: Entry) -> Plan:
    """Dense slices up to where `last` begins, then all of it."""
    before = [Piece(piece.entry, piece.start, min(piece.end, last.start), False) for piece in cover if piece.start < last.start]
    return Plan((*before, Piece(last, last.start, last.end, True)))
