"""host → worker: everything a worker can be told.

Every command is absolute and idempotent: it names sequences and positions, never "the next one" or
"n more", so that a repeated or late copy harms nothing. docs/protocol.md is the authority.
"""

from __future__ import annotations

from typing import Literal, dataclass_transform

import msgspec

from runtime.protocol.ids import RequestId, SequenceId
from runtime.protocol.tokens import TokenIds

PROTOCOL_VERSION = 7
PREPARE_SECONDS = 20.0
"""A worker refuses a prompt whose rendering and tokenizing takes longer."""


@dataclass_transform(frozen_default=True, field_specifiers=(msgspec.field,))  # tells type checkers that subclasses are frozen too
class Wire(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of the values inside messages."""


class Fault(Wire):
    """Scripted misbehaviour of the fake engine: at the `number`-th time (from 1) the step `at` is reached.

    `sequence_number` narrows it to steps in which the n-th sequence ever added (from 1) takes part; then
    "raise" and "nonfinite" hit that row alone. `token`: to steps with a sequence that has this token in its prompt, which makes a
    request a poison in every life. `incarnations` says in which lives of the worker it happens.
    """

    at: Literal["import", "load", "prepare", "prefill", "decode", "release", "shutdown"]
    action: Literal["raise", "exit", "kill", "sleep", "hang", "nonfinite", "garbage"]
    number: int = 1
    every_time: bool = False
    seconds: float = 0.0
    exit_code: int = 1
    sequence_number: int | None = None
    incarnations: tuple[int, ...] = (1,)
    token: int | None = None


class FakeScript(Wire):
    """How the fake engine behaves. Its next token is a hash of the whole visible context.

    `reply`: instead of hashed tokens, every sequence says this text (UTF-8 bytes, one token each) and ends.
    `eos_one_in`: a hashed token is the end token once in so many (0: never). `disagrees_one_in`: once in so many a hashed token
    is another than engines without it draw (1: always, 0: never). `vocabulary`: digest of its vocabulary. `weight_bytes`: that
    it says its weights have. `trace`: a file to which every step appends a line when it begins to compute and one when it has
    ended (`fake_trace.py`).
    """

    context_length: int = 4096
    max_batch_rows: int = 64
    load_seconds: float = 0.0
    prefill_seconds_per_token: float = 0.0
    decode_seconds_per_step: float = 0.0
    eos_one_in: int = 0
    reply: str | None = None
    chat_template: bool = True
    disagrees_one_in: int = 0
    weight_bytes: int = 0
    vocabulary: str = "fake-bytes"
    faults: tuple[Fault, ...] = ()
    trace: str | None = None


class Sampling(Wire):
    """How one sequence draws its tokens. Ranges are checked by the host and again by the engine.

    The draw at absolute position p depends on (seed, p) and the context alone. `logprobs`: -1 off, otherwise how many
    alternatives to report beside the chosen token. `logit_bias`: (token id, added logit) pairs.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    logprobs: int = -1


# -- prompts, as the app gave them ------------------------------------------------------------------------


class TextPrompt(Wire, tag="text"):
    """Plain text, tokenized with the tokenizer's own special tokens (BOS unless the text begins with it)."""

    text: str


class ChatPrompt(Wire, tag="chat"):
    """Messages as JSON (a list of objects with at least "role" and "content"), rendered by the chat template.

    `tools`: JSON list of tool definitions or None, given to the template. `primer`: text the reply begins with.
    """

    messages_json: str
    tools_json: str | None = None
    reasoning_effort: str | None = None
    primer: str | None = None


class TokenPrompt(Wire, tag="tokens"):
    tokens: TokenIds


Prompt = TextPrompt | ChatPrompt | TokenPrompt


# -- commands ---------------------------------------------------------------------------------------------


class Command(Wire):
    """Base of all commands."""


class DeviceLease(Wire):
    """At most `num_slots` of the workers that share `directory` compute at once.

    The directory may not be there yet; the one around it is. A worker that gets no slot within `patience_seconds` ends.
    """

    directory: str
    num_slots: int
    patience_seconds: float


class Load(Command, tag="load"):
    """First command after `Hello`. `path`: a directory, or a hub id when `is_hub_id`.

    `kind`: "auto" picks by the checkpoint; "fake" is the deterministic test engine and needs `fake`.
    `prefill_chunk_tokens` bounds the tokens of one prefill step over all its rows.
    `compute_threads`: 0 leaves the default. `prefix_root`: directory of prefix files, None for none.
    `prefix_memory_bytes`: how much this worker keeps of finished and shared prefixes, 0 for nothing. `prefix_disk_bytes`: most
    that all prefix files may take together, 0 for no bound. `device_lease`: None lets it compute at any time.
    `reserved_bytes`: of the machine's memory for this worker, which bounds what it may wire on Metal; 0 sets no bound.
    """

    name: str
    path: str
    is_hub_id: bool = False
    revision: str | None = None
    kind: Literal["auto", "lm", "fake"] = "auto"
    max_slots: int = 16
    max_context_tokens: int | None = None
    prefill_chunk_tokens: int = 512
    trust_remote_code: bool = False
    compute_threads: int = 0
    fake: FakeScript | None = None
    prefix_root: str | None = None
    prefix_memory_bytes: int = 0
    prefix_disk_bytes: int = 0
    device_lease: DeviceLease | None = None
    reserved_bytes: int = 0


class Prepare(Command, tag="prepare"):
    """Render and tokenize beside the running steps; answered by `Prepared` or `Refused`."""

    request: RequestId
    prompt: Prompt


class SegmentRange(Wire):
    """Positions [start, end) of a context, in the segment file `name` (its last block's hash).

    `with_checkpoint`: the states of its sliding and recurrent layers are wanted too, valid at `end` only.
    """

    name: bytes
    start: int
    end: int
    with_checkpoint: bool


class PrefixUse(Wire):
    """Which prefixes a sequence may find, and what is to become of its own.

    `scope`: secret of its scope and this model; nothing kept under another is ever seen. `segments`: a chain from position 0 to
    restore, unless memory holds more. `keep`: what it computes is kept in memory and offered with `Kept`. `boundaries`: absolute
    positions, ascending, at which it must be possible to continue later. `pin`: what is kept of it stays until `Unpin`.
    """

    scope: bytes
    segments: tuple[SegmentRange, ...] = ()
    keep: bool = True
    boundaries: tuple[int, ...] = ()
    pin: bool = False


class PrefillRow(Wire):
    """One sequence to start (or start again) in the worker.

    `tokens`: the visible context from position `first_index` (0 unless earlier positions are already restored).
    `prompt_length`: absolute; tokens at or after it are this sequence's own committed output (a replay), which penalties
    and stop strings count as output. `max_length`: absolute length at which it finishes with "length". `limit`: absolute
    length at which it parks until a `Grant`. `prefix`: None neither finds nor keeps anything. `prefill_only`: all tokens are
    computed, none is generated, and the sequence finishes with "length" (`max_length` is then the number of tokens). `hold`: all
    tokens are computed, none is generated, and the sequence waits for a `Draft`. `background`: while it is the only kind of work
    here, the worker's steps stand behind those of other workers.
    """

    sequence: SequenceId
    tokens: TokenIds
    prompt_length: int
    max_length: int
    limit: int
    first_index: int = 0
    sampling: Sampling = Sampling()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    prefix: PrefixUse | None = None
    prefill_only: bool = False
    hold: bool = False
    background: bool = False


class Prefill(Command, tag="prefill"):
    """Rows of like length, prefilled together in chunks, then decoding freely."""

    rows: tuple[PrefillRow, ...]


class Grant(Command, tag="grant"):
    """(sequence, limit): may run until its length is `limit`. Absolute; a lower or repeated limit is ignored."""

    limits: tuple[tuple[SequenceId, int], ...]


class Release(Command, tag="release"):
    """Forget these requests (preparing) and sequences, in whatever state; answered by `Released`, also when unknown."""

    requests: tuple[RequestId, ...] = ()
    sequences: tuple[SequenceId, ...] = ()


class Hold(Command, tag="hold"):
    """Stop decoding these freely after the steps under way; answered by `Held`. Unknown and ended ones are fine."""

    sequences: tuple[SequenceId, ...]


class Resume(Command, tag="resume"):
    """Decode these freely again. A verify that has not begun is dropped. Unknown and ended ones are fine."""

    sequences: tuple[SequenceId, ...]


class DraftRow(Wire):
    """Truncate a held sequence to `base`, feed `commit`, and propose `count` tokens from there on (0: only feed).

    `number` rises with each order for a sequence; a later one replaces one that is not done.
    """

    sequence: SequenceId
    number: int
    base: int
    commit: TokenIds
    count: int


class Draft(Command, tag="draft"):
    """Answered by `Drafted` for each row, unless a later order replaces it."""

    rows: tuple[DraftRow, ...]


class VerifyRow(Wire):
    """Tokens proposed for the positions from `base` on, which is the sequence's length. `number` rises, as in `DraftRow`."""

    sequence: SequenceId
    number: int
    base: int
    proposed: tuple[int, ...] = ()


class Verify(Command, tag="verify"):
    """Run these through one step and commit what plain decoding would: the proposals that stand and one token more.

    The rows are held. `lookup`: rows without proposals make up to so many of their own, from what followed the same words before.
    Answered by `Verified`.
    """

    rows: tuple[VerifyRow, ...]
    lookup: int = 0


class Publish(Command, tag="publish"):
    """Write kept nodes to files: (node, owner tag) each; answered by `SegmentPublished` or `SegmentRejected` for each node.

    `owner`: by which the holder of the scope's key recognises the file; no worker ever has that key.
    """

    nodes: tuple[tuple[int, str], ...]


class Unpin(Command, tag="unpin"):
    """What was kept of these sequences under a pin may be forgotten when room is needed. Unknown ones are fine."""

    sequences: tuple[SequenceId, ...]


class Forget(Command, tag="forget"):
    """Drop everything kept under these scopes at once, pinned or not, and keep nothing more under them. Their running sequences go
    on. Unknown ones are fine."""

    scopes: tuple[bytes, ...]


class Configure(Command, tag="configure"):
    """Change what may change while running. `compute_threads`: BLAS threads on CPU; no effect elsewhere, 0 leaves it.
    `prefix_memory_bytes`: as in `Load`."""

    compute_threads: int
    prefix_memory_bytes: int


class Inspect(Command, tag="inspect"):
    """Answered by `Inspected` with the same number."""

    number: int


class Shutdown(Command, tag="shutdown"):
    """Stop after the current step; answered by `Stopped`, then the process ends with code 0."""


AnyCommand = (
    Load
    | Prepare
    | Prefill
    | Grant
    | Release
    | Hold
    | Resume
    | Draft
    | Verify
    | Publish
    | Unpin
    | Forget
    | Configure
    | Inspect
    | Shutdown
)
