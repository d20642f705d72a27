"""Which sequences does the worker hold, and what do commands do to them? Every command is absolute and may come twice.

What comes of a command for the host (`StepDone` of a sequence that ends at once, `Refused`, `Released`) is sent from here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from runtime.engine.engine import Engine, Loaded, RowError
from runtime.protocol.commands import Grant, Hold, Prefill, PrefillRow, Resume
from runtime.protocol.events import AnyEvent, RefusalCode, Refused, StepRow
from runtime.protocol.ids import SequenceId
from runtime.worker import plan
from runtime.worker.prefixes import Prefixes
from runtime.worker.row import Row, check

MAX_REMEMBERED: Final = 4096
"""Ended sequences kept until their release, so that a late copy of their Prefill does not start them again."""


@dataclass(slots=True)
class Batch:
    """Rows of one `Prefill` whose context is not yet fed. `seconds`: inside their prefill steps so far."""

    rows: list[Row]
    chunks_waited: int = 0
    seconds: float = 0.0


class Sequences:
    def __init__(self, loaded: Loaded, prefixes: Prefixes, *, max_slots: int, send: Callable[[AnyEvent], None]) -> None:
        self._prefixes = prefixes
        self._engine: Engine = loaded.engine
        self._tokenizer = loaded.tokenizer
        self._context_length = loaded.facts.context_length
        self._in_chunks = loaded.facts.capabilities.chunked_prefill
        self._max_slots = max_slots
        self._send = send
        self._rows: dict[SequenceId, Row] = {}
        self._running: dict[SequenceId, Row] = {}
        self._holding: list[Row] = []
        self._ended: dict[SequenceId, PrefillRow] = {}
        self.batches: list[Batch] = []

    # -- commands -----------------------------------------------------------------------------------------

    def prefill(self, command: Prefill) -> list[StepRow]:
        """Take in a batch. Returns the ends of rows that have nothing to compute."""
        rows: list[Row] = []
        ends: list[StepRow] = []
        for start in command.rows:
            if self._is_known(start):
                continue
            try:
                row, end = self._start(start)
            except RowError as error:
                self._engine.release((start.sequence,))
                self._remember(start)
                self.refuse("prefill", error.code, str(error), start.sequence)
                continue
            if end is None:
                self._rows[start.sequence] = row
                rows.append(row)
                self._prefixes.begin(row)
            else:
                self._prefixes.begin_without(row)
                ends.append(end)
                self.forget((row,))
        if rows:
            self.batches.append(Batch(rows))
        return ends

    def _is_known(self, start: PrefillRow) -> bool:
        """Also ends a sequence that is asked to be two things at once: nobody could tell which one its tokens are of."""
        running = self._rows.get(start.sequence)
        known = running.start if running is not None else self._ended.get(start.sequence)
        if known is None:
            return False
        if known != start:
            if running is not None:
                running.is_over = running.has_failed = True
                self.forget((running,))
            self.refuse("prefill", "conflict", f"sequence {start.sequence} was already started with other contents", start.sequence)
        return True

    def _start(self, start: PrefillRow) -> tuple[Row, StepRow | None]:
        """A new row, and its end when nothing is left to compute. :raises RowError: it cannot be started."""
        check(start, self._context_length)
        self._prefixes.check(start)
        row = Row(start, self._tokenizer, self._context_length)
        self._engine.add(
            start.sequence, start.sampling, prompt_length=start.prompt_length, context=row.tokens, max_length=row.max_length
        )
        matched = row.replay()
        if matched is not None:
            row.is_over = True
            return row, StepRow(row.sequence, row.length, (), "", "stop", matched)
        if row.length >= row.max_length and not row.is_computed_only:
            return row, row.end("length", row.length, (), "", ())
        return row, None

    def grant(self, command: Grant) -> None:
        for sequence, limit in command.limits:
            row = self._rows.get(sequence)
            if row is not None:
                row.grant(limit)

    def hold(self, command: Hold) -> None:
        """They stop decoding freely; `take_held` says when."""
        for sequence in command.sequences:
            row = self._running.get(sequence)
            if row is not None and not row.start.hold:
                row.is_held = True
                if row not in self._holding:
                    self._holding.append(row)

    def resume(self, command: Resume) -> None:
        for sequence in command.sequences:
            row = self._running.get(sequence)
            if row is not None and not row.start.hold:
                row.is_held = False

    def take_held(self) -> list[Row]:
        """Of the rows that were told to hold, those whose last step is in by now, each once."""
        held = [row for row in self._holding if row.is_held and not row.is_over and not row.num_pending]
        self._holding = [row for row in self._holding if row.is_held and not row.is_over and row.num_pending]
        return held

    def known(self, sequence: SequenceId) -> Row | None:
        """A row that is not over, in whatever state."""
        return self._rows.get(sequence)

    def running(self, sequence: SequenceId) -> Row | None:
        """A row whose context is computed, if it is not over."""
        return self._running.get(sequence)

    def release(self, sequences: Sequence[SequenceId]) -> None:
        """Forget them in whatever state, also the unknown ones."""
        rows = []
        for sequence in sequences:
            row = self._rows.get(sequence)
            if row is not None:
                row.is_over = True
                rows.append(row)
        self.forget(rows)
        for sequence in sequences:
            self._ended.pop(sequence, None)

    # -- steps --------------------------------------------------------------------------------------------

    def decodable(self) -> list[Row]:
        """At most `max_slots` rows that may draw another token now."""
        rows = [row for row in self._running.values() if row.can_decode()]
        return rows if len(rows) <= self._max_slots else rows[: self._max_slots]

    def has_interactive(self) -> bool:
        """Somebody who reads along waits for what this worker computes."""
        return any(not row.start.background and not row.is_parked() for row in self._rows.values())

    def next_batch(self) -> Batch | None:
        """The batch that gets the next chunk, if any can be fed."""
        tokens_left = [sum(row.num_feedable(in_chunks=self._in_chunks) for row in batch.rows) for batch in self.batches]
        number = plan.next_batch(tokens_left, [batch.chunks_waited for batch in self.batches])
        return None if number is None else self.batches[number]

    def take_chunk(self, batch: Batch, budget_tokens: int) -> list[tuple[Row, int]]:
        """The rows of the batch that feed now, each with its number of tokens."""
        rows = [row for row in batch.rows if row.num_feedable(in_chunks=self._in_chunks)]
        left = [row.num_feedable(in_chunks=self._in_chunks) for row in rows]
        if self._in_chunks:
            left = [min(num, row.num_until_stop()) for num, row in zip(left, rows, strict=True)]
            widths = plan.chunk_widths(left, budget_tokens)
        else:  # a prompt that cannot be split is at least not made longer by its neighbours
            shortest = min(range(len(rows)), key=left.__getitem__)
            rows, widths = [rows[shortest]], [left[shortest]]
        for other in self.batches:
            other.chunks_waited = 0 if other is batch else other.chunks_waited + 1
        return list(zip(rows, widths, strict=True))

    def joined(self, batch: Batch, rows: Iterable[Row]) -> None:
        """These rows' last chunk has been submitted: they decode from now on."""
        for row in rows:
            self._running[row.sequence] = row
        self._prune(batch)

    def _prune(self, batch: Batch) -> None:
        batch.rows = [row for row in batch.rows if not row.is_over and not row.is_prefilled]
        if not batch.rows and batch in self.batches:
            self.batches.remove(batch)

    def forget(self, rows: Iterable[Row]) -> None:
        """Drop rows that are over; their ids stay known until the host releases them."""
        sequences = []
        prefilling = False
        for row in rows:
            sequences.append(row.sequence)
            self._rows.pop(row.sequence, None)
            self._running.pop(row.sequence, None)
            self._remember(row.start)
            prefilling = prefilling or not row.is_prefilled
            self._prefixes.ended(row)
        if not sequences:
            return
        if prefilling:
            for batch in list(self.batches):
                self._prune(batch)
        self._engine.release(sequences)

    def _remember(self, start: PrefillRow) -> None:
        self._ended[start.sequence] = start
        if len(self._ended) > MAX_REMEMBERED:
            del self._ended[next(iter(self._ended))]

    def refuse(self, command: str, code: RefusalCode, message: str, sequence: SequenceId) -> None:
        self._send(Refused(command, code, message, sequences=(sequence,)))

    # -- report -------------------------------------------------------------------------------------------

    def report(self) -> tuple[tuple[SequenceId, ...], tuple[SequenceId, ...], tuple[SequenceId, ...]]:
        """Running, parked and prefilling sequences."""
        running = tuple(row.sequence for row in self._running.values() if not row.is_parked())
        parked = tuple(row.sequence for row in self._rows.values() if row.is_parked())
        prefilling = tuple(row.sequence for row in self._rows.values() if not row.is_prefilled and not row.is_parked())
        return running, parked, prefilling
