"""How is a context's way through the held nodes found?

Contexts of one scope form a tree of nodes, each a part [start, end) after the path that leads to it. Aligned nodes (whole blocks
all the way from position 0) may be continued; any other ends a path (a tail), and what goes on from there hangs beside it on the
last aligned node. No context is held twice: for given ids up to an end there is at most one node of that end, whatever pieces
lead to it. Nodes of one place may share a beginning, so a way may fork, but what is visited lies on the ids asked for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from runtime.engine.prefix_parts import PrefixPart
from runtime.prefix.hashing import BLOCK_TOKENS
from runtime.protocol.tokens import TokenIds
from runtime.worker.beginnings import Beginnings

_ID_BYTES: Final = 4


@dataclass(eq=False, slots=True)
class Node:
    """Positions [start, end) of a context that begins with the path to `parent`.

    id: never used again. tokens: the ids of [start, end). has_checkpoint: a row can be restored at `end` (always so when all layers
    are dense); without it the node is only a link to others. num_bytes: of the part. num_pins: owners that keep it. is_published:
    for its user to note. A node that had to go can still be read by those who hold it.
    """

    id: int
    scope: bytes = field(repr=False)
    parent: Node | None = field(repr=False)
    start: int
    end: int
    tokens: TokenIds = field(repr=False)
    part: PrefixPart = field(repr=False)
    is_aligned: bool
    has_checkpoint: bool
    num_bytes: int
    num_pins: int = 0
    is_published: bool = False
    children: Beginnings[Node] = field(default_factory=Beginnings, repr=False)

    def path(self) -> tuple[Node, ...]:
        """From position 0 to this one, itself included."""
        nodes = [self]
        while (parent := nodes[-1].parent) is not None:
            nodes.append(parent)
        return tuple(reversed(nodes))

    def context(self) -> TokenIds:
        """The ids of [0, end)."""
        return TokenIds.from_bytes(b"".join(node.tokens.to_bytes() for node in self.path()))


@dataclass(frozen=True, slots=True)
class Match:
    """Positions [0, length) can be restored from `path`. `is_cut`: of its last node only the beginning."""

    length: int
    path: tuple[Node, ...]

    @property
    def is_cut(self) -> bool:
        return self.path[-1].end > self.length


class Way:
    """What is held along the first `at_most` of `tokens`, which are all that may be asked about.

    first: the nodes at position 0, None when there are none. nodes: all that these ids lead to and through, a parent before its
    children.
    """

    def __init__(self, first: Beginnings[Node] | None, tokens: TokenIds, at_most: int) -> None:
        self._data = memoryview(tokens.to_bytes())[: _ID_BYTES * max(0, at_most)]
        self.nodes: list[Node] = []
        self._places: list[tuple[int, Beginnings[Node]]] = []
        waiting = [] if first is None else [(0, first)]
        while waiting:
            start, children = waiting.pop()
            self._places.append((start, children))
            begun = children.beginning(self._window(start, children))
            self.nodes += begun
            waiting += [(node.end, node.children) for node in begun if node.children]

    def node_at(self, end: int) -> Node | None:
        """The one that holds these ids up to `end`."""
        return next((node for node in self.nodes if node.end == end), None)

    def covered(self) -> int:
        """Up to where the ids are held in whole aligned nodes."""
        return max((node.end for node in self.nodes if node.is_aligned), default=0)

    def longest(self, *, may_cut: bool) -> Match | None:
        """The longest beginning that can be restored. may_cut: also of a part of a node."""
        node = max((node for node in self.nodes if node.has_checkpoint), key=lambda node: node.end, default=None)
        length = 0 if node is None else node.end
        for start, children in self._places if may_cut else ():
            near = children.nearest(self._window(start, children))
            if near is not None and start + near[1] // _ID_BYTES > length:
                node, length = near[0], start + near[1] // _ID_BYTES
        return None if node is None else Match(length, node.path())

    def ids_from(self, start: int) -> TokenIds:
        return TokenIds.from_bytes(self._data[_ID_BYTES * start :])

    def _window(self, start: int, children: Beginnings[Node]) -> bytes:
        """As much of the ids from `start` on as any of the nodes can hold."""
        return bytes(self._data[_ID_BYTES * start : _ID_BYTES * start + children.longest])


def is_aligned(part: PrefixPart) -> bool:
    return part.start % BLOCK_TOKENS == part.end % BLOCK_TOKENS == 0


def validated(first: dict[bytes, Beginnings[Node]]) -> dict[int, Node]:
    """All nodes, by id.

    :raises AssertionError: they are no trees as described above.
    """
    found: dict[int, Node] = {}
    for scope, roots in first.items():
        assert roots, "a scope without nodes is still known"
        contexts: list[TokenIds] = []
        waiting: list[tuple[Node | None, Node]] = [(None, node) for node in roots]
        while waiting:
            parent, node = waiting.pop()
            assert (node.scope, node.parent, node.start) == (scope, parent, 0 if parent is None else parent.end)
            assert (node.start, node.end) == (node.part.start, node.part.end)
            assert len(node.tokens) == node.end - node.start > 0
            assert node.num_bytes == part_bytes(node.part)
            assert node.is_aligned == is_aligned(node.part)
            assert node.is_aligned or not node.children, f"tail {node} is continued"
            contexts.append(node.context())
            found[node.id] = node
            waiting += [(node, child) for child in node.children]
        assert len(set(contexts)) == len(contexts), "a context is held twice"
    return found


def part_bytes(part: PrefixPart) -> int:
    return sum(array.num_bytes for array in part.arrays)
