"""A minute of chaos with a fixed seed: nobody notices, nothing is left, and the scheduler's recording plays the same again."""

from __future__ import annotations

import tempfile
from pathlib import Path

import anyio
import pytest

from runtime.errors import ExitReport, WorkerCrashed
from tests.chaos.recorder import recorded, replay
from tests.chaos.run import run
from tests.support import census
from tests.unit.scheduler.house import House

SEED = 20_261_201
SECONDS = 50.0


@pytest.mark.limit(240)
def test_a_minute_of_chaos_is_noticed_by_nobody_and_plays_the_same_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.actors.health.RESTART_FIRST_SECONDS", 0.01)
    monkeypatch.setattr("runtime.actors.health.RESTART_MOST_SECONDS", 0.05)
    run_directories = Path(tempfile.gettempdir())  # where other tests have theirs, too
    with census.mark(), recorded(tmp_path / "recording"):
        before = census.take(run_directories)
        tally = anyio.run(run, tmp_path, SEED, SECONDS)
        left = census.wait_until_gone(before, run_directories, 5.0)
    assert tally.is_clean, tally.summary()
    assert not left.processes
    assert not left.descriptors
    done = tally.done
    assert min(done[what] for what in ("answers", "cancelled", "kills", "stops", "damages", "shortages", "replays")) > 0, done
    num_stimuli, different = replay(tmp_path / "recording", look=lambda state: None)
    assert num_stimuli > 1000
    assert different is None


def test_a_recording_with_errors_in_it_plays_the_same_again(tmp_path: Path) -> None:
    path = tmp_path / "recording"
    with recorded(path):
        house = House()
        house.up()
        request, sequence = house.start(max_tokens=50)
        house.step(sequence, num_steps=3)
        house.lose()
        house.up(incarnation=2)
        house.prefilled(sequence, incarnation=2)
        house.lose(incarnation=2, restarting=False)
    assert isinstance(house.outcomes[request].error, WorkerCrashed)
    assert isinstance(house.outcomes[request].error.report, ExitReport)
    assert path.stat().st_mode & 0o777 == 0o600
    num_stimuli, different = replay(path)
    assert num_stimuli > 8
    assert different is None


def test_a_recording_of_another_scheduler_is_told_from_where_it_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "recording"
    with recorded(path):
        house = House()
        house.up()
        house.start(max_tokens=50)
    monkeypatch.setattr("runtime.scheduler.book.Book.new_sequence_id", lambda book: 99)
    assert replay(path, look=lambda state: None)[1] is not None
