"""What does an app hold of a prefix that it had computed ahead of use? A `PrefixHandle`, until it releases it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from types import TracebackType
from typing import Protocol, Self

from runtime.errors import InvalidRequest
from runtime.protocol.ids import RequestId
from runtime.protocol.tokens import TokenIds
from runtime.scheduler.request import Outcome


class Releaser(Protocol):
    """Where a pinned prefix is given back."""

    def release_prefix(self, request: RequestId) -> None:
        """Never raises; unknown ones are fine."""
        ...


class PrefixHandle:
    """A prefix that stays in the worker's memory until it is released: `await handle.release()`, or leave its `async with`.

    Requests need no handle to use it: whichever of the same model and scope begins with its tokens does. It does not outlive
    its worker: when that dies or the model is unloaded, memory is gone and only what has been written to files is found again.

    model: the name it was computed by. tokens: the prefix itself.
    cached_tokens: how far a request can be restored now; less than all when memory or the share of it that may be pinned is too
    small, 0 when the model can keep no prefixes.
    boundaries: lengths at which it was asked to be continuable, those beyond its end left out, and last its whole length.
    digests: for each boundary, the SHA-256 in hexadecimal of the ids up to there as little-endian 32-bit integers.
    """

    __slots__ = ("_is_released", "_releaser", "_request", "boundaries", "cached_tokens", "digests", "model", "tokens")

    def __init__(self, releaser: Releaser, request: RequestId, model: str, outcome: Outcome, boundaries: Sequence[int]) -> None:
        self._releaser = releaser
        self._request = request
        self._is_released = False
        self.model = model
        self.tokens = outcome.prompt_tokens
        self.cached_tokens = max(outcome.pinned_length, *outcome.cached_tokens, 0)
        length = len(self.tokens)
        self.boundaries = (*sorted({boundary for boundary in boundaries if boundary < length}), length)
        self.digests = _digests(self.tokens, self.boundaries)

    def __repr__(self) -> str:
        state = "released" if self._is_released else f"{self.cached_tokens} cached"
        return f"PrefixHandle({self.model!r}, {len(self.tokens)} tokens, {state})"

    async def release(self) -> None:
        """It may be forgotten when room is needed. Repeating it is harmless, also when the Runtime has closed."""
        if not self._is_released:
            self._is_released = True
            self._releaser.release_prefix(self._request)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.release()


def require_continuation(tokens: TokenIds, earlier: TokenIds) -> None:
    """:raises InvalidRequest: the rendered prompt does not begin with the handle's tokens; says where they part."""
    if tokens[: len(earlier)] == earlier:
        return
    same = next((index for index, (new, old) in enumerate(zip(tokens, earlier, strict=False)) if new != old), len(tokens))
    raise InvalidRequest(
        "extend",
        f"the messages, rendered to {len(tokens)} tokens, part from the handle's {len(earlier)} at token {same}; "
        "allowed: messages whose rendering begins with the handle's tokens",
    )


def _digests(tokens: TokenIds, boundaries: Sequence[int]) -> tuple[str, ...]:
    data = memoryview(tokens.to_bytes())
    running = hashlib.sha256()
    digests, place = [], 0
    for boundary in boundaries:
        running.update(data[4 * place : 4 * boundary])
        digests.append(running.hexdigest())
        place = boundary
    return tuple(digests)
