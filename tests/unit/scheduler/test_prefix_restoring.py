"""What a row is told to restore, how long its files are kept for it, and what its worker's answer corrects."""

from __future__ import annotations

from typing import Any

import pytest

from runtime.prefix.hashing import shared_scope
from runtime.protocol.commands import SegmentRange
from runtime.protocol.events import Prepared, Restored, SegmentMiss
from runtime.protocol.tokens import TokenIds
from tests.unit.scheduler.prefix_house import B, PrefixHouse, entry_of, scope_of, secret_of, text

PROMPT = text(1, 4 * B + 10)


def a_house_with_files(**options: Any) -> PrefixHouse:
    """Two files of PROMPT, one behind the other: two blocks each."""
    house = PrefixHouse(**options)
    house.seen(*files(options.get("style", "dense")))
    return house


def files(style: Any = "dense") -> tuple[Any, Any]:
    scope = scope_of("t")
    return entry_of(scope, PROMPT[: 2 * B], style=style), entry_of(scope, PROMPT[: 4 * B], 2 * B, style=style)


def started(house: PrefixHouse, tokens: list[int] = PROMPT, tenant: str = "t", **changes: Any) -> Any:
    """The sequence of a request that was sent to be computed."""
    return house.sequence(house.ask(tokens, tenant, **changes))


def missed(entry: Any, reason: str, *, is_removed: bool) -> SegmentMiss:
    return SegmentMiss(entry.name, reason, "", is_removed)


# -- what it is told ------------------------------------------------------------------------------------------------


def test_a_row_is_told_its_scope_and_the_chain_of_files_that_its_prompt_begins_with() -> None:
    house = a_house_with_files()
    first, second = files()
    prefix = house.row(started(house)).prefix
    assert prefix is not None
    assert prefix.scope == secret_of(scope_of("t"))
    assert prefix.segments == (SegmentRange(first.name, 0, 2 * B, False), SegmentRange(second.name, 2 * B, 4 * B, False))
    assert (prefix.keep, prefix.pin, prefix.boundaries) == (True, False, ())


def test_one_token_is_always_left_to_compute() -> None:
    house = a_house_with_files()
    prefix = house.row(started(house, PROMPT[: 4 * B])).prefix
    assert prefix is not None
    assert prefix.segments[-1].end == 4 * B - 1


@pytest.mark.parametrize("length", [4 * B, 4 * B + 1])
def test_where_checkpoints_are_needed_a_plan_ends_with_a_whole_file(length: int) -> None:
    house = a_house_with_files(style="mixed")
    prefix = house.row(started(house, PROMPT[:length])).prefix
    assert prefix is not None
    assert [(piece.end, piece.with_checkpoint) for piece in prefix.segments][-1] == (2 * B if length == 4 * B else 4 * B, True)


def test_a_prompt_that_differs_in_its_first_block_gets_no_files() -> None:
    house = a_house_with_files()
    sequence = started(house, [9, *PROMPT[1:]])
    prefix = house.row(sequence).prefix
    assert prefix is not None
    assert prefix.segments == ()
    assert sequence not in house.leases


@pytest.mark.parametrize("scope", [scope_of("other"), scope_of("t", life=1), shared_scope()])
def test_files_of_another_scope_are_never_named(scope: Any) -> None:
    house = a_house_with_files()
    prefix = house.row(started(house, scope=scope)).prefix
    assert prefix is not None
    assert (prefix.scope, prefix.segments) == (secret_of(scope), ())


def test_without_a_scope_or_without_room_for_prefixes_a_row_finds_and_keeps_nothing() -> None:
    house = a_house_with_files()
    assert house.row(started(house, scope=None)).prefix is None
    assert house.leases == set()
    assert (nothing := PrefixHouse(memory=0, disk=0)).row(started(nothing)).prefix is None


def test_a_read_only_request_restores_but_is_not_kept() -> None:
    house = a_house_with_files()
    prefix = house.row(started(house, keeps_prefix=False)).prefix
    assert prefix is not None
    assert len(prefix.segments) == 2
    assert not prefix.keep


def test_boundaries_are_passed_on_as_far_as_they_lie_in_the_prompt() -> None:
    house = PrefixHouse()
    length = len(PROMPT)
    prefix = house.row(started(house, prefill_only=True, max_tokens=0, boundaries=(0, 5, length, length + 1))).prefix
    assert prefix is not None
    assert (prefix.boundaries, prefix.pin) == ((5, length), True)


# -- how long its files stay ----------------------------------------------------------------------------------------


def end_by_restored(house: PrefixHouse, sequence: Any) -> None:
    house.restored(sequence, 4 * B, "file", num_files=2, num_bytes=2000, seconds=0.01)


def end_by_cancel(house: PrefixHouse, sequence: Any) -> None:
    house.cancel(next(iter(house.state.book.requests)))


def end_by_loss(house: PrefixHouse, sequence: Any) -> None:
    house.lose()


@pytest.mark.parametrize("end", [end_by_restored, end_by_cancel, end_by_loss])
def test_files_named_to_a_row_are_not_evicted_until_it_has_read_them_or_is_over(end: Any) -> None:
    house = a_house_with_files(disk=10_000, floor=1000)
    sequence = started(house)
    assert house.leases == {sequence}
    house.seen(free=0)
    assert house.deleted == []
    end(house, sequence)
    assert house.leases == set()
    house.seen(free=0)
    assert house.deleted == [files()[1]], "the last of the chain goes first"


def test_two_rows_of_the_same_files_hold_them_one_by_one() -> None:
    house = a_house_with_files(memory=0)
    first, second = (house.sequence(request) for request in house.ask_all([PROMPT, PROMPT]))
    house.restored(first, 4 * B, "file")
    assert house.leases == {second}
    house.restored(second, 4 * B, "file")
    assert house.leases == set()


def test_what_is_said_of_a_row_that_was_let_go_changes_nothing() -> None:
    house = a_house_with_files()
    sequence = started(house)
    end_by_cancel(house, sequence)
    tag, counts = house.tag(), (house.counts().hits_file, house.counts().cached_tokens)
    house.restored(sequence, 4 * B, "file", misses=(missed(files()[0], "digest", is_removed=True),))
    assert (house.tag(), (house.counts().hits_file, house.counts().cached_tokens)) == (tag, counts)
    assert house.breaches == []
    house.released(sequence)
    house.restored(sequence, 4 * B, "file")
    assert house.breaches == []


# -- the truth ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("found", "source"), [(0, "none"), (2 * B, "file"), (4 * B, "file"), (4 * B + 9, "memory")])
def test_a_tenant_pays_for_what_is_computed_whatever_was_expected(found: int, source: str) -> None:
    house = a_house_with_files()
    request = house.ask(PROMPT, max_tokens=8)
    sequence = house.sequence(request)
    assert house.tag() == len(PROMPT) - 4 * B + 8, "at first as if all of the files were good"
    house.restored(sequence, found, source)
    house.kept(sequence, len(PROMPT))
    house.prefilled(sequence)
    house.step(sequence)
    house.end(sequence)
    assert house.tag() == len(PROMPT) - found + 1
    assert house.outcomes[request].cached_tokens == (found,)
    assert (house.counts().cached_tokens, house.counts().computed_tokens) == (found, len(PROMPT) - found)


def test_a_second_restored_of_a_row_is_ignored() -> None:
    house = a_house_with_files()
    sequence = started(house)
    house.restored(sequence, 2 * B, "file")
    tag = house.tag()
    house.restored(sequence, 4 * B, "file")
    assert (house.tag(), house.counts().hits_file, house.breaches) == (tag, 1, [])


def test_hits_and_misses_are_counted_by_where_they_came_from() -> None:
    house = a_house_with_files()
    for found, source in ((0, "none"), (4 * B, "file"), (4 * B, "memory"), (4 * B, "memory")):
        sequence = started(house)
        house.restored(sequence, found, source)
        house.kept(sequence, len(PROMPT))
        house.prefilled(sequence)
        house.end(sequence)
    counts = house.counts()
    assert (counts.hits_file, counts.hits_memory, dict(counts.misses)) == (1, 2, {"none": 1})


def test_the_files_that_were_used_are_marked_and_no_others() -> None:
    house = a_house_with_files()
    first, second = files()
    sequence = started(house)
    house.restored(sequence, 2 * B, "file", misses=(missed(second, "io", is_removed=False),))
    assert house.used == [first]
    sequence = started(house)
    house.restored(sequence, 4 * B, "memory")
    assert house.used == [first]


def test_a_restored_longer_than_expected_does_not_shrink_its_batch_below_what_is_under_way() -> None:
    house = a_house_with_files()
    sequence = started(house)
    (batch,) = house.model.batches
    assert batch.padded_tokens == 10
    house.restored(sequence)
    assert batch.padded_tokens == len(PROMPT)


@pytest.mark.parametrize(
    ("reason", "is_removed", "is_known"), [("absent", False, False), ("digest", True, False), ("io", False, True)]
)
def test_a_file_that_is_gone_is_not_named_again(reason: str, is_removed: bool, is_known: bool) -> None:
    house = a_house_with_files(memory=0)
    first, _ = files()
    sequence = started(house)
    house.restored(sequence, misses=(missed(first, reason, is_removed=is_removed),))
    assert (first.name in house.known) == is_known
    assert house.counts().misses == {reason: 1}
    prefix = house.row(started(house)).prefix
    assert prefix is not None
    assert len(prefix.segments) == (2 if is_known else 0)


def test_a_miss_of_a_file_that_was_not_named_to_the_row_drops_nothing() -> None:
    house = a_house_with_files()
    sequence = started(house, text(2, 300))
    house.restored(sequence, misses=(missed(files()[0], "absent", is_removed=True),))
    assert files()[0].name in house.known


def test_memory_that_turns_out_to_have_forgotten_is_not_expected_to_know_again() -> None:
    house = PrefixHouse(disk=0)
    expected = []
    for _ in range(3):
        sequence = started(house)
        expected.append(house.model.sequences[sequence].expected_length)
        house.restored(sequence)
        house.kept(sequence, len(PROMPT) if len(expected) == 1 else 0)
        house.prefilled(sequence)
        house.end(sequence)
    assert expected == [0, len(PROMPT) - 1, 0]


def test_a_little_less_than_expected_says_nothing_of_memory() -> None:
    house = PrefixHouse(disk=0)
    house.compute(started(house))
    sequence = started(house)
    house.restored(sequence, len(PROMPT) - 100)
    house.prefilled(sequence)
    assert house.model.sequences[started(house)].expected_length == len(PROMPT) - 1


def test_what_a_lost_worker_held_is_not_expected_of_the_next() -> None:
    house = PrefixHouse(disk=0)
    house.compute(started(house))
    house.lose(restarting=False)
    house.add()
    house.up(incarnation=2)
    request = house.submit(prompt_length=len(PROMPT), scope=scope_of("t"))
    house.say(Prepared(request, TokenIds(PROMPT)), incarnation=2)
    assert house.model.sequences[house.sequence(request)].expected_length == 0


IMPOSSIBLE = [
    {"length": -1, "source": "memory"},
    {"length": len(PROMPT), "source": "memory"},
    {"length": 5, "source": "none"},
    {"length": 0, "source": "file"},
    {"length": 5, "source": "file", "num_files": -1},
    {"length": 5, "source": "file", "num_bytes": -1},
    {"length": 5, "source": "file", "seconds": -0.1},
    {"length": 5, "source": "file", "seconds": float("nan")},
    {"length": 5, "source": "file", "seconds": float("inf")},
]


@pytest.mark.parametrize("said", IMPOSSIBLE)
def test_an_impossible_restored_is_a_breach_and_the_loss_gives_all_leases_back(said: dict[str, Any]) -> None:
    house = a_house_with_files()
    sequence = started(house)
    house.say(Restored(sequence, **said))
    assert len(house.breaches) == 1
    assert (house.counts().cached_tokens, house.used) == (0, [])
    house.lose()
    assert house.leases == set()


def test_a_restored_of_a_row_without_a_prefix_is_a_breach() -> None:
    house = PrefixHouse()
    house.restored(started(house, scope=None))
    assert len(house.breaches) == 1
