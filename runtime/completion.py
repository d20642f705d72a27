"""What does an app get back? The events of a stream and the completion at its end; plain frozen data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from runtime.protocol.events import TokenLogprob
from runtime.scheduler.request import Outcome, Timings
from runtime.scheduler.stream import SequenceResult


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New tokens of sequence `number` (0 unless n > 1) and the text that may be shown by now.

    `text` is empty while a character is unfinished or might become part of a stop string.
    """

    text: str
    token_ids: tuple[int, ...]
    number: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one sequence. `cached_tokens`: how many of the prompt were restored rather than computed. `proposed_tokens`:
    by speculation; `accepted_tokens`: those of them that became part of the completion."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    proposed_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished sequence; `alternatives` are the others of a request with n > 1.

    token_ids: without the end token. `text` is their text up to a stop string; the ids may run into it.
    finish_reason: "stop" (the end token, or `matched_stop`), "length", or "cancelled" (`Stream.cancel`).
    logprobs: one for each token when asked for. fingerprint: of the model. seed: the one given or drawn.
    warnings: what was ignored or adapted.
    """

    model: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: Literal["stop", "length", "cancelled"]
    matched_stop: str | None
    logprobs: tuple[TokenLogprob, ...]
    usage: Usage
    timings: Timings
    seed: int
    fingerprint: str
    warnings: tuple[str, ...] = ()
    alternatives: tuple[Completion, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of a stream that did not fail."""

    completion: Completion


StreamEvent = TextDelta | Finished


def assemble(
    model: str, sequences: Sequence[SequenceResult], outcome: Outcome, *, seed: int, warnings: tuple[str, ...] = ()
) -> Completion:
    """The completion of a request that ended without an error."""

    def one(sequence: SequenceResult, alternatives: tuple[Completion, ...]) -> Completion:
        def count(counts: tuple[int, ...]) -> int:
            return counts[sequence.number] if sequence.number < len(counts) else 0

        return Completion(
            model=model,
            text=sequence.text,
            token_ids=tuple(sequence.token_ids),
            finish_reason=sequence.finish or "cancelled",
            matched_stop=sequence.matched_stop,
            logprobs=tuple(sequence.logprobs),
            usage=Usage(
                len(outcome.prompt_tokens),
                len(sequence.token_ids),
                count(outcome.cached_tokens),
                count(outcome.proposed_tokens),
                count(outcome.accepted_tokens),
            ),
            timings=outcome.timings,
            seed=seed,
            fingerprint=outcome.fingerprint,
            warnings=(*warnings, *outcome.warnings),
            alternatives=alternatives,
        )

    first, *others = sequences
    return one(first, tuple(one(sequence, ()) for sequence in others))
