"""How does progress look on stderr: moving bars on a terminal, a few plain lines anywhere else?"""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

BYTE_STAGES = frozenset({"download", "verify", "weights"})
_LINE_STEPS = 4


def megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f} MB"


class Bars:
    """One bar for each subject, of its stage now. `with Bars() as bars: bars.update("smollm2-135m", "download", 10, 100)`."""

    def __init__(self, terminal: Console | None = None) -> None:
        """terminal: where the bars move; None is stderr, if that is one."""
        self._terminal = terminal
        self._lines = Lines()
        self._progress: Progress | None = None
        self._tasks: dict[str, tuple[TaskID, str]] = {}  # subject → (its bar, the stage it shows)

    def __enter__(self) -> Self:
        if self._terminal is None and sys.stderr.isatty():
            from rich.console import Console

            self._terminal = Console(stderr=True)
        if self._terminal is not None:
            from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

            # Of an unknown extent there is no percentage, just a bar in motion.
            percentage = TaskProgressColumn(text_format_no_percentage="    ")
            columns = [TextColumn("{task.description}"), BarColumn(), percentage, TimeElapsedColumn()]
            self._progress = Progress(*columns, console=self._terminal, transient=True)
            self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._progress is not None:
            self._progress.stop()

    def update(self, subject: str, stage: str, done: int, total: int) -> None:
        """`total` 0: unknown. 1: a stage without parts, whose extent shows as unknown until it is done."""
        if self._progress is None:
            for line in self._lines.update(subject, stage, done, total):
                print(line, file=sys.stderr, flush=True)
            return
        extent = total if total > 1 or done else None
        description = f"{subject}: {stage}"
        if subject not in self._tasks:
            self._tasks[subject] = (self._progress.add_task(description, total=extent), stage)
        task, shown = self._tasks[subject]
        if shown != stage:
            self._tasks[subject] = (task, stage)
            self._progress.reset(task, description=description)
        self._progress.tasks[task].total = extent  # `update` would take None for "as it was"
        self._progress.update(task, completed=done)


class Lines:
    """Thins progress out to plain lines: one when a stage begins and one for each quarter of it."""

    def __init__(self) -> None:
        self._steps: dict[tuple[str, str], int] = {}
        self._last = ""

    def update(self, subject: str, stage: str, done: int, total: int) -> list[str]:
        step = done * _LINE_STEPS // total if total > 1 else 0
        if self._steps.get((subject, stage), -1) >= step:
            return []
        self._steps[subject, stage] = step
        line = f"{subject}: {stage}{self._amount(stage, done, total)}"
        if line == self._last:
            return []
        self._last = line
        return [line]

    @staticmethod
    def _amount(stage: str, done: int, total: int) -> str:
        if total <= 1:
            return ""
        if stage in BYTE_STAGES:
            return f" {megabytes(done)} of {megabytes(total)}"
        return f" {done} of {total}"
