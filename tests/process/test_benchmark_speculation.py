"""The speculation benchmark runs end to end on tiny models, reports every figure, and judges honestly. Speeds are nobody's test."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import speculation
from benchmarks.measure import Run, StreamRun
from benchmarks.speculation_bench import RoundParts, rate
from benchmarks.speculation_cells import Cell, figures_of
from benchmarks.speculation_shared import num_proposed_and_accepted

ROOT = Path(__file__).resolve().parents[2]


def test_a_quick_run_measures_and_judges(tmp_path: Path) -> None:
    """Two parts of it, on tiny models. What a shared drafter does is shown in tests/property."""
    output = tmp_path / "report.json"
    cells = ["--only", "a,c", "--ratios", "3", "--acceptances", "1", "--batches", "1,2"]
    command = [sys.executable, "-m", "benchmarks.speculation", "--quick", *cells, "--output", str(output)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=170.0, check=False)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert json.loads(output.read_text(encoding="utf-8")) == report
    assert {figure["part"] for figure in report["figures"]} == {"a", "c"}
    for figure in report["figures"]:
        assert figure["subject"]["runs"], figure
        assert (figure["met"] is None) == ("target" not in figure), figure
    sides = {(run["cell"], run["side"]) for run in report["runs"] if run["part"] == "a"}
    for batch in (1, 2):
        cell = f"acceptance 1, cost 1/3, batch {batch}"
        expected = {"plain", "sequential", "ahead", "auto"} | ({"mlx-lm"} if batch == 1 else set())
        assert {side for name, side in sides if name == cell} - {"drafter"} == expected
    accepted = [figure for figure in report["figures"] if figure["part"] == "a" and figure["name"].endswith(": accepted")]
    assert all(set(figure["subject"]["runs"]) == {1.0} for figure in accepted)


def test_an_unknown_part_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        speculation.main(["--only", "a,x"])
    assert "unknown part x; parts are a, b, c, d" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("right", "num_plain", "expected"),
    [
        ("yyyyyyyyyyy", 1, (8, 8)),  # 1 plain, two rounds of 4 proposals and the target's own token
        ("nnnnnn", 1, (4 + 3 + 2 + 1, 0)),  # each round but the last proposes less, for less is left
        ("yyynyyyyy", 2, (4 + 4, 1 + 4)),  # the round that ends with the wrong guess, and one to the end
        ("yyyy", 4, (0, 0)),
        ("yyyyyn", 1, (4, 4)),  # the last token is the target's own, whatever was guessed
    ],
)
def test_rounds_are_counted_from_right_and_wrong_guesses(right: str, num_plain: int, expected: tuple[int, int]) -> None:
    assert num_proposed_and_accepted([guess == "y" for guess in right], num_plain, num_draft_tokens=4) == expected


def parts(**changes: float) -> RoundParts:
    values: dict[str, Any] = {
        "num_rows": 2,
        "num_rounds": 10,
        "num_proposed": 80,
        "num_accepted": 40,
        "draft_seconds": 0.25,
        "verify_seconds": 0.75,
        "wire_seconds": 0.25,
    }
    return RoundParts(**{**values, **changes})


def test_a_prediction_is_of_the_steps_alone_and_of_what_was_accepted() -> None:
    assert parts().predicted_tokens_per_second == pytest.approx(2 * (1 + 4 * 0.5) * 10 / 1.0)
    assert parts(num_accepted=0).predicted_tokens_per_second == pytest.approx(20.0)
    assert (parts().draft_share, parts().wire_share) == pytest.approx((0.25, 0.2))


def judged(cell: Cell) -> dict[str, Any]:
    """Verdicts, by what was compared."""
    return {
        f"{figure.name.removeprefix(cell.name + ': ')} / {figure.opponent}": figure.is_met
        for figure in figures_of(cell)
        if figure.is_met is not None
    }


def cell(acceptance: float, draft_seconds: float = 0.25, **rates: float) -> Cell:
    return Cell(
        "cell", 3, acceptance, 4, {side: [value] for side, value in rates.items()}, [parts(draft_seconds=draft_seconds)], [1.0]
    )


def test_auto_is_judged_by_the_best_of_the_others() -> None:
    assert judged(cell(0.5, plain=10, sequential=12, ahead=20, auto=18))["auto / ahead"] is False
    assert judged(cell(0.5, plain=10, sequential=12, ahead=20, auto=19.5))["auto / ahead"] is True
    assert judged(cell(0, plain=10, sequential=10.2, ahead=5, auto=9.6)) == {
        "auto / sequential": False,
        "auto / plain": True,
        "rounds / predicted": False,
        "wire / None": False,
        "ahead / sequential": False,
    }


def test_drafting_ahead_is_judged_where_drafting_is_a_good_part_of_a_round() -> None:
    assert judged(cell(1, plain=10, sequential=30, ahead=34, auto=35))["ahead / sequential"] is False
    assert judged(cell(1, plain=10, sequential=30, ahead=35, auto=35))["ahead / sequential"] is True
    assert "ahead / sequential" not in judged(cell(1, draft_seconds=0.2, plain=10, sequential=30, ahead=31, auto=35))


def test_streams_that_decode_together_for_a_moment_only_are_rated_as_a_whole() -> None:
    together = StreamRun(arrivals=[(1.0, 1), (2.0, 5), (3.0, 5)])
    assert rate(Run([together])) == pytest.approx(5.0)
    late = StreamRun(arrivals=[(2.9, 1), (4.0, 10)])
    assert rate(Run([together, late])) == pytest.approx(11 / 3 + 11 / 4, abs=3)  # not 5 tokens in a tenth of a second
