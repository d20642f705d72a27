"""Who was inside a step, and when? Read from the trace that several fake engines wrote (`FakeScript.trace`)."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import NamedTuple


class Stamp(NamedTuple):
    nanoseconds: int
    pid: int
    what: str


def stamps(trace: Path) -> list[Stamp]:
    """In order of time. Of a line that is just being written nothing is read."""
    lines = trace.read_text().split("\n")[:-1] if trace.exists() else []
    return sorted(Stamp(int(at), int(pid), what) for at, pid, what in (line.split() for line in lines))


def inside_now(trace: Path) -> set[int]:
    """The processes that are in a step by what they wrote, dead ones included."""
    depths: Counter[int] = Counter()
    for stamp in stamps(trace):
        depths[stamp.pid] += 1 if stamp.what == "begin" else -1
    return {pid for pid, depth in depths.items() if depth > 0}


def most_inside(trace: Path, deaths: dict[int, int] | None = None) -> int:
    """The most processes that were inside steps at one moment. deaths: not before when a process ended, by pid, in nanoseconds."""
    depths: Counter[int] = Counter()
    ends = [Stamp(at, pid, "death") for pid, at in (deaths or {}).items()]
    most = 0
    for stamp in sorted([*stamps(trace), *ends]):
        match stamp.what:
            case "begin":
                depths[stamp.pid] += 1
            case "end":
                depths[stamp.pid] -= 1
            case _:
                depths[stamp.pid] = 0
        most = max(most, sum(depth > 0 for depth in depths.values()))
    return most


def num_steps(trace: Path) -> Counter[int]:
    """Begun, by process."""
    return Counter(stamp.pid for stamp in stamps(trace) if stamp.what == "begin")
