from __future__ import annotations

import os
import resource
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest
import zmq

from runtime.protocol import channel as channels
from runtime.protocol import frames as wire
from runtime.protocol.channel import ChannelClosed, ChannelFull, HostChannel, WorkerChannel
from runtime.protocol.commands import AnyCommand, Inspect, Prepare, Shutdown, TokenPrompt
from runtime.protocol.events import Heartbeat, Hello, Loading, Stopped
from runtime.protocol.frames import FrameError, encode
from runtime.protocol.ids import RequestId
from runtime.protocol.tokens import TokenIds

pytestmark = pytest.mark.anyio
KEY = "w1.1"
PATIENCE_SECONDS = 10.0


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tr-", dir="/tmp") as made:
        yield Path(made)


@pytest.fixture
def host(directory: Path) -> Iterator[HostChannel]:
    with HostChannel(directory, KEY) as made:
        yield made


@pytest.fixture
def worker(host: HostChannel, directory: Path) -> Iterator[WorkerChannel]:
    made = WorkerChannel(directory, KEY)
    yield made
    made.close()


@pytest.fixture
def stranger(directory: Path) -> Iterator[zmq.Socket[bytes]]:
    """Sends whatever it likes to the worker."""
    with zmq.Context() as context, context.socket(zmq.PUSH) as made:
        made.set(zmq.LINGER, 0)
        made.connect(f"ipc://{directory}/{KEY}.c")
        yield made


async def events_from(host: HostChannel, count: int) -> list[object]:
    events: list[object] = []
    with anyio.fail_after(PATIENCE_SECONDS):
        while len(events) < count:
            events += await host.receive()
    return events


def next_command(worker: WorkerChannel) -> AnyCommand:
    command = worker.receive(PATIENCE_SECONDS)
    assert command is not None
    return command


async def test_commands_sent_before_the_worker_exists_arrive_in_order(host: HostChannel, directory: Path) -> None:
    sent = [Inspect(number) for number in range(100)]
    for command in sent:
        host.send(command)
    worker = WorkerChannel(directory, KEY)
    assert [next_command(worker) for _ in sent] == sent
    assert worker.receive(0) is None
    worker.close()


async def test_events_arrive_in_the_order_of_their_sender(host: HostChannel, worker: WorkerChannel) -> None:
    beats = [Heartbeat(step, "idle", 0.0, 0, 0) for step in range(300)]

    def beat() -> None:
        sender = worker.sender()
        for each in beats:
            sender.send(each)
        sender.close()

    thread = threading.Thread(target=beat)
    thread.start()
    steps = [Loading("weights", done) for done in range(300)]
    for step in steps:
        worker.send(step)
    events = await events_from(host, 600)
    thread.join()
    assert [event for event in events if isinstance(event, Heartbeat)] == beats
    assert [event for event in events if isinstance(event, Loading)] == steps


async def test_long_prompts_cross_in_their_own_frames(host: HostChannel, worker: WorkerChannel) -> None:
    command = Prepare(RequestId(1), TokenPrompt(TokenIds(range(200_000))))
    host.send(command)
    assert next_command(worker) == command


async def test_a_waiting_host_is_woken_by_each_event(host: HostChannel, worker: WorkerChannel) -> None:
    """Also when the event comes in the very moment between looking and waiting: the descriptor is edge-triggered."""
    seen: list[object] = []

    async def read() -> None:
        while len(seen) < 500:
            seen.extend(await host.receive())

    with anyio.fail_after(PATIENCE_SECONDS):
        async with anyio.create_task_group() as group:
            group.start_soon(read)
            for step in range(500):
                worker.send(Stopped(step))
                if step % 3 == 0:
                    await anyio.lowlevel.checkpoint()
    assert seen == [Stopped(step) for step in range(500)]


async def test_one_receive_gives_a_bounded_number_of_events(host: HostChannel, worker: WorkerChannel) -> None:
    for step in range(1000):
        worker.send(Stopped(step))
    sizes, total = [], 0
    with anyio.fail_after(PATIENCE_SECONDS):
        while total < 1000:
            sizes.append(len(await host.receive()))
            total += sizes[-1]
    assert max(sizes) <= channels.MAX_EVENTS_PER_RECEIVE


async def test_a_cancelled_receive_loses_nothing(host: HostChannel, worker: WorkerChannel) -> None:
    with anyio.move_on_after(0):
        await host.receive()
    worker.send(Stopped(1))
    worker.send(Stopped(2))
    with anyio.move_on_after(0):
        await host.receive()
    assert await events_from(host, 2) == [Stopped(1), Stopped(2)]


async def test_a_channel_has_one_reader(host: HostChannel) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(host.receive)
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(RuntimeError, match="one reader"):
            await host.receive()
        group.cancel_scope.cancel()


async def test_a_bad_event_is_reported_in_its_place(host: HostChannel, directory: Path) -> None:
    with zmq.Context() as context, context.socket(zmq.PUSH) as raw:
        raw.connect(f"ipc://{directory}/{KEY}.e")
        for frames in (encode(Hello(1, 2, 3)), [b"\xc1"], [b""], [*encode(Stopped(1)), b"abc"], encode(Stopped(2))):
            raw.send_multipart(frames)
        events = await events_from(host, 5)
    assert [event.kind if isinstance(event, FrameError) else event for event in events] == [
        Hello(1, 2, 3),
        "malformed",
        "empty",
        "buffers",
        Stopped(2),
    ]


def test_a_bad_command_costs_one_call_and_the_next_good_one_works(worker: WorkerChannel, stranger: zmq.Socket[bytes]) -> None:
    bad = {"malformed": [b"\xc1"], "empty": [b""], "unknown": encode(Stopped(1)), "buffers": [*encode(Shutdown()), b"abcd"]}
    for kind, frames in bad.items():
        stranger.send_multipart(frames)
        stranger.send_multipart(encode(Inspect(1)))
        with pytest.raises(FrameError) as caught:
            worker.receive(PATIENCE_SECONDS)
        assert caught.value.kind == kind
        assert next_command(worker) == Inspect(1)


def test_an_oversized_command_is_answered_and_loses_no_command_behind_it(
    worker: WorkerChannel, stranger: zmq.Socket[bytes]
) -> None:
    stranger.send_multipart([bytes(wire.MAX_MESSAGE_BYTES + 1)])
    stranger.send_multipart([encode(Inspect(1))[0], bytes(wire.MAX_BUFFER_BYTES + 4)])
    stranger.send_multipart(encode(Inspect(2)))
    for _ in range(2):
        with pytest.raises(FrameError) as caught:
            worker.receive(PATIENCE_SECONDS)
        assert caught.value.kind == "oversized"
    assert next_command(worker) == Inspect(2)


def test_beyond_the_transport_limit_the_connection_is_dropped_and_comes_back_by_itself(
    host: HostChannel, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "MAX_TRANSPORT_BYTES", 100_000)
    worker = WorkerChannel(directory, KEY)
    host.send(Inspect(1))
    assert next_command(worker) == Inspect(1)
    host.send(Prepare(RequestId(1), TokenPrompt(TokenIds(range(100_000)))))
    # What is written right behind it may go down with the connection, so a sender that wants to be heard says it again.
    heard = None
    for number in range(2, 500):
        host.send(Inspect(number))
        heard = worker.receive(0.02)
        if heard is not None:
            break
    assert isinstance(heard, Inspect)
    while worker.receive(0.1) is not None:
        pass
    host.send(Shutdown())
    assert next_command(worker) == Shutdown()
    worker.close()


def test_a_frame_said_to_be_endless_and_plain_noise_on_the_socket_harm_nobody(host: HostChannel, worker: WorkerChannel) -> None:
    greeting = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
    ready = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x04PUSH"
    for speech in (
        b"GET / HTTP/1.1\r\n\r\n",
        bytes(300),
        b"\xff" * 300,
        greeting + ready + b"\x02" + b"\x7f" + b"\xff" * 7 + b"abc",
    ):
        for suffix in "ce":
            with socket.socket(socket.AF_UNIX) as raw:
                raw.connect(os.fspath(host._paths[0].with_suffix(f".{suffix}") if suffix == "c" else host._paths[1]))
                raw.sendall(speech)
                raw.settimeout(0.05)
                try:
                    while raw.recv(1000):
                        pass
                except OSError:
                    pass
    host.send(Inspect(1))
    assert next_command(worker) == Inspect(1)


async def test_a_worker_that_takes_nothing_makes_the_channel_full_and_never_blocks_the_host(host: HostChannel) -> None:
    for number in range(channels.COMMAND_SEND_MARK):
        host.send(Inspect(number))
    with pytest.raises(ChannelFull):
        host.send(Inspect(0))


async def test_the_last_words_of_a_worker_arrive_though_nobody_listened_while_it_closed(
    host: HostChannel, worker: WorkerChannel
) -> None:
    for step in range(2_000):
        worker.send(Stopped(step))
    worker.close()
    assert await events_from(host, 2_000) == [Stopped(step) for step in range(2_000)]


def test_a_worker_waits_for_commands_only_as_long_as_told(worker: WorkerChannel) -> None:
    assert worker.receive(0) is None
    assert worker.receive(0.0001) is None
    assert worker.receive(0.01) is None


async def test_closing_ends_a_waiting_receive(directory: Path) -> None:
    host = HostChannel(directory, KEY)

    async def read() -> None:
        with pytest.raises(ChannelClosed):
            await host.receive()

    with anyio.fail_after(PATIENCE_SECONDS):
        async with anyio.create_task_group() as group:
            group.start_soon(read)
            await anyio.wait_all_tasks_blocked()
            host.close()


async def test_a_closed_channel_says_so(directory: Path) -> None:
    host, worker = HostChannel(directory, KEY), WorkerChannel(directory, KEY)
    sender = worker.sender()
    for _ in range(2):
        worker.close(linger_seconds=0.1)
        host.close()
    with pytest.raises(ChannelClosed):
        host.send(Shutdown())
    with pytest.raises(ChannelClosed):
        await host.receive()
    with pytest.raises(ChannelClosed):
        worker.receive(0)
    for closed in (worker, sender, sender):
        with pytest.raises(ChannelClosed):
            closed.send(Stopped(1))
    with pytest.raises(ChannelClosed):
        worker.sender()


def test_closing_leaves_no_socket_file_no_descriptor_and_no_thread(directory: Path) -> None:
    def descriptors() -> int:
        return len(os.listdir("/dev/fd"))

    HostChannel(directory, "first").close()  # whatever is made once per process
    before = descriptors(), threading.active_count()
    for number in range(5):
        host, worker = HostChannel(directory, f"w{number}"), WorkerChannel(directory, f"w{number}")
        sender = worker.sender()
        sender.close()
        host.send(Inspect(1))
        assert len(list(directory.iterdir())) == 2
        worker.close()
        host.close()
    assert list(directory.iterdir()) == []
    assert (descriptors(), threading.active_count()) == before


def test_sockets_live_under_names_that_are_not_ascii(directory: Path) -> None:
    for name in ("模型 与 演员", "Модель", "cafe\u0301"):
        odd = directory / name
        odd.mkdir()
        with HostChannel(odd, KEY) as host:
            worker = WorkerChannel(odd, KEY)
            host.send(Inspect(1))
            assert next_command(worker) == Inspect(1)
            worker.close()


@pytest.mark.parametrize("key", ["", "a/b", "nul\0", "x" * (channels.MAX_KEY_BYTES + 1), "界" * 6])
def test_a_key_is_a_short_file_name(directory: Path, key: str) -> None:
    with pytest.raises(ValueError, match="key"):
        HostChannel(directory, key)


def test_a_socket_path_beyond_the_platforms_limit_is_refused_by_name(directory: Path) -> None:
    long = directory / ("d" * 100)
    long.mkdir()
    for side in (HostChannel, WorkerChannel):
        with pytest.raises(ValueError, match="103 bytes"):
            side(long, KEY)


def test_a_directory_whose_name_is_no_text_is_refused(directory: Path) -> None:
    with pytest.raises(ValueError, match="UTF-8"):
        HostChannel(directory / os.fsdecode(b"\xff\xfe"), KEY)


def test_a_missing_directory_leaves_nothing_open(directory: Path) -> None:
    before = len(os.listdir("/dev/fd"))
    for side in (HostChannel, WorkerChannel):
        with pytest.raises(zmq.ZMQError):
            side(directory / "missing", KEY)
    assert len(os.listdir("/dev/fd")) == before


@pytest.mark.parametrize("num_left", [0, 5, 15])
def test_a_process_that_may_open_no_more_files_gets_an_error_and_lives(directory: Path, num_left: int) -> None:
    """libzmq would end it."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = sorted(map(int, os.listdir("/dev/fd")))
    free = [descriptor for descriptor in range(max(before) + 20) if descriptor not in before]
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[num_left], limits[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            HostChannel(directory, KEY)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert sorted(map(int, os.listdir("/dev/fd"))) == before
    HostChannel(directory, KEY).close()
