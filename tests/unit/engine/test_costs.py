"""A step's promised cost follows what earlier steps took."""

from __future__ import annotations

from runtime.engine.costs import StepCosts


def test_before_anything_is_measured_the_promise_is_generous_and_grows_with_the_work() -> None:
    costs = StepCosts()
    assert costs.promise(1, 1) >= 1
    assert costs.promise(1, 1000) > costs.promise(1, 10) > costs.promise(1, 1)
    assert costs.promise(0, 0) == 0


def test_decode_steps_are_remembered_by_their_number_of_rows() -> None:
    costs = StepCosts()
    costs.note(1, 1, 0.01)
    costs.note(8, 8, 0.03)
    assert costs.promise(1, 1) == 0.01
    assert costs.promise(9, 9) == 0.03
    assert costs.promise(64, 64) >= 0.03


def test_a_prefill_promise_is_per_token_and_never_below_a_decode_step() -> None:
    costs = StepCosts()
    costs.note(2, 100, 0.5)
    assert costs.promise(1, 400) == 2.0
    costs.note(1, 1, 0.2)
    assert costs.promise(1, 2) == 0.2


def test_the_newest_measurement_moves_the_average() -> None:
    costs = StepCosts()
    costs.note(1, 1, 1.0)
    for _ in range(30):
        costs.note(1, 1, 2.0)
    assert 1.9 < costs.promise(1, 1) <= 2.0
