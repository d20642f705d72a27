"""How does a row get a prefix that was computed before? From memory at once, or from files while other rows step on.

Files are read for one row at a time, and memory is looked at again before each: rows that want the same files wait for the first
of them, then find them in memory.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal

from runtime.engine.engine import Engine, RowError
from runtime.engine.prefix_parts import PrefixPart
from runtime.protocol.commands import PrefixUse
from runtime.protocol.events import AnyEvent, Restored
from runtime.worker import prefix_places
from runtime.worker.memory import PrefixMemory
from runtime.worker.prefix_form import PrefixForm
from runtime.worker.prefix_io import PrefixThread, ReadJob
from runtime.worker.prefix_tree import Match
from runtime.worker.row import Row


class Restorer:
    """files: None when there is no directory of them."""

    def __init__(
        self, engine: Engine, form: PrefixForm, memory: PrefixMemory, files: PrefixThread | None, send: Callable[[AnyEvent], None]
    ) -> None:
        self._engine = engine
        self._form = form
        self._memory = memory
        self._files = files
        self._send = send
        self._waiting: deque[Row] = deque()
        self._job: ReadJob | None = None

    @property
    def is_busy(self) -> bool:
        return self._job is not None or bool(self._waiting)

    def begin(self, row: Row) -> None:
        """Restore a new row, or let it wait for files (`Row.is_restoring`)."""
        match = self._match(row)
        if self._files is None or not _is_further(_use(row), match):
            self._restore_from_memory(row, match)
            return
        row.is_restoring = True
        self._waiting.append(row)
        self.read_next()

    def read_next(self) -> None:
        """Look after the rows that wait, until one needs a file again."""
        while self._job is None and self._waiting:
            row = self._waiting.popleft()
            if row.is_over:
                continue
            use, match = _use(row), self._match(row)
            if self._files is None or not _is_further(use, match):
                self._restore_from_memory(row, match)
                continue
            base = () if match is None else tuple(node for node in match.path if node.is_aligned and node.end <= match.length)
            start = base[-1].end if base else 0
            segments = tuple(segment for segment in use.segments if segment.end > start)
            if self._form.layout.style == "checkpoint":
                segments = segments[-1:]
            self._job = ReadJob(row, start, segments, base)
            self._files.read(self._job)

    def finish(self, job: ReadJob) -> None:
        """Take what the thread has read: it goes into memory and into the row it was read for."""
        self._job = None
        row = job.row
        scope, tokens = _use(row).scope, row.start.tokens
        for part, has_checkpoint in job.parts:
            node = self._memory.insert(scope, tokens, part, has_checkpoint=has_checkpoint)
            if node is not None:
                node.is_published = True
        if row.is_over:
            return
        chain = [*(node.part for node in job.base), *(part for part, _ in job.parts)]
        length = self._restorable(row, job)
        match = self._match(row)
        if match is not None and match.length >= length:  # also when memory had no room for what was read
            self._memory.use(match.path)
            chain, length = [node.part for node in match.path], match.length
        is_of_file = bool(job.parts) and length > job.start
        self._restore(row, chain, length, "file" if is_of_file else "memory", job)

    def _restorable(self, row: Row, job: ReadJob) -> int:
        """How far the row can be restored from what the job began with and what it read."""
        if not job.parts:
            return 0
        part, has_checkpoint = job.parts[-1]
        if self._form.has_checkpoints:
            return part.end if has_checkpoint else 0
        return min(part.end, row.num_known - 1)

    def _match(self, row: Row) -> Match | None:
        """None also for so few tokens that computing them together with those of other rows is quicker, unless they are pinned."""
        match = self._memory.match(_use(row).scope, row.start.tokens, at_most=row.num_known - 1)
        if match is not None and match.length < prefix_places.MIN_TOKENS and not match.path[-1].num_pins:
            return None
        return match

    def _restore_from_memory(self, row: Row, match: Match | None) -> None:
        if match is None:
            self._restore(row, (), 0, "memory")
        else:
            self._memory.use(match.path)
            self._restore(row, [node.part for node in match.path], match.length, "memory")

    def _restore(
        self,
        row: Row,
        parts: Sequence[PrefixPart],
        length: int,
        source: Literal["memory", "file"],
        job: ReadJob | None = None,
    ) -> None:
        """Set the row to `length`, or leave it empty when the engine refuses: then it is computed from its first token."""
        if length:
            try:
                last = parts[-1] if parts[-1].end == length else self._engine.adopt(parts[-1], parts[-1].start, length)
                self._engine.restore(row.sequence, [*parts[:-1], last])
            except RowError:
                length = 0
        row.restored(length)
        said = Restored(row.sequence, length, source if length else "none")
        if job is not None:
            said = Restored(
                row.sequence,
                length,
                said.source,
                num_files=len(job.parts),
                num_bytes=job.num_bytes,
                seconds=time.monotonic() - job.began_at,
                misses=tuple(job.misses),
            )
        self._send(said)


def _is_further(use: PrefixUse, match: Match | None) -> bool:
    """Whether the files named reach further than memory does."""
    return bool(use.segments) and use.segments[-1].end > (0 if match is None else match.length)


def _use(row: Row) -> PrefixUse:
    assert row.start.prefix is not None
    return row.start.prefix
