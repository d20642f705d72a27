"""What does the worker do from Ready to Shutdown? Drain commands, take one step, say what came of it; again.

Synchronous code on the one thread that owns the engine. One step is ahead: step n+1 is submitted before the
result of step n is taken, so that text, stop strings and messages of step n cost no device time. A row that step n
ends may therefore be part of step n+1; that token is dropped. A limit is known beforehand and never overshot.
A step that brings first tokens is taken first: on a CPU, submitting lasts nearly as long as computing, and would hold
them back for a whole step.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, assert_never

from runtime.engine.engine import Engine, Loaded, PendingStep, RowError
from runtime.engine.prefix_parts import PrefixPart
from runtime.protocol.channel import WorkerChannel
from runtime.protocol.commands import (
    AnyCommand,
    Configure,
    Forget,
    Grant,
    Inspect,
    Load,
    Prefill,
    Prepare,
    Publish,
    Release,
    Shutdown,
    Unpin,
)
from runtime.protocol.events import Inspected, Prefilled, Refused, Released, StepDone, StepRow, WorkerReport
from runtime.protocol.frames import FrameError
from runtime.protocol.ids import SequenceId
from runtime.worker import plan
from runtime.worker.desk import TextDesk
from runtime.worker.prefixes import Prefixes
from runtime.worker.row import Row
from runtime.worker.sequences import Batch, Sequences
from runtime.worker.status import Status

IDLE_SECONDS: Final = 1.0
MAX_COMMANDS_PER_TURN: Final = 256
MAX_MALFORMED_ANSWERS_PER_SECOND: Final = 10
MEASURE_SECONDS: Final = 0.5


@dataclass(slots=True)
class _Submitted:
    """A step under way. `batch` is set for prefill steps; then, by row, `ends`: where its chunk ends, and `copies`: of prefixes."""

    number: int
    pending: PendingStep
    rows: list[Row]
    batch: Batch | None
    promised_seconds: float
    submitted_at: float
    ends: Sequence[int] = ()
    copies: Sequence[Sequence[PrefixPart]] = ()

    @property
    def brings_first_tokens(self) -> bool:
        return self.batch is not None and any(row.is_prefilled for row in self.rows)


class Loop:
    def __init__(self, channel: WorkerChannel, loaded: Loaded, load: Load, desk: TextDesk, status: Status) -> None:
        self._channel = channel
        self._engine: Engine = loaded.engine
        self._desk = desk
        self._status = status
        self._chunk_tokens = load.prefill_chunk_tokens
        self._prefixes = Prefixes(loaded, load, channel.send)
        self._sequences = Sequences(loaded, self._prefixes, max_slots=load.max_slots, send=channel.send)
        self._submitted: _Submitted | None = None
        self._last: plan.StepKind = "prefill"
        self._num_prefill_steps = 0
        self._num_decode_steps = 0
        self._num_malformed = 0
        self._malformed_answers = deque([-math.inf] * MAX_MALFORMED_ANSWERS_PER_SECOND, maxlen=MAX_MALFORMED_ANSWERS_PER_SECOND)
        self._result_at = 0.0
        self._measure_at = 0.0
        self._is_stopping = False

    @property
    def num_steps(self) -> int:
        """Steps submitted so far, which is also the number of the last one."""
        return self._num_prefill_steps + self._num_decode_steps

    def run(self) -> None:
        """Until `Shutdown`. An exception from the engine's calls comes out of here: the worker must end."""
        has_work = False
        while True:
            self._drain(0.0 if has_work else self._prefixes.patience_seconds() or IDLE_SECONDS)
            if self._is_stopping:
                break
            self._prefixes.advance()
            has_work = self._turn()
        if self._submitted is not None:
            self._harvest(self._submitted)
        self._prefixes.close()

    # -- steps --------------------------------------------------------------------------------------------

    def _turn(self) -> bool:
        """Submit the next step, then take the result of the one before. False when there was neither."""
        before = self._submitted
        if before is not None and before.brings_first_tokens:
            self._submitted = None
            self._harvest(before)
            self._submitted = self._submit()
            return True
        self._submitted = self._submit()
        if before is not None:
            self._harvest(before)
        return before is not None or self._submitted is not None

    def _submit(self) -> _Submitted | None:
        sequences = self._sequences
        rows = sequences.decodable()
        batch = sequences.next_batch() if sequences.batches else None
        kind = plan.next_kind(can_decode=bool(rows), can_prefill=batch is not None, last=self._last)
        if kind is None:
            return None
        self._last = kind
        if kind == "decode":
            batch = None
            for row in rows:
                row.num_pending += 1
            steps = [row.decode_step for row in rows]
            self._num_decode_steps += 1
        else:
            assert batch is not None
            chunk = sequences.take_chunk(batch, self._chunk_tokens)
            rows = [row for row, _ in chunk]
            steps = [row.take_chunk(width) for row, width in chunk]
            self._num_prefill_steps += 1
        promised_seconds = self._engine.promised_seconds(steps)
        status = self._status
        status.step = self.num_steps
        status.phase = kind
        status.promised_seconds = promised_seconds
        if self._submitted is not None:
            status.promised_seconds += self._submitted.promised_seconds
        submitted_at = time.monotonic()
        submitted = _Submitted(self.num_steps, self._engine.step(steps), rows, batch, promised_seconds, submitted_at)
        if batch is not None:
            submitted.ends = [row.num_fed for row in rows]
            submitted.copies = self._prefixes.copied(rows)
            sequences.joined(batch, [row for row in rows if row.is_prefilled])
        return submitted

    def _harvest(self, step: _Submitted) -> None:
        """Take a step's result and say what it brought."""
        self._status.phase = "decode" if step.batch is None else "prefill"
        results = step.pending.result()
        now = time.monotonic()
        if step.batch is not None:
            step.batch.seconds += now - max(step.submitted_at, self._result_at)
        self._result_at = now
        status = self._status
        status.promised_seconds = 0.0 if self._submitted is None else self._submitted.promised_seconds
        if now >= self._measure_at:
            self._measure(now)
        said: list[StepRow] = []
        ended: list[Row] = []
        prefilled: list[tuple[SequenceId, int]] = []
        for place, (row, result) in enumerate(zip(step.rows, results, strict=True)):
            if row.is_over:  # released meanwhile, or ended by the step before
                continue
            try:
                if result.error is not None:
                    raise result.error
                row.num_proven = row.length if step.batch is None else step.ends[place]
                if step.batch is not None:
                    is_prefilled = row.num_proven == row.num_known
                    self._prefixes.proved(row, step.copies[place], is_sound=is_prefilled)
                    if is_prefilled:
                        prefilled.append((row.sequence, row.num_known))
                if result.tokens:
                    row.num_pending -= 1
                    if row.start.prefill_only:
                        said.append(row.end("length", row.num_known, (), "", ()))
                    else:
                        said.append(row.commit(result.tokens[0], result.logprobs))
            except RowError as error:
                row.is_over = row.has_failed = True
                self._sequences.refuse(_command_of(step), error.code, str(error), row.sequence)
            if row.is_over:
                ended.append(row)
        if prefilled:
            assert step.batch is not None
            self._channel.send(Prefilled(tuple(prefilled), step.batch.seconds))
        if said:
            self._channel.send(StepDone(step.number, tuple(said)))
        if ended:
            self._sequences.forget(ended)

    def _measure(self, now: float) -> None:
        self._status.active_bytes = self._engine.active_bytes()
        self._measure_at = now + MEASURE_SECONDS

    # -- commands -----------------------------------------------------------------------------------------

    def _drain(self, timeout_seconds: float) -> None:
        """Carry out what has come, waiting for the first command at most so long."""
        if timeout_seconds:
            self._status.phase = "idle"
            self._measure(time.monotonic())
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
                    self._channel.send(StepDone(self.num_steps, tuple(ends)))
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
        step = self._submitted
        if step is not None and any(row.sequence in command.sequences and self._prefixes.is_keeping(row) for row in step.rows):
            # What it computes right now is kept too: who gives up and comes back gets further each time.
            self._submitted = None
            self._harvest(step)
        self._sequences.release(command.sequences)
        if command.requests:
            self._desk.release(command.requests, self.num_steps)
        if command.sequences or not command.requests:
            self._channel.send(Released((), command.sequences, self.num_steps))

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
            steps=self.num_steps,
            prefill_steps=self._num_prefill_steps,
            decode_steps=self._num_decode_steps,
            malformed_frames=self._num_malformed,
            cache_bytes=self._engine.cache_bytes(),
            active_bytes=self._engine.active_bytes(),
            peak_bytes=self._engine.peak_bytes(),
            prefix_memory_bytes=self._prefixes.memory.num_bytes,
            prefix_pinned_bytes=self._prefixes.memory.pinned_bytes,
            prefix_nodes=self._prefixes.memory.num_nodes,
        )


def _command_of(step: _Submitted) -> str:
    return "decode" if step.batch is None else "prefill"
