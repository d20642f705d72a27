"""A client's end of a request: what it receives, what it may await, and what its reading tells the scheduler."""

from __future__ import annotations

import anyio
import anyio.lowlevel
import pytest

from runtime.protocol.commands import Sampling, TextPrompt
from runtime.protocol.events import FinishReason, TokenLogprob
from runtime.protocol.ids import ModelName, RequestId, TenantId
from runtime.protocol.tokens import TokenIds
from runtime.scheduler.request import Outcome, Piece, Request, Timings
from runtime.scheduler.stimuli import Cancel, Read, Stimulus, Unwindow
from runtime.scheduler.stream import TokenStream

pytestmark = pytest.mark.anyio

ME = RequestId(1)
FINISHED = Outcome("finished", TokenIds([1]), Timings(0.0, 0.0, 0.0, 1.0), "print")
CANCELLED = Outcome("cancelled", TokenIds([1]), Timings(0.0, 0.0, 0.0, 1.0), "print")


class Told(list[Stimulus]):
    """What a stream told the scheduler; answers a Cancel as the scheduler does, in the same call."""

    stream: TokenStream

    def __call__(self, stimulus: Stimulus) -> None:
        self.append(stimulus)
        if isinstance(stimulus, Cancel):
            self.stream.end(CANCELLED)


def a_stream(*, num_sequences: int = 1, windowed: bool = True, window_tokens: int = 8) -> tuple[TokenStream, Told]:
    request = Request(
        ME, TenantId("t"), ModelName("m"), TextPrompt("x"), Sampling(), 100, num_sequences=num_sequences, windowed=windowed
    )
    told = Told()
    told.stream = TokenStream(request, told, window_tokens)
    return told.stream, told


def piece(*tokens: int, text: str = "", number: int = 0, finish: FinishReason | None = None, stop: str | None = None) -> Piece:
    return Piece(number, tokens, text or "".join(f"<{token}>" for token in tokens), (), finish, stop)


async def test_a_reader_gets_each_piece_as_it_comes_and_the_outcome_last_again_and_again() -> None:
    stream, _ = a_stream()
    received: list[Piece | Outcome] = []

    async def read() -> None:
        while not received or isinstance(received[-1], Piece):
            received.append(await stream.receive())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read)
        for token in (1, 2):
            await anyio.wait_all_tasks_blocked()
            stream.deliver(piece(token))
        await anyio.wait_all_tasks_blocked()
        stream.deliver(piece(finish="stop", text="tail", stop="END"))
        stream.end(FINISHED)
    assert received == [piece(1), piece(2), piece(text="tail", finish="stop", stop="END"), FINISHED]
    assert await stream.receive() is FINISHED
    assert stream.outcome is FINISHED


async def test_a_slow_reader_gets_everything_new_of_a_sequence_in_one_piece() -> None:
    stream, _ = a_stream()
    stream.deliver(piece(1))
    assert await stream.receive() == piece(1)
    for token in (2, 3, 4):
        stream.deliver(piece(token))
    stream.deliver(piece(5, finish="length"))
    stream.end(FINISHED)
    assert await stream.receive() == piece(2, 3, 4, 5, finish="length")
    assert await stream.receive() is FINISHED


async def test_several_sequences_are_kept_apart_and_each_is_in_order() -> None:
    stream, _ = a_stream(num_sequences=2)
    for token in range(3):
        stream.deliver(piece(token, number=0))
        stream.deliver(piece(10 + token, number=1))
    assert await stream.receive() == piece(0, 1, 2, number=0)
    assert await stream.receive() == piece(10, 11, 12, number=1)


async def test_logprobs_come_with_their_tokens() -> None:
    stream, _ = a_stream()
    first, second = TokenLogprob(1, -0.5), TokenLogprob(2, -0.25)
    stream.deliver(Piece(0, (1,), "a", (first,), None, None))
    await stream.receive()
    stream.deliver(Piece(0, (2,), "b", (second,), None, None))
    received = await stream.receive()
    assert isinstance(received, Piece)
    assert received.logprobs == (second,)
    assert stream.sequences[0].logprobs == [first, second]


async def test_the_results_hold_everything_that_came_read_or_not() -> None:
    stream, _ = a_stream(num_sequences=2)
    stream.deliver(piece(1))
    await stream.receive()
    stream.deliver(piece(2, finish="stop", stop="END"))
    result, other = stream.sequences
    assert (result.number, result.token_ids, result.text) == (0, [1, 2], "<1><2>")
    assert (result.finish, result.matched_stop) == ("stop", "END")
    assert (other.number, other.token_ids, other.text, other.finish) == (1, [], "", None)


async def test_what_was_delivered_before_an_end_is_read_before_it() -> None:
    stream, _ = a_stream()
    stream.deliver(piece(1))
    stream.cancel()
    assert await stream.receive() == piece(1)
    assert await stream.receive() is CANCELLED


async def test_cancelling_is_idempotent_and_ends_the_stream_at_once_for_all_who_wait() -> None:
    stream, told = a_stream()
    outcomes: list[Piece | Outcome] = []

    async def receive() -> None:
        outcomes.append(await stream.receive())

    async def wait() -> None:
        outcomes.append(await stream.wait())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(receive)
        tasks.start_soon(wait)
        tasks.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        stream.cancel()
        stream.cancel()
    assert outcomes == [CANCELLED] * 3
    assert told.count(Cancel(ME)) == 1


async def test_cancelling_after_the_end_changes_nothing() -> None:
    stream, told = a_stream()
    stream.end(FINISHED)
    stream.cancel()
    assert (stream.outcome, told) == (FINISHED, [])


async def test_awaiting_the_end_lets_the_sequences_run_freely_and_works_without_iterating() -> None:
    stream, told = a_stream()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(stream.wait)
        await anyio.wait_all_tasks_blocked()
        assert told == [Unwindow(ME)]
        for token in range(100):
            stream.deliver(piece(token))
        stream.end(FINISHED)
    assert await stream.wait() is FINISHED
    assert stream.sequences[0].token_ids == list(range(100))
    assert told == [Unwindow(ME)]
    assert await stream.receive() == piece(*range(100))


async def test_a_request_that_was_never_windowed_tells_nothing() -> None:
    stream, told = a_stream(windowed=False)
    stream.deliver(piece(*range(50)))
    await stream.receive()
    stream.end(FINISHED)
    await stream.wait()
    assert told == []


async def test_reading_is_reported_a_quarter_of_the_window_at_a_time() -> None:
    stream, told = a_stream(window_tokens=8)
    for token in range(5):
        stream.deliver(piece(token))
        await stream.receive()
    assert told == [Read(ME, 0, 2), Read(ME, 0, 4)]
    for token in range(5, 10):
        stream.deliver(piece(token))
    await stream.receive()
    assert told[2:] == [Read(ME, 0, 10)]


async def test_reading_is_reported_for_each_sequence_and_not_after_the_end() -> None:
    stream, told = a_stream(num_sequences=2, window_tokens=8)
    stream.deliver(piece(1, 2, number=1))
    await stream.receive()
    stream.deliver(piece(1, 2, number=0))
    stream.end(FINISHED)
    await stream.receive()
    assert told == [Read(ME, 1, 2)]


async def test_a_task_cancelled_while_receiving_leaves_the_stream_as_it_was() -> None:
    stream, _ = a_stream()
    with anyio.move_on_after(0) as scope:
        await stream.receive()
    assert scope.cancelled_caught
    stream.deliver(piece(1))
    with anyio.CancelScope() as scope:
        scope.cancel()
        await stream.receive()
    assert scope.cancelled_caught
    stream.deliver(piece(2))
    assert await stream.receive() == piece(1, 2)


async def test_a_task_cancelled_just_when_a_piece_arrives_loses_nothing() -> None:
    stream, _ = a_stream()
    received: list[Piece | Outcome] = []

    async def read() -> None:
        received.append(await stream.receive())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read)
        await anyio.wait_all_tasks_blocked()
        stream.deliver(piece(1))
        tasks.cancel_scope.cancel()
    stream.deliver(piece(2))
    stream.end(FINISHED)
    while not received or isinstance(received[-1], Piece):
        received.append(await stream.receive())
    assert [token for each in received if isinstance(each, Piece) for token in each.tokens] == [1, 2]


async def test_a_second_reader_is_told_that_there_is_one() -> None:
    stream, _ = a_stream()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(stream.receive)
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(anyio.BusyResourceError):
            await stream.receive()
        tasks.cancel_scope.cancel()


async def test_a_reader_that_never_has_to_wait_lets_others_run() -> None:
    stream, _ = a_stream()
    others_turns = 0

    async def other() -> None:
        nonlocal others_turns
        for _ in range(5):
            others_turns += 1
            await anyio.lowlevel.checkpoint()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(other)
        for token in range(20):
            stream.deliver(piece(token))
            await stream.receive()
        assert others_turns == 5
