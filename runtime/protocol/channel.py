"""How do frames get from one process to the other?

One pair of one-way ZeroMQ sockets for each incarnation of a worker: `KEY.c` carries commands to the worker, `KEY.e` its
events back, both as ipc sockets in a private directory. Which side binds, and every high-water mark, is chosen so that
nothing said before the other side is there, or just before it goes, is lost:

- The receiver binds and the sender connects. A connecting socket has its pipe from the first moment and keeps it over
  a lost connection, so commands may be sent before the worker exists; a binding one would have nowhere to put them.
- A PULL whose queue is full when its peer closes loses what the peer still had: the closing peer's engine dies with the
  unread bytes. A worker closes after `Stopped`, so the host's mark for events lies far above what a worker may send
  unasked (its sequences park at their limits); it bounds memory and is never reached in order. The host never closes
  before the worker is gone, so the worker's own mark may be low.

Sizes are refused by `frames.py` on both sides, with an answer. `MAX_TRANSPORT_BYTES` is only the net below: libzmq drops
a connection that announces a longer frame without allocating it, and the sender reconnects by itself.
"""

from __future__ import annotations

import math
import os
import threading
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import anyio
import zmq

from runtime.protocol.commands import AnyCommand
from runtime.protocol.events import AnyEvent
from runtime.protocol.frames import FrameError, decode_command, decode_event, encode

MAX_SOCKET_PATH_BYTES: Final = 103
"""sun_path holds 104 bytes with its NUL on macOS (108 on Linux)."""
MAX_KEY_BYTES: Final = 16
_POLLIN: Final = int(zmq.POLLIN)
MAX_TRANSPORT_BYTES: Final = 1 << 30
COMMAND_SEND_MARK: Final = 16_384
COMMAND_RECEIVE_MARK: Final = 1_024
EVENT_SEND_MARK: Final = 1_024
EVENT_RECEIVE_MARK: Final = 100_000
MAX_EVENTS_PER_RECEIVE: Final = 256
RECONNECT_MILLISECONDS: Final = 10
DESCRIPTORS_NEEDED: Final = 24
"""Of one host channel with its worker connected, generously."""
SENDER_LINGER_MILLISECONDS: Final = 1_000


class ChannelFull(Exception):
    """The peer has not taken anything for so long that its queue is full; the message was not sent."""


class ChannelClosed(Exception):
    """This side of the channel has been closed."""


def socket_path(directory: Path, key: str, suffix: str) -> Path:
    """:raises ValueError: the key is no plain short name, the path is no UTF-8, or longer than a socket's address may be."""
    if not key or len(key.encode()) > MAX_KEY_BYTES or "/" in key or "\0" in key:
        raise ValueError(f"channel key {key!r} must be a file name of 1 to {MAX_KEY_BYTES} bytes")
    path = directory.absolute() / f"{key}.{suffix}"
    address = os.fsencode(path)
    if address != str(path).encode(errors="replace"):
        raise ValueError(f"socket path {path!r} is no UTF-8; use a directory with another name")
    if len(address) > MAX_SOCKET_PATH_BYTES:
        raise ValueError(f"socket path {path} is longer than {MAX_SOCKET_PATH_BYTES} bytes; use a directory with a shorter name")
    return path


def require_descriptors(number: int) -> None:
    """libzmq ends the whole process when it finds no descriptor for itself, so see beforehand that there are some.

    :raises OSError: this process (or the system) has fewer left.
    """
    taken: list[int] = []
    try:
        taken += os.pipe()
        while len(taken) < number:
            taken.append(os.dup(taken[0]))
    finally:
        for descriptor in taken:
            os.close(descriptor)


def _open_pull(context: zmq.Context[zmq.Socket[bytes]], path: Path, receive_mark: int) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.PULL)
    socket.set(zmq.RCVHWM, receive_mark)
    socket.set(zmq.MAXMSGSIZE, MAX_TRANSPORT_BYTES)
    socket.set(zmq.LINGER, 0)
    return _attach(socket, path, bind=True)


def _open_push(context: zmq.Context[zmq.Socket[bytes]], path: Path, send_mark: int, linger: int) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.PUSH)
    socket.set(zmq.SNDHWM, send_mark)
    socket.set(zmq.RECONNECT_IVL, RECONNECT_MILLISECONDS)
    socket.set(zmq.LINGER, linger)
    return _attach(socket, path, bind=False)


def _attach(socket: zmq.Socket[bytes], path: Path, *, bind: bool) -> zmq.Socket[bytes]:
    try:
        (socket.bind if bind else socket.connect)(f"ipc://{path}")
    except BaseException:
        socket.close(linger=0)
        raise
    return socket


def _has_message(socket: zmq.Socket[bytes]) -> bool:
    events = socket.getsockopt(zmq.EVENTS)  # faster than `get` and `poll`, and looked at for every token
    assert isinstance(events, int)
    return bool(events & _POLLIN)


class HostChannel:
    """The host's side, for one incarnation. On the event loop's thread only; asyncio and trio alike.

    :raises ValueError: see `socket_path`. :raises zmq.ZMQError: the socket cannot be made (for instance no such directory).
    :raises OSError: too few descriptors are left.
    """

    def __init__(self, directory: Path, key: str) -> None:
        require_descriptors(DESCRIPTORS_NEEDED)
        self._beside = directory / key
        self._paths = (socket_path(directory, key, "c"), socket_path(directory, key, "e"))
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._closed = False
        self._waiting = False
        try:
            self._events = _open_pull(self._context, self._paths[1], EVENT_RECEIVE_MARK)
            self._commands = _open_push(self._context, self._paths[0], COMMAND_SEND_MARK, linger=0)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._descriptor: int = self._events.FD

    def beside(self, suffix: str) -> Path:
        """The path of a file of the same worker, in the same private directory."""
        return self._beside.with_name(f"{self._beside.name}.{suffix}")

    def send(self, command: AnyCommand) -> None:
        """Never blocks. What is sent before the worker has connected waits for it.

        :raises ChannelFull: nothing was sent; the worker has long taken nothing.
        :raises ChannelClosed: after `close`.
        :raises FrameError: the command is too large for the protocol; nothing was sent.
        """
        if self._closed:
            raise ChannelClosed("this worker's channel is closed")
        frames = encode(command)
        try:
            self._commands.send_multipart(frames, zmq.DONTWAIT)
        except zmq.Again:
            raise ChannelFull(f"{COMMAND_SEND_MARK} commands wait for a worker that takes none") from None

    async def receive(self) -> list[AnyEvent | FrameError]:
        """Wait for events and give 1 to 256 of them, in order for each of the worker's senders. One reader at a time.

        Frames that are no event stand in the list as their FrameError. Cancelling loses nothing.

        :raises ChannelClosed: after `close`, also when that happens during the wait.
        """
        if self._waiting:
            raise RuntimeError("a channel has one reader")
        self._waiting = True
        try:
            waited = False
            while True:
                if self._closed:
                    raise ChannelClosed("this worker's channel is closed")
                # The descriptor tells of changes only (edge-triggered): wait for it only when EVENTS, read after the last
                # receive, says that there is nothing.
                if not _has_message(self._events):
                    await anyio.wait_readable(self._descriptor)
                    waited = True
                elif not waited:
                    await anyio.lowlevel.checkpoint()
                    waited = True
                elif events := self._drain():
                    return events
        except anyio.ClosedResourceError:
            raise ChannelClosed("this worker's channel was closed while waiting for events") from None
        finally:
            self._waiting = False

    def _drain(self) -> list[AnyEvent | FrameError]:
        events: list[AnyEvent | FrameError] = []
        while len(events) < MAX_EVENTS_PER_RECEIVE:
            try:
                frames = self._events.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                break
            try:
                events.append(decode_event(frames))
            except FrameError as error:
                events.append(error)
        return events

    def close(self) -> None:
        """Close at once, dropping what was not sent or received, and remove the socket files, also the worker's. Idempotent.

        Call it when the worker is gone (one that still starts could make its file again).
        """
        if self._closed:
            return
        self._closed = True
        if self._waiting:
            anyio.notify_closing(self._descriptor)
        self._context.destroy(linger=0)
        for path in self._paths:
            path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()


class EventSender:
    """One thread's own way to send events. Used and closed by that thread only."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], path: Path) -> None:
        self._socket = _open_push(context, path, EVENT_SEND_MARK, SENDER_LINGER_MILLISECONDS)

    def send(self, event: AnyEvent) -> None:
        """Blocks while the host takes nothing: a stopped host stops its workers (a dead one ends them, by the watchdog).

        :raises ChannelClosed: this sender, or the whole channel, was closed (from then on the sender is closed too).
        :raises FrameError: the event is too large for the protocol; nothing was sent.
        """
        if self._socket.closed:
            raise ChannelClosed("this sender is closed")
        frames = encode(event)
        try:
            self._socket.send_multipart(frames)
        except zmq.ContextTerminated:
            self._socket.close()
            raise ChannelClosed("the worker's channel was closed") from None

    def close(self) -> None:
        """Close; what was sent goes on to the host for up to a second. Idempotent."""
        self._socket.close()


class WorkerChannel:
    """The worker's side: one thread receives commands and sends events; other threads send through a `sender()` of their own.

    :raises ValueError: see `socket_path`. :raises zmq.ZMQError: the socket cannot be made.
    """

    def __init__(self, directory: Path, key: str) -> None:
        self._event_path = socket_path(directory, key, "e")
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._closed = False
        try:
            self._commands = _open_pull(self._context, socket_path(directory, key, "c"), COMMAND_RECEIVE_MARK)
            self._sender = EventSender(self._context, self._event_path)
        except BaseException:
            self._context.destroy(linger=0)
            raise

    def receive(self, timeout_seconds: float) -> AnyCommand | None:
        """The next command, or None when none has come in time; 0 only looks, in about a microsecond.

        :raises FrameError: what came was no command; it is consumed, the next call goes on with the next.
        :raises ChannelClosed: after `close`.
        """
        if self._closed:
            raise ChannelClosed("the worker's channel is closed")
        if not _has_message(self._commands) and (
            timeout_seconds <= 0 or not self._commands.poll(math.ceil(timeout_seconds * 1000))
        ):
            return None
        try:
            frames = self._commands.recv_multipart(zmq.DONTWAIT)
        except zmq.Again:
            return None
        return decode_command(frames)

    def send(self, event: AnyEvent) -> None:
        """As `EventSender.send`."""
        self._sender.send(event)

    def sender(self) -> EventSender:
        """A sender for another thread, which then owns it. Call this in that thread, or before it starts.

        Order is kept within a sender, not between senders.
        """
        if self._closed:
            raise ChannelClosed("the worker's channel is closed")
        return EventSender(self._context, self._event_path)

    def close(self, linger_seconds: float = 1.0) -> None:
        """Give the host up to `linger_seconds` to take what was sent, then close. Idempotent.

        Other threads' senders raise ChannelClosed from now on and close themselves; one that never sends again cannot hold
        this up beyond the deadline.
        """
        if self._closed:
            return
        self._closed = True
        self._commands.close(linger=0)
        self._sender._socket.close(linger=int(linger_seconds * 1000))
        # Ending the context waits for all sockets of all threads, without a deadline of its own.
        ending = threading.Thread(target=self._context.term, name="channel-close", daemon=True)
        ending.start()
        ending.join(linger_seconds + 0.5)
