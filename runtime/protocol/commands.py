"""host → worker: everything a worker can be told.

Every command is absolute and idempotent: it names sequences and positions, never "the next one" or
"n more", so that a repeated or late copy harms nothing. docs/protocol.md is the authority.
"""

from __future__ import annotations

from typing import Literal, dataclass_transform

import msgspec

from runtime.protocol.ids import RequestId, SequenceId
from runtime.protocol.tokens import TokenIds

PROTOCOL_VERSION = 2
PREPARE_SECONDS = 20.0
"""A worker refuses a prompt whose rendering and tokenizing takes longer."""


@dataclass_transform(frozen_default=True, field_specifiers=(msgspec.field,))  # tells type checkers that subclasses are frozen too
class Wire(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of the values inside messages."""


class Fault(Wire):
    """Scripted misbehaviour of the fake engine: at the `number`-th time (from 1) the step `at` is reached.

    `sequence_number` narrows it to steps in which the n-th sequence ever added (from 1) takes part; then
    "raise" and "nonfinite" hit that row alone. `incarnations` says in which lives of the worker it happens.
    """

    at: Literal["import", "load", "prepare", "prefill", "decode", "release", "shutdown"]
    action: Literal["raise", "exit", "kill", "sleep", "hang", "nonfinite", "garbage"]
    number: int = 1
    every_time: bool = False
    seconds: float = 0.0
    exit_code: int = 1
    sequence_number: int | None = None
    incarnations: tuple[int, ...] = (1,)


class FakeScript(Wire):
    """How the fake engine behaves. Its next token is a hash of the whole visible context.

    `reply`: instead of hashed tokens, every sequence says this text (UTF-8 bytes, one token each) and ends.
    `eos_one_in`: a hashed token is the end token once in so many (0: never).
    """

    context_length: int = 4096
    max_batch_rows: int = 64
    load_seconds: float = 0.0
    prefill_seconds_per_token: float = 0.0
    decode_seconds_per_step: float = 0.0
    eos_one_in: int = 0
    reply: str | None = None
    chat_template: bool = True
    faults: tuple[Fault, ...] = ()


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


class Load(Command, tag="load"):
    """First command after `Hello`. `path`: a directory, or a hub id when `is_hub_id`.

    `kind`: "auto" picks by the checkpoint; "fake" is the deterministic test engine and needs `fake`.
    `prefill_chunk_tokens` bounds the tokens of one prefill step over all its rows.
    `compute_threads`: 0 leaves the default.
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


class Prepare(Command, tag="prepare"):
    """Render and tokenize beside the running steps; answered by `Prepared` or `Refused`."""

    request: RequestId
    prompt: Prompt


class PrefillRow(Wire):
    """One sequence to start (or start again) in the worker.

    `tokens`: the visible context from position `first_index` (0 unless earlier positions are already restored).
    `prompt_length`: absolute; tokens at or after it are this sequence's own committed output (a replay), which penalties
    and stop strings count as output. `max_length`: absolute length at which it finishes with "length". `limit`: absolute
    length at which it parks until a `Grant`.
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


class Configure(Command, tag="configure"):
    """Change what may change while running. `compute_threads`: BLAS threads on CPU; no effect elsewhere."""

    compute_threads: int


class Inspect(Command, tag="inspect"):
    """Answered by `Inspected` with the same number."""

    number: int


class Shutdown(Command, tag="shutdown"):
    """Stop after the current step; answered by `Stopped`, then the process ends with code 0."""


AnyCommand = Load | Prepare | Prefill | Grant | Release | Configure | Inspect | Shutdown
