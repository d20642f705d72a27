"""The same play with prefixes: files come, vanish and are evicted, tenants are erased; no stream and no count suffers from it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.config import Settings, TenantSpec
from runtime.prefix.hashing import BLOCK_TOKENS, BlockHash, Scope, block_hashes, shared_scope
from runtime.prefix.plans import Entry
from runtime.protocol.commands import TextPrompt
from runtime.protocol.events import Kept, ModelFacts, Restored, SegmentPublished, SegmentRejected
from runtime.protocol.ids import ModelName, RequestId, TenantId
from runtime.protocol.tokens import TokenIds
from runtime.scheduler.request import Request, SequenceState
from runtime.scheduler.stimuli import (
    DeleteFiles,
    EraseTenant,
    FilesSeen,
    Instruction,
    ReleasePrefix,
    Stimulus,
    TenantSet,
    WorkerSaid,
)
from tests.unit.scheduler.cast import DRAFTERS, MODELS, TENANTS
from tests.unit.scheduler.house import House
from tests.unit.scheduler.imagined_prefixes import Disk, PrefixWorker
from tests.unit.scheduler.imagined_worker import ImaginedWorker, tokenize
from tests.unit.scheduler.prefix_house import prefix_facts, scope_of
from tests.unit.scheduler.test_simulation import Drama

HEADS = ("a" * 800, "a" * 800, "a" * 300 + "c" * 500)
DISK_BYTES = 3_000_000


@dataclass
class DiskHouse(House):
    """Whose files are deleted as it wants. `check`: called with what each stimulus brought."""

    disk: Disk = field(default_factory=Disk)
    check: Callable[[Stimulus], None] = lambda stimulus: None

    def do(self, stimulus: Stimulus) -> list[Instruction]:
        self.check(stimulus)
        instructions = super().do(stimulus)
        for instruction in instructions:
            if isinstance(instruction, DeleteFiles):
                for entry in instruction.entries:
                    self.disk.files.pop(entry.name, None)
        return instructions


class PrefixDrama(Drama):
    """Three tenants' scopes and the shared one, a disk that is too small, and those who write to it unasked."""

    context = 900

    def __init__(self, seed: int, style: Any, drafters: str, memory: int = 1 << 30, disk: int = 2_000_000) -> None:
        self.style, self.memory_bytes, self.disk_bytes = style, memory, disk
        self.disk = Disk()
        self.erased: set[bytes] = set()
        self.lives: Counter[str] = Counter()
        self.rarely = random.Random(seed)
        self.has_twins = self.rarely.random() < 0.3
        super().__init__(seed, 16, 100, drafters)
        self.look()

    def build(self, **options: Any) -> House:
        sizes = {"prefix_memory_bytes": self.memory_bytes, "prefix_disk_bytes": self.disk_bytes, "prefix_free_bytes": 500_000}
        built = DiskHouse(Settings(prefill_batch_tokens=3000, **sizes, **options), disk=self.disk)
        built.check = self.check_heard
        return built

    def fingerprint(self, model: str) -> str:
        return "twins" if self.has_twins else model

    def hire(self, model: ModelName) -> tuple[ImaginedWorker, ModelFacts]:
        facts, fingerprint = prefix_facts(self.context, self.style), self.fingerprint(model)
        assert facts.prefix is not None
        facts = msgspec.structs.replace(facts, prefix=msgspec.structs.replace(facts.prefix, fingerprint=fingerprint))
        dice = random.Random(self.rarely.random())
        return PrefixWorker(MODELS[model], disk=self.disk, fingerprint=fingerprint, style=self.style, dice=dice), facts

    def actions(self) -> list[tuple[Callable[[], None], float]]:
        more: list[tuple[Callable[[], None], float]] = [
            (self.look, 1.5),
            (self.vanish, 0.5),
            (self.appear, 0.5),
            (self.erase, 0.6),
            (self.cancel, 2),
            (self.unpin, 1),
        ]
        return super().actions() + more

    def scope_of(self, tenant: str) -> Scope:
        return scope_of(tenant, self.lives[tenant])

    def scopes(self) -> list[Scope]:
        return [shared_scope(), *(self.scope_of(tenant) for tenant in TENANTS)]

    def text(self) -> str:
        chance = self.chance
        head = chance.choice(HEADS)[: chance.choice([0, 100, 256, 300, 512, 520, 700, 800, 800])]
        return head + "".join(chance.choices("defgh", k=chance.choice([1, 5, 40])))

    def invent(self, request_id: RequestId) -> Request:
        chance, request = self.chance, super().invent(request_id)
        own = self.scope_of(request.tenant)
        request = replace(request, scope=chance.choice([own, own, own, shared_scope(), None]), keeps_prefix=chance.random() < 0.8)
        assert isinstance(request.prompt, TextPrompt)
        if len(request.prompt.text) > 1:  # else it may be the one that is refused
            request = replace(request, prompt=TextPrompt(self.text()))
        if request.scope is not None and chance.random() < 0.15:
            pins: dict[str, Any] = {"prefill_only": True, "max_tokens": 0, "num_sequences": 1, "keeps_prefix": True}
            request = replace(request, **pins, boundaries=(5, 300))
        return request

    # -- what else may happen ----------------------------------------------------------------------------------------

    def look(self) -> None:
        """The directory is read. What has no known owner is not recognised."""
        recognised = {scope.secret(self.fingerprint(model)): scope for model in MODELS for scope in self.scopes()}
        index = self.house.state.book.prefixes.index
        known = {entry.name for entry in index.entries()}
        files = {name: file for name, file in self.disk.files.items() if self.disk.secrets[name] in recognised}
        added = [
            replace(file, tenant=recognised[self.disk.secrets[name]].tenant) for name, file in files.items() if name not in known
        ]
        used = [name for name in files if self.chance.random() < 0.1]
        free = DISK_BYTES - sum(file.num_bytes for file in self.disk.files.values())
        self.house.do(FilesSeen(tuple(added), tuple(used), tuple(known - files.keys()), max(0, free)))

    def vanish(self) -> None:
        if self.disk.files:
            name = self.chance.choice(list(self.disk.files))
            del self.disk.files[name]
            self.disk.at_fault.add(name)

    def appear(self) -> None:
        """Another process writes a file."""
        fingerprint = self.fingerprint(self.chance.choice(list(MODELS)))
        secret = self.chance.choice(self.scopes()).secret(fingerprint)
        chain = block_hashes(secret, TokenIds(tokenize(self.text())))
        if chain:
            first = self.chance.randrange(len(chain))
            blocks, parent = tuple(chain[first:]), chain[first - 1] if first else None
            self.disk.write(secret, Entry(fingerprint, None, parent, first * BLOCK_TOKENS, blocks, self.style, 300_000))

    def erase(self) -> None:
        tenant = self.chance.choice(TENANTS)
        scope = self.scope_of(tenant)
        self.lives[tenant] += 1
        self.house.do(EraseTenant(TenantId(tenant), scope))
        gone: set[bytes] = {scope.secret(self.fingerprint(model)) for model in MODELS}
        for name in [name for name in self.disk.files if self.disk.secrets[name] in gone]:
            del self.disk.files[name]
        self.disk.at_fault |= {name for name, secret in self.disk.secrets.items() if secret in gone}
        self.erased |= gone

    def unpin(self) -> None:
        for request in self.some_request():
            self.house.do(ReleasePrefix(request))

    def retune(self) -> None:
        cap = self.chance.choice([None, 0, 600_000])
        self.house.do(TenantSet(TenantId(self.chance.choice(TENANTS)), TenantSpec(prefix_disk_bytes=cap)))

    def act(self) -> None:
        super().act()
        known = self.house.state.book.prefixes.index.entries()
        assert all(self.disk.secrets[entry.name] not in self.erased for entry in known), "a file of an erased scope is counted on"

    # -- what must hold ----------------------------------------------------------------------------------------------

    def check_heard(self, stimulus: Stimulus) -> None:
        if isinstance(stimulus, WorkerSaid):
            self.seen[type(stimulus.event).__name__] += 1
            if isinstance(stimulus.event, Restored):
                self.check_restored(stimulus, stimulus.event)
            elif isinstance(stimulus.event, SegmentPublished) and stimulus.event.name not in self.disk.files:
                self.disk.at_fault.add(BlockHash(stimulus.event.name))  # a repeat, of what is no longer so

    def check_restored(self, stimulus: WorkerSaid, event: Restored) -> None:
        """A file that a row was told to read is there, unless others took it."""
        self.seen[event.source] += 1
        sequence = self.house.state.book.models[stimulus.model].sequences.get(event.sequence)
        if sequence is not None and sequence.state is not SequenceState.RELEASING and sequence.awaits_restored:
            absent = {BlockHash(miss.name) for miss in event.misses if miss.reason == "absent"}
            assert absent <= self.disk.at_fault, "a file was evicted that a row was to read"

    def check(self) -> None:
        super().check()
        prefixes = self.house.state.book.prefixes
        assert prefixes.promised == set(), "every file that was wanted came or was refused"
        assert prefixes.index.holders() <= {pin.holder for pin in prefixes.pins.values()}
        finished = {request for request, outcome in self.house.outcomes.items() if outcome.state == "finished"}
        pinning = {request for request in finished if self.requests[request].prefill_only}
        assert prefixes.pins.keys() <= pinning, "whoever got no handle has nothing pinned"
        self.seen["erased"] += len(self.erased)
        self.seen["pinned"] += len(prefixes.pins)
        self.seen["followed"] += sum(counts.followed for counts in prefixes.counts.values())
        self.seen["evicted"] += sum(counts.evictions for counts in prefixes.counts.values())
        for request in pinning:
            self.house.do(ReleasePrefix(request))
        self.settle()
        self.look()
        assert (prefixes.pins, prefixes.index.holders()) == ({}, set())
        assert all(isinstance(worker, PrefixWorker) and not worker.pinned for worker in self.workers.values())
        assert prefixes.index.num_bytes <= self.disk_bytes, "with nothing leased all is within the budget"


@given(
    seed=st.integers(0, 2**32),
    num_acts=st.integers(0, 600),
    style=st.sampled_from(["dense", "mixed", "checkpoint"]),
    drafters=st.sampled_from(list(DRAFTERS)),
    sizes=st.sampled_from([(1 << 30, 2_000_000), (1 << 30, 2_000_000), (0, 2_000_000), (1 << 30, 0)]),
)
@settings(max_examples=15)
def test_whatever_becomes_of_prefixes_every_stream_is_its_own_and_nothing_is_left_over(
    seed: int, num_acts: int, style: str, drafters: str, sizes: tuple[int, int]
) -> None:
    drama = PrefixDrama(seed, style, drafters, *sizes)
    for _ in range(num_acts):
        drama.act()
    drama.settle()
    drama.check()


def test_the_play_with_prefixes_is_not_an_empty_one() -> None:
    seen: Counter[str] = Counter()
    for seed, style in enumerate(["dense", "dense", "mixed", "checkpoint"]):
        drama = PrefixDrama(seed, style, "small" if seed else "none")
        for _ in range(700):
            drama.act()
        drama.settle()
        drama.check()
        seen += drama.seen
    said = [event.__name__ for event in (Restored, Kept, SegmentPublished, SegmentRejected)]
    assert all(seen[what] > 0 for what in (*said, "memory", "file", "none", "erased", "pinned", "followed", "evicted")), seen
