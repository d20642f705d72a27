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

Phase = Literal["import", "loading", "idle", "prefill", "decode", "verify", "draft", "waiting", "stopping"]

FinishReason = Literal["stop", "length"]


class Capabilities(Wire):
    """What the load-time self-test proved for this model; what is False runs one row at a time.

    `rollback`: "free" per-row truncation at no cost, "replay" by restoring a snapshot, "none".
    `notes`: one line for each proof that failed, saying what was tried.
    `prefix`: a row's caches can be copied out and restored into other rows.
    `verify`: a block of proposed tokens can be fed at once, sampled after each, and taken back in part, by up to 16.
    """

    batched_decode: bool
    padded_prefill: bool
    chunked_prefill: bool
    rollback: Literal["free", "replay", "none"]
    notes: tuple[str, ...] = ()
    prefix: bool = False
    verify: bool = False


class PrefixFacts(Wire):
    """What the host must know of this model's prefixes. fingerprint: of everything their bits depend on, except tokens and scope.

    `style`: "dense" (any position can be continued), "mixed" or "checkpoint" (only where a state was kept). A segment of n tokens
    has about n * `slice_bytes_per_token` + `checkpoint_bytes`, and before them a header of at most `head_bytes` plus
    `block_head_bytes` for each of its blocks.
    """

    fingerprint: str
    style: Literal["dense", "mixed", "checkpoint"]
    slice_bytes_per_token: int
    checkpoint_bytes: int
    head_bytes: int
    block_head_bytes: int


class ModelFacts(Wire):
    """Facts that only loading reveals. Sizes in bytes; `chat_template` is "checkpoint" or "fallback".

    `prefix`: None when this model's prefixes cannot be kept (see `capabilities.prefix`).
    """

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
    prefix: PrefixFacts | None = None


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


class SegmentMiss(Wire):
    """A segment file that could not be used. `is_removed`: it was at fault and is gone."""

    name: bytes
    reason: str
    detail: str
    is_removed: bool


class Restored(Event, tag="restored"):
    """A sequence with a `PrefixUse` is about to be computed from `length` on; what was before came from `source`.

    Comes once, before anything else of the sequence but `Refused` and `Released`; its leases end here. `num_files`, `num_bytes`,
    `seconds`: read for it from files, until its tensors were in place. `misses`: segments named to it that could not be used.
    """

    sequence: SequenceId
    length: int
    source: Literal["none", "memory", "file"]
    num_files: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    misses: tuple[SegmentMiss, ...] = ()


class KeptNode(Wire):
    """Whole blocks [start, end) of a sequence that memory holds as one piece, under a number that is never used again."""

    node: int
    start: int
    end: int
    num_bytes: int


class Kept(Event, tag="kept"):
    """Memory holds the sequence's positions [0, length): whoever shares them may be restored from there. Never after `Released`.

    `nodes`: the new ones among them that may be published. `pinned_length`: how far it is pinned.
    """

    sequence: SequenceId
    length: int
    nodes: tuple[KeptNode, ...] = ()
    pinned_length: int = 0


class SegmentPublished(Event, tag="published"):
    """The node lies in the file `name`. `is_new`: False when there was one already. `num_bytes`: of the file."""

    node: int
    name: bytes
    num_bytes: int
    is_new: bool
    seconds: float


class SegmentRejected(Event, tag="rejected"):
    """The node was not written. `reason`: "absent" (forgotten meanwhile), "busy" (too much is waiting to be written), "over_budget"
    (all files together would take more than `Load` allows), or of the file system: "no_space", "read_only", "io", "contents"."""

    node: int
    reason: Literal["absent", "busy", "over_budget", "no_space", "read_only", "io", "contents"]
    detail: str


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
    """One per decode (or final prefill) step, for the whole batch. `step` counts all steps of this incarnation. `seconds`: that a
    decode step took, 0 for others."""

    step: int
    rows: tuple[StepRow, ...]
    seconds: float = 0.0


class Held(Event, tag="held"):
    """(sequence, length): no longer decoded freely; all that is committed has been said before."""

    rows: tuple[tuple[SequenceId, int], ...]


class DraftedRow(Wire):
    """What order `number` proposes, from its start on."""

    sequence: SequenceId
    number: int
    proposed: tuple[int, ...]


class Drafted(Event, tag="drafted"):
    """Orders that are done. `lost`: sequences that this worker does not hold as the order says; it has forgotten them. `seconds`:
    spent inside the steps of the slowest of them."""

    rows: tuple[DraftedRow, ...]
    lost: tuple[SequenceId, ...] = ()
    seconds: float = 0.0


class VerifiedRow(Wire):
    """What round `number` added, as a step would say it. `num_proposed`: tokens verified. `num_matched`: of them, equal to what the
    target drew, up to the first that is not; they count also when the sequence ended before."""

    number: int
    num_proposed: int
    num_matched: int
    step: StepRow


class Verified(Event, tag="verified"):
    """One per verify step. `step` and `seconds` as in `StepDone`."""

    step: int
    rows: tuple[VerifiedRow, ...]
    seconds: float


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
    """From a thread of its own. `promised_seconds`: expected cost of the running step, 0 when idle.

    Phase "waiting": for the device lease. `num_device_waits`: times it had to, `device_wait_seconds`: how long in all.
    """

    step: int
    phase: Phase
    promised_seconds: float
    active_bytes: int
    resident_bytes: int
    num_device_waits: int = 0
    device_wait_seconds: float = 0.0


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
    prefix_memory_bytes: int = 0
    prefix_pinned_bytes: int = 0
    prefix_nodes: int = 0
    verify_steps: int = 0
    draft_steps: int = 0


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


AnyEvent = (
    Hello
    | Loading
    | Ready
    | Prepared
    | Restored
    | Prefilled
    | StepDone
    | Held
    | Drafted
    | Verified
    | Kept
    | SegmentPublished
    | SegmentRejected
    | Released
    | Refused
    | Heartbeat
    | Inspected
    | Failed
    | Stopped
)
