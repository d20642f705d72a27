"""Frozen settings. Units stand in the names; every value has a default that suits the machine.

All checks happen on construction and raise `InvalidRequest` naming the value, so nothing wrong reaches a worker.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Literal, get_args, get_origin

import msgspec

from runtime.errors import InvalidRequest, shown
from runtime.protocol.commands import FakeScript, Fault


def _require(ok: bool, option: str, got: object, allowed: str) -> None:
    if not ok:
        raise InvalidRequest(option, f"got {shown(got)}; allowed: {allowed}")


MAX_SECONDS = 1e9
MAX_DRAFT_TOKENS = 8
MAX_DEVICE_SLOTS = 64
WEIGHT_RANGE = (1e-6, 1e6)
"""Tags of the fair queue are sums of tokens / weight; within this range they stay exact enough for years."""


def _real(option: str, value: float, low: float, high: float, allowed: str) -> None:
    ok = isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high  # false for NaN
    _require(ok, option, value, allowed)


def _seconds(option: str, value: float) -> None:
    _real(option, value, 1e-9, MAX_SECONDS, f"seconds above 0, at most {MAX_SECONDS:g}")


def _count(option: str, value: int, low: int, high: int) -> None:
    ok = isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
    _require(ok, option, value, f"a whole number from {low} to {high}")


def _text(option: str, value: object, allowed: str) -> None:
    """Not empty, and such that it can be sent: a directory's name that is no UTF-8 reaches Python as half surrogates."""
    _require(isinstance(value, str) and bool(value.strip()), option, value, allowed)
    _require(not any("\ud800" <= character <= "\udfff" for character in str(value)), option, value, f"{allowed}, in UTF-8")


def _directory(option: str, value: object, allowed: str) -> None:
    _require(isinstance(value, str | Path), option, value, allowed)
    _text(option, str(value), allowed)
    _require("\0" not in str(value), option, value, allowed)


def _fields(option: str, value: FakeScript | Fault) -> None:
    """Each field is of its declared type."""
    for field in msgspec.structs.fields(value):
        got = getattr(value, field.name)
        try:
            msgspec.convert(got, field.type, strict=True)
        except (msgspec.ValidationError, TypeError, ValueError, RecursionError) as error:
            words = get_args(field.type) if get_origin(field.type) is Literal else None
            allowed = f"; allowed: {', '.join(map(repr, words))}" if words else f": {error}"
            raise InvalidRequest(f"{option}.{field.name}", f"got {shown(got)}{allowed}") from None


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one Runtime behaves.

    home: directory of fetched models and prefix files; None is the user cache directory (`TROUPE_HOME` overrides).
    blas: "auto" lets CPU workers use OpenBLAS when it is there; "reference" keeps MLX's own, bit-exact over batch shapes.
    compute_threads: BLAS threads of each worker; None divides all cores but one among the loaded models.
    connect_seconds: from spawn to the worker's Hello. load_seconds: from Hello to Ready.
    grace_seconds: each rung of the shutdown ladder (drain, close, SIGTERM, SIGKILL).
    silence_seconds: a worker without any message for that long, beyond the promise of its running step, is replaced.
    max_restarts: of one model's worker within ten minutes; one death more and the model is unavailable until it is loaded again.
    stream_window_tokens: how far a sequence may run ahead of what its client has read.
    prefill_chunk_tokens: tokens in one prefill step, over all rows. prefill_batch_tokens: padded tokens in one prefill batch.
    max_queued: requests waiting for one model, over all tenants.
    memory_budget_bytes: for all workers together: weights, caches, prefixes; None is three quarters of the machine's memory. A load
    that does not fit has idle models evicted, waits at most memory_wait_seconds for busy ones, and is refused with `MemoryShort`.
    device_lease: how many workers may be inside a step on the device at once; None is no bound, "auto" is 1 on macOS and None
    elsewhere.
    prefix_memory_bytes: for prefixes kept in the workers' memory, divided among the loaded models; None is a sixteenth of the
    machine's memory, 0 keeps none. prefix_disk_bytes: for prefix files of all models and tenants under `home`; None is a tenth
    of what is free on that disk at the start but at most 32 GiB, 0 writes and reads none. prefix_free_bytes: left free on the disk.
    """

    home: Path | None = None
    blas: Literal["auto", "reference"] = "auto"
    compute_threads: int | None = None
    connect_seconds: float = 30.0
    load_seconds: float = 600.0
    grace_seconds: float = 5.0
    silence_seconds: float = 30.0
    max_restarts: int = 4
    stream_window_tokens: int = 256
    prefill_chunk_tokens: int = 512
    prefill_batch_tokens: int = 4096
    max_queued: int = 1024
    device_lease: int | Literal["auto"] | None = "auto"
    memory_budget_bytes: int | None = None
    memory_wait_seconds: float = 30.0
    prefix_memory_bytes: int | None = None
    prefix_disk_bytes: int | None = None
    prefix_free_bytes: int = 1 << 30

    def __post_init__(self) -> None:
        if self.home is not None:
            _directory("home", self.home, "a directory, or None")
        _require(self.blas in ("auto", "reference"), "blas", self.blas, "'auto', 'reference'")
        for name in ("connect_seconds", "load_seconds", "grace_seconds", "silence_seconds"):
            _seconds(name, getattr(self, name))
        if self.compute_threads is not None:
            _count("compute_threads", self.compute_threads, 1, 1024)
        _count("max_restarts", self.max_restarts, 0, 1 << 20)
        _count("stream_window_tokens", self.stream_window_tokens, 1, 1 << 20)
        _count("prefill_chunk_tokens", self.prefill_chunk_tokens, 1, 1 << 20)
        _count("prefill_batch_tokens", self.prefill_batch_tokens, 1, 1 << 24)
        _count("max_queued", self.max_queued, 1, 1 << 20)
        if self.device_lease is not None and self.device_lease != "auto":
            is_count = isinstance(self.device_lease, int) and not isinstance(self.device_lease, bool)
            ok = is_count and 1 <= self.device_lease <= MAX_DEVICE_SLOTS
            _require(ok, "device_lease", self.device_lease, f"'auto', None, or a whole number from 1 to {MAX_DEVICE_SLOTS}")
        for name in ("prefix_memory_bytes", "prefix_disk_bytes"):
            if getattr(self, name) is not None:
                _count(name, getattr(self, name), 0, 1 << 50)
        if self.memory_budget_bytes is not None:
            _count("memory_budget_bytes", self.memory_budget_bytes, 1 << 20, 1 << 50)
        _real("memory_wait_seconds", self.memory_wait_seconds, 0, MAX_SECONDS, f"seconds from 0 to {MAX_SECONDS:g}")
        _count("prefix_free_bytes", self.prefix_free_bytes, 0, 1 << 50)

    def home_directory(self) -> Path:
        """Where fetched models and prefix files live. Not created here."""
        if self.home is not None:
            return Path(self.home).expanduser()
        override = os.environ.get("TROUPE_HOME")
        if override:
            return Path(override).expanduser()
        import platformdirs  # light, and only needed for the default

        return Path(platformdirs.user_cache_dir("mlx-troupe"))


REPLICA_NAME = re.compile(r"#\d+(\.\d+)?$")
"""Names of this kind are given to the second and later replicas of a model, and to workers that were swapped in."""


class ModelSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One model to load under a name.

    path: a checkpoint directory, a hub id ("owner/name"), or the name of a fetched model.
    kind: "auto" or "lm" for mlx-lm checkpoints; "fake" is the deterministic engine of `runtime.testing`.
    max_slots: sequences decoding at once. max_context_tokens: a lower bound than the checkpoint's own.
    replicas: workers of this model, each with weights, memory and slots of its own; requests go where a slot is free, and those of
    one that dies go on in the others at once. A drafter drafts with its first replica.
    drafter: for speculative decoding, the name of another model in the same Runtime with the same vocabulary, loaded before or
    after; or "lookup", which proposes what followed the same words before in prompt and answer. The tokens stay the same, whatever
    it proposes. draft_tokens: proposals a round; "auto" measures and chooses, 0 included. draft_ahead: whether to draft while the
    target verifies; "auto" where it promises a gain.
    pin: it is neither unloaded when idle nor evicted when memory is short. idle_unload_seconds: once none of its requests has been
    under way for so long, its workers end; the next request loads it again. None: it stays.
    """

    name: str
    path: str | Path = ""
    kind: Literal["auto", "lm", "fake"] = "auto"
    max_slots: int = 16
    max_context_tokens: int | None = None
    trust_remote_code: bool = False
    revision: str | None = None
    compute_threads: int | None = None
    fake: FakeScript | None = None
    drafter: str | None = None
    draft_tokens: int | Literal["auto"] = "auto"
    draft_ahead: bool | Literal["auto"] = "auto"
    replicas: int = 1
    pin: bool = False
    idle_unload_seconds: float | None = None

    def __post_init__(self) -> None:
        _text("name", self.name, "a non-empty string")
        _require(not REPLICA_NAME.search(self.name), "name", self.name, "a name that does not end in '#' and a number")
        _count("replicas", self.replicas, 1, 64)
        if self.drafter is not None:
            _text("drafter", self.drafter, "another model's name, 'lookup', or None")
            _require(self.drafter != self.name, "drafter", self.drafter, "another model than itself, 'lookup', or None")
        if self.draft_tokens != "auto":
            _count("draft_tokens", self.draft_tokens, 1, MAX_DRAFT_TOKENS)
        _require(self.draft_ahead in ("auto", True, False), "draft_ahead", self.draft_ahead, "'auto', True or False")
        _require(self.kind in ("auto", "lm", "fake"), "kind", self.kind, "'auto', 'lm', 'fake'")
        fits = isinstance(self.fake, FakeScript) if self.kind == "fake" else self.fake is None
        _require(fits, "fake", self.fake, "a FakeScript exactly when kind='fake'")
        if self.fake is not None:
            _fields("fake", self.fake)
            for index, fault in enumerate(self.fake.faults):
                _fields(f"fake.faults[{index}]", fault)
        if self.kind != "fake" or self.path != "":
            _directory("path", self.path, "a directory, a hub id, or a fetched model's name")
        _require(isinstance(self.trust_remote_code, bool), "trust_remote_code", self.trust_remote_code, "True or False")
        if self.revision is not None:
            _text("revision", self.revision, "a branch, tag or commit of the hub, or None")
        _require(isinstance(self.pin, bool), "pin", self.pin, "True or False")
        if self.idle_unload_seconds is not None:
            _seconds("idle_unload_seconds", self.idle_unload_seconds)
        _count("max_slots", self.max_slots, 1, 256)
        if self.max_context_tokens is not None:
            _count("max_context_tokens", self.max_context_tokens, 2, 1 << 24)
        if self.compute_threads is not None:
            _count("compute_threads", self.compute_threads, 1, 1024)


class TenantSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tenant's share.

    weight: tokens it may take relative to others when all want more, from 0.000001 to 1000000. max_running and max_queued
    count its requests. prefix_disk_bytes: most that its prefix files may take; None leaves it to `Settings.prefix_disk_bytes`.
    may_share: its requests may ask for cache_scope="shared", and so read and feed prefixes that all such tenants see.
    """

    weight: float = 1.0
    max_running: int = 8
    max_queued: int = 64
    prefix_disk_bytes: int | None = None
    may_share: bool = False

    def __post_init__(self) -> None:
        low, high = WEIGHT_RANGE
        _real("weight", self.weight, low, high, f"a number from {low:f} to {high:.0f}")
        _count("max_running", self.max_running, 1, 4096)
        _count("max_queued", self.max_queued, 0, 1 << 20)
        if self.prefix_disk_bytes is not None:
            _count("prefix_disk_bytes", self.prefix_disk_bytes, 0, 1 << 50)
        _require(isinstance(self.may_share, bool), "may_share", self.may_share, "True or False")
