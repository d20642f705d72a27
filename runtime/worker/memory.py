"""Which prefixes does this worker still hold, and what must go to make room for more?

How contexts lie in it and are found is `prefix_tree`'s business. Scopes share nothing but the budget. Pure bookkeeping for one
thread; parts are held, never looked into. Invariants:

- Uses are remembered by order alone. A use of a node uses the path to it, a moment later, so a node is always more recent than
  those after it and the order of last use is leaf-first by itself.
- Who pins a node pins the path to it. Pinned nodes are no victims; they take at most half of the budget.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import count
from typing import Final

from runtime.engine.prefix_parts import PrefixPart
from runtime.protocol.ids import SequenceId
from runtime.protocol.tokens import TokenIds
from runtime.worker.beginnings import Beginnings
from runtime.worker.prefix_tree import Match, Node, Way, is_aligned, part_bytes, validated

__all__ = ["NUM_ERASED_REMEMBERED", "Match", "Node", "PrefixMemory"]

NUM_ERASED_REMEMBERED: Final = 4096


class PrefixMemory:
    """has_checkpoints: of the model's layout; without, a context can be restored up to any position, otherwise only to the ends of
    nodes that have one. budget_bytes: of all parts together, never exceeded."""

    def __init__(self, *, has_checkpoints: bool, budget_bytes: int) -> None:
        self._has_checkpoints = has_checkpoints
        self._budget_bytes = budget_bytes
        self._first: dict[bytes, Beginnings[Node]] = {}
        """By scope, the nodes that begin at position 0."""
        self._nodes: dict[int, Node] = {}
        self._unpinned: OrderedDict[int, Node] = OrderedDict()
        """Least recently used first."""
        self._pins: dict[SequenceId, list[Node]] = {}
        """By owner; a node comes after those that lead to it."""
        self._erased: OrderedDict[bytes, None] = OrderedDict()
        self._ids = count(1)
        self._num_bytes = 0
        self._pinned_bytes = 0

    @property
    def budget_bytes(self) -> int:
        return self._budget_bytes

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    @property
    def pinned_bytes(self) -> int:
        return self._pinned_bytes

    @property
    def num_nodes(self) -> int:
        return len(self._nodes)

    def node(self, id: int) -> Node | None:
        """None when it had to go, or never was."""
        return self._nodes.get(id)

    # -- what is held of a context ------------------------------------------------------------------------

    def match(self, scope: bytes, tokens: TokenIds, *, at_most: int) -> Match | None:
        """The longest beginning of `tokens`, up to `at_most` of them, that can be restored. Counts as no use."""
        return self._way(scope, tokens, at_most).longest(may_cut=not self._has_checkpoints)

    def covered(self, scope: bytes, tokens: TokenIds, length: int) -> int:
        """Where a new node of this context must begin: up to there, at most `length`, its ids are held in whole aligned nodes."""
        return self._way(scope, tokens, length).covered()

    def _way(self, scope: bytes, tokens: TokenIds, at_most: int) -> Way:
        return Way(self._first.get(scope), tokens, at_most)

    # -- what is used, and what is new --------------------------------------------------------------------

    def use(self, path: Iterable[Node]) -> None:
        """These were used just now, and with them all that lead to them. Those that had to go meanwhile are passed over."""
        used: dict[int, Node] = {}
        for last in path:
            node: Node | None = last
            while node is not None and node.id not in used:
                used[node.id] = node
                node = node.parent
        for node in sorted(used.values(), key=lambda node: -node.start):  # whatever leads to a node begins before it
            if node.id in self._unpinned:
                self._unpinned.move_to_end(node.id)

    def insert(self, scope: bytes, tokens: TokenIds, part: PrefixPart, *, has_checkpoint: bool) -> Node | None:
        """Hold `part` as a node of the context that begins with `tokens`. Counts as a use.

        What comes back holds the context up to the part's end. It is one that was there already (and now has the checkpoint, if it
        lacked it), or a longer one when the part ends between block edges and any beginning of a node can be restored.
        Unpinned tails go that are wholly a beginning of the new path, unless one can be restored at their ends only.
        has_checkpoint: the part has all of them, or this model has none.

        :returns: None when it cannot be held: no room, no aligned node up to the part's start, the scope erased; or when nobody
            could use it, neither go on from it nor be restored there: a tail without its checkpoint.
        :raises ValueError: fewer tokens than the part's end.
        """
        if len(tokens) < part.end:
            raise ValueError(f"{len(tokens)} tokens for a part [{part.start}, {part.end})")
        if scope in self._erased:
            return None
        way = self._way(scope, tokens, part.end)
        has_checkpoint |= not self._has_checkpoints
        held = way.node_at(part.end)
        if held is not None:
            self.use((held,))
            if has_checkpoint and not held.has_checkpoint:
                self._gain(held, part)
            return held
        if not self._has_checkpoints and not is_aligned(part):
            match = way.longest(may_cut=True)
            if match is not None and match.length == part.end:
                self.use(match.path)
                return match.path[-1]
        parent = way.node_at(part.start)
        if part.start and (parent is None or not parent.is_aligned):
            return None
        path = () if parent is None else parent.path()
        num_bytes = part_bytes(part)
        is_useful = is_aligned(part) or has_checkpoint
        if not is_useful or not self._can_make_room(num_bytes, path):
            return None
        for node in way.nodes:
            if not (self._has_checkpoints or node.is_aligned or node.num_pins):
                self._drop(node)
        self._make_room(num_bytes, path)
        ids = way.ids_from(part.start)
        node = Node(next(self._ids), scope, parent, part.start, part.end, ids, part, is_aligned(part), has_checkpoint, num_bytes)
        self._siblings(node).add(ids.to_bytes(), node)
        self._nodes[node.id] = self._unpinned[node.id] = node
        self._num_bytes += num_bytes
        self.use((node,))
        return node

    def _gain(self, node: Node, part: PrefixPart) -> None:
        """The arrays that the node lacks, if there is room: with its checkpoint one can go on from its end."""
        held = {(array.layer, array.name) for array in node.part.arrays}
        lacking = tuple(array for array in part.arrays if (array.layer, array.name) not in held)
        num_bytes = sum(array.num_bytes for array in lacking)
        over_pins = node.num_pins and self._pinned_bytes + num_bytes > self._budget_bytes // 2
        if over_pins or not self._can_make_room(num_bytes, node.path()):
            return
        self._make_room(num_bytes, node.path())
        node.part, node.has_checkpoint = replace(node.part, arrays=node.part.arrays + lacking), True
        node.num_bytes += num_bytes
        self._num_bytes += num_bytes
        self._pinned_bytes += num_bytes if node.num_pins else 0

    def _can_make_room(self, num_bytes: int, keep: Sequence[Node]) -> bool:
        kept = self._pinned_bytes + sum(node.num_bytes for node in keep if not node.num_pins)
        return kept + num_bytes <= self._budget_bytes

    def _make_room(self, num_bytes: int, keep: Sequence[Node]) -> None:
        self.use(keep)
        while self._num_bytes + num_bytes > self._budget_bytes:
            self._drop(next(iter(self._unpinned.values())))

    def _drop(self, node: Node) -> None:
        """A leaf that nobody pins."""
        siblings = self._siblings(node)
        siblings.remove(node.tokens.to_bytes())
        if not siblings and node.parent is None:
            del self._first[node.scope]
        del self._nodes[node.id], self._unpinned[node.id]
        self._num_bytes -= node.num_bytes

    def _siblings(self, node: Node) -> Beginnings[Node]:
        """Those that begin where it does, itself among them."""
        return self._first.setdefault(node.scope, Beginnings()) if node.parent is None else node.parent.children

    # -- what must stay, and what must go -----------------------------------------------------------------

    def pin(self, owner: SequenceId, path: Sequence[Node]) -> int:
        """Keep these, and all that lead to them, until the owner's `unpin`; what is over half of the budget is not pinned.

        :returns: how far, from position 0 without a gap, the path is pinned by this owner now; a node is pinned as a whole.
        """
        pinned = self._pins.setdefault(owner, [])
        length = 0
        for node in path[-1].path() if path else ():
            if node not in pinned:
                more = 0 if node.num_pins else node.num_bytes
                if self._nodes.get(node.id) is not node or self._pinned_bytes + more > self._budget_bytes // 2:
                    break
                pinned.append(node)
                node.num_pins += 1
                self._pinned_bytes += more
                self._unpinned.pop(node.id, None)
            length = node.end
        if not pinned:
            del self._pins[owner]
        return length

    def unpin(self, owner: SequenceId) -> None:
        """An unknown owner is fine. What nobody else pins counts as used just now."""
        while owner in self._pins:
            self._unpin_last(owner)

    def _unpin_last(self, owner: SequenceId) -> None:
        pinned = self._pins[owner]
        node = pinned.pop()
        if not pinned:
            del self._pins[owner]
        node.num_pins -= 1
        if not node.num_pins:
            self._pinned_bytes -= node.num_bytes
            self._unpinned[node.id] = node

    def forget(self, scope: bytes) -> None:
        """Drop all of a scope, pinned or not, and hold nothing more under it (of the last `NUM_ERASED_REMEMBERED` such scopes)."""
        self._erased[scope] = None
        self._erased.move_to_end(scope)
        if len(self._erased) > NUM_ERASED_REMEMBERED:
            self._erased.popitem(last=False)
        self._lose({node for node in self._nodes.values() if node.scope == scope})
        self._first.pop(scope, None)

    def discard(self, node: Node) -> None:
        """Drop it with all that continues it, pinned or not: what it holds is not to be trusted. One that had to go is fine."""
        if self._nodes.get(node.id) is not node:
            return
        siblings = self._siblings(node)
        siblings.remove(node.tokens.to_bytes())
        if not siblings and node.parent is None:
            del self._first[node.scope]
        self._lose({other for other in self._nodes.values() if node in other.path()})

    def _lose(self, lost: set[Node]) -> None:
        """Strike them off all lists; the trees are the caller's business."""
        for owner, pinned in list(self._pins.items()):
            self._pins[owner] = [node for node in pinned if node not in lost]
            if not self._pins[owner]:
                del self._pins[owner]
        for node in lost:
            del self._nodes[node.id]
            self._unpinned.pop(node.id, None)
            self._num_bytes -= node.num_bytes
            self._pinned_bytes -= node.num_bytes if node.num_pins else 0
            node.num_pins = 0

    def set_budget(self, num_bytes: int) -> None:
        """At once. Where pins exceed half of a smaller budget, the ends of the youngest owners' paths are unpinned."""
        self._budget_bytes = num_bytes
        while self._pinned_bytes > num_bytes // 2:
            self._unpin_last(next(reversed(self._pins)))
        self._make_room(0, ())

    # -- check --------------------------------------------------------------------------------------------

    def validate(self) -> None:
        """Recount everything.

        :raises AssertionError: a count or an order is wrong.
        """
        found = validated(self._first)
        for node in found.values():
            assert node.has_checkpoint or self._has_checkpoints
            assert node.parent is None or node.parent.num_pins >= node.num_pins, f"{node} is pinned without what leads to it"
        assert found == self._nodes
        assert not any(node.scope in self._erased for node in found.values())
        assert self._num_bytes == sum(node.num_bytes for node in found.values()) <= self._budget_bytes
        assert self._pinned_bytes == sum(node.num_bytes for node in found.values() if node.num_pins) <= self._budget_bytes // 2
        pins = [node.id for pinned in self._pins.values() for node in pinned]
        assert all(self._pins.values())
        assert all(node.num_pins == pins.count(node.id) for node in found.values())
        assert set(pins) <= set(found)
        assert set(self._unpinned) == {node.id for node in found.values() if not node.num_pins}
        order = {id: number for number, id in enumerate(self._unpinned)}
        for id, number in order.items():
            parent = found[id].parent
            assert parent is None or order.get(parent.id, number + 1) > number, f"{found[id]} would outlive what leads to it"
