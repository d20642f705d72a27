"""Watching: every watcher sees events in order, a slow one loses its oldest and knows how many, and nobody is held up."""

from __future__ import annotations

import anyio
import pytest

from runtime.watch import WATCH_QUEUE_EVENTS, LoadProgress, Watch, WatchHub

pytestmark = pytest.mark.anyio


def progress(number: int) -> LoadProgress:
    return LoadProgress("chat", "weights", number, 0)


async def test_each_watcher_sees_all_events_in_order_from_its_start() -> None:
    hub = WatchHub()
    hub.publish(progress(0))
    async with Watch(hub) as one, Watch(hub) as other:
        for number in (1, 2, 3):
            hub.publish(progress(number))
        hub.close()
        assert [event async for event in one] == [progress(1), progress(2), progress(3)]
        assert [event async for event in other] == [progress(1), progress(2), progress(3)]


async def test_a_waiting_watcher_is_woken() -> None:
    hub = WatchHub()
    seen = []

    async def read() -> None:
        async with Watch(hub) as events:
            ready.set()
            async for event in events:
                seen.append(event)

    ready = anyio.Event()
    async with anyio.create_task_group() as group:
        group.start_soon(read)
        await ready.wait()
        await anyio.wait_all_tasks_blocked()
        hub.publish(progress(1))
        await anyio.wait_all_tasks_blocked()
        assert seen == [progress(1)]
        hub.close()


async def test_a_slow_watcher_loses_its_oldest_events_and_is_told_how_many() -> None:
    hub = WatchHub()
    async with Watch(hub) as events:
        for number in range(WATCH_QUEUE_EVENTS + 5):
            hub.publish(progress(number))
        assert events.dropped == 5
        assert await anext(events) == progress(5)


async def test_one_that_left_gets_nothing_and_one_that_comes_after_the_end_ends_at_once() -> None:
    hub = WatchHub()
    async with Watch(hub) as events:
        pass
    hub.publish(progress(1))
    assert [event async for event in events] == []
    hub.close()
    async with Watch(hub) as late:
        assert [event async for event in late] == []
