"""Request and Sequence: what a client asked and the token series made for it; their states and allowed moves."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from runtime.errors import TroupeError
from runtime.protocol.commands import Prompt, Sampling
from runtime.protocol.events import FinishReason, TokenLogprob
from runtime.protocol.ids import ModelName, RequestId, SequenceId, TenantId
from runtime.protocol.tokens import TokenIds

Priority = Literal["interactive", "background"]


class RequestState(Enum):
    QUEUED = "queued"
    PREPARING = "preparing"
    PREFILLING = "prefilling"
    RUNNING = "running"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"


REQUEST_MOVES: dict[RequestState, frozenset[RequestState]] = {
    RequestState.QUEUED: frozenset({RequestState.PREPARING, RequestState.CANCELLED, RequestState.FAILED}),
    RequestState.PREPARING: frozenset({RequestState.PREFILLING, RequestState.CANCELLED, RequestState.FAILED}),
    RequestState.PREFILLING: frozenset({RequestState.RUNNING, RequestState.FINISHED, RequestState.CANCELLED, RequestState.FAILED}),
    RequestState.RUNNING: frozenset({RequestState.FINISHED, RequestState.CANCELLED, RequestState.FAILED}),
    RequestState.FINISHED: frozenset(),
    RequestState.CANCELLED: frozenset(),
    RequestState.FAILED: frozenset(),
}


class SequenceState(Enum):
    WAITING = "waiting"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    PARKED = "parked"
    RELEASED = "released"


SEQUENCE_MOVES: dict[SequenceState, frozenset[SequenceState]] = {
    SequenceState.WAITING: frozenset({SequenceState.PREFILLING, SequenceState.RELEASED}),
    SequenceState.PREFILLING: frozenset({SequenceState.DECODING, SequenceState.RELEASED}),
    SequenceState.DECODING: frozenset({SequenceState.PARKED, SequenceState.RELEASED}),
    SequenceState.PARKED: frozenset({SequenceState.DECODING, SequenceState.RELEASED}),
    SequenceState.RELEASED: frozenset(),
}


@dataclass(frozen=True, slots=True)
class Request:
    """What a client asked, validated by the host; never changes.

    `max_tokens` per sequence. `num_sequences`: sequence i draws with `sequence_seed(sampling.seed, i)`. `windowed`: the client
    iterates, so sequences run at most `Settings.stream_window_tokens` ahead of what it has read; otherwise freely.
    """

    id: RequestId
    tenant: TenantId
    model: ModelName
    prompt: Prompt
    sampling: Sampling
    max_tokens: int
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    num_sequences: int = 1
    priority: Priority = "interactive"
    deadline_seconds: float | None = None
    windowed: bool = True


@dataclass(slots=True)
class Sequence:
    """One token series. `committed` is the replay log: exactly what the client's stream holds or will hold."""

    id: SequenceId
    number: int
    state: SequenceState = SequenceState.WAITING
    committed: list[int] = field(default_factory=list)
    limit: int = 0
    read_length: int = 0
    finish: FinishReason | None = None


# -- what a client's stream receives ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Piece:
    """New committed tokens of one sequence and the text that may be shown by now."""

    number: int
    tokens: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...]
    finish: FinishReason | None
    matched_stop: str | None


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds since the request was submitted; None when that point was never reached.

    queue: until it was taken from the queue; prefill: inside its prefill steps (a duration); first_token: until its first token.
    """

    queue_seconds: float | None
    prefill_seconds: float | None
    first_token_seconds: float | None
    total_seconds: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a request ended: by itself (`error` None), cancelled, or with an error. `prompt_tokens`: its tokens once prepared."""

    state: Literal["finished", "cancelled", "failed"]
    prompt_tokens: TokenIds
    timings: Timings
    fingerprint: str
    warnings: tuple[str, ...] = ()
    error: TroupeError | None = None
