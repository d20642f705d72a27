"""Which segments continue a prompt, which must go, and when a restore pays: pure bookkeeping, checked against brute force."""

from __future__ import annotations

import random
from collections.abc import Sequence

import hypothesis
import hypothesis.strategies as st
import pytest
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from runtime.prefix.benefit import Benefit
from runtime.prefix.hashing import BLOCK_TOKENS, BlockHash
from runtime.prefix.index import Index, Limits
from runtime.prefix.layout import Style
from runtime.prefix.plans import Entry, Plan
from runtime.protocol.ids import TenantId

B = BLOCK_TOKENS
A, Z = TenantId("a"), TenantId("z")
PLENTY = 1 << 60


def chain(path: str) -> list[BlockHash]:
    """One block a letter; a block's hash is everything up to it."""
    return [BlockHash(path[: number + 1].encode()) for number in range(len(path))]


def entry(
    path: str, start: int = 0, *, style: Style = "dense", num_bytes: int = 100, tenant: TenantId | None = A, checkpoint: int = 0
) -> Entry:
    """A segment of the blocks path[start:]."""
    blocks = chain(path)
    parent = blocks[start - 1] if start else None
    return Entry("f", tenant, parent, start * B, tuple(blocks[start:]), style, num_bytes, checkpoint)


def index_of(*entries: Entry, limits: Limits | None = None) -> Index:
    index = Index(limits or Limits(PLENTY))
    for each in entries:
        index.add(each)
    index.validate()
    return index


def pieces(plan: Plan) -> list[tuple[str, int, int]]:
    """(segment, first block, block behind the last)."""
    return [(piece.entry.name.decode(), piece.start // B, piece.end // B) for piece in plan.pieces]


def longest(index: Index, path: str, num_tokens: int | None = None) -> Plan | None:
    found = index.plans(chain(path), len(path) * B + 1 if num_tokens is None else num_tokens)
    return found[-1] if found else None


def names(entries: Sequence[Entry] | None) -> list[str] | None:
    return None if entries is None else [each.name.decode() for each in entries]


# -- what a prompt can use --------------------------------------------------------------------------------


def test_the_longest_chain_wins_over_a_shorter_segment() -> None:
    index = index_of(entry("abc"), entry("abcde", 3), entry("ab"))
    plan = longest(index, "abcdeX")
    assert plan is not None
    assert pieces(plan) == [("abc", 0, 3), ("abcde", 3, 5)]
    assert [found.end for found in index.plans(chain("abcdeX"), 6 * B + 1)] == [3 * B, 5 * B]


def test_a_dense_segment_serves_a_prompt_that_leaves_in_its_middle() -> None:
    plan = longest(index_of(entry("abcd")), "abXX")
    assert plan is not None
    assert pieces(plan) == [("abcd", 0, 2)]


def test_a_segment_can_hang_on_the_middle_of_another() -> None:
    plan = longest(index_of(entry("abcd"), entry("abXY", 2)), "abXY")
    assert plan is not None
    assert pieces(plan) == [("abcd", 0, 2), ("abXY", 2, 4)]


def test_a_gap_ends_the_chain_and_nothing_at_all_is_no_plan() -> None:
    index = index_of(entry("ab"), entry("abcde", 3))
    plan = longest(index, "abcde")
    assert plan is not None
    assert plan.end == 2 * B
    assert longest(index, "bb") is None
    assert index.plans([], 5) == []


@pytest.mark.parametrize(("num_tokens", "end"), [(B, B - 1), (B + 1, B), (2 * B - 1, B), (2 * B, 2 * B - 1), (2 * B + 1, 2 * B)])
def test_one_token_is_always_left_to_compute(num_tokens: int, end: int) -> None:
    plan = longest(index_of(entry("ab")), "ab"[: num_tokens // B], num_tokens)
    assert plan is not None
    assert plan.end == end


def test_a_checkpoint_that_leaves_no_token_to_compute_is_not_used() -> None:
    for style in ("mixed", "checkpoint"):
        index = index_of(entry("a", style=style), entry("ab", 1, style=style))
        shorter, longer = longest(index, "ab", 2 * B), longest(index, "ab", 2 * B + 1)
        assert shorter is not None
        assert longer is not None
        assert (shorter.end, longer.end) == (B, 2 * B)


def test_with_sliding_layers_a_plan_ends_at_a_checkpoint_and_reads_only_that_one() -> None:
    index = index_of(
        entry("abcd", style="mixed", checkpoint=60),
        entry("abXY", 2, style="mixed", checkpoint=60),
        entry("abXYZ", 4, style="mixed"),
    )
    assert longest(index, "abcQ") is None  # inside a segment there is no checkpoint
    plan = longest(index, "abXYQ")
    assert plan is not None
    assert pieces(plan) == [("abcd", 0, 2), ("abXY", 2, 4)]
    assert [piece.with_checkpoint for piece in plan.pieces] == [False, True]
    assert plan.num_bytes == 40 + 100


def test_without_dense_layers_one_segment_is_enough() -> None:
    index = index_of(entry("abcd", 2, style="checkpoint"))
    plan = longest(index, "abcdQ")
    assert plan is not None
    assert pieces(plan) == [("abcd", 2, 4)]
    assert index.plans(chain("abQ"), 4 * B) == []


_FOREST = st.lists(st.tuples(st.text("ab", min_size=1, max_size=5), st.integers(0, 4)), max_size=8)


@hypothesis.given(forest=_FOREST, prompt=st.text("ab", min_size=1, max_size=6), style=st.sampled_from(["dense", "mixed"]))
def test_plans_reach_as_far_as_any_choice_of_segments_could(forest: list[tuple[str, int]], prompt: str, style: Style) -> None:
    entries = [entry(path, start, style=style) for path, start in forest if start < len(path)]
    index = index_of(*entries)
    unique = index.entries()
    hashes = chain(prompt)
    held = [any(block in each.blocks for each in unique) for block in hashes]
    reach = held.index(False) if False in held else len(hashes)
    found = index.plans(hashes, len(hashes) * B + 1)
    if style == "dense":
        assert (found[-1].end if found else 0) == reach * B
    else:
        assert [plan.end for plan in found] == [n * B for n in range(1, reach + 1) if hashes[n - 1] in index]
    for plan in found:
        place = 0
        for piece in plan.pieces:
            assert piece.start == place
            assert piece.entry.start <= piece.start < piece.end <= piece.entry.end
            blocks = slice((piece.start - piece.entry.start) // B, (piece.end - piece.entry.start) // B)
            assert list(piece.entry.blocks[blocks]) == hashes[piece.start // B : piece.end // B]
            place = piece.end


# -- what must go -----------------------------------------------------------------------------------------


def test_the_least_recently_used_leaf_goes_first() -> None:
    index = index_of(entry("a"), entry("b"), entry("c"), limits=Limits(300))
    index.use([entry("a").name])
    assert names(index.make_room(entry("d").name, 100, A, None, PLENTY)) == ["b"]
    assert names(index.make_room(entry("e").name, 200, A, None, PLENTY)) == ["c", "a"]
    index.validate()


def test_a_parent_outlives_its_children_however_long_ago_it_was_made() -> None:
    index = index_of(entry("a"), entry("ab", 1), entry("abc", 2), entry("z"), limits=Limits(400))
    assert names(index.make_room(entry("n").name, 250, A, None, PLENTY)) == ["abc", "ab", "a"]


def test_a_lease_keeps_a_segment_and_what_it_hangs_on_until_every_holder_gave_it_back() -> None:
    index = index_of(entry("a"), entry("ab", 1), limits=Limits(200))
    plan = longest(index, "ab")
    assert plan is not None
    index.lease(1, plan)
    index.lease(2, plan)
    index.release(1)
    index.release(1)
    assert index.make_room(entry("n").name, 1, A, None, PLENTY) is None
    index.release(2)
    assert names(index.make_room(entry("n").name, 1, A, None, PLENTY)) == ["ab"]
    index.validate()


def test_whatever_a_leased_segment_hangs_on_stays_also_where_two_segments_hold_the_same_blocks() -> None:
    index = index_of(entry("abc", num_bytes=90), entry("abcd"), entry("abcX", 3))
    plan = longest(index, "abcX")
    assert plan is not None
    assert pieces(plan) == [("abc", 0, 3), ("abcX", 3, 4)]
    index.lease(1, plan)
    index.limits = Limits(0)
    assert index.excess(PLENTY) == []
    index.release(1)
    assert names(index.excess(PLENTY)) == ["abcX", "abcd", "abc"]


def test_a_lease_survives_that_its_segment_is_found_again() -> None:
    index = index_of(entry("a"), limits=Limits(100))
    plan = longest(index, "a")
    assert plan is not None
    index.lease(1, plan)
    index.add(entry("a"))
    assert index.make_room(entry("n").name, 1, A, None, PLENTY) is None


def test_no_room_changes_nothing() -> None:
    index = index_of(entry("a"), entry("b"), limits=Limits(200))
    assert index.make_room(entry("n").name, 201, A, None, PLENTY) is None
    assert len(index) == 2
    assert index.num_bytes == 200


def test_promised_room_counts_until_it_is_taken_or_given_back() -> None:
    index = index_of(limits=Limits(200))
    assert index.make_room(entry("a").name, 150, A, None, PLENTY) == []
    assert index.make_room(entry("b").name, 100, A, None, PLENTY) is None
    index.cancel(entry("a").name)
    assert index.make_room(entry("b").name, 100, A, None, PLENTY) == []
    assert index.make_room(entry("b").name, 100, A, None, PLENTY) == []  # asked again: promised once
    index.add(entry("b"))
    assert index.num_bytes == 100
    index.validate()


def test_the_parent_of_what_is_to_come_stays() -> None:
    index = index_of(entry("a"), entry("ab", 1), entry("z"), limits=Limits(300))
    victims = index.make_room(entry("abc").name, 100, A, entry("ab").name, PLENTY)
    assert names(victims) == ["z"]
    assert index.make_room(entry("abQ").name, 150, A, entry("ab").name, PLENTY) is None


def test_a_tenant_at_its_cap_evicts_its_own() -> None:
    index = index_of(entry("a"), entry("z", tenant=Z), entry("s", tenant=None), limits=Limits(1000, 0, 100))
    assert names(index.make_room(entry("b").name, 100, A, None, PLENTY)) == ["a"]
    assert index.make_room(entry("c").name, 101, A, None, PLENTY) is None
    assert index.make_room(entry("t").name, 700, None, None, PLENTY) == []
    assert Limits(1, 0, 5, {A: 7}).cap(A) == 7


def test_the_disks_floor_is_kept_also_for_what_is_not_yet_written() -> None:
    index = index_of(entry("a"), limits=Limits(1000, free_floor_bytes=500))
    assert index.make_room(entry("b").name, 100, A, None, 600) == []
    assert names(index.make_room(entry("c").name, 100, A, None, 600)) == ["a"]
    assert index.make_room(entry("d").name, 100, A, None, 600) is None


def test_what_others_published_beyond_the_limits_goes() -> None:
    index = index_of(entry("a"), entry("b"), entry("z", tenant=Z), entry("y", tenant=Z), limits=Limits(300, 0, None, {Z: 100}))
    assert names(index.excess(PLENTY)) == ["z"]
    assert names(index.excess(PLENTY)) == []
    index.limits = Limits(100)
    assert names(index.excess(PLENTY)) == ["a", "b"]
    index.limits = Limits(100, free_floor_bytes=50)
    assert names(index.excess(0)) == ["y"]


def test_erasing_a_tenant_takes_all_of_its_own_and_nothing_else() -> None:
    index = index_of(entry("a"), entry("ab", 1), entry("z", tenant=Z))
    plan = longest(index, "ab")
    assert plan is not None
    index.lease(1, plan)
    assert sorted(names(index.erase(A)) or []) == ["a", "ab"]
    index.release(1)
    index.validate()
    assert names(index.entries()) == ["z"]


class Bookkeeping(RuleBasedStateMachine):
    """Whatever happens in whatever order, the counts are right, children go first and the budget holds."""

    def __init__(self) -> None:
        super().__init__()
        self.index = Index(Limits(600, 0, 450))

    @rule(path=st.text("ab", min_size=1, max_size=4), start=st.integers(0, 3), tenant=st.sampled_from([A, Z, None]))
    def publish(self, path: str, start: int, tenant: TenantId | None) -> None:
        new = entry(f"{tenant}"[0] + path, min(start, len(path) - 1), tenant=tenant, num_bytes=50 + 10 * len(path))
        if new.name in self.index:
            return
        leased = set(self.index._leases)
        before = self.index.entries()
        victims = self.index.make_room(new.name, new.num_bytes, tenant, new.parent, PLENTY)
        if victims is None:
            assert self.index.entries() == before
            return
        assert not leased & {victim.name for victim in victims}
        assert all(new.parent not in victim.blocks for victim in victims)
        gone = {victim.name for victim in victims}
        for victim in victims:
            hanging = [each for each in before if each.parent in victim.blocks and each is not victim]
            assert gone.issuperset(each.name for each in hanging)
        self.index.add(new)

    @rule(path=st.text("ab", min_size=1, max_size=5), tenant=st.sampled_from("aZN"), holder=st.integers(0, 3))
    def lease(self, path: str, tenant: str, holder: int) -> None:
        plan = longest(self.index, tenant + path)
        if plan is not None:
            self.index.lease(holder, plan)

    @rule(holder=st.integers(0, 3))
    def release(self, holder: int) -> None:
        self.index.release(holder)

    @rule(number=st.integers(0, 20))
    def vanish(self, number: int) -> None:
        present = self.index.entries()
        if present:
            self.index.drop(present[number % len(present)].name)

    @invariant()
    def is_sound(self) -> None:
        self.index.validate()
        assert self.index.num_bytes <= 600
        assert self.index.tenant_num_bytes(A) <= 450
        assert self.index.tenant_num_bytes(Z) <= 450


TestBookkeeping = Bookkeeping.TestCase
TestBookkeeping.settings = hypothesis.settings(max_examples=40, stateful_step_count=30, deadline=None, database=None)


# -- when a restore pays ----------------------------------------------------------------------------------


def _plans(path: str = "abcdef", num_bytes: int = 100) -> list[Plan]:
    index = index_of(*(entry(path[: n + 1], n, num_bytes=num_bytes) for n in range(len(path))))
    return index.plans(chain(path), len(path) * B + 1)


def test_what_is_not_measured_is_tried() -> None:
    benefit = Benefit()
    assert benefit.choose([]) is None
    assert benefit.choose(_plans()) == _plans()[-1]
    benefit.prefilled(100, 1.0)
    assert benefit.choose(_plans()) == _plans()[-1]


def test_a_cheap_restore_is_taken_whole_and_a_dear_one_not_at_all() -> None:
    benefit = Benefit()
    benefit.prefilled(1000, 1.0)
    benefit.restored(1, 1000, 0.001)
    assert benefit.choose(_plans()) == _plans()[-1]
    benefit = Benefit()
    benefit.prefilled(1000, 0.001)
    benefit.restored(1, 100, 1.0)
    assert benefit.choose(_plans()) is None


def test_a_restore_stops_where_the_next_segment_costs_more_than_it_saves() -> None:
    benefit = Benefit()
    benefit.prefilled(B, 0.1)
    benefit.restored(1, 1000, 0.0005 + 0.1)
    index = index_of(entry("a", num_bytes=500), entry("ab", 1, num_bytes=500), entry("abc", 2, num_bytes=2000))
    plan = benefit.choose(index.plans(chain("abc"), 3 * B + 1))
    assert plan is not None
    assert plan.end == 2 * B


def test_after_many_refusals_one_is_tried_again_and_can_change_its_mind() -> None:
    benefit = Benefit()
    benefit.prefilled(1000, 0.01)
    benefit.restored(1, 100, 1.0)
    chosen = [benefit.choose(_plans()) for _ in range(40)]
    assert 1 <= sum(plan is not None for plan in chosen) <= 3
    for _ in range(60):
        benefit.restored(1, 1000, 0.0)
    assert benefit.choose(_plans()) is not None


@hypothesis.given(seed=st.integers(0, 1 << 20))
@hypothesis.settings(max_examples=50)
def test_the_choice_is_the_best_of_all_plans(seed: int) -> None:
    generator = random.Random(seed)
    benefit = Benefit()
    benefit.prefilled(1000, generator.uniform(0.001, 1))
    benefit.restored(1, 1000, generator.uniform(0.001, 1))
    found = _plans(num_bytes=generator.randrange(1, 1000))
    chosen = benefit.choose(found)
    savings = [saved for plan in found if (saved := benefit.saved_seconds(plan)) is not None]
    assert (chosen is None) == (max(savings) <= 0)
    assert chosen is None or benefit.saved_seconds(chosen) == max(savings)
