"""What happens in a worker from its first word to its last? Hello, Load, Ready, the loop, Stopped; or Failed on the way."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import zmq

from runtime.engine.engine import Loaded, Loader, LoadError, Progress, Tokenizer
from runtime.protocol.channel import WorkerChannel, socket_path
from runtime.protocol.commands import PROTOCOL_VERSION, AnyCommand, Inspect, Load, Prefill, Prepare, Release, Shutdown
from runtime.protocol.events import Failed, Hello, LoadFailure, Loading, Ready, Refused, Released, Stopped
from runtime.protocol.frames import FrameError
from runtime.protocol.ids import RequestId, SequenceId
from runtime.worker.desk import TextDesk
from runtime.worker.device import Device, device_of
from runtime.worker.device_queue import NoSeat
from runtime.worker.foreign import bounded
from runtime.worker.heartbeat import HeartbeatThread
from runtime.worker.log import logger
from runtime.worker.loop import Loop
from runtime.worker.prefix_form import form_of
from runtime.worker.restrictions import chat_restrictions
from runtime.worker.status import Status

LOAD_COMMAND_SECONDS: Final = 120.0
PROGRESS_SECONDS: Final = 0.1
PROBE_SECONDS: Final = 5.0
"""For rendering six tiny conversations with the checkpoint's template."""
FAILED_EXIT_CODE: Final = 1


def live(directory: Path, key: str, incarnation: int, pid: int) -> int:
    """The worker's whole life; returns its exit code. Whatever goes wrong is said to the host as `Failed`."""
    status = Status()
    channel = WorkerChannel(directory, key)
    heartbeat = None
    try:
        channel.send(Hello(PROTOCOL_VERSION, pid, incarnation))
        heartbeat = HeartbeatThread(channel.sender(), status)
        load = _wait_for_load(channel)
        if load is not None:
            loader = partial(_load, incarnation, partial(_send_garbage, directory, key))
            _serve(channel, status, heartbeat, load, loader, ledger=directory / f"{key}.temporary")
        heartbeat.stop()
        channel.send(Stopped(status.step))
        return 0
    except LoadError as error:
        return _fail(channel, error.reason, str(error))
    except MemoryError as error:
        return _fail(channel, "out_of_memory", f"out of memory: {error}")
    except Exception as error:  # the worker's last boundary: the host hears of it and replaces the process
        return _fail(channel, "error", f"{type(error).__name__}: {error}")
    finally:
        if heartbeat is not None:
            heartbeat.stop()
        channel.close()


def _serve(channel: WorkerChannel, status: Status, heartbeat: HeartbeatThread, load: Load, loader: Loader, *, ledger: Path) -> None:
    status.phase = "loading"
    try:
        device = device_of(load.device_lease, status)
    except (NoSeat, OSError) as error:
        raise LoadError("error", f"the device lease: {error}") from error
    loaded = loader(load, _Progress(channel, device, status))
    restrictions: tuple[str, ...] = ()
    if loaded.tokenizer.has_chat_template:
        try:
            restrictions = bounded(lambda: chat_restrictions(partial(_renders, loaded.tokenizer)), PROBE_SECONDS)
        except TimeoutError:  # plain prompts work all the same
            restrictions = ("unusable",)
    desk = TextDesk(loaded.tokenizer, channel.sender())
    heartbeat.on_beat = desk.watch
    try:
        status.phase = "idle"
        form = form_of(loaded)
        prefix = None if form is None else form.facts
        channel.send(Ready(msgspec.structs.replace(loaded.facts, chat_restrictions=restrictions, prefix=prefix)))
        Loop(channel, loaded, load, desk, status, device, ledger=ledger).run()
    finally:
        desk.close()
    device.close()
    loaded.engine.close()
    for hook in loaded.close_hooks:
        hook()


def _load(incarnation: int, send_garbage: Callable[[], None], load: Load, progress: Progress) -> Loaded:
    """Heavy imports happen here, after Hello and under the host's load deadline."""
    if load.kind == "fake":
        from runtime.engine import fake

        return fake.load(load, progress, incarnation=incarnation, send_garbage=send_garbage)
    progress("imports", 0, 1)
    from runtime.engine import lm

    return lm.load(load, progress)


def _wait_for_load(channel: WorkerChannel) -> Load | None:
    """The first command; others are refused until it comes. None: `Shutdown` came instead.

    :raises LoadError: it does not come in time.
    """
    deadline = time.monotonic() + LOAD_COMMAND_SECONDS
    while True:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise LoadError("error", f"no Load command came within {LOAD_COMMAND_SECONDS:g} s")
        try:
            command = channel.receive(remaining)
        except FrameError as error:
            channel.send(Refused("", "malformed", f"{error.kind}: {error}"))
            continue
        if isinstance(command, Load):
            return command
        if isinstance(command, Shutdown):
            return None
        if command is not None:
            _refuse_early(channel, command)


def _refuse_early(channel: WorkerChannel, command: AnyCommand) -> None:
    requests: tuple[RequestId, ...] = ()
    sequences: tuple[SequenceId, ...] = ()
    match command:
        case Release():
            channel.send(Released(command.requests, command.sequences, 0))
            return
        case Prepare():
            requests = (command.request,)
        case Prefill():
            sequences = tuple(row.sequence for row in command.rows)
        case Inspect():
            pass
    name = command.__struct_config__.tag
    channel.send(Refused(str(name), "not_ready", "no model is loaded yet; send Load first", requests, sequences))


class _Progress:
    """`Loading` events, at most ten a second, always those that begin or end a stage. For the loading thread only.

    The self-test computes as steps do, with the device lease; whenever it reports, others may have their turn.
    """

    def __init__(self, channel: WorkerChannel, device: Device, status: Status) -> None:
        self._channel = channel
        self._device = device
        self._status = status
        self._stage = ""
        self._next_at = 0.0

    def __call__(self, stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        if stage != self._stage or now >= self._next_at or (total > 0 and done >= total):
            self._stage, self._next_at = stage, now + PROGRESS_SECONDS
            self._channel.send(Loading(stage, done, total))
        if stage == "selftest":
            self._take_turns(is_over=done >= total)

    def _take_turns(self, *, is_over: bool) -> None:
        if is_over or self._device.is_wanted():
            self._device.give_back()
        if not is_over:
            while not self._device.take(is_background=False):
                pass  # each try sleeps, and the last one raises
            self._status.phase = "loading"


def _renders(tokenizer: Tokenizer, messages: list[dict[str, Any]]) -> bool:
    try:
        tokenizer.render(messages, options={}, add_generation_prompt=True)
    except Exception:  # whatever a template raises means that it refuses
        return False
    return True


def _send_garbage(directory: Path, key: str) -> None:
    """Frames that are no event: what the fake engine's fault "garbage" does."""
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.set(zmq.LINGER, 1000)
        socket.connect(b"ipc://" + os.fsencode(socket_path(directory, key, "e")))  # type: ignore[arg-type]
        socket.send_multipart([b"\xc1 scripted garbage", b"\x00\xff\xfe"])


def _fail(channel: WorkerChannel, reason: LoadFailure, message: str) -> int:
    """Say why this worker ends; called while handling the exception."""
    text = traceback.format_exc()
    logger().error("worker failed", reason=reason, message=message, traceback=text)
    channel.send(Failed(reason, message, text))
    return FAILED_EXIT_CODE
