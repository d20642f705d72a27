"""What a worker needs of an engine: one ragged step over rows, each at its own position.

A row feeds n tokens at its own position: a prefill chunk, one decoded token and a verify block are
the same call with other widths. An engine is used by one thread only, the thread that loaded it.
Source of the one-operation form: DESIGN principle "one ragged forward"; compare Orca's selective batching
(Yu et al., OSDI 2022) and chunked prefill (Agrawal et al., arXiv 2308.16369).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from runtime.protocol.commands import Load, Sampling
from runtime.protocol.events import LoadFailure, ModelFacts, RefusalCode, TokenLogprob
from runtime.protocol.ids import SequenceId

if TYPE_CHECKING:
    from runtime.engine.prefix_parts import Export, PrefixLayout, PrefixPart


class LoadError(Exception):
    """A load that failed for a reason an app can act on; becomes the event `Failed`."""

    def __init__(self, reason: LoadFailure, message: str) -> None:
        super().__init__(message)
        self.reason: LoadFailure = reason


class RowError(Exception):
    """One row's own fault; the other rows of the call are untouched."""

    def __init__(self, code: RefusalCode, message: str) -> None:
        super().__init__(message)
        self.code: RefusalCode = code


@dataclass(frozen=True, slots=True)
class RowStep:
    """One row of a step.

    tokens: ids to feed at the row's current length, or None to feed the token the row sampled last for that length (which may
    still be on its way: the engine chains it without waiting). num_samples: how many of the last fed positions to sample at
    (0 for a prefill chunk that is not the prompt's last, 1 for decode; at most len(tokens)).

    More than one is a verify block (only where capabilities.verify): `[last committed, d1..dk]` with k+1 samples. Sample i is
    the token that plain decoding draws after d1..di, with its log-probabilities, if these are what it has drawn before. Keep
    proposals while sample i-1 equals di, `truncate` to the length that they reach, and go on: `tokens=None` then feeds the
    sample that belongs there. Without a truncate all proposals stand.
    """

    sequence: SequenceId
    tokens: Sequence[int] | None
    num_samples: int


@dataclass(frozen=True, slots=True)
class RowResult:
    """What a step made of one row: sampled tokens in order of position (each with its entry in logprobs, if asked for), or the
    error that ended the row; a sample that cannot be drawn ends it wherever in a block it stands.

    After an error the engine has already forgotten the row.
    """

    sequence: SequenceId
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    error: RowError | None = None


class PendingStep(Protocol):
    """A step under way. The next step may be submitted before `result` is taken (look-ahead of one)."""

    def result(self) -> list[RowResult]:
        """Blocks until computed. One entry per row of the step, in order. Called exactly once."""
        ...


class Engine(Protocol):
    """Sequences live in the engine from `add` to `release`; length counts the tokens fed so far."""

    def add(self, sequence: SequenceId, sampling: Sampling, *, prompt_length: int, context: Sequence[int], max_length: int) -> None:
        """Make an empty row (length 0). `context` is its whole known context, for validation and penalties; nothing is fed yet.

        prompt_length: tokens of `context` before it are prompt, the rest earlier output. max_length bounds the memory it may need.
        :raises RowError: an id outside the vocabulary, a filter outside its range, a context too long.
        """
        ...

    def step(self, rows: Sequence[RowStep]) -> PendingStep:
        """Feed all rows in as few forwards as this model's capabilities allow; with at most one earlier step unfinished.

        Rows of a prefill batch may have different lengths. A row's own fault appears in its result, never as an exception;
        an exception from here means that the engine is broken and the worker must end.
        """
        ...

    def length(self, sequence: SequenceId) -> int:
        """Tokens fed, including those of a pending step."""
        ...

    def truncate(self, sequence: SequenceId, length: int) -> None:
        """Forget fed tokens from `length` on (speculation's rollback, and look-ahead past an end).

        What the row's last step fed can always be forgotten, whatever steps others have run since; where rollback is "replay"
        nothing before that, and with sliding windows only what is still kept. The row is as before after an error.

        :raises RowError: that state is no longer kept, or this model cannot at all (capabilities.rollback == "none").
        """
        ...

    def layout(self) -> PrefixLayout | None:
        """What exported rows consist of; None when this model's cannot be kept (capabilities.prefix is false)."""
        ...

    def export(self, sequence: SequenceId, start: int, end: int) -> Export:
        """A copy of what the row holds of positions [start, end), of which it has fed at least `end`.

        Allowed while a step is pending, also one of this row's: its effect is included, the copies are computed after it, and
        reading them waits for that. Dense layers can always be given. Sliding-window and recurrent layers are given as a
        checkpoint at `end`: the state while the row stands exactly there, or has run no more than one further step; the window
        as long as it is kept. `Export.missing` says which could not. To be sure of a checkpoint, end a prefill chunk at `end` and
        export before the next is submitted.
        Whether the row is sound (finite) shows only in the step's result: publish nothing of a row that ends in an error.

        :raises RowError: positions not fed, an unknown row, a model without a layout.
        """
        ...

    def adopt(self, part: PrefixPart, start: int | None = None, end: int | None = None) -> PrefixPart:
        """The part, validated against `layout` and in the form that `restore` takes without copying on the step thread.

        With `start` and `end`, absolute and within the part, only that of it: slices are cut, and checkpoints, valid at its own
        end only, stay out unless that is the end. Nothing is shared with what was cut away.
        The one method that any thread may call at any time. The part may be restored any number of times.

        :raises RowError: "invalid_request": it is no part of a sequence of this model; or a model without a layout.
        """
        ...

    def restore(self, sequence: SequenceId, parts: Sequence[PrefixPart]) -> None:
        """Set a row that has fed nothing to the length of the last part's end, as if it had fed its context up to there.

        parts: a chain from position 0, of slices of this very context (which the engine cannot check), each exported here or by
        another engine of the same model; checkpoints are taken from the last one, which must have all. At least one token of the
        context must be left to feed. Nothing is shared with the parts afterwards. The copying is on its way when this returns.

        :raises RowError: anything does not fit. The row is then still empty and may be fed from position 0; no other is touched.
        """
        ...

    def release(self, sequences: Sequence[SequenceId]) -> None:
        """Forget rows, also unknown ones, also rows of a pending step (whose result may then be ignored)."""
        ...

    def promised_seconds(self, rows: Sequence[RowStep]) -> float:
        """Expected cost of such a step, from measured earlier ones; used by the watchdog."""
        ...

    def cache_bytes(self) -> int: ...

    def active_bytes(self) -> int: ...

    def peak_bytes(self) -> int: ...

    def set_compute_threads(self, threads: int) -> None: ...

    def close(self) -> None: ...


class Detokenizer(Protocol):
    """Streaming ids → text for one sequence. Never gives half a character."""

    def push(self, token: int) -> str: ...

    def flush(self) -> str:
        """What is still held back; invalid bytes become U+FFFD only here or once they can no longer become valid."""
        ...


class Tokenizer(Protocol):
    """Thread-safe for `encode` and `render` beside one thread using detokenizers."""

    eos_ids: frozenset[int]
    has_chat_template: bool

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def render(self, messages: list[dict[str, Any]], *, options: dict[str, Any], add_generation_prompt: bool) -> str:
        """Apply the checkpoint's chat template. :raises Exception: whatever the template raises."""
        ...

    def special_token_text(self, name: str) -> str | None:
        """Text of e.g. "bos_token", or of a literal special token when it exists in the vocabulary, else None."""
        ...

    def detokenizer(self) -> Detokenizer: ...


Progress = Callable[[str, int, int], None]
"""(stage, done, total) for `Loading` events; may be called often."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """numerics: what the bits of this engine's results depend on beside the model and its tokens: who computes, and where."""

    engine: Engine
    tokenizer: Tokenizer
    facts: ModelFacts
    numerics: str
    close_hooks: tuple[Callable[[], None], ...] = field(default=())


class Loader(Protocol):
    def __call__(self, load: Load, progress: Progress) -> Loaded:
        """:raises LoadError: for every fault of the checkpoint; other exceptions become reason "error"."""
        ...
