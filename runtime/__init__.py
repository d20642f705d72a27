"""mlx-troupe: several language models side by side, each in its own process, driven from async Python.

    async with runtime.Runtime() as rt:
        await rt.load(runtime.ModelSpec("chat", path="…"))
        answer = await rt.tenant("notes").generate("chat", prompt="The capital of France is", max_tokens=8)

The names below are the whole public face. Each is imported when it is first used: a worker process, whose package is this
one too, needs none of them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runtime.client import Stream, Tenant
    from runtime.completion import Completion, Finished, StreamEvent, TextDelta, Usage
    from runtime.config import ModelSpec, Settings, TenantSpec
    from runtime.errors import (
        AdmissionError,
        ContextTooLong,
        DeadlineExceeded,
        EraseFailed,
        ExitReport,
        FetchFailed,
        GenerationFailed,
        InvalidRequest,
        MemoryShort,
        ModelError,
        ModelLoadFailed,
        ModelNotLoaded,
        ModelUnavailable,
        Overloaded,
        ProtocolMismatch,
        RequestError,
        RunDirectoryError,
        RuntimeClosed,
        TenantLimitReached,
        TroupeError,
        WorkerCrashed,
        WorkerError,
        WorkerUnresponsive,
    )
    from runtime.handle import PrefixHandle
    from runtime.host import Runtime
    from runtime.info import Erasure, ModelInfo, ModelState, RuntimeStats, WorkerStats
    from runtime.memory.keeper import MemoryStats, ModelMemory
    from runtime.memory.plan import ModelPlan, Plan
    from runtime.options import GenerateOptions, PromptOptions
    from runtime.prefill_options import PrefillOptions
    from runtime.protocol.events import Capabilities, ModelFacts, PrefixFacts, TokenLogprob, WorkerReport
    from runtime.scheduler.drafting import DraftStats
    from runtime.scheduler.request import Timings
    from runtime.scheduler.stats import ModelStats, PairingStats, PrefixStats, SchedulerStats, TenantStats
    from runtime.watch import (
        LoadProgress,
        ModelEnded,
        ModelStateChanged,
        ModelSwapped,
        RequestEnded,
        RequestQueued,
        Watch,
        WatchEvent,
        WorkerDied,
        WorkerHealthChanged,
    )

_HOMES = {
    "client": ("Stream", "Tenant"),
    "completion": ("Completion", "Finished", "StreamEvent", "TextDelta", "Usage"),
    "config": ("ModelSpec", "Settings", "TenantSpec"),
    "errors": (
        "AdmissionError",
        "ContextTooLong",
        "DeadlineExceeded",
        "EraseFailed",
        "ExitReport",
        "FetchFailed",
        "GenerationFailed",
        "InvalidRequest",
        "MemoryShort",
        "MemoryStats",
        "ModelMemory",
        "ModelPlan",
        "Plan",
        "MemoryShort",
        "ModelError",
        "ModelLoadFailed",
        "ModelNotLoaded",
        "ModelUnavailable",
        "Overloaded",
        "ProtocolMismatch",
        "RequestError",
        "RunDirectoryError",
        "RuntimeClosed",
        "TenantLimitReached",
        "TroupeError",
        "WorkerCrashed",
        "WorkerError",
        "WorkerUnresponsive",
    ),
    "handle": ("PrefixHandle",),
    "host": ("Runtime",),
    "memory.keeper": ("MemoryStats", "ModelMemory"),
    "memory.plan": ("ModelPlan", "Plan"),
    "info": ("Erasure", "ModelInfo", "ModelState", "RuntimeStats", "WorkerStats"),
    "options": ("GenerateOptions", "PromptOptions"),
    "prefill_options": ("PrefillOptions",),
    "protocol.events": ("Capabilities", "ModelFacts", "PrefixFacts", "TokenLogprob", "WorkerReport"),
    "scheduler.request": ("Timings",),
    "scheduler.drafting": ("DraftStats",),
    "scheduler.stats": ("ModelStats", "PairingStats", "PrefixStats", "SchedulerStats", "TenantStats"),
    "watch": (
        "LoadProgress",
        "ModelEnded",
        "ModelStateChanged",
        "ModelSwapped",
        "RequestEnded",
        "RequestQueued",
        "Watch",
        "WatchEvent",
        "WorkerDied",
        "WorkerHealthChanged",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "AdmissionError",
    "Capabilities",
    "Completion",
    "ContextTooLong",
    "DeadlineExceeded",
    "DraftStats",
    "EraseFailed",
    "Erasure",
    "ExitReport",
    "FetchFailed",
    "Finished",
    "GenerateOptions",
    "GenerationFailed",
    "InvalidRequest",
    "LoadProgress",
    "MemoryShort",
    "MemoryStats",
    "ModelEnded",
    "ModelError",
    "ModelFacts",
    "ModelInfo",
    "ModelLoadFailed",
    "ModelMemory",
    "ModelNotLoaded",
    "ModelPlan",
    "ModelSpec",
    "ModelState",
    "ModelStateChanged",
    "ModelStats",
    "ModelSwapped",
    "ModelUnavailable",
    "Overloaded",
    "PairingStats",
    "Plan",
    "PrefillOptions",
    "PrefixFacts",
    "PrefixHandle",
    "PrefixStats",
    "PromptOptions",
    "ProtocolMismatch",
    "RequestEnded",
    "RequestError",
    "RequestQueued",
    "RunDirectoryError",
    "Runtime",
    "RuntimeClosed",
    "RuntimeStats",
    "SchedulerStats",
    "Settings",
    "Stream",
    "StreamEvent",
    "Tenant",
    "TenantLimitReached",
    "TenantSpec",
    "TenantStats",
    "TextDelta",
    "Timings",
    "TokenLogprob",
    "TroupeError",
    "Usage",
    "Watch",
    "WatchEvent",
    "WorkerCrashed",
    "WorkerDied",
    "WorkerError",
    "WorkerHealthChanged",
    "WorkerReport",
    "WorkerStats",
    "WorkerUnresponsive",
]


def __getattr__(name: str) -> object:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
