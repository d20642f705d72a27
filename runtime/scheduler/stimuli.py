"""Everything that can happen to the scheduler (`Stimulus`) and everything it can want (`Instruction`).

`SchedulerState.handle(stimulus, now) -> list[Instruction]` is pure: no clock, no I/O, no task. `now` is in seconds of a
monotonic clock chosen by the caller.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from runtime.config import TenantSpec
from runtime.errors import ExitReport, TroupeError
from runtime.prefix.hashing import BlockHash, Scope
from runtime.prefix.plans import Entry
from runtime.protocol.commands import AnyCommand
from runtime.protocol.events import AnyEvent, ModelFacts
from runtime.protocol.ids import Incarnation, ModelName, RequestId, TenantId
from runtime.scheduler.request import Outcome, Piece, Request

# -- stimuli: from clients ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Submit:
    """Answered in the same call: an `Accept`, or a `Reject` with the coded error."""

    request: Request


@dataclass(frozen=True, slots=True)
class Cancel:
    """The client left. Unknown or ended requests are ignored."""

    request: RequestId


@dataclass(frozen=True, slots=True)
class Read:
    """The client has read sequence `number` up to `num_tokens` committed tokens (absolute count since its first)."""

    request: RequestId
    number: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Unwindow:
    """The client no longer iterates but awaits the completion: let all its sequences run freely."""

    request: RequestId


@dataclass(frozen=True, slots=True)
class TenantSet:
    tenant: TenantId
    spec: TenantSpec


# -- stimuli: from the supervisor ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ModelAdded:
    """From now on requests for it are queued, though its worker may still be loading.

    group: the name that apps use, when this is one of several replicas; None: its own.
    drafter: another model's name, "lookup", or None. draft_tokens: of each draft, None for as many as pay. draft_ahead: whether to
    draft while the target verifies, None where it pays.
    """

    model: ModelName
    max_slots: int
    drafter: str | None = None
    draft_tokens: int | None = None
    draft_ahead: bool | None = None
    group: ModelName | None = None


@dataclass(frozen=True, slots=True)
class WorkerUp:
    model: ModelName
    incarnation: Incarnation
    facts: ModelFacts


@dataclass(frozen=True, slots=True)
class MemorySet:
    """The model's sequences may hold so many tokens together from now on; None: nobody counts. Also before its worker is up."""

    model: ModelName
    max_tokens: int | None


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """`error` is what its callers get (WorkerCrashed, WorkerUnresponsive, ...). `restarting` tells whether it will come back."""

    model: ModelName
    incarnation: Incarnation
    error: TroupeError
    report: ExitReport | None
    restarting: bool


@dataclass(frozen=True, slots=True)
class ModelRemoved:
    """Unloaded, or its load failed: all its requests end with `error`."""

    model: ModelName
    error: TroupeError


@dataclass(frozen=True, slots=True)
class GroupsExchanged:
    """They exchange their replicas: new requests for `group` go to those that `other` had. Requests stay where they are."""

    group: ModelName
    other: ModelName


@dataclass(frozen=True, slots=True)
class WorkerSaid:
    """One event of a ready worker. Events of another than the current incarnation are ignored."""

    model: ModelName
    incarnation: Incarnation
    event: AnyEvent


# -- stimuli: of prefixes -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReleasePrefix:
    """What a prefill_only request pinned is needed no more. Unknown ones are fine."""

    request: RequestId


@dataclass(frozen=True, slots=True)
class FilesSeen:
    """What the directory of prefix files was found to hold, beside what is known; `free_bytes` on its disk.

    added: least recently used first. used: by others. gone: deleted by others.
    """

    added: tuple[Entry, ...]
    used: tuple[BlockHash, ...]
    gone: tuple[BlockHash, ...]
    free_bytes: int


@dataclass(frozen=True, slots=True)
class EraseTenant:
    """The tenant's key is destroyed: forget all its prefixes, here and in the workers. scope: the one it had."""

    tenant: TenantId
    scope: Scope


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed (a WakeAt is due)."""


Stimulus = (
    Submit
    | Cancel
    | Read
    | Unwindow
    | TenantSet
    | ModelAdded
    | WorkerUp
    | MemorySet
    | WorkerLost
    | ModelRemoved
    | GroupsExchanged
    | WorkerSaid
    | ReleasePrefix
    | FilesSeen
    | EraseTenant
    | Tick
)

# -- instructions -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Accept:
    request: RequestId


@dataclass(frozen=True, slots=True)
class Reject:
    request: RequestId
    error: TroupeError


class Send(msgspec.Struct, frozen=True):
    model: ModelName
    incarnation: Incarnation
    command: AnyCommand


class Deliver(msgspec.Struct, frozen=True):
    """(A Struct: one is made per token.)"""

    request: RequestId
    piece: Piece


@dataclass(frozen=True, slots=True)
class End:
    """Last instruction about a request's stream. (The record itself lives on until the worker confirms `Released`.)"""

    request: RequestId
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class WakeAt:
    """Handle a `Tick` no later than `when`; replaces an earlier WakeAt."""

    when: float


@dataclass(frozen=True, slots=True)
class Breach:
    """The worker said something that no state of ours allows: it must be ended and replaced."""

    model: ModelName
    incarnation: Incarnation
    what: str


@dataclass(frozen=True, slots=True)
class DeleteFiles:
    """These prefix files must go; they are forgotten already."""

    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class MarkUsed:
    """These prefix files were hit: others, and later processes, are to know."""

    entries: tuple[Entry, ...]


Instruction = Accept | Reject | Send | Deliver | End | WakeAt | Breach | DeleteFiles | MarkUsed
