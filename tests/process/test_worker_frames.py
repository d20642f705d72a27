"""Random and mutated frames at a live worker: nothing dies, and the next good request succeeds."""

from __future__ import annotations

import os
import random

import anyio
import anyio.lowlevel
import pytest
import zmq
from msgspec import structs

from runtime.protocol.channel import socket_path
from runtime.protocol.commands import (
    ChatPrompt,
    Configure,
    FakeScript,
    Forget,
    Grant,
    Inspect,
    Prefill,
    PrefixUse,
    Prepare,
    Publish,
    Release,
    SegmentRange,
    TextPrompt,
    TokenPrompt,
    Unpin,
)
from runtime.protocol.events import Prepared
from runtime.protocol.frames import encode
from runtime.protocol.ids import RequestId, SequenceId
from runtime.protocol.tokens import TokenIds
from runtime.testing import expected_tokens, text_tokens
from tests.process.live_worker import KEY, LiveWorker, live_worker, row

pytestmark = pytest.mark.anyio

NUM_FRAMES = 50_000
"""On each of the two event loops."""

USE = PrefixUse(bytes(32), (SegmentRange(bytes(32), 0, 512, False),), boundaries=(100, 300), pin=True)
GOOD = [
    encode(command)
    for command in (
        Prefill((row(1, list(b"Hello")), row(2, list(range(256)) * 2, limit=520))),
        Prefill((row(3, [300, 70_000]),)),
        Grant(((SequenceId(1), 9), (SequenceId(2), 600))),
        Prepare(RequestId(1), TextPrompt("text é")),
        Prepare(RequestId(2), ChatPrompt('[{"role": "user", "content": "Hi"}]', "[]", "low", "primer")),
        Prepare(RequestId(3), TokenPrompt(TokenIds(range(500)))),
        Release((RequestId(1),), (SequenceId(2),)),
        Configure(3, 1 << 20),
        Prefill(
            (
                structs.replace(row(4, list(range(256)) * 3), prefix=USE),
                structs.replace(row(5, [7, 8], max_tokens=0), prefill_only=True),
            )
        ),
        Publish(((1, "0" * 64), (2, "1" * 64))),
        Unpin((SequenceId(4),)),
        Forget((bytes(range(32)),)),
        Inspect(1),
    )
]


def bad_frames(rng: random.Random) -> list[bytes]:
    kind = rng.randrange(6)
    if kind == 0:
        return [rng.randbytes(rng.choice([0, 1, 8, 60])) for _ in range(rng.randint(1, 4))]
    frames = [bytearray(frame) for frame in rng.choice(GOOD)]
    frame = rng.choice(frames)
    if kind == 1 and frame:
        for _ in range(rng.randint(1, 4)):
            frame[rng.randrange(len(frame))] = rng.randrange(256)
    elif kind == 2:
        del frame[rng.randrange(len(frame) + 1) :]
    elif kind == 3:
        at = rng.randrange(len(frame) + 1)
        frame[at:at] = rng.randbytes(rng.randint(1, 8))
    elif kind == 4:
        frames.insert(rng.randrange(len(frames) + 1), bytearray(rng.randbytes(12)))
    else:
        rng.shuffle(frames)
        frames.pop()
    return [bytes(frame) for frame in frames]


async def read_on(worker: LiveWorker) -> None:
    while True:
        worker.events += await worker.channel.receive()


async def test_a_worker_outlives_random_and_mutated_frames_and_serves_the_next_good_request() -> None:
    rng = random.Random(5)
    async with live_worker(FakeScript(context_length=1024), max_slots=4) as worker:
        with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
            socket.set(zmq.LINGER, 0)
            socket.connect(b"ipc://" + os.fsencode(socket_path(worker.directory, KEY, "c")))  # type: ignore[arg-type]
            async with anyio.create_task_group() as group:
                group.start_soon(read_on, worker)
                for number in range(NUM_FRAMES):
                    frames = bad_frames(rng) or [b""]
                    while True:
                        try:
                            socket.send_multipart(frames, zmq.DONTWAIT)
                            break
                        except zmq.Again:
                            await anyio.sleep(0.001)
                    if number % 100 == 0:
                        await anyio.lowlevel.checkpoint()
                group.cancel_scope.cancel()
            worker.send(Prepare(RequestId(1 << 40), TextPrompt("still there?")))
            prepared = await worker.next(Prepared, lambda event: event.request == 1 << 40)
            assert prepared.tokens.tolist() == text_tokens("still there?")
            worker.send(Prefill((row(1 << 40, prepared.tokens.tolist(), max_tokens=30),)))
            await worker.end_of(1 << 40)
            assert worker.tokens(1 << 40) == expected_tokens(text_tokens("still there?"), max_tokens=30)
            assert (await worker.report(1 << 20)).malformed_frames > NUM_FRAMES // 2
            assert worker.process.poll() is None
