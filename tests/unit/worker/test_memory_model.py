"""At random, a worker's memory does what a plain list of contexts does that is searched from end to end."""

from __future__ import annotations

from dataclasses import dataclass, field

import hypothesis
import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from runtime.protocol.ids import SequenceId
from runtime.protocol.tokens import TokenIds
from runtime.worker.memory import Node, PrefixMemory
from tests.unit.worker.contexts import STATE_BYTES, B, contents, ids, part, restored

SCOPES = (b"first", b"second", b"third")
OWNERS = tuple(map(SequenceId, range(3)))
contexts = st.builds(
    lambda blocks, missing: ids(blocks)[: len(blocks) * B - missing],
    st.sampled_from(["a", "ab", "aba", "abb", "abab", "abba", "b", "bab"]),
    st.sampled_from([0, 0, 1, 56, 156, 157, 200, 255]),
)
scopes = st.sampled_from([SCOPES[0], SCOPES[0], SCOPES[0], *SCOPES[1:]])
budgets = st.sampled_from([16, 14, 12, 11, 9, 6, 3]).map(lambda blocks: blocks * B)


@dataclass(eq=False)
class Entry:
    scope: bytes
    parent: Entry | None
    start: int
    context: TokenIds
    is_aligned: bool
    has_checkpoint: bool
    num_bytes: int
    node: Node
    used: int = 0
    owners: set[SequenceId] = field(default_factory=set)

    @property
    def end(self) -> int:
        return len(self.context)

    def path(self) -> list[Entry]:
        return [*(self.parent.path() if self.parent else []), self]


def num_shared(one: TokenIds, other: TokenIds) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (mine, theirs) in pairs if mine != theirs), min(len(one), len(other)))


class MemoryMachine(RuleBasedStateMachine):
    """`entries` is all there is to the model; every question is answered by going through it."""

    entries: list[Entry]

    @initialize(has_checkpoints=st.booleans(), budget_bytes=budgets, held=st.lists(contexts, min_size=2, max_size=6))
    def begin(self, has_checkpoints: bool, budget_bytes: int, held: list[TokenIds]) -> None:
        self.has_checkpoints = has_checkpoints
        self.budget = budget_bytes
        self.memory = PrefixMemory(has_checkpoints=has_checkpoints, budget_bytes=budget_bytes)
        self.entries = []
        self.erased: set[bytes] = set()
        self.pins: dict[SequenceId, list[Entry]] = {}
        self.clock = 0
        for number, tokens in enumerate(held):
            self.keep(SCOPES[0], tokens, [number % 3 + 1], number % 2 == 0)

    # -- the model ----------------------------------------------------------------------------------------

    def of(self, scope: bytes, context: TokenIds) -> Entry | None:
        return next((entry for entry in self.entries if (entry.scope, entry.context) == (scope, context)), None)

    def longest(self, scope: bytes, asked: TokenIds) -> int:
        mine = [entry for entry in self.entries if entry.scope == scope]
        if self.has_checkpoints:
            return max((e.end for e in mine if e.has_checkpoint and asked[: e.end] == e.context), default=0)
        return max((num_shared(entry.context, asked) for entry in mine), default=0)

    def touch(self, entry: Entry | None) -> None:
        for each in reversed(entry.path() if entry else []):
            self.clock += 1
            each.used = self.clock

    def pinned_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.entries if entry.owners)

    def fits(self, num_bytes: int, keep: list[Entry]) -> bool:
        return num_bytes + sum(entry.num_bytes for entry in self.entries if entry.owners or entry in keep) <= self.budget

    def evict(self, num_bytes: int) -> None:
        while sum(entry.num_bytes for entry in self.entries) + num_bytes > self.budget:
            parents = {entry.parent for entry in self.entries}
            leaves = [entry for entry in self.entries if entry not in parents and not entry.owners]
            self.entries.remove(min(leaves, key=lambda entry: entry.used))

    def lose(self, lost: list[Entry]) -> None:
        self.entries = [entry for entry in self.entries if entry not in lost]
        left = {owner: [entry for entry in pinned if entry not in lost] for owner, pinned in self.pins.items()}
        self.pins = {owner: pinned for owner, pinned in left.items() if pinned}

    def let_go(self, owner: SequenceId, entry: Entry) -> None:
        entry.owners.discard(owner)
        if not entry.owners:
            self.clock += 1
            entry.used = self.clock

    # -- both ---------------------------------------------------------------------------------------------

    @rule(scope=scopes, tokens=contexts, first=st.integers(0, 3), state=st.booleans())
    def insert(self, scope: bytes, tokens: TokenIds, first: int, state: bool) -> None:
        """Any piece at the context's end, also one that nothing leads to."""
        start, end = first * B, len(tokens)
        if start >= end:
            return
        piece = part(tokens, start, end, state=state and self.has_checkpoints)
        num_bytes = end - start + (STATE_BYTES if state and self.has_checkpoints else 0)
        node = self.memory.insert(scope, TokenIds([*tokens, 9, 9]), piece, has_checkpoint=state)
        has_checkpoint = state or not self.has_checkpoints
        same, parent = self.of(scope, tokens), self.of(scope, tokens[:start])
        if same is not None:
            assert node is same.node
            self.touch(same)
            if has_checkpoint and not same.has_checkpoint:
                pins = self.pinned_bytes() + STATE_BYTES if same.owners else 0
                if pins <= self.budget // 2 and self.fits(STATE_BYTES, same.path()):
                    self.evict(STATE_BYTES)
                    same.num_bytes += STATE_BYTES
                    same.has_checkpoint = True
            return
        is_aligned = end % B == 0
        if scope not in self.erased and not is_aligned and not self.has_checkpoints and self.longest(scope, tokens) == end:
            assert node is not None
            assert node.context()[:end] == tokens
            (longer,) = [entry for entry in self.entries if entry.node is node]
            self.touch(longer)
            return
        path = parent.path() if parent else []
        is_useful = is_aligned or has_checkpoint
        if scope in self.erased or (start and not path) or not is_useful or not self.fits(num_bytes, path):
            assert node is None
            return
        assert node is not None
        if not self.has_checkpoints:
            self.entries = [
                entry
                for entry in self.entries
                if entry.is_aligned or entry.owners or entry.scope != scope or tokens[: entry.end] != entry.context
            ]
        self.touch(parent)
        self.evict(num_bytes)
        self.entries.append(Entry(scope, parent, start, tokens, is_aligned, has_checkpoint, num_bytes, node))
        self.touch(self.entries[-1])

    @rule(scope=scopes, tokens=contexts, lengths=st.lists(st.integers(1, 4), max_size=2), state=st.booleans())
    def keep(self, scope: bytes, tokens: TokenIds, lengths: list[int], state: bool) -> None:
        """A whole context, as a worker does it."""
        ends = sorted({length * B for length in lengths if length * B < len(tokens)} | {len(tokens)})
        for end in ends:
            start = self.memory.covered(scope, tokens, end)
            assert start == max(
                (e.end for e in self.entries if e.scope == scope and e.is_aligned and tokens[:end][: e.end] == e.context), default=0
            )
            if start < end:
                self.insert(scope, tokens[:end], start // B, state)

    @rule(
        scope=scopes,
        tokens=contexts,
        unasked=st.sampled_from([0, 0, 1, 100, 156, 300]),
        owner=st.sampled_from([None, *OWNERS]),
        is_use=st.booleans(),
    )
    def match(self, scope: bytes, tokens: TokenIds, unasked: int, owner: SequenceId | None, is_use: bool) -> None:
        match = self.memory.match(scope, tokens, at_most=len(tokens) - unasked)
        length = self.longest(scope, tokens[: max(0, len(tokens) - unasked)])
        if match is None:
            assert length == 0
            return
        assert match.length == length
        assert restored(match) == contents(tokens, 0, length)
        assert match.path[-1].context()[:length] == tokens[:length]
        assert match.is_cut == (match.path[-1].end > length)
        assert not (match.is_cut and self.of(scope, tokens[:length]))
        entries = [next(entry for entry in self.entries if entry.node is node) for node in match.path]
        assert entries == entries[-1].path()
        if is_use:
            self.memory.use(match.path)
            self.touch(entries[-1])
        if owner is not None:
            pinned_length = 0
            for entry in entries:
                if not entry.owners and self.pinned_bytes() + entry.num_bytes > self.budget // 2:
                    break
                if owner not in entry.owners:
                    entry.owners.add(owner)
                    self.pins.setdefault(owner, []).append(entry)
                pinned_length = entry.end
            assert self.memory.pin(owner, match.path) == pinned_length

    @rule(owner=st.sampled_from(OWNERS))
    def unpin(self, owner: SequenceId) -> None:
        self.memory.unpin(owner)
        for entry in reversed(self.pins.pop(owner, [])):
            self.let_go(owner, entry)

    @precondition(lambda self: len(self.entries) > 5)
    @rule(scope=st.sampled_from(SCOPES[1:]))
    def forget(self, scope: bytes) -> None:
        self.memory.forget(scope)
        self.erased.add(scope)
        self.lose([entry for entry in self.entries if entry.scope == scope])

    @precondition(lambda self: self.entries)
    @rule(scope=scopes, tokens=contexts)
    def gain(self, scope: bytes, tokens: TokenIds) -> None:
        """The same again with its checkpoint, as when a prefill comes by that stops where an earlier one did not."""
        lacking = [e for e in self.entries if e.scope == scope and not e.has_checkpoint and tokens[: e.end] == e.context]
        for entry in lacking:
            self.insert(scope, entry.context, entry.start // B, True)

    @precondition(lambda self: len(self.entries) > 5)
    @rule(number=st.integers(0, 100))
    def discard(self, number: int) -> None:
        entry = self.entries[number % len(self.entries)]
        self.memory.discard(entry.node)
        self.memory.discard(entry.node)
        lost = [other for other in self.entries if entry in other.path()]
        self.lose(lost)

    @precondition(lambda self: len(self.entries) > 2)
    @rule(num_bytes=st.one_of(budgets, budgets, st.integers(0, 8 * B)))
    def set_budget(self, num_bytes: int) -> None:
        self.memory.set_budget(num_bytes)
        self.budget = num_bytes
        while self.pinned_bytes() > num_bytes // 2:
            owner = list(self.pins)[-1]
            self.let_go(owner, self.pins[owner].pop())
            if not self.pins[owner]:
                del self.pins[owner]
        self.evict(0)

    @invariant()
    def both_hold_the_same(self) -> None:
        self.memory.validate()
        assert self.memory.num_nodes == len(self.entries)
        assert self.memory.num_bytes == sum(entry.num_bytes for entry in self.entries) <= self.budget
        assert self.memory.pinned_bytes == self.pinned_bytes() <= self.budget // 2
        for entry in self.entries:
            node = self.memory.node(entry.node.id)
            assert node is entry.node
            assert (node.num_pins, node.has_checkpoint) == (len(entry.owners), entry.has_checkpoint)
            assert (node.start, node.context()) == (entry.start, entry.context)


TestMemory = MemoryMachine.TestCase
TestMemory.settings = hypothesis.settings(max_examples=100, stateful_step_count=50, deadline=None, database=None)
