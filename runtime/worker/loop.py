"""What does the worker do from Ready to Shutdown? Drain commands, take one step, say what came of it; again.

Synchronous code on the one thread that owns the engine.
"""

from __future__ import annotations

import math
import time
from collections import deque
from pathlib import Path
from typing import Final, assert_never

from runtime.engine.engine import Engine, Loaded
from runtime.protocol.channel import WorkerChannel
from runtime.protocol.commands import (
    AnyCommand,
    Configure,
    Draft,
    Forget,
    Grant,
    Hold,
    Inspect,
    Load,
    Prefill,
    Prepare,
    Publish,
    Release,
    Resume,
    Shutdown,
    Unpin,
    Verify,
)
from runtime.protocol.events import Inspected, Refused, Released, StepDone, WorkerReport
from runtime.protocol.frames import FrameError
from runtime.worker.desk import TextDesk
from runtime.worker.device import Device
from runtime.worker.drafting import Drafter
from runtime.worker.prefixes import Prefixes
from runtime.worker.sequences import Sequences
from runtime.worker.status import Status
from runtime.worker.steps import Steps
from runtime.worker.verifying import Verifier

IDLE_SECONDS: Final = 1.0
MAX_COMMANDS_PER_TURN: Final = 256
MAX_MALFORMED_ANSWERS_PER_SECOND: Final = 10


class Loop:
    def __init__(
        self,
        channel: WorkerChannel,
        loaded: Loaded,
        load: Load,
        desk: TextDesk,
        status: Status,
        device: Device,
        *,
        ledger: Path | None = None,
    ) -> None:
        """ledger: see `Prefixes`."""
        self._channel = channel
        self._engine: Engine = loaded.engine
        self._desk = desk
        self._status = status
        self._prefixes = Prefixes(loaded, load, channel.send, ledger=ledger)
        self._sequences = Sequences(loaded, self._prefixes, max_slots=load.max_slots, send=channel.send)
        vocabulary_size = loaded.facts.vocabulary_size
        self._verifier = Verifier(loaded.engine, self._sequences, vocabulary_size=vocabulary_size, send=channel.send)
        self._drafter = Drafter(loaded.engine, self._sequences, channel.send)
        self._steps = Steps(
            loaded.engine,
            self._sequences,
            self._prefixes,
            self._verifier,
            self._drafter,
            status,
            device,
            chunk_tokens=load.prefill_chunk_tokens,
            send=channel.send,
        )
        self._num_malformed = 0
        self._malformed_answers = deque([-math.inf] * MAX_MALFORMED_ANSWERS_PER_SECOND, maxlen=MAX_MALFORMED_ANSWERS_PER_SECOND)
        self._is_stopping = False

    def run(self) -> None:
        """Until `Shutdown`. An exception from the engine's calls comes out of here: the worker must end."""
        has_work = False
        while True:
            self._drain(0.0 if has_work else self._prefixes.patience_seconds() or IDLE_SECONDS)
            if self._is_stopping:
                break
            self._prefixes.advance()
            has_work = self._steps.turn()
        self._steps.settle()
        self._prefixes.close()

    # -- commands -----------------------------------------------------------------------------------------

    def _drain(self, timeout_seconds: float) -> None:
        """Carry out what has come, waiting for the first command at most so long."""
        if timeout_seconds:
            self._status.phase = "idle"
            self._steps.measure(time.monotonic())
        for _ in range(MAX_COMMANDS_PER_TURN):
            try:
                command = self._channel.receive(timeout_seconds)
            except FrameError as error:
                self._answer_malformed(error)
            else:
                if command is None:
                    return
                self._handle(command)
                if self._is_stopping:
                    return
            timeout_seconds = 0.0

    def _handle(self, command: AnyCommand) -> None:
        match command:
            case Grant():
                self._sequences.grant(command)
            case Release():
                self._release(command)
            case Prefill():
                ends = self._sequences.prefill(command)
                if ends:
                    self._channel.send(StepDone(self._steps.num, tuple(ends)))
            case Hold():
                self._sequences.hold(command)
                self._steps.say_held()
            case Resume():
                self._verifier.resume(command.sequences)
                self._sequences.resume(command)
            case Draft():
                self._drafter.order(command)
            case Verify():
                self._verifier.ask(command, self._steps.num)
            case Prepare():
                self._desk.submit(command.request, command.prompt)
            case Inspect():
                self._channel.send(Inspected(command.number, self._report()))
            case Publish():
                self._prefixes.publish(command)
            case Unpin():
                self._prefixes.unpin(command)
            case Forget():
                self._prefixes.forget(command)
            case Configure():
                if command.compute_threads:
                    self._engine.set_compute_threads(command.compute_threads)
                self._prefixes.set_budget(command.prefix_memory_bytes)
            case Shutdown():
                self._status.phase = "stopping"
                self._is_stopping = True
            case Load():
                self._channel.send(Refused("load", "conflict", "this worker has already loaded a model"))
            case _:
                assert_never(command)

    def _release(self, command: Release) -> None:
        leaving = frozenset(command.sequences)
        if self._steps.is_under_way(lambda row: row.sequence in leaving and self._prefixes.is_keeping(row)):
            # What it computes right now is kept too: who gives up and comes back gets further each time.
            self._steps.settle()
        self._sequences.release(command.sequences)
        if command.requests:
            self._desk.release(command.requests, self._steps.num)
        if command.sequences or not command.requests:
            self._channel.send(Released((), command.sequences, self._steps.num))

    def _answer_malformed(self, error: FrameError) -> None:
        """Count it, and say so unless many have just come: a flood must not become two."""
        self._num_malformed += 1
        now = time.monotonic()
        if now - self._malformed_answers[0] >= 1.0:
            self._malformed_answers.append(now)
            self._channel.send(Refused("", "malformed", f"frame no command ({error.kind}): {error}"))

    def _report(self) -> WorkerReport:
        running, parked, prefilling = self._sequences.report()
        return WorkerReport(
            running=running,
            parked=parked,
            prefilling=prefilling,
            preparing=self._desk.preparing(),
            steps=self._steps.num,
            prefill_steps=self._steps.nums["prefill"],
            decode_steps=self._steps.nums["decode"],
            verify_steps=self._steps.nums["verify"],
            draft_steps=self._steps.nums["draft"],
            malformed_frames=self._num_malformed,
            cache_bytes=self._engine.cache_bytes(),
            active_bytes=self._engine.active_bytes(),
            peak_bytes=self._engine.peak_bytes(),
            prefix_memory_bytes=self._prefixes.memory.num_bytes,
            prefix_pinned_bytes=self._prefixes.memory.pinned_bytes,
            prefix_nodes=self._prefixes.memory.num_nodes,
        )
