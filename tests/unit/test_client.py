"""Streams and completions against a scheduler that is played by the test: no process, no model."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from runtime.client import Tenant
from runtime.completion import Finished, StreamEvent, TextDelta
from runtime.errors import ExitReport, InvalidRequest, ModelNotLoaded, Overloaded, TroupeError, WorkerCrashed
from runtime.handle import PrefixHandle
from runtime.options import ValidOptions
from runtime.protocol.ids import ModelName, RequestId, TenantId
from runtime.protocol.tokens import TokenIds
from runtime.scheduler.request import Outcome, Piece, Request, Timings
from runtime.scheduler.stimuli import Cancel, Stimulus, Unwindow
from runtime.scheduler.stream import TokenStream

pytestmark = pytest.mark.anyio

REPORT = ExitReport("chat", 1, 1, None, "SIGKILL", "decode", 1.0, "")


class PlayedDesk:
    """Hands out a real TokenStream and lets the test play what the scheduler would do."""

    def __init__(self, refusal: TroupeError | None = None) -> None:
        self.refusal = refusal
        self.offered: list[Stimulus] = []
        self.released: list[RequestId] = []
        self.streams: list[TokenStream] = []

    def submit(self, tenant: TenantId, model: str, options: ValidOptions, *, windowed: bool) -> TokenStream:
        if self.refusal is not None:
            raise self.refusal
        number = RequestId(len(self.streams) + 1)
        request = Request(
            number,
            tenant,
            ModelName(model),
            options.prompt,
            options.sampling,
            options.max_tokens,
            num_sequences=options.num_sequences,
            windowed=windowed,
            prefill_only=options.prefill_only,
            boundaries=options.boundaries,
        )
        self.streams.append(TokenStream(request, self._offer, 256))
        return self.streams[-1]

    def release_prefix(self, request: RequestId) -> None:
        self.released.append(request)

    def _offer(self, stimulus: Stimulus) -> None:
        self.offered.append(stimulus)
        if isinstance(stimulus, Cancel):
            self.end("cancelled")

    def say(self, text: str, *tokens: int, number: int = 0, finish: bool = False) -> None:
        self.streams[-1].deliver(Piece(number, tokens, text, (), "stop" if finish else None, None))

    def end(self, state: str = "finished", error: TroupeError | None = None, **prefix: Any) -> None:
        times = Timings(0.0, 0.0, 0.0, 1.0)
        self.streams[-1].end(Outcome(state, TokenIds([1, 2]), times, "print", ("odd",), error, **prefix))  # type: ignore[arg-type]

    @property
    def was_cancelled(self) -> bool:
        return any(isinstance(stimulus, Cancel) for stimulus in self.offered)


@pytest.fixture
def desk() -> PlayedDesk:
    return PlayedDesk()


@pytest.fixture
def tenant(desk: PlayedDesk) -> Tenant:
    return Tenant(TenantId("notes"), desk)


async def test_a_stream_gives_its_deltas_and_then_the_completion(desk: PlayedDesk, tenant: Tenant) -> None:
    events: list[StreamEvent] = []
    async with tenant.stream("chat", prompt="hi", seed=7) as stream:
        desk.say("He", 10)
        events.append(await anext(stream))
        desk.say("", 11)
        events.append(await anext(stream))
        desk.say("llo", 12, finish=True)
        desk.end()
        events.extend([event async for event in stream])
    assert events[:3] == [TextDelta("He", (10,)), TextDelta("", (11,)), TextDelta("llo", (12,))]
    (finished,) = events[3:]
    assert isinstance(finished, Finished)
    completion = finished.completion
    assert (completion.text, completion.token_ids, completion.finish_reason, completion.seed) == ("Hello", (10, 11, 12), "stop", 7)
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens, completion.usage.total_tokens) == (2, 3, 5)
    assert (completion.fingerprint, completion.warnings) == ("print", ("odd",))
    assert not desk.was_cancelled


async def test_the_completion_alone_can_be_awaited_and_lets_the_sequences_run(desk: PlayedDesk, tenant: Tenant) -> None:
    async with tenant.stream("chat", prompt="hi") as stream:
        async with anyio.create_task_group() as group:
            group.start_soon(play, desk)
            completion = await stream.completion()
        assert completion.text == "Hello"
        assert await stream.completion() == completion
    assert any(isinstance(stimulus, Unwindow) for stimulus in desk.offered)


async def play(desk: PlayedDesk) -> None:
    await anyio.wait_all_tasks_blocked()
    desk.say("Hello", 10, finish=True)
    desk.end()


async def test_after_a_break_the_completion_still_comes_whole(desk: PlayedDesk, tenant: Tenant) -> None:
    async with tenant.stream("chat", prompt="hi") as stream:
        desk.say("He", 10)
        async for _ in stream:
            break
        desk.say("llo", 11, finish=True)
        desk.end()
        assert (await stream.completion()).text == "Hello"


async def test_leaving_the_block_cancels_and_the_completion_then_says_so(desk: PlayedDesk, tenant: Tenant) -> None:
    async with tenant.stream("chat", prompt="hi") as stream:
        desk.say("He", 10)
        await anext(stream)
    assert desk.was_cancelled
    completion = await stream.completion()
    assert (completion.finish_reason, completion.text) == ("cancelled", "He")


async def test_an_exception_in_the_block_cancels_and_passes_through(desk: PlayedDesk, tenant: Tenant) -> None:
    with pytest.raises(ZeroDivisionError):
        async with tenant.stream("chat", prompt="hi"):
            raise ZeroDivisionError
    assert desk.was_cancelled


async def test_cancelling_by_hand_ends_the_stream_with_a_completion(desk: PlayedDesk, tenant: Tenant) -> None:
    async with tenant.stream("chat", prompt="hi") as stream:
        desk.say("He", 10)
        stream.cancel()
        events = [event async for event in stream]
    assert isinstance(events[-1], Finished)
    assert events[-1].completion.finish_reason == "cancelled"
    assert events[-1].completion.text == "He"


async def test_cancelling_a_generate_cancels_the_request(desk: PlayedDesk, tenant: Tenant) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(lambda: tenant.generate("chat", prompt="hi"))
        await anyio.wait_all_tasks_blocked()
        group.cancel_scope.cancel()
    assert desk.was_cancelled


async def test_an_error_is_raised_with_the_partial_text_and_never_mixed_into_it(desk: PlayedDesk, tenant: Tenant) -> None:
    error = WorkerCrashed(REPORT)
    async with tenant.stream("chat", prompt="hi") as stream:
        desk.say("He", 10)
        desk.end("failed", error)
        assert await anext(stream) == TextDelta("He", (10,))
        with pytest.raises(WorkerCrashed) as caught:
            await anext(stream)
        assert caught.value.partial_text == "He"
        assert caught.value.report == REPORT
        with pytest.raises(WorkerCrashed) as again:
            await stream.completion()
    assert again.value is not caught.value
    assert again.value is not error


async def test_a_model_error_carries_the_partial_text_too(desk: PlayedDesk, tenant: Tenant) -> None:
    async with tenant.stream("chat", prompt="hi") as stream:
        desk.say("He", 10)
        desk.end("failed", ModelNotLoaded("chat", "was unloaded"))
        with pytest.raises(ModelNotLoaded) as caught:
            await stream.completion()
    assert caught.value.partial_text == "He"
    assert caught.value.model == "chat"


async def test_a_refusal_is_raised_on_entering(tenant: Tenant, desk: PlayedDesk) -> None:
    desk.refusal = Overloaded("full", retry_after_seconds=1.0, depth=3, limit=3)
    with pytest.raises(Overloaded):
        async with tenant.stream("chat", prompt="hi"):
            raise AssertionError("entered")
    with pytest.raises(Overloaded):
        await tenant.generate("chat", prompt="hi")


async def test_options_are_checked_before_anything_is_handed_in(desk: PlayedDesk, tenant: Tenant) -> None:
    with pytest.raises(InvalidRequest):
        tenant.stream("chat", prompt="hi", top_p=2.0)
    with pytest.raises(InvalidRequest):
        await tenant.generate("chat", prompt="hi", top_p=2.0)
    with pytest.raises(InvalidRequest, match="model"):
        tenant.stream("", prompt="hi")
    assert not desk.streams


async def test_a_stream_is_entered_and_iterated_once(desk: PlayedDesk, tenant: Tenant) -> None:
    stream = tenant.stream("chat", prompt="hi")
    with pytest.raises(InvalidRequest, match="not open"):
        await stream.completion()
    async with stream:
        desk.say("He", 10, finish=True)
        desk.end()
        assert len([event async for event in stream]) == 2
        with pytest.raises(InvalidRequest, match="once"):
            async for _ in stream:
                pass
    with pytest.raises(InvalidRequest, match="entered before"):
        await stream.__aenter__()


async def test_several_sequences_are_told_apart_and_become_alternatives(desk: PlayedDesk, tenant: Tenant) -> None:
    async with tenant.stream("chat", prompt="hi", n=2) as stream:
        desk.say("a", 1, number=0)
        desk.say("b", 2, number=1, finish=True)
        desk.say("c", 3, number=0, finish=True)
        desk.end()
        events = [event async for event in stream]
    assert {(event.number, event.text) for event in events if isinstance(event, TextDelta)} == {(0, "ac"), (1, "b")}
    assert isinstance(events[-1], Finished)
    completion = events[-1].completion
    assert (completion.text, [other.text for other in completion.alternatives]) == ("ac", ["b"])


async def test_stops_of_spaces_only_are_reported_in_the_completion(desk: PlayedDesk, tenant: Tenant) -> None:
    async with tenant.stream("chat", prompt="hi", stop=" ") as stream:
        desk.say("Hello", 1, finish=True)
        desk.end()
        warnings = (await stream.completion()).warnings
    assert warnings[:1] == ("stop: ' ' is spaces only and was ignored",)


async def test_each_sequence_says_how_much_of_its_prompt_was_restored(desk: PlayedDesk, tenant: Tenant) -> None:
    async with tenant.stream("chat", prompt="hi", n=2) as stream:
        desk.end(cached_tokens=(1, 0))
        completion = await stream.completion()
    assert completion.usage.cached_tokens == 1
    assert [other.usage.cached_tokens for other in completion.alternatives] == [0]


async def prefill(desk: PlayedDesk, tenant: Tenant, options: dict[str, Any], *, error: TroupeError | None = None) -> PrefixHandle:
    handles = []

    async def ask() -> None:
        handles.append(await tenant.prefill("chat", **options))

    async with anyio.create_task_group() as group:
        group.start_soon(ask)
        await anyio.wait_all_tasks_blocked()
        desk.end("finished" if error is None else "failed", error, pinned_length=2)
    return handles[0]


async def test_a_prefill_gives_a_handle_that_pins_until_it_is_released(desk: PlayedDesk, tenant: Tenant) -> None:
    handle = await prefill(desk, tenant, {"prompt": "hi", "boundaries": [1, 5]})
    (stream,) = desk.streams
    assert (stream.request.prefill_only, stream.request.max_tokens, stream.request.boundaries) == (True, 0, (1, 5))
    assert (handle.model, handle.cached_tokens, handle.boundaries, len(handle.digests)) == ("chat", 2, (1, 2), 2)
    assert desk.released == []
    await handle.release()
    assert desk.released == [stream.request.id]


async def test_a_prefill_that_fails_or_is_cancelled_pins_nothing(desk: PlayedDesk, tenant: Tenant) -> None:
    with pytest.RaisesGroup(WorkerCrashed):
        await prefill(desk, tenant, {"prompt": "hi"}, error=WorkerCrashed(REPORT))
    assert desk.released == [1]
    async with anyio.create_task_group() as group:
        group.start_soon(lambda: tenant.prefill("chat", prompt="hi"))
        await anyio.wait_all_tasks_blocked()
        group.cancel_scope.cancel()
    assert desk.was_cancelled
    assert desk.released == [1, 2]


async def test_messages_that_do_not_extend_the_handle_pin_nothing(desk: PlayedDesk, tenant: Tenant) -> None:
    handle = await prefill(desk, tenant, {"tokens": [1, 2]})
    outcome = Outcome("finished", TokenIds([1, 3]), Timings(0.0, 0.0, 0.0, 1.0), "print")
    other = PrefixHandle(desk, RequestId(99), "chat", outcome, ())
    await prefill(desk, tenant, {"messages": [{"role": "user", "content": "hi"}], "extend": handle})
    assert desk.released == []
    with pytest.RaisesGroup(pytest.RaisesExc(InvalidRequest, match="at token 1;")):
        await prefill(desk, tenant, {"messages": [{"role": "user", "content": "hi"}], "extend": other})
    assert desk.released == [3]


async def test_the_options_of_a_prefill_are_checked_before_anything_is_handed_in(desk: PlayedDesk, tenant: Tenant) -> None:
    for model, options in (("", {"prompt": "hi"}), ("chat", {"prompt": "hi", "boundaries": [0]})):
        with pytest.raises(InvalidRequest):
            await tenant.prefill(model, **options)
    assert not desk.streams
