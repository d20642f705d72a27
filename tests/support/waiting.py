"""Waiting for what lies in other processes; the test's own limit bounds it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio


async def until(condition: Callable[[], object]) -> None:
    """Look again and again."""
    while not condition():  # noqa: ASYNC110 (nothing here can signal what is waited for)
        await anyio.sleep(0.001)


async def until_async(condition: Callable[[], Awaitable[object]]) -> None:
    while not await condition():  # noqa: ASYNC110
        await anyio.sleep(0.005)
