"""Limits are set where the device has them, within what it allows, and nowhere else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from runtime.engine.limits import CACHE_PART, set_device_limits


def a_device(*, is_metal: bool = True, most: int = 1 << 40, refuses: str = "") -> tuple[Any, dict[str, int]]:
    said: dict[str, int] = {}

    def setter(name: str) -> Any:
        def set_limit(num_bytes: int) -> None:
            if name == refuses:
                raise ValueError("not on this system")
            said[name] = num_bytes

        return set_limit

    device = SimpleNamespace(
        metal=SimpleNamespace(is_available=lambda: is_metal),
        device_info=lambda: {"max_recommended_working_set_size": most},
        set_wired_limit=setter("wired"),
        set_cache_limit=setter("cache"),
    )
    return device, said


def test_on_metal_a_worker_wires_what_is_reserved_for_it_and_caches_a_part_of_that() -> None:
    device, said = a_device()
    assert set_device_limits(device, 800) == said == {"wired": 800, "cache": 800 // CACHE_PART}


def test_no_more_is_wired_than_the_device_recommends() -> None:
    device, said = a_device(most=500)
    set_device_limits(device, 800)
    assert said["wired"] == 500


def test_elsewhere_or_without_a_reservation_nothing_is_set() -> None:
    for device, reserved in ((a_device(is_metal=False)[0], 800), (a_device()[0], 0), (SimpleNamespace(), 800)):
        assert set_device_limits(device, reserved) == {}


def test_a_refused_limit_is_left_and_the_other_set() -> None:
    device, said = a_device(refuses="wired")
    assert set_device_limits(device, 800) == said == {"cache": 100}
