"""Who looks after the directory of prefix files? Tells the scheduler what is there, and carries its deletes and marks out.

All file work is done in a thread, one piece at a time. A file is a hint: what goes wrong here is reported and costs time alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

import anyio
import anyio.to_thread

from runtime.errors import EraseFailed
from runtime.prefix import scan, temporary
from runtime.prefix.hashing import BlockHash, Scope
from runtime.prefix.keys import Keyring
from runtime.prefix.plans import Entry
from runtime.prefix.scan import Changes, Scanner
from runtime.protocol.ids import TenantId
from runtime.scheduler.stimuli import EraseTenant, FilesSeen, Stimulus

SCAN_SECONDS: Final = 3.0
"""Between two looks at the directory: how long it may take until a segment is found that another process published."""
FIRST_SCAN_SECONDS: Final = 10.0
"""After that a model is handed out, whether or not the first look is done."""
CLOSE_SECONDS: Final = 5.0
"""At the end, for what is still to be deleted. What stays, the next process finds."""
MAX_MARKS: Final = 4096
"""Files whose uses wait to be told to other processes. Of more, the oldest are lost, and one may be evicted too early for it."""

_Result = TypeVar("_Result")


class Librarian:
    """The scheduler's `FilesPort`. `run` once, in a task of its own; everything else on the loop's thread.

    root: None where there can be no files. is_active: False when no files are to be used; then only `erase` touches the directory.
    has_models: no look is needed unless a model is loaded. report: told of defects met in the thread.
    """

    def __init__(
        self,
        root: Path | None,
        keyring: Keyring,
        *,
        is_active: bool,
        offer: Callable[[Stimulus], None],
        has_models: Callable[[], bool],
        report: Callable[[Exception], None],
        scan_seconds: float = SCAN_SECONDS,
        close_seconds: float = CLOSE_SECONDS,
    ) -> None:
        self._root = root
        self._keyring = keyring
        self._shelf = _Shelf(root, keyring) if root is not None and is_active else None
        self._offer = offer
        self._has_models = has_models
        self._report = report
        self._scan_seconds = scan_seconds
        self._close_seconds = close_seconds
        self._deletes: dict[BlockHash, Entry] = {}
        """Bounded by the files there are: the scheduler tells each to go once."""
        self._marks: dict[BlockHash, _Mark] = {}
        self._has_dead = False
        self._news = anyio.Event()
        self._scanned = anyio.Event()
        self._turn = anyio.Lock()
        """Held from a look (or an erasure) until the scheduler has heard of it, so that it hears of them in order."""
        self._limiter = anyio.CapacityLimiter(1)
        self.over = anyio.Event()
        """`run` has ended, and nothing of ours goes on in a thread unless the disk hangs."""

    # -- the scheduler's FilesPort --------------------------------------------------------------------------

    def delete(self, entries: Sequence[Entry]) -> None:
        if self._shelf is None:
            return
        for entry in entries:
            self._marks.pop(entry.name, None)
            self._deletes[entry.name] = entry
        self._news.set()

    def mark_used(self, entries: Sequence[Entry]) -> None:
        """Carried out with the next look: nobody is in a hurry to know."""
        if self._shelf is None:
            return
        for entry in entries:
            before = self._marks.pop(entry.name, None)  # the latest use stands last
            self._marks[entry.name] = _Mark(entry, 1 if before is None else before.num_uses + 1)
        while len(self._marks) > MAX_MARKS:
            del self._marks[next(iter(self._marks))]

    def worker_died(self) -> None:
        """What it was writing is to go, since until then nobody can use the room that takes."""
        self._has_dead = True
        self._news.set()

    # -- the task -------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Ends by being cancelled. What is still to be deleted then is, within `close_seconds`."""
        try:
            if self._shelf is not None:
                await self._look_after(self._shelf)
        finally:
            self._scanned.set()
            if self._shelf is not None:
                with anyio.move_on_after(self._close_seconds, shield=True):
                    await self._carry_out(self._shelf)
            self.over.set()

    async def first_scan(self) -> None:
        """Wait until the scheduler knows which files were there at the start; at most `FIRST_SCAN_SECONDS`."""
        with anyio.move_on_after(FIRST_SCAN_SECONDS):
            await self._scanned.wait()

    async def _look_after(self, shelf: _Shelf) -> None:
        async with self._turn:
            await self._look(shelf.first_look)
        self._scanned.set()
        next_look = anyio.current_time() + self._scan_seconds
        while True:
            with anyio.move_on_after(next_look - anyio.current_time()):
                await self._news.wait()
            self._news = anyio.Event()
            is_due = anyio.current_time() >= next_look
            if is_due or self._deletes:
                await self._carry_out(shelf)
            if is_due or self._has_dead:
                self._has_dead = False
                await self._in_thread(shelf.sweep)
            if is_due:
                if self._has_models():
                    async with self._turn:
                        await self._look(shelf.look)
                next_look = anyio.current_time() + self._scan_seconds

    async def _look(self, look: Callable[[], tuple[Changes, int]]) -> None:
        """In our turn."""
        seen = await self._in_thread(look)
        if seen is not None:
            changes, free_bytes = seen
            # What the scheduler has given up meanwhile is on its way out, not new.
            added = tuple(entry for entry in changes.added if entry.name not in self._deletes)
            self._offer(FilesSeen(added, tuple(changes.used), tuple(changes.gone), free_bytes))

    async def _carry_out(self, shelf: _Shelf) -> None:
        """Deletes and marks. Those of a call that was cancelled are carried out once more, which harms nothing."""
        deletes, marks = list(self._deletes.values()), list(self._marks.values())
        await self._in_thread(partial(shelf.carry_out, deletes, marks))
        for entry in deletes:
            if self._deletes.get(entry.name) is entry:
                del self._deletes[entry.name]
        for done in marks:
            left = self._marks.pop(done.entry.name, done)
            if left.num_uses > done.num_uses:
                self._marks[done.entry.name] = _Mark(left.entry, left.num_uses - done.num_uses)

    async def _in_thread(self, work: Callable[[], _Result]) -> _Result | None:
        """None when the work met a defect, which is reported. Being cancelled, this leaves the thread to itself."""
        try:
            return await anyio.to_thread.run_sync(work, limiter=self._limiter, abandon_on_cancel=True)
        except Exception as error:  # the boundary of the thread: the cache is a hint, the app goes on without
            self._report(error)
            return None

    # -- erasing --------------------------------------------------------------------------------------------

    async def erase(self, tenant: TenantId) -> int:
        """Destroy the tenant's key, tell the scheduler, delete the tenant's files; how many. Done whole once it has begun.

        :raises EraseFailed: the key cannot be removed; nothing has been changed.
        """
        num_files = 0
        async with self._turn:
            with anyio.CancelScope(shield=True):
                try:
                    scopes = await anyio.to_thread.run_sync(self._destroy_keys, tenant, limiter=self._limiter)
                except OSError as error:
                    raise EraseFailed(tenant, str(error.filename or self._root), error.strerror or str(error)) from error
                for scope in scopes:
                    self._offer(EraseTenant(tenant, scope))
                if self._root is not None:
                    erase = partial(_erase_files, self._root, scopes)
                    num_files = await anyio.to_thread.run_sync(erase, limiter=self._limiter)
                if self._shelf is not None:
                    await self._look(self._shelf.look)
        return num_files

    def _destroy_keys(self, tenant: TenantId) -> set[Scope]:
        """In the thread. A key may also lie there from when files were in use."""
        keyrings = (self._keyring, Keyring(self._root))
        scopes = {scope for keyring in keyrings for scope in keyring.scopes_of(tenant)}
        for keyring in keyrings:
            keyring.destroy(tenant)
        return scopes


class _Mark(NamedTuple):
    """A file's uses that nobody else knows of yet."""

    entry: Entry
    num_uses: int


class _Shelf:
    """The work in the thread. A call that nobody waits for any more may still run when the next one comes, hence the lock."""

    def __init__(self, root: Path, keyring: Keyring) -> None:
        self._root = root
        self._scanner = Scanner(root, keyring)
        self._lock = threading.Lock()

    def first_look(self) -> tuple[Changes, int]:
        with self._lock:
            scan.reclaim(self._root)
            return self._scanner.scan(), scan.free_bytes(self._root)

    def look(self) -> tuple[Changes, int]:
        with self._lock:
            return self._scanner.scan(), scan.free_bytes(self._root)

    def sweep(self) -> None:
        """Whoever was writing may have been killed in the middle of a file."""
        temporary.sweep(self._root)

    def carry_out(self, deletes: Iterable[Entry], marks: Iterable[_Mark]) -> None:
        with self._lock:
            self._scanner.delete(deletes)
            self._scanner.mark_used(entry for entry, num_uses in marks for _ in range(num_uses))


def _erase_files(root: Path, scopes: Iterable[Scope]) -> int:
    return sum(scan.erase(root, scope) for scope in scopes)
