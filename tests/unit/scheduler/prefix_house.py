"""A House whose model keeps prefixes: tokens of one's choice, what a worker says of them, and what became of leases and files."""

from __future__ import annotations

from collections.abc import Sequence as List
from typing import Any

import msgspec

from runtime.config import Settings
from runtime.prefix.hashing import BLOCK_TOKENS, KEY_BYTES, BlockHash, Scope, block_hashes, tenant_scope
from runtime.prefix.layout import Style
from runtime.prefix.plans import Entry
from runtime.protocol.commands import Forget, PrefillRow, Publish, Unpin
from runtime.protocol.events import (
    Kept,
    KeptNode,
    ModelFacts,
    PrefixFacts,
    Prepared,
    Refused,
    Restored,
    SegmentMiss,
    SegmentPublished,
    SegmentRejected,
)
from runtime.protocol.ids import Incarnation, ModelName, RequestId, SequenceId, TenantId
from runtime.protocol.tokens import TokenIds
from runtime.scheduler.model import Model
from runtime.scheduler.prefixes import Counts
from runtime.scheduler.request import SequenceState
from runtime.scheduler.restoring import CHECKPOINT_SPACING_TOKENS
from runtime.scheduler.stimuli import DeleteFiles, EraseTenant, FilesSeen, Instruction, MarkUsed, ReleasePrefix, Stimulus, WorkerUp
from tests.unit.scheduler.house import MODEL, House, facts

FINGERPRINT = "f" * 64
BYTES_PER_TOKEN = 1000
HEAD_BYTES = 8 << 10
PLENTY = 1 << 40
B = BLOCK_TOKENS
NODE = CHECKPOINT_SPACING_TOKENS


def prefix_facts(context_length: int = 1 << 20, style: Style = "dense") -> ModelFacts:
    prefix = PrefixFacts(FINGERPRINT, style, BYTES_PER_TOKEN, 0 if style == "dense" else 5000, HEAD_BYTES, 0)
    return msgspec.structs.replace(facts(context_length), prefix=prefix)


def scope_of(tenant: str, life: int = 0) -> Scope:
    """`life`: how many keys the tenant had before."""
    return tenant_scope(TenantId(tenant), bytes([life]) * KEY_BYTES)


def secret_of(scope: Scope) -> bytes:
    return scope.secret(FINGERPRINT)


def text(start: int, length: int) -> list[int]:
    """A run of tokens; runs of different small starts differ everywhere."""
    return [start * 100_000 + place for place in range(length)]


def chain_of(scope: Scope, tokens: List[int]) -> list[BlockHash]:
    return block_hashes(scope.secret(FINGERPRINT), TokenIds(tokens))


def entry_of(scope: Scope, tokens: List[int], start: int = 0, *, num_bytes: int = 1000, style: Style = "dense") -> Entry:
    """A file of all whole blocks of the tokens from `start` on."""
    chain = chain_of(scope, tokens)
    first = start // B
    parent = chain[first - 1] if first else None
    return Entry(FINGERPRINT, scope.tenant, parent, start, tuple(chain[first:]), style, num_bytes)


def nodes_of(length: int, first: int = 1, start: int = 0) -> tuple[KeptNode, ...]:
    """As a worker cuts a context: at multiples of 512, and at its last block edge."""
    edges = [*range(start + NODE, length + 1, NODE)]
    if (last := length // B * B) > (edges[-1] if edges else start):
        edges.append(last)
    return tuple(KeptNode(first + n, low, high, 1000) for n, (low, high) in enumerate(zip([start, *edges], edges, strict=False)))


class PrefixHouse(House):
    """`deleted`, `used`: files that the librarian was told of. Every request has its tenant's scope unless told otherwise."""

    def __init__(self, *, memory: int = 1 << 30, disk: int = PLENTY, floor: int = 0, style: Style = "dense", **up: Any) -> None:
        self.deleted: list[Entry] = []
        self.used: list[Entry] = []
        self.style = style
        super().__init__(
            Settings(prefix_memory_bytes=memory, prefix_disk_bytes=disk, prefix_free_bytes=floor, prefill_batch_tokens=1 << 20)
        )
        self.up(**{"slots": 16} | up)
        self.seen()

    def do(self, stimulus: Stimulus) -> list[Instruction]:
        instructions = super().do(stimulus)
        for instruction in instructions:
            if isinstance(instruction, DeleteFiles):
                self.deleted += instruction.entries
            elif isinstance(instruction, MarkUsed):
                self.used += instruction.entries
        return instructions

    def up(self, model: ModelName = MODEL, *, slots: int = 16, incarnation: int = 1, context_length: int = 1 << 20) -> None:
        if model not in self.state.book.models:
            self.add(model, slots=slots)
        self.do(WorkerUp(model, Incarnation(incarnation), prefix_facts(context_length, self.style)))

    # -- clients and files ----------------------------------------------------------------------------------------

    def ask(self, tokens: List[int], tenant: str = "t", **changes: Any) -> RequestId:
        """A prepared request."""
        request = self.submit(tenant, **{"scope": scope_of(tenant), "prompt_length": len(tokens)} | changes)
        self.prepare(request, tokens)
        return request

    def ask_all(self, prompts: List[List[int]], tenant: str = "t", **changes: Any) -> list[RequestId]:
        """Together: none is placed before all are prepared, as when they arrive within a moment."""
        options = {"scope": scope_of(tenant)} | changes
        requests = [self.submit(tenant, prompt_length=len(tokens), **options) for tokens in prompts]
        for request, tokens in zip(requests, prompts, strict=True):
            self.prepare(request, tokens)
        return requests

    def prepare(self, request: RequestId, tokens: List[int]) -> None:
        self.say(Prepared(request, TokenIds(tokens)))

    def seen(self, *added: Entry, used: tuple[BlockHash, ...] = (), gone: tuple[BlockHash, ...] = (), free: int = PLENTY) -> None:
        self.do(FilesSeen(added, used, gone, free))

    def erase(self, tenant: str = "t") -> None:
        self.do(EraseTenant(TenantId(tenant), scope_of(tenant)))

    def unpin(self, request: RequestId) -> None:
        self.do(ReleasePrefix(request))

    # -- the worker -------------------------------------------------------------------------------------------------

    def restored(
        self, sequence: SequenceId, length: int = 0, source: Any = None, *, misses: tuple[SegmentMiss, ...] = (), **read: Any
    ) -> None:
        self.say(Restored(sequence, length, source or ("memory" if length else "none"), misses=misses, **read))

    def kept(self, sequence: SequenceId, length: int, nodes: tuple[KeptNode, ...] = (), pinned_length: int = 0) -> None:
        self.say(Kept(sequence, length, nodes, pinned_length))

    def published(self, node: int, name: bytes, num_bytes: int = 1000, *, is_new: bool = True) -> None:
        self.say(SegmentPublished(node, name, num_bytes, is_new, 0.01))

    def rejected(self, node: int, reason: Any = "busy") -> None:
        self.say(SegmentRejected(node, reason, ""))

    def refuse(self, sequence: SequenceId) -> None:
        self.say(Refused("step", "generation_failed", "non-finite logits", (), (sequence,)))

    def compute(self, sequence: SequenceId, length: int = 0) -> None:
        """From its Restored to its Prefilled; its whole prompt is kept in memory, and nothing offered."""
        if self.row(sequence).prefix is not None:
            self.restored(sequence, length)
            self.kept(sequence, self.row(sequence).prompt_length)
        self.prefilled(sequence)

    # -- looking ------------------------------------------------------------------------------------------------------

    def row(self, sequence: SequenceId) -> PrefillRow:
        return next(row for row in self.rows() if row.sequence == sequence)

    def started(self, requests: List[RequestId]) -> list[RequestId]:
        """Those of them with a row that was sent to the worker."""
        sent = {row.sequence for row in self.rows()}
        return [request for request in requests if any(s.id in sent for s in self.record(request).sequences)]

    def waiting(self, request: RequestId) -> bool:
        return all(sequence.state is SequenceState.WAITING for sequence in self.record(request).sequences)

    def published_nodes(self) -> list[int]:
        return [node for command in self.commands(Publish) for node, _ in command.nodes]

    def unpinned(self) -> list[SequenceId]:
        return [sequence for command in self.commands(Unpin) for sequence in command.sequences]

    def forgotten(self) -> list[bytes]:
        return [scope for command in self.commands(Forget) for scope in command.scopes]

    @property
    def model(self) -> Model:
        return self.state.book.models[MODEL]

    @property
    def leases(self) -> set[Any]:
        return self.state.book.prefixes.index.holders()

    @property
    def known(self) -> set[BlockHash]:
        """Names of the files it counts on."""
        return {entry.name for entry in self.state.book.prefixes.index.entries()}

    @property
    def free_bytes(self) -> int:
        return self.state.book.prefixes.free_bytes

    def tag(self, tenant: str = "t", model: ModelName = MODEL) -> float:
        """What the tenant has used of the model, in tokens."""
        return self.state.book.tenants[TenantId(tenant)].flows[model].start_tag

    def counts(self, tenant: str = "t") -> Counts:
        return self.state.book.prefixes.counts[TenantId(tenant)]
