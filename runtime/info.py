"""What can an app learn about its models and queues? Frozen snapshots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from runtime.actors.lifecycle import Health
from runtime.memory.keeper import MemoryStats
from runtime.protocol.events import ModelFacts, Phase
from runtime.scheduler.stats import SchedulerStats

ModelState = Literal[
    "spawned", "connected", "loading", "ready", "draining", "stopped", "dead", "backoff", "failed", "registered", "unloaded"
]
"""The states of a worker (see `runtime.actors.lifecycle`), and of a name without any: never loaded yet, or not now."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """One loaded model, or one of its replicas, the second of which is named "name#2"; or a known name that no worker runs for.
    What only loading reveals is None until it was ready once; `pid` is None while no process runs. While a model is being swapped,
    its old and its new workers are listed, under the same name.

    incarnation: the n-th process of this load, from 1. restarts: how often it was started again.
    memory_bytes: resident size of its process by its last heartbeat, 0 before. weights_bytes: of its parameters.
    facts: all that its last load revealed.
    """

    name: str
    state: ModelState
    pid: int | None
    incarnation: int
    restarts: int
    path: str
    memory_bytes: int
    kind: Literal["lm", "fake"] | None
    model_type: str | None
    fingerprint: str | None
    context_length: int | None
    vocabulary_size: int | None
    weights_bytes: int | None
    load_seconds: float | None
    blas: str | None
    facts: ModelFacts | None


@dataclass(frozen=True, slots=True)
class WorkerStats:
    """One worker by its last heartbeat. health: stuck is past what it promised and being ended, gone has no process now.
    malformed_frames: messages from it that were none, over all its incarnations.

    num_device_waits: turns on the device that it had to wait for (`Settings.device_lease`); device_wait_seconds: how long in all.
    """

    model: str
    state: ModelState
    phase: Phase | None
    steps: int
    active_bytes: int
    resident_bytes: int
    restarts: int
    malformed_frames: int
    health: Health
    num_device_waits: int
    device_wait_seconds: float


@dataclass(frozen=True, slots=True)
class RuntimeStats:
    """`scheduler`: queues and running requests by model and tenant, and what shared prefixes gave. `memory`: who has how much."""

    scheduler: SchedulerStats
    workers: tuple[WorkerStats, ...]
    memory: MemoryStats


@dataclass(frozen=True, slots=True)
class Erasure:
    """What `Runtime.erase_tenant` did. num_files: prefix files deleted, of all models."""

    num_files: int
