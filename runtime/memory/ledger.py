"""Who has how many bytes of the machine, and is there room for one more? The one owner of all counts; pure: nothing is measured
here.

Bytes are reserved before a worker's process is started, and given back when its exit was observed. What is left over is lent to the
caches of the models that are ready (`grants`), and taken back when another model needs it. A model that takes more than was
reserved for it, by its own words, diminishes what is lent, and when that is not enough the ledger says so
(`overcommitted_bytes`). What workers say may be late or untrue: it never frees anything, and never moves a reservation above
the budget.
"""

from __future__ import annotations

from dataclasses import dataclass

from runtime.protocol.ids import Holder


@dataclass(frozen=True, slots=True)
class Need:
    """What one worker takes. Bytes, none negative.

    weights; process: interpreter, libraries, allocator; prefill: one chunk's intermediate values; load: beyond the weights
    while they are being loaded. kv_least: for one sequence to get somewhere; kv_most: for all slots at their longest.
    bytes_per_token: of a sequence's cache, 0 where that does not grow or is not known.
    """

    weights_bytes: int = 0
    process_bytes: int = 0
    prefill_bytes: int = 0
    load_bytes: int = 0
    kv_least_bytes: int = 0
    kv_most_bytes: int = 0
    bytes_per_token: int = 0

    @property
    def resident_bytes(self) -> int:
        return self.weights_bytes + self.process_bytes + self.prefill_bytes + self.kv_least_bytes

    @property
    def peak_bytes(self) -> int:
        return self.resident_bytes + self.load_bytes


@dataclass(frozen=True, slots=True)
class Granted:
    """It is reserved."""


@dataclass(frozen=True, slots=True)
class Short:
    """Nothing was reserved: so many bytes are missing. is_hopeless: more than all the others' ends could ever give back."""

    missing_bytes: int
    is_hopeless: bool


@dataclass(slots=True)
class _Account:
    """unbacked: of its need, found too late to be within the budget."""

    need: Need
    is_loading: bool = True
    unbacked_bytes: int = 0
    footprint_bytes: int = 0

    @property
    def needed_bytes(self) -> int:
        return self.need.peak_bytes if self.is_loading else self.need.resident_bytes

    @property
    def reserved_bytes(self) -> int:
        return self.needed_bytes - self.unbacked_bytes


class Ledger:
    """`budget_bytes` for everything; of it `shared_bytes` for what belongs to no single model (prefixes in memory)."""

    def __init__(self, budget_bytes: int, shared_bytes: int = 0) -> None:
        """:raises ValueError: a negative budget or share, or a share above the budget."""
        if not 0 <= shared_bytes <= budget_bytes:
            raise ValueError(f"{shared_bytes} shared bytes of a budget of {budget_bytes}; both must be at least 0, and fit")
        self.budget_bytes = budget_bytes
        self.shared_bytes = shared_bytes
        self._accounts: dict[Holder, _Account] = {}

    # -- facts ----------------------------------------------------------------------------------------------

    @property
    def reserved_bytes(self) -> int:
        """At most the budget, always."""
        return self.shared_bytes + sum(account.reserved_bytes for account in self._accounts.values())

    @property
    def free_bytes(self) -> int:
        """Neither reserved nor known to be taken by who should not have it."""
        return max(0, self.budget_bytes - self.reserved_bytes - self._excess_bytes())

    @property
    def overcommitted_bytes(self) -> int:
        """By what workers say, beyond the budget: somebody should go, and nobody should come."""
        unbacked = sum(account.unbacked_bytes for account in self._accounts.values())
        return max(0, unbacked + self.reserved_bytes + self._excess_bytes() - self.budget_bytes)

    def reserved(self, name: Holder) -> int:
        """For one worker; 0 for an unknown one."""
        account = self._accounts.get(name)
        return 0 if account is None else account.reserved_bytes

    def accounts(self) -> dict[Holder, tuple[Need, bool, int, int]]:
        """By worker: its need, whether it is loading, what is reserved, and its footprint as last told (0: not yet)."""
        return {
            name: (account.need, account.is_loading, account.reserved_bytes, account.footprint_bytes)
            for name, account in self._accounts.items()
        }

    def _excess_bytes(self) -> int:
        """Taken beyond what was reserved, lent and shared: prefixes in memory are part of their workers' footprints."""
        lent = self._lendable()
        own = sum(max(0, one.footprint_bytes - one.needed_bytes - lent.get(name, 0)) for name, one in self._accounts.items())
        return max(0, own - self.shared_bytes)

    # -- what happens ---------------------------------------------------------------------------------------

    def ask(self, name: Holder, need: Need) -> Granted | Short:
        """Room for a worker that is about to be started. Asking again while it has an account changes nothing."""
        if name in self._accounts:
            return Granted()
        missing = need.peak_bytes - self.free_bytes
        if missing > 0:
            return Short(missing, is_hopeless=need.peak_bytes > self.budget_bytes - self.shared_bytes)
        self._accounts[name] = _Account(need)
        return Granted()

    def loaded(self, name: Holder, need: Need) -> None:
        """Its load is over, and this is what it truly needs. Unknown ones are ignored."""
        account = self._accounts.get(name)
        if account is None:
            return
        account.need, account.is_loading, account.unbacked_bytes = need, False, 0
        account.unbacked_bytes = max(0, self.reserved_bytes - self.budget_bytes)

    def reconcile(self, name: Holder, footprint_bytes: int) -> None:
        """What its process is said to take now. Unknown ones are ignored; nonsense counts as 0."""
        account = self._accounts.get(name)
        if account is not None:
            account.footprint_bytes = max(0, footprint_bytes)

    def released(self, name: Holder) -> None:
        """Its process is gone, which was seen. Repeating it is harmless."""
        if self._accounts.pop(name, None) is None:
            return
        for account in self._accounts.values():  # what was not within the budget may be now
            room = self.budget_bytes - self.reserved_bytes
            account.unbacked_bytes -= min(account.unbacked_bytes, room)

    # -- what is lent ---------------------------------------------------------------------------------------

    def grants(self) -> dict[Holder, int]:
        """Cache bytes that each ready model may use now, its own least included."""
        excess = self._excess_bytes()
        lent = self._share(max(0, self.budget_bytes - self.reserved_bytes - excess)) if excess else self._lendable()
        return {
            name: account.need.kv_least_bytes + lent.get(name, 0)
            for name, account in self._accounts.items()
            if not account.is_loading
        }

    def _lendable(self) -> dict[Holder, int]:
        return self._share(max(0, self.budget_bytes - self.reserved_bytes))

    def _share(self, num_bytes: int) -> dict[Holder, int]:
        """Equal parts, but nobody gets more than it could use."""
        wants = {
            name: account.need.kv_most_bytes - account.need.kv_least_bytes
            for name, account in self._accounts.items()
            if not account.is_loading and account.need.kv_most_bytes > account.need.kv_least_bytes
        }
        shares: dict[Holder, int] = {}
        for place, (name, want) in enumerate(sorted(wants.items(), key=lambda item: (item[1], item[0]))):
            shares[name] = min(want, num_bytes // (len(wants) - place))
            num_bytes -= shares[name]
        return shares

    def validate(self) -> None:
        """:raises AssertionError: naming what does not add up."""
        assert 0 <= self.reserved_bytes <= self.budget_bytes, f"{self.reserved_bytes} reserved of {self.budget_bytes}"
        for name, account in self._accounts.items():
            assert 0 <= account.unbacked_bytes <= account.needed_bytes, f"{name}: {account.unbacked_bytes} unbacked"
        lent = sum(self.grants().values()) - sum(a.need.kv_least_bytes for a in self._accounts.values() if not a.is_loading)
        assert 0 <= lent <= self.budget_bytes - self.reserved_bytes, f"{lent} lent of {self.budget_bytes - self.reserved_bytes}"
