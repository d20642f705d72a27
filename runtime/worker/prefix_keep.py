"""What of the running rows goes into memory, when, and what does the host hear of it?

What a row has computed is copied where a node ends, right after the step that got it there was submitted, and inserted once that
step's result is in without an error; what an ended row has beyond that, when it ends. A result that drew a token also
proves that all before it is finite: only then are nodes offered for files. Of a row that fails nothing stays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from runtime.engine.engine import Engine, RowError
from runtime.engine.prefix_parts import PrefixPart
from runtime.prefix.hashing import BLOCK_TOKENS
from runtime.protocol.commands import PrefixUse
from runtime.protocol.events import AnyEvent, Kept, KeptNode
from runtime.protocol.ids import SequenceId
from runtime.worker import prefix_places
from runtime.worker.memory import PrefixMemory
from runtime.worker.prefix_tree import Node
from runtime.worker.row import Row


@dataclass(slots=True)
class _Keeping:
    """What is kept of one row.

    num_copied: parts copied and not yet inserted; copied_to: where the last whole-block one of them ends. nodes: made of this row.
    offered: nodes that were, each once, whatever becomes of it. told_length: of the last `Kept`. has_no_room: memory refused a
    part, so further ones would be copied in vain.
    """

    use: PrefixUse
    pins: bool
    num_copied: int = 0
    copied_to: int = 0
    nodes: list[Node] = field(default_factory=list)
    offered: set[int] = field(default_factory=set)
    told_length: int = 0
    is_sound: bool = False
    has_no_room: bool = False


class Keeper:
    def __init__(self, engine: Engine, memory: PrefixMemory, *, has_checkpoints: bool, send: Callable[[AnyEvent], None]) -> None:
        self._engine = engine
        self._memory = memory
        self._has_checkpoints = has_checkpoints
        self._send = send
        self._rows: dict[Row, _Keeping] = {}

    def begin(self, row: Row) -> None:
        """From now on, if its command says so and there is any room."""
        use = row.start.prefix
        if use is not None and use.keep and self._memory.budget_bytes:
            self._rows[row] = _Keeping(use, use.pin)
            if self._has_checkpoints:
                row.stops = prefix_places.stops(row.num_known, use.boundaries)

    def is_keeping(self, row: Row) -> bool:
        return row in self._rows

    def copied(self, row: Row) -> Sequence[PrefixPart]:
        """Copies of what memory lacks, if the row has just been fed up to where a node ends. Call right after that submit."""
        keeping = self._rows.get(row)
        if keeping is None:
            return ()
        end = row.num_fed
        if self._has_checkpoints:
            if end not in row.stops:
                return ()
        elif end < row.num_known:
            end = end // prefix_places.NODE_TOKENS * prefix_places.NODE_TOKENS
        parts = self._copies(row, keeping, end) if end else []
        keeping.num_copied += len(parts)
        return parts

    def proved(self, row: Row, parts: Sequence[PrefixPart], *, is_sound: bool) -> None:
        """The result that `parts` waited for is in, up to `row.num_proven`. is_sound: it drew a token, or none will be drawn."""
        keeping = self._rows.get(row)
        if keeping is None:
            return
        keeping.num_copied -= len(parts)
        keeping.is_sound |= is_sound
        self._insert(row, keeping, parts)
        if parts or is_sound:
            self._tell(row, keeping, is_due=is_sound)

    def ended(self, row: Row) -> None:
        """Call before the engine forgets the row."""
        keeping = self._rows.pop(row, None)
        if keeping is None:
            return
        if row.has_failed:
            for node in keeping.nodes:
                self._memory.discard(node)
        elif row.num_proven:
            self._insert(row, keeping, self._copies(row, keeping, row.num_proven))
            self._tell(row, keeping, is_due=False)

    def unpin(self, sequence: SequenceId) -> None:
        """Nothing of it is pinned any more, nor will be."""
        self._memory.unpin(sequence)
        for row, keeping in self._rows.items():
            if row.sequence == sequence:
                keeping.pins = False

    def _copies(self, row: Row, keeping: _Keeping, end: int) -> list[PrefixPart]:
        """Of what memory lacks of the row's positions [0, end), node by node."""
        memory, scope, ids = self._memory, keeping.use.scope, row.ids(end)
        if keeping.has_no_room or (end < prefix_places.MIN_TOKENS and not keeping.use.pin):
            return []
        match = memory.match(scope, ids, at_most=end)
        if match is not None and match.length == end:
            memory.use(match.path)
            return []
        # A node that is there but cannot be continued from (it lacks its checkpoint) is made anew: memory adds what it lacks.
        start = max(keeping.copied_to, memory.covered(scope, ids, end - 1))
        parts: list[PrefixPart] = []
        for node_end in [end] if self._has_checkpoints else prefix_places.node_ends(start, end):
            try:
                export = self._engine.export(row.sequence, start, node_end)
            except RowError:  # it failed on submit, which its result will tell
                break
            if export.missing:
                break
            parts.append(export.part)
            if node_end % BLOCK_TOKENS == 0:
                start = node_end
        if parts:
            keeping.copied_to = start
        return parts

    def _insert(self, row: Row, keeping: _Keeping, parts: Sequence[PrefixPart]) -> None:
        for part in parts:
            node = self._memory.insert(keeping.use.scope, row.ids(part.end), part, has_checkpoint=True)
            if node is None:
                keeping.has_no_room = True
                break
            if _share(node.part, part):
                keeping.nodes.append(node)
        if not keeping.num_copied:
            keeping.copied_to = 0

    def _tell(self, row: Row, keeping: _Keeping, *, is_due: bool) -> None:
        """Say what memory holds of the row, if it is more than was said or `is_due`."""
        match = self._memory.match(keeping.use.scope, row.ids(row.num_proven), at_most=row.num_proven)
        length = 0 if match is None else match.length
        pinned_length = 0
        offered: list[Node] = []
        if match is not None:
            if keeping.pins:
                pinned_length = min(length, self._memory.pin(row.sequence, match.path))
            if keeping.is_sound:
                offered = [node for node in match.path if _can_be_published(node) and node.end <= length]
        offered = [node for node in offered if node.id not in keeping.offered]
        for node in offered:
            node.is_published = True
            keeping.offered.add(node.id)
        if is_due or offered or length > keeping.told_length:
            keeping.told_length = length
            nodes = tuple(KeptNode(node.id, node.start, node.end, node.num_bytes) for node in offered)
            self._send(Kept(row.sequence, length, nodes, pinned_length))


def _can_be_published(node: Node) -> bool:
    return node.is_aligned and node.has_checkpoint and not node.is_published


def _share(one: PrefixPart, other: PrefixPart) -> bool:
    """Whether arrays of one lie in the other."""
    return not {id(array) for array in one.arrays}.isdisjoint(id(array) for array in other.arrays)
