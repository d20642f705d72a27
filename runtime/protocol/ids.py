"""Names for the numbers and strings that identify things on the wire."""

from __future__ import annotations

import re
from typing import NamedTuple, NewType

ModelName = NewType("ModelName", str)
TenantId = NewType("TenantId", str)
RequestId = NewType("RequestId", int)
"""Unique within one Runtime, never reused."""
SequenceId = NewType("SequenceId", int)
"""Unique within one Runtime, never reused: a late message about a released sequence can harm nobody."""
Incarnation = NewType("Incarnation", int)
"""The n-th process of a worker, from 1."""

_WORKER_NAME = re.compile(r"#(\d+)\.\d+$")


def worker_name(model: str, replica: int, generation: int) -> ModelName:
    """The name of one worker: the model's own for the first; "chat#2" is its second replica, "chat#2.3" that of its third weights.

    replica, generation: from 1; each `Runtime.swap` makes a new generation.
    """
    if generation == 1:
        return ModelName(model if replica == 1 else f"{model}#{replica}")
    return ModelName(f"{model}#{replica}.{generation}")


def public_name(worker: str) -> ModelName:
    """What apps are shown: the worker's name without its generation, so that a swap changes no name."""
    found = _WORKER_NAME.search(worker)
    return worker_name(worker[: found.start()], int(found[1]), 1) if found else ModelName(worker)


class Holder(NamedTuple):
    """One worker over all its incarnations, apart from an earlier one of the same name that is just ending."""

    model: ModelName
    serial: int
