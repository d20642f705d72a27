"""What a request without output pins for those that follow, and who lets go of it when."""

from __future__ import annotations

import pytest

from runtime.protocol.ids import RequestId, SequenceId
from tests.unit.scheduler.prefix_house import B, PrefixHouse, chain_of, entry_of, nodes_of, scope_of, text

PROMPT = text(1, 2 * B + 10)
CHAIN = chain_of(scope_of("t"), PROMPT)


def pinning(house: PrefixHouse) -> tuple[RequestId, SequenceId]:
    request = house.ask(PROMPT, prefill_only=True, max_tokens=0)
    sequence = house.sequence(request)
    house.restored(sequence)
    return request, sequence


def pinned(house: PrefixHouse, *, is_written: bool = True) -> tuple[RequestId, SequenceId]:
    """A request that has ended, and what it computed is pinned, and perhaps in a file."""
    request, sequence = pinning(house)
    house.kept(sequence, len(PROMPT), nodes_of(len(PROMPT)), pinned_length=len(PROMPT))
    house.prefilled(sequence)
    house.finish(sequence, reason="length")
    house.released(sequence)
    if is_written:
        house.published(1, CHAIN[1])
    return request, sequence


def test_a_pinned_prefix_is_reported_and_stays_until_it_is_released() -> None:
    house = PrefixHouse(floor=1000)
    request, sequence = pinned(house)
    assert (house.outcomes[request].state, house.outcomes[request].pinned_length) == ("finished", len(PROMPT))
    house.seen(free=0)
    assert (house.deleted, house.unpinned()) == ([], [])
    house.unpin(request)
    assert house.unpinned() == [sequence]
    house.seen(free=0)
    assert [entry.name for entry in house.deleted] == [CHAIN[1]]
    house.unpin(request)
    assert house.unpinned() == [sequence], "once is enough"


def test_a_file_that_was_there_before_is_held_by_the_pin() -> None:
    house = PrefixHouse(floor=1000)
    house.seen(entry_of(scope_of("t"), PROMPT))
    request, _ = pinned(house, is_written=False)
    assert house.leases == {("pin", request)}


@pytest.mark.parametrize("is_over", [False, True])
def test_what_is_pinned_after_its_release_is_unpinned_at_once(is_over: bool) -> None:
    house = PrefixHouse()
    request, sequence = pinning(house)
    if is_over:
        house.prefilled(sequence)
        house.finish(sequence, reason="length")
    house.unpin(request)
    house.kept(sequence, len(PROMPT), nodes_of(len(PROMPT)), pinned_length=len(PROMPT))
    assert house.unpinned() == [sequence]
    house.published(1, CHAIN[1])
    assert house.leases == set()


def test_a_request_that_does_not_finish_pins_nothing() -> None:
    house = PrefixHouse()
    request, sequence = pinning(house)
    house.kept(sequence, B, pinned_length=B)
    house.cancel(request)
    assert house.unpinned() == [sequence]
    house.kept(sequence, len(PROMPT), pinned_length=len(PROMPT))
    assert house.unpinned() == [sequence, sequence]
    assert house.state.book.prefixes.pins == {}


def test_another_request_pins_nothing_whatever_its_worker_says() -> None:
    house = PrefixHouse()
    sequence = house.sequence(house.ask(PROMPT))
    house.restored(sequence)
    house.kept(sequence, len(PROMPT), pinned_length=len(PROMPT))
    assert house.state.book.prefixes.pins == {}


def test_a_pin_grows_with_what_is_kept() -> None:
    house = PrefixHouse()
    house.seen(entry_of(scope_of("t"), PROMPT[:B]), entry_of(scope_of("t"), PROMPT, B))
    request, sequence = pinning(house)
    house.kept(sequence, B, pinned_length=B)
    house.kept(sequence, len(PROMPT), pinned_length=len(PROMPT))
    (pin,) = house.state.book.prefixes.pins.values()
    assert (pin.request, pin.length, pin.chain) == (request, len(PROMPT), CHAIN)


def test_a_lost_worker_takes_its_pins_along() -> None:
    house = PrefixHouse()
    request, _ = pinned(house)
    house.lose()
    assert (house.leases, house.state.book.prefixes.pins) == (set(), {})
    house.unpin(request)
    assert house.unpinned() == []


def test_erasing_its_tenant_lets_a_pin_go_and_the_worker_forgets_it_by_itself() -> None:
    house = PrefixHouse()
    request, _ = pinned(house)
    house.erase()
    assert (house.leases, house.state.book.prefixes.pins) == (set(), {})
    house.unpin(request)
    assert house.unpinned() == []


def test_unknown_pins_may_be_released() -> None:
    house = PrefixHouse()
    house.unpin(RequestId(99))
    assert house.unpinned() == []
