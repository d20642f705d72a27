"""A scheduler under test with hands on all its sides: stimuli in, what it said sorted by receiver, all recounted each time."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from runtime.config import Settings, TenantSpec
from runtime.errors import ExitReport, TroupeError, WorkerCrashed
from runtime.protocol.commands import AnyCommand, Grant, Prefill, PrefillRow, Prepare, Release, Sampling, TextPrompt
from runtime.protocol.events import (
    AnyEvent,
    Capabilities,
    FinishReason,
    ModelFacts,
    Prefilled,
    Prepared,
    Released,
    StepDone,
    StepRow,
)
from runtime.protocol.ids import Incarnation, ModelName, RequestId, SequenceId, TenantId
from runtime.protocol.tokens import TokenIds
from runtime.scheduler.request import Outcome, Piece, Request, RequestRecord, RequestState
from runtime.scheduler.state import SchedulerState
from runtime.scheduler.stimuli import (
    Accept,
    Breach,
    Cancel,
    Deliver,
    End,
    Instruction,
    ModelAdded,
    Read,
    Reject,
    Send,
    Stimulus,
    Submit,
    TenantSet,
    WakeAt,
    WorkerLost,
    WorkerSaid,
    WorkerUp,
)

MODEL = ModelName("m")


def facts(context_length: int = 4096, fingerprint: str = "print") -> ModelFacts:
    capabilities = Capabilities(batched_decode=True, padded_prefill=True, chunked_prefill=True, rollback="free", verify=True)
    return ModelFacts(
        kind="fake",
        model_type="fake",
        fingerprint=fingerprint,
        vocabulary_digest="digest",
        vocabulary_size=256,
        context_length=context_length,
        bytes_per_token=1,
        weights_bytes=1,
        eos_ids=(0,),
        chat_template="checkpoint",
        chat_restrictions=(),
        capabilities=capabilities,
        blas="reference",
        load_seconds=0.1,
    )


def crash(model: str = MODEL, incarnation: int = 1) -> WorkerCrashed:
    return WorkerCrashed(ExitReport(model, 1234, incarnation, None, "SIGKILL", "decode", 1.0, ""))


@dataclass
class House:
    """`now` is set by the test. `sent`, `pieces`, `outcomes`, `breaches`, `wake_at` are what the scheduler said so far.

    `recount_every`: stimuli between two recounts, for tests with many requests.
    """

    settings: Settings = field(default_factory=Settings)
    now: float = 100.0
    sent: list[tuple[ModelName, Incarnation, AnyCommand]] = field(default_factory=list)
    pieces: dict[RequestId, list[Piece]] = field(default_factory=lambda: defaultdict(list))
    outcomes: dict[RequestId, Outcome] = field(default_factory=dict)
    breaches: list[Breach] = field(default_factory=list)
    wake_at: float | None = None
    recount_every: int = 1
    num_handled: int = 0
    prompt_lengths: dict[RequestId, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.state = SchedulerState(self.settings)
        self._ids = itertools.count(1)

    def do(self, stimulus: Stimulus) -> list[Instruction]:
        instructions = self.state.handle(stimulus, self.now)
        for instruction in instructions:
            self._note(instruction)
        self.num_handled += 1
        if self.num_handled % self.recount_every == 0:
            self.state.validate()
        return instructions

    def _note(self, instruction: Instruction) -> None:
        match instruction:
            case Send(model=model, incarnation=incarnation, command=command):
                self.sent.append((model, incarnation, command))
            case Deliver(request=request, piece=piece):
                assert request not in self.outcomes, "a piece after the end"
                self.pieces[request].append(piece)
            case End(request=request, outcome=outcome):
                assert request not in self.outcomes, "a second end"
                self.outcomes[request] = outcome
            case Breach():
                self.breaches.append(instruction)
            case WakeAt(when=when):
                self.wake_at = when
            case Accept() | Reject():
                pass

    # -- supervisor ---------------------------------------------------------------------------------------------

    def add(self, model: ModelName = MODEL, *, slots: int = 4) -> None:
        self.do(ModelAdded(model, slots))

    def up(self, model: ModelName = MODEL, *, slots: int = 4, incarnation: int = 1, context_length: int = 4096) -> None:
        """A model with its worker ready."""
        if model not in self.state.book.models:
            self.add(model, slots=slots)
        self.do(WorkerUp(model, Incarnation(incarnation), facts(context_length)))

    def lose(self, model: ModelName = MODEL, *, incarnation: int = 1, restarting: bool = True) -> TroupeError:
        error = crash(model, incarnation)
        self.do(WorkerLost(model, Incarnation(incarnation), error, error.report, restarting))
        return error

    # -- clients --------------------------------------------------------------------------------------------------

    def tenant(self, name: str, **spec: Any) -> None:
        self.do(TenantSet(TenantId(name), TenantSpec(**spec)))

    def request(self, tenant: str = "t", model: ModelName = MODEL, *, prompt_length: int = 3, **changes: Any) -> Request:
        options: dict[str, Any] = {"max_tokens": 8, "windowed": False, "sampling": Sampling(seed=7)} | changes
        text = "x" * (4 * prompt_length - 1)
        made = Request(RequestId(next(self._ids)), TenantId(tenant), model, TextPrompt(text), **options)
        self.prompt_lengths[made.id] = prompt_length
        return made

    def submit(self, tenant: str = "t", model: ModelName = MODEL, **changes: Any) -> RequestId:
        """Its id. :raises TroupeError: the error of a Reject."""
        request = self.request(tenant, model, **changes)
        answers = self.do(Submit(request))
        assert isinstance(answers[0], Accept | Reject)
        if isinstance(answers[0], Reject):
            assert len(answers) == 1
            raise answers[0].error
        return request.id

    def cancel(self, request: RequestId) -> None:
        self.do(Cancel(request))

    def read(self, request: RequestId, num_tokens: int, number: int = 0) -> None:
        self.do(Read(request, number, num_tokens))

    # -- the worker -----------------------------------------------------------------------------------------------

    def say(self, event: AnyEvent, model: ModelName = MODEL, incarnation: int = 1) -> list[Instruction]:
        return self.do(WorkerSaid(model, Incarnation(incarnation), event))

    def prepared(self, request: RequestId, **address: Any) -> None:
        self.say(Prepared(request, TokenIds(range(1, self.prompt_lengths[request] + 1))), **address)

    def prefilled(self, *sequences: SequenceId, seconds: float = 0.5, **address: Any) -> None:
        book = self.state.book
        lengths = {s.id: s.length for model in book.models.values() for s in model.sequences.values()}
        self.say(Prefilled(tuple((sequence, lengths.get(sequence, 1)) for sequence in sequences), seconds), **address)

    def step(self, *sequences: SequenceId, num_steps: int = 1, **address: Any) -> None:
        """One token more for each of these; token = its absolute position."""
        rows = self.state.book.models[address.get("model", MODEL)].sequences
        for _ in range(num_steps):
            said = tuple(StepRow(s, rows[s].length, (rows[s].length,), f"<{rows[s].length}>") for s in sequences)
            self.say(StepDone(1, said), **address)

    def finish(self, *sequences: SequenceId, reason: FinishReason = "stop", **address: Any) -> None:
        rows = self.state.book.models[address.get("model", MODEL)].sequences
        self.say(StepDone(1, tuple(StepRow(s, rows[s].length, (), "", reason) for s in sequences)), **address)

    def released(self, *sequences: SequenceId, requests: tuple[RequestId, ...] = (), **address: Any) -> None:
        self.say(Released(requests, sequences, 1), **address)

    # -- looking ----------------------------------------------------------------------------------------------------

    def commands(self, *kinds: type[AnyCommand]) -> list[Any]:
        return [command for _, _, command in self.sent if isinstance(command, kinds)]

    def asked_to_prepare(self) -> list[RequestId]:
        return [command.request for command in self.commands(Prepare)]

    def rows(self) -> list[PrefillRow]:
        """All rows ever sent to be prefilled, in order."""
        return [row for command in self.commands(Prefill) for row in command.rows]

    def limits(self) -> list[tuple[SequenceId, int]]:
        return [limit for command in self.commands(Grant) for limit in command.limits]

    def told_to_release(self) -> tuple[list[RequestId], list[SequenceId]]:
        commands = self.commands(Release)
        return [r for command in commands for r in command.requests], [s for command in commands for s in command.sequences]

    def record(self, request: RequestId) -> RequestRecord:
        return self.state.book.requests[request]

    def state_of(self, request: RequestId) -> RequestState:
        return self.record(request).state

    def sequence(self, request: RequestId, number: int = 0) -> SequenceId:
        return self.record(request).sequences[number].id

    def tokens(self, request: RequestId, number: int = 0) -> list[int]:
        return [token for piece in self.pieces[request] if piece.number == number for token in piece.tokens]

    def start(self, tenant: str = "t", **changes: Any) -> tuple[RequestId, SequenceId]:
        """A request that decodes in its slot."""
        request = self.submit(tenant, **changes)
        self.prepared(request)
        sequence = self.sequence(request)
        self.prefilled(sequence)
        assert self.state_of(request) is RequestState.RUNNING
        return request, sequence

    def end(self, sequence: SequenceId) -> None:
        self.finish(sequence)
        self.released(sequence)
