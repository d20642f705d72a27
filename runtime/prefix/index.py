"""Which segments exist, which of them continue a prompt, and which must go?

Pure bookkeeping over the facts that `scan` and the workers bring; who calls it carries its decisions out. Segments form a forest:
one hangs on whichever segments hold the block before its start. Invariants:

- Uses are remembered by order alone, never by the clock. A use of a segment uses all it hangs on, a moment later, so a parent is
  always more recent than its children and the order of last use is leaf-first by itself.
- A leased segment is never a victim, nor is one that another hangs on.
- What is on the disk plus what is promised (`make_room`) never exceeds the limits by this process's own doing. Others on the same
  directory may add to it; `excess` names what must go then.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from runtime.prefix.hashing import BLOCK_TOKENS, BlockHash
from runtime.prefix.plans import Entry, Plan, plans
from runtime.protocol.ids import TenantId


@dataclass(frozen=True, slots=True)
class Limits:
    """budget_bytes: of all segments of all models. free_floor_bytes: to be left free on the disk. tenant_bytes: of a tenant's
    segments, `default_tenant_bytes` for those not listed (None: no cap). The shared scope has no cap of its own."""

    budget_bytes: int
    free_floor_bytes: int = 0
    default_tenant_bytes: int | None = None
    tenant_bytes: dict[TenantId, int] = field(default_factory=dict)

    def cap(self, tenant: TenantId | None) -> int | None:
        return None if tenant is None else self.tenant_bytes.get(tenant, self.default_tenant_bytes)


class Index:
    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._entries: OrderedDict[BlockHash, Entry] = OrderedDict()
        """By name, least recently used first."""
        self._holding: dict[BlockHash, dict[BlockHash, Entry]] = {}
        """Block → the segments it lies in, by name."""
        self._hanging: dict[BlockHash, dict[BlockHash, Entry]] = {}
        """Block → the segments that begin right after it, by name."""
        self._leases: Counter[BlockHash] = Counter()
        self._holders: dict[Hashable, list[BlockHash]] = {}
        self._promised: dict[BlockHash, tuple[int, TenantId | None]] = {}
        self._bytes: Counter[TenantId | None] = Counter()
        """On the disk and promised, by tenant."""

    # -- what exists --------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: BlockHash) -> bool:
        return name in self._entries

    def holds(self, block: BlockHash) -> bool:
        """Whether a segment has this block in it."""
        return block in self._holding

    def entries(self) -> list[Entry]:
        """Least recently used first."""
        return list(self._entries.values())

    @property
    def num_bytes(self) -> int:
        return self._bytes.total()

    def tenant_num_bytes(self, tenant: TenantId | None) -> int:
        return self._bytes[tenant]

    def add(self, entry: Entry) -> None:
        """It exists: published, or found on the disk. Counts as a use. Repeating it is harmless; its promise is fulfilled."""
        self.cancel(entry.name)
        self.drop(entry.name)
        self._entries[entry.name] = entry
        self._bytes[entry.tenant] += entry.num_bytes
        for block in entry.blocks:
            self._holding.setdefault(block, {})[entry.name] = entry
        if entry.parent is not None and entry.style != "checkpoint":
            self._hanging.setdefault(entry.parent, {})[entry.name] = entry
        self.use((entry.name,))

    def drop(self, name: BlockHash) -> None:
        """It exists no more: vanished, or rejected by a reader. Unknown names are fine. Leases on it run on without effect."""
        entry = self._entries.pop(name, None)
        if entry is None:
            return
        self._bytes[entry.tenant] -= entry.num_bytes
        for block in entry.blocks:
            _discard(self._holding, block, name)
        if entry.parent is not None:
            _discard(self._hanging, entry.parent, name)

    def use(self, names: Iterable[BlockHash]) -> None:
        """These were used just now, and with them all they hang on."""
        found = self._with_ancestors(names)
        # A parent begins before its child, so this order moves children first.
        for entry in sorted(found.values(), key=lambda entry: -entry.start):
            self._entries.move_to_end(entry.name)

    def _with_ancestors(self, names: Iterable[BlockHash]) -> dict[BlockHash, Entry]:
        found: dict[BlockHash, Entry] = {}
        waiting = [self._entries[name] for name in names if name in self._entries]
        while waiting:
            entry = waiting.pop()
            if entry.name not in found:
                found[entry.name] = entry
                if entry.parent is not None and entry.style != "checkpoint":
                    waiting += self._holding.get(entry.parent, {}).values()
        return found

    # -- what a prompt can use ----------------------------------------------------------------------------

    def plans(self, chain: Sequence[BlockHash], num_tokens: int) -> list[Plan]:
        """All ways worth considering to restore a beginning of a prompt of `num_tokens` tokens with these block hashes, shortest
        first. Each leaves at least one token to compute. No plan counts as a use."""
        return plans(self._entries, self._holding, chain, num_tokens)

    def lease(self, holder: Hashable, plan: Plan) -> None:
        """Promise not to evict the plan's segments until `release(holder)`; counts as a use. A holder may take several leases."""
        names = [piece.entry.name for piece in plan.pieces]
        self._holders.setdefault(holder, []).extend(names)
        self._leases.update(names)
        self.use(names)

    def release(self, holder: Hashable) -> None:
        """Give all leases of a holder back. Repeating it is harmless."""
        for name in self._holders.pop(holder, ()):
            self._leases[name] -= 1
            if not self._leases[name]:
                del self._leases[name]

    def holders(self) -> set[Hashable]:
        """Who has leases."""
        return set(self._holders)

    # -- what must go -------------------------------------------------------------------------------------

    def make_room(
        self, name: BlockHash, num_bytes: int, tenant: TenantId | None, parent: BlockHash | None, free_bytes: int
    ) -> list[Entry] | None:
        """May a segment of that size be published, and what must be deleted before? None: no, and nothing changes.

        Otherwise the victims are forgotten at once (the caller deletes their files) and the room is promised until `add` or
        `cancel` of the name. parent: block before its start, which it is to hang on and which therefore stays.
        free_bytes: on the disk now.
        """
        self.cancel(name)
        keep = set(self._with_ancestors(self._holding.get(parent, ())) if parent is not None else ())
        unwritten = sum(promised for promised, _ in self._promised.values())
        victims = self._victims(num_bytes, tenant, free_bytes - unwritten, keep)
        if victims is None:
            return None
        self._promised[name] = (num_bytes, tenant)
        self._bytes[tenant] += num_bytes
        return self._forget(victims)

    def cancel(self, name: BlockHash) -> None:
        """The promised segment will not come. Unknown names are fine."""
        num_bytes, tenant = self._promised.pop(name, (0, None))
        self._bytes[tenant] -= num_bytes

    def excess(self, free_bytes: int) -> list[Entry]:
        """Victims, already forgotten, that bring the cache within its limits again as far as leases let it."""
        victims: dict[BlockHash, Entry] = {}
        for tenant in list(self._bytes):
            cap = self.limits.cap(tenant)
            if cap is not None:
                self._choose(victims, self._bytes[tenant] - cap, set(), tenant)
        chosen = sum(entry.num_bytes for entry in victims.values())
        over = max(self.num_bytes - self.limits.budget_bytes, self.limits.free_floor_bytes - free_bytes)
        self._choose(victims, over - chosen, set())
        return self._forget(victims)

    def erase(self, tenant: TenantId) -> list[Entry]:
        """All of a tenant's segments, leased or not, already forgotten."""
        return self._forget({name: entry for name, entry in self._entries.items() if entry.tenant == tenant})

    def _victims(
        self, num_bytes: int, tenant: TenantId | None, free_bytes: int, keep: set[BlockHash]
    ) -> dict[BlockHash, Entry] | None:
        victims: dict[BlockHash, Entry] = {}
        cap = self.limits.cap(tenant)
        if cap is not None and not self._choose(victims, self._bytes[tenant] + num_bytes - cap, keep, tenant):
            return None
        chosen = sum(entry.num_bytes for entry in victims.values())
        over_budget = self.num_bytes + num_bytes - self.limits.budget_bytes
        over_floor = self.limits.free_floor_bytes + num_bytes - free_bytes
        return victims if self._choose(victims, max(over_budget, over_floor) - chosen, keep) else None

    def _choose(
        self, victims: dict[BlockHash, Entry], num_bytes: int, keep: set[BlockHash], only_tenant: TenantId | None = None
    ) -> bool:
        """Add victims of at least `num_bytes`, least recently used leaves first; whether there were enough."""
        if num_bytes <= 0:
            return True
        for name, entry in self._entries.items():
            if name in victims or name in keep or self._leases[name] or only_tenant not in (None, entry.tenant):
                continue
            if any(child not in victims for block in entry.blocks for child in self._hanging.get(block, ()) if child != name):
                continue
            victims[name] = entry
            num_bytes -= entry.num_bytes
            if num_bytes <= 0:
                return True
        return False

    def _forget(self, victims: dict[BlockHash, Entry]) -> list[Entry]:
        for name in victims:
            self.drop(name)
        return list(victims.values())

    # -- check --------------------------------------------------------------------------------------------

    def validate(self) -> None:
        """Recount everything.

        :raises AssertionError: a count or an order is wrong.
        """
        counted: Counter[TenantId | None] = Counter()
        for entry in self._entries.values():
            counted[entry.tenant] += entry.num_bytes
            assert entry.num_blocks == len(entry.blocks)
            assert all(self._holding[block][entry.name] is entry for block in entry.blocks)
        for num_bytes, tenant in self._promised.values():
            counted[tenant] += num_bytes
        assert +counted == +self._bytes, (counted, self._bytes)
        assert sum(map(len, self._holding.values())) == sum(entry.num_blocks for entry in self._entries.values())
        hanging = [entry for entry in self._entries.values() if entry.parent is not None and entry.style != "checkpoint"]
        assert sum(map(len, self._hanging.values())) == len(hanging)
        assert self._leases == Counter(name for names in self._holders.values() for name in names)
        order = {name: number for number, name in enumerate(self._entries)}
        for entry in hanging:
            assert entry.parent is not None
            assert all(order[entry.name] < order[parent] for parent in self._holding.get(entry.parent, ())), (
                "a child outlived its parent"
            )
            assert entry.start % BLOCK_TOKENS == 0


def _discard(table: dict[BlockHash, dict[BlockHash, Entry]], block: BlockHash, name: BlockHash) -> None:
    named = table.get(block)
    if named is not None:
        named.pop(name, None)
        if not named:
            del table[block]
