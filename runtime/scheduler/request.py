"""Request and Sequence: what a client asked and the token series made for it; their states and allowed moves.

Also the values a client's stream receives (`Piece`, `Timings`, `Outcome`). Who moves a record, and when, is in
book.py, placement.py and progress.py; every move goes through `move_request` or `move_sequence`, which check the tables.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Literal

import msgspec

from runtime.errors import TroupeError
from runtime.prefix.hashing import BlockHash, Scope, Secret
from runtime.prefix.plans import Plan
from runtime.protocol.commands import Prompt, Sampling
from runtime.protocol.events import FinishReason, TokenLogprob
from runtime.protocol.ids import ModelName, RequestId, SequenceId, TenantId
from runtime.protocol.tokens import TokenIds

if TYPE_CHECKING:
    from runtime.scheduler.fairness import Flow
    from runtime.scheduler.pairing import Member
    from runtime.scheduler.prefill import Batch

Priority = Literal["interactive", "background"]


class IllegalMove(RuntimeError):
    """A state change that the tables below do not allow: a fault of the scheduler itself."""


class RequestState(Enum):
    QUEUED = "queued"
    PREPARING = "preparing"
    """The worker renders and tokenizes it, or has done so and no slot was free yet."""
    PREFILLING = "prefilling"
    RUNNING = "running"
    """At least one of its sequences has been prefilled."""
    REPLAYING = "replaying"
    """It had started and lost its worker; it goes on in the next one."""
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"


ENDED = frozenset({RequestState.FINISHED, RequestState.CANCELLED, RequestState.FAILED})

REQUEST_MOVES: dict[RequestState, frozenset[RequestState]] = {
    RequestState.QUEUED: frozenset({RequestState.PREPARING, RequestState.CANCELLED, RequestState.FAILED}),
    RequestState.PREPARING: frozenset({RequestState.PREFILLING, RequestState.QUEUED, RequestState.CANCELLED, RequestState.FAILED}),
    RequestState.PREFILLING: frozenset({RequestState.RUNNING, RequestState.REPLAYING, RequestState.CANCELLED, RequestState.FAILED}),
    RequestState.RUNNING: frozenset({RequestState.FINISHED, RequestState.REPLAYING, RequestState.CANCELLED, RequestState.FAILED}),
    RequestState.REPLAYING: frozenset({RequestState.PREFILLING, RequestState.QUEUED, RequestState.CANCELLED, RequestState.FAILED}),
    RequestState.FINISHED: frozenset(),
    RequestState.CANCELLED: frozenset(),
    RequestState.FAILED: frozenset(),
}


class SequenceState(Enum):
    WAITING = "waiting"
    """Has no slot and is unknown to the worker: not yet, or not any more."""
    PREFILLING = "prefilling"
    DECODING = "decoding"
    PARKED = "parked"
    """Stopped in its slot at its limit, until its client reads on."""
    LEAVING = "leaving"
    """Preempted; holds its slot until the worker confirms `Released`, and then waits for another."""
    RELEASING = "releasing"
    """Over for us; holds its slot until the worker confirms `Released`."""
    RELEASED = "released"


_WAYS_OUT = (SequenceState.WAITING, SequenceState.LEAVING, SequenceState.RELEASING)

SEQUENCE_MOVES: dict[SequenceState, frozenset[SequenceState]] = {
    SequenceState.WAITING: frozenset({SequenceState.PREFILLING, SequenceState.RELEASED}),
    SequenceState.PREFILLING: frozenset({SequenceState.DECODING, *_WAYS_OUT}),
    SequenceState.DECODING: frozenset({SequenceState.PARKED, *_WAYS_OUT}),
    SequenceState.PARKED: frozenset({SequenceState.DECODING, *_WAYS_OUT}),
    SequenceState.LEAVING: frozenset({SequenceState.WAITING, SequenceState.RELEASING}),
    SequenceState.RELEASING: frozenset({SequenceState.RELEASED}),
    SequenceState.RELEASED: frozenset(),
}


@dataclass(frozen=True, slots=True)
class Request:
    """What a client asked, validated by the host; never changes.

    `max_tokens` per sequence. `num_sequences`: sequence i draws with `sequence_seed(sampling.seed, i)`. `windowed`: the client
    iterates, so sequences run at most `Settings.stream_window_tokens` ahead of what it has read; otherwise freely.
    scope: whose prefixes it may use, None for none at all (cache="off"). keeps_prefix: False for cache="read-only".
    prefill_only: nothing is generated (max_tokens is 0); what was computed is pinned under the request's id until `ReleasePrefix`,
    and can be continued at each of `boundaries` (absolute positions, ascending).
    speculate: False for never, True to be refused where the model has no drafter, None for wherever it pays.
    """

    id: RequestId
    tenant: TenantId
    model: ModelName
    prompt: Prompt
    sampling: Sampling
    max_tokens: int
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    num_sequences: int = 1
    priority: Priority = "interactive"
    deadline_seconds: float | None = None
    windowed: bool = True
    scope: Scope | None = None
    keeps_prefix: bool = True
    prefill_only: bool = False
    boundaries: tuple[int, ...] = ()
    speculate: bool | None = None


def sequence_seed(seed: int, number: int) -> int:
    """The 64-bit seed with which sequence `number` of a request draws: `seed` itself for the first, a hash for the others."""
    if number == 0:
        return seed
    packed = struct.pack("<QQ", seed & (2**64 - 1), number)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8, person=b"sequence").digest(), "little")


@dataclass(slots=True, eq=False)
class Sequence:
    """One token series. `committed` is the replay log: exactly what the client's stream holds or will hold.

    Lengths are absolute (prompt included). `charged_length`: up to which its tenant has been charged; 0 before its first slot.
    `num_read`: committed tokens its client has read. `placed_at`: when it got its slot. `num_starts`: slots it ever got;
    `is_returning`: it lost one, and goes before those that never had any.
    Of prefixes: `plan`: the files named for it; `expected_length`: how much was then expected to be restored, `restored_length`:
    how much was; `cached_length`: the same at its first start, which is what its client is told. `awaits_restored`: it has a
    PrefixUse and no Restored came yet; until then its leases run. `keeps`: memory is told to keep it, so others may follow it.
    `awaited_length`: what it last followed another for, 0 if nobody.
    Of speculation: `member`: its part in the pairing, while it runs; tokens proposed for it, and of them those committed.
    """

    id: SequenceId
    number: int
    record: RequestRecord = field(repr=False)
    prompt_length: int
    max_length: int
    state: SequenceState = SequenceState.WAITING
    committed: list[int] = field(default_factory=list)
    limit: int = 0
    num_read: int = 0
    charged_length: int = 0
    placed_at: float = 0.0
    num_starts: int = 0
    is_returning: bool = False
    batch: Batch | None = None
    finish: FinishReason | None = None
    plan: Plan | None = None
    expected_length: int = 0
    restored_length: int = 0
    cached_length: int | None = None
    awaits_restored: bool = False
    keeps: bool = False
    awaited_length: int = 0
    member: Member | None = field(default=None, repr=False)
    num_proposed: int = 0
    num_accepted: int = 0

    @property
    def length(self) -> int:
        return self.prompt_length + len(self.committed)

    @property
    def is_going(self) -> bool:
        """Its worker has been told to forget it, and what that still says of it counts no more."""
        return self.state in (SequenceState.LEAVING, SequenceState.RELEASING)

    @property
    def leads(self) -> bool:
        """Whether others may wait for what it computes."""
        return self.keeps and self.state is SequenceState.PREFILLING and self.record.secret is not None


def known_tokens(sequence: Sequence) -> TokenIds:
    """Prompt and output so far of a prepared request's sequence."""
    prompt = sequence.record.prompt_tokens
    assert prompt is not None
    return TokenIds([*prompt, *sequence.committed]) if sequence.committed else prompt


@dataclass(slots=True, eq=False)
class Following:
    """Its waiting sequences are held back while `leader` computes `length` tokens of their prompt, of which `available` can be had
    already; `num_hints`: the last of the model's hints that this takes into account."""

    leader: Sequence
    length: int
    available: int
    num_hints: int = 0


@dataclass(slots=True, eq=False)
class RequestRecord:
    """A request known to the scheduler, from its acceptance until the worker holds nothing of it any more.

    `prompt_tokens` is None until prepared; then there is one Sequence per number. `windowed` starts as the request's own and
    ends with `Unwindow`. `replica`: the one of its model's workers that it waits for or is served by. Times are in the scheduler's
    clock. `num_crashes`: workers that died with it aboard since it last made progress, from `crash_length` committed tokens of all
    its sequences.
    Of prefixes: `scope` is the request's own until that is erased. `secret`, `chain`: known once prepared, if its model's prefixes
    can be kept; None and empty otherwise. `is_unpinned`: whatever is pinned for it is not wanted any more.
    """

    request: Request
    replica: ModelName
    flow: Flow = field(repr=False)
    submitted_at: float
    windowed: bool
    state: RequestState = RequestState.QUEUED
    prompt_tokens: TokenIds | None = None
    warnings: tuple[str, ...] = ()
    fingerprint: str = ""
    sequences: list[Sequence] = field(default_factory=list)
    num_unfinished: int = 0
    started_at: float | None = None
    first_token_at: float | None = None
    prefill_seconds: float | None = None
    restore_seconds: float | None = None
    scope: Scope | None = None
    secret: Secret | None = field(default=None, repr=False)
    chain: list[BlockHash] = field(default_factory=list, repr=False)
    following: Following | None = field(default=None, repr=False)
    pinned_length: int = 0
    is_unpinned: bool = False
    num_crashes: int = 0
    crash_length: int = 0

    @property
    def has_ended(self) -> bool:
        return self.state in ENDED

    @property
    def has_started(self) -> bool:
        """Whether a sequence of it has got a slot."""
        return self.started_at is not None


def move_request(record: RequestRecord, to: RequestState) -> None:
    """:raises IllegalMove: REQUEST_MOVES does not have it."""
    if to not in REQUEST_MOVES[record.state]:
        raise IllegalMove(f"request {record.request.id}: {record.state.name} to {to.name}")
    record.state = to


def move_sequence(sequence: Sequence, to: SequenceState) -> None:
    """:raises IllegalMove: SEQUENCE_MOVES does not have it."""
    if to not in SEQUENCE_MOVES[sequence.state]:
        raise IllegalMove(f"sequence {sequence.id}: {sequence.state.name} to {to.name}")
    sequence.state = to


# -- what a client's stream receives ----------------------------------------------------------------------


class Piece(msgspec.Struct, frozen=True):
    """New committed tokens of one sequence and the text that may be shown by now. (A Struct: one is made per token.)"""

    number: int
    tokens: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...]
    finish: FinishReason | None
    matched_stop: str | None


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds since the request was submitted; None when that point was never reached.

    queue: until its first sequence got a slot; first_token: until its first token. prefill and restore are durations of the slowest
    of its sequences: inside its prefill steps, and of bringing its prefix in from files.
    """

    queue_seconds: float | None
    prefill_seconds: float | None
    first_token_seconds: float | None
    total_seconds: float
    restore_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a request ended: by itself (`error` None), cancelled, or with an error. `prompt_tokens`: its tokens once prepared.

    The error is this request's own object, never shared with another's. cached_tokens: by sequence number, how many of its prompt
    were restored rather than computed. pinned_length: of a prefill_only request, how far memory holds it pinned. proposed_tokens,
    accepted_tokens: by sequence number, tokens proposed for it by speculation, and of them those that stood.
    """

    state: Literal["finished", "cancelled", "failed"]
    prompt_tokens: TokenIds
    timings: Timings
    fingerprint: str
    warnings: tuple[str, ...] = ()
    error: TroupeError | None = None
    cached_tokens: tuple[int, ...] = ()
    pinned_length: int = 0
    proposed_tokens: tuple[int, ...] = ()
    accepted_tokens: tuple[int, ...] = ()
