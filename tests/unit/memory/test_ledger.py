"""The budget is never exceeded and nothing is ever negative, whatever is asked, told or lied."""

from __future__ import annotations

import random

import pytest

from runtime.memory.ledger import Granted, Ledger, Need, Short
from runtime.protocol.ids import Holder, ModelName

MIB = 1 << 20


def holder(name: str, serial: int = 1) -> Holder:
    return Holder(ModelName(name), serial)


A, B, C = holder("a"), holder("b"), holder("c")


def need(weights: int, *, load: int = 0, kv_least: int = 0, kv_most: int = 0, process: int = 0) -> Need:
    return Need(weights_bytes=weights, load_bytes=load, kv_least_bytes=kv_least, kv_most_bytes=kv_most, process_bytes=process)


def test_of_two_loads_with_room_for_one_exactly_one_is_granted() -> None:
    ledger = Ledger(100)
    assert ledger.ask(A, need(60)) == Granted()
    assert ledger.ask(B, need(60)) == Short(20, is_hopeless=False)
    assert ledger.reserved(B) == 0
    ledger.released(A)
    assert ledger.ask(B, need(60)) == Granted()


def test_what_no_end_of_others_could_make_room_for_is_hopeless() -> None:
    ledger = Ledger(100, shared_bytes=10)
    assert ledger.ask(A, need(80, load=11)) == Short(1, is_hopeless=True)
    assert ledger.ask(A, need(80, load=10)) == Granted()


def test_a_load_takes_more_until_it_is_over() -> None:
    ledger = Ledger(100)
    ledger.ask(A, need(40, load=40))
    assert ledger.free_bytes == 20
    ledger.loaded(A, need(40))
    assert ledger.free_bytes == 60


def test_only_an_observed_exit_gives_back_and_only_once() -> None:
    ledger = Ledger(100)
    ledger.ask(A, need(70))
    ledger.reconcile(A, 0)
    assert ledger.reserved_bytes == 70
    ledger.released(A)
    ledger.released(A)
    assert ledger.reserved_bytes == 0
    ledger.reconcile(A, 50)  # late words of the dead
    ledger.loaded(A, need(50))
    assert (ledger.reserved_bytes, ledger.overcommitted_bytes) == (0, 0)


def test_a_namesake_that_is_just_ending_holds_its_own() -> None:
    ledger = Ledger(100)
    ledger.ask(holder("a", 1), need(60))
    assert isinstance(ledger.ask(holder("a", 2), need(60)), Short)
    ledger.released(holder("a", 1))
    assert isinstance(ledger.ask(holder("a", 2), need(60)), Granted)


def test_a_model_that_proves_larger_than_estimated_is_backed_as_far_as_there_is_room() -> None:
    ledger = Ledger(100)
    ledger.ask(A, need(30))
    ledger.ask(B, need(50))
    ledger.loaded(A, need(70))
    assert ledger.reserved_bytes == 100
    assert ledger.overcommitted_bytes == 20
    assert isinstance(ledger.ask(C, need(1)), Short)
    ledger.released(B)
    assert (ledger.reserved(A), ledger.overcommitted_bytes) == (70, 0)


def test_whoever_takes_more_than_its_own_diminishes_what_is_lent_and_no_reservation() -> None:
    ledger = Ledger(100)
    ledger.ask(A, need(20, kv_least=5, kv_most=50))
    ledger.ask(B, need(20))
    for one in (A, B):
        ledger.loaded(one, ledger.accounts()[one][0])
    assert ledger.grants() == {A: 50, B: 0}
    ledger.reconcile(B, 60)
    assert ledger.grants() == {A: 5 + 55 - 40, B: 0}
    assert ledger.free_bytes == 15
    ledger.reconcile(B, 1000)
    assert ledger.grants() == {A: 5, B: 0}
    assert ledger.overcommitted_bytes > 0
    ledger.reconcile(B, 20)
    assert ledger.grants() == {A: 50, B: 0}


def test_prefixes_in_memory_are_reserved_once_though_they_are_in_a_workers_footprint() -> None:
    ledger = Ledger(100, shared_bytes=30)
    ledger.ask(A, need(20, kv_most=50))
    ledger.loaded(A, need(20, kv_most=50))
    ledger.ask(B, need(10))
    ledger.loaded(B, need(10))
    ledger.reconcile(B, 10 + 30)
    assert (ledger.grants(), ledger.overcommitted_bytes) == ({A: 40, B: 0}, 0)
    ledger.reconcile(B, 10 + 35)
    assert ledger.grants() == {A: 35, B: 0}


def test_what_is_left_over_is_shared_equally_and_nobody_gets_more_than_it_can_use() -> None:
    ledger = Ledger(100)
    for one, most in ((A, 10), (B, 1000), (C, 1000)):
        ledger.ask(one, need(10, kv_most=most))
        ledger.loaded(one, need(10, kv_most=most))
    assert ledger.grants() == {A: 10, B: 30, C: 30}


def test_one_that_loads_is_lent_nothing_and_takes_from_what_is_lent() -> None:
    ledger = Ledger(100)
    ledger.ask(A, need(10, kv_most=1000))
    ledger.loaded(A, need(10, kv_most=1000))
    assert ledger.grants() == {A: 90}
    assert ledger.ask(B, need(30, load=30)) == Granted()
    assert ledger.grants() == {A: 30}


@pytest.mark.parametrize(("budget", "shared"), [(-1, 0), (10, 11), (10, -1)])
def test_a_budget_that_cannot_be_is_refused(budget: int, shared: int) -> None:
    with pytest.raises(ValueError, match="must be at least 0"):
        Ledger(budget, shared)


@pytest.mark.parametrize("seed", range(4))
def test_invariants_hold_in_a_hundred_thousand_random_steps(seed: int) -> None:
    """25,000 a seed: asks, loads that prove other than estimated, noisy, late and lying footprints, exits in any order."""
    chance = random.Random(seed)
    ledger = Ledger(1000, 100)
    alive: dict[Holder, Need] = {}
    dead: list[Holder] = []
    num_granted = num_short = num_over = 0
    for step in range(25_000):
        match chance.randrange(6):
            case 0:
                one = holder(chance.choice("abcdef"), step)
                wanted = need(
                    chance.randrange(400), load=chance.randrange(100), kv_least=chance.randrange(50), kv_most=chance.randrange(900)
                )
                free, reserved = ledger.free_bytes, ledger.reserved_bytes
                answer = ledger.ask(one, wanted)
                if isinstance(answer, Granted):
                    num_granted += 1
                    assert wanted.peak_bytes <= free
                    alive[one] = wanted
                else:
                    num_short += 1
                    assert (answer.missing_bytes, ledger.reserved_bytes) == (wanted.peak_bytes - free, reserved)
            case 1 if alive:
                one = chance.choice(list(alive))
                old = alive[one]
                alive[one] = need(max(0, old.weights_bytes + chance.randrange(-50, 80)), kv_least=old.kv_least_bytes, kv_most=700)
                ledger.loaded(one, alive[one])
            case 2 | 3 if alive:
                one = chance.choice([*alive, *dead[-3:]])
                truth = ledger.reserved(one)
                lies = [truth, truth + chance.randrange(-20, 20), -5, 0, 10**15, chance.randrange(2000)]
                ledger.reconcile(one, chance.choice(lies))
            case 4 if alive and chance.random() < 0.6:
                one = chance.choice(list(alive))
                del alive[one]
                dead.append(one)
                ledger.released(one)
            case _:
                if dead:
                    ledger.released(chance.choice(dead))
                    ledger.loaded(chance.choice(dead), need(10**9))
        ledger.validate()
        num_over += ledger.overcommitted_bytes > 0
        assert set(ledger.accounts()) == set(alive)
    assert min(num_granted, num_short, num_over) > 100, "the play is not an empty one"
    for one in alive:
        ledger.released(one)
    assert (ledger.reserved_bytes, ledger.free_bytes, ledger.overcommitted_bytes) == (100, 900, 0)
