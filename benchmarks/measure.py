"""What is one run, and which numbers follow from it? Pure data; every clock reading is in seconds since the run began."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


class BenchmarkError(Exception):
    """The measurement itself is impossible or would be unfair; its message says why."""


@dataclass(slots=True)
class StreamRun:
    """One stream. `arrivals`: (seconds, number of tokens that came at that moment), in order.

    token_ids is None where the opponent's interface gives text alone.
    """

    prompt_tokens: int = 0
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    token_ids: list[int] | None = None
    text: str = ""

    @property
    def num_tokens(self) -> int:
        return sum(num for _, num in self.arrivals)

    @property
    def first_token_seconds(self) -> float:
        return self.arrivals[0][0]

    @property
    def total_seconds(self) -> float:
        return self.arrivals[-1][0]

    def tokens_between(self, start: float, end: float) -> int:
        """Tokens that came after `start`, up to and with `end`."""
        return sum(num for when, num in self.arrivals if start < when <= end)


@dataclass(slots=True)
class Run:
    """One run of one side: one stream or several that started together. cpu_seconds: of the host process, where that is ours."""

    streams: list[StreamRun]
    cpu_seconds: float | None = None

    @property
    def num_tokens(self) -> int:
        return sum(stream.num_tokens for stream in self.streams)

    @property
    def total_seconds(self) -> float:
        return max(stream.total_seconds for stream in self.streams)

    @property
    def first_token_seconds(self) -> float:
        """Median over the streams."""
        return statistics.median(stream.first_token_seconds for stream in self.streams)

    @property
    def end_to_end_tokens_per_second(self) -> float:
        return self.num_tokens / self.total_seconds

    @property
    def decode_tokens_per_second(self) -> float:
        """Of all streams together, see `decode_rates`."""
        return sum(self.decode_rates())

    def decode_rates(self) -> list[float]:
        """Tokens per second of each stream while all of them decode.

        That is from the moment the last of them has its first token until the first of them ends. When there is no such time,
        because one ended before another began or came in one piece, each stream's end-to-end rate is all there is.
        """
        start = max(stream.first_token_seconds for stream in self.streams)
        end = min(stream.total_seconds for stream in self.streams)
        if end <= start:
            return [stream.num_tokens / stream.total_seconds for stream in self.streams]
        return [stream.tokens_between(start, end) / (end - start) for stream in self.streams]

    def summary(self) -> dict[str, Any]:
        """The raw numbers of this run, for the report."""
        found: dict[str, Any] = {
            "num_streams": len(self.streams),
            "num_prompt_tokens": sum(stream.prompt_tokens for stream in self.streams),
            "num_tokens": self.num_tokens,
            "total_seconds": round(self.total_seconds, 6),
            "first_token_seconds": round(self.first_token_seconds, 6),
            "end_to_end_tokens_per_second": round(self.end_to_end_tokens_per_second, 3),
            "decode_tokens_per_second": round(self.decode_tokens_per_second, 3),
        }
        if self.cpu_seconds is not None:
            found["host_cpu_microseconds_per_token"] = round(1e6 * self.cpu_seconds / self.num_tokens, 1)
        return found


def from_answer(answer: dict[str, Any]) -> StreamRun:
    """A stream as an opponent child reports it, one token at a time."""
    return StreamRun(
        prompt_tokens=answer["prompt_tokens"],
        arrivals=[(when, 1) for when in answer["seconds"]],
        token_ids=answer["token_ids"],
        text=answer["text"],
    )


def equal_fraction(ours: Sequence[StreamRun], theirs: Sequence[StreamRun]) -> float:
    """Share of the output that both sides agree on, from the start of each stream to its first difference.

    Compared by token id where both have ids, by character otherwise (then without the blanks a text begins with, which some
    detokenizers drop).
    """
    same = total = 0
    for one, other in zip(ours, theirs, strict=True):
        left: Sequence[Any] = one.text.lstrip()
        right: Sequence[Any] = other.text.lstrip()
        if one.token_ids is not None and other.token_ids is not None:
            left, right = one.token_ids, other.token_ids
        total += max(len(left), len(right))
        pairs = enumerate(zip(left, right, strict=False))
        same += next((index for index, (here, there) in pairs if here != there), min(len(left), len(right)))
    return same / total if total else 1.0


def require_same_work(ours: Run, theirs: Run, *, what: str) -> None:
    """:raises BenchmarkError: the two sides did not read as many prompt tokens and make as many tokens, stream by stream."""
    left = [(stream.prompt_tokens, stream.num_tokens) for stream in ours.streams]
    right = [(stream.prompt_tokens, stream.num_tokens) for stream in theirs.streams]
    if left != right:
        raise BenchmarkError(f"{what}: not the same work; (prompt tokens, tokens made) by stream are {left} here, {right} there")
