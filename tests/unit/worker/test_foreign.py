"""A checkpoint's own code gets its time, and no more."""

from __future__ import annotations

import threading
import time

import pytest

from runtime.worker.foreign import bounded


def test_what_ends_in_time_gives_its_result_or_its_error() -> None:
    assert bounded(lambda: 6 * 7, 10) == 42
    with pytest.raises(ZeroDivisionError):
        bounded(lambda: 1 // 0, 10)


def test_what_never_ends_is_given_up_and_its_thread_ends() -> None:
    threads: list[threading.Thread] = []

    def hang() -> None:
        threads.append(threading.current_thread())
        while True:
            try:
                time.sleep(0.001)
            except Exception:
                continue

    with pytest.raises(TimeoutError):
        bounded(hang, 0.1)
    threads[0].join(10)
    assert not threads[0].is_alive()
