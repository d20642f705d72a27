"""What a worker keeps and what of it is written, within budgets and caps; what must go, what must stay, what is forgotten."""

from __future__ import annotations

from typing import Any

import pytest

from runtime.prefix.hits import RESERVED_BYTES as HITS_BYTES
from runtime.protocol.events import Kept, KeptNode
from runtime.protocol.ids import SequenceId, TenantId
from tests.unit.scheduler.prefix_house import (
    BYTES_PER_TOKEN,
    HEAD_BYTES,
    PLENTY,
    B,
    PrefixHouse,
    chain_of,
    entry_of,
    nodes_of,
    scope_of,
    secret_of,
    text,
)

PROMPT = text(1, 4 * B + 10)
CHAIN = chain_of(scope_of("t"), PROMPT)
BESIDE_BYTES = HEAD_BYTES + HITS_BYTES
FILE_BYTES = 2 * B * BYTES_PER_TOKEN + BESIDE_BYTES
"""What a file of two blocks is reckoned to take."""
LESS = HEAD_BYTES // 2
"""What it takes less."""


def computing(house: PrefixHouse, tokens: list[int] = PROMPT, tenant: str = "t", **changes: Any) -> SequenceId:
    sequence = house.sequence(house.ask(tokens, tenant, **changes))
    house.restored(sequence)
    return sequence


def kept(house: PrefixHouse, tokens: list[int] = PROMPT, tenant: str = "t", first: int = 1) -> SequenceId:
    """A row whose prompt is computed, kept, and offered in nodes from number `first` on."""
    sequence = computing(house, tokens, tenant)
    house.kept(sequence, len(tokens), nodes_of(len(tokens), first))
    house.prefilled(sequence)
    return sequence


def written(house: PrefixHouse, tokens: list[int] = PROMPT, tenant: str = "t", first: int = 1) -> None:
    """The same, and all that it was told to write is written, a little smaller than reckoned."""
    kept(house, tokens, tenant, first)
    ends = {node.node: node.end for node in nodes_of(len(tokens), first)}
    for node in [node for node in house.published_nodes() if node in ends]:
        house.published(node, chain_of(scope_of(tenant), tokens)[ends[node] // B - 1], FILE_BYTES - LESS - HITS_BYTES)


# -- what is written ------------------------------------------------------------------------------------------------


def test_what_is_kept_is_written_once_and_found_by_the_next() -> None:
    house = PrefixHouse(memory=1 << 30)
    sequence = kept(house)
    assert house.published_nodes() == [1, 2]
    assert house.known == set()
    house.published(1, CHAIN[1])
    house.published(2, CHAIN[3])
    assert house.known == {CHAIN[1], CHAIN[3]}
    assert house.counts().published == 2
    house.kept(sequence, len(PROMPT), nodes_of(len(PROMPT), 3))
    assert house.published_nodes() == [1, 2], "there are files of it"
    prefix = house.row(house.sequence(house.ask(PROMPT))).prefix
    assert [piece.name for piece in prefix.segments] == [CHAIN[1], CHAIN[3]]  # type: ignore[union-attr]


def test_what_is_on_its_way_to_a_file_is_not_written_a_second_time() -> None:
    house = PrefixHouse()
    kept(house)
    kept(house, first=10)
    assert house.published_nodes() == [1, 2]


def test_a_rejected_node_may_be_written_when_it_is_offered_again() -> None:
    house = PrefixHouse()
    kept(house)
    house.rejected(1, "busy")
    house.rejected(2, "no_space")
    assert house.counts().rejected == {"busy": 1, "no_space": 1}
    assert (house.state.book.prefixes.index.num_bytes, house.known) == (0, set())
    kept(house, first=10)
    assert house.published_nodes() == [1, 2, 10, 11]


def test_without_room_for_files_nothing_is_written_but_memory_is_known() -> None:
    house = PrefixHouse(disk=0)
    kept(house)
    assert house.published_nodes() == []
    assert house.model.hints.reach(secret_of(scope_of("t")), house.row(SequenceId(1)).tokens) == len(PROMPT)  # type: ignore[arg-type]


def test_what_ended_meanwhile_is_written_all_the_same_until_its_worker_released_it() -> None:
    house = PrefixHouse()
    sequence = computing(house)
    house.prefilled(sequence)
    house.finish(sequence)
    house.kept(sequence, len(PROMPT), nodes_of(len(PROMPT)))
    assert house.published_nodes() == [1, 2]


def test_nodes_of_tokens_that_were_never_heard_of_are_not_written() -> None:
    house = PrefixHouse()
    house.kept(computing(house, PROMPT[: 2 * B], max_tokens=4 * B), 4 * B, (KeptNode(1, 0, 2 * B, 1), KeptNode(2, 2 * B, 4 * B, 1)))
    assert house.published_nodes() == [1]


# -- budgets --------------------------------------------------------------------------------------------------------


def test_promised_files_count_against_the_budget_before_they_are_written() -> None:
    house = PrefixHouse(disk=3 * FILE_BYTES - 1)
    kept(house)
    kept(house, text(2, len(PROMPT)), first=10)
    assert house.published_nodes() == [1, 2]
    assert house.counts().rejected == {"no_room": 1, "no_parent": 1}
    house.rejected(2)
    kept(house, text(3, len(PROMPT)), first=20)
    assert house.published_nodes() == [1, 2, 20]


def test_a_full_budget_evicts_least_recently_used_chains_from_their_ends() -> None:
    house = PrefixHouse(disk=4 * FILE_BYTES)
    written(house)
    written(house, text(2, len(PROMPT)), first=10)
    kept(house, text(3, len(PROMPT)), first=20)
    assert [entry.name for entry in house.deleted] == [CHAIN[3], CHAIN[1]]
    assert house.published_nodes()[-2:] == [20, 21]
    assert house.counts().evictions == 2


def test_a_tenant_at_its_cap_evicts_its_own_and_nobody_elses() -> None:
    house = PrefixHouse()
    written(house, tenant="other", first=10)
    house.tenant("t", prefix_disk_bytes=2 * FILE_BYTES)
    written(house)
    kept(house, text(2, len(PROMPT)), first=20)
    assert [entry.name for entry in house.deleted] == [CHAIN[3], CHAIN[1]]
    house.tenant("t", prefix_disk_bytes=FILE_BYTES - 1)
    kept(house, text(3, len(PROMPT)), first=30)
    assert house.published_nodes()[-1] == 21, "a cap below one file lets none be written"


def test_the_floor_of_the_disk_counts_what_is_written_and_what_is_promised() -> None:
    house = PrefixHouse(floor=1000)
    house.seen(free=1000 + 3 * FILE_BYTES)
    written(house)
    assert house.free_bytes == 1000 + FILE_BYTES + 2 * LESS
    kept(house, text(2, len(PROMPT)), first=10)
    assert house.published_nodes() == [1, 2, 10, 11]
    assert [entry.name for entry in house.deleted] == [CHAIN[3]]


def test_what_was_evicted_for_one_file_is_not_evicted_again_for_the_next() -> None:
    house = PrefixHouse(floor=1000)
    for number in range(4):
        written(house, text(number, 2 * B), first=10 * number + 1)
    house.seen(free=1000 + LESS)
    for number in range(5, 7):
        written(house, text(number, 2 * B), first=10 * number + 1)
    assert len(house.deleted) == 2


def test_a_file_that_was_there_already_takes_no_room_of_the_disk() -> None:
    house = PrefixHouse()
    kept(house)
    house.published(1, CHAIN[1], is_new=False)
    assert house.free_bytes == PLENTY


def test_what_a_file_on_its_way_continues_stays_until_it_is_there() -> None:
    house = PrefixHouse()
    house.seen(entry_of(scope_of("t"), PROMPT[: 2 * B]))
    kept(house, PROMPT)
    assert house.published_nodes() == [2]
    assert house.leases == {("promise", CHAIN[3])}
    house.rejected(2)
    assert house.leases == set()


def test_a_file_is_not_written_when_what_it_continues_is_not() -> None:
    """Nobody could restore it: a chain of files has no gaps."""
    house = PrefixHouse(disk=FILE_BYTES)
    sequence = computing(house)
    house.kept(sequence, len(PROMPT), (KeptNode(1, 0, 3 * B, 1), KeptNode(2, 3 * B, 4 * B, 1)))
    assert house.published_nodes() == []


# -- what the directory holds ---------------------------------------------------------------------------------------


def test_files_of_others_are_taken_in_and_those_that_went_are_not_named_again() -> None:
    house = PrefixHouse()
    first = entry_of(scope_of("t"), PROMPT[: 2 * B])
    house.seen(first, entry_of(scope_of("t"), PROMPT[: 4 * B], 2 * B))
    house.seen(gone=(CHAIN[3],))
    prefix = house.row(house.sequence(house.ask(PROMPT))).prefix
    assert [piece.name for piece in prefix.segments] == [first.name]  # type: ignore[union-attr]


def test_more_than_the_budget_found_in_the_directory_is_evicted_least_recently_used_first() -> None:
    house = PrefixHouse(disk=2000)
    old, middle, new = (entry_of(scope_of("t"), text(number, 2 * B)) for number in range(3))
    house.seen(old, middle)
    house.seen(new, used=(old.name,))
    assert house.deleted == [middle]


def test_a_file_seen_before_its_worker_says_so_is_counted_once() -> None:
    house = PrefixHouse()
    kept(house, PROMPT[: 2 * B])
    house.seen(entry_of(scope_of("t"), PROMPT[: 2 * B], num_bytes=700 + HITS_BYTES))
    house.published(1, CHAIN[1], 700)
    assert house.state.book.prefixes.index.num_bytes == 700 + HITS_BYTES
    assert house.state.book.prefixes.promised == set()


# -- erasing --------------------------------------------------------------------------------------------------------


def test_erasing_a_tenant_deletes_its_files_leased_or_not_and_has_its_workers_forget() -> None:
    house = PrefixHouse()
    written(house)
    written(house, tenant="other", first=10)
    house.ask(PROMPT)
    house.erase()
    assert {entry.name for entry in house.deleted} == {CHAIN[1], CHAIN[3]}
    assert house.forgotten() == [secret_of(scope_of("t"))]
    assert len(house.known) == 2
    assert house.counts().evictions == 0


def test_a_file_that_was_on_its_way_when_its_tenant_was_erased_is_deleted_as_it_comes() -> None:
    house = PrefixHouse()
    kept(house)
    house.erase()
    assert (house.state.book.prefixes.promised, house.state.book.prefixes.index.num_bytes) == (set(), 0)
    house.published(1, CHAIN[1])
    house.rejected(2)
    assert [entry.name for entry in house.deleted] == [CHAIN[1]]
    assert (house.known, house.counts().published, house.counts().rejected) == (set(), 0, {})


def test_running_requests_of_an_erased_tenant_go_on_and_keep_nothing() -> None:
    house = PrefixHouse()
    request = house.ask(PROMPT)
    sequence = house.sequence(request)
    house.erase()
    house.restored(sequence)
    house.kept(sequence, len(PROMPT), nodes_of(len(PROMPT)))
    house.prefilled(sequence)
    house.end(sequence)
    assert house.outcomes[request].state == "finished"
    assert (house.published_nodes(), len(house.model.hints), house.breaches) == ([], 0, [])


# -- what cannot be -------------------------------------------------------------------------------------------------

IMPOSSIBLE = [
    {"length": -1},
    {"length": 5, "pinned_length": 6},
    {"length": 5, "pinned_length": -1},
    {"length": 4 * B, "nodes": (KeptNode(1, 5, B, 1),)},
    {"length": 4 * B, "nodes": (KeptNode(1, 0, B + 1, 1),)},
    {"length": 4 * B, "nodes": (KeptNode(1, B, B, 1),)},
    {"length": 4 * B, "nodes": (KeptNode(1, -B, B, 1),)},
    {"length": 4 * B, "nodes": (KeptNode(1, 0, B, 1), KeptNode(1, B, 2 * B, 1))},
]


@pytest.mark.parametrize("said", IMPOSSIBLE)
def test_an_impossible_kept_is_a_breach(said: dict[str, Any]) -> None:
    house = PrefixHouse()
    house.say(Kept(computing(house), **said))
    assert len(house.breaches) == 1
    house.lose()
    assert (house.leases, house.state.book.prefixes.promised) == (set(), set())


def test_keeping_what_was_not_to_be_kept_is_a_breach() -> None:
    house = PrefixHouse()
    house.kept(computing(house, keeps_prefix=False), 5)
    assert len(house.breaches) == 1


@pytest.mark.parametrize(("name", "num_bytes"), [(CHAIN[3], 1000), (CHAIN[1], -1)])
def test_a_file_under_another_name_or_of_no_size_is_a_breach(name: bytes, num_bytes: int) -> None:
    house = PrefixHouse()
    kept(house)
    house.published(1, name, num_bytes)
    assert len(house.breaches) == 1
    house.lose()
    assert (house.leases, house.known, house.state.book.prefixes.index.tenant_num_bytes(TenantId("t"))) == (set(), set(), 0)
