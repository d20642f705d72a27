"""How much may this process wire and keep of the device's memory? By default the library lets each wire the whole machine."""

from __future__ import annotations

from typing import Any, Final

CACHE_PART: Final = 8
"""Of what is reserved for this worker, freed buffers kept for use again take at most one part in so many."""


def set_device_limits(mx: Any, reserved_bytes: int) -> dict[str, int]:
    """On a device with memory limits of its own (Metal), bound what this process wires and caches. What was set, by name; nothing
    elsewhere, or when nothing is reserved (0).

    A limit that this system refuses is left as it is: it only makes things slower.
    """
    metal = getattr(mx, "metal", None)
    if reserved_bytes <= 0 or metal is None or not metal.is_available():
        return {}
    wanted = {"wired": reserved_bytes, "cache": reserved_bytes // CACHE_PART}
    most = mx.device_info().get("max_recommended_working_set_size", reserved_bytes)
    wanted["wired"] = min(wanted["wired"], int(most))
    done = {}
    for name, num_bytes in wanted.items():
        try:
            getattr(mx, f"set_{name}_limit")(num_bytes)
        except (AttributeError, ValueError, RuntimeError):
            continue
        done[name] = num_bytes
    return done
