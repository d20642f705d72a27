"""Rows that begin alike: one computes, the others wait for it no longer than it helps them, and only within one scope."""

from __future__ import annotations

from typing import Any

import pytest

from runtime.prefix.hashing import Secret, shared_scope
from runtime.protocol.ids import RequestId, SequenceId
from runtime.protocol.tokens import TokenIds
from runtime.scheduler.following import FOLLOW_TOKENS, Leaders, common_length, usable_length
from runtime.scheduler.hints import MAX_HINTS, Hints
from tests.unit.scheduler.prefix_house import B, PrefixHouse, entry_of, scope_of, secret_of, text

HEAD = text(1, 4 * B)
"""What they share."""
ONE, TWO, THREE = [*HEAD, *text(2, 20)], [*HEAD, *text(3, 20)], [*HEAD, *text(4, 20)]
OTHER = text(5, 4 * B + 20)


def together(*prompts: list[int], house: PrefixHouse | None = None, **changes: Any) -> tuple[PrefixHouse, list[RequestId]]:
    house = house or PrefixHouse()
    return house, house.ask_all(list(prompts), **changes)


def ready(house: PrefixHouse, request: RequestId) -> SequenceId:
    """Its first sequence, which was sent."""
    assert not house.waiting(request)
    return house.sequence(request)


# -- who waits ------------------------------------------------------------------------------------------------------


def test_of_rows_that_begin_alike_one_is_computed_and_the_others_follow() -> None:
    house, (one, two, three, other) = together(ONE, TWO, THREE, OTHER)
    assert house.started([one, two, three, other]) == [one, other]
    house.restored(ready(house, one))
    house.kept(ready(house, one), len(HEAD))
    house.prefilled(ready(house, one), ready(house, other))
    assert house.started([two, three]) == [two, three]
    house.restored(ready(house, two), len(HEAD), "memory")
    assert (house.counts().followed, house.counts().followed_tokens) == (1, len(HEAD))


def test_followers_start_as_soon_as_memory_holds_what_they_wait_for() -> None:
    house, (one, two) = together([*ONE, *text(6, 4 * B)], TWO, house=PrefixHouse(disk=0))
    sequence = ready(house, one)
    house.restored(sequence)
    house.kept(sequence, 2 * B)
    assert house.waiting(two), "there is more to come"
    house.kept(sequence, len(HEAD))
    assert house.started([two]) == [two]
    assert house.model.sequences[house.sequence(two)].expected_length == len(HEAD)


def test_all_sequences_of_a_request_but_its_first_follow_it() -> None:
    house, (one,) = together(ONE, num_sequences=3)
    assert len(house.rows()) == 1
    house.compute(ready(house, one))
    assert len(house.rows()) == 3


@pytest.mark.parametrize("shared", [FOLLOW_TOKENS - 1, FOLLOW_TOKENS])
def test_a_short_common_beginning_is_not_worth_a_wait(shared: int) -> None:
    first, second = [*HEAD[:shared], *text(2, 50)], [*HEAD[:shared], *text(3, 50)]
    house, (one, two) = together(first, second)
    assert house.started([one, two]) == ([one, two] if shared < FOLLOW_TOKENS else [one])


def test_what_files_give_already_is_not_waited_for() -> None:
    house = PrefixHouse()
    house.seen(entry_of(scope_of("t"), HEAD))
    house, (one, two) = together(ONE, TWO, house=house)
    assert house.started([one, two]) == [one, two]


def test_nobody_follows_a_row_that_is_not_kept() -> None:
    house, (one, two) = together(ONE, TWO, keeps_prefix=False)
    assert house.started([one, two]) == [one, two]


def test_a_row_that_is_not_kept_may_follow() -> None:
    house = PrefixHouse()
    one = house.submit(scope=scope_of("t"), prompt_length=len(ONE))
    two = house.submit(scope=scope_of("t"), prompt_length=len(TWO), keeps_prefix=False)
    house.prepare(one, ONE)
    house.prepare(two, TWO)
    assert house.started([one, two]) == [one]


def test_without_memory_nobody_follows() -> None:
    house, (one, two) = together(ONE, TWO, house=PrefixHouse(memory=0))
    assert house.started([one, two]) == [one, two]


# -- whose leader is gone -------------------------------------------------------------------------------------------


def test_when_the_leader_is_cancelled_the_next_leads_the_rest() -> None:
    house, (one, two, three) = together(ONE, TWO, THREE)
    house.cancel(one)
    assert house.started([two, three]) == [two]
    house.compute(ready(house, two))
    assert house.started([three]) == [three]


def test_when_the_leader_fails_a_follower_takes_over_with_what_is_there() -> None:
    house, (one, two, three) = together(ONE, TWO, THREE, house=PrefixHouse(disk=0))
    sequence = ready(house, one)
    house.restored(sequence)
    house.kept(sequence, 2 * B)
    house.refuse(sequence)
    assert house.outcomes[one].state == "failed"
    assert house.started([two, three]) == [two]
    assert house.model.sequences[house.sequence(two)].expected_length == 2 * B


def test_when_a_waiting_follower_is_cancelled_the_others_wait_on() -> None:
    house, (one, two, three) = together(ONE, TWO, THREE)
    house.cancel(two)
    assert house.started([three]) == []
    house.compute(ready(house, one))
    assert house.started([three]) == [three]


def test_when_the_only_slot_is_the_leaders_its_follower_starts_once_it_is_free() -> None:
    house, (one, two) = together(ONE, TWO, house=PrefixHouse(slots=1))
    sequence = ready(house, one)
    house.cancel(one)
    assert house.waiting(two)
    house.released(sequence)
    assert house.started([two]) == [two]


def test_when_the_leader_is_computed_but_not_kept_its_followers_go_on_alone() -> None:
    house, (one, two) = together(ONE, TWO)
    house.restored(ready(house, one))
    house.prefilled(ready(house, one))
    assert house.started([two]) == [two]


@pytest.mark.parametrize("is_kept", [False, True])
def test_nobody_waits_for_the_rest_of_its_leaders_batch(is_kept: bool) -> None:
    """The other row of the batch is still being computed, and there is room for a second batch."""
    house, (one, other, two) = together(ONE, OTHER, TWO)
    assert len(house.model.batches) == 1
    house.prefilled(ready(house, one))
    if is_kept:
        house.kept(ready(house, one), len(ONE))
    assert house.started([two]) == [two]
    assert not house.waiting(other)


def test_when_the_leaders_tenant_is_erased_its_followers_go_on_alone() -> None:
    house, (_, two) = together(ONE, TWO)
    house.erase()
    assert house.started([two]) == [two]
    assert house.row(ready(house, two)).prefix is None


def test_after_a_worker_is_lost_the_leader_leads_again_and_the_follower_waits_again() -> None:
    house, (one, two) = together(ONE, TWO)
    house.lose()
    house.up(incarnation=2)
    assert house.started([one, two]) == [one]


def test_a_row_starts_when_its_leader_had_no_room_in_the_batches_of_the_round() -> None:
    """Chosen for a slot is not started: what is left out leads only as long as it is chosen again."""
    house = PrefixHouse()
    requests = house.ask_all([text(9, 3000), text(8, 1500), text(7, 700), text(6, 300), ONE, TWO], tenant="t")
    for _ in requests:
        for request in house.started(requests):
            sequence = house.sequence(request)
            if house.model.sequences[sequence].batch is not None:
                house.compute(sequence)
    assert house.started(requests) == requests


# -- between scopes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scope", [scope_of("other"), scope_of("t", life=1), shared_scope(), None])
def test_rows_of_different_scopes_never_wait_for_each_other(scope: Any) -> None:
    house = PrefixHouse(disk=0)
    one = house.submit(scope=scope_of("t"), prompt_length=len(ONE))
    two = house.submit("other", scope=scope, prompt_length=len(ONE))
    house.prepare(one, ONE)
    house.prepare(two, ONE)
    assert house.started([one, two]) == [one, two]
    for request in (one, two):
        if scope is not None or request == one:
            house.restored(house.sequence(request))
    house.kept(house.sequence(one), len(ONE))
    house.prefilled(house.sequence(one), house.sequence(two))
    late = house.ask(ONE, "other", scope=scope)
    assert house.model.sequences[house.sequence(late)].expected_length == 0


def test_tenants_that_share_a_scope_follow_each_other() -> None:
    house = PrefixHouse()
    one = house.submit("a", scope=shared_scope(), prompt_length=len(ONE))
    two = house.submit("b", scope=shared_scope(), prompt_length=len(TWO))
    house.prepare(one, ONE)
    house.prepare(two, TWO)
    assert house.started([one, two]) == [one]


# -- the parts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [0, 1, 63, 64, 65, 127, 128, 191, 192, 500, 599, 600])
def test_the_common_length_is_exact(shared: int) -> None:
    tokens = list(range(600))
    other = [*tokens[:shared], *([9999] if shared < 600 else []), *tokens[shared + 1 :]]
    assert common_length(TokenIds(tokens), TokenIds(other)) == shared
    assert common_length(TokenIds(tokens), TokenIds(tokens[:shared])) == shared


def test_one_token_is_computed_and_whole_blocks_where_checkpoints_are_needed() -> None:
    assert [usable_length(shared, 2 * B, "dense") for shared in (0, 5, 2 * B)] == [0, 5, 2 * B - 1]
    assert [usable_length(shared, 2 * B, "mixed") for shared in (0, B - 1, B, 2 * B)] == [0, 0, B, B]
    assert usable_length(0, 0, "dense") == 0


def test_the_best_leader_is_the_one_that_shares_most() -> None:
    leaders: Leaders[str] = Leaders()
    secret, foreign = Secret(b"s"), Secret(b"f")
    for who, length in (("short", 200), ("long", 400)):
        leaders.add(secret, TokenIds([*HEAD[:length], 7]), who)
    leaders.add(foreign, TokenIds(HEAD), "foreign")
    assert leaders.best(secret, TokenIds(HEAD), "dense") == ("long", 400)
    assert leaders.best(secret, TokenIds(OTHER), "dense") is None
    assert leaders.best(secret, TokenIds(HEAD[:FOLLOW_TOKENS]), "dense") is None, "one of them is computed anyway"


def test_hints_say_what_was_noted_of_the_scope_until_it_is_corrected_or_forgotten() -> None:
    hints, secret = Hints(), Secret(secret_of(scope_of("t")))
    hints.note(SequenceId(1), secret, TokenIds(ONE), 300)
    hints.note(SequenceId(1), secret, TokenIds(ONE), 200)
    assert hints.reach(secret, TokenIds(TWO)) == 300, "saying less takes nothing back"
    assert hints.reach(Secret(b"f"), TokenIds(ONE)) == 0
    assert hints.reach(secret, TokenIds(ONE), since=hints.number) == 0
    hints.correct(secret, TokenIds(ONE), 300)
    assert len(hints) == 1
    hints.correct(secret, TokenIds(ONE), 299)
    assert len(hints) == 0
    for number in range(MAX_HINTS + 5):
        hints.note(SequenceId(number), secret, TokenIds(ONE), number)
    assert len(hints) == MAX_HINTS
    hints.forget(secret)
    assert hints.reach(secret, TokenIds(ONE)) == 0
