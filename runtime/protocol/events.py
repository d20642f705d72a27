"""worker → host: everything a worker can say. docs/protocol.md is the authority."""

from __future__ import annotations

from typing import Literal

from runtime.protocol.commands import Wire
from runtime.protocol.ids import RequestId, SequenceId
from runtime.protocol.tokens import TokenIds

LoadFailure = Literal[
    "not_found",  # no such directory, or the hub does not know or cannot reach it
    "malformed_config",  # config.json missing, no JSON, or with fields of the wrong type
    "unsupported_model_type",
    "remote_code_refused",
    "missing_weights",  # no weight files, or parameters missing from them
    "corrupt_weights",  # truncated or unreadable
    "tokenizer",
    "out_of_memory",
    "error",
]

RefusalCode = Literal[
    "invalid_request",  # an id outside the vocabulary, a filter outside its range, an unrenderable prompt
    "context_length_exceeded",
    "template_error",
    "generation_failed",  # non-finite logits, or an engine error that is this row's alone
    "not_ready",  # the command came before Ready or after Shutdown
    "conflict",  # the sequence is already running with other contents
    "malformed",  # the frame was no command at all
]

Phase = Literal["import", "loading", "idle", "prefill", "decode", "stopping"]

FinishReason = Literal["stop", "length"]


class Capabilities(Wire):
    """What the load-time self-test proved for this model; what is False runs one row at a time.

    `rollback`: "free" per-row truncation at no cost, "replay" by restoring a snapshot, "none".
    `notes`: one line for each proof that failed, saying what was tried.
    `prefix`: a row's caches can be copied out and restored into other rows.
    """

    batched_decode: bool
    padded_prefill: bool
    chunked_prefill: bool
    rollback: Literal["free", "replay", "none"]
    notes: tuple[str, ...] = ()
    prefix: bool = False


class ModelFacts(Wire):
    """Facts that only loading reveals. Sizes in bytes; `chat_template` is "checkpoint" or "fallback"."""

    kind: Literal["lm", "fake"]
    model_type: str
    fingerprint: str
    vocabulary_digest: str
    vocabulary_size: int
    context_length: int
    bytes_per_token: int
    weights_bytes: int
    eos_ids: tuple[int, ...]
    chat_template: Literal["checkpoint", "fallback"]
    chat_restrictions: tuple[str, ...]
    capabilities: Capabilities
    blas: str
    load_seconds: float


class Event(Wire):
    """Base of all events."""


class Hello(Event, tag="hello"):
    """Sent before any heavy import. The host compares `version` once and ends a worker that speaks another."""

    version: int
    pid: int
    incarnation: int


class Loading(Event, tag="loading"):
    """Progress of a load. `stage`: "imports", "download", "weights", "tokenizer", "selftest". `total` 0: unknown."""

    stage: str
    done: int = 0
    total: int = 0


class Ready(Event, tag="ready"):
    facts: ModelFacts


class Prepared(Event, tag="prepared"):
    request: RequestId
    tokens: TokenIds
    warnings: tuple[str, ...] = ()


class Prefilled(Event, tag="prefilled"):
    """These sequences' contexts are computed up to `length` (absolute). seconds: time spent inside their prefill steps."""

    rows: tuple[tuple[SequenceId, int], ...]
    seconds: float


class TokenLogprob(Wire):
    """Natural logarithms, of the model's distribution before temperature and filters, after penalties and bias."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class StepRow(Wire):
    """What one step added to one sequence.

    `index`: absolute position of tokens[0] (of the next token, when there is none). An end-of-sequence token ends the sequence
    and is never listed. `text`: what may be shown now, never half a character, nothing of a stop string. `matched_stop`: the
    stop string that ended it.
    """

    sequence: SequenceId
    index: int
    tokens: tuple[int, ...] = ()
    text: str = ""
    finish: FinishReason | None = None
    matched_stop: str | None = None
    logprobs: tuple[TokenLogprob, ...] = ()


class StepDone(Event, tag="step"):
    """One per decode (or final prefill) step, for the whole batch. `step` counts all steps of this incarnation."""

    step: int
    rows: tuple[StepRow, ...]


class Released(Event, tag="released"):
    """The worker has forgotten these; no later event names them. `step`: steps run by this incarnation until then."""

    requests: tuple[RequestId, ...]
    sequences: tuple[SequenceId, ...]
    step: int


class Refused(Event, tag="refused"):
    """A command's own error, or one row's: exactly these requests and sequences are ended; the worker lives on."""

    command: str
    code: RefusalCode
    message: str
    requests: tuple[RequestId, ...] = ()
    sequences: tuple[SequenceId, ...] = ()


class Heartbeat(Event, tag="beat"):
    """From a thread of its own. `promised_seconds`: expected cost of the running step, 0 when idle."""

    step: int
    phase: Phase
    promised_seconds: float
    active_bytes: int
    resident_bytes: int


class WorkerReport(Wire):
    """A worker's own count of itself, for tests and debugging."""

    running: tuple[SequenceId, ...]
    parked: tuple[SequenceId, ...]
    prefilling: tuple[SequenceId, ...]
    preparing: tuple[RequestId, ...]
    steps: int
    prefill_steps: int
    decode_steps: int
    malformed_frames: int
    cache_bytes: int
    active_bytes: int
    peak_bytes: int


class Inspected(Event, tag="inspected"):
    number: int
    report: WorkerReport


class Failed(Event, tag="failed"):
    """The load failed (`reason` says how) or the worker cannot go on; it exits after this. Best effort."""

    reason: LoadFailure
    message: str
    traceback: str = ""


class Stopped(Event, tag="stopped"):
    """Last event of an orderly shutdown."""

    step: int


AnyEvent = Hello | Loading | Ready | Prepared | Prefilled | StepDone | Released | Refused | Heartbeat | Inspected | Failed | Stopped
