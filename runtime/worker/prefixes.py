"""What does a worker do with shared prefixes? Finds them for new rows, keeps what rows compute, writes it to files when told.

Everything here runs on the step thread; only files are waited for elsewhere (`prefix_io`). A model whose prefixes cannot be kept
finds and keeps nothing, whatever it is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from runtime.engine.engine import Loaded
from runtime.engine.prefix_parts import PrefixPart
from runtime.protocol.commands import Forget, Load, PrefillRow, Publish, Unpin
from runtime.protocol.events import AnyEvent, Restored, SegmentRejected
from runtime.worker import prefix_places
from runtime.worker.memory import PrefixMemory
from runtime.worker.prefix_form import form_of
from runtime.worker.prefix_io import PrefixThread, ReadJob, WriteJob
from runtime.worker.prefix_keep import Keeper
from runtime.worker.prefix_restore import Restorer
from runtime.worker.row import Row

READING_SECONDS: Final = 0.001
WRITING_SECONDS: Final = 0.02
"""How long an idle loop may sleep while a row waits for a file, and while only the host waits to hear of one."""
CLOSE_SECONDS: Final = 2.0


class Prefixes:
    def __init__(self, loaded: Loaded, load: Load, send: Callable[[AnyEvent], None], *, ledger: Path | None = None) -> None:
        """ledger: names the temporary file under way, for who tidies up after a kill."""
        self._send = send
        form = self._form = form_of(loaded)
        has_checkpoints = form is not None and form.has_checkpoints
        budget_bytes = max(0, load.prefix_memory_bytes) if form is not None else 0
        self.memory = PrefixMemory(has_checkpoints=has_checkpoints, budget_bytes=budget_bytes)
        self._files: PrefixThread | None = None
        self._restorer: Restorer | None = None
        if form is not None:
            if load.prefix_root is not None:
                limit_bytes = load.prefix_disk_bytes or None
                self._files = PrefixThread(Path(load.prefix_root), form, loaded.engine, limit_bytes=limit_bytes, ledger=ledger)
            self._restorer = Restorer(loaded.engine, form, self.memory, self._files, send)
        self._keeper = Keeper(loaded.engine, self.memory, has_checkpoints=has_checkpoints, send=send)

    # -- rows ---------------------------------------------------------------------------------------------

    def check(self, start: PrefillRow) -> None:
        """:raises RowError: "invalid_request": the prefixes it asks for cannot be."""
        prefix_places.check_use(start, None if self._form is None else self._form.layout.style)

    def begin(self, row: Row) -> None:
        """A new row, empty in the engine. It is restored now, or when its files have been read (`Row.is_restoring`)."""
        if row.start.prefix is None:
            return
        self._keeper.begin(row)
        if self._restorer is None:
            self.begin_without(row)
        else:
            self._restorer.begin(row)

    def begin_without(self, row: Row) -> None:
        """A row that needs nothing restored."""
        if row.start.prefix is not None:
            self._send(Restored(row.sequence, 0, "none"))

    def is_keeping(self, row: Row) -> bool:
        """What it computes is to be kept: its end should wait for the step under way."""
        return self._keeper.is_keeping(row)

    def copied(self, rows: Sequence[Row]) -> list[Sequence[PrefixPart]]:
        """For each row of the prefill step just submitted what `proved` takes with its result."""
        return [self._keeper.copied(row) for row in rows]

    def proved(self, row: Row, parts: Sequence[PrefixPart], *, is_sound: bool) -> None:
        """A prefill step's result is in, without an error for the row. See `Keeper.proved`."""
        self._keeper.proved(row, parts, is_sound=is_sound)

    def ended(self, row: Row) -> None:
        """The engine is about to forget a row, in whatever state."""
        self._keeper.ended(row)

    # -- files --------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Take what the I/O thread has done."""
        if self._files is None or self._restorer is None:
            return
        for answer in self._files.answers():
            if isinstance(answer, ReadJob):
                self._restorer.finish(answer)
                self._restorer.read_next()
            else:
                if isinstance(answer, SegmentRejected):
                    self._may_be_published(answer.node)
                self._send(answer)

    def patience_seconds(self) -> float | None:
        """How long an idle loop may sleep before `advance` is due; None: for ever."""
        if self._restorer is not None and self._restorer.is_busy:
            return READING_SECONDS
        return WRITING_SECONDS if self._files is not None and self._files.is_busy else None

    def publish(self, command: Publish) -> None:
        for number, owner in command.nodes:
            node = self.memory.node(number)
            if node is None:
                self._send(SegmentRejected(number, "absent", "it had to go meanwhile"))
            elif self._files is None:
                self._send(SegmentRejected(number, "io", "this worker was given no directory for prefix files"))
            elif not self._files.try_write(WriteJob(node, node.part, owner)):
                self._may_be_published(number)
                self._send(SegmentRejected(number, "busy", "too much is waiting to be written"))

    def _may_be_published(self, number: int) -> None:
        """It was not; whoever keeps it next offers it again."""
        node = self.memory.node(number)
        if node is not None:
            node.is_published = False

    # -- memory -------------------------------------------------------------------------------------------

    def unpin(self, command: Unpin) -> None:
        for sequence in command.sequences:
            self._keeper.unpin(sequence)

    def forget(self, command: Forget) -> None:
        for scope in command.scopes:
            self.memory.forget(scope)
            for number in () if self._files is None else self._files.drop_writes(scope):
                self._send(SegmentRejected(number, "absent", "its scope was erased"))

    def set_budget(self, num_bytes: int) -> None:
        self.memory.set_budget(0 if self._form is None else max(0, num_bytes))

    def close(self) -> None:
        """Finish the file at hand; what else was to be read or written is dropped."""
        if self._files is not None:
            self._files.close(CLOSE_SECONDS)
            for answer in self._files.answers():
                if not isinstance(answer, ReadJob):
                    self._send(answer)
