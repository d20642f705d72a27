"""What does an actor look like to an app? `ModelInfo` and `WorkerStats`, made of it."""

from __future__ import annotations

from runtime.actors.worker_actor import WorkerActor
from runtime.config import ModelSpec
from runtime.info import ModelInfo, WorkerStats


def model_info(actor: WorkerActor) -> ModelInfo:
    facts, beat = actor.facts, actor.last_beat
    return ModelInfo(
        name=actor.public_name,
        state=actor.state.value,
        pid=actor.pid,
        incarnation=actor.incarnation,
        restarts=actor.num_restarts,
        path=actor.load.path,
        memory_bytes=beat.resident_bytes if beat is not None else 0,
        kind=facts.kind if facts is not None else None,
        model_type=facts.model_type if facts is not None else None,
        fingerprint=facts.fingerprint if facts is not None else None,
        context_length=facts.context_length if facts is not None else None,
        vocabulary_size=facts.vocabulary_size if facts is not None else None,
        weights_bytes=facts.weights_bytes if facts is not None else None,
        load_seconds=facts.load_seconds if facts is not None else None,
        blas=facts.blas if facts is not None else None,
        facts=facts,
    )


def absent_info(spec: ModelSpec, *, was_loaded: bool) -> ModelInfo:
    """Of a name that no worker runs for."""
    return ModelInfo(
        name=spec.name,
        state="unloaded" if was_loaded else "registered",
        pid=None,
        incarnation=0,
        restarts=0,
        path=str(spec.path),
        memory_bytes=0,
        kind=None,
        model_type=None,
        fingerprint=None,
        context_length=None,
        vocabulary_size=None,
        weights_bytes=None,
        load_seconds=None,
        blas=None,
        facts=None,
    )


def worker_stats(actor: WorkerActor) -> WorkerStats:
    beat = actor.last_beat
    return WorkerStats(
        model=actor.public_name,
        state=actor.state.value,
        phase=beat.phase if beat is not None else None,
        steps=beat.step if beat is not None else 0,
        active_bytes=beat.active_bytes if beat is not None else 0,
        resident_bytes=beat.resident_bytes if beat is not None else 0,
        restarts=actor.num_restarts,
        health=actor.health,
        malformed_frames=actor.num_malformed,
        num_device_waits=beat.num_device_waits if beat is not None else 0,
        device_wait_seconds=beat.device_wait_seconds if beat is not None else 0.0,
    )
