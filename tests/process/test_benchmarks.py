"""The benchmark runs end to end on a tiny model, reports every figure, and judges honestly. Its speeds are nobody's test."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import device_lease, overhead, prefix_parts
from benchmarks.measure import BenchmarkError, Run, StreamRun, equal_fraction, require_same_work
from benchmarks.parts import BATCH_GENERATOR, SERVER, STREAM_GENERATE
from benchmarks.report import Figure, Target, table

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of one quick run, which also wrote it to a file."""
    output = tmp_path_factory.mktemp("benchmark") / "report.json"
    command = [sys.executable, "-m", "benchmarks.overhead", "--quick", "--output", str(output)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110.0, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert json.loads(output.read_text(encoding="utf-8")) == found
    return found


def test_a_quick_run_measures_and_judges_every_part(report: dict[str, Any]) -> None:
    assert {figure["part"] for figure in report["figures"]} == set(overhead.PARTS)
    for figure in report["figures"]:
        assert figure["subject"]["runs"], figure
        assert (figure["met"] is None) == ("target" not in figure), figure
    judged = [figure["met"] for figure in report["figures"] if figure["met"] is not None]
    assert (report["num_targets"], report["num_targets_met"]) == (len(judged), sum(judged))
    assert {figure["part"] for figure in report["figures"] if figure["met"] is not None} == set(overhead.PARTS)


def test_both_sides_read_and_make_equally_many_tokens(report: dict[str, Any]) -> None:
    for part, num_sides in (("a", 2), ("bc", 3)):
        work = [(run["num_streams"], run["num_prompt_tokens"], run["num_tokens"]) for run in report["runs"] if run["part"] == part]
        assert len(work) == num_sides
        assert len(set(work)) == 1, work


def test_both_sides_make_the_same_tokens_as_far_as_their_arithmetic_agrees(report: dict[str, Any]) -> None:
    assert {agreement["opponent"] for agreement in report["agreement"]} == {STREAM_GENERATE, BATCH_GENERATOR, SERVER}
    for agreement in report["agreement"]:
        # OpenBLAS may differ in the last bits, and a random model amplifies that; most of the output agrees all the same.
        # Its text is mostly broken UTF-8, which every detokenizer shows in its own way.
        if agreement["compared"] == "token ids":
            assert all(fraction > 0.5 for fraction in agreement["equal_fraction"]), agreement


def test_a_quick_run_of_the_prefix_benchmark_measures_and_judges_every_part() -> None:
    command = [sys.executable, "-m", "benchmarks.prefix", "--quick"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110.0, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert {figure["part"] for figure in found["figures"]} == set(prefix_parts.PARTS)
    assert {run["cached_tokens"] for run in found["runs"] if run["part"] == "a"} == {0, 512}
    assert all(figure["subject"]["runs"] for figure in found["figures"])


def test_a_quick_run_of_the_device_lease_benchmark_measures_every_part() -> None:
    command = [sys.executable, "-m", "benchmarks.device_lease", "--quick"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110.0, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert {figure["part"] for figure in found["figures"]} == {"a", *device_lease.PARTS}
    assert found["waits"]["none"]["num_device_waits"] == 0
    assert found["waits"]["1"]["num_device_waits"] > 0


def test_a_terminated_run_says_so_and_leaves_nothing_behind() -> None:
    # That no process, descriptor or directory is left is checked after every test.
    command = [sys.executable, "-m", "benchmarks.overhead", "--quick"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as benchmark:
        assert benchmark.stderr is not None
        for line in benchmark.stderr:
            if "in an mlx-lm child" in line:  # by now both sides have processes
                benchmark.send_signal(signal.SIGTERM)
                break
        rest = benchmark.stderr.read()
        assert benchmark.wait(timeout=60.0) == 1
    assert rest.endswith("error: BenchmarkError: interrupted\n"), rest


def test_an_unknown_part_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        overhead.main(["--only", "a,x"])
    assert "unknown part x; parts are a, b, c, d, e" in capsys.readouterr().err


def figure(**changes: Any) -> Figure:
    values: dict[str, Any] = {
        "part": "a",
        "name": "speed",
        "unit": "tok/s",
        "subject": "runtime",
        "subject_runs": [9.0, 10.0, 30.0],
    }
    return Figure(**{**values, **changes})


def test_a_ratio_is_of_the_medians_and_shows_the_spread_of_the_pairs() -> None:
    found = figure(opponent="other", opponent_runs=[10.0, 20.0, 20.0], target=Target("ratio", at_least=0.6)).as_json()
    assert (found["ratio"], found["ratio_lowest"], found["ratio_highest"]) == (0.5, 0.5, 1.5)
    assert found["met"] is False


def test_a_missed_target_shows_in_the_table() -> None:
    missed = figure(opponent="other", opponent_runs=[20.0, 20.0, 20.0], target=Target("ratio", at_least=1.0))
    assert "MISSED" in table([missed])
    assert "MISSED" not in table([figure(target=Target("median", at_least=10.0))])


def test_a_worst_of_target_is_judged_by_the_worst_run() -> None:
    assert figure(target=Target("worst", at_most=30.0)).is_met is True
    assert figure(target=Target("worst", at_most=29.0)).is_met is False


def test_without_an_opponent_or_target_nothing_is_judged() -> None:
    assert figure().is_met is None
    assert figure(target=Target("ratio", at_least=0.1)).is_met is False


def stream(tokens: list[int], seconds: list[float], prompt_tokens: int = 3) -> StreamRun:
    return StreamRun(prompt_tokens, [(when, 1) for when in seconds], tokens)


def test_decode_speed_counts_only_while_all_streams_decode() -> None:
    run = Run([stream([1, 2, 3, 4], [1.0, 2.0, 3.0, 4.0]), stream([1, 2, 3], [2.0, 2.5, 3.0])])
    assert run.decode_tokens_per_second == pytest.approx(3.0)  # from 2 s to 3 s: one token of the first stream, two of the second
    assert run.decode_rates() == pytest.approx([1.0, 2.0])
    assert run.end_to_end_tokens_per_second == pytest.approx(7 / 4)


def test_streams_that_never_decode_together_are_rated_end_to_end() -> None:
    run = Run([stream([1, 2], [1.0, 2.0]), stream([1, 2], [3.0, 4.0])])
    assert run.decode_rates() == pytest.approx([1.0, 0.5])


def test_equal_output_is_counted_up_to_the_first_difference_of_each_stream() -> None:
    ours = [stream([1, 2, 9, 4], [0.0] * 4), stream([5, 6], [0.0] * 2)]
    theirs = [stream([1, 2, 3, 4], [0.0] * 4), stream([5, 6], [0.0] * 2)]
    assert equal_fraction(ours, theirs) == pytest.approx(4 / 6)


def test_unequal_work_is_no_measurement() -> None:
    with pytest.raises(BenchmarkError, match="not the same work"):
        require_same_work(Run([stream([1, 2], [0.0, 1.0])]), Run([stream([1], [0.0])]), what="a tiny")
    with pytest.raises(BenchmarkError, match="not the same work"):
        require_same_work(Run([stream([1], [0.0], 3)]), Run([stream([1], [0.0], 4)]), what="a tiny")
