"""What does an app hold? A `Tenant` to ask with and a `Stream` for each answer under way."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol, Self, Unpack

from runtime.completion import Completion, Finished, StreamEvent, TextDelta, assemble
from runtime.errors import InvalidRequest, shown
from runtime.handle import PrefixHandle, Releaser, require_continuation
from runtime.options import GenerateOptions, ValidOptions, validate
from runtime.prefill_options import PrefillOptions, validate_prefill
from runtime.protocol.ids import TenantId
from runtime.scheduler.request import Outcome, Piece
from runtime.scheduler.stream import TokenStream


class Desk(Releaser, Protocol):
    """Where a tenant hands in its requests, and gives back what they pinned."""

    def submit(self, tenant: TenantId, model: str, options: ValidOptions, *, windowed: bool) -> TokenStream:
        """:raises TroupeError: it was refused; nothing is left behind."""
        ...


class Tenant:
    """An app's or user's own door to the runtime: its requests share its quota. Made by `Runtime.tenant`."""

    def __init__(self, name: TenantId, desk: Desk) -> None:
        self.name = name
        self._desk = desk

    def __repr__(self) -> str:
        return f"Tenant({self.name!r})"

    async def generate(self, model: str, **options: Unpack[GenerateOptions]) -> Completion:
        """Ask and wait for the whole answer. Cancelling the call cancels the computation.

        options: exactly one of prompt, tokens and messages; max_tokens, temperature, stop, seed and others: see `GenerateOptions`.

        :raises InvalidRequest: an option at fault, before anything is sent.
        :raises TroupeError: see `runtime.errors`; `partial_text` is what had been generated.
        """
        stream = Stream(self._desk, self.name, model, validate(options), windowed=False)
        async with stream:
            return await stream.completion()

    def stream(self, model: str, **options: Unpack[GenerateOptions]) -> Stream:
        """`async with tenant.stream(…) as stream: async for event in stream: …`; the events are `TextDelta` and at last `Finished`.

        options: exactly one of prompt, tokens and messages; max_tokens, temperature, stop, seed and others: see `GenerateOptions`.

        :raises InvalidRequest: at once, for an option at fault. The request is handed in on entering the `async with`.
        """
        return Stream(self._desk, self.name, model, validate(options), windowed=True)

    async def prefill(self, model: str, **options: Unpack[PrefillOptions]) -> PrefixHandle:
        """Compute a prompt ahead of use and keep it until the handle is released. Nothing is generated.

        options: exactly one of prompt, tokens and messages; boundaries, extend and others: see `PrefillOptions`. A chat is rendered
        as if a reply came next: later requests share the messages, not the few tokens with which the template opens the reply.
        Cancelling the call keeps nothing pinned.

        :raises InvalidRequest: an option at fault, before anything is sent; or, of `extend`, messages that do not begin with the
        handle's tokens, once they have been rendered. :raises TroupeError: see `runtime.errors`.
        """
        _require_model(model)
        valid = validate_prefill(model, options)
        stream = self._desk.submit(self.name, model, valid, windowed=False)
        is_kept = False
        try:
            outcome = await stream.wait()
            if outcome.error is not None:
                raise outcome.error.fresh()
            extended = options.get("extend")
            if extended is not None:
                require_continuation(outcome.prompt_tokens, extended.tokens)
            handle = PrefixHandle(self._desk, stream.request.id, model, outcome, valid.boundaries)
            is_kept = True
            return handle
        finally:
            stream.cancel()
            if not is_kept:
                self._desk.release_prefix(stream.request.id)


class Stream:
    """One answer under way. Leaving its `async with` by any door ends the computation.

    A client that reads slowly parks its sequences a bounded number of tokens ahead; one that awaits `completion` lets them run.
    """

    def __init__(self, desk: Desk, tenant: TenantId, model: str, options: ValidOptions, *, windowed: bool) -> None:
        _require_model(model)
        self._desk = desk
        self._tenant = tenant
        self._model = model
        self._options = options
        self._windowed = windowed
        self._tokens: TokenStream | None = None
        self._iterating = False
        self._finished = False

    async def __aenter__(self) -> Self:
        """:raises AdmissionError: not now; see its `retry_after_seconds`. :raises ModelError: :raises RuntimeClosed:"""
        if self._tokens is not None:
            raise InvalidRequest("stream", "was entered before; ask for a new one with tenant.stream(…)")
        self._tokens = self._desk.submit(self._tenant, self._model, self._options, windowed=self._windowed)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._source.cancel()

    @property
    def _source(self) -> TokenStream:
        if self._tokens is None:
            raise InvalidRequest("stream", "is not open; enter it first: async with tenant.stream(…) as stream")
        return self._tokens

    def cancel(self) -> None:
        """Stop computing. The stream then ends with a completion whose finish_reason is "cancelled"; a finished one stays."""
        self._source.cancel()

    async def completion(self) -> Completion:
        """Wait for the end, whether or not anybody iterates; may be called again and from several tasks.

        :raises TroupeError: the request failed; `partial_text` is what had been generated (of the first sequence).
        """
        return self._settle(await self._source.wait())

    def __aiter__(self) -> Self:
        if self._iterating:
            raise InvalidRequest("stream", "can be iterated once; take the whole from 'await stream.completion()'")
        self._iterating = True
        return self

    async def __anext__(self) -> StreamEvent:
        """:raises TroupeError: as `completion`."""
        if self._finished:
            raise StopAsyncIteration
        while True:
            match await self._source.receive():
                case Piece() as piece:
                    if piece.tokens or piece.text:
                        return TextDelta(piece.text, piece.tokens, piece.number, piece.logprobs)
                case Outcome() as outcome:
                    self._finished = True
                    return Finished(self._settle(outcome))

    def _settle(self, outcome: Outcome) -> Completion:
        source = self._source
        if outcome.error is not None:
            error = outcome.error.fresh()
            error.partial_text = source.sequences[0].text
            raise error
        seed, warnings = self._options.sampling.seed, self._options.warnings
        return assemble(self._model, source.sequences, outcome, seed=seed, warnings=warnings)


def _require_model(model: object) -> None:
    if not isinstance(model, str) or not model:
        raise InvalidRequest("model", f"got {shown(model)}; allowed: the name of a loaded model")
