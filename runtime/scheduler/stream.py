"""TokenStream: the client's end of one request, what it iterates or awaits, and what that means for the sequence's limit.

Pieces are not queued one by one: each sequence's result grows, and a cursor marks what its client has read, so a slow
reader gets everything new in one piece. Runs on the event loop's thread only, asyncio or trio.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import anyio
import anyio.lowlevel

from runtime.protocol.events import FinishReason, TokenLogprob
from runtime.scheduler.request import Outcome, Piece, Request
from runtime.scheduler.stimuli import Cancel, Read, Stimulus, Unwindow


@dataclass(slots=True, eq=False)
class SequenceResult:
    """What has come of one sequence so far, read by the client or not."""

    number: int
    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: FinishReason | None = None
    matched_stop: str | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)


@dataclass(slots=True, eq=False)
class _Cursor:
    """How far into a SequenceResult the client has read, and up to which token the scheduler knows it."""

    num_tokens: int = 0
    num_texts: int = 0
    num_logprobs: int = 0
    num_reported: int = 0


class TokenStream:
    """One request's pieces in order, then its outcome. One task iterates; any number may `wait`.

    `sequences` grow as pieces arrive, before they are read. `outcome` is None until the end.
    """

    def __init__(self, request: Request, offer: Callable[[Stimulus], None], window_tokens: int) -> None:
        self.request = request
        self.sequences = [SequenceResult(number) for number in range(request.num_sequences)]
        self.outcome: Outcome | None = None
        self._offer = offer
        self._report_tokens = max(1, window_tokens // 4)
        self._cursors = [_Cursor() for _ in self.sequences]
        self._unread: deque[int] = deque()  # numbers of the sequences with something new, each once
        self._is_windowed = request.windowed
        self._news: anyio.Event | None = None
        self._end: anyio.Event | None = None

    # -- for the client -----------------------------------------------------------------------------------------

    async def receive(self) -> Piece | Outcome:
        """What is new of one sequence, or, when all is read, the outcome (again and again).

        Being cancelled here loses nothing. What was delivered before a cancel or an error still comes before the outcome.

        :raises anyio.BusyResourceError: another task waits here already.
        """
        if self._unread or self.outcome is not None:
            await anyio.lowlevel.checkpoint()  # a reader that never has to wait must let others run, too
        while not self._unread:
            if self.outcome is not None:
                return self.outcome
            if self._news is not None:
                raise anyio.BusyResourceError("receiving from")
            self._news = anyio.Event()
            try:
                await self._news.wait()
            finally:
                self._news = None
        return self._take(self._unread.popleft())

    async def wait(self) -> Outcome:
        """The outcome, without iterating. From then on the sequences run to their ends without waiting to be read."""
        if self.outcome is None and self._is_windowed:
            self._is_windowed = False
            self._offer(Unwindow(self.request.id))
        while self.outcome is None:
            if self._end is None:
                self._end = anyio.Event()
            await self._end.wait()
        return self.outcome

    def cancel(self) -> None:
        """End the request here and now; the outcome is "cancelled" unless there was one. Idempotent."""
        if self.outcome is None:
            self._offer(Cancel(self.request.id))

    # -- for the Scheduler ----------------------------------------------------------------------------------------

    def deliver(self, piece: Piece) -> None:
        number = piece.number
        result = self.sequences[number]
        result.token_ids.extend(piece.tokens)
        result.texts.append(piece.text)
        if piece.logprobs:
            result.logprobs.extend(piece.logprobs)
        if piece.finish is not None:
            result.finish, result.matched_stop = piece.finish, piece.matched_stop
        if number not in self._unread:
            self._unread.append(number)
        if self._news is not None:
            self._news.set()

    def end(self, outcome: Outcome) -> None:
        self.outcome = outcome
        for event in (self._news, self._end):
            if event is not None:
                event.set()

    # -- reading ----------------------------------------------------------------------------------------------------

    def _take(self, number: int) -> Piece:
        result, cursor = self.sequences[number], self._cursors[number]
        piece = Piece(
            number=number,
            tokens=tuple(result.token_ids[cursor.num_tokens :]),
            text="".join(result.texts[cursor.num_texts :]),
            logprobs=tuple(result.logprobs[cursor.num_logprobs :]),
            finish=result.finish,
            matched_stop=result.matched_stop,
        )
        cursor.num_tokens, cursor.num_texts = len(result.token_ids), len(result.texts)
        cursor.num_logprobs = len(result.logprobs)
        if self._is_windowed and cursor.num_tokens - cursor.num_reported >= self._report_tokens and self.outcome is None:
            cursor.num_reported = cursor.num_tokens
            self._offer(Read(self.request.id, number, cursor.num_tokens))
        return piece
