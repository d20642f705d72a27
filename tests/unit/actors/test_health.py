"""Health: a busy worker that said so lives, a silent one does not, and restarts have a budget. All in virtual time."""

from __future__ import annotations

import pytest

from runtime.actors.health import RestartBudget, Vigil
from runtime.protocol.commands import Inspect, Prepare, Release, TextPrompt
from runtime.protocol.events import Heartbeat, Phase, Prepared, Refused, Released, StepDone
from runtime.protocol.ids import RequestId, SequenceId
from runtime.protocol.tokens import TokenIds


def beat(step: int = 0, phase: Phase = "idle", promised: float = 0.0) -> Heartbeat:
    return Heartbeat(step=step, phase=phase, promised_seconds=promised, active_bytes=0, resident_bytes=0)


def prepare(number: int) -> Prepare:
    return Prepare(RequestId(number), TextPrompt("hi"))


def test_a_worker_that_beats_while_idle_is_well_forever() -> None:
    vigil = Vigil(5.0, now=0.0)
    for second in range(1, 1000):
        vigil.heard(beat(), float(second))
        assert vigil.verdict(second + 4.9) is None


def test_silence_is_noticed_at_the_deadline_and_not_before() -> None:
    vigil = Vigil(5.0, now=100.0)
    assert vigil.deadline() == 105.0
    assert vigil.verdict(104.99) is None
    assert "no message" in (vigil.verdict(105.0) or "")


def test_a_declared_long_prefill_is_not_silence() -> None:
    vigil = Vigil(5.0, now=0.0)
    vigil.heard(beat(1, "prefill", promised=30.0), 1.0)
    assert vigil.verdict(35.9) is None
    assert vigil.verdict(36.0) is not None


def test_the_same_prefill_undeclared_is_silence() -> None:
    vigil = Vigil(5.0, now=0.0)
    vigil.heard(beat(1, "prefill"), 1.0)
    assert vigil.verdict(5.9) is None
    assert vigil.verdict(6.0) is not None


def test_a_step_that_never_ends_is_noticed_though_the_beats_go_on() -> None:
    vigil = Vigil(5.0, now=0.0)
    for second in range(1, 8):
        vigil.heard(beat(7, "decode", promised=1.0), float(second))
    assert "no progress in decode step 7" in (vigil.verdict(7.0) or "")


def test_a_worker_that_waits_for_the_device_is_well_as_long_as_it_beats_and_has_its_whole_time_afterwards() -> None:
    vigil = Vigil(5.0, now=0.0)
    vigil.heard(beat(7, "decode"), 1.0)
    for second in range(2, 100):
        vigil.heard(beat(7, "waiting"), float(second))
        assert vigil.verdict(second + 4.9) is None
    vigil.heard(beat(8, "decode", promised=2.0), 100.0)
    assert vigil.verdict(106.9) is None
    assert vigil.verdict(107.0) is not None


def test_a_waiting_worker_that_stops_beating_is_silent() -> None:
    vigil = Vigil(5.0, now=0.0)
    vigil.heard(beat(7, "waiting"), 1.0)
    assert "no message" in (vigil.verdict(6.0) or "")


def test_steps_that_advance_are_progress() -> None:
    vigil = Vigil(5.0, now=0.0)
    for second in range(1, 100):
        vigil.heard(beat(second, "decode"), float(second))
        assert vigil.verdict(second + 1.0) is None


def test_results_are_progress_though_the_beats_lag() -> None:
    vigil = Vigil(5.0, now=0.0)
    vigil.heard(beat(7, "decode"), 1.0)
    vigil.heard(StepDone(8, ()), 5.0)
    vigil.heard(beat(7, "decode"), 6.5)
    assert vigil.verdict(9.0) is None


@pytest.mark.parametrize("command", [prepare(1), Release((), (SequenceId(1),)), Release((RequestId(1),)), Inspect(3)])
def test_a_command_never_answered_is_noticed_though_the_worker_beats(command: Prepare | Release | Inspect) -> None:
    vigil = Vigil(5.0, now=0.0, prepare_seconds=0.0)
    vigil.asked(command, 1.0)
    for second in range(1, 7):
        vigil.heard(beat(), float(second))
    assert vigil.verdict(5.9) is None
    assert "no answer" in (vigil.verdict(6.0) or "")


def test_answers_refusals_and_releases_settle_what_was_asked() -> None:
    vigil = Vigil(5.0, now=0.0, prepare_seconds=0.0)
    for number in (1, 2, 3):
        vigil.asked(prepare(number), 0.0)
    vigil.asked(Release((RequestId(3),), (SequenceId(9),)), 0.0)
    vigil.heard(Prepared(RequestId(1), TokenIds([1])), 1.0)
    vigil.heard(Refused("prepare", "template_error", "no", requests=(RequestId(2),)), 1.0)
    vigil.heard(Released((RequestId(3),), (SequenceId(9),), 0), 1.0)
    vigil.heard(beat(), 100.0)
    assert vigil.verdict(104.0) is None


def test_those_waiting_behind_an_answer_get_their_time_from_then() -> None:
    vigil = Vigil(5.0, now=0.0, prepare_seconds=0.0)
    vigil.asked(prepare(1), 0.0)
    vigil.asked(prepare(2), 0.0)
    vigil.heard(Prepared(RequestId(1), TokenIds([1])), 4.0)
    vigil.heard(beat(), 8.0)
    assert vigil.verdict(8.9) is None
    assert vigil.verdict(9.0) is not None


def test_a_prompt_may_take_what_its_worker_allows_it_however_short_the_silence() -> None:
    vigil = Vigil(5.0, now=0.0, prepare_seconds=25.0)
    vigil.asked(prepare(1), 0.0)
    vigil.asked(prepare(2), 0.0)
    vigil.heard(beat(), 24.0)
    assert vigil.verdict(24.9) is None
    vigil.heard(Refused("prepare", "template_error", "it never ends", requests=(RequestId(1),)), 25.0)
    vigil.heard(beat(), 49.0)
    assert vigil.verdict(49.9) is None
    assert "'prepare' of 2" in (vigil.verdict(50.0) or "")


@pytest.mark.parametrize("phase", ["prefill", "decode", "verify", "draft"])
def test_a_step_of_any_kind_that_stands_still_is_seen_though_the_beats_go_on(phase: Phase) -> None:
    vigil = Vigil(5.0, now=0.0)
    for second in range(12):
        vigil.heard(Heartbeat(7, phase, 3.0, 0, 0), float(second))
        if vigil.verdict(float(second)) is not None:
            break
    assert second == 8, "silence and promise"
    assert f"{phase} step 7" in (vigil.verdict(8.0) or "")


def test_a_declared_prefill_of_half_a_minute_is_waited_for_and_an_undeclared_one_is_not() -> None:
    declared, undeclared = Vigil(5.0, now=0.0), Vigil(5.0, now=0.0)
    for second in range(31):
        declared.heard(Heartbeat(1, "prefill", 30.0, 0, 0), float(second))
        undeclared.heard(Heartbeat(1, "prefill", 0.0, 0, 0), min(float(second), 30.0))
        assert declared.verdict(float(second)) is None
        assert (undeclared.verdict(float(second)) is None) == (second < 5)


def test_after_sleep_all_waits_begin_anew() -> None:
    vigil = Vigil(5.0, now=0.0, prepare_seconds=5.0)
    vigil.asked(prepare(1), 0.0)
    vigil.heard(Heartbeat(1, "decode", 0.0, 0, 0), 0.0)
    vigil.excuse(3600.0)
    assert vigil.verdict(3604.9) is None
    assert vigil.verdict(3605.0) is not None


def test_asking_again_does_not_extend_the_deadline() -> None:
    vigil = Vigil(5.0, now=0.0, prepare_seconds=0.0)
    vigil.asked(prepare(1), 0.0)
    vigil.asked(prepare(1), 4.0)
    vigil.heard(beat(), 4.5)
    assert vigil.verdict(5.0) is not None


def test_the_first_restart_is_at_once_the_others_wait_twice_as_long_each_time_and_the_fifth_death_is_the_last() -> None:
    budget = RestartBudget(max_restarts=4)
    assert [budget.died(float(now)) for now in (0, 1, 2, 3)] == [0.0, 0.5, 1.0, 2.0]
    assert budget.died(4.0) is None


def test_no_restart_at_all_may_be_wanted() -> None:
    assert RestartBudget(max_restarts=0).died(0.0) is None


def test_deaths_far_apart_never_spend_the_budget_and_the_wait_is_bounded() -> None:
    budget = RestartBudget(max_restarts=4)
    waits = [budget.died(now * 150.0) for now in range(20)]
    assert None not in waits
    assert max(wait for wait in waits if wait is not None) == 30.0


def test_a_quiet_window_resets_the_wait() -> None:
    budget = RestartBudget(max_restarts=4)
    budget.died(0.0)
    budget.died(1.0)
    assert budget.died(601.0) == 0.0
