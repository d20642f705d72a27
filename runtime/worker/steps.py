"""Which step does the worker take next, and what does it say of the one before?

One step is ahead: step n+1 is submitted before the result of step n is taken, so that text, stop strings and messages of step n
cost no device time. A row that step n ends may therefore be part of step n+1; that token is dropped. A limit is known
beforehand and never overshot. A step that somebody waits for is taken first: on a CPU, submitting lasts nearly as long as
computing, and would hold its answer back for a whole step. So is a step during which somebody else asks for the device: another
worker then computes while this one says what its step brought.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from runtime.engine.engine import Engine, PendingStep, RowError, RowResult, RowStep
from runtime.engine.prefix_parts import PrefixPart
from runtime.protocol.events import AnyEvent, Held, Prefilled, StepDone, StepRow, Verified, VerifiedRow
from runtime.protocol.ids import SequenceId
from runtime.worker import plan
from runtime.worker.device import Device
from runtime.worker.drafting import Drafter, Order
from runtime.worker.prefixes import Prefixes
from runtime.worker.row import Row
from runtime.worker.sequences import Batch, Sequences
from runtime.worker.status import Status
from runtime.worker.verifying import Block, Verifier

MEASURE_SECONDS: Final = 0.5


@dataclass(slots=True)
class _Submitted:
    """A step under way. Of a prefill step, by row, `ends`: where its chunk ends, and `copies`: of prefixes. Of a verify step
    `blocks`, of a draft step `orders`, by row."""

    number: int
    kind: plan.StepKind
    pending: PendingStep
    rows: list[Row]
    promised_seconds: float
    submitted_at: float
    batch: Batch | None = None
    ends: Sequence[int] = ()
    copies: Sequence[Sequence[PrefixPart]] = ()
    blocks: Sequence[Block] = ()
    orders: Sequence[Order] = ()

    @property
    def is_awaited(self) -> bool:
        """Somebody waits for what it brings: first tokens, a round."""
        match self.kind:
            case "decode":
                return False
            case "prefill":
                return any(row.is_prefilled for row in self.rows)
            case "verify":
                return True
            case "draft":
                return all(order.is_submitted for order in self.orders)


class Steps:
    def __init__(
        self,
        engine: Engine,
        sequences: Sequences,
        prefixes: Prefixes,
        verifier: Verifier,
        drafter: Drafter,
        status: Status,
        device: Device,
        *,
        chunk_tokens: int,
        send: Callable[[AnyEvent], None],
    ) -> None:
        """chunk_tokens: most that a prefill step feeds, over all its rows."""
        self._engine = engine
        self._sequences = sequences
        self._prefixes = prefixes
        self._verifier = verifier
        self._drafter = drafter
        self._status = status
        self._device = device
        self._chunk_tokens = chunk_tokens
        self._send = send
        self._submitted: _Submitted | None = None
        self._last: plan.StepKind = "prefill"
        self.nums: dict[plan.StepKind, int] = dict.fromkeys(plan.KINDS, 0)
        self._result_at = 0.0
        self._measure_at = 0.0

    @property
    def num(self) -> int:
        """Steps submitted so far, which is also the number of the last one."""
        return sum(self.nums.values())

    def is_under_way(self, is_meant: Callable[[Row], bool]) -> bool:
        """Whether the result of a step with such a row has not been taken yet."""
        return self._submitted is not None and any(is_meant(row) for row in self._submitted.rows)

    def settle(self) -> None:
        """Take the result of the step under way, if there is one."""
        if self._submitted is not None:
            step, self._submitted = self._submitted, None
            self._harvest(step)

    def turn(self) -> bool:
        """Submit the next step, then take the result of the one before. False when there was neither, nor a step that waits for
        the device."""
        before = self._submitted
        if before is not None and (before.is_awaited or self._device.is_wanted()):
            self._submitted = None
            self._harvest(before)
            self._submitted = self._submit()
            return True
        self._submitted = self._submit()
        if before is not None:
            self._harvest(before)
        return before is not None or self._submitted is not None or self._device.is_waiting

    def _submit(self) -> _Submitted | None:
        sequences = self._sequences
        decodable = sequences.decodable()
        batch = sequences.next_batch() if sequences.batches else None
        possible: set[plan.StepKind] = set()
        if decodable:
            possible.add("decode")
        if batch is not None:
            possible.add("prefill")
        if self._verifier.is_asked:
            possible.add("verify")
        if self._drafter.is_asked:
            possible.add("draft")
        kind = plan.next_kind(possible, self._last)
        if kind is None:
            self._device.withdraw()
            return None
        if not self._device.take(is_background=not sequences.has_interactive()):
            return None
        self._last = kind
        self.nums[kind] += 1
        if kind == "prefill":
            assert batch is not None
            return self._submit_prefill(batch)
        if kind == "verify":
            blocks = self._verifier.take()
            return self._submitted_step(kind, [block.row for block in blocks], [block.step for block in blocks], blocks=blocks)
        if kind == "draft":
            orders = self._drafter.take()
            return self._submitted_step(
                kind, [order.row for order in orders], [order.next_step() for order in orders], orders=orders
            )
        for row in decodable:
            row.num_pending += 1
        return self._submitted_step(kind, decodable, [row.decode_step for row in decodable])

    def _submit_prefill(self, batch: Batch) -> _Submitted:
        chunk = self._sequences.take_chunk(batch, self._chunk_tokens)
        rows = [row for row, _ in chunk]
        submitted = self._submitted_step("prefill", rows, [row.take_chunk(width) for row, width in chunk], batch=batch)
        submitted.ends = [row.num_fed for row in rows]
        submitted.copies = self._prefixes.copied(rows)
        self._sequences.joined(batch, [row for row in rows if row.is_prefilled])
        return submitted

    def _submitted_step(
        self,
        kind: plan.StepKind,
        rows: list[Row],
        steps: Sequence[RowStep],
        *,
        batch: Batch | None = None,
        blocks: Sequence[Block] = (),
        orders: Sequence[Order] = (),
    ) -> _Submitted:
        promised_seconds = self._engine.promised_seconds(steps)
        status = self._status
        status.step = self.num
        status.phase = kind
        status.promised_seconds = promised_seconds
        if self._submitted is not None:
            status.promised_seconds += self._submitted.promised_seconds
        submitted_at = time.monotonic()
        pending = self._engine.step(steps)
        return _Submitted(self.num, kind, pending, rows, promised_seconds, submitted_at, batch=batch, blocks=blocks, orders=orders)

    def _harvest(self, step: _Submitted) -> None:
        """Take a step's result and say what it brought."""
        self._status.phase = step.kind
        results = step.pending.result()
        if self._submitted is None:
            self._device.give_back()
        now = time.monotonic()
        seconds = now - max(step.submitted_at, self._result_at)
        self._result_at = now
        status = self._status
        status.promised_seconds = 0.0 if self._submitted is None else self._submitted.promised_seconds
        if now >= self._measure_at:
            self.measure(now)
        if step.kind == "draft":
            self._drafter.took(step.orders, results, seconds)
        elif step.kind == "verify":
            self._take_verified(step, results, seconds)
        else:
            self._take_tokens(step, results, seconds)
        self.say_held()

    def _take_tokens(self, step: _Submitted, results: Sequence[RowResult], seconds: float) -> None:
        """Of a decode or prefill step."""
        if step.batch is not None:
            step.batch.seconds += seconds
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
                    elif not row.start.hold:
                        said.append(row.commit(result.tokens[0], result.logprobs))
            except RowError as error:
                row.is_over = row.has_failed = True
                self._sequences.refuse(step.kind, error.code, str(error), row.sequence)
            if row.is_over:
                ended.append(row)
        if prefilled:
            assert step.batch is not None
            self._send(Prefilled(tuple(prefilled), step.batch.seconds))
        if said:
            self._send(StepDone(step.number, tuple(said), seconds if step.kind == "decode" else 0.0))
        if ended:
            self._sequences.forget(ended)

    def _take_verified(self, step: _Submitted, results: Sequence[RowResult], seconds: float) -> None:
        said: list[VerifiedRow] = []
        ended: list[Row] = []
        for block, result in zip(step.blocks, results, strict=True):
            row = block.row
            if row.is_over:
                continue
            try:
                said.append(self._verifier.commit(block, result))
            except RowError as error:
                row.is_over = row.has_failed = True
                self._sequences.refuse(step.kind, error.code, str(error), row.sequence)
            if row.is_over:
                ended.append(row)
        if said:
            self._send(Verified(step.number, tuple(said), seconds))
        if ended:
            self._sequences.forget(ended)

    def say_held(self) -> None:
        """Whose last free step is in."""
        held = self._sequences.take_held()
        if held:
            self._send(Held(tuple((row.sequence, row.length) for row in held)))

    def measure(self, now: float) -> None:
        self._status.active_bytes = self._engine.active_bytes()
        self._measure_at = now + MEASURE_SECONDS
