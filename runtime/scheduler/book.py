"""The scheduler's tables, and the few ways to change them: enqueue, end, let go, release, lose.

Everything here is plain synchronous bookkeeping; who may start and what a worker's word means is decided in admission.py,
placement.py and progress.py. Instructions collect in `Book.out`; what a worker is to be told collects per model and is
sent as few commands at the end of each stimulus (`flush`).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Literal

from runtime.config import Settings, TenantSpec
from runtime.errors import TroupeError
from runtime.protocol.commands import AnyCommand, Grant, Release, Unpin
from runtime.protocol.ids import ModelName, RequestId, SequenceId, TenantId
from runtime.protocol.tokens import TokenIds
from runtime.scheduler.fairness import Flow, Tenant
from runtime.scheduler.model import Model
from runtime.scheduler.pairing import Pairing
from runtime.scheduler.prefixes import Prefixes
from runtime.scheduler.request import (
    Outcome,
    Request,
    RequestRecord,
    RequestState,
    Sequence,
    SequenceState,
    Timings,
    move_request,
    move_sequence,
)
from runtime.scheduler.stimuli import Breach, End, Instruction, Send, WakeAt

_OUTCOMES: dict[RequestState, Literal["finished", "cancelled", "failed"]] = {
    RequestState.FINISHED: "finished",
    RequestState.CANCELLED: "cancelled",
    RequestState.FAILED: "failed",
}
_SMOOTHING = 0.2


class Book:
    """All records. `models` by replica, `groups` by the name that apps use. `out` collects the instructions of the stimulus being
    handled; `touched` the models to flush after it, and `disturbed`, by target, the pairings to advance."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.models: dict[ModelName, Model] = {}
        self.groups: dict[ModelName, list[ModelName]] = {}
        self.tenants: dict[TenantId, Tenant] = {}
        self.requests: dict[RequestId, RequestRecord] = {}
        self.next_sequence = 1
        self.deadlines: list[tuple[float, RequestId]] = []
        self.wake_at: float | None = None
        self.out: list[Instruction] = []
        self.touched: dict[ModelName, Model] = {}
        self.disturbed: dict[ModelName, Pairing] = {}
        self.num_ended: dict[RequestState, int] = dict.fromkeys(_OUTCOMES, 0)
        self.num_rejected = 0
        self.num_replayed = 0
        self.num_preempted = 0
        self.prefixes = Prefixes(settings)

    def touch(self, model: Model) -> None:
        """Have what is to be told to its worker sent after this stimulus."""
        self.touched[model.name] = model

    def look_again(self, model: Model) -> None:
        """Have placement look at it after this stimulus."""
        model.needs_placing = True
        self.touched[model.name] = model

    def disturb(self, pairing: Pairing) -> None:
        """Have what its state asks for sent after this stimulus."""
        self.disturbed[pairing.target] = pairing

    def new_sequence_id(self) -> SequenceId:
        self.next_sequence += 1
        return SequenceId(self.next_sequence - 1)

    def tenant(self, name: TenantId) -> Tenant:
        if name not in self.tenants:
            self.tenants[name] = Tenant(name, TenantSpec())
        return self.tenants[name]

    def flow(self, model: Model, tenant: Tenant) -> Flow:
        flow = tenant.flows.get(model.name)
        if flow is None:
            flow = tenant.flows[model.name] = model.fair.flows[tenant.id] = Flow(tenant)
        return flow

    # -- a request's way in and out -------------------------------------------------------------------------

    def enqueue(self, model: Model, request: Request, now: float) -> None:
        flow = self.flow(model, self.tenant(request.tenant))
        flow.tenant.last_replicas[model.group] = model.name
        model.fair.settle()
        record = RequestRecord(request, model.name, flow, submitted_at=now, windowed=request.windowed, scope=request.scope)
        self.requests[request.id] = record
        flow.queued.add(record)
        model.num_unstarted += 1
        self.look_again(model)
        if request.deadline_seconds is not None:
            if len(self.deadlines) > 64 + 2 * len(self.requests):  # mostly of requests that ended in time
                self.deadlines = [entry for entry in self.deadlines if not self._is_over(entry[1])]
                heapq.heapify(self.deadlines)
            heapq.heappush(self.deadlines, (now + request.deadline_seconds, request.id))
            self.plan_wake()

    def end(self, record: RequestRecord, state: RequestState, error: TroupeError | None, now: float) -> None:
        """The stream ends here and now. What the worker holds of the request is released; the record stays until it confirms."""
        model, flow = self.models[record.replica], record.flow
        if record.state is RequestState.QUEUED:
            flow.queued.discard(record)
        elif record.prompt_tokens is None:
            del flow.preparing[record.request.id]
            model.requests_to_release.append(record.request.id)
        else:
            flow.ready.discard(record)
        if record.has_started:
            flow.tenant.num_running -= 1
            for name in flow.tenant.flows:  # its max_running may have been in the way in any of them
                self.look_again(self.models[name])
        else:
            model.num_unstarted -= 1
        move_request(record, state)
        model.suspects.pop(record.request.id, None)
        for sequence in record.sequences:
            self.let_go(model, sequence)
        if state is not RequestState.FINISHED:
            self.unpin(record.request.id)  # its client gets no handle to release
        self.out.append(End(record.request.id, self._outcome(record, error, now)))
        self.num_ended[state] += 1
        self.look_again(model)
        self.forget_if_free(model, record)

    def _outcome(self, record: RequestRecord, error: TroupeError | None, now: float) -> Outcome:
        start = record.submitted_at
        timings = Timings(
            queue_seconds=None if record.started_at is None else record.started_at - start,
            prefill_seconds=record.prefill_seconds,
            first_token_seconds=None if record.first_token_at is None else record.first_token_at - start,
            total_seconds=now - start,
            restore_seconds=record.restore_seconds,
        )
        prompt_tokens = TokenIds() if record.prompt_tokens is None else record.prompt_tokens
        return Outcome(
            _OUTCOMES[record.state],
            prompt_tokens,
            timings,
            record.fingerprint,
            (*record.warnings, *self._unheard(record)),
            error,
            cached_tokens=tuple(sequence.cached_length or 0 for sequence in record.sequences),
            pinned_length=record.pinned_length,
            proposed_tokens=tuple(sequence.num_proposed for sequence in record.sequences),
            accepted_tokens=tuple(sequence.num_accepted for sequence in record.sequences),
        )

    def _unheard(self, record: RequestRecord) -> tuple[str, ...]:
        """What it asked for and did not get."""
        is_finished = record.state is RequestState.FINISHED
        if is_finished and record.request.speculate and not any(each.num_proposed for each in record.sequences):
            return ("speculate: nothing was proposed for this request; rt.stats().scheduler.pairings says what its drafter does",)
        return ()

    def unpin(self, request: RequestId) -> None:
        """What is pinned for it, now or by what is still on its way from the worker, may be forgotten. Harmless when nothing is."""
        if (record := self.requests.get(request)) is not None:
            record.is_unpinned = True
        pin = self.prefixes.unpin(request)
        if pin is not None and self.models[pin.model].can_work:
            self.send(self.models[pin.model], Unpin((pin.sequence,)))

    def forget_if_free(self, model: Model, record: RequestRecord) -> None:
        """Drop an ended record once the worker holds nothing of it."""
        if not record.has_ended or record.request.id in model.preparing:
            return
        if all(sequence.state is SequenceState.RELEASED for sequence in record.sequences):
            self.requests.pop(record.request.id, None)

    # -- a sequence's way out -------------------------------------------------------------------------------

    def let_go(self, model: Model, sequence: Sequence) -> None:
        """No more of this sequence: tell the worker, and keep the slot until it says `Released`."""
        if sequence.state is SequenceState.WAITING:
            if sequence.is_returning:
                sequence.is_returning = False
                del model.returning[sequence.id]
                sequence.record.flow.charge(sequence.length - sequence.charged_length)
            move_sequence(sequence, SequenceState.RELEASED)
        elif sequence.state not in (SequenceState.RELEASING, SequenceState.RELEASED):
            sequence.record.flow.charge(sequence.length - sequence.charged_length)
            sequence.charged_length = sequence.length
            self._dismiss(model, sequence, SequenceState.RELEASING)

    def preempt(self, model: Model, sequence: Sequence) -> None:
        """It leaves its slot, and goes on later where its stream stands."""
        self.num_preempted += 1
        self._dismiss(model, sequence, SequenceState.LEAVING)

    def _dismiss(self, model: Model, sequence: Sequence, to: SequenceState) -> None:
        """Tell the worker to forget a sequence, unless it has been told."""
        if not sequence.is_going:
            self.leave_batch(model, sequence)
            if sequence.member is not None and model.pairing is not None:
                model.pairing.leave(sequence.member)
                self.disturb(model.pairing)
            self.prefixes.index.release(sequence.id)
            model.grants.pop(sequence.id, None)
            model.sequences_to_release.append(sequence.id)
            self.touch(model)
        move_sequence(sequence, to)

    def leave_batch(self, model: Model, sequence: Sequence) -> None:
        """It is prefilled, or over; to be called before it moves on."""
        batch, sequence.batch = sequence.batch, None
        if batch is not None:
            batch.num_rows_left -= 1
            if batch.num_rows_left == 0:
                model.batches.remove(batch)
            if batch.num_rows_left == 0 or sequence.leads:
                self.look_again(model)  # there may be room, and nobody waits for it any more, though its batch goes on

    def free_slot(self, model: Model, sequence: Sequence, now: float) -> None:
        """The worker has forgotten a sequence that was let go."""
        move_sequence(sequence, SequenceState.RELEASED)
        del model.sequences[sequence.id]
        model.service_seconds = smoothed(model.service_seconds, now - sequence.placed_at)
        self.look_again(model)
        self.forget_if_free(model, sequence.record)

    # -- a worker's end -------------------------------------------------------------------------------------

    def fail(self, record: RequestRecord, error: TroupeError, now: float) -> None:
        """It ends with an `error` of its own."""
        self.end(record, RequestState.FAILED, error.fresh(), now)

    def lose(self, model: Model, settle: Callable[[RequestRecord], None]) -> None:
        """Its worker is gone, or never came: every slot is free. `settle` says what becomes of each live request of the model, and
        leaves none in a slot."""
        model.incarnation = None
        model.has_breached = False
        for other in self.models.values():
            if other.pairing is not None and other.pairing.drafts_with(model.name):
                other.pairing.detach()
                self.disturb(other.pairing)
        if model.pairing is not None:
            model.pairing.lose_target()
            self.disturb(model.pairing)
        self.prefixes.lose(model.name, model.promises.values())
        model.promises.clear()
        model.hints.clear()
        for record in [record for record in self.requests.values() if record.replica == model.name]:
            if not record.has_ended:
                settle(record)
        for sequence in model.sequences.values():
            move_sequence(sequence, SequenceState.RELEASED)
        lost = [*(sequence.record for sequence in model.sequences.values()), *model.preparing.values()]
        model.sequences.clear()
        model.preparing.clear()
        for record in lost:
            self.forget_if_free(model, record)
        model.requests_to_release.clear()
        model.sequences_to_release.clear()
        model.grants.clear()
        model.collect_until = None

    def breach(self, model: Model, what: str) -> None:
        """Have the worker replaced; its requests go on after the supervisor has said `WorkerLost`."""
        assert model.incarnation is not None
        model.has_breached = True
        model.collect_until = None
        self.out.append(Breach(model.name, model.incarnation, what))

    # -- telling ---------------------------------------------------------------------------------------------

    def send(self, model: Model, command: AnyCommand) -> None:
        assert model.incarnation is not None
        self.out.append(Send(model.name, model.incarnation, command))

    def flush(self, model: Model) -> None:
        """Send the collected releases and grants, each as one command."""
        if model.requests_to_release or model.sequences_to_release:
            if model.can_work:
                self.send(model, Release(tuple(model.requests_to_release), tuple(model.sequences_to_release)))
            model.requests_to_release.clear()
            model.sequences_to_release.clear()
        if model.grants:
            if model.can_work:
                self.send(model, Grant(tuple(model.grants.items())))
            model.grants.clear()

    def plan_wake(self) -> None:
        """Have a Tick come for the next deadline of a live request, or when rows have waited long enough for others."""
        while self.deadlines and self._is_over(self.deadlines[0][1]):
            heapq.heappop(self.deadlines)
        times = [model.collect_until for model in self.models.values() if model.collect_until is not None]
        pairings = (model.pairing for model in self.models.values() if model.pairing is not None)
        times += [pairing.wake_at for pairing in pairings if pairing.wake_at is not None]
        if self.deadlines:
            times.append(self.deadlines[0][0])
        if times and (self.wake_at is None or min(times) < self.wake_at):
            self.wake_at = min(times)
            self.out.append(WakeAt(self.wake_at))

    def due(self, now: float) -> list[RequestRecord]:
        """Requests whose deadline has passed."""
        records = []
        while self.deadlines and self.deadlines[0][0] <= now:
            _, request = heapq.heappop(self.deadlines)
            if not self._is_over(request):
                records.append(self.requests[request])
        return records

    def _is_over(self, request: RequestId) -> bool:
        record = self.requests.get(request)
        return record is None or record.has_ended


def smoothed(average: float | None, value: float) -> float:
    return value if average is None else average + _SMOOTHING * (value - average)
