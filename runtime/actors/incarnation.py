"""How does one worker process live? Started, greeted, loaded, listened to, judged, ended: the host's twin of one incarnation.

One task reads the channel and judges the worker's silence, one waits for the exit of its process. Whoever first finds a reason
for the end notes it with `_decide`; `run` then ends the process and returns the `Ending`. Nothing is left when it returns.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Literal

import anyio

from runtime.actors.clocks import MIN_SLEEP_SECONDS, asleep_seconds
from runtime.actors.endings import Cause, Ending
from runtime.actors.health import Vigil
from runtime.actors.reports import Stall
from runtime.actors.roles import Owner, Process
from runtime.config import Settings
from runtime.protocol.channel import MAX_EVENTS_PER_RECEIVE, ChannelClosed, ChannelFull, HostChannel
from runtime.protocol.commands import PROTOCOL_VERSION, AnyCommand, Shutdown
from runtime.protocol.events import AnyEvent, Failed, Heartbeat, Hello, Loading, Ready, Refused, StepDone, Stopped
from runtime.protocol.frames import FrameError
from runtime.protocol.ids import Incarnation as IncarnationNumber

SETTLE_SECONDS = 0.25
"""Before a worker is judged: what it said while our own loop was blocked gets this long to come in."""
LAST_WORDS_SECONDS = 0.25
"""What a process that has exited by itself said last gets this long to come in, when it may explain the exit."""
SOFT_SECONDS: Final = 2.0
"""What a stuck worker gets for ending by itself, or a quarter of its silence when that is less."""
STACKS_SECONDS: Final = 0.2
"""For writing down its stacks."""
NUM_REMEMBERED_MESSAGES: Final = 64
REMAINDER_SECONDS = 0.02
"""The same for results of a worker that ended in another way."""


class Incarnation:
    """One process. `run` once; `send`, `stop`, `kill` and `breach` at any time from the same loop."""

    def __init__(
        self,
        number: IncarnationNumber,
        process: Process,
        channel: HostChannel,
        owner: Owner,
        settings: Settings,
        clock: Callable[[], float],
        *,
        stacks: Path = Path(os.devnull),
        asleep: Callable[[], float] | None = None,
    ) -> None:
        """stacks: the file that the worker writes its stacks to when it is asked to. asleep: see `clocks.py`."""
        self.number = number
        self.process = process
        self.num_malformed = 0
        self._channel = channel
        self._owner = owner
        self._settings = settings
        self._clock = clock
        self._stage: Literal["spawned", "loading", "ready"] = "spawned"
        self._stage_deadline = clock() + settings.connect_seconds
        self._vigil = Vigil(settings.silence_seconds, clock())
        self._phase = "spawned"
        self._decision: tuple[Cause, str] | None = None
        self._decided = anyio.Event()
        self._reason = "error"
        self._stacks = stacks
        self._asleep = asleep_seconds if asleep is None else asleep
        self._slept = self._asleep()
        self._messages: deque[tuple[float, str, str]] = deque(maxlen=NUM_REMEMBERED_MESSAGES)

    @property
    def is_ready(self) -> bool:
        return self._stage == "ready" and self._decision is None

    # -- from outside -------------------------------------------------------------------------------------

    def send(self, command: AnyCommand) -> None:
        """Drops the command when the end is decided; decides the end when the worker takes no commands any more."""
        if self._decision is not None:
            return
        try:
            self._channel.send(command)
        except ChannelFull as error:
            self._decide("breach", str(error))
        except FrameError as error:  # the host's own options are bounded so that this cannot happen; nobody may wait for ever
            self._decide("breach", f"a command to it cannot be sent: {error}")
        except ChannelClosed:
            pass
        else:
            now = self._clock()
            self._remember("to", command, now)
            self._vigil.asked(command, now)

    def _remember(self, direction: str, message: object, now: float) -> None:
        """Its kind alone: what is in it is nobody's business."""
        self._messages.append((now, direction, type(message).__name__))

    def stop(self) -> None:
        """End it: in order when it is ready, at once otherwise (a load cannot be interrupted from inside)."""
        self._decide("asked" if self._stage == "ready" else "killed", "asked to stop")

    def kill(self) -> None:
        self._decide("killed", "ended at once")
        self.process.kill()

    def breach(self, what: str) -> None:
        self._decide("breach", what)

    def _decide(self, cause: Cause, detail: str) -> None:
        """The first reason stands."""
        if self._decision is None:
            self._decision = (cause, detail)
            self._decided.set()

    # -- the life -----------------------------------------------------------------------------------------

    async def run(self) -> Ending:
        """Live until the end is decided, end the process, and say why. Cancelling kills the process at once."""
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._listen)
                group.start_soon(self._await_exit)
                await self._decided.wait()
                await self._end_process()
                group.cancel_scope.cancel()
            await self._take_remainder()
        finally:
            with anyio.CancelScope(shield=True):
                await self.process.close()
            self._channel.close()
        assert self._decision is not None
        cause, detail = self._decision
        return Ending(cause, detail, self.process.report(self._phase), self._reason)

    async def _await_exit(self) -> None:
        await self.process.wait()
        self._decide("exit", "")

    async def _end_process(self) -> None:
        assert self._decision is not None
        match self._decision[0]:
            case "asked":
                self._send_shutdown()
                await self.process.shut_down(self._settings.grace_seconds)
            case "refused" | "exit":
                # It has said that it ends, or has ended.
                with anyio.move_on_after(LAST_WORDS_SECONDS):
                    await self.process.wait()
                self.process.kill()
            case "silence":
                await self._end_softly()
                self.process.kill()
            case _:
                self.process.kill()

    async def _end_softly(self) -> None:
        """Have it say where it is stuck, and give it a moment to end by itself."""
        assert self._decision is not None
        complaint = self._decision[1]
        self.process.end_softly()
        soft = min(SOFT_SECONDS, self._settings.silence_seconds / 4)
        with anyio.move_on_after(min(STACKS_SECONDS, soft)):
            await self.process.wait()
        now = self._clock()
        messages = tuple((round(now - time, 3), direction, kind) for time, direction, kind in self._messages)
        stall = Stall(self._owner.name, self.process.pid, self.number, complaint, self._phase, messages, self._stacks)
        where = await self._owner.stalled(stall)
        if where:
            self._decision = ("silence", f"{complaint} ({where})")
        with anyio.move_on_after(max(0.0, soft - STACKS_SECONDS)):
            await self.process.wait()

    def _send_shutdown(self) -> None:
        try:
            self._channel.send(Shutdown())
        except (ChannelFull, ChannelClosed):
            pass  # the ladder's next rung does not need its ear

    # -- listening and judging ------------------------------------------------------------------------------

    async def _listen(self) -> None:
        while True:
            events: Sequence[AnyEvent | FrameError] = ()
            with anyio.move_on_after(max(0.0, self._deadline() - self._clock())):
                events = await self._channel.receive()
            if not events:
                with anyio.move_on_after(SETTLE_SECONDS):
                    events = await self._channel.receive()
            self._take(events)
            if len(events) < MAX_EVENTS_PER_RECEIVE:  # the socket is empty: what is missing now was not said
                self._judge(self._clock())

    async def _take_remainder(self) -> None:
        """Results that the process sent before its end still count, and its last words may explain it."""
        explains = self._decision is not None and self._decision[0] == "exit" and self.process.exit_code not in (None, 0)
        with anyio.move_on_after(LAST_WORDS_SECONDS if explains else REMAINDER_SECONDS):
            while True:
                events = await self._channel.receive()
                self._take(events)
                if explains and any(isinstance(event, Failed) for event in events):
                    return

    def _deadline(self) -> float:
        if self._decision is not None:
            return math.inf
        match self._stage:
            case "spawned":
                return self._stage_deadline
            case "loading":
                return min(self._stage_deadline, self._vigil.deadline())
            case "ready":
                return self._vigil.deadline()

    def _judge(self, now: float) -> None:
        slept = self._asleep()
        if slept - self._slept >= MIN_SLEEP_SECONDS:
            self._owner.slept(slept - self._slept)
            self._slept = slept
            self._vigil.excuse(now)
            return
        if self._stage != "ready" and now >= self._stage_deadline:
            if self._stage == "spawned":
                self._decide("late", f"it did not say hello within {self._settings.connect_seconds:g} s (connect_seconds)")
            else:
                self._decide("late", f"it was not ready within {self._settings.load_seconds:g} s (load_seconds)")
        elif self._stage != "spawned" and (complaint := self._vigil.verdict(now)) is not None:
            self._decide("silence", f"it {complaint}")

    def _take(self, events: Sequence[AnyEvent | FrameError]) -> None:
        now = self._clock()
        for event in events:
            if isinstance(event, FrameError):
                self.num_malformed += 1
                continue
            self._remember("from", event, now)
            self._vigil.heard(event, now)
            self._hear(event)

    def _hear(self, event: AnyEvent) -> None:
        if isinstance(event, StepDone) and self._stage == "ready":  # first, being by far the most frequent
            self._phase = "decode"
            self._pass_on(event)
            return
        match event:
            case Heartbeat():
                self._phase = event.phase
                self._owner.beat(event)
            case Failed():
                self._hear_failure(event)
            case Stopped():
                pass  # the ladder waits for the exit itself
            case Hello() if self._stage == "spawned":
                self._greet(event)
            case Loading() if self._stage == "loading":
                self._owner.progressed(event)
            case Ready() if self._stage == "loading":
                self._stage = "ready"
                self._phase = "idle"
                self._owner.ready(event)
            case Hello() | Loading() | Ready():
                self._decide("breach", f"it sent {type(event).__name__} while {self._stage}")
            case _ if self._stage == "ready":
                self._pass_on(event)
            case Refused(message=message):
                self._decide("breach", f"it refused what it was sent while {self._stage} ({message})")
            case _:
                self._decide("breach", f"it sent {type(event).__name__} while {self._stage}")

    def _pass_on(self, event: AnyEvent) -> None:
        """Of one that is being ended nobody wants to hear; what one said that ended by itself still counts."""
        if self._decision is None or self._decision[0] == "exit":
            self._owner.said(event)

    def _greet(self, hello: Hello) -> None:
        if hello.version != PROTOCOL_VERSION:
            self._decide("version", f"it speaks protocol version {hello.version}, this host speaks {PROTOCOL_VERSION}")
        elif (hello.pid, hello.incarnation) != (self.process.pid, self.number):
            self._decide("breach", f"it says that it is pid {hello.pid}, incarnation {hello.incarnation}")
        else:
            self._stage = "loading"
            self._stage_deadline = self._clock() + self._settings.load_seconds
            self._phase = "connected"
            self._owner.connected()
            self.send(self._owner.load_command())
            self._owner.loading()

    def _hear_failure(self, failed: Failed) -> None:
        words = f"{failed.message}\n{failed.traceback}".strip()
        if self._stage == "ready":
            if self._decision is None:
                self._decide("exit", words)
            elif self._decision[0] == "exit":
                self._decision = ("exit", words)
        elif self._decision is None or self._decision[0] == "exit":
            # The failure explains an exit that was seen first.
            self._decision = ("refused", failed.message if failed.reason != "error" else words)
            self._reason = failed.reason
            self._decided.set()
