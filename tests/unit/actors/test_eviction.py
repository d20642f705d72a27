"""Whom memory shortage and idleness may end, and in which order."""

from __future__ import annotations

from math import inf

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.actors.eviction import Resident, idle_until, victims
from runtime.config import ModelSpec
from runtime.errors import InvalidRequest
from runtime.protocol.commands import FakeScript
from runtime.protocol.ids import ModelName, public_name, worker_name


def resident(name: str, num_bytes: int = 10, rested_at: float = 0.0, **more: object) -> Resident:
    return Resident(ModelName(name), num_bytes, rested_at, **more)  # type: ignore[arg-type]


def test_those_longest_at_rest_go_first_and_no_more_than_needed() -> None:
    residents = [resident("a", rested_at=3.0), resident("b", rested_at=1.0), resident("c", rested_at=2.0)]
    assert victims(residents, 0) == []
    assert victims(residents, 10) == ["b"]
    assert victims(residents, 11) == ["b", "c"]
    assert victims(residents, 30) == ["b", "c", "a"]


def test_nobody_ends_in_vain() -> None:
    assert victims([resident("a"), resident("b")], 21) is None


def test_busy_and_pinned_models_stay() -> None:
    residents = [resident("busy", is_busy=True), resident("pinned", is_pinned=True), resident("idle", rested_at=9.0)]
    assert victims(residents, 10) == ["idle"]
    assert victims(residents, 11) is None


def test_a_drafter_goes_after_all_others_however_long_it_rests() -> None:
    residents = [resident("drafter", rested_at=0.0, is_drafter=True), resident("late", rested_at=9.0)]
    assert victims(residents, 10) == ["late"]
    assert victims(residents, 20) == ["late", "drafter"]


models = st.builds(
    Resident,
    st.text("abcdef", min_size=1, max_size=3).map(ModelName),
    st.integers(0, 100),
    st.floats(0, 100),
    is_busy=st.booleans(),
    is_pinned=st.booleans(),
    is_drafter=st.booleans(),
)


@given(st.lists(models, unique_by=lambda one: one.name), st.integers(0, 400))
def test_victims_are_enough_none_too_many_and_never_busy_or_pinned(residents: list[Resident], needed: int) -> None:
    by_name = {one.name: one for one in residents}
    free = {name: one for name, one in by_name.items() if not one.is_busy and not one.is_pinned}
    chosen = victims(residents, needed)
    if chosen is None:
        assert sum(one.num_bytes for one in free.values()) < needed
        return
    assert set(chosen) <= free.keys()
    sizes = [by_name[name].num_bytes for name in chosen]
    assert sum(sizes) >= needed
    assert not sizes or sum(sizes[:-1]) < needed


def test_idle_time_counts_from_the_last_need_and_only_for_those_that_may_end() -> None:
    assert idle_until(resident("a", rested_at=5.0)) == inf
    assert idle_until(resident("a", rested_at=5.0, idle_unload_seconds=2.0)) == 7.0
    for reason in ("is_busy", "is_pinned", "is_drafter"):
        assert idle_until(resident("a", idle_unload_seconds=2.0, **{reason: True})) == inf


@pytest.mark.parametrize(("field", "value"), [("pin", 1), ("idle_unload_seconds", 0), ("idle_unload_seconds", float("nan"))])
def test_a_wrong_setting_is_named(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match=field):
        msgspec.structs.replace(ModelSpec("chat", kind="fake", fake=FakeScript()), **{field: value})


@pytest.mark.parametrize("name", ["chat#2", "chat#1.2"])
def test_names_of_workers_are_not_for_models(name: str) -> None:
    with pytest.raises(InvalidRequest, match="name"):
        ModelSpec(name, kind="fake", fake=FakeScript())


def test_a_generation_is_no_part_of_the_public_name() -> None:
    assert [worker_name("chat", replica, 1) for replica in (1, 2)] == ["chat", "chat#2"]
    for replica in (1, 2, 12):
        for generation in (2, 30):
            name = worker_name("chat", replica, generation)
            assert name not in (worker_name("chat", replica, 1), worker_name("chat", replica, generation + 1))
            assert public_name(name) == worker_name("chat", replica, 1)
    assert public_name("chat#2") == "chat#2"
