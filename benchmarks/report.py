"""How do runs become figures with a verdict, and figures the JSON object and the table?"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Target:
    """What `of` must reach: "ratio" (subject over opponent), "median" or "worst" of the subject's runs."""

    of: Literal["ratio", "median", "worst"]
    at_least: float | None = None
    at_most: float | None = None

    def is_met_by(self, value: float) -> bool:
        return (self.at_least is None or value >= self.at_least) and (self.at_most is None or value <= self.at_most)


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured quantity of the subject beside the same quantity of an opponent; run i of both happened side by side.

    Without an opponent, `opponent_runs` is empty and there is no ratio. `ratio` is the ratio of the medians; the lowest and highest
    ratio of a pair of runs show how far to trust it.
    """

    part: str
    name: str
    unit: str
    subject: str
    subject_runs: Sequence[float]
    opponent: str | None = None
    opponent_runs: Sequence[float] = ()
    target: Target | None = None
    note: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.subject_runs)

    @property
    def ratio(self) -> float | None:
        if not self.opponent_runs:
            return None
        below = statistics.median(self.opponent_runs)
        return self.median / below if below else None

    @property
    def is_met(self) -> bool | None:
        """None without a target."""
        if self.target is None:
            return None
        value = {"ratio": self.ratio, "median": self.median, "worst": max(self.subject_runs)}[self.target.of]
        return value is not None and self.target.is_met_by(value)

    def as_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {"part": self.part, "name": self.name, "unit": self.unit}
        found["subject"] = _side(self.subject, self.subject_runs)
        if self.opponent is not None:
            pairs = [ours / theirs for ours, theirs in zip(self.subject_runs, self.opponent_runs, strict=False) if theirs]
            found["opponent"] = _side(self.opponent, self.opponent_runs)
            found["ratio"] = None if self.ratio is None else _rounded(self.ratio)
            found["ratio_lowest"], found["ratio_highest"] = (_rounded(min(pairs)), _rounded(max(pairs))) if pairs else (None, None)
        if self.target is not None:
            found["target"] = {"of": self.target.of, "at_least": self.target.at_least, "at_most": self.target.at_most}
        found["met"] = self.is_met
        if self.note:
            found["note"] = self.note
        return found


def table(figures: Sequence[Figure]) -> str:
    """The figures for people, one line each."""
    rows = [("part", "figure", "subject", "opponent", "ratio", "target", "")]
    for figure in figures:
        opponent = f"{_short(statistics.median(figure.opponent_runs))}  {figure.opponent}" if figure.opponent_runs else ""
        ratio = "" if figure.ratio is None else f"{figure.ratio:.3f}"
        verdict = {True: "met", False: "MISSED", None: ""}[figure.is_met]
        subject = f"{_short(figure.median)} {figure.unit}"
        rows.append((figure.part, figure.name, subject, opponent, ratio, _wanted(figure.target), verdict))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)


def _side(what: str, runs: Sequence[float]) -> dict[str, Any]:
    return {"what": what, "median": _rounded(statistics.median(runs)), "runs": [_rounded(run) for run in runs]}


def _wanted(target: Target | None) -> str:
    if target is None:
        return ""
    of = "" if target.of == "ratio" else f"{target.of} "
    return f"{of}≥ {target.at_least:g}" if target.at_least is not None else f"{of}≤ {target.at_most:g}"


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


def _short(value: float) -> str:
    return f"{value:.4g}" if abs(value) < 10_000 else f"{value:.0f}"
