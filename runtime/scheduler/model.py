"""One model and its worker as the scheduler sees them. Changed by book.py and, as far as prefixes go, by what imports it."""

from __future__ import annotations

from dataclasses import dataclass, field

from runtime.errors import TroupeError
from runtime.prefix.benefit import Benefit
from runtime.protocol.events import ModelFacts
from runtime.protocol.ids import Incarnation, ModelName, RequestId, SequenceId
from runtime.scheduler.fairness import FairQueue
from runtime.scheduler.hints import Hints
from runtime.scheduler.pairing import Pairing
from runtime.scheduler.prefill import Batch
from runtime.scheduler.prefixes import Promise
from runtime.scheduler.request import RequestRecord, Sequence, SequenceState

_INITIAL_OUTPUT_TOKENS = 256.0


@dataclass(slots=True, eq=False)
class Model:
    """One model and its worker as the scheduler sees them; of a model with several replicas, one of these.

    group: the name that apps use, which the first replica has as its own.
    incarnation: the worker that is up, or None. unavailable: why none will come. has_breached: it said something impossible
    and will be replaced; nothing more is sent to it or heard from it.
    sequences: those that hold a slot. returning: those that lost theirs and go on before others. suspects: requests that several
    workers died with, and that run alone until they have got further, the first first.
    preparing: requests the worker may be tokenizing, also ended ones not yet `Released`.
    max_tokens: that its sequences may hold together; None while nobody says.
    num_unstarted: requests without an end that no sequence of has got a slot. service_seconds, output_tokens: moving averages
    per sequence, of its time in the slot and of its length. needs_placing: something changed that may let rows start.
    collect_until: when ready rows stop waiting for others to be prefilled with; None when none waits so.
    benefit: what restoring and computing cost here, also over its workers' lives. hints: what the worker's memory holds.
    promises: by node, what the worker was told to write to files. pairing: with its drafter, as the target; None when it has none.
    """

    name: ModelName
    max_slots: int
    group: ModelName
    incarnation: Incarnation | None = None
    last_incarnation: int = 0
    facts: ModelFacts | None = None
    unavailable: TroupeError | None = None
    has_breached: bool = False
    fair: FairQueue = field(default_factory=FairQueue)
    sequences: dict[SequenceId, Sequence] = field(default_factory=dict)
    returning: dict[SequenceId, Sequence] = field(default_factory=dict)
    suspects: dict[RequestId, RequestRecord] = field(default_factory=dict)
    preparing: dict[RequestId, RequestRecord] = field(default_factory=dict)
    batches: list[Batch] = field(default_factory=list)
    max_tokens: int | None = None
    num_unstarted: int = 0
    service_seconds: float | None = None
    output_tokens: float = _INITIAL_OUTPUT_TOKENS
    needs_placing: bool = False
    collect_until: float | None = None
    benefit: Benefit = field(default_factory=Benefit)
    hints: Hints = field(default_factory=Hints)
    promises: dict[int, Promise] = field(default_factory=dict)
    pairing: Pairing | None = None
    grants: dict[SequenceId, int] = field(default_factory=dict)
    requests_to_release: list[RequestId] = field(default_factory=list)
    sequences_to_release: list[SequenceId] = field(default_factory=list)

    @property
    def can_work(self) -> bool:
        return self.incarnation is not None and not self.has_breached

    @property
    def num_free_slots(self) -> int:
        return self.max_slots - len(self.sequences)

    @property
    def num_soon_free_slots(self) -> int:
        """Free slots and those that wait only for the worker's `Released`, but for those that somebody comes back to."""
        live = sum(sequence.state is not SequenceState.RELEASING for sequence in self.sequences.values())
        return max(0, self.max_slots - live - len(self.returning))
