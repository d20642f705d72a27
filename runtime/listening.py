"""What is made of what the actors tell? Stimuli for the scheduler, events for watchers, and lines in the log."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal

import anyio
import anyio.to_thread

from runtime.actors.lifecycle import WorkerState
from runtime.actors.reports import Stall, write_report
from runtime.config import ModelSpec
from runtime.errors import ExitReport, TroupeError
from runtime.info import ModelState
from runtime.protocol.events import AnyEvent, Loading, ModelFacts
from runtime.protocol.ids import Incarnation, ModelName, public_name
from runtime.scheduler.ports import SchedulerPort
from runtime.scheduler.stimuli import ModelAdded, ModelRemoved, WorkerLost, WorkerSaid, WorkerUp
from runtime.watch import LoadProgress, ModelStateChanged, WatchHub, WorkerDied, WorkerHealthChanged

REPORT_SECONDS: Final = 2.0
"""For writing a report: a disk that hangs must not keep a stuck worker alive."""


@cache
def log() -> Any:
    """structlog, imported at the first line logged: a healthy run logs nothing, and an app opens a tenth of a second sooner.

    By way of the standard library: an app that configured nothing sees warnings on stderr and nothing on stdout.
    """
    import structlog

    return structlog.wrap_logger(
        logging.getLogger("runtime"),
        processors=[structlog.stdlib.filter_by_level, structlog.processors.KeyValueRenderer(key_order=["event"])],
        wrapper_class=structlog.stdlib.BoundLogger,
    )


class Listening:
    """The actors' `Listener`: turns what they tell into the scheduler's stimuli and the watchers' events.

    tidy_up: called after a worker's death. reports: where what is known of stalls is left, None for nowhere. house: what the host
    knows then.
    """

    scheduler: SchedulerPort
    tidy_up: Callable[[], None]
    reports: Path | None
    house: Callable[[], dict[str, Any]]

    def __init__(self, watchers: WatchHub) -> None:
        self._watchers = watchers

    def model_added(self, model: ModelName, spec: ModelSpec, group: ModelName) -> None:
        draft_tokens = None if spec.draft_tokens == "auto" else spec.draft_tokens
        draft_ahead = None if spec.draft_ahead == "auto" else spec.draft_ahead
        self.scheduler.offer(ModelAdded(model, spec.max_slots, spec.drafter, draft_tokens, draft_ahead, group))

    def worker_up(self, model: ModelName, incarnation: Incarnation, facts: ModelFacts) -> None:
        for note in facts.capabilities.notes:
            log().warning("model runs without a capability", model=model, note=note)
        self.scheduler.offer(WorkerUp(model, incarnation, facts))

    def worker_said(self, model: ModelName, incarnation: Incarnation, event: AnyEvent) -> None:
        self.scheduler.offer(WorkerSaid(model, incarnation, event))

    def worker_lost(
        self, model: ModelName, incarnation: Incarnation, error: TroupeError, report: ExitReport, restarting: bool
    ) -> None:
        log().warning("worker lost", model=model, incarnation=incarnation, error=str(error), restarting=restarting)
        self.scheduler.offer(WorkerLost(model, incarnation, error, report, restarting))
        self.tidy_up()
        self._watchers.publish(WorkerDied(public_name(model), report, restarting))

    def model_removed(self, model: ModelName, error: TroupeError) -> None:
        self.scheduler.offer(ModelRemoved(model, error))

    def worker_moved(
        self, model: ModelName, left: WorkerState | None, now: WorkerState, incarnation: Incarnation, pid: int | None
    ) -> None:
        previous: ModelState | None = left.value if left is not None else None
        self._watchers.publish(ModelStateChanged(public_name(model), now.value, previous, incarnation, pid))

    def health_changed(self, model: ModelName, incarnation: Incarnation, health: Literal["gone", "asleep"], detail: str) -> None:
        self._watchers.publish(WorkerHealthChanged(public_name(model), incarnation, health, detail))

    async def stalled(self, stall: Stall) -> str:
        path = None
        if self.reports is not None:
            with anyio.move_on_after(REPORT_SECONDS):
                path = await anyio.to_thread.run_sync(write_report, self.reports, stall, self.house(), abandon_on_cancel=True)
        report = None if path is None else str(path)
        log().warning("worker stuck", model=stall.model, incarnation=stall.incarnation, complaint=stall.complaint, report=report)
        name = public_name(stall.model)
        self._watchers.publish(WorkerHealthChanged(name, Incarnation(stall.incarnation), "stuck", stall.complaint, report))
        return "" if report is None else f"report: {report}"

    def load_progress(self, model: ModelName, progress: Loading) -> None:
        self._watchers.publish(LoadProgress(public_name(model), progress.stage, progress.done, progress.total))
