"""Names for the numbers and strings that identify things on the wire."""

from __future__ import annotations

from typing import NewType

ModelName = NewType("ModelName", str)
TenantId = NewType("TenantId", str)
RequestId = NewType("RequestId", int)
"""Unique within one Runtime, never reused."""
SequenceId = NewType("SequenceId", int)
"""Unique within one Runtime, never reused: a late message about a released sequence can harm nobody."""
Incarnation = NewType("Incarnation", int)
"""The n-th process of a worker, from 1."""
