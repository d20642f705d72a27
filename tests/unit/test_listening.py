"""What the actors tell reaches the watchers, also when nothing can be written down or the disk hangs."""

from __future__ import annotations

import time
from pathlib import Path

import anyio
import pytest

from runtime.actors.reports import Stall
from runtime.listening import Listening
from runtime.watch import Watch, WatchHub, WorkerHealthChanged

pytestmark = pytest.mark.anyio

STALL = Stall("chat", 1, 1, "it sent no message", "decode", (), Path("/nowhere"))


def a_listening(reports: Path | None) -> tuple[Listening, WatchHub]:
    hub = WatchHub()
    listening = Listening(hub)
    listening.reports = reports
    listening.house = dict
    return listening, hub


async def told(listening: Listening, hub: WatchHub) -> WorkerHealthChanged:
    async with Watch(hub) as watch:
        await listening.stalled(STALL)
        with anyio.fail_after(5):
            event = await anext(watch)
    assert isinstance(event, WorkerHealthChanged)
    return event


async def test_a_stall_is_told_with_the_place_of_its_report(tmp_path: Path) -> None:
    event = await told(*a_listening(tmp_path / "reports"))
    assert event.health == "stuck"
    assert event.report is not None
    assert event.report.startswith(str(tmp_path))


async def test_without_a_place_for_reports_it_is_told_all_the_same() -> None:
    assert (await told(*a_listening(None))).report is None


async def test_a_disk_that_hangs_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.listening.REPORT_SECONDS", 0.05)
    monkeypatch.setattr("runtime.listening.write_report", lambda *_: time.sleep(1.0))
    with anyio.fail_after(0.9):
        assert (await told(*a_listening(tmp_path))).report is None
