"""Who waits for the disk, so that the step thread need not? One thread: reads go before writes, and little may wait.

It touches the directory of prefix files and nothing else of the worker. Nothing that goes wrong there comes out of it as an
exception: a read that fails is a miss, a write that fails a rejection.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from runtime.engine.engine import Engine, RowError
from runtime.engine.prefix_parts import PrefixPart
from runtime.prefix import publish, restore
from runtime.prefix.hashing import BLOCK_TOKENS, BlockHash, Secret, block_hashes
from runtime.prefix.publish import Draft, Published
from runtime.prefix.restore import Miss, Wanted
from runtime.protocol.commands import SegmentRange
from runtime.protocol.events import SegmentMiss, SegmentPublished, SegmentRejected
from runtime.worker.prefix_form import PrefixForm
from runtime.worker.prefix_tree import Node, part_bytes
from runtime.worker.row import Row

MAX_WAITING_BYTES: Final = 256 << 20
"""Of parts that wait to be written; a single one may be larger."""


@dataclass(eq=False, slots=True)
class ReadJob:
    """Segments to read for a row, from position `start` of its context on.

    base: nodes that lead there. parts: what was read and proven, in order, without gap, each with whether it has its checkpoint.
    """

    row: Row
    start: int
    segments: tuple[SegmentRange, ...]
    base: tuple[Node, ...]
    began_at: float = field(default_factory=time.monotonic)
    parts: list[tuple[PrefixPart, bool]] = field(default_factory=list)
    misses: list[SegmentMiss] = field(default_factory=list)
    num_bytes: int = 0


RETRY_SECONDS: Final = 0.025
MAX_RETRY_SECONDS: Final = 0.4
PATIENCE_SECONDS: Final = 5.0
"""A file for which there is no room is tried again, at growing intervals, so long. The host makes room: at once for what it has
promised, at its next look (every three seconds) for what other processes have written."""


@dataclass(eq=False, slots=True)
class WriteJob:
    """part: the node's as it was when this was asked for. due_at: not to be tried before; retry_seconds: from one time to the
    next; patience_ends_at: None before the first time."""

    node: Node
    part: PrefixPart
    owner: str
    due_at: float = 0.0
    retry_seconds: float = RETRY_SECONDS
    patience_ends_at: float | None = None

    @property
    def num_bytes(self) -> int:
        return part_bytes(self.part)


Answer = ReadJob | SegmentPublished | SegmentRejected


class PrefixThread:
    """Between the step thread, which calls all public methods, and the files under `root`."""

    def __init__(
        self, root: Path, form: PrefixForm, engine: Engine, *, limit_bytes: int | None = None, ledger: Path | None = None
    ) -> None:
        """limit_bytes, ledger: see `publish`."""
        self._root = root
        self._limit_bytes = limit_bytes
        self._ledger = ledger
        self._form = form
        self._engine = engine  # of which only `adopt` may be called here
        self._changed = threading.Condition()
        self._reads: deque[ReadJob] = deque()
        self._writes: deque[WriteJob] = deque()
        self._answers: deque[Answer] = deque()
        self._current: ReadJob | WriteJob | None = None
        self._waiting_bytes = 0
        self._is_closing = False
        self._thread = threading.Thread(target=self._work, name="prefix-files", daemon=True)
        self._thread.start()

    # -- the step thread ----------------------------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        """Something is still to be done or taken."""
        return bool(self._current or self._reads or self._writes or self._answers)

    def read(self, job: ReadJob) -> None:
        """Answered by the job itself, with what came of it."""
        with self._changed:
            self._reads.append(job)
            self._changed.notify()

    def try_write(self, job: WriteJob) -> bool:
        """Answered by `SegmentPublished` or `SegmentRejected`. False, and nothing is done, when too much is waiting already."""
        with self._changed:
            if self._waiting_bytes and self._waiting_bytes + job.num_bytes > MAX_WAITING_BYTES:
                return False
            self._waiting_bytes += job.num_bytes
            self._writes.append(job)
            self._changed.notify()
        return True

    def drop_writes(self, scope: bytes) -> list[int]:
        """Forget the nodes of a scope that wait to be written; gives their numbers."""
        with self._changed:
            dropped = [job for job in self._writes if job.node.scope == scope]
            self._writes = deque(job for job in self._writes if job.node.scope != scope)
            self._waiting_bytes -= sum(job.num_bytes for job in dropped)
        return [job.node.id for job in dropped]

    def answers(self) -> list[Answer]:
        """What has been done since the last call."""
        taken = []
        while self._answers:
            taken.append(self._answers.popleft())
        return taken

    def close(self, grace_seconds: float) -> None:
        """Finish the file at hand, if that does not take longer; drop the rest."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(grace_seconds)

    # -- the I/O thread -----------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            with self._changed:
                self._current = None
                while not (self._reads or self._is_write_due() or self._is_closing):
                    self._changed.wait(RETRY_SECONDS if self._writes else None)
                if self._is_closing:
                    return
                self._current = job = self._reads.popleft() if self._reads else self._next_write()
            if isinstance(job, ReadJob):
                self._read(job)
                self._answers.append(job)
            else:
                answer = self._written(job)
                with self._changed:
                    if answer is None:
                        job.due_at = time.monotonic() + job.retry_seconds
                        job.retry_seconds = min(2 * job.retry_seconds, MAX_RETRY_SECONDS)
                        self._writes.append(job)
                        continue
                    self._waiting_bytes -= job.num_bytes
                self._answers.append(answer)

    def _is_write_due(self) -> bool:
        now = time.monotonic()
        return any(job.due_at <= now for job in self._writes)

    def _next_write(self) -> WriteJob:
        job = min(self._writes, key=lambda job: job.due_at)
        self._writes.remove(job)
        return job

    def _read(self, job: ReadJob) -> None:
        start = job.start
        chain: list[BlockHash] = []
        for segment in job.segments:
            if job.row.is_over or self._is_closing:
                return
            try:
                chain = chain or block_hashes(Secret(_scope(job.row)), job.row.start.tokens)
                part = self._read_one(job, segment, chain, start)
            except RowError as error:
                job.misses.append(SegmentMiss(segment.name, "layout", str(error), False))
                return
            except Exception as error:  # whatever it is, the row is computed instead
                job.misses.append(SegmentMiss(segment.name, "unreadable", f"{type(error).__name__}: {error}", False))
                return
            if part is None:
                return
            job.parts.append((part, segment.with_checkpoint))
            start = part.end

    def _read_one(self, job: ReadJob, segment: SegmentRange, chain: list[BlockHash], start: int) -> PrefixPart | None:
        """The segment's part of the context from `start` on, or None and a miss."""
        form = self._form
        is_alone = form.layout.style == "checkpoint"
        wanted = Wanted(
            fingerprint=form.fingerprint,
            secret=Secret(_scope(job.row)),
            layout=form.layout,
            chain=chain,
            name=BlockHash(segment.name),
            start=segment.start if is_alone else start,
            end=segment.end,
            with_checkpoint=segment.with_checkpoint,
        )
        found = restore.read(self._root, wanted)
        if isinstance(found, Miss):
            job.misses.append(SegmentMiss(segment.name, found.reason, found.detail, found.is_removed))
            return None
        job.num_bytes += found.num_bytes
        # The tokens of the whole last block have been proven: memory takes it whole, also when the row needs one token less.
        end = min(found.end, -(-segment.end // BLOCK_TOKENS) * BLOCK_TOKENS)
        if is_alone:  # a state says nothing of where it came from
            return self._engine.adopt(form.part(found, start))
        return self._engine.adopt(form.part(found, found.start), start, end)

    def _written(self, job: WriteJob) -> SegmentPublished | SegmentRejected | None:
        """None: there is no room yet."""
        node, form = job.node, self._form
        began = time.monotonic()
        try:
            secret = Secret(node.scope)
            draft = Draft(
                fingerprint=form.fingerprint,
                secret=secret,
                owner=job.owner,
                chain=block_hashes(secret, node.context()),
                start=node.start,
                end=node.end,
                layout=form.layout,
                tensors=form.tensors(job.part),
            )
            result = publish.publish(self._root, draft, limit_bytes=self._limit_bytes, ledger=self._ledger)
        except Exception as error:  # whatever it is, there is just no file
            return SegmentRejected(node.id, "io", f"{type(error).__name__}: {error}")
        if isinstance(result, Published):
            return SegmentPublished(node.id, result.name, result.num_bytes, result.is_new, time.monotonic() - began)
        if job.patience_ends_at is None:
            job.patience_ends_at = began + PATIENCE_SECONDS
        if result.reason == "over_budget" and time.monotonic() < job.patience_ends_at:
            return None
        return SegmentRejected(node.id, result.reason, result.detail)


def _scope(row: Row) -> bytes:
    use = row.start.prefix
    assert use is not None
    return use.scope
