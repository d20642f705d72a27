"""Which models end because nobody needs them now? Pure choices over facts: when one has been idle long enough, and who makes room.

A model is busy from the admission of a request to its last message, and while somebody waits for its load; so is the drafter of a
busy one. Nobody ends a busy or pinned model here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from runtime.protocol.ids import ModelName


@dataclass(frozen=True, slots=True)
class Resident:
    """A model all workers of which are ready. num_bytes: that its end gives back. rested_at: since when nobody has needed it.

    is_drafter: another resident model drafts with it. idle_unload_seconds: as in its spec.
    """

    name: ModelName
    num_bytes: int
    rested_at: float
    is_busy: bool = False
    is_pinned: bool = False
    is_drafter: bool = False
    idle_unload_seconds: float | None = None


def victims(residents: Sequence[Resident], needed_bytes: int) -> list[ModelName] | None:
    """Whose ends give back that many bytes: those longest at rest first, drafters of resident models last.

    None when all that may end would not do: then none should end in vain. Nobody is named without need.
    """
    idle = [one for one in residents if not one.is_busy and not one.is_pinned and one.num_bytes > 0]
    chosen, num_bytes = [], 0
    for one in sorted(idle, key=lambda one: (one.is_drafter, one.rested_at, one.name)):
        if num_bytes >= needed_bytes:
            break
        chosen.append(one.name)
        num_bytes += one.num_bytes
    return chosen if num_bytes >= needed_bytes else None


def idle_until(resident: Resident) -> float:
    """When its idle time is over, should nobody need it before; `inf`: never. Drafters stay as long as a model drafts with them."""
    if resident.is_busy or resident.is_pinned or resident.is_drafter or resident.idle_unload_seconds is None:
        return inf
    return resident.rested_at + resident.idle_unload_seconds
