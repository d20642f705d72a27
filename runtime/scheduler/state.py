"""What to do about each stimulus: `SchedulerState.handle`, the whole of the scheduler's deciding.

Pure and synchronous: no clock, no I/O, no task. This file takes stimuli apart and answers clients and the supervisor; a
worker's words are taken in by progress.py, work is handed out by placement.py, the records live in book.py.
"""

from __future__ import annotations

from typing import assert_never

from runtime.config import Settings
from runtime.errors import DeadlineExceeded, InvalidRequest, ModelError, ModelNotLoaded, ModelUnavailable, TroupeError
from runtime.protocol.ids import ModelName, RequestId, public_name
from runtime.scheduler import grants, groups, keeping, progress, replaying, room, speculation
from runtime.scheduler.admission import refusal
from runtime.scheduler.book import Book
from runtime.scheduler.drafting import DraftLength
from runtime.scheduler.model import Model
from runtime.scheduler.pairing import Pairing
from runtime.scheduler.placement import place
from runtime.scheduler.request import Request, RequestRecord, RequestState
from runtime.scheduler.stimuli import (
    Accept,
    Cancel,
    EraseTenant,
    FilesSeen,
    GroupsExchanged,
    Instruction,
    MemorySet,
    ModelAdded,
    ModelRemoved,
    Read,
    Reject,
    ReleasePrefix,
    Stimulus,
    Submit,
    TenantSet,
    Tick,
    Unwindow,
    WorkerLost,
    WorkerSaid,
    WorkerUp,
)
from runtime.scheduler.validation import validate


class SchedulerState:
    """All that is known of models, tenants and requests, and what follows from what happens."""

    def __init__(self, settings: Settings) -> None:
        self.book = Book(settings)

    def handle(self, stimulus: Stimulus, now: float) -> list[Instruction]:
        """Take in one stimulus; `now` in seconds of the caller's monotonic clock. Instructions are to be carried out in order.

        :raises IllegalMove: a fault of the scheduler itself; no stimulus, however odd, should cause it.
        """
        book = self.book
        book.out = []
        self._take_in(stimulus, now)
        while book.touched:
            models, book.touched = list(book.touched.values()), {}
            for model in models:
                if model.needs_placing:
                    book.flush(model)  # a released row is kept before another that may go on from it begins
                    place(book, model, now)
                book.flush(model)
        while book.disturbed:
            pairings, book.disturbed = list(book.disturbed.values()), {}
            for pairing in pairings:
                speculation.advance(book, pairing, now)
        if book.wake_at is None and isinstance(stimulus, Tick):
            book.plan_wake()
        return book.out

    def validate(self) -> None:
        """Recount everything. :raises AssertionError: naming what does not add up."""
        validate(self.book)

    def _take_in(self, stimulus: Stimulus, now: float) -> None:
        book = self.book
        if isinstance(stimulus, WorkerSaid):  # first, being by far the most frequent
            model = book.models.get(stimulus.model)
            if model is not None and model.incarnation == stimulus.incarnation and not model.has_breached:
                progress.hear(book, model, stimulus.event, now)
            return
        match stimulus:
            case Read(request=request, number=number, num_tokens=num_tokens):
                if (record := self._live(request)) is not None:
                    grants.read(book, book.models[record.replica], record, number, num_tokens)
            case Unwindow(request=request):
                if (record := self._live(request)) is not None:
                    grants.unwindow(book, book.models[record.replica], record)
            case Submit(request=wanted):
                self._submit(wanted, now)
            case Cancel(request=request):
                if (record := self._live(request)) is not None:
                    book.end(record, RequestState.CANCELLED, None, now)
            case Tick():
                self._expire(now)
            case TenantSet(tenant=name, spec=spec):
                book.tenant(name).spec = spec
                book.prefixes.set_cap(name, spec.prefix_disk_bytes)
                for model_name in book.tenant(name).flows:
                    book.look_again(book.models[model_name])
            case ReleasePrefix(request=request):
                book.unpin(request)
            case FilesSeen():
                keeping.files_seen(book, stimulus)
            case EraseTenant():
                keeping.erase(book, stimulus)
            case ModelAdded():
                self._model_added(stimulus)
            case WorkerUp():
                self._worker_up(stimulus, now)
            case MemorySet(model=name, max_tokens=max_tokens):
                self._memory_set(name, max_tokens)
            case WorkerLost():
                self._worker_lost(stimulus, now)
            case ModelRemoved(model=name, error=error):
                self._model_removed(name, error, now)
            case GroupsExchanged(group=group, other=other):
                groups.exchange(book, group, other)
            case _:
                assert_never(stimulus)

    def _live(self, request: RequestId) -> RequestRecord | None:
        record = self.book.requests.get(request)
        return None if record is None or record.has_ended else record

    # -- clients ----------------------------------------------------------------------------------------------

    def _submit(self, request: Request, now: float) -> None:
        model = groups.choose(self.book, request.model, self.book.tenant(request.tenant))
        error = self._objection(request, model, now)
        if error is not None:
            self.book.num_rejected += 1
            self.book.out.append(Reject(request.id, error))
            return
        assert model is not None
        self.book.out.append(Accept(request.id))
        self.book.enqueue(model, request, now)

    def _objection(self, request: Request, model: Model | None, now: float) -> TroupeError | None:
        book = self.book
        if request.id in book.requests:
            return InvalidRequest("id", f"request {request.id} exists already; take a new one")
        if model is None:
            loaded = ", ".join(dict.fromkeys(repr(str(public_name(group))) for group in book.groups)) or "none"
            return ModelNotLoaded(request.model, f"is not loaded; loaded: {loaded}")
        if model.unavailable is not None:
            return model.unavailable.fresh()
        if request.speculate:
            if model.pairing is None:
                return InvalidRequest(
                    "speculate", f"got True, but model {model.group!r} has no drafter; load it with ModelSpec(drafter=…)"
                )
            reason = speculation.hindrance(book, model.pairing)
            if reason is not None:
                return InvalidRequest("speculate", f"got True, but model {model.group!r} cannot: {reason}")
        return refusal(book, model, book.tenant(request.tenant), now)

    def _expire(self, now: float) -> None:
        book = self.book
        for record in book.due(now):
            seconds = record.request.deadline_seconds
            error = DeadlineExceeded(f"the request was still {record.state.value} after its deadline_seconds={seconds}")
            book.end(record, RequestState.FAILED, error, now)
        for model in book.models.values():
            if model.collect_until is not None and model.collect_until <= now:
                book.look_again(model)
            pairing = model.pairing
            if pairing is not None and pairing.wake_at is not None and pairing.wake_at <= now:
                pairing.wake_at = None
                book.disturb(pairing)
        book.wake_at = None

    # -- the supervisor -----------------------------------------------------------------------------------------

    def _model_added(self, stimulus: ModelAdded) -> None:
        group = stimulus.group or stimulus.model
        if stimulus.model not in self.book.models:
            self.book.models[stimulus.model] = Model(stimulus.model, stimulus.max_slots, group)
            self.book.groups.setdefault(group, []).append(stimulus.model)
        model = self.book.models[stimulus.model]
        if model.incarnation is None:
            model.max_slots = stimulus.max_slots
            model.pairing = None
            if stimulus.drafter is not None:
                controller = DraftLength(stimulus.draft_tokens)
                model.pairing = Pairing(model.name, stimulus.drafter, controller, stimulus.draft_ahead)
        if model.unavailable is not None:
            model.unavailable, model.last_incarnation = None, 0  # a new supervisor may count from 1 again
        groups.choose_drafters(self.book)

    def _worker_up(self, stimulus: WorkerUp, now: float) -> None:
        model = self.book.models.get(stimulus.model)
        if model is None or stimulus.incarnation <= model.last_incarnation:
            return  # unloaded meanwhile, or said before
        if model.incarnation is not None:
            # The supervisor announces every loss before; were it to forget, the new worker must not inherit the old one's slots.
            error = ModelUnavailable(model.name, "its worker was replaced")
            self._lose(model, error, now, restarting=True)
        model.incarnation = model.last_incarnation = stimulus.incarnation
        model.facts = stimulus.facts
        model.unavailable = None
        replaying.check_weights(self.book, model, now)
        self.book.look_again(model)
        speculation.attach(self.book, model.name)

    def _memory_set(self, name: ModelName, max_tokens: int | None) -> None:
        model = self.book.models.get(name)
        if model is not None:
            model.max_tokens = max_tokens
            room.enforce(self.book, model)
            self.book.look_again(model)

    def _worker_lost(self, stimulus: WorkerLost, now: float) -> None:
        model = self.book.models.get(stimulus.model)
        if model is None or (model.incarnation is not None and stimulus.incarnation < model.incarnation):
            return
        model.last_incarnation = max(model.last_incarnation, stimulus.incarnation)
        error = stimulus.error
        self._lose(model, error, now, restarting=stimulus.restarting)
        if not stimulus.restarting:
            message = f"its worker ended and is not started again ({error})"
            model.unavailable = error if isinstance(error, ModelError) else ModelUnavailable(model.name, message)

    def _lose(self, model: Model, error: TroupeError, now: float, *, restarting: bool, is_death: bool = True) -> None:
        """Its requests wait for its next worker, go to another replica, or end with the error."""

        def settle(record: RequestRecord) -> None:
            if restarting or groups.has_refuge(self.book, model, record):
                replaying.suspend(self.book, model, record, error if is_death else None, now)
            else:
                self.book.fail(record, error, now)

        self.book.lose(model, settle)
        groups.scatter(self.book, model)
        if not restarting:  # whoever was found to be a suspect just now goes nowhere, and no worker will come here
            for record in groups.staying(self.book, model):
                self.book.fail(record, error, now)

    def _model_removed(self, name: ModelName, error: TroupeError, now: float) -> None:
        model = self.book.models.get(name)
        if model is None:
            return
        self._lose(model, error, now, restarting=False, is_death=False)
        for flow in model.fair.flows.values():
            del flow.tenant.flows[name]
        del self.book.models[name]
        self.book.groups[model.group].remove(name)
        if not self.book.groups[model.group]:
            del self.book.groups[model.group]
        self.book.touched.pop(name, None)
        for successor in groups.choose_drafters(self.book):
            speculation.attach(self.book, successor)
