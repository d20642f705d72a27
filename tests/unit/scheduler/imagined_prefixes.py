"""An imagined worker that keeps prefixes, and the disk it writes them to: what the scheduler may rely on, and what it must bear.

Its memory forgets, its files vanish, its disk refuses. It checks on its side that what it is told of a row's files is of that
row's scope and of its own tokens, without a gap, and that nothing of a forgotten scope is written or asked for any more.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import pairwise

from runtime.prefix.hashing import BLOCK_TOKENS, BlockHash, Secret, block_hashes
from runtime.prefix.layout import Style
from runtime.prefix.plans import Entry
from runtime.protocol.commands import AnyCommand, Forget, Prefill, PrefillRow, PrefixUse, Publish, Release, Unpin
from runtime.protocol.events import Kept, KeptNode, Restored, SegmentMiss, SegmentPublished, SegmentRejected, StepRow
from runtime.protocol.ids import SequenceId
from runtime.protocol.tokens import TokenIds
from runtime.scheduler.following import common_length
from tests.unit.scheduler.imagined_worker import ImaginedRow, ImaginedWorker


@dataclass
class Disk:
    """`files`: what there is. `secrets`: of which scope and model, also of what was there. `at_fault`: names that may be missing
    where the scheduler counts on them, for others than it took them away."""

    files: dict[BlockHash, Entry] = field(default_factory=dict)
    secrets: dict[BlockHash, Secret] = field(default_factory=dict)
    at_fault: set[BlockHash] = field(default_factory=set)

    def write(self, secret: Secret, entry: Entry) -> None:
        self.files[entry.name], self.secrets[entry.name] = entry, secret


@dataclass
class _Node:
    secret: Secret
    tokens: list[int]
    start: int


@dataclass
class _Memory:
    """Of one row, from its start to its release. `told`: end of the last node offered of it."""

    row: ImaginedRow
    prefix: PrefixUse
    pins: bool
    is_restored: bool = False
    told: int = 0


@dataclass
class PrefixWorker(ImaginedWorker):
    disk: Disk = field(default_factory=Disk)
    fingerprint: str = ""
    style: Style = "dense"
    dice: random.Random = field(default_factory=random.Random)
    memories: dict[SequenceId, _Memory] = field(default_factory=dict)
    kept: list[tuple[Secret, list[int]]] = field(default_factory=list)
    pinned: dict[SequenceId, bytes] = field(default_factory=dict)
    nodes: dict[int, _Node] = field(default_factory=dict)
    forgotten: set[bytes] = field(default_factory=set)

    def take_command(self) -> None:
        command: AnyCommand = self.commands[0]
        match command:
            case Publish(nodes=nodes):
                self.commands.popleft()
                for node, _ in nodes:
                    self._write(node)
                return
            case Forget(scopes=scopes):
                self.commands.popleft()
                self.forgotten |= set(scopes)
                self.kept = [kept for kept in self.kept if kept[0] not in self.forgotten]
                self.pinned = {pinned: scope for pinned, scope in self.pinned.items() if scope not in self.forgotten}
                return
            case Unpin(sequences=sequences):
                self.commands.popleft()
                self.pinned = {pinned: scope for pinned, scope in self.pinned.items() if pinned not in sequences}
                for sequence in self.memories.keys() & set(sequences):
                    self.memories[sequence].pins = False
                return
            case Release(sequences=sequences):
                for sequence in sequences:
                    if sequence in self.memories and self.dice.random() < 0.7:
                        self._keep(sequence)
                    self.memories.pop(sequence, None)
        super().take_command()
        if isinstance(command, Prefill):
            for start in command.rows:
                if start.prefix is not None:
                    self._check(start, start.prefix)
                    self.memories[start.sequence] = _Memory(self.rows[start.sequence], start.prefix, start.prefix.pin)

    def _check(self, start: PrefillRow, prefix: PrefixUse) -> None:
        assert prefix.scope not in self.forgotten, "a row of a scope that is erased"
        chain = block_hashes(Secret(prefix.scope), start.tokens)
        edges = [0, *(segment.end for segment in prefix.segments)]
        if self.style != "checkpoint":
            assert [segment.start for segment in prefix.segments] == edges[:-1], "files with a gap"
        assert edges[-1] < start.prompt_length, "nothing is left to compute"
        for segment in prefix.segments:
            assert self.disk.secrets[BlockHash(segment.name)] == prefix.scope, "another scope's file"
            assert self.style == "dense" or segment.name in chain or not segment.with_checkpoint, "another prompt's file"

    # -- what it says -----------------------------------------------------------------------------------------------

    def runnable(self) -> list[SequenceId]:
        """Also those of which nothing is generated."""
        ready = super().runnable()
        return ready + [sequence for sequence, row in self.rows.items() if row.start.prefill_only and sequence not in ready]

    def step(self, chance: random.Random) -> None:
        fresh = [sequence for sequence, memory in self.memories.items() if not memory.is_restored and sequence in self.rows]
        for sequence in fresh:
            self._restore(sequence)
        if fresh and self.dice.random() < 0.5:
            return
        for sequence in list(self.memories):
            if self.dice.random() < 0.1:
                self._keep(sequence)
        super().step(chance)

    def _decode(self, sequence: SequenceId, row: ImaginedRow) -> StepRow:
        if not row.start.prefill_only:
            return super()._decode(sequence, row)
        if self.dice.random() < 0.8:
            self._keep(sequence)
        del self.rows[sequence]
        return StepRow(sequence, len(row.context), (), "", "length")

    def _restore(self, sequence: SequenceId) -> None:
        memory, dice = self.memories[sequence], self.dice
        memory.is_restored = True
        start, length, source = memory.row.start, 0, "none"
        misses: list[SegmentMiss] = []
        for segment in memory.prefix.segments:
            name = BlockHash(segment.name)
            if name not in self.disk.files:
                misses.append(SegmentMiss(name, "absent", "", False))
                break
            if dice.random() < 0.05:
                is_removed = dice.random() < 0.5
                if is_removed:
                    del self.disk.files[name]
                    self.disk.at_fault.add(name)
                misses.append(SegmentMiss(name, "digest", "", is_removed))
                break
            length, source = segment.end, "file"
        if misses and self.style == "checkpoint":
            length, source = 0, "none"
        for secret, tokens in self.kept:
            shared = common_length(TokenIds(tokens), TokenIds(memory.row.context[: start.prompt_length - 1]))
            if secret == memory.prefix.scope and shared > length:
                length, source = shared, "memory"
        num_files = len(memory.prefix.segments) if source == "file" else 0
        read = (num_files, 1000 * length, 0.001 * dice.random()) if num_files else (0, 0, 0.0)
        self.step_events.append(Restored(sequence, length, source, *read, misses=tuple(misses)))  # type: ignore[arg-type]

    def _keep(self, sequence: SequenceId) -> None:
        """Say how far it is kept, and offer its new whole blocks."""
        memory = self.memories.get(sequence)
        if memory is None or not memory.is_restored or not memory.prefix.keep or memory.prefix.scope in self.forgotten:
            return
        secret, context = Secret(memory.prefix.scope), memory.row.context
        length = len(context) if memory.row.is_prefilled else self.dice.randint(memory.told, len(context))
        self.kept = [*self.kept[-5:], (secret, context[:length])]
        edges = list(range(memory.told, length + 1, BLOCK_TOKENS))
        nodes = []
        for start, end in pairwise(edges):
            if self.dice.random() < 0.95:
                number = 1 + len(self.nodes)
                self.nodes[number] = _Node(secret, context[:end], start)
                nodes.append(KeptNode(number, start, end, 1000))
        memory.told = edges[-1] if edges else memory.told
        if memory.pins and length:
            self.pinned[sequence] = memory.prefix.scope
        self.step_events.append(Kept(sequence, length, tuple(nodes), length if memory.pins else 0))

    def _write(self, number: int) -> None:
        node = self.nodes[number]
        assert node.secret not in self.forgotten, "to be written for a scope that is erased"
        if self.dice.random() < 0.15:
            self.step_events.append(SegmentRejected(number, self.dice.choice(["busy", "absent", "no_space"]), ""))
            return
        chain = block_hashes(node.secret, TokenIds(node.tokens))
        first = node.start // BLOCK_TOKENS
        num_bytes = 1000 * (len(node.tokens) - node.start) + self.dice.randint(300, 600)
        parent = chain[first - 1] if first else None
        entry = Entry(self.fingerprint, None, parent, node.start, tuple(chain[first:]), self.style, num_bytes)
        is_new = entry.name not in self.disk.files
        self.disk.write(node.secret, entry)
        self.step_events.append(SegmentPublished(number, entry.name, num_bytes, is_new, 0.001))
