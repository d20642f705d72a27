"""The worker's state table: every move it names is possible, every other is refused."""

from __future__ import annotations

import itertools

import pytest

from runtime.actors.lifecycle import WORKER_MOVES, IllegalMove, Lifecycle, WorkerState

PATHS: dict[WorkerState, list[WorkerState]] = {
    WorkerState.SPAWNED: [WorkerState.SPAWNED],
    WorkerState.CONNECTED: [WorkerState.SPAWNED, WorkerState.CONNECTED],
    WorkerState.LOADING: [WorkerState.SPAWNED, WorkerState.CONNECTED, WorkerState.LOADING],
}
PATHS[WorkerState.READY] = [*PATHS[WorkerState.LOADING], WorkerState.READY]
PATHS[WorkerState.DRAINING] = [*PATHS[WorkerState.READY], WorkerState.DRAINING]
PATHS[WorkerState.STOPPED] = [*PATHS[WorkerState.DRAINING], WorkerState.STOPPED]
PATHS[WorkerState.DEAD] = [*PATHS[WorkerState.READY], WorkerState.DEAD]
PATHS[WorkerState.BACKOFF] = [*PATHS[WorkerState.DEAD], WorkerState.BACKOFF]
PATHS[WorkerState.FAILED] = [*PATHS[WorkerState.DEAD], WorkerState.FAILED]


def at(state: WorkerState) -> Lifecycle:
    lifecycle = Lifecycle()
    for step in PATHS[state]:
        lifecycle.move(step)
    return lifecycle


def test_the_table_names_every_state_and_each_can_be_reached() -> None:
    assert set(WORKER_MOVES) == set(WorkerState)
    for state in WorkerState:
        assert at(state).state is state


@pytest.mark.parametrize(("left", "to"), list(itertools.product(WorkerState, WorkerState)))
def test_exactly_the_moves_of_the_table_are_possible(left: WorkerState, to: WorkerState) -> None:
    lifecycle = at(left)
    if to in WORKER_MOVES[left]:
        assert lifecycle.can_move(to)
        assert lifecycle.move(to) is left
        assert lifecycle.state is to
    else:
        assert not lifecycle.can_move(to)
        with pytest.raises(IllegalMove, match=to.name):
            lifecycle.move(to)
        assert lifecycle.state is left


def test_a_life_begins_with_a_process() -> None:
    lifecycle = Lifecycle()
    assert lifecycle.state is None
    with pytest.raises(IllegalMove):
        lifecycle.move(WorkerState.READY)


def test_a_process_can_die_in_every_state_in_which_there_is_one() -> None:
    with_process = {
        WorkerState.SPAWNED,
        WorkerState.CONNECTED,
        WorkerState.LOADING,
        WorkerState.READY,
        WorkerState.DRAINING,
    }
    assert {state for state in WorkerState if WorkerState.DEAD in WORKER_MOVES[state]} == with_process
