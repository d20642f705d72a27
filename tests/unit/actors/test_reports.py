"""A report of a stall is private, small, bounded in number, and harmless where nothing can be written."""

from __future__ import annotations

import json
import stat
from pathlib import Path

from runtime.actors.reports import MAX_REPORTS, Stall, write_report


def a_stall(directory: Path, incarnation: int = 1) -> Stall:
    stacks = directory / "w1.stacks"
    stacks.write_text("Thread 0x1 (most recent call first):\n")
    return Stall("chat", 1, incarnation, "it sent no message", "decode", ((0.5, "to", "Prefill"),), stacks)


def test_it_holds_what_is_known_and_only_its_owner_may_read_it(tmp_path: Path) -> None:
    place = write_report(tmp_path / "reports", a_stall(tmp_path), {"queues": {"chat": 3}})
    assert place is not None
    assert stat.S_IMODE(place.stat().st_mode) == stat.S_IMODE((tmp_path / "reports").stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in place.iterdir()} == {0o600}
    facts = json.loads((place / "stall.json").read_text())
    assert facts["complaint"] == "it sent no message"
    assert facts["messages"] == [[0.5, "to", "Prefill"]]
    assert facts["house"] == {"queues": {"chat": 3}}
    assert "most recent call" in (place / "stacks.txt").read_text()


def test_only_the_last_ones_are_kept(tmp_path: Path) -> None:
    for number in range(MAX_REPORTS + 5):
        assert write_report(tmp_path / "reports", a_stall(tmp_path, number), {}) is not None
    assert len(list((tmp_path / "reports").iterdir())) == MAX_REPORTS


def test_nowhere_to_write_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "reports").write_text("a file where a directory should be")
    assert write_report(tmp_path / "reports", a_stall(tmp_path), {}) is None
