"""A typed snapshot of the scheduler for people and user interfaces."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal

from runtime.prefix.plans import Entry
from runtime.protocol.ids import TenantId, public_name
from runtime.scheduler.admission import num_unstarted
from runtime.scheduler.book import Book
from runtime.scheduler.drafting import DraftStats
from runtime.scheduler.model import Model
from runtime.scheduler.pairing import Pairing
from runtime.scheduler.prefixes import Counts
from runtime.scheduler.request import RequestState, SequenceState
from runtime.scheduler.speculation import hindrance


@dataclass(frozen=True, slots=True)
class ModelStats:
    """Requests by state; of sequences, those parked and all that hold a slot (also while being released)."""

    queued: int
    preparing: int
    prefilling: int
    running: int
    replaying: int
    parked_sequences: int
    used_slots: int
    max_slots: int


@dataclass(frozen=True, slots=True)
class PrefixStats:
    """Counts since the start, of a tenant's own scope and requests, or of all.

    hits_memory, hits_file: sequences that began with a restored prefix. misses: by reason, "none" when nothing was there to
    restore, otherwise what was wrong with a file. cached_tokens, computed_tokens: of the prompts. followed: sequences that
    waited for another to compute what they share; followed_tokens: what that spared. published, rejected (by reason), evictions:
    of files.
    num_files, file_bytes: on the disk now, as far as known.
    """

    hits_memory: int
    hits_file: int
    misses: Mapping[str, int]
    cached_tokens: int
    computed_tokens: int
    followed: int
    followed_tokens: int
    published: int
    rejected: Mapping[str, int]
    evictions: int
    num_files: int
    file_bytes: int


@dataclass(frozen=True, slots=True)
class TenantStats:
    """queued: its requests that have not started; running: those with a slot; tokens_served: generated for it, ever."""

    queued: int
    running: int
    tokens_served: int
    prefixes: PrefixStats


@dataclass(frozen=True, slots=True)
class PairingStats:
    """One target's speculation, counted since the start. drafter: a model's name, or "lookup".

    state: "waiting" for the drafter or the target to be loaded, "refused", "away" (the drafter was late), or "paired". reason: why
    they are not paired, where an app can mend it. guests: sequences that the drafter holds. rounds: drafts verified; proposed,
    accepted: tokens of them. ahead, ahead_hits: drafts made while the target verified, and those that could be used. late: rounds
    that the drafter did not answer in time. Seconds that rounds waited: for drafts (next to nothing when made ahead), for verify
    steps, and for what neither explains, messages and scheduling. controller: what it measured and chose, by batch size.
    """

    target: str
    drafter: str
    state: Literal["waiting", "refused", "away", "paired"]
    reason: str | None
    guests: int
    rounds: int
    proposed: int
    accepted: int
    ahead: int
    ahead_hits: int
    late: int
    draft_seconds: float
    verify_seconds: float
    wire_seconds: float
    controller: tuple[DraftStats, ...]


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """By the names that the app gave; `finished`, `cancelled`, `failed` and `rejected` count requests since the start, and
    `replayed` how often one lost its worker and went on in the next; `preempted` how often a sequence had to make
    room."""

    models: Mapping[str, ModelStats]
    tenants: Mapping[str, TenantStats]
    finished: int
    cancelled: int
    failed: int
    rejected: int
    prefixes: PrefixStats
    pairings: tuple[PairingStats, ...] = ()
    replayed: int = 0
    preempted: int = 0


def snapshot(book: Book) -> SchedulerStats:
    models: dict[str, ModelStats] = {}
    for model in book.models.values():
        name = public_name(model.name)
        one = _model_stats(book, model)
        models[name] = _sum(models[name], one) if name in models else one
    files: dict[TenantId | None, list[Entry]] = {}
    for entry in book.prefixes.index.entries():
        files.setdefault(entry.tenant, []).append(entry)
    tenants: dict[str, TenantStats] = {
        tenant.id: TenantStats(
            queued=sum(num_unstarted(flow) for flow in tenant.flows.values()),
            running=tenant.num_running,
            tokens_served=tenant.num_tokens_served,
            prefixes=_prefix_stats([book.prefixes.counts[tenant.id]], files.get(tenant.id, [])),
        )
        for tenant in book.tenants.values()
    }
    return SchedulerStats(
        models=models,
        tenants=tenants,
        finished=book.num_ended[RequestState.FINISHED],
        cancelled=book.num_ended[RequestState.CANCELLED],
        failed=book.num_ended[RequestState.FAILED],
        rejected=book.num_rejected,
        prefixes=_prefix_stats(list(book.prefixes.counts.values()), book.prefixes.index.entries()),
        pairings=tuple(_pairing_stats(book, model.pairing) for model in book.models.values() if model.pairing is not None),
        replayed=book.num_replayed,
        preempted=book.num_preempted,
    )


def _pairing_stats(book: Book, pairing: Pairing) -> PairingStats:
    counts = pairing.counts
    state: Literal["waiting", "refused", "away", "paired"] = "paired"
    if not pairing.is_attached:
        state = "waiting" if pairing.refused is None else "refused"
    elif pairing.away_until is not None:
        state = "away"
    return PairingStats(
        target=public_name(pairing.target),
        drafter=pairing.drafter,
        state=state,
        reason=hindrance(book, pairing),
        guests=len(pairing.guests),
        rounds=counts.rounds,
        proposed=counts.proposed,
        accepted=counts.accepted,
        ahead=counts.ahead,
        ahead_hits=counts.ahead_hits,
        late=counts.late,
        draft_seconds=counts.draft_seconds,
        verify_seconds=counts.verify_seconds,
        wire_seconds=counts.wire_seconds,
        controller=pairing.controller.stats(),
    )


def _prefix_stats(counts: list[Counts], entries: list[Entry]) -> PrefixStats:
    return PrefixStats(
        hits_memory=sum(one.hits_memory for one in counts),
        hits_file=sum(one.hits_file for one in counts),
        misses=dict(sum((one.misses for one in counts), Counter())),
        cached_tokens=sum(one.cached_tokens for one in counts),
        computed_tokens=sum(one.computed_tokens for one in counts),
        followed=sum(one.followed for one in counts),
        followed_tokens=sum(one.followed_tokens for one in counts),
        published=sum(one.published for one in counts),
        rejected=dict(sum((one.rejected for one in counts), Counter())),
        evictions=sum(one.evictions for one in counts),
        num_files=len(entries),
        file_bytes=sum(entry.num_bytes for entry in entries),
    )


def _sum(one: ModelStats, other: ModelStats) -> ModelStats:
    """Of a model that is being swapped: of its old and its new workers."""
    return ModelStats(*(getattr(one, part.name) + getattr(other, part.name) for part in fields(ModelStats)))


def _model_stats(book: Book, model: Model) -> ModelStats:
    states = Counter(record.state for record in book.requests.values() if record.replica == model.name)
    return ModelStats(
        queued=states[RequestState.QUEUED],
        preparing=states[RequestState.PREPARING],
        prefilling=states[RequestState.PREFILLING],
        running=states[RequestState.RUNNING],
        replaying=states[RequestState.REPLAYING],
        parked_sequences=sum(sequence.state is SequenceState.PARKED for sequence in model.sequences.values()),
        used_slots=len(model.sequences),
        max_slots=model.max_slots,
    )
