"""A typed snapshot of the scheduler for people and user interfaces."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from runtime.scheduler.admission import num_unstarted
from runtime.scheduler.book import Book, Model
from runtime.scheduler.request import RequestState, SequenceState


@dataclass(frozen=True, slots=True)
class ModelStats:
    """Requests by state; of sequences, those parked and all that hold a slot (also while being released)."""

    queued: int
    preparing: int
    prefilling: int
    running: int
    parked_sequences: int
    used_slots: int
    max_slots: int


@dataclass(frozen=True, slots=True)
class TenantStats:
    """queued: its requests that have not started; running: those with a slot; tokens_served: generated for it, ever."""

    queued: int
    running: int
    tokens_served: int


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """By the names that the app gave; `finished`, `cancelled`, `failed` and `rejected` count requests since the start."""

    models: Mapping[str, ModelStats]
    tenants: Mapping[str, TenantStats]
    finished: int
    cancelled: int
    failed: int
    rejected: int


def snapshot(book: Book) -> SchedulerStats:
    models: dict[str, ModelStats] = {name: _model_stats(book, model) for name, model in book.models.items()}
    tenants: dict[str, TenantStats] = {
        tenant.id: TenantStats(
            queued=sum(num_unstarted(flow) for flow in tenant.flows.values()),
            running=tenant.num_running,
            tokens_served=tenant.num_tokens_served,
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
    )


def _model_stats(book: Book, model: Model) -> ModelStats:
    states = Counter(record.state for record in book.requests.values() if record.request.model == model.name)
    return ModelStats(
        queued=states[RequestState.QUEUED],
        preparing=states[RequestState.PREPARING],
        prefilling=states[RequestState.PREFILLING],
        running=states[RequestState.RUNNING],
        parked_sequences=sum(sequence.state is SequenceState.PARKED for sequence in model.sequences.values()),
        used_slots=len(model.sequences),
        max_slots=model.max_slots,
    )
